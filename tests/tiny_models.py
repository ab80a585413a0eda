"""Tiny models in Hugging Face format with a tokenizer and a chat template, and the location of SmolLM2 for tests."""

import json
import os
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from chat_templates import CHATML
from transformers_families import LIKE_LLAMA

from tricycle.configs import ModelConfig
from tricycle.finetuning.lora import Adapter
from tricycle.layers import Layer
from tricycle.models import GPT
from tricycle.pretrained import tokenizer_json
from tricycle.pretrained.export import export_folder
from tricycle.pretrained.generation_settings import GenerationSettings
from tricycle.pretrained.safetensors_weights import read_tensors, write_tensors
from tricycle.pretrained.smollm2 import smollm2_path
from tricycle.pretrained.tokenisers import PretrainedTokeniser
from tricycle.tokeniser import BPETokeniser

Model = TypeVar("Model", bound=Layer)
NAMES = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
MODULES = ["Transformer", "Pooling", "Normalize"]
TEXT = "the quick brown fox jumps over the lazy dogs while seven small birds sing of rain. " * 20
SIZES = {"vocab_size": 420, "context_window": 4096, "embedding_dim": 32, "n_layers": 2}
LLAMA = ModelConfig(**SIZES, **LIKE_LLAMA, n_heads=4, n_key_heads=2)


def tiny_tokeniser(chat_template: str | None = CHATML) -> PretrainedTokeniser:
    """Return a byte-level BPE tokenizer with learned merges, and special tokens with the first ids, as in SmolLM2."""
    pytest.importorskip("tokenizers")
    tokeniser = BPETokeniser(400).train(TEXT, progress=False)
    document = json.loads(tokenizer_json.to_tokenizer_json(tokeniser))
    special = ["<|endoftext|>", *NAMES.values()]
    vocab = {token: i + len(special) for token, i in document["model"]["vocab"].items()}
    vocab |= {token: i for i, token in enumerate(special)}
    model = tokenizer_json.bpe_model(vocab, document["model"]["merges"])
    added = [tokenizer_json.added_token(i, token) for i, token in enumerate(special)]
    text = json.dumps(tokenizer_json.new_document(model, added, **tokenizer_json.byte_level_parts("smollm")))
    return PretrainedTokeniser(text, NAMES, {"default": chat_template} if chat_template else {})


def lively_model(**changes) -> GPT:
    """Return a model with large random weights, so that a token depends on the earlier ones."""
    model = GPT(ModelConfig.from_dict({**LLAMA.to_dict(), **changes}))
    generator = np.random.default_rng(3)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.array[...] = generator.normal(0, 0.3, parameter.shape)
    return model.eval()


def add_noise(model: Model, std: float) -> Model:
    """Add random numbers to all weights, so that every part affects the outputs; return the model for evaluation."""
    rng = np.random.default_rng(0)
    for parameter in model.parameters():
        parameter.array += rng.standard_normal(parameter.shape).astype(np.float32) * np.float32(std)
    model.eval()
    return model


def enliven_adapter(adapter: Adapter) -> Adapter:
    """Replace the zeros of B by random numbers, scale magnitudes (DoRA) at random, and return the adapter."""
    generator = np.random.default_rng(7)
    for low_rank in adapter.low_ranks.values():
        for up in low_rank.ups:
            up.array[...] = generator.normal(0, 0.2, up.shape)
        for magnitude in low_rank.magnitudes:
            magnitude.array *= generator.uniform(0.7, 1.4, magnitude.shape).astype(np.float32)
    return adapter


def write_folder(folder: Path, chat_template: str | None = CHATML, settings=None, **changes) -> Path:
    """Export a tiny model to a folder in Hugging Face format."""
    settings = settings or GenerationSettings(top_k=40, stop_tokens=(2,))  # greedy decoding
    export_folder(lively_model(**changes), tiny_tokeniser(chat_template), folder, generation=settings)
    return folder


def write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write a safetensors file of float32 arrays."""
    with path.open("wb") as file:
        write_tensors(file, {name: array.shape for name, array in arrays.items()}, arrays.items(), "F32")


def split_weights(folder: Path) -> None:
    """Divide the weights of a folder between two files with an index, and remove the single file."""
    tensors, _ = read_tensors(folder / "model.safetensors")
    places: dict[str, str] = {}
    for i, shard in enumerate(SHARDS):
        arrays = {name: tensors[name].read() for name in sorted(tensors)[i::2]}
        write_arrays(folder / shard, arrays)
        places |= dict.fromkeys(arrays, shard)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "model.safetensors").unlink()


def write_pooling(folder: Path, pooling: dict[str, Any], modules: list[str] = MODULES) -> None:
    """Write the files of modules and of the pooling in an encoder's folder as sentence-transformers does."""
    places = ["", "1_Pooling", "2_Normalize", "3_Dense"]
    entries = [
        {"idx": i, "name": str(i), "path": places[i], "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def smollm2_file() -> Path:
    """Return the path of SmolLM2-135M-Instruct from TRICYCLE_SMOLLM2 or its package; skip the test if missing."""
    try:
        return Path(os.environ.get("TRICYCLE_SMOLLM2") or smollm2_path())
    except FileNotFoundError as error:
        pytest.skip(str(error))
