"""Activation patching equals a loop with a Probe, and attribution patching its first-order approximation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tables import bad_input
from test_models import FAMILIES, GEMMA, LLAMA, PARALLEL, TINY, lively
from test_models import KINDS as KINDS_OF_MODELS
from tiny_models import smollm2_file

from tricycle.latent_attention import LatentConfig
from tricycle.layers import Layer
from tricycle.models import GPT
from tricycle.pretrained import load
from tricycle.tensor import no_grad
from tricycle_cli.models import load_model
from tricycle_lab.hooks import add_hook
from tricycle_lab.patching import KINDS, PromptRuns, Prompts, estimate_patches, patch_activations
from tricycle_lab.probe import Probe

CLEAN = [3, 1, 4, 1, 5, 9, 2]
CORRUPTED = [3, 1, 7, 1, 5, 8, 2]
PROMPTS = Prompts(CLEAN, CORRUPTED, (6, 10))
CONFIGS = {"gpt2": TINY, "llama": LLAMA, "gemma 2": GEMMA, "parallel": PARALLEL, "mistral": FAMILIES["mistral"]}
CONFIGS["token shift"] = KINDS_OF_MODELS["rotary, qk norm, relu squared"]
LATENT = {"head_size": 4, "value_size": 6, "latent_size": 5, "rotary_size": 2, "n_layers": 2}
CONFIGS["latent attention"] = LatentConfig(vocab_size=11, context_window=9, embedding_dim=8, n_heads=2, **LATENT)


def metric(model: GPT, tokens: list[int]) -> float:
    with no_grad():
        logits = model(np.array([tokens])).array[0, -1].astype(float)
    return logits[6] - logits[10]


def patch_one(model: GPT, name: str, **selection) -> float:
    """Patch one activation with a Probe and an array."""
    with Probe(model, name) as probe, no_grad():
        recorded = {}
        keep = lambda out: recorded.setdefault("clean", out)
        with probe.replace(name, keep, heads=range(model.config.n_heads) if "heads" in selection else None):
            model(np.array([CLEAN]))
        with probe.replace(name, recorded["clean"].array, **selection):
            patched = metric(model, CORRUPTED)
    start = metric(model, CORRUPTED)
    return (patched - start) / (metric(model, CLEAN) - start)


@pytest.mark.nightly_except(4)
@pytest.mark.parametrize("batch_size", [5, 100])
@pytest.mark.parametrize("name", CONFIGS)
def test_grids_equal_those_of_a_loop(name: str, batch_size: int) -> None:
    model = lively(CONFIGS[name]).eval()
    heads, positions = range(model.config.n_heads), range(len(CLEAN))
    expected = {
        "stream": [[patch_one(model, f"blocks.{i}", positions=t) for t in positions] for i in range(2)],
        "attention": [[patch_one(model, f"blocks.{i}.attention", positions=t) for t in positions] for i in range(2)],
        "mlp": [[patch_one(model, f"blocks.{i}.mlp", positions=t) for t in positions] for i in range(2)],
        "heads": [[patch_one(model, f"blocks.{i}.attention", heads=h) for h in heads] for i in range(2)],
        "heads_by_position": [
            [[patch_one(model, f"blocks.{i}.attention", heads=h, positions=t) for t in positions] for h in heads]
            for i in range(2)
        ],
    }
    assert set(expected) == set(KINDS)
    for kind in KINDS:
        effects = patch_activations(model, PROMPTS, kind, batch_size)
        np.testing.assert_allclose(effects, expected[kind], rtol=1e-4, atol=1e-4, err_msg=kind)
        assert np.ptp(effects) > 0.01


def test_grids_equal_those_of_hooks_in_transformers(tmp_path) -> None:
    """Forward hooks of PyTorch replace the same activations, of a Llama with equal weights."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers_families import FAMILIES as HF_FAMILIES
    from transformers_families import new_hf_model

    family = HF_FAMILIES["Llama"]
    hf_model = new_hf_model(family.model_type, family.hf_fields)
    hf_model.save_pretrained(tmp_path)
    model = load(tmp_path).model
    n_heads, layers = model.config.n_heads, hf_model.model.layers
    size = model.config.channels_per_head

    def run(tokens: list[int], layer: int, heads: bool, change: Any = lambda array: None) -> tuple[float, np.ndarray]:
        """Return the metric, and the activation (T, C) of the layer after `change` has edited it in place."""
        seen = []

        def edit(tensor: Any) -> None:
            change(tensor[0])
            seen.append(tensor[0].numpy().copy())

        if heads:
            handle = layers[layer].self_attn.o_proj.register_forward_pre_hook(lambda _, args: edit(args[0]))
        else:
            hook = lambda _, args, out: edit(out[0] if isinstance(out, tuple) else out)
            handle = layers[layer].register_forward_hook(hook)
        with torch.no_grad():
            logits = hf_model(torch.tensor([tokens])).logits[0, -1]
        handle.remove()
        return float(logits[6] - logits[10]), seen[0]

    for kind, n_columns in (("stream", len(CLEAN)), ("heads", n_heads)):
        expected = np.zeros((len(layers), n_columns))
        for layer in range(len(layers)):
            end, clean = run(CLEAN, layer, kind == "heads")
            start, _ = run(CORRUPTED, layer, kind == "heads")
            for column in range(n_columns):
                index = np.s_[column] if kind == "stream" else np.s_[:, column * size : (column + 1) * size]

                def patch(tensor: Any, index: Any = index, clean: np.ndarray = clean) -> None:
                    tensor[index] = torch.tensor(clean[index])

                patched = run(CORRUPTED, layer, kind == "heads", patch)[0]
                expected[layer, column] = (patched - start) / (end - start)
        np.testing.assert_allclose(patch_activations(model, PROMPTS, kind), expected, rtol=1e-4, atol=1e-4)
        assert np.ptp(expected) > 0.01


def test_patching_everything_gives_1_and_nothing_gives_0() -> None:
    """After the last block, the last position is all that the logits depend on; earlier positions have no effect."""
    model = lively(TINY).eval()
    last = patch_activations(model, PROMPTS)[-1]
    np.testing.assert_allclose(last, [0, 0, 0, 0, 0, 0, 1], atol=1e-5)
    one = lively(replace(TINY, n_layers=1)).eval()
    only_last = Prompts(CLEAN, [*CLEAN[:-1], 8], (6, 10))
    np.testing.assert_allclose(patch_activations(one, only_last)[0], [0, 0, 0, 0, 0, 0, 1], atol=1e-5)
    # The first positions are equal in both prompts: clean activations change nothing there.
    np.testing.assert_allclose(patch_activations(model, only_last)[:, :-1], 0, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_estimates_are_exact_for_small_changes(name: str) -> None:
    """The embeddings of the exchanged tokens are almost equal; float64 leaves no rounding error."""
    model = lively(CONFIGS[name]).eval()
    for parameter in model.parameters():
        parameter.array = parameter.array.astype(np.float64)
    table = model.token_embedding.weights.array
    generator = np.random.default_rng(0)
    for clean, corrupted in ((4, 7), (9, 8)):
        table[corrupted] = table[clean] + 1e-5 * generator.standard_normal(table.shape[1])
    estimates = estimate_patches(model, PROMPTS)
    for kind, estimate in estimates.items():
        exact = patch_activations(model, PROMPTS, kind)
        assert estimate.shape == exact.shape
        np.testing.assert_allclose(estimate, exact, rtol=1e-2, atol=1e-3)
        assert abs(exact).max() > 0.01


def test_estimates_are_derivatives_in_the_corrupted_run() -> None:
    """Each estimate is a central difference: of a run that is moved towards the clean activation, and away from it."""
    model = lively(GEMMA).eval()
    for parameter in model.parameters():
        parameter.array = parameter.array.astype(np.float64)
    runs, estimates = PromptRuns("test", model, PROMPTS), estimate_patches(model, PROMPTS)

    def slope(layer: Layer, direction: np.ndarray) -> float:
        ends = []
        for step in (1e-4, -1e-4):
            remove = add_hook(layer, "changes", lambda out, *args, step=step: out + step * direction)
            ends.append(metric(model, CORRUPTED))
            remove()
        return (ends[0] - ends[1]) / 2e-4 / runs.difference

    for kind, (axis, offset) in {"stream": (1, 1), "heads": (2, 0)}.items():
        for (layer, index), estimate in np.ndenumerate(estimates[kind]):
            difference = getattr(runs.clean, kind)[layer + offset] - getattr(runs.corrupted, kind)[layer + offset]
            direction = np.moveaxis(np.zeros_like(difference), axis, 0)
            direction[index] = np.moveaxis(difference, axis, 0)[index]
            target = model.blocks[layer] if kind == "stream" else model.blocks[layer].attention.attention
            assert slope(target, np.moveaxis(direction, 0, axis)) == pytest.approx(estimate, rel=1e-4, abs=1e-7)


def test_model_is_unchanged() -> None:
    model = lively(replace(TINY, dropout=0.5))
    first = estimate_patches(model, PROMPTS), patch_activations(model, PROMPTS)
    again = estimate_patches(model, PROMPTS), patch_activations(model, PROMPTS)
    np.testing.assert_array_equal(first[0]["heads"], again[0]["heads"])
    np.testing.assert_array_equal(first[1], again[1])
    assert model.training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not any("forward" in vars(layer) for layer in model.layers())


MODEL = GPT(TINY)
test_invalid_arguments = bad_input(
    {
        "lengths": (lambda: patch_activations(MODEL, Prompts(CLEAN, CLEAN[1:], (1, 2))), "same number.*7 and 6"),
        "same prompts": (
            lambda: patch_activations(MODEL, Prompts(CLEAN, CLEAN, (1, 2))),
            "logits of the answers differ",
        ),
        "same answers": (lambda: estimate_patches(MODEL, Prompts(CLEAN, CORRUPTED, (1, 1))), "answers differ"),
        "one answer": (lambda: estimate_patches(MODEL, Prompts(CLEAN, CORRUPTED, (1,))), "two answers, got 1"),
        "kind": (lambda: patch_activations(MODEL, PROMPTS, "layer"), "heads_by_position, got 'layer'"),
        "id": (lambda: patch_activations(MODEL, Prompts(CLEAN, CORRUPTED, (1, 11))), "ids from 0 to 10"),
        "batch": (lambda: patch_activations(MODEL, PROMPTS, batch_size=0), "batch_size"),
        "no model": (lambda: patch_activations(None, PROMPTS), "decoder.*NoneType"),
    }
)


PAIRS = [
    (("Rome is the capital of", " Italy"), ("Paris is the capital of", " France")),
    (("Berlin is a city in", " Germany"), ("Tokyo is a city in", " Japan")),
    (("The opposite of hot is", " cold"), ("The opposite of up is", " down")),
    (("The opposite of big is", " small"), ("The opposite of old is", " young")),
    (("The keys on the table", " are"), ("The key on the table", " is")),
    (("The boys near the car", " are"), ("The boy near the car", " is")),
    (("The color of grass is", " green"), ("The color of snow is", " white")),
    (("In Spain, people speak", " Spanish"), ("In Italy, people speak", " Italian")),
    (("In Germany, people speak", " German"), ("In France, people speak", " French")),
    (("My sister lost", " her"), ("My brother lost", " his")),
    (("The queen took", " her"), ("The king took", " his")),
    (("One, two, three,", " four"), ("Five, six, seven,", " eight")),
    (("Monday, Tuesday,", " Wednesday"), ("Thursday, Friday,", " Saturday")),
]
NAMES = [
    ("Mary", "John"),
    ("Tom", "Anna"),
    ("James", "Lisa"),
    ("Alice", "Robert"),
    ("Sarah", "Paul"),
    ("Peter", "Emma"),
]
GIFT = "When {} and {} went to the store, {} gave a drink to"
PAIRS += [((GIFT.format(a, b, b), f" {a}"), (GIFT.format(a, b, a), f" {b}")) for a, b in NAMES]


def ranks(values: np.ndarray) -> np.ndarray:
    return np.argsort(np.argsort(values))


@pytest.mark.nightly
def test_estimates_rank_the_heads_of_smollm2_as_exact_patching() -> None:
    """Spearman's correlation over 270 heads: 0.955 of all pairs together, and 0.84 to 1.00 of single pairs."""
    loaded = load_model(str(smollm2_file()), weights="float32")
    encode = lambda text: [int(token) for token in loaded.tokeniser.encode_plain(text)]
    exact, estimated = [], []
    for (clean, answer), (corrupted, other) in PAIRS:
        prompts = Prompts(encode(clean), encode(corrupted), (encode(answer)[0], encode(other)[0]))
        difference = PromptRuns("test", loaded.model, prompts).difference
        exact.append(difference * patch_activations(loaded.model, prompts, "heads").ravel())
        estimated.append(difference * estimate_patches(loaded.model, prompts)["heads"].ravel())
    assert np.shape(exact) == (len(PAIRS), 270)
    single = [np.corrcoef(ranks(one), ranks(other))[0, 1] for one, other in zip(exact, estimated)]
    assert min(single) > 0.8 and np.median(single) > 0.95
    assert np.corrcoef(ranks(np.ravel(exact)), ranks(np.ravel(estimated)))[0, 1] > 0.9
