"""The models that commands are given, by whatever names them, and how these write."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tricycle import devices
from tricycle.configs.validated import OneOf
from tricycle.decoding.penalties import PenalizedSamplingParams
from tricycle.generate import DecodingState, generate
from tricycle.kernels.quantized import dtype_of
from tricycle.models import GPT
from tricycle.pretrained import OWN_CHECKPOINTS, Pretrained, load
from tricycle.pretrained.adapters import load_adapter
from tricycle.pretrained.settings import GenerationSettings
from tricycle.pretrained.tokenisers import load_tokeniser
from tricycle.softmaxes import SOFTMAXES
from tricycle.weights import quantize
from tricycle_cli.pickles import load_pickled_model

Softmax = OneOf[str, SOFTMAXES]
Weights = Literal["float32", "int8", "bfloat16", "float16", "stored"]
Device = Literal["auto", "cpu", "gpu"]
Cache = Literal["auto", "float32", "float16", "bfloat16"]
Overflow = Literal["reread", "refuse"]
PICKLES = (".pkl", ".pickle")
MODELS = (".safetensors", ".gguf", ".bin")
# What ends in one of these is meant to be a file, and no name on huggingface.co.
FILES = (*MODELS, *PICKLES, ".pt", ".pth", ".json", ".txt", ".npz")

# What suits small models: those that copy well fall into circles.
SAMPLING = PenalizedSamplingParams(temperature=0.9, min_p=0.1, repetition_penalty=1.15, no_repeat_ngram_size=6)


@dataclass(frozen=True)
class ModelFlags:
    """How a model is loaded, and where it computes."""

    softmax: Softmax | None = None
    """let attention normalize scores in another way than in training"""
    adapter: Path | None = None
    """a folder of small matrices for this model, as `tricycle finetune` and PEFT write them"""
    weights: Weights = "float32"
    """how many bits a weight has: fewer take less room, and a token less time; "stored" leaves those of 16 bits and of
    blocks of 8 (Q8_0) as the files have them"""
    device: Device = "auto"
    """where to compute; "auto" takes a GPU if there is one"""


@dataclass(frozen=True)
class DecodingFlags:
    """How a text is decoded."""

    draft_tokens: int = 0
    """the most draft tokens of prompt-lookup decoding at a time: the same text, sooner where it repeats itself, as in
    edited code at temperature 0"""
    overflow: Overflow = "reread"
    """when the context window is full: "reread" reads the later half of the text anew, or a conversation without its
    oldest messages, and goes on from there; "refuse" ends with an error, and leaves a conversation to you"""
    cache: Cache = "auto"
    """what keys and values of the text so far are kept in: "float16" and "bfloat16" take half the memory, "auto" leaves
    them as they are computed (float32 on a CPU)"""


def cache_dtype(cache: str) -> str | None:
    """Return the dtype of keys and values, as `SpeculativeState` takes it."""
    return None if cache == "auto" else cache


def new_decoder(model: GPT, flags: DecodingFlags) -> tuple[DecodingState, Callable[..., Iterator[int]]]:
    """Return an empty state for a text, and `generate`, or `generate_prompt_lookup` where there are draft tokens."""
    dtype = cache_dtype(flags.cache)
    if flags.draft_tokens <= 0:
        return DecodingState(model, dtype_of(dtype) if dtype == "bfloat16" else dtype), generate
    from tricycle.decoding.prompt_lookup import generate_prompt_lookup
    from tricycle.decoding.speculative import SpeculativeState

    return SpeculativeState(model, dtype), partial(generate_prompt_lookup, n_draft_tokens=flags.draft_tokens)


def use_gpu(device: str, weights: str = "float32") -> bool:
    """Return whether to compute on a GPU.

    Raises:
        RuntimeError: one is asked for, and none can be used.
        ValueError: one is asked for, with weights that it does not take.
    """
    if weights != "float32":
        if device == "gpu":
            raise ValueError(f"--weights {weights}: expected --device cpu, for on a GPU weights have 32 bits; got gpu")
        return False
    problem = devices.gpu_problem() if device != "cpu" else None
    if device == "gpu" and problem:
        raise RuntimeError(f"--device gpu: no GPU can be used: {problem}")
    return device != "cpu" and problem is None


def load_model(
    source: str,
    tokeniser: Path | None = None,
    softmax: str | None = None,
    device: str = "auto",
    weights: str = "float32",
    adapter: Path | None = None,
    loaded: Pretrained | None = None,
) -> Pretrained:
    """A decoder with its tokeniser, where it is to compute.

    Args:
        source: a run folder, a checkpoint, a pickle, or what `tricycle.pretrained.load` takes.
        tokeniser: a file that its `save` wrote, which counts instead of the model's own.
        softmax: how attention weighs keys, if in another way than it was trained with.
        weights: as of `tricycle.pretrained.load`; those of fewer than 32 bits are for CPUs.
        adapter: a folder of one in PEFT's form, which the model is to compute with.
        loaded: what `load_file` gave for this source, where somebody has looked at it already.

    Raises:
        FileNotFoundError, ValueError: one line about what is wrong.
    """
    on_gpu = use_gpu(device, weights)
    if loaded is None:
        loaded = load_file(source, weights)
    if not isinstance(loaded.model, GPT):
        raise ValueError(f"{source}: expected a model that writes, got a {type(loaded.model).__name__}")
    if tokeniser is not None:
        loaded.tokeniser = load_tokeniser(tokeniser)
    if loaded.tokeniser is None and Path(source).suffix in PICKLES:  # as the toy Shakespeare script leaves one
        from tricycle_datasets.shakespeare import Shakespeare

        loaded.tokeniser = Shakespeare(loaded.model.config.vocab_size).tokeniser
        used = f"using tiny Shakespeare's, of {loaded.tokeniser.n_vocab:,} tokens"
        print(f"{source}: a pickle has no tokeniser: {used}; --tokeniser names another", file=sys.stderr)
    if loaded.tokeniser is None:
        raise ValueError(f"{source}: expected a model with a tokeniser; --tokeniser names one for a model without")
    known, n_vocab = loaded.model.config.vocab_size, loaded.tokeniser.n_vocab
    if n_vocab > known:
        raise ValueError(f"expected a tokeniser of at most {known} tokens, as the model knows, got {n_vocab}")
    if adapter is not None:
        load_adapter(loaded, adapter)
    if softmax is not None:
        loaded.model.use_softmax(softmax, loaded.model.config.softmax_blocks)
    if on_gpu:
        loaded.model.to_gpu()
    else:  # to make 16 bits of all weights for each token would cost more than it saves
        loaded.model.use_precision("bfloat16" if weights == "bfloat16" else "float32")
    return loaded


def load_file(source: str, weights: str = "float32") -> Pretrained:
    """Load any kind of model, with a tokeniser or without; errors are one line about what is wrong."""
    path = Path(source)
    if path.suffix in PICKLES:
        model = load_pickled_model(path)
        if weights not in ("float32", "stored"):
            quantize(model, weights)
        return Pretrained(model, None, GenerationSettings())
    if not path.exists() and path.suffix in FILES:
        raise FileNotFoundError(f"{path}: expected a model, there is no such file")
    if path.is_file() and path.suffix not in MODELS and not _is_gguf(path):
        raise ValueError(f"{path}: expected a folder, or a file that ends in {', '.join((*MODELS, *PICKLES))}")
    if (path / "data.json").is_file() and not any((path / name).is_file() for name in OWN_CHECKPOINTS):
        raise FileNotFoundError(f"{path}: expected a run folder with {' or '.join(OWN_CHECKPOINTS)}")
    if (path / "adapter" / "adapter_config.json").is_file():
        raise ValueError(f"{path}: expected a model, it holds an adapter: name its model, and this with --adapter")
    return load(source, weights)


def _is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


@dataclass(frozen=True)
class SamplingFlags:
    """How tokens are drawn. What is not given is as the model's makers have it."""

    temperature: float | None = None
    """divides the logits: lower is safer, 0 takes the likeliest of the tokens that are allowed (own models: 0.9)"""
    top_k: int | None = None
    """draw among the k likeliest tokens only; 0 for all"""
    top_p: float | None = None
    """draw among the fewest tokens whose probabilities reach this sum"""
    min_p: float | None = None
    """draw among the tokens at least this many times as probable as the likeliest (own models: 0.1)"""
    repetition_penalty: float | None = None
    """divide the logits of tokens that the text has already by this; 1 leaves them"""
    no_repeat_ngram_size: int | None = None
    """never write so many tokens a second time in the same order, for small models run in circles; 0 lets them be
    (own models: 6)"""
    seed: int | None = None
    """makes the text repeatable"""

    def of(self, loaded: Pretrained, otherwise: dict[str, Any] | None = None) -> PenalizedSamplingParams:
        """How this model writes, with the tokens that end its texts.

        Args:
            otherwise: how a model writes whose makers say nothing about it.

        Raises:
            ValueError: a setting out of range.
        """
        sampling = default_sampling(loaded)
        if otherwise and lacks_generation_settings(loaded):
            sampling = replace(sampling, **otherwise)
        stated = {name: value for name, value in asdict(self).items() if value is not None}
        return replace(sampling, **{"seed": None, **stated})


def default_sampling(loaded: Pretrained) -> PenalizedSamplingParams:
    """How a model writes if nobody says otherwise: Tricycle's way for its own, their makers' way for others."""
    known: dict[str, Any] = {"stop_tokens": stop_tokens(loaded), "n_vocab": loaded.tokeniser.n_vocab}
    if loaded.source is None:
        return replace(SAMPLING, **known)
    makers = loaded.generation
    names = ("top_k", "top_p", "min_p", "repetition_penalty")
    return PenalizedSamplingParams(
        temperature=makers.temperature if makers.do_sample else 0.0,
        **{name: getattr(makers, name) for name in names},
        **known,
    )


def lacks_generation_settings(loaded: Pretrained) -> bool:
    """Whether it is other people's, and its files do not say how it should write."""
    stated = {} if loaded.source is None else loaded.source.generation
    names = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return loaded.source is not None and all(stated.get(name) is None for name in names)


def stop_tokens(loaded: Pretrained) -> list[int]:
    """The tokens that end a text."""
    return sorted({*loaded.generation.stop_tokens} or {loaded.tokeniser.end_of_text})
