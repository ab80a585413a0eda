"""A model as one HTML file that generates text in the browser, without a server or a network connection."""

from __future__ import annotations

import base64
import copy
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from tricycle.blocks import MultiHeadSelfAttention, TransformerBlock
from tricycle.configs.model import ModelConfig
from tricycle.decoding.penalties import PenalizedSamplingParams
from tricycle.finetuning.lora import AdaptedDense
from tricycle.kernels.quantized import QuantizedMatrix
from tricycle.models import GPT
from tricycle.softmaxes import config_with_softmax
from tricycle.tokeniser import BPETokeniser
from tricycle.weights import quantize
from tricycle_lab.look.page import FOLDER, render_page

WORKER_FILES = ("model.js", "tokenizer.js", "sampling.js", "worker.js")
MAX_WEIGHT_BYTES = 64 * 2**20  # larger models are too slow in a browser
# The fields that model.js reads, with their values if it does not have all, and those that do not change its results.
# The others must have their defaults.
CHOICES = {
    "softmax": ("softmax", "softmax1", "sink", "adaptive"),
    "activation": tuple("gelu gelu_exact relu relu_squared sigmoid swiglu clamped_swiglu swish tanh".split()),
    "norm": ("layer_norm", "rms_norm"),
    "norm_placement": ("before", "after", "both", "output"),
    "positions": ("learned", "rotary", "none"),
    "rotary_scaling": ("none", "linear", "llama3", "yarn"),
}
FIELDS = """
vocab_size context_window embedding_dim n_heads n_layers n_key_heads head_size hidden_size gated norm_eps
norm_unit_offset parallel shared_norm position_offset rotary_base rotary_local_base rotary_fraction unrotated_layers
rotary_factor rotary_low_frequency rotary_high_frequency rotary_original_window rotary_rounded rotary_attention_factor
qk_norm qk_norm_gain qk_norm_eps qk_norm_per_head window full_layers score_scale score_cap token_shift key_shift bias
qkv_bias output_bias mlp_bias tied head_bias embedding_size embedding_scale residual_scale logit_scale logit_cap
""".split()
WITHOUT_EFFECT = """
expansion_ratio n_active_experts normalize_experts router_loss router_bias softmax_blocks precision zero_projections
dropout seed
""".split()
SAMPLING_FIELDS = """
temperature top_k top_p min_p repetition_penalty no_repeat_ngram_size stop_tokens n_vocab
""".split()


def render_standalone_page(
    model: Any, tokeniser: Any, sampling: PenalizedSamplingParams, title: str, facts: Mapping[str, Any] | None = None
) -> str:
    """Return an HTML document that contains a decoder in int8 with its tokenizer, and generates text with it.

    Args:
        model: a `GPT`, which stays unchanged.
        tokeniser: a `BPETokeniser`.
        sampling: the initial values of the sampling parameters on the page.
        title: the title, such as the name of a run.
        facts: further names and values of the page's table about the model.

    Raises:
        ValueError: a model, config field or tokenizer that the page does not support, weights that are not finite, or
            a model that is too large.
    """
    check_supported(model, tokeniser)
    tensors, content = pack_weights(quantize(copy.deepcopy(model)))
    fields = asdict(sampling)
    params = {name: fields[name] for name in SAMPLING_FIELDS} | {"new_text": tokeniser.new_text}
    data = {
        "title": title,
        "facts": describe_model(model, len(content), facts or {}),
        "config": config_with_softmax(model).to_dict(),
        "tensors": tensors,
        "weights": base64.b64encode(zlib.compress(content)).decode("ascii"),
        "tokenizer": describe_tokenizer(tokeniser),
        "sampling": params,
        "worker": "".join((FOLDER / name).read_text(encoding="utf-8") for name in WORKER_FILES),
    }
    return render_page("standalone", title, data, has_worker=True)


def check_supported(model: Any, tokeniser: Any) -> None:
    """Raise a ValueError, with the name of the field, for a model that the page cannot run."""
    if not isinstance(model, GPT):
        raise ValueError(f"HTML page: expected a decoder, got a {type(model).__name__}")
    if any(isinstance(layer, AdaptedDense) for layer in model.layers()):
        raise ValueError("HTML page: expected a model without an adapter: merge() or detach() it first")
    for block in model.blocks:
        if not isinstance(block, TransformerBlock):
            raise ValueError(f"HTML page: expected a model of transformer blocks, got a {type(block).__name__}")
        if type(block.attention) is not MultiHeadSelfAttention:
            got = type(block.attention).__name__
            raise ValueError(f"HTML page: expected MultiHeadSelfAttention in all blocks, got {got}")
    config = config_with_softmax(model)
    for name, field in ModelConfig.__dataclass_fields__.items():
        value = getattr(config, name)
        if name in CHOICES and value not in CHOICES[name]:
            raise ValueError(f"HTML page: expected {name} to be {', '.join(CHOICES[name])}, got {value!r}")
        if name not in (*CHOICES, *FIELDS, *WITHOUT_EFFECT) and value != field.default:
            raise ValueError(f"HTML page: expected {name} to be {field.default!r}, got {value!r}")
    if not isinstance(tokeniser, BPETokeniser):
        raise ValueError(
            f"HTML page: expected a tokenizer of Tricycle (BPETokeniser), got a {type(tokeniser).__name__}"
        )
    if model.n_parameters > MAX_WEIGHT_BYTES:
        limit, size = MAX_WEIGHT_BYTES / 1e6, model.n_parameters / 1e6
        raise ValueError(
            f"HTML page: expected at most {limit:.0f} million parameters, got {size:.0f} million: the page would have "
            f"about {size * 4 / 3:.0f} MB, and take seconds for each token"
        )


def pack_weights(model: GPT) -> tuple[list[tuple[str, list[int], str, int]], bytes]:
    """Return (name, shape, dtype, offset) of each tensor of an int8 model, and the bytes of all, each aligned to 4.

    The shape of an int8 matrix is that of its stored rows, whose scales follow as "<name>.scales".
    """
    arrays: dict[str, np.ndarray] = {}
    for name, parameter in model.named_parameters():
        matrix: Any = parameter.array
        if isinstance(matrix, QuantizedMatrix) and matrix.scales is not None:
            arrays[name], arrays[f"{name}.scales"] = matrix.values, matrix.scales
        else:
            arrays[name] = np.asarray(matrix, np.float32)
    tensors, content = [], bytearray()
    for name, array in arrays.items():
        tensors.append((name, list(array.shape), array.dtype.name, len(content)))
        content += array.astype(array.dtype.newbyteorder("<")).tobytes()
        content += bytes(-len(content) % 4)
    return tensors, bytes(content)


def describe_tokenizer(tokeniser: BPETokeniser) -> dict[str, Any]:
    """Return the tokens (in Latin-1), the names of special tokens, and the pattern as a JavaScript expression."""
    state = tokeniser.to_dict()
    pattern = re.sub(r"\\U([0-9a-f]{8})", lambda match: f"\\u{{{match[1].lstrip('0')}}}", tokeniser.pattern)
    return {"tokens": state["tokens"], "special_tokens": state["special_tokens"], "pattern": pattern}


def describe_model(model: GPT, n_bytes: int, facts: Mapping[str, Any]) -> dict[str, str]:
    """Return names and values for the page's table about the model, `facts` last."""
    config = model.config
    return {
        "parameters": f"{model.n_parameters:,}",
        "weights": f"{n_bytes / 1e6:.2f} MB in 8 bits",
        "layers": str(config.n_layers),
        "attention heads per layer": str(config.n_heads),
        "width": str(config.embedding_dim),
        "context window": f"{config.context_window:,} tokens",
        "vocabulary": f"{config.vocab_size:,} tokens",
        **{name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in facts.items()},
    }
