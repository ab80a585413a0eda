"""Folders that transformers has written, family by family and shape by shape: the same logits, gradients and tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers_families import GEMMA3_ROPE, LLAMA3_SCALING, difference, randomize_weights

from tricycle.decoding.penalties import PenalizedSamplingParams
from tricycle.generate import generate
from tricycle.loss import CrossEntropy
from tricycle.pretrained import load
from tricycle.pretrained.config_equivalence import differing_fields
from tricycle.pretrained.config_fields import ConfigFields
from tricycle.pretrained.families import FAMILIES
from tricycle.pretrained.families.family import uninitialized_gpt
from tricycle.tensor import no_grad

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.usefixtures("one_torch_thread")
VOCABULARY = 67
AGREED = 1e-4
N_NEW = 64  # tokens
PROMPT = [3, 1, 4, 15, 9, 2, 6]
ENDLESS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    **ENDLESS,
}
LLAMA = {**COMMON, "num_key_value_heads": 2}
WINDOW = {"use_sliding_window": True, "sliding_window": 5}
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA = {**LLAMA, "head_dim": 8, "query_pre_attn_scalar": 11, "sliding_window": 5}
NEOX = {**COMMON, "intermediate_size": 56}
OPT = {**COMMON, "ffn_dim": 40}
del OPT["intermediate_size"]
GPT2 = {"vocab_size": VOCABULARY, "n_positions": 128, "n_embd": 24, "n_layer": 3, "n_head": 3, **ENDLESS}


def rope(kind: str = "default", **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5000.0, **values}}


LINEAR = rope("linear", factor=2.0)
# model_type and fields; every name says what is tried
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, grouped heads": ("llama", LLAMA),
    "llama, one key head": ("llama", {**LLAMA, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama, all heads": ("llama", {**LLAMA, "num_key_value_heads": 4, "rms_norm_eps": 1e-3}),
    "llama, heads of 14": ("llama", {**LLAMA, "head_dim": 14, "hidden_size": 20}),
    "llama, 9 heads of 64": (
        "llama",
        {**LLAMA, "hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64},
    ),
    "llama, biases": ("llama", {**LLAMA, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    "llama, theta": ("llama", {**LLAMA, **rope()}),
    "llama, linear": ("llama", {**LLAMA, **rope("linear", factor=4.0)}),
    "llama, llama3": ("llama", {**LLAMA, **rope(**(LLAMA3_SCALING | {"kind": "llama3"}))}),
    "mistral, window": ("mistral", {**LLAMA, "sliding_window": 5}),
    "mistral, no window": ("mistral", {**LLAMA, "sliding_window": None, "tie_word_embeddings": True}),
    "mistral, no word of a window": ("mistral", {**LLAMA, "head_dim": 10}),
    "qwen2": ("qwen2", {**LLAMA, "tie_word_embeddings": True}),
    "qwen2, window": ("qwen2", {**LLAMA, **WINDOW, "max_window_layers": 1}),
    "qwen2, layer types": ("qwen2", {**LLAMA, **WINDOW, **LINEAR, "layer_types": SLIDING}),
    "qwen3": ("qwen3", {**LLAMA, "head_dim": 16}),
    "qwen3, usual heads": ("qwen3", {**LLAMA, "rms_norm_eps": 1e-2, "attention_bias": True}),
    "qwen3, llama3": ("qwen3", {**LLAMA, "head_dim": 6, **rope(**(LLAMA3_SCALING | {"kind": "llama3"}))}),
    "olmo2": ("olmo2", LLAMA),
    "olmo2, all heads": (
        "olmo2",
        {**LLAMA, "num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": True, **rope()},
    ),
    "gemma2": ("gemma2", {**GEMMA, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.5}),
    "gemma2, no caps": (
        "gemma2",
        {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    ),
    "gemma2, usual": ("gemma2", {**GEMMA, "head_dim": 12, "tie_word_embeddings": False}),
    "gemma3": ("gemma3_text", {**GEMMA, "sliding_window_pattern": 2}),
    "gemma3, scaled": (
        "gemma3_text",
        {**GEMMA, "layer_types": SLIDING, "final_logit_softcapping": 3.0, "rope_parameters": GEMMA3_ROPE},
    ),
    "neox, parallel": ("gpt_neox", {**NEOX, "hidden_size": 48, "num_attention_heads": 3}),
    "neox, in turn": (
        "gpt_neox",
        {**NEOX, "hidden_size": 32, "use_parallel_residual": False, **rope(partial_rotary_factor=0.5)},
    ),
    "neox, all turns": (
        "gpt_neox",
        {**NEOX, "attention_bias": False, "hidden_act": "gelu_new", **rope(partial_rotary_factor=1.0)},
    ),
    "neox, tied": (
        "gpt_neox",
        {**NEOX, "tie_word_embeddings": True, **rope("linear", factor=2.0, partial_rotary_factor=1.0)},
    ),
    "opt": ("opt", OPT),
    "opt, 350m": ("opt", {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 16}),
    "opt, norms before, narrow": ("opt", {**OPT, "word_embed_proj_dim": 10, "activation_function": "gelu"}),
    "opt, no biases": ("opt", {**OPT, "enable_bias": False, "do_layer_norm_before": False}),
    "gpt2": ("gpt2", GPT2),
    "gpt2, untied": ("gpt2", {**GPT2, "tie_word_embeddings": False, "n_inner": 50, "activation_function": "relu"}),
    "gpt2, unscaled": ("gpt2", {**GPT2, "scale_attn_weights": False, "n_head": 4, "layer_norm_epsilon": 1e-3}),
    "phi": ("phi", {**COMMON, "hidden_size": 32}),
    "phi, grouped heads": ("phi", {**COMMON, "num_key_value_heads": 2, **rope(partial_rotary_factor=0.7)}),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def new_hf_model(case: tuple[str, dict[str, Any]]) -> Any:
    model_type, fields = case
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(model_type, **fields)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    randomize_weights(model)
    model.generation_config.eos_token_id = None
    return model


def some_tokens(batch: int = 2, n_tokens: int = 24) -> np.ndarray:
    return np.random.default_rng(5).integers(0, VOCABULARY, (batch, n_tokens))


def hf_logits(hf_model: Any, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return hf_model(torch.from_numpy(tokens)).logits.numpy()


@each_case
def test_logits_gradients_and_tokens_agree(case: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    hf_model = new_hf_model(case)
    hf_model.save_pretrained(tmp_path)
    model = load(tmp_path).model
    tokens = some_tokens()
    assert difference(model(tokens).array, hf_logits(hf_model, tokens)) < AGREED
    compare_gradients(model, hf_model, tokens, tmp_path)

    greedy = list(generate(model, PROMPT, N_NEW, temperature=0))
    assert greedy == hf_tokens(hf_model)
    assert greedy == without_cache(model, PROMPT)
    # random models soon say one thing for ever, which would agree too easily
    varied = list(generate(model, PROMPT, N_NEW, PenalizedSamplingParams(0, no_repeat_ngram_size=2)))
    assert varied == hf_tokens(hf_model, no_repeat_ngram_size=2)
    assert len(set(varied)) > 7


def hf_tokens(hf_model: Any, **settings: Any) -> list[int]:
    prompt = torch.tensor([PROMPT])
    out = hf_model.generate(prompt, attention_mask=prompt * 0 + 1, do_sample=False, max_new_tokens=N_NEW, **settings)
    return out[0, len(PROMPT) :].tolist()


def without_cache(model: Any, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    with no_grad():
        for _ in range(N_NEW):
            tokens.append(int(model(np.array([tokens])).array[0, -1].argmax()))
    return tokens[len(prompt) :]


def compare_gradients(model: Any, hf_model: Any, tokens: np.ndarray, folder: Path) -> None:
    """Their gradients are written as weights are, and read as these: so they come in our layout."""
    loss = CrossEntropy()(tokens[:, 1:], model(tokens[:, :-1]))
    loss.backward()
    logits = hf_model(torch.from_numpy(tokens[:, :-1].copy())).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(tokens[:, 1:].copy()).flatten())
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    with torch.no_grad():
        for p in hf_model.parameters():
            p.copy_(p.grad)
    hf_model.save_pretrained(folder / "gradients")
    hf_grads = load(folder / "gradients").model.state_dict()
    largest = max(np.abs(array).max() for array in hf_grads.values())
    for name, p in model.named_parameters():
        assert np.abs(p.grad.array - hf_grads[name]).max() < AGREED * largest, name
    hf_model.load_state_dict(transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict())


# -------------------------------------------------------------------- other spellings of the same
def respell(folder: Path, **changes: Any) -> None:
    """Change fields of a config.json; what is None goes."""
    path = folder / "config.json"
    fields = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))


GEMMA3_BASES = {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0}
OLD = {"rope_parameters": None, "dtype": None, "torch_dtype": "float32"}
SPELLINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, theta": ("llama, theta", {"rope_theta": 5000.0}),
    "llama, linear, type": ("llama, linear", {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama, llama3": ("llama, llama3", {"rope_theta": 5000.0, "rope_scaling": LLAMA3_SCALING}),
    "neox": ("neox, in turn", {"rotary_emb_base": 5000, "rotary_pct": 0.5}),
    "phi": ("phi, grouped heads", {"rope_theta": 5000.0, "partial_rotary_factor": 0.7}),
    "gemma3": ("gemma3, scaled", {**GEMMA3_BASES, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "gemma3, pattern": ("gemma3", {**GEMMA3_BASES, "layer_types": None, "_sliding_window_pattern": None}),
    "qwen2, no layer types": ("qwen2, window", {"layer_types": None, "rope_theta": 10_000.0}),
}


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_config_fields_of_transformers_4(spelling: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    name, fields = spelling
    hf_model = new_hf_model(CASES[name])
    hf_model.save_pretrained(tmp_path)
    respell(tmp_path, **OLD, **fields)
    tokens = some_tokens()
    assert difference(load(tmp_path).model(tokens).array, hf_logits(hf_model, tokens)) < AGREED


def test_absent_fields_have_the_defaults_of_their_class(tmp_path: Path) -> None:
    """What a class's own default config says is what an empty config.json means."""
    kinds = [kind for kind, family in FAMILIES.items() if family.new_model is uninitialized_gpt]
    assert len(kinds) > 10
    for kind in kinds:
        written = transformers.AutoConfig.for_model(kind).to_dict()
        bare = FAMILIES[kind].to_config(ConfigFields(minimal(kind)))
        assert differing_fields(bare, FAMILIES[kind].to_config(ConfigFields(written))) == [], kind


def minimal(kind: str) -> dict[str, Any]:
    return {"model_type": kind, "text_config": {}} if kind == "gemma3" else {"model_type": kind}


def test_text_part_of_an_image_model_loads(tmp_path: Path) -> None:
    hf_model = new_hf_model(CASES["gemma3"])
    hf_model.save_pretrained(tmp_path)
    tokens = some_tokens()
    expected = hf_logits(hf_model, tokens)
    fields = json.loads((tmp_path / "config.json").read_text())
    for prefix in ("language_model.model.", "model.language_model."):
        folder = tmp_path / prefix.strip(".")
        folder.mkdir()
        tensors = {prefix + name.removeprefix("model."): p.detach() for name, p in hf_model.named_parameters()}
        tensors["vision_tower.encoder.weight"] = torch.zeros(3)
        tensors["multi_modal_projector.mm_input_projection_weight"] = torch.zeros(3)
        safetensors.save_file(tensors, folder / "model.safetensors")
        text = {name: value for name, value in fields.items() if name != "model_type"}
        (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
        assert difference(load(folder).model(tokens).array, expected) < AGREED


# -------------------------------------------------------------------- other files of the same
@pytest.mark.parametrize("name", ["llama, grouped heads", "gpt2", "opt, 350m", "neox, parallel"])
def test_folder_without_head_loads(name: str, tmp_path: Path) -> None:
    """As AutoModel writes it: names without the first part."""
    model_type, fields = CASES[name]
    hf_model = new_hf_model((model_type, {**fields, "tie_word_embeddings": True}))
    hf_model.base_model.save_pretrained(tmp_path)
    tokens = some_tokens()
    assert difference(load(tmp_path).model(tokens).array, hf_logits(hf_model, tokens)) < AGREED


@pytest.mark.parametrize("name", ["llama, grouped heads", "gpt2", "neox, parallel"])
def test_many_files(name: str, tmp_path: Path) -> None:
    hf_model = new_hf_model(CASES[name])
    hf_model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    tokens = some_tokens()
    assert difference(load(tmp_path).model(tokens).array, hf_logits(hf_model, tokens)) < AGREED


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama, grouped heads", "gpt2", "neox, parallel", "opt, 350m", "gemma2"])
def test_files_of_16_bits(name: str, dtype: str, tmp_path: Path) -> None:
    """The values are those of the file; kept in 16 bits they give the same."""
    new_hf_model(CASES[name]).to(getattr(torch, dtype)).save_pretrained(tmp_path)
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = some_tokens()
    expected = hf_logits(hf_model, tokens)
    assert difference(load(tmp_path).model(tokens).array, expected) < AGREED
    stored = load(tmp_path, weights="stored").model
    assert difference(stored(tokens).array, expected) < AGREED
    for parameter_name, parameter in stored.named_parameters():
        is_matrix = parameter.ndim == 2 and "position" not in parameter_name
        assert parameter.dtype == (dtype if is_matrix else "float32"), parameter_name
        assert parameter.requires_grad != is_matrix
    with pytest.raises(ValueError, match="32 bits"):
        stored.unfreeze()
