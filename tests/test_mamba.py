"""Mamba-2 against transformers' torch code, states against whole texts, hybrids, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers_families import difference

from tricycle.decoding.batch import generate_batch
from tricycle.decoding.beam_search import generate_beam_search
from tricycle.decoding.penalties import PenalizedSamplingParams
from tricycle.generate import generate
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.optimisers import AdamW
from tricycle.pretrained import load
from tricycle.pretrained.export import export_folder
from tricycle.pretrained.families import build_model
from tricycle.pretrained.gguf_writer import export_gguf
from tricycle.pretrained.stored_model import StoredModel, StoredTensor
from tricycle.sampling import SamplingParams
from tricycle.state_spaces.mamba import MambaConfig
from tricycle.tensor import no_grad
from tricycle_cli.init_from import default_config
from tricycle_lab.look.inspectable import InspectableModel

SMALL: dict[str, Any] = {"vocab_size": 61, "embedding_dim": 24, "n_heads": 4, "head_size": 12, "n_layers": 2}
SMALL |= {"state_size": 10, "n_groups": 2, "chunk_size": 8, "context_window": 128}
TOKENS = np.random.default_rng(5).integers(0, 61, (2, 25))
PROMPT = [3, 1, 4, 15, 9, 2, 6]


def small(**fields: Any) -> GPT:
    """Return a model with random weights, large enough that each part affects the logits."""
    model, generator = GPT(MambaConfig(**{**SMALL, **fields})), np.random.default_rng(4)
    for name, parameter in model.named_parameters():
        noise = generator.standard_normal(parameter.shape)
        if parameter.ndim == 1:
            parameter.array[...] += 0.2 * noise
        elif "embedding" not in name:
            parameter.array[...] = noise * (parameter.shape[0] if parameter.ndim == 2 else 4) ** -0.5
    return model


MODELS: dict[str, dict[str, Any]] = {
    "Mamba-2": {},
    "hybrid": {"n_layers": 3, "attention_layers": (1,), "positions": "rotary", "hidden_size": 40, "conv_bias": False},
}
each_model = pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)


@each_model
def test_states_give_the_logits_of_whole_texts(fields: dict[str, Any]) -> None:
    model = small(**fields)
    with no_grad():
        whole = model(TOKENS).array
        caches = model.new_caches()
        parts = [model(TOKENS[:, a:b], caches).array for a, b in ((0, 2), (2, 14), (14, 15), (15, 25))]
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, rtol=1e-3, atol=1e-4)
    sizes = {name: array.shape for name, array in caches[0].last.items()}
    assert sizes == {"conv": (2, 3, 88), "state": (2, 4, 10, 12)}  # not longer than for one token


@each_model
def test_batches_beams_and_single_texts_agree(fields: dict[str, Any]) -> None:
    model = small(**fields)
    prompts = [PROMPT, [4], [5, 6, 7, 8]]
    greedy = [list(generate(model, prompt, 9, temperature=0)) for prompt in prompts]
    assert generate_batch(model, prompts, 9, [SamplingParams(0)] * 3) == greedy
    assert generate_beam_search(model, prompts, 9, 1) == greedy
    assert generate_beam_search(model, prompts, 9, 3) == [generate_beam_search(model, [p], 9, 3)[0] for p in prompts]


@each_model
def test_it_learns(fields: dict[str, Any]) -> None:
    model = GPT(MambaConfig(**{**SMALL, **fields}))
    tokens = np.arange(2 * 30).reshape(2, 30) * 7 % 61
    losses = []
    optimiser = AdamW(learning_rate=3e-3)
    for _ in range(60):
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        losses.append(loss.item())
        loss.backward()
        model.update(optimiser)
    assert losses[0] == pytest.approx(np.log(61), rel=0.05) and losses[-1] < 0.5 * losses[0]


def test_residual_scale_multiplies_the_outputs_of_mixers() -> None:
    scaled, same = small(residual_scale=0.5), small()
    for block in same.blocks:
        block.mixer.projection.weights.array[...] *= 0.5
    np.testing.assert_allclose(scaled(TOKENS).array, same(TOKENS).array, rtol=1e-5, atol=1e-5)


def test_a_mask_is_refused() -> None:
    with pytest.raises(ValueError, match="a state cannot skip tokens"):
        small()(TOKENS, mask=np.ones(TOKENS.shape, bool))


# -------------------------------------------------------------------- against transformers
HF: dict[str, Any] = {"vocab_size": 61, "hidden_size": 24, "num_heads": 4, "head_dim": 12, "num_hidden_layers": 2}
HF |= {"state_size": 10, "n_groups": 2, "chunk_size": 8, "pad_token_id": None, "layer_norm_epsilon": 1e-3}
CASES = {
    "two groups": HF,
    "tied, biases": {
        **HF,
        **{"n_groups": 1, "head_dim": 8, "num_heads": 9, "expand": 3, "use_bias": True, "use_conv_bias": False},
        **{"tie_word_embeddings": True, "conv_kernel": 3, "num_hidden_layers": 3},
    },
}


def new_hf_model(name: str) -> Any:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model("mamba2", **CASES[name])
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            if parameter.ndim == 1:
                parameter += 0.2 * noise
            elif "embeddings" not in key and "lm_head" not in key:
                parameter.copy_(noise * parameter[0].numel() ** -0.5)
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.slow_except(2)
@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("name", CASES)
def test_logits_gradients_tokens_and_exports_agree(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    hf_model = new_hf_model(name)
    hf_model.save_pretrained(tmp_path / "model")
    model = load(tmp_path / "model").model
    inputs = torch.from_numpy(TOKENS[:, :-1].copy())
    assert difference(model(TOKENS[:, :-1]).array, hf_model(inputs).logits.detach().numpy()) < 3e-6
    prompt = torch.tensor([PROMPT])
    for options in ({}, {"no_repeat_ngram_size": 2}):
        expected = hf_model.generate(prompt, max_new_tokens=64, do_sample=False, **options)[0, len(PROMPT) :].tolist()
        assert list(generate(model, PROMPT, 64, PenalizedSamplingParams(0, **options))) == expected

    assert export_folder(model, None, tmp_path / "exported") == "mamba2"
    again = load(tmp_path / "exported").model
    np.testing.assert_array_equal(again(TOKENS).array, model(TOKENS).array)
    theirs = type(hf_model).from_pretrained(tmp_path / "exported").eval()
    assert difference(theirs(inputs).logits.detach().numpy(), hf_model(inputs).logits.detach().numpy()) < 3e-6

    CrossEntropy()(TOKENS[:, 1:], model(TOKENS[:, :-1])).backward()
    labels = torch.from_numpy(TOKENS[:, 1:].copy()).flatten()
    torch.nn.functional.cross_entropy(hf_model(inputs).logits.flatten(0, 1), labels).backward()
    with torch.no_grad():
        for parameter in hf_model.parameters():
            parameter.copy_(parameter.grad)
    hf_model.save_pretrained(tmp_path / "gradients")
    grads = load(tmp_path / "gradients").model.state_dict()
    worst = {name: difference(p.grad.array, grads[name]) for name, p in model.named_parameters()}
    assert max(worst.values()) < 3e-6, worst


REFUSED = {
    "activation": ({"hidden_act": "gelu"}, "hidden_act"),
    "limits": ({"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
    "expansion": ({"expand": 3}, "expand"),
    "groups": ({"n_groups": 3}, "n_groups"),
    "layers": ({"num_hidden_layers": 10}, "num_hidden_layers"),
    "state": ({"state_size": 2**40}, "parameters"),
}


@pytest.mark.parametrize(("fields", "name"), REFUSED.values(), ids=REFUSED)
def test_unsupported_fields_are_refused(fields: dict[str, Any], name: str) -> None:
    tensors = {str(i): StoredTensor((4, 4), "F32", lambda: np.zeros((4, 4))) for i in range(9)}
    source = StoredModel(Path("m"), {"model_type": "mamba2", **HF, **fields}, tensors)
    with pytest.raises(ValueError, match=name):
        build_model(source)


def test_a_hybrid_has_no_family(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="attention_layers"):
        export_folder(small(**MODELS["hybrid"]), None, tmp_path / "exported")


def test_commands_refuse_what_a_state_cannot_do(tmp_path: Path) -> None:
    model = small()
    with pytest.raises(ValueError, match="state_size"):
        default_config(model)
    with pytest.raises(ValueError, match="no family has a MambaConfig"):
        export_gguf(model, None, tmp_path / "model.gguf", "F32")
    with pytest.raises(ValueError, match="without attention"):
        InspectableModel(model, None, "model", 16)
