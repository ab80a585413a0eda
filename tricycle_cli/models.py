"""Load the model of a command line, and the flags for loading, sampling and decoding that several commands share."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tricycle import devices
from tricycle.configs.validated import OneOf
from tricycle.decoding.guided import MAX_GRAMMAR_BYTES, GrammarCompiler
from tricycle.decoding.penalties import PenalizedSamplingParams
from tricycle.generate import DecodingState, generate
from tricycle.kernels.quantized import DTYPE_NAMES, quantized_dtype
from tricycle.models import GPT
from tricycle.pretrained import RUN_CHECKPOINTS, Pretrained, load
from tricycle.pretrained.adapters import load_adapter
from tricycle.pretrained.generation_settings import GenerationSettings
from tricycle.pretrained.stored_model import error_prefix
from tricycle.pretrained.tokenisers import load_tokeniser
from tricycle.sampling import SamplingParams
from tricycle.softmaxes import SOFTMAXES
from tricycle.system.files import read_json_object
from tricycle.tokeniser import Tokeniser
from tricycle.weights import quantize
from tricycle_cli.pickles import load_pickled_model

Softmax = OneOf[str, SOFTMAXES]
Weights = Literal["auto", "float32", "int8", "bfloat16", "float16", "stored", "exact"]
Device = Literal["auto", "cpu", "gpu"]
CacheDtype = Literal["auto", "float32", "float16", "bfloat16", "int8"]
Overflow = Literal["truncate", "error"]
PICKLES = (".pkl", ".pickle")
MODELS = (".safetensors", ".gguf", ".bin")
# A source that ends in one of these names a file, not a model on huggingface.co.
FILES = (*MODELS, *PICKLES, ".pt", ".pth", ".json", ".txt", ".npz")

# For models trained by Tricycle: small models that copy well repeat themselves without penalties.
SAMPLING = PenalizedSamplingParams(temperature=0.9, min_p=0.1, repetition_penalty=1.15, no_repeat_ngram_size=6)


@dataclass(frozen=True)
class ModelFlags:
    """The flags for loading a model."""

    softmax: Softmax | None = None
    """the attention normalizer, in place of the one that the model was trained with"""
    adapter: Path | None = None
    """a LoRA adapter for this model: a folder that `tricycle finetune` or PEFT wrote, or a GGUF file"""
    weights: Weights = "auto"
    """data type of the weights: 16 and 8 bits need less memory and less time per token; "stored" keeps 16-bit weights
    and the quantized blocks of a GGUF file; "exact" is "stored" without rounding activations to 8 bits; "auto" is
    "stored" on a CPU with the package numba, else float32"""
    device: Device = "auto"
    """where to compute; "auto" uses a GPU if one is available"""


@dataclass(frozen=True)
class DecodingFlags:
    """The flags for decoding a text."""

    draft_tokens: int = 0
    """prompt-lookup decoding with at most this many draft tokens at a time: the same text, in less time if the text
    repeats itself, such as edited code at temperature 0"""
    overflow: Overflow = "truncate"
    """when the context window is full: "truncate" drops the earlier half of the text, or the oldest messages of a
    conversation, and encodes the rest again; "error" stops with an error"""
    kv_cache_dtype: CacheDtype = "auto"
    """data type of the KV cache: "float16" and "bfloat16" need half the memory, "int8" about a quarter; "auto" is the
    type that the model computes in (float32 on a CPU)"""
    json_schema: Path | None = None
    """generate only JSON text that is valid under the JSON schema in this file"""
    regex: str | None = None
    """generate only text that this regular expression matches as a whole"""

    def constrain(self, sampling: PenalizedSamplingParams, tokeniser: Tokeniser) -> PenalizedSamplingParams:
        """Return the parameters with the constraint of --json-schema or --regex, else unchanged; ValueError if bad.

        Raises:
            ImportError: llguidance is not installed.
            ValueError: both flags, a file that is no JSON object, or a schema or expression that cannot be used.
        """
        if self.json_schema is None and self.regex is None:
            return sampling
        if self.json_schema is not None and self.regex is not None:
            raise ValueError("expected --json-schema or --regex, got both")
        if not sampling.stop_tokens:
            raise ValueError("expected --json-schema and --regex without --no-stop, because a stop token ends the text")
        compiler = GrammarCompiler(tokeniser)
        name = "--regex" if self.json_schema is None else str(self.json_schema)
        with error_prefix(f"{name}: "):
            if self.json_schema is None:
                return replace(sampling, constraint=compiler.from_regex(self.regex or ""))
            schema = read_json_object(self.json_schema, MAX_GRAMMAR_BYTES)
            return replace(sampling, constraint=compiler.from_json_schema(schema))


def check_constraint(sampling: SamplingParams) -> None:
    """Raise a ValueError if the constraint of a generated text had to be given up, so that the text is incomplete."""
    constraint = sampling.constraint if isinstance(sampling, PenalizedSamplingParams) else None
    if constraint is not None and constraint.error:
        raise ValueError(f"the text is incomplete, because the grammar became too complex: {constraint.error}")


def cache_dtype(flag: str) -> str | None:
    """Return the value of --kv-cache-dtype as `DecodingState` takes it: None for "auto"."""
    return None if flag == "auto" else flag


def new_decoder(model: GPT, flags: DecodingFlags) -> tuple[DecodingState, Callable[..., Iterator[int]]]:
    """Return an empty decoding state, and `generate`, or `generate_prompt_lookup` if flags.draft_tokens > 0."""
    dtype = cache_dtype(flags.kv_cache_dtype)
    if flags.draft_tokens < 0:
        raise ValueError(f"expected --draft-tokens to be 0 or more, got {flags.draft_tokens}")
    if flags.draft_tokens == 0:
        return DecodingState(model, quantized_dtype(dtype) if dtype == "bfloat16" else dtype), generate
    from tricycle.decoding.prompt_lookup import generate_prompt_lookup
    from tricycle.decoding.speculative import SpeculativeState

    return SpeculativeState(model, dtype), partial(generate_prompt_lookup, n_draft_tokens=flags.draft_tokens)


def use_gpu(device: str, weights: str = "float32") -> bool:
    """Return whether to use a GPU; "auto": if one works and weights can be float32; "gpu": raise if it cannot be used.

    Raises:
        RuntimeError: device is "gpu", and no GPU can be used.
        ValueError: device is "gpu", with weights that cannot be float32.
    """
    if weights not in ("auto", "float32"):
        if device == "gpu":
            raise ValueError(f"--weights {weights}: expected --device cpu (weights on a GPU are float32), got gpu")
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
    kinds: tuple[Any, ...] = (GPT,),
) -> Pretrained:
    """Load a decoder, or change `loaded` in place: set tokenizer (ValueError without), adapter, softmax and device.

    Args:
        source: a run folder, a checkpoint, a pickle, or a source that `tricycle.pretrained.load` takes.
        tokeniser: a tokenizer file, used in place of the model's own tokenizer.
        softmax: the attention normalizer, if another one than the model was trained with.
        device: "auto", "cpu" or "gpu".
        weights: as in `tricycle.pretrained.load`; types of fewer than 32 bits are for CPUs.
        adapter: a LoRA adapter, a folder in PEFT's format or a GGUF file, which is attached.
        loaded: the result of `load_file` for this source, if the caller has loaded it already.
        kinds: the classes of models that the command supports.

    Raises:
        FileNotFoundError, ValueError: the source, or a flag for it, is wrong.
    """
    on_gpu = use_gpu(device, weights)
    if loaded is None:
        loaded = load_file(source, weights, device)
    if not isinstance(loaded.model, kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"{source}: expected a {names}, which generates text, got a {type(loaded.model).__name__}")
    if tokeniser is not None:
        loaded.tokeniser = load_tokeniser(tokeniser)
    if loaded.tokeniser is None and Path(source).suffix in PICKLES:  # the toy Shakespeare script writes such a pickle
        from tricycle_datasets.shakespeare import Shakespeare

        loaded.tokeniser = Shakespeare(loaded.model.config.vocab_size).tokeniser
        used = f"using the one of tiny Shakespeare, of {loaded.tokeniser.n_vocab:,} tokens"
        print(f"{source}: a pickle has no tokenizer: {used}; choose another with --tokeniser", file=sys.stderr)
    if loaded.tokeniser is None:
        raise ValueError(f"{source}: expected a model with a tokenizer, got none: give one with --tokeniser")
    vocab_size, n_vocab = loaded.model.config.vocab_size, loaded.tokeniser.n_vocab
    if n_vocab > vocab_size:
        raise ValueError(f"expected a tokenizer of at most {vocab_size} tokens, the model's vocabulary, got {n_vocab}")
    if adapter is not None:
        load_adapter(loaded, adapter)
    if softmax is not None:
        if not all(hasattr(block, "attention") for block in getattr(loaded.model, "blocks", [None])):
            raise ValueError("--softmax: expected a decoder with attention in all blocks, got another model")
        loaded.model.use_softmax(softmax, loaded.model.config.softmax_blocks)
    if on_gpu:
        loaded.model.to_gpu()
    else:  # rounding float32 weights to 16 bits for each token would cost more time than it saves
        loaded.model.use_precision("bfloat16" if weights == "bfloat16" else "float32")
    return loaded


def load_file(source: str, weights: str = "float32", device: str = "cpu") -> Pretrained:
    """Load a model by path or name into host memory, even for a GPU; the tokenizer may be None; error for no model.

    The weights are in host memory. On a GPU, which `use_gpu(device, weights)` decides, "auto" is float32.

    Raises:
        FileNotFoundError, ValueError: the source is missing, or contains no model.
    """
    path = Path(source)
    weights = "float32" if use_gpu(device, weights) else weights
    if path.suffix in PICKLES:
        model = load_pickled_model(path)
        if weights in DTYPE_NAMES:
            quantize(model, weights)
        return Pretrained(model, None, GenerationSettings())
    if not path.exists() and path.suffix in FILES:
        raise FileNotFoundError(f"{path}: expected a model, there is no such file")
    if path.is_file() and path.suffix not in MODELS and not _is_gguf(path):
        raise ValueError(f"{path}: expected a folder, or a file that ends in {', '.join((*MODELS, *PICKLES))}")
    if (path / "data.json").is_file() and not any((path / name).is_file() for name in RUN_CHECKPOINTS):
        raise FileNotFoundError(f"{path}: expected a run folder with {' or '.join(RUN_CHECKPOINTS)}")
    if (path / "adapter" / "adapter_config.json").is_file():
        raise ValueError(f"{path}: expected a model, got an adapter: give its base model, and this with --adapter")
    return load(source, weights)


def _is_gguf(path: Path) -> bool:
    """Return whether a file begins with GGUF's magic bytes."""
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


@dataclass(frozen=True)
class SamplingFlags:
    """The sampling flags; the default of each is the model's own generation setting."""

    temperature: float | None = None
    """the logits are divided by it; 0 is greedy decoding (models trained by Tricycle: 0.9, `serve`: 1)"""
    top_k: int | None = None
    """sample from the k most probable tokens; 0 for all tokens"""
    top_p: float | None = None
    """sample from the smallest set of most probable tokens whose probabilities reach this sum"""
    min_p: float | None = None
    """sample from the tokens whose probability is at least this fraction of the highest (models trained by Tricycle:
    0.1, `serve`: 0)"""
    repetition_penalty: float | None = None
    """divide the logits of tokens that are in the text already by it; 1 for no penalty (models trained by Tricycle:
    1.15, `serve`: 1)"""
    no_repeat_ngram_size: int | None = None
    """never repeat a sequence of this many tokens; 0 for no limit (models trained by Tricycle: 6, `serve`: 0)"""
    seed: int | None = None
    """seed of the random generator: the same seed gives the same text"""

    def for_model(self, loaded: Pretrained, fallback: dict[str, Any] | None = None) -> PenalizedSamplingParams:
        """Return the model's sampling, with given flags; `fallback` changes it for a pretrained model without settings.

        Args:
            loaded: the model with its generation settings.
            fallback: parameters for a pretrained model without generation settings.

        Raises:
            ValueError: a parameter out of range.
        """
        sampling = default_sampling(loaded)
        names = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        if (
            fallback
            and loaded.source is not None
            and not any(loaded.source.generation.get(x) is not None for x in names)
        ):
            sampling = replace(sampling, **fallback)
        return self.override(sampling)

    def override(self, sampling: PenalizedSamplingParams) -> PenalizedSamplingParams:
        """Return the parameters with the given flags in place of theirs, and no seed unless a flag sets one."""
        stated = {name: value for name, value in asdict(self).items() if value is not None}
        return replace(sampling, **{"seed": None, **stated})


def default_sampling(loaded: Pretrained) -> PenalizedSamplingParams:
    """Return fixed sampling parameters for Tricycle's models, else generation settings (greedy unless do_sample)."""
    sampling = SAMPLING
    if loaded.source is not None:
        generation = loaded.generation
        values = {name: getattr(generation, name) for name in ("top_k", "top_p", "min_p", "repetition_penalty")}
        sampling = PenalizedSamplingParams(generation.temperature if generation.do_sample else 0.0, **values)
    return replace(sampling, stop_tokens=stop_tokens(loaded), n_vocab=loaded.tokeniser.n_vocab)


def stop_tokens(loaded: Pretrained) -> list[int]:
    """Return the sorted ids of the tokens that end a text: those of the generation settings, else end-of-text."""
    return sorted({*loaded.generation.stop_tokens} or {loaded.tokeniser.end_of_text})


def chat_stop_tokens(loaded: Pretrained) -> list[int]:
    """Return `stop_tokens`, and the token that ends an answer by the chat template, which the settings may lack."""
    stops = stop_tokens(loaded)
    if loaded.tokeniser.chat_template:
        with contextlib.suppress(ValueError):  # a template may reject the short conversation that this uses
            end = loaded.tokeniser.end_of_answer()
            stops += [] if end is None or end in stops else [end]
    return stops
