"""Reading other people's models: folders, files, names, memory, and what is refused with one line."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from tiny_models import SHARDS, split_weights, write_arrays
from transformers_families import LIKE_LLAMA

from tricycle.checkpoint import save_checkpoint
from tricycle.configs import GPTConfig, ModelConfig
from tricycle.generate import generate
from tricycle.models import GPT
from tricycle.pretrained import hub, load
from tricycle.pretrained.config_fields import ConfigFields
from tricycle.pretrained.export import export_folder
from tricycle.pretrained.families import ALL_FAMILIES, read_config
from tricycle.pretrained.families.family import Family
from tricycle.pretrained.generation_settings import GenerationSettings
from tricycle.pretrained.safetensors_weights import read_tensors, write_tensors
from tricycle.pretrained.stored_model import StoredModel, StoredTensor
from tricycle.sampling import SamplingParams
from tricycle.tensor import no_grad
from tricycle.tokeniser import BPETokeniser
from tricycle.weights import set_memory_order

SIZES = {"vocab_size": 300, "context_window": 32, "embedding_dim": 24, "n_heads": 4, "n_layers": 2}
LLAMA = ModelConfig(**SIZES, **LIKE_LLAMA, n_key_heads=2, hidden_size=40)
GPT2 = ModelConfig(**SIZES)
TOKENS = np.random.default_rng(0).integers(0, 300, (2, 20))


def a_folder(place: Path, config: ModelConfig = LLAMA, tokeniser: Any = None, dtype: str = "float32") -> GPT:
    """A small model, written there."""
    model = GPT(config)
    export_folder(model, tokeniser, place, dtype=dtype)
    return model.eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    a_folder(tmp_path / "model")
    return tmp_path / "model"


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the object in a JSON file."""
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def refuse(path: Path, message: str, kind: type[Exception] = ValueError) -> None:
    """The message matches, is one line, and begins with the path."""
    with pytest.raises(kind, match=message) as caught:
        load(path)
    assert "\n" not in str(caught.value) and str(caught.value).startswith(str(path))
    assert len(str(caught.value)) < 700


def same_logits(loaded, model) -> bool:
    """To the last bit, once matrices lie in memory as in a model that was made: sums are made in that order."""
    assert all(block.mlp.up.weights.array.flags.f_contiguous for block in loaded.blocks)
    return np.array_equal(set_memory_order(loaded, "C")(TOKENS).array, model(TOKENS).array)


# -------------------------------------------------------------------- what comes back
@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_exported_models_load(config: ModelConfig, tmp_path: Path) -> None:
    model = a_folder(tmp_path / "model", config)
    loaded = load(tmp_path / "model")
    assert not loaded.model.training
    assert loaded.tokeniser is None
    matrices = [block.mlp.up.weights.array for block in loaded.model.blocks]
    assert len({id(matrix.base) for matrix in matrices}) == 1, "in one block of memory"
    assert all(matrix.ctypes.data % 64 == 0 for matrix in matrices)
    np.testing.assert_equal(loaded.model.state_dict(), model.state_dict())
    assert loaded.source.fields["model_type"] in ("llama", "gpt2")
    by_file = load(tmp_path / "model" / "model.safetensors")
    assert same_logits(by_file.model, model)


def test_generation_settings_are_loaded_with_defaults(folder: Path) -> None:
    values = {"do_sample": True, "temperature": 0.6, "top_k": None, "top_p": 0.9, "eos_token_id": [2, 7]}
    (folder / "generation_config.json").write_text(json.dumps(values))
    assert load(folder).generation == GenerationSettings(True, 0.6, 50, 0.9, stop_tokens=(2, 7))
    edit(folder / "config.json", lambda fields: fields.update(eos_token_id=5))
    (folder / "generation_config.json").write_text("{}")
    assert load(folder).generation == GenerationSettings(stop_tokens=(5,))
    (folder / "generation_config.json").unlink()
    assert load(folder).generation == GenerationSettings(stop_tokens=(5,))
    wrong = {"temperature": "hot", "top_k": 1.5, "do_sample": 1, "eos_token_id": ["x"], "top_p": True}
    for name, value in wrong.items():
        (folder / "generation_config.json").write_text(json.dumps({name: value}))
        refuse(folder, name)


def test_load_reads_the_tokeniser_and_never_samples_rows_beyond_it(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    tokeniser = BPETokeniser(300).train("some text of very few words, some text " * 9, progress=False)
    assert tokeniser.n_vocab < 300
    a_folder(tmp_path / "model", LLAMA, tokeniser)
    loaded = load(tmp_path / "model")
    assert loaded.tokeniser.n_vocab == tokeniser.n_vocab
    assert loaded.tokeniser.encode("some words") == tokeniser.encode("some words").tolist()
    assert loaded.generation.stop_tokens == (tokeniser.end_of_text,)
    drawn = generate(loaded.model, [5], 400, SamplingParams(5.0, n_vocab=loaded.tokeniser.n_vocab))
    assert max(drawn) < tokeniser.n_vocab
    edit(tmp_path / "model" / "tokenizer.json", lambda document: document["model"]["vocab"].update(many=300))
    refuse(tmp_path / "model", "of at most 300 tokens, the model's vocabulary, got 301")
    (tmp_path / "model" / "tokenizer.json").write_text("[]")
    with pytest.raises(ValueError) as caught:
        load(tmp_path / "model")
    assert str(caught.value).count(str(tmp_path)) == 1  # not once more for the folder


def test_load_opens_run_folders_and_checkpoints(tmp_path: Path) -> None:
    tokeniser = BPETokeniser(300).train("some text of very few words, some text " * 9, progress=False)
    model = GPT(GPTConfig(**SIZES)).eval()
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict()))
    (tmp_path / "metrics.jsonl").write_text("")
    refuse(tmp_path, "a run folder with best.safetensors or last.safetensors", FileNotFoundError)
    save_checkpoint(tmp_path / "last.safetensors", model, tokeniser)
    for path in (tmp_path, tmp_path / "last.safetensors"):
        loaded = load(path)
        assert same_logits(loaded.model, model)
        assert loaded.tokeniser == tokeniser
        assert loaded.generation.stop_tokens == (tokeniser.end_of_text,)
        assert loaded.generation.do_sample and loaded.source is None
    other = GPT(GPTConfig(**SIZES, seed=1)).eval()
    save_checkpoint(tmp_path / "best.safetensors", other)
    assert same_logits(load(tmp_path).model, other)
    assert load(tmp_path).tokeniser is None


# -------------------------------------------------------------------- 16 bits, and memory
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_16_bit_weights_are_kept_on_request(dtype: str, config: ModelConfig, tmp_path: Path) -> None:
    a_folder(tmp_path / "model", config, dtype=dtype)
    wide, stored = load(tmp_path / "model").model, load(tmp_path / "model", weights="stored").model
    assert {p.dtype.itemsize for p in wide.parameters()} == {4}
    large = [p for p in stored.parameters() if p.ndim == 2 and p.role != "position"]
    assert {str(p.dtype) for p in large} == {dtype}
    assert sum(p.array.nbytes for p in stored.parameters()) < 0.6 * sum(p.array.nbytes for p in wide.parameters())
    expected = wide(TOKENS).array
    assert stored(TOKENS).array.dtype == np.float32
    assert np.abs(stored(TOKENS).array - expected).max() < 1e-5 * np.abs(expected).max()
    assert list(generate(stored, [1, 2], 12, temperature=0)) == list(generate(wide, [1, 2], 12, temperature=0))
    stored(TOKENS).sum().backward()  # what is not frozen may learn
    assert all((p.grad is None) == (p.dtype.itemsize == 2) for p in stored.parameters())
    with pytest.raises(ValueError, match=r"weights.*32 bits"):
        stored.unfreeze()


def test_unknown_weights_dtype_raises(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"weights.*float32, auto, stored, exact, int8, bfloat16.*'int4'"):
        load(folder, weights="int4")


def test_bfloat16_is_read_exactly_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_folder(tmp_path / "model", dtype="bfloat16")
    expected = load(tmp_path / "model").model.state_dict()
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    for weights in ("float32", "auto"):
        np.testing.assert_equal(load(tmp_path / "model", weights).model.state_dict(), expected)


def test_rounding_to_16_bits(tmp_path: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    bits = np.random.default_rng(1).integers(0, 2**32, 10_000, dtype=np.uint32)
    values = np.concatenate([bits.view(np.float32), np.float32([0, -0.0, np.inf, -np.inf, 1, 1.00390625, 1.01171875])])
    with (tmp_path / "a.safetensors").open("wb") as file:
        write_tensors(file, {"a": values.shape}, [("a", values)], "BF16")
    tensors, metadata = read_tensors(tmp_path / "a.safetensors")
    assert metadata == {"format": "pt"}
    with np.errstate(all="ignore"):
        expected = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(tensors["a"].read().astype(np.float32), expected)


PEAK = """
import sys, numpy, ml_dtypes, tricycle.pretrained
def status(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))
before = status("VmRSS")
model = tricycle.pretrained.load(sys.argv[1], sys.argv[2]).model
print(sum(p.array.nbytes for p in model.parameters()), status("VmHWM") - before)
"""


@pytest.mark.nightly_except(3)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from /proc")
@pytest.mark.parametrize("dtypes", ["float32 float32", "bfloat16 float32", "bfloat16 stored"])
def test_loading_needs_the_memory_of_the_model(dtypes: str, tmp_path: Path) -> None:
    """And 10 % and two pages of 2 MB more at most. Most of it is one large table."""
    written, dtype = dtypes.split()
    config = ModelConfig(**LIKE_LLAMA, vocab_size=80_000, embedding_dim=256, n_heads=4, n_layers=4, hidden_size=1024)
    export_folder(GPT(config, draw_weights=False), None, tmp_path / "model", dtype=written)
    done = subprocess.run(
        [sys.executable, "-c", PEAK, tmp_path / "model", dtype], capture_output=True, text=True, check=True
    )
    memory, peak = map(int, done.stdout.split())
    assert memory > (40e6 if dtype == "stored" else 80e6)
    assert 0.9 * memory < peak < 1.1 * memory + 2 * 2**21


# -------------------------------------------------------------------- configs that are refused
FIELDS: list[tuple[str, Any, str]] = [
    ("model_type", None, "model_type.*llama.*None"),
    ("model_type", "mamba", "model_type.*llama.*'mamba'"),
    ("vocab_size", "many", "vocab_size.*'many'"),
    ("vocab_size", True, "vocab_size"),
    ("vocab_size", 10**12, "config.*24,000,000,"),
    ("vocab_size", 10**400, "vocab_size"),
    ("vocab_size", 299, r"embed_tokens\.weight: .*\(299, 24\).*\(300, 24\)"),
    ("num_hidden_layers", 10**12, "num_hidden_layers.*at most 20"),
    ("num_hidden_layers", 3, r"missing model\.layers\.2\..*and 5 more"),
    ("num_hidden_layers", 1, r"unexpected model\.layers\.1\..*and 5 more"),
    ("hidden_size", 10**9, "config asks for"),
    ("intermediate_size", 39, r"mlp\.up_proj\.weight: .*\(39, 24\).*\(40, 24\)"),
    ("num_attention_heads", 5, "n_key_heads"),
    ("num_key_value_heads", 4, r"self_attn\.k_proj\.weight: .*\(24, 24\).*\(12, 24\)"),
    ("head_dim", 5, "head_size"),
    ("hidden_act", "quick_gelu", "hidden_act.*'quick_gelu'"),
    ("rms_norm_eps", 0, "rms_norm_eps"),
    ("rope_theta", float("inf"), "rope_theta"),
    ("tie_word_embeddings", "yes", "tie_word_embeddings"),
    ("tie_word_embeddings", False, "missing lm_head.weight"),
    ("attention_bias", True, "missing .*self_attn.q_proj.bias"),
    ("rope_scaling", {"rope_type": "dynamic", "factor": 4.0}, "rope_type.*llama3.*'dynamic'"),
    ("rope_scaling", {"rope_type": "linear"}, "rope_scaling.factor"),
    ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}, "rope_scaling.low_freq_factor"),
    ("rope_scaling", "linear", "rope_scaling.*object"),
    (
        "rope_scaling",
        {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0},
        "rope_theta.* to differ from 1 with yarn",
    ),
    ("quantization_config", {"quant_method": "gptq"}, "got quantization_config"),
    ("is_causal", False, "is_causal .*True, the only supported value, got False"),
]


GPT2_FIELDS: list[tuple[str, Any, str]] = [
    ("n_positions", 10**11, "config asks for"),
    ("n_layer", 10**11, "n_layer.*at most"),
    ("add_cross_attention", True, "add_cross_attention"),
]


@pytest.mark.parametrize(("name", "value", "message"), FIELDS + GPT2_FIELDS)
def test_unsupported_config_fields_raise(name: str, value: Any, message: str, tmp_path: Path) -> None:
    a_folder(tmp_path / "model", GPT2 if (name, value, message) in GPT2_FIELDS else LLAMA)
    edit(tmp_path / "model" / "config.json", lambda fields: fields.update({name: value}))
    refuse(tmp_path / "model", message)


# Fields of each family that change what transformers computes, with values that Tricycle does not support.
UNSUPPORTED: list[tuple[str, str, Any, str]] = [
    ("llama", "rope_scaling", {"type": "yarn", "factor": 0}, "factor .*a number above 0, got 0"),
    ("llama", "rope_scaling", {"type": "dynamic", "factor": 2.0}, "one of default, linear, llama3, yarn, longrope"),
    ("llama", "partial_rotary_factor", 0.5, r"partial_rotary_factor .*1, the only supported value, got 0\.5"),
    ("mistral", "layer_types", ["full_attention"] * 32, "layer_types .*sliding_attention for each layer"),
    ("qwen2", "layer_types", ["sliding_attention"] * 32, "layer_types .*full_attention for each layer"),
    ("olmo2", "rope_scaling", {"type": "dynamic", "factor": 2.0}, "rope_type .*yarn, longrope, got 'dynamic'"),
    ("qwen3", "max_window_layers", -1, "max_window_layers .*at least 0, got -1"),
    ("gpt2", "scale_attn_by_inverse_layer_idx", True, "scale_attn_by_inverse_layer_idx .*False"),
    ("gpt_neox", "rope_scaling", {"type": "dynamic", "factor": 2.0}, "rope_type .*yarn, longrope, got 'dynamic'"),
    ("opt", "layer_norm_elementwise_affine", False, "layer_norm_elementwise_affine .*True, the only supported value"),
    ("gemma2", "use_bidirectional_attention", True, "use_bidirectional_attention .*false, got True"),
    ("gemma2", "sliding_window", None, "sliding_window .*because layers have sliding_attention, got None"),
    ("gemma3_text", "rope_parameters", {"sliding_attention": {"type": "linear", "factor": 2}}, "rope_type .*'linear'"),
    ("gemma3_text", "attn_logit_softcapping", 50.0, r"attn_logit_softcapping .*None, the only supported value"),
    ("gemma3n_text", "altup_active_idx", 1, "altup_active_idx .*0, the only supported value, got 1"),
    ("phi", "qk_layernorm", True, "qk_layernorm .*False, the only supported value, got True"),
    ("phi3", "rope_scaling", {"type": "linear", "factor": 2.0}, "rope_type .*default or longrope, got 'linear'"),
    ("phi3", "rope_scaling", {"type": "su", "short_factor": [1.0], "long_factor": 2}, "long_factor .*list of numbers"),
    ("stablelm", "qk_layernorm", True, "qk_layernorm .*False, the only supported value, got True"),
    ("smollm3", "no_rope_layers", [2] * 36, "no_rope_layers .*36 numbers 0 or 1"),
    ("smollm3", "layer_types", ["sliding_attention"] * 36, "layer_types .*full_attention for each layer"),
    ("granite", "residual_multiplier", 0, "residual_multiplier .*above 0, got 0"),
    ("cohere", "use_qk_norm", True, "use_qk_norm .*False, the only supported value, got True"),
    ("falcon", "alibi", True, "alibi .*False, the only supported value, got True"),
    ("falcon", "num_ln_in_parallel_attn", 2, "num_ln_in_parallel_attn .*1, or 2 in the new .* got 2"),
    ("gptj", "rotary_dim", None, "rotary_dim .*whole number above 0, got None"),
    ("gptj", "rotary_dim", 300, "rotary_dim .*at most 256, the channels of a head, got 300"),
    ("gptj", "tie_word_embeddings", True, "tie_word_embeddings .*False, the only supported value"),
    ("mixtral", "router_jitter_noise", 0.1, r"router_jitter_noise .*0\.0, the only supported value, got 0\.1"),
    ("qwen3_moe", "mlp_only_layers", [3], r"mlp_only_layers .*\[\], the only supported value, got \[3\]"),
    ("qwen3_moe", "decoder_sparse_step", 2, "decoder_sparse_step .*1, the only supported value, got 2"),
    ("olmoe", "clip_qkv", 8.0, r"clip_qkv .*None, the only supported value, got 8\.0"),
    ("granitemoe", "logits_scaling", "8", "logits_scaling .*above 0, got '8'"),
    ("gpt_oss", "swiglu_limit", 5.0, r"swiglu_limit .*7\.0, the only supported value, got 5\.0"),
    ("gpt_oss", "swiglu_alpha", 1.0, r"swiglu_alpha .*1\.702, the only supported value, got 1\.0"),
    ("deepseek_v2", "num_experts_per_tok", None, "num_experts_per_tok .*above 0, got None"),
    ("deepseek_v2", "topk_method", "noaux_tc", "topk_method .*greedy or group_limited_greedy, got 'noaux_tc'"),
    ("deepseek_v2", "norm_topk_prob", True, "norm_topk_prob .*False, the only supported value"),
    ("deepseek_v2", "mlp_bias", True, "mlp_bias .*False, the only supported value"),
    ("deepseek_v3", "first_k_dense_replace", -1, "first_k_dense_replace .*0 or more, got -1"),
    ("deepseek_v3", "moe_layer_freq", 2, "moe_layer_freq .*1, the only supported value, got 2"),
    ("deepseek_v3", "num_key_value_heads", 8, "num_key_value_heads .*num_attention_heads 128, got 8"),
    ("deepseek_v3", "rope_interleave", False, "rope_interleave .*True, the only supported value"),
    ("deepseek_v3", "scoring_func", "softmax", "scoring_func .*'sigmoid', the only supported value"),
    ("deepseek_v3", "topk_method", "greedy", "topk_method .*'noaux_tc', the only supported value"),
    ("deepseek_v3", "topk_group", 9, "n_active_groups .*from 1 to n_groups 8, got 9"),
    ("deepseek_v3", "rope_scaling", {"type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}, "yarn_mscale.*yarn"),
    ("bert", "is_decoder", True, "is_decoder .*False, the only supported value, got True"),
    ("roberta", "position_embedding_type", "relative_key", "position_embedding_type .*'absolute'"),
    ("modernbert", "rope_scaling", {"rope_type": "linear"}, "rope_scaling .*the only supported value"),
    ("modernbert", "rope_parameters", {"full_attention": {"rope_type": "linear"}}, "rope_type .*'default'"),
    ("modernbert", "rope_parameters", {"sliding_attention": {"type": "linear", "factor": 2}}, "rope_type .*'default'"),
    ("modernbert", "local_attention", 0, "local_attention .*above 0, got 0"),
    ("t5", "is_encoder_decoder", False, "is_encoder_decoder .*True, the only supported value, got False"),
    ("bart", "normalize_before", True, "normalize_before .*False, the only supported value, got True"),
    ("marian", "share_encoder_decoder_embeddings", False, "share_encoder_decoder_embeddings .*True"),
    ("mamba2", "hidden_act", "gelu", "hidden_act .*'silu', the only supported value, got 'gelu'"),
    ("qwen3_next", "mlp_only_layers", [1], r"mlp_only_layers .*\[\], the only supported value, got \[1\]"),
    ("granitemoehybrid", "position_embedding_type", "alibi", "position_embedding_type .*null, nope or rope, got"),
]


@pytest.mark.parametrize("family", ALL_FAMILIES, ids=lambda family: family.model_types[0])
def test_each_family_refuses_unsupported_fields(family: Family) -> None:
    cases = [case for model_type, *case in UNSUPPORTED if model_type in family.model_types]
    assert cases
    for name, value, message in cases:
        with pytest.raises(ValueError, match=message):
            family.to_config(ConfigFields({name: value}))


INVALID = [0, -1, "x", float("nan"), float("inf"), 10**12, 10**400, True, None, 1.5, [1, "a"], {"a": 1}]
# Fields whose size changes neither the number of weights nor the memory of a short text.
UNBOUNDED = """
attention_factor attention_multiplier attn_logit_softcapping beta_fast embedding_multiplier factor
final_logit_softcapping first_k_dense_replace global_rope_theta layer_norm_eps layer_norm_epsilon local_attention
local_rope_theta logit_scale logits_scaling max_position_embeddings n_positions norm_eps
original_max_position_embeddings query_pre_attn_scalar relative_attention_max_distance residual_multiplier rms_norm_eps
rope_local_base_freq rope_theta rotary_emb_base routed_scaling_factor router_aux_loss_coef sliding_window
""".split()


def field_paths(fields: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the path of each field of an object, and of the objects in it."""
    for name, value in fields.items():
        yield (name,)
        yield from ((name, *path) for path in field_paths(value if isinstance(value, dict) else {}))


@pytest.mark.parametrize("family", ALL_FAMILIES, ids=lambda family: family.model_types[0])
def test_each_family_refuses_invalid_fields(family: Family) -> None:
    """Each field with each value of INVALID is read, or refused by an error that says what was expected."""
    given = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8)  # few, for the sake of speed
    given |= {"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    written = family.to_fields(family.to_config(ConfigFields(given)))
    text = json.dumps({"model_type": family.model_types[0], **written})
    # read_config compares the sizes of the config with these, before any weight is allocated
    tensors = dict.fromkeys(map(str, range(700)), StoredTensor((2**31,), "F32", Mock()))
    config = read_config(family, StoredModel(Path(), json.loads(text), tensors))
    for *parents, name in field_paths(written):
        for value in INVALID:
            fields = json.loads(text)
            functools.reduce(dict.__getitem__, parents, fields)[name] = value
            try:
                changed = read_config(family, StoredModel(Path(), fields, tensors))
            except ValueError as error:
                assert re.fullmatch(".*expected .+ to be .+|.*asks for at least .+", str(error)), (name, value, error)
            else:
                assert value != 10**12 or name in UNBOUNDED or changed == config, name


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 100_000, "\xff\xfe", '{"a": 1}{'])
def test_invalid_config_files(text: str, folder: Path) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    refuse(folder, "config.json: expected")


def test_missing_config_raises(folder: Path) -> None:
    (folder / "config.json").unlink()
    refuse(folder, "config.json: there is no such file", FileNotFoundError)


# -------------------------------------------------------------------- files that are refused
def rewrite(path: Path, change: Callable[[dict[str, Any]], Any], more: bytes = b"") -> None:
    """Change the header of a safetensors file."""
    content = path.read_bytes()
    n_bytes = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + n_bytes])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + n_bytes :] + more)


NORM = "model.norm.weight"
HEADERS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda header: header[NORM].update(dtype="F12"), r"norm\.weight: .*types.*'F12'"),
    (lambda header: header[NORM].update(dtype="I32"), r"norm\.weight: .*floating-point.*I32"),
    (lambda header: header[NORM].update(dtype="F16"), "96 bytes .* shape"),
    (lambda header: header[NORM].update(shape=[25]), "96 bytes .* shape"),
    (lambda header: header[NORM].update(shape=[2**62, 2**62]), "bytes .* shape"),
    (lambda header: header[NORM].update(shape=[-24]), "shape.*whole numbers"),
    (lambda header: header[NORM].update(shape=[4, 6]), r"norm\.weight: .*\(24,\).*\(4, 6\)"),
    (lambda header: header[NORM].update(data_offsets=[0, 96]), "overlap"),
    (lambda header: header[NORM].update(data_offsets=[10**15, 10**15 + 96]), "cut off"),
    (lambda header: header[NORM].update(data_offsets=[1, 2, 3]), "first and.* last byte"),
    (lambda header: header.update({NORM: 3}), r"norm\.weight: .*object"),
    (lambda header: header.update(__metadata__=[]), "object.*metadata"),
    (lambda header: header.pop(NORM), "bytes .* belong to no tensor"),
    (lambda header: header.update({"model.norm.scale": header.pop(NORM)}), "missing model.norm.weight"),
]


@pytest.mark.parametrize(("change", "message"), HEADERS)
def test_bad_safetensors_headers_raise(change: Callable[[dict[str, Any]], Any], message: str, folder: Path) -> None:
    rewrite(folder / "model.safetensors", change)
    refuse(folder, message)


def add(name: str, kind: str = "F32") -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        end = max(entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__")
        header[name] = {"dtype": kind, "shape": [1], "data_offsets": [end, end + 4]}

    return change


def test_unexpected_tensor_raises(folder: Path) -> None:
    rewrite(folder / "model.safetensors", add("model.layers.0.adapter.weight"), bytes(4))
    refuse(folder, "unexpected model.layers.0.adapter.weight")


BUFFERS = ["model.layers.0.self_attn.rotary_emb.inv_freq", "h.1.attn.bias", "h.1.attn.masked_bias"]


@pytest.mark.parametrize("name", BUFFERS)
def test_buffers_are_passed_over(name: str, folder: Path) -> None:
    rewrite(folder / "model.safetensors", add(name, "I32"), bytes(4))
    load(folder)


@pytest.mark.parametrize("n_bytes", [0, 4, 8, 20, 2000, -1])
def test_truncated_file_raises(n_bytes: int, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:n_bytes])
    refuse(folder, "cut off")


@pytest.mark.parametrize("n_bytes", [1, 8])
def test_bytes_after_the_last_tensor_raise(n_bytes: int, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes() + bytes(n_bytes))
    refuse(folder, "belong to no tensor")


def test_invalid_headers(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes((2**60).to_bytes(8, "little") + bytes(100))
    refuse(folder, "header is cut off")
    for text in (b"[]", b"{", b"\xff\xff", b'{"a": 1, "a": 2}', b"[" * 100_000):
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        refuse(folder, "its header is no")


def test_corrupted_header_loads_or_raises_one_line(folder: Path) -> None:
    """A file is read as it is, or refused in one line."""
    path = folder / "model.safetensors"
    content = path.read_bytes()
    n_bytes = 8 + int.from_bytes(content[:8], "little")
    generator = np.random.default_rng(0)
    n_refused = 0
    for _ in range(150):
        damaged = bytearray(content)
        damaged[generator.integers(n_bytes)] = generator.integers(256)
        path.write_bytes(damaged)
        try:
            load(folder)
        except ValueError as error:
            n_refused += 1
            assert "\n" not in str(error)
    assert n_refused > 100


def test_folder_with_only_a_pickle_raises(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refuse(folder, "pickle, .*save_pretrained")
    (folder / "pytorch_model.bin").unlink()
    refuse(folder, "expected model.safetensors or model.safetensors.index.json", FileNotFoundError)


def test_tied_head_that_differs_from_the_embedding(folder: Path) -> None:
    """transformers writes it twice in some files; with other values the config contradicts the weights."""
    path = folder / "model.safetensors"
    tensors, _ = read_tensors(path)
    arrays = {name: tensor.read().copy() for name, tensor in tensors.items()}
    for shift in (0, 1):
        arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"] + shift
        write_arrays(path, arrays)
        if shift:
            refuse(folder, "tie_word_embeddings says that lm_head.weight is model.embed_tokens.weight")
        else:
            load(folder)


# -------------------------------------------------------------------- many files
def test_sharded_weights_load(folder: Path) -> None:
    expected = load(folder).model(TOKENS).array
    split_weights(folder)
    assert np.array_equal(load(folder).model(TOKENS).array, expected)


def test_bad_model_folders_raise(folder: Path) -> None:
    split_weights(folder)
    index = folder / "model.safetensors.index.json"
    before = index.read_text()
    for change, message in [
        (lambda values: values["weight_map"].update(more=SHARDS[0]), "more is in none of the files"),
        (lambda values: values["weight_map"].update({NORM: "../model.safetensors"}), "same folder, got '../model"),
        (lambda values: values["weight_map"].update({NORM: "/etc/passwd"}), "same folder"),
        (lambda values: values["weight_map"].update({NORM: 3}), "weight_map to be an object"),
        (lambda values: values.pop("weight_map"), "weight_map to be an object"),
    ]:
        edit(index, change)
        refuse(folder, message)
        index.write_text(before)
    first, second = (folder / shard for shard in SHARDS)
    second.rename(folder / "elsewhere")
    refuse(folder, "model-00002-of-00002.safetensors: .* missing", FileNotFoundError)
    second.write_bytes(first.read_bytes())
    refuse(folder, "is also in another file")


# -------------------------------------------------------------------- names
def test_missing_path_raises(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", "./nowhere", "../a/b/c.gguf", "a b"):
        refuse(path, "there is no such folder or file", FileNotFoundError)


def test_hub_name_without_huggingface_hub_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModuleNotFoundError, match=r"no such folder or file.*tricycle-gpt\[pretrained\]"):
        load("owner/some-model")
    with pytest.raises(FileNotFoundError, match="no such folder or file"):  # no name on huggingface.co
        load("./nowhere")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up cache with one model, and no network."""
    constants = pytest.importorskip("huggingface_hub.constants")
    commit = "0123456789abcdef0123456789abcdef01234567"
    place = tmp_path / "hub" / "models--owner--some-model"
    a_folder(place / "snapshots" / commit)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return place


def test_hub_name_is_read_from_the_cache(cache: Path) -> None:
    for name in ("owner/some-model", "owner/some-model@main"):
        assert load(name).source.path.parent == cache / "snapshots"


def test_hub_name_missing_from_the_cache_raises(cache: Path) -> None:
    refuse("owner/other-model", "HF_HUB_OFFLINE is set: .*run `hf download", FileNotFoundError)
    refuse("owner/some-model@v2", "HF_HUB_OFFLINE is set", FileNotFoundError)
    (cache / "refs" / "main").unlink()
    refuse("owner/some-model", "HF_HUB_OFFLINE is set", FileNotFoundError)


def test_hub_errors_fit_on_one_line(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = pytest.importorskip("huggingface_hub.errors")
    library = sys.modules["huggingface_hub"]

    class Response:
        headers: dict[str, str] = {}
        request = None
        status_code = 401

    cases = [
        (errors.GatedRepoError("long\nstory", response=Response()), "huggingface.co/a/b, then run hf auth login"),
        (errors.RepositoryNotFoundError("long\nstory", response=Response()), "no model of that name"),
        (ConnectionError("no route\nto host"), "no route to host"),
    ]
    for error, message in cases:
        monkeypatch.setattr(library, "snapshot_download", Mock(side_effect=error))
        refuse("a/b", message, FileNotFoundError)


def test_only_needed_files_are_downloaded() -> None:
    from fnmatch import fnmatch

    def is_downloaded(name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in hub.FILE_PATTERNS)

    assert all(is_downloaded(f"model{part}.safetensors") for part in ("", "-00001-of-00003"))
    assert is_downloaded("source.spm")  # Marian's
    assert is_downloaded("chat_template.jinja") and is_downloaded("additional_chat_templates/tool_use.jinja")
    assert all(map(is_downloaded, ("sentence_bert_config.json", "config_sentence_transformers.json")))
    assert not any(
        is_downloaded(name) for name in ("pytorch_model.bin", "modeling.py", "onnx/model.onnx", "consolidated.pth")
    )


# -------------------------------------------------------------------- models without a family
def test_model_without_drawn_weights_has_zeros_and_ones() -> None:
    model = GPT(GPT2, draw_weights=False)
    assert {float(np.abs(p.array).max()) for p in model.parameters()} == {0.0, 1.0}
    with no_grad():
        assert model(TOKENS).shape == (2, 20, 300)
