"""LoRA adapters as GGUF files: llama.cpp's arithmetic on tensors, llama.cpp itself, and rejected files."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import enliven_adapter
from transformers_families import FAMILIES, VOCABULARY, difference

from tricycle.finetuning.lora import AdaptedDense, LoRAConfig
from tricycle.generate import generate
from tricycle.models import GPT
from tricycle.pretrained import Pretrained, load
from tricycle.pretrained.adapters import TargetModules, load_adapter, new_adapter, save_adapter, save_gguf_adapter
from tricycle.pretrained.generation_settings import GenerationSettings
from tricycle.pretrained.gguf_file import read_gguf_header
from tricycle.pretrained.gguf_writer import export_gguf
from tricycle.tensor import no_grad

gguf = pytest.importorskip("gguf")
pytest.importorskip("tokenizers")
gguf_models = pytest.importorskip("gguf_models")
test_gguf_writer = pytest.importorskip("test_gguf_writer")

TOKENS = np.random.default_rng(5).integers(0, VOCABULARY, (2, 12))
SUFFIXES = "lora_a", "lora_b"


def logits(model: GPT) -> np.ndarray:
    with no_grad():
        return model(TOKENS).numpy()


def new_loaded(name: str = "Llama", **changes: Any) -> Pretrained:
    """Return a random model without a source, as one that Tricycle trained."""
    config = replace(FAMILIES[name].config, **changes)
    return Pretrained(GPT(config).eval(), None, GenerationSettings())


def targets_of(loaded: Pretrained) -> tuple[str, ...]:
    """Return the names of all matrices but those that llama.cpp lacks, or to which it applies no adapter.

    These are experts, the matrices before latent attention, and that before linear attention, which is two in files.
    """
    names = tuple(TargetModules(loaded).by_name)
    is_latent = any("kv_a_proj" in name for name in names)
    excluded = r"\.(experts|shared_mlp)\.|in_proj_qkvz" + (r"|self_attn\.(q|kv)_" if is_latent else "")
    return tuple(name for name in names if not re.search(excluded, name))


def test_adapters_of_experts_are_refused(tmp_path):
    """llama.cpp has one tensor for the matrices of all experts."""
    pytest.importorskip("transformers")
    hf_model = gguf_models.new_model("OLMoE")
    loaded = load(gguf_models.write_model(tmp_path / "base.gguf", "OLMoE", hf_model))
    adapter = new_adapter(loaded, LoRAConfig(rank=2, targets=("q_proj", "gate_proj")))
    with pytest.raises(ValueError, match=r"olmoe in llama\.cpp has no matrix .*experts\.0\.gate_proj"):
        save_gguf_adapter(adapter, loaded, tmp_path / "adapter.gguf")


@pytest.mark.parametrize("target", ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"])
def test_adapters_that_llama_cpp_ignores_are_refused(target, tmp_path):
    """Its latent attention multiplies by these matrices without the products of adapters."""
    pytest.importorskip("transformers")
    name = "DeepSeek-V3"
    loaded = load(gguf_models.write_model(tmp_path / "base.gguf", name, gguf_models.new_model(name)))
    adapter = new_adapter(loaded, LoRAConfig(rank=2, targets=("o_proj", target)))
    with pytest.raises(ValueError, match=rf"deepseek2 in llama\.cpp .*self_attn\.{target}, or ignores its adapter"):
        save_gguf_adapter(adapter, loaded, tmp_path / "adapter.gguf")


# -------------------------------------------------------------------- what llama.cpp computes
@pytest.mark.parametrize("name", gguf_models.ARCHITECTURES)
def test_adding_the_products_to_tensors_of_a_file_gives_equal_logits(name, tmp_path):
    """Compute W + alpha / r B A for the tensors of a file from llama.cpp's converter, as llama.cpp does."""
    pytest.importorskip("transformers")
    architecture, hf_model = gguf_models.ARCHITECTURES[name], gguf_models.new_model(name)
    loaded = load(gguf_models.write_model(tmp_path / "base.gguf", name, hf_model))
    before = logits(loaded.model)
    config = LoRAConfig(rank=3, alpha=5, targets=targets_of(loaded))
    adapter = enliven_adapter(new_adapter(loaded, config, seed=1))
    expected = logits(loaded.model)
    assert difference(expected, before) > 0.01
    assert save_gguf_adapter(adapter, loaded, tmp_path / "adapter.gguf") == architecture

    reader = gguf.GGUFReader(tmp_path / "adapter.gguf")
    values = {tensor.name: tensor.data for tensor in reader.tensors}
    alpha = reader.get_field("adapter.lora.alpha").contents()
    tensors = gguf_models.convert_tensors(architecture, hf_model)
    for key in tensors:
        if f"{key}.lora_a" in values:
            down, up = (values.pop(f"{key}.{suffix}") for suffix in SUFFIXES)
            tensors[key] = tensors[key] + alpha / up.shape[1] * up @ down
    assert not values and alpha == 5
    keys = gguf_models.metadata_of(architecture, hf_model.config)
    base = gguf.GGUFReader(tmp_path / "base.gguf").tensors
    tensors |= {tensor.name: tensor.data for tensor in base if tensor.name.startswith("rope_")}
    summed = load(gguf_models.write(tmp_path / "summed.gguf", architecture, keys, tensors))
    assert difference(logits(summed.model), expected) < 2e-5

    adapter.detach()
    load_adapter(loaded, tmp_path / "adapter.gguf")
    np.testing.assert_array_equal(logits(loaded.model), expected)


# Modules with another rank, and with another alpha.
OTHERS = {
    "Llama": ("q_proj", "up_proj"),
    "Qwen2": ("v_proj", "v_proj"),
    "GPT-2": ("c_proj", "c_attn"),
    "Pythia": ("query_key_value", "dense"),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("patterns", [False, True], ids=["equal", "patterns"])
@pytest.mark.parametrize("stabilised", [False, True], ids=["LoRA", "rsLoRA"])
def test_peft_adapters_round_trip(name, patterns, stabilised, tmp_path):
    """Scales of layers differ, but a file has one alpha, and llama.cpp divides it by each rank."""
    peft = pytest.importorskip("peft")
    hf_model = gguf_models.new_model(name)
    hf_model.save_pretrained(tmp_path / "base")
    loaded = load(tmp_path / "base")
    other_rank, other_alpha = OTHERS[name]
    fields = {"rank_pattern": {other_rank: 5}, "alpha_pattern": {other_alpha: 3}} if patterns else {}
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules="all-linear", use_rslora=stabilised, **fields)
    config.init_lora_weights, config.fan_in_fan_out = False, name == "GPT-2"
    peft.get_peft_model(hf_model, config).save_pretrained(tmp_path / "peft")
    adapter = load_adapter(loaded, tmp_path / "peft")
    targets = [target for low_rank in adapter.low_ranks.values() for target in low_rank.targets]
    assert (
        (len({target.scale for target in targets}) > 1) == patterns == ({target.rank for target in targets} == {2, 5})
    )
    expected = logits(loaded.model)
    save_gguf_adapter(adapter, loaded, tmp_path / "a.gguf")
    adapter.detach()
    back = load_adapter(loaded, tmp_path / "a.gguf")
    assert difference(logits(loaded.model), expected) < 1e-5
    save_adapter(back, loaded, tmp_path / "again")
    back.detach()
    load_adapter(loaded, tmp_path / "again")
    assert difference(logits(loaded.model), expected) < 1e-5


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Pythia", "GPT-2", "Phi"])
def test_models_without_a_source_get_the_architecture_of_their_config(name, tmp_path):
    loaded = new_loaded(name)
    adapter = enliven_adapter(new_adapter(loaded))
    expected = logits(loaded.model)
    architecture = save_gguf_adapter(adapter, loaded, tmp_path / "a.gguf")
    assert architecture == gguf_models.ARCHITECTURES.get(name, "llama")
    assert read_gguf_header(tmp_path / "a.gguf").metadata["general.architecture"] == architecture
    adapter.detach()
    load_adapter(loaded, tmp_path / "a.gguf")
    np.testing.assert_array_equal(logits(loaded.model), expected)


# -------------------------------------------------------------------- files of others
METADATA: dict[str, Any] = {":general.type": "adapter", ":adapter.type": "lora", ":adapter.lora.alpha": 8.0}


def write_adapter(path: Path, metadata: dict[str, Any] | None = None, kind: str = "F32", **tensors: Any) -> Path:
    """Write an adapter of a Llama; None removes a key or a tensor.

    Args:
        tensors: by name, with __ for a period.
    """
    generator = np.random.default_rng(0)
    sizes = {"blk.0.attn_q.weight": (64, 64), "blk.1.ffn_down.weight": (96, 64)}
    values: dict[str, Any] = {}
    for name, (n_in, n_out) in sizes.items():
        values[f"{name}.lora_a"] = generator.normal(0, 1, (32, n_in)).astype(np.float32)
        values[f"{name}.lora_b"] = generator.normal(0, 0.1, (n_out, 32)).astype(np.float32)
    values |= {name.replace("__", "."): array for name, array in tensors.items()}
    keys = {key: value for key, value in {**METADATA, **(metadata or {})}.items() if value is not None}
    values = {name: array for name, array in values.items() if array is not None}
    return gguf_models.write(path, "llama", keys, values, kind)


@functools.cache
def llama_base() -> Pretrained:
    """Return a Llama whose sizes are multiples of 32, so that quantized blocks fit."""
    return Pretrained(test_gguf_writer.new_model("llama"), None, GenerationSettings())


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
def test_tensor_types_of_the_converter_load(kind, tmp_path):
    loaded = llama_base()
    exact, rounded = [], []
    for values, dtype in ((exact, "F32"), (rounded, kind)):
        adapter = load_adapter(loaded, write_adapter(tmp_path / "a.gguf", kind=dtype))
        values += [low_rank.delta_weights() for low_rank in adapter.low_ranks.values()]
        adapter.detach()
    for a, b in zip(exact, rounded):
        assert difference(b, a) <= {"F32": 0, "F16": 1e-3, "BF16": 1e-2, "Q8_0": 2e-2}[kind]


@pytest.mark.parametrize(("alpha", "scale"), [(8.0, 0.25), (0.0, 1), (None, 1)])
def test_alpha_is_divided_by_the_rank_unless_it_is_0_or_missing(alpha, scale, tmp_path):
    loaded = llama_base()
    adapter = load_adapter(loaded, write_adapter(tmp_path / "a.gguf", {":adapter.lora.alpha": alpha}))
    adapter.detach()
    scales = [target.scale for low_rank in adapter.low_ranks.values() for target in low_rank.targets]
    assert scales == [scale, scale]


def test_adapter_of_a_fused_matrix_loads(tmp_path):
    """Files of Phi may have one matrix for queries, keys and values."""
    loaded, generator = new_loaded("Phi"), np.random.default_rng(0)
    down, up = (generator.normal(0, 1, shape).astype(np.float32) for shape in ((2, 24), (72, 2)))
    tensors = {"blk.0.attn_qkv.weight.lora_a": down, "blk.0.attn_qkv.weight.lora_b": up}
    adapter = load_adapter(loaded, gguf_models.write(tmp_path / "a.gguf", "phi2", METADATA, tensors))
    assert [*adapter.low_ranks] == ["blocks.0.attention.qkv"]
    np.testing.assert_allclose(adapter.low_ranks["blocks.0.attention.qkv"].delta_weights().T, 4 * up @ down, rtol=1e-5)


NAN = np.full((64, 32), np.nan, np.float32)
REJECTED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a model": ({":general.type": "model"}, {}, "general.type.*'adapter'.*'model'"),
    "no type": ({":general.type": None}, {}, "general.type.*'adapter'.*None"),
    "a control vector": ({":adapter.type": "control"}, {}, "adapter.type.*'lora'.*'control'"),
    "an activated LoRA": ({":adapter.alora.invocation_tokens": [1, 2]}, {}, "activated LoRA.*not supported"),
    "a negative alpha": ({":adapter.lora.alpha": -1.0}, {}, r"lora\.alpha.*above 0, got -1"),
    "an alpha that is text": ({":adapter.lora.alpha": "8"}, {}, r"lora\.alpha.*above 0, got '8'"),
    "NaN": ({}, {"blk__0__attn_q__weight__lora_b": NAN}, r"q_proj.*finite weights.*NaN"),
    "NaN in A": ({}, {"blk__0__attn_q__weight__lora_a": NAN.T.copy()}, r"q_proj.*finite weights.*NaN"),
    "no B": ({}, {"blk__0__attn_q__weight__lora_b": None}, r"'blk\.0\.attn_q\.weight\.lora_b', which is missing"),
    "no A": ({}, {"blk__0__attn_q__weight__lora_a": None}, r"'blk\.0\.attn_q\.weight\.lora_a', which is missing"),
    "norms": ({}, {"blk__0__attn_norm__weight": NAN[0]}, r"lora_b, got 'blk\.0\.attn_norm\.weight': trained norms"),
    "biases": ({}, {"blk__0__attn_q__bias__lora_a": NAN}, r"got 'blk\.0\.attn_q\.bias\.lora_a': trained norms"),
    "other ranks": ({}, {"blk__0__attn_q__weight__lora_b": NAN[:, :8]}, r"q_proj of shapes.*\(64, r\), got.*\(64, 8\)"),
    "a wider matrix": ({}, {"blk__0__attn_q__weight__lora_a": NAN}, r"q_proj of shapes \(r, 64\).*got \(64, 32\)"),
    "more rows": ({}, {"blk__0__attn_q__weight__lora_b": np.zeros((96, 32))}, r"attn_q.*\(96, 32\).*4 query heads"),
    "a vector": ({}, {"blk__1__ffn_down__weight__lora_b": NAN[0]}, r"down_proj of shapes.*got.*\(32,\)"),
}
UNKNOWN = {
    "token_embd": "'token_embd.weight.lora_a': adapters of embeddings are not supported",
    "output": r"layers that do not exist in it: lm_head",  # the output layer is the embedding
    "blk.0.attn_qkv": "'blk.0.attn_qkv.weight' is unknown in the architecture llama",
    "blk.7.attn_q": r"layers that do not exist in it: model\.layers\.7\.self_attn\.q_proj",
    "blk.0.attn_norm": r"layers that do not exist in it: model\.layers\.0\.input_layernorm",
}
for layer, message in UNKNOWN.items():
    made = {f"{layer}.weight.lora_a": np.ones((2, 64)), f"{layer}.weight.lora_b": np.ones((64, 2))}
    REJECTED[layer] = {}, {name.replace(".", "__"): array for name, array in made.items()}, message


def refused(loaded: Pretrained, path: Path, pattern: str) -> None:
    """Check that the error is one line that begins with the path, and that the model has no adapter."""
    with pytest.raises(ValueError) as caught:
        load_adapter(loaded, path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and message.count(str(path)) == 1 and "\n" not in message
    assert re.search(pattern, message), message
    assert not any(isinstance(layer, AdaptedDense) for layer in loaded.model.layers())


@pytest.mark.parametrize(("metadata", "tensors", "pattern"), REJECTED.values(), ids=REJECTED)
def test_unsupported_and_damaged_adapters_are_rejected(metadata, tensors, pattern, tmp_path):
    refused(llama_base(), write_adapter(tmp_path / "a.gguf", metadata, **tensors), pattern)


def test_other_architectures_and_files_are_rejected(tmp_path):
    path = write_adapter(tmp_path / "a.gguf")
    refused(new_loaded("GPT-2"), path, "general.architecture.*'gpt2'.*'llama'")
    refused(new_loaded("OPT"), path, r"llama\.cpp cannot run this model")
    refused(new_loaded(softmax="softmax1"), path, "softmax1")
    refused(llama_base(), gguf_models.write(tmp_path / "b.gguf", "llama", METADATA, {}), "expected tensors, got none")
    path.write_bytes(b"{}")
    refused(llama_base(), path, "expected a GGUF file")
    with pytest.raises(FileNotFoundError, match=r"missing\.gguf: .*adapter"):
        load_adapter(llama_base(), tmp_path / "missing.gguf")


def test_cut_off_adapters_are_rejected(tmp_path):
    path = write_adapter(tmp_path / "a.gguf")
    content = path.read_bytes()
    for n in (8, 40, 200, len(content) // 2, len(content) - 64):
        path.write_bytes(content[:n])
        refused(llama_base(), path, "cut off|expected a GGUF file")


@pytest.mark.nightly_except(5)
@pytest.mark.parametrize("name", test_gguf_writer.MODELS)
def test_architecture_is_that_of_the_exported_model(name, tmp_path):
    """llama.cpp refuses an adapter whose general.architecture differs from that of its base model."""
    loaded = Pretrained(test_gguf_writer.new_model(name), None, GenerationSettings())
    expected = export_gguf(loaded.model, None, tmp_path / "base.gguf", "F32")
    adapter = new_adapter(loaded, LoRAConfig(rank=1, targets=targets_of(loaded)))
    assert save_gguf_adapter(adapter, loaded, tmp_path / "adapter.gguf") == expected


# -------------------------------------------------------------------- adapters that cannot be written
def test_adapters_that_a_file_cannot_express_are_not_written(tmp_path):
    loaded = new_loaded()
    adapter = new_adapter(loaded, LoRAConfig(dora=True))
    with pytest.raises(ValueError, match=r"LoRA, got DoRA.*merge"):
        save_gguf_adapter(adapter, loaded, tmp_path / "a.gguf")
    adapter.detach()
    adapter = new_adapter(loaded)
    adapter.low_ranks["blocks.1.mlp.up"].ups[0].array[0, 0] = np.inf
    with pytest.raises(ValueError, match=r"^save_gguf_adapter: expected finite.*layers\.1\.mlp\.up_proj\.lora_B"):
        save_gguf_adapter(adapter, loaded, tmp_path / "a.gguf")
    for unsupported in (new_loaded("OPT"), new_loaded(softmax="softmax1")):
        with pytest.raises(ValueError, match=r"^save_gguf_adapter: llama\.cpp cannot run this model"):
            save_gguf_adapter(new_adapter(unsupported), unsupported, tmp_path / "a.gguf")
    assert not list(tmp_path.iterdir())


# -------------------------------------------------------------------- llama.cpp itself
def check_llama_cpp(loaded: Pretrained, base: Path, vocabulary: int, n: int) -> None:
    """Compare n greedy tokens after each of three prompts; some must differ from those without a new adapter."""
    path = base.with_name("adapter.gguf")
    adapter = enliven_adapter(new_adapter(loaded, LoRAConfig(rank=3, alpha=5, targets=targets_of(loaded)), seed=1))
    save_gguf_adapter(adapter, loaded, path)
    prompts = np.random.default_rng(0).integers(0, vocabulary, (3, 8)).tolist()
    expected = [[int(token) for token in generate(loaded.model, prompt, n, temperature=0)][-n:] for prompt in prompts]
    for lora_path in (str(path), None):
        theirs = test_gguf_writer.open_llama_cpp(base, lora_path=lora_path)
        greedy = [test_gguf_writer.greedy_of_llama_cpp(theirs, prompt, n) for prompt in prompts]
        theirs.close()
        assert (greedy == expected) == (lora_path is not None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "llama, untied, other base and eps",
        "llama, wide heads",
        "gpt2",
        "mamba2",
        "granitehybrid, experts",
        "qwen3next",
    ],
)
def test_llama_cpp_generates_equal_tokens_with_exported_models(name, tmp_path):
    config = test_gguf_writer.new_model(name).config
    config = replace(config, context_window=max(128, config.context_window))
    model = test_gguf_writer.lively(GPT(config))
    loaded = Pretrained(model, None, GenerationSettings())
    export_gguf(model, test_gguf_writer.bpe_tokeniser(), tmp_path / "base.gguf", "F32")
    check_llama_cpp(loaded, tmp_path / "base.gguf", test_gguf_writer.VOCABULARY, 64)


# llama.cpp expects an output layer in OLMo 2, and computes no window in Mixtral.
AS_LLAMA_CPP = {"OLMo 2": {"tie_word_embeddings": False}, "Mixtral": {"sliding_window": None}}
# llama.cpp rounds the bounds of YaRN, and selects Phi-3's factors by the context window, not by the length of the text.
DIFFERENT = ("Qwen2, YaRN", "gpt-oss", "Phi-3")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in gguf_models.ARCHITECTURES if name not in DIFFERENT])
def test_llama_cpp_generates_equal_tokens_with_each_architecture(name, tmp_path):
    pytest.importorskip("transformers")
    hf_model = gguf_models.new_model(name, **AS_LLAMA_CPP.get(name, {}))
    keys = {":tokenizer.ggml.model": "no_vocab"}
    base = gguf_models.write_model(tmp_path / "base.gguf", name, hf_model, keys=keys)
    loaded = load(gguf_models.write_model(tmp_path / "without_tokenizer.gguf", name, hf_model))
    check_llama_cpp(loaded, base, VOCABULARY, 20)
