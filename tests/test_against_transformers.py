"""Families of models against transformers: each is a config, with the same logits, gradients and training."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers_families import FAMILIES, SMOLLM2, VOCABULARY, Family, difference, randomize_weights

from tricycle.configs import ModelConfig
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.optimisers import AdamW
from tricycle.pretrained.config_equivalence import differing_fields
from tricycle.pretrained.families import build_model
from tricycle.pretrained.stored_model import StoredModel, StoredTensor
from tricycle.tensor import no_grad
from tricycle_lab.probe import Probe

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_torch_thread")
F = torch.nn.functional

BATCH = 3
TOKENS = 24
AGREED = 2e-5  # rounding makes differences of 2e-6 at most
each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
nightly = pytest.mark.nightly  # each takes minutes


# -------------------------------------------------------------------- models of transformers in Tricycle
def new_hf_model(family: Family, lively: bool = True) -> Any:
    """A model of transformers with random weights: so large, if `lively`, that every part shows in the logits."""
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(family.model_type, **family.hf_fields)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    randomize_weights(model, lively)
    return model


def read(hf_model: Any, part: str = "data") -> GPT:
    """Our model, as it would be read from files of hf_fields; with part="grad" their gradients stand in its weights."""
    tensors = {}
    for name, parameter in hf_model.named_parameters():
        array = getattr(parameter, part).numpy()
        tensors[name] = StoredTensor(array.shape, "F32", lambda array=array: array)
    return build_model(StoredModel(Path("memory"), hf_model.config.to_dict(), tensors))


def a_pair(family: Family, lively: bool = True) -> tuple[GPT, Any]:
    """Our model and hf_fields with the same weights."""
    hf_model = new_hf_model(family, lively)
    return read(hf_model), hf_model


def some_tokens(n_batches: int = 1, vocab_size: int = VOCABULARY, batch: int = BATCH) -> np.ndarray:
    """(n_batches, B, T + 1) ids: text in which each token often decides the next."""
    generator = np.random.default_rng(5)
    tokens = generator.integers(0, vocab_size, (n_batches, batch, TOKENS + 1))
    for t in range(1, TOKENS + 1):
        follows = generator.random((n_batches, batch)) < 0.8
        tokens[..., t] = np.where(follows, (7 * tokens[..., t - 1] + 3) % vocab_size, tokens[..., t])
    return tokens


def tricycle_loss(model: GPT, tokens: np.ndarray) -> Any:
    """Of the next token, a Tensor."""
    return CrossEntropy()(tokens[:, 1:], model(tokens[:, :-1]))


def hf_loss(hf_model: Any, tokens: np.ndarray) -> Any:
    logits = hf_model(torch.from_numpy(tokens[:, :-1].copy())).logits
    return F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(tokens[:, 1:].copy()).flatten())


def worst(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> tuple[float, str]:
    """The largest of all differences, and where it is."""
    assert set(actual) == set(expected)
    return max((difference(array, expected[name]), name) for name, array in actual.items())


# -------------------------------------------------------------------- logits and gradients
def compare_logits(model: GPT, hf_model: Any, tokens: np.ndarray) -> float:
    """The difference of all logits."""
    with torch.no_grad(), no_grad():
        expected = hf_model(torch.from_numpy(tokens)).logits.numpy()
        return difference(model(tokens).array, expected)


def compare_gradients(model: GPT, hf_model: Any, tokens: np.ndarray) -> tuple[float, str]:
    """The worst difference of the gradients of one loss."""
    loss = tricycle_loss(model, tokens)
    expected = hf_loss(hf_model, tokens)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    expected.backward()
    return worst({name: p.grad.array for name, p in model.named_parameters()}, read(hf_model, "grad").state_dict())


@each_family
def test_logits_and_every_gradient_agree(family: Family) -> None:
    model, hf_model = a_pair(family)
    tokens = some_tokens()[0]
    assert compare_logits(model, hf_model, tokens) < AGREED
    by, where = compare_gradients(model, hf_model, tokens)
    assert by < AGREED, where


@each_family
def test_converted_configs_are_equivalent(family: Family) -> None:
    model, _ = a_pair(family)
    assert differing_fields(family.config, model.config) == []


@each_family
def test_each_config_field_changes_the_logits(family: Family) -> None:
    """Otherwise equal logits would not test every field."""
    model, _ = a_pair(family)
    tokens = some_tokens()[0, :, :-1]
    expected = model(tokens).array
    without_effect = []
    for name in telling_fields(family.config):
        try:
            other = GPT(replace(family.config, **{name: getattr(ModelConfig(), name)}))
            other.load_state_dict(model.state_dict())
        except ValueError:  # another shape: seen before anything is computed
            continue
        if difference(other(tokens).array, expected) < 5 * AGREED:
            without_effect.append(name)
    assert without_effect == []


def telling_fields(config: ModelConfig) -> Iterable[str]:
    """Those that are not as in GPT-2, but for the sizes that every model has."""
    default = ModelConfig()
    changed = [field.name for field in fields(config) if getattr(config, field.name) != getattr(default, field.name)]
    return [name for name in changed if name not in ("vocab_size", "context_window", "n_layers")]


# -------------------------------------------------------------------- training
def train_both(model: GPT, hf_model: Any, batches: np.ndarray, learning_rate: float) -> tuple[list[float], list[float]]:
    """An update a batch by AdamW, decay on the same parameters; the losses of Tricycle and of transformers."""
    optimiser = AdamW(learning_rate, (0.9, 0.95), weight_decay=0.1, decays=lambda p: p.ndim > 1)
    parameters = list(hf_model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    hf_optimiser = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), eps=1e-8)
    tricycle_losses, hf_losses = [], []
    for tokens in batches:
        loss = tricycle_loss(model, tokens)
        loss.backward()
        model.update(optimiser)
        tricycle_losses.append(loss.item())

        hf_optimiser.zero_grad()
        expected = hf_loss(hf_model, tokens)
        expected.backward()
        hf_optimiser.step()
        hf_losses.append(expected.item())
    return tricycle_losses, hf_losses


# -------------------------------------------------------------------- probes and precision


@each_family
def test_probe_records_attention_weights_within_the_window(family: Family) -> None:
    config = family.config
    model, _ = a_pair(family)
    tokens = some_tokens()[0, :, :-1]
    with Probe(model) as probe:
        model(tokens)
    for layer in range(config.n_layers):
        weights = probe.weights[f"blocks.{layer}.attention"]
        assert weights.shape == (BATCH, config.n_heads, TOKENS, TOKENS)
        np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-5)
        age = np.subtract.outer(np.arange(TOKENS), np.arange(TOKENS))
        visible = (age >= 0) & (age < (config.window_size(layer) or TOKENS))
        assert np.array_equal((weights > 0).any(axis=(0, 1)), visible)
        assert probe.activations[f"blocks.{layer}"].shape == (BATCH, TOKENS, config.embedding_dim)


@each_family
def test_bfloat16_logits_are_close_to_float32(family: Family) -> None:
    model, _ = a_pair(family)
    tokens = some_tokens()[0]
    expected = model(tokens[:, :-1]).array
    model.use_precision("bfloat16")
    logits = model(tokens[:, :-1])
    assert logits.shape == expected.shape
    assert difference(logits.array, expected) < 0.1
    tricycle_loss(model, tokens).backward()
    assert all(p.grad.shape == p.shape and p.grad.dtype == np.float32 for p in model.parameters())


# -------------------------------------------------------------------- a whole model
@nightly
def test_smollm2_logits_gradients_and_training_agree(capsys: pytest.CaptureFixture) -> None:
    """Compare logits, gradients and twenty training steps at full size."""
    torch.set_num_threads(os.cpu_count() or 1)
    model, hf_model = a_pair(SMOLLM2, lively=False)
    assert model.n_parameters == 134_515_008
    batches = some_tokens(20, SMOLLM2.config.vocab_size, batch=1)
    by_logits = compare_logits(model, hf_model, batches[0])
    by_gradients, where = compare_gradients(model, hf_model, batches[0])
    model.zero_grad()
    hf_model.zero_grad()
    tricycle_losses, hf_losses = train_both(model, hf_model, batches, 1e-4)
    by_losses = np.abs(np.subtract(tricycle_losses, hf_losses)).max()
    expected = read(hf_model).state_dict()
    by_weights = max(np.abs(array - expected[name]).max() for name, array in model.state_dict().items())
    with capsys.disabled():
        print(f"\nlogits {by_logits:.1e}, gradients {by_gradients:.1e} ({where}), relative to the largest")
        first, last = tricycle_losses[0], tricycle_losses[-1]
        print(f"losses {by_losses:.1e}, weights {by_weights:.1e}; loss {first:.3f} to {last:.3f}")
    assert by_logits < 1e-4 and by_gradients < 1e-4
    assert by_losses < 1e-3 and by_weights < 1e-3
