"""Random models for `test_fuzzing.py`: how a config and its modes are drawn, and how a model of them is built.

Every field of `ModelConfig` that changes what is computed is drawn from a few values, most of which differ from the
default, so that each pair of options comes together often. Hypothesis shrinks what fails to the options that matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tricycle.configs import ModelConfig
from tricycle.finetuning.lora import Adapter, LoRAConfig, LoRATarget, LowRankUpdate
from tricycle.layers import Dense
from tricycle.models import GPT
from tricycle.softmaxes import SOFTMAXES, BlockSoftmax, SinkSoftmax
from tricycle.weights import quantize, set_memory_order

VOCABULARY = 23
# variants that a config cannot name
VARIANTS = {
    "blocks for each head": lambda: BlockSoftmax(3, per_head=True),
    "blocks for each pair": lambda: BlockSoftmax(3, per_position=False),
    "blocks for each head and pair": lambda: BlockSoftmax(2, per_head=True, per_position=False),
    "exact blocks": lambda: BlockSoftmax(3, "exact"),
    "blocks without correction": lambda: BlockSoftmax(2, "none"),
    "sink of -2": lambda: SinkSoftmax(-2.0),
}


@dataclass(frozen=True)
class Case:
    """A model and the modes in which it is used.

    Attributes:
        variant: name in VARIANTS of a softmax that replaces the config's; None for the config's own.
        adapter: settings of a LoRA adapter on every linear layer of the blocks; None for no adapter.
        quantized: name of the dtype that weights are quantized to; None for float32 weights.
        order: memory order of the weights, "C" or "F".
        small_pieces: split work among threads even where it is small.
        seed: of weights, tokens and labels.
    """

    config: ModelConfig
    variant: str | None
    adapter: LoRAConfig | None
    quantized: str | None
    order: str
    small_pieces: bool
    seed: int

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Have Hypothesis print the options that differ from the defaults alone."""
        usual, modes = ModelConfig(), {name: value for name, value in vars(self).items() if name != "config"}
        changed = {name: value for name, value in vars(self.config).items() if value != getattr(usual, name)}
        printer.text(f"Case({changed}, {modes})")


def _one_of(draw: Any, *values: Any) -> Any:
    return draw(st.sampled_from(values))


def _sizes(draw: Any) -> dict[str, Any]:
    head_size, n_heads, n_layers = _one_of(draw, 4, 8, 16), _one_of(draw, 1, 2, 4), _one_of(draw, 1, 2)
    width = n_heads * _one_of(draw, 4, 8)
    return {
        "embedding_dim": width,
        "n_heads": n_heads,
        "head_size": 0 if width // n_heads == head_size else head_size,
        "n_key_heads": _one_of(draw, 0, *(n for n in (1, 2, 4) if n_heads % n == 0)),
        "n_layers": n_layers,
        "context_window": _one_of(draw, 33, 2, 9, 24, 70),
        "window": _one_of(draw, 0, 1, 3, 7, 20, 100),
        "full_layers": _one_of(draw, (), (n_layers - 1,)),
        "softmax_blocks": _one_of(draw, 2, 1, 3, 5),
        "embedding_size": _one_of(draw, 0, 0, 4),
    }


def _positions(draw: Any, head_size: int) -> dict[str, Any]:
    positions = _one_of(draw, "learned", "rotary", "rotary", "none")
    if positions != "rotary":
        return {"positions": positions, "position_offset": _one_of(draw, 0, 2)}
    return {
        "positions": positions,
        "rotary_base": _one_of(draw, 10_000.0, 50.0),
        "rotary_local_base": _one_of(draw, 0.0, 100.0),
        "rotary_fraction": _one_of(draw, 1.0, 0.5),
        "rotary_scaling": _one_of(draw, "none", "linear", "llama3", "yarn"),
        "rotary_factor": _one_of(draw, 1.0, 4.0),
        "rotary_high_frequency": _one_of(draw, 4.0, 1.5),
        "rotary_original_window": _one_of(draw, 8192, 8),
        "rotary_attention_factor": _one_of(draw, 1.0, 1.5),
        "qk_norm": (qk_norm := draw(st.booleans())),
        "qk_norm_gain": qk_norm and draw(st.booleans()),
        "qk_norm_per_head": not qk_norm or draw(st.booleans()),
    }


def _block(draw: Any) -> dict[str, Any]:
    placement, norm = _one_of(draw, "before", "after", "both", "output"), _one_of(draw, "layer_norm", "rms_norm")
    parallel = placement == "before" and draw(st.booleans())
    return {
        "norm": norm,
        "norm_unit_offset": norm == "rms_norm" and draw(st.booleans()),
        "norm_placement": placement,
        "parallel": parallel,
        "shared_norm": parallel and draw(st.booleans()),
        "activation": _one_of(draw, "gelu", "gelu_exact", "relu", "relu_squared", "swish", "sigmoid", "tanh", "swiglu"),
        "gated": draw(st.booleans()),
        "expansion_ratio": _one_of(draw, 4.0, 1.0),
        "hidden_size": _one_of(draw, 0, 12),
        "score_scale": _one_of(draw, 0.0, 0.3),
        "score_cap": _one_of(draw, 0.0, 0.0, 1.5),
        "token_shift": draw(st.booleans()),
        "key_shift": draw(st.booleans()),
        "softmax": _one_of(draw, *SOFTMAXES),
        "dropout": _one_of(draw, 0.0, 0.0, 0.3),
        "precision": _one_of(draw, "float32", "float32", "bfloat16", "tf32"),
    }


def _biases_and_head(draw: Any) -> dict[str, Any]:
    tied = draw(st.booleans())
    return {
        "tied": tied,
        "head_bias": not tied and draw(st.booleans()),
        "embedding_scale": _one_of(draw, 1.0, 3.0),
        "residual_scale": _one_of(draw, 1.0, 0.5),
        "logit_scale": _one_of(draw, 1.0, 0.5),
        "logit_cap": _one_of(draw, 0.0, 2.0),
        "bias": draw(st.booleans()),
        "qkv_bias": _one_of(draw, None, True, False),
        "output_bias": _one_of(draw, None, True, False),
        "mlp_bias": _one_of(draw, None, True, False),
    }


@st.composite
def cases(draw: Any) -> Case:
    """Draw a model and its modes."""
    sizes = _sizes(draw)
    head_size = sizes["head_size"] or sizes["embedding_dim"] // sizes["n_heads"]
    settings = sizes | _positions(draw, head_size) | _block(draw) | _biases_and_head(draw)
    adapter = None
    if draw(st.booleans()):
        rank, dropout = _one_of(draw, 1, 3), _one_of(draw, 0.0, 0.3)
        adapter = LoRAConfig(rank, 4.0, dropout=dropout, dora=draw(st.booleans()))
    return Case(
        ModelConfig(vocab_size=VOCABULARY, **settings),
        _one_of(draw, None, None, *VARIANTS),
        adapter,
        _one_of(draw, None, None, None, "int8", "bfloat16", "float16"),
        _one_of(draw, "C", "F"),
        draw(st.booleans()),
        draw(st.integers(0, 2**16)),
    )


def build(case: Case, seed: int | None = None) -> tuple[GPT, Adapter | None]:
    """Build the model of a case, and its adapter where it has one; `seed` in place of the case's own.

    Weights are so large that every part matters.
    """
    model = GPT(case.config)
    generator = np.random.default_rng(case.seed if seed is None else seed)
    if case.variant is not None:
        for block in model.blocks:
            block.attention.use_softmax(VARIANTS[case.variant]())
    for parameter in model.parameters():
        size = 0.5 if parameter.ndim == 1 else 1 / np.sqrt(parameter.shape[0])
        parameter.array[...] = generator.normal(0, size, parameter.shape)
    set_memory_order(model, case.order)
    if case.quantized is not None:
        quantize(model, case.quantized)
    return model, None if case.adapter is None else _adapt(model, case.adapter, generator)


def _adapt(model: GPT, config: LoRAConfig, generator: np.random.Generator) -> Adapter:
    """Attach an adapter whose matrices are not zero to each linear layer of the blocks, two pairs to wide layers."""
    low_ranks = {}
    for name, layer in model.named_layers():
        if not (isinstance(layer, Dense) and name.startswith("blocks.")):
            continue
        half = layer.to_size // 2
        cuts = [0, half, layer.to_size] if half else [0, layer.to_size]
        parts = [LoRATarget(f"{name}.{start}", start, stop, config.rank, 1.5) for start, stop in pairwise(cuts)]
        low_rank = low_ranks[name] = LowRankUpdate(
            layer.from_size, layer.to_size, parts, config.dropout, model.generator
        )
        for up in low_rank.ups:
            up.array[...] = generator.normal(0, 0.3, up.shape)
        if config.dora:
            low_rank.init_dora_magnitudes(layer)
    return Adapter(model, low_ranks, config).attach()


def documents_of(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Return document numbers (B, T), each document contiguous."""
    starts = generator.random(shape) < 0.2
    starts[:, 0] = False
    return np.cumsum(starts, axis=1)
