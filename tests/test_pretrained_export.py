"""Giving back: transformers loads what we wrote, with the same logits and tokens; or we say what is in the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import add_noise
from transformers_families import FAMILIES, LIKE_LLAMA, difference, hf_logits

from tricycle.configs import PRESETS, EncoderConfig, ModelConfig
from tricycle.decoding.penalties import PenalizedSamplingParams
from tricycle.generate import generate
from tricycle.models import GPT
from tricycle.pretrained import load
from tricycle.pretrained.export import export_folder, find_export_family
from tricycle.pretrained.generation_settings import GenerationSettings
from tricycle.sequences.text_encoder import TextEncoder
from tricycle.tokeniser import BPETokeniser
from tricycle.weights import set_memory_order

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

pytestmark = pytest.mark.usefixtures("one_torch_thread")
AGREED = 1e-4
TEXT = "The cat sat on the mat; 12345 cats' mats, naïve Ĳsselmeer.\n\n\tfür 3½ €uro — そして日本語も。" * 20
ODD_TEXTS = [
    "",
    " ",
    "  leading, and trailing  ",
    "\n\n\r\n\t \u00a0\u2003x",
    "don't you'll WE'VE it's 1234567 3½ ²³ x٣٤",
    "naïve na\u0308ive Ĳ \ufb01 \uff41\uff42 ǅ",
    "👩\u200d👩\u200d👧\u200d👦 🏳️\u200d🌈 e\u0301\u0327",
    "日本語とไทยและ العربية עברית हिन्दी 한국어",
    "\u0000\u0001\u007f\u0085\u200b\u2028\ufeff\ufffd\U0010ffff",
    "<|endoftext|> <|endoftext|>",
    "a" * 300 + " " * 300,
    "def f(x):\n    return {'a': [1, 2], **x}  # ok\n",
]
SIZES = {"vocab_size": 310, "context_window": 128, "embedding_dim": 24, "n_heads": 3, "n_layers": 2}


@pytest.fixture(scope="module")
def tokeniser() -> BPETokeniser:
    return BPETokeniser(310).train(TEXT, progress=False)


def load_hf_model(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def compare(model: GPT, folder: Path) -> None:
    """Compare logits of transformers and of ourselves, and greedy tokens of both."""
    hf_model = load_hf_model(folder)
    tokens = np.random.default_rng(2).integers(0, model.config.vocab_size, (2, 24))
    actual = model(tokens).array
    assert difference(actual, hf_logits(hf_model, tokens)) < AGREED
    assert difference(load(folder).model(tokens).array, actual) < 2e-5  # loaded matrices are multiplied by columns
    prompt = [5, 2, 8]
    n_new = min(32, model.config.context_window - 3)
    settings = {"no_repeat_ngram_size": 2, "do_sample": False, "suppress_tokens": None}
    hf_model.generation_config.eos_token_id = None
    out = hf_model.generate(torch.tensor([prompt]), max_new_tokens=n_new, pad_token_id=0, **settings)
    written = generate(model, prompt, n_new, PenalizedSamplingParams(0, no_repeat_ngram_size=2))
    assert list(written) == out[0, 3:].tolist()


def same_ids(tokeniser: BPETokeniser, folder: Path) -> None:
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text in ODD_TEXTS:
        expected = tokeniser.encode(text, allowed_special=True).tolist()
        assert hf_tokenizer(text)["input_ids"] == expected, repr(text)
        assert hf_tokenizer.decode(expected) == tokeniser.decode(expected), repr(text)
    assert hf_tokenizer.eos_token_id == hf_tokenizer.bos_token_id == tokeniser.end_of_text


# -------------------------------------------------------------------- every config that can be exported
LLAMA = {**SIZES, **LIKE_LLAMA}
LLAMA3 = {"rotary_scaling": "llama3", "rotary_factor": 4.0, "rotary_original_window": 64, "rotary_base": 5000.0}
SWIGLU = {"activation": "swiglu", "gated": False, "expansion_ratio": 2.0}
QWEN3 = {"qk_norm": True, "qk_norm_eps": 1e-5, "head_size": 10, "window": 5, "full_layers": (1,)}
OLMO2 = {"norm_placement": "output", "qk_norm": True, "qk_norm_gain": True, "qk_norm_per_head": False}
GEMMA2 = {"norm_unit_offset": True, "norm_placement": "both", "embedding_scale": 24**0.5, "score_scale": 7**-0.5}
EXPRESSED: dict[str, tuple[str, ModelConfig]] = {
    "GPT-2": ("gpt2", ModelConfig(**SIZES)),
    "GPT-2, untied": ("gpt2", ModelConfig(**SIZES, tied=False, dropout=0.1)),
    "GPT-2, no biases": ("gpt2", ModelConfig(**SIZES, bias=False)),
    "GPT-2, biases here and there": ("gpt2", ModelConfig(**SIZES, qkv_bias=False, mlp_bias=False)),
    "GPT-2, relu squared": ("gpt2", ModelConfig(**SIZES, activation="relu_squared", hidden_size=50)),
    "GPT-2, exact, unscaled": ("gpt2", ModelConfig(**SIZES, activation="gelu_exact", score_scale=1.0)),
    "OPT": ("opt", ModelConfig(**SIZES, position_offset=2, activation="relu", bias=False)),
    "OPT, norms after": ("opt", ModelConfig(**SIZES, position_offset=2, norm_placement="after", embedding_size=10)),
    "NeoX": ("gpt_neox", ModelConfig(**SIZES, positions="rotary", tied=False)),
    "NeoX, parallel, tied": ("gpt_neox", ModelConfig(**SIZES, positions="rotary", parallel=True, rotary_fraction=0.5)),
    "NeoX, no biases": ("gpt_neox", ModelConfig(**SIZES, positions="rotary", bias=False, activation="sigmoid")),
    "Llama": ("llama", ModelConfig(**LLAMA)),
    "Llama, swiglu, a ratio": ("llama", ModelConfig(**{**LLAMA, **SWIGLU}, tied=False)),
    "Llama, GeGLU, biases": ("llama", ModelConfig(**{**LLAMA, "activation": "gelu", "bias": True})),
    "Llama, biases of q, k, v": ("llama", ModelConfig(**LLAMA, qkv_bias=True)),
    "Llama, llama3": ("llama", ModelConfig(**LLAMA, **LLAMA3)),
    "Mistral": ("mistral", ModelConfig(**LLAMA, window=5)),
    "Mistral, for its heads": ("mistral", ModelConfig(**{**LLAMA, "n_heads": 5}, head_size=6)),
    "Qwen3": ("qwen3", ModelConfig(**LLAMA, **QWEN3)),
    "OLMo 2": ("olmo2", ModelConfig(**LLAMA, **OLMO2, qk_norm_eps=1e-5)),
    "Gemma 2": ("gemma2", ModelConfig(**{**LLAMA, "activation": "gelu"}, **GEMMA2, logit_cap=3.0)),
    "Phi": ("phi", ModelConfig(**SIZES, positions="rotary", parallel=True, shared_norm=True, tied=False)),
    "gpt-oss, no window": ("gpt_oss", replace(FAMILIES["gpt-oss"].config, window=0, full_layers=())),
    "portable": ("llama", PRESETS["portable"]()),
    **{f"family {name}": (family.model_type, family.config) for name, family in FAMILIES.items()},
}


@pytest.mark.parametrize("name", EXPRESSED)
def test_transformers_loads_exported_folder(name: str, tokeniser: BPETokeniser, tmp_path: Path) -> None:
    model_type, config = EXPRESSED[name]
    model = add_noise(GPT(config), 0.2)
    written = tokeniser if tokeniser.n_vocab <= config.vocab_size else None
    assert export_folder(model, written, tmp_path / "model") == model_type
    compare(model, tmp_path / "model")
    assert (written is None) == (not (tmp_path / "model" / "tokenizer.json").exists())
    if written is not None:
        same_ids(tokeniser, tmp_path / "model")


def test_run_of_portable_preset_exports(tmp_path: Path) -> None:
    """From a text to a folder that transformers loads, by two commands; and a resumed run keeps its tokeniser."""
    (tmp_path / "text.txt").write_text(TEXT * 30)
    small = "--preset portable --n-layers 1 --context-window 32 --batch-size 2 --steps 2 --eval-batches 1 --device cpu"
    files = ["--data", "text", "--files", tmp_path / "text.txt", "--run-folder", tmp_path / "run"]
    command("train", *small.split(), *files, cache=tmp_path)
    command("train", "--resume", tmp_path / "run", "--device", "cpu", cache=tmp_path)
    assert len(list((tmp_path / "corpora").iterdir())) == 1
    command("export", tmp_path / "run", tmp_path / "model", cache=tmp_path)
    loaded = load(tmp_path / "run")
    assert loaded.tokeniser.to_dict()["split"] == "gpt2"
    compare(loaded.model, tmp_path / "model")
    same_ids(loaded.tokeniser, tmp_path / "model")
    assert "| trained on | text |" in (tmp_path / "model" / "README.md").read_text()


def command(*words: Any, cache: Path) -> None:
    """Run `tricycle` with some words."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRICYCLE_CACHE": str(cache)}
    arguments = [sys.executable, "-m", "tricycle", *map(str, words)]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_export_in_16_bits_stores_the_rounded_model(dtype: str, tmp_path: Path) -> None:
    """What is in the file is the rounded model."""
    model = add_noise(GPT(EXPRESSED["Llama"][1]), 0.2)
    export_folder(model, None, tmp_path / "model", dtype=dtype)
    rounded = load(tmp_path / "model", weights="stored").model
    hf_model = load_hf_model(tmp_path / "model")
    assert str(hf_model.dtype) == f"torch.{dtype}"
    tokens = np.random.default_rng(2).integers(0, 310, (2, 24))
    # their table of angles is rounded too
    assert difference(rounded(tokens).array, hf_logits(hf_model.float(), tokens)) < 3e-2
    export_folder(rounded, None, tmp_path / "again", dtype=dtype)
    first, second = (tmp_path / folder / "model.safetensors" for folder in ("model", "again"))
    assert first.read_bytes() == second.read_bytes()


# -------------------------------------------------------------------- tokens
def test_generation_settings_are_exported_and_unknown_ids_suppressed(tokeniser: BPETokeniser, tmp_path: Path) -> None:
    model = GPT(replace(EXPRESSED["GPT-2"][1], vocab_size=320))
    settings = GenerationSettings(do_sample=True, temperature=0.7, top_k=0, min_p=0.1, stop_tokens=(3, 4))
    export_folder(model, tokeniser, tmp_path / "model", generation=settings)
    assert load(tmp_path / "model").generation == settings
    settings = load_hf_model(tmp_path / "model").generation_config
    assert settings.eos_token_id == [3, 4]
    assert settings.suppress_tokens == list(range(tokeniser.n_vocab, 320))
    smaller = BPETokeniser(311).train(TEXT, progress=False)
    smaller_model = GPT(replace(model.config, vocab_size=smaller.n_vocab - 1))
    with pytest.raises(ValueError, match=r"export: .*of at most"):
        export_folder(smaller_model, smaller, tmp_path / "other")


def test_export_of_tokeniser_that_transformers_would_read_as_qwens(tokeniser: BPETokeniser) -> None:
    """Beside a model of type qwen2 it makes one of Qwen's kind of anything: so another type is taken, or none."""
    config = ModelConfig(**LLAMA, qkv_bias=True)
    assert find_export_family(config)[1]["model_type"] == "qwen2"
    assert find_export_family(config, excluded="qwen2")[1]["model_type"] == "llama"
    windows = replace(config, window=5, full_layers=(1,))
    assert find_export_family(windows)[1]["model_type"] == "qwen2"


# -------------------------------------------------------------------- encoders
SMALL_ENCODER = EncoderConfig(
    vocab_size=320, context_window=16, embedding_dim=24, n_heads=3, n_layers=2, hidden_size=40, token_types=3
)
ENCODERS = {
    "bert": SMALL_ENCODER,
    "bert, of other fields": replace(SMALL_ENCODER, activation="gelu", norm_eps=0.1, token_types=1),
    "bert, without biases": replace(SMALL_ENCODER, bias=False),
    "roberta": replace(SMALL_ENCODER, position_offset=3, token_types=1),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_exported_encoders_load_in_transformers(name: str, tokeniser: BPETokeniser, tmp_path: Path) -> None:
    model, generator = add_noise(TextEncoder(ENCODERS[name]), 0.3), np.random.default_rng(0)
    kind = export_folder(model, tokeniser, tmp_path / "model")
    assert kind == name.split(",")[0]
    assert not (tmp_path / "model" / "generation_config.json").exists()
    assert "AutoModel.from_pretrained" in (tmp_path / "model" / "README.md").read_text()
    hf_model, info = transformers.AutoModel.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert all(missing.startswith("pooler.") for missing in info["missing_keys"]) and not info["unexpected_keys"]
    tokens = generator.integers(5, 310, (2, 9))
    types = generator.integers(0, ENCODERS[name].token_types, (2, 9))
    with torch.no_grad():
        inside = {"input_ids": torch.from_numpy(tokens), "token_type_ids": torch.from_numpy(types)}
        expected = hf_model.eval()(**inside).last_hidden_state.numpy()
    assert difference(model(tokens, token_type_ids=types).array, expected) < AGREED
    again = set_memory_order(load(tmp_path / "model").model, "C")  # sums are made in the order in which matrices lie
    assert np.array_equal(again(tokens, token_type_ids=types).array, model(tokens, token_type_ids=types).array)


# -------------------------------------------------------------------- unsupported configs
REFUSED: dict[str, tuple[ModelConfig, str]] = {
    "softmax": (ModelConfig(**SIZES, softmax="softmax1"), "gpt2 .*softmax='softmax1'"),
    "blocks": (ModelConfig(**SIZES, softmax="blocks"), "softmax='blocks'"),
    "token shift": (ModelConfig(**LLAMA, token_shift=True), "llama .*token_shift=True"),
    "key shift": (ModelConfig(**LLAMA, key_shift=True), "llama .*key_shift=True"),
    "no positions": (ModelConfig(**SIZES, positions="none"), "positions='none'"),
    "learned positions": (replace(ModelConfig(**LLAMA), positions="learned"), "positions='learned'"),
    "caps": (ModelConfig(**LLAMA, score_cap=5.0), "score_cap=5.0"),
    "scale": (ModelConfig(**LLAMA, score_scale=0.1, window=5), "score_scale=0.1"),
    "eps of q and k": (ModelConfig(**LLAMA, qk_norm=True), "qk_norm"),
    "laptop": (PRESETS["laptop"](), "token_shift=True"),
    "encoder, norms before": (replace(SMALL_ENCODER, norm_placement="before"), "norm_placement='before'"),
    "encoder, RoPE": (replace(SMALL_ENCODER, positions="rotary"), "positions='rotary'"),
    "encoder, no norm": (replace(SMALL_ENCODER, embedding_norm=False), "embedding_norm=False"),
    "encoder, no types": (replace(SMALL_ENCODER, token_types=0), "type_vocab_size"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_field_is_named(name: str, tmp_path: Path) -> None:
    config, field = REFUSED[name]
    with pytest.raises(ValueError, match=f"no family of transformers.*{field}") as caught:
        export_folder((TextEncoder if name.startswith("encoder") else GPT)(config), None, tmp_path / "model")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_export_of_other_objects_raises() -> None:
    with pytest.raises(ValueError, match=r"export: .*GPT.*TextEncoder.*dict"):
        export_folder({}, None, "model")


# -------------------------------------------------------------------- the folder
def test_exported_folder_has_the_expected_files(tokeniser: BPETokeniser, tmp_path: Path) -> None:
    model = add_noise(GPT(EXPRESSED["Llama"][1]), 0.2)
    card = {"bits per byte": 1.23456789, "text": 'a "quoted" | one\nand more'}
    export_folder(model, tokeniser, tmp_path / "deep" / "model", card)
    folder = tmp_path / "deep" / "model"
    names = "README.md config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json"
    assert sorted(path.name for path in folder.iterdir()) == names.split()
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    fields = json.loads((folder / "config.json").read_text())
    assert fields["architectures"] == ["LlamaForCausalLM"]
    assert fields["eos_token_id"] == tokeniser.end_of_text
    readme = (folder / "README.md").read_text()
    assert f"| parameters | {model.n_parameters:,} |" in readme
    assert "| bits per byte | 1.235 |" in readme
    assert "| text | a 'quoted' \\| one and more |" in readme


def test_export_overwrites_nothing(tmp_path: Path) -> None:
    model = add_noise(GPT(EXPRESSED["Llama"][1]), 0.2)
    (tmp_path / "empty").mkdir()
    export_folder(model, None, tmp_path / "empty")
    before = (tmp_path / "empty" / "model.safetensors").read_bytes()
    with pytest.raises(FileExistsError, match=r"folder.*new or empty"):
        export_folder(model, None, tmp_path / "empty")
    assert (tmp_path / "empty" / "model.safetensors").read_bytes() == before
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError, match=r"folder.*new or empty"):
        export_folder(model, None, tmp_path / "file")


def test_export_of_nan_weights_writes_no_file(tmp_path: Path) -> None:
    model = add_noise(GPT(EXPRESSED["Llama"][1]), 0.2)
    model.norm.gain.array[3] = np.nan
    with pytest.raises(ValueError, match=r"finite weights.*norm\.gain.*NaN"):
        export_folder(model, None, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match=r"dtype.*bfloat16.*'int8'"):
        export_folder(model, None, tmp_path / "model", dtype="int8")
