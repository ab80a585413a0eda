"""Simulated 8-bit quantization of weights and activations.

A value x becomes s round(x / s) with s = max |x| / 127: symmetric, by the largest value (absmax). With one scale a
tensor, one outlier makes s large for all. Products of such values in float32 are those that int8 hardware would give.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np

from tricycle.layers import Dense
from tricycle.models import GPT
from tricycle.tensor import Tensor
from tricycle_lab.hooks import add_hook

LEVELS = 127
MATRICES = "attention.qkv", "attention.projection", "mlp.up", "mlp.projection"


class Rounding(NamedTuple):
    """The arrays that are rounded to 8 bits, and the granularity of the scales.

    Attributes:
        weights, activations: of the products within blocks: "tensor" for one scale, "row" for one for each column of a
            matrix and for each token; "" leaves them.
        stream: the stream behind each block is rounded too, with one scale for a text.
        first: of activations the first token's are rounded too, and count for the scale.
        only: one of MATRICES, the only ones whose product is rounded; "" for all.
    """

    weights: str = ""
    activations: str = ""
    stream: bool = False
    first: bool = True
    only: str = ""


ROUNDINGS = {
    "weights, a scale a tensor": Rounding("tensor"),
    "weights and activations, a scale a tensor": Rounding("tensor", "tensor"),
    "weights and activations, a scale a row": Rounding("row", "row"),
}
MORE_ROUNDINGS = {  # only measured for models without training
    "the same without the first token's activations": Rounding("tensor", "tensor", first=False),
    "weights, activations and stream, a scale a tensor": Rounding("tensor", "tensor", True),
    "activations, a scale a tensor": Rounding("", "tensor"),
    "weights, a scale a row": Rounding("row"),
}


def rounded(x: np.ndarray, scales: str, axis: int = -1) -> np.ndarray:
    """Return x rounded to 255 levels (127 times a scale to each side), dequantized to its dtype.

    Args:
        scales: "tensor", or "row" for one scale along each line of the axis.
    """
    largest = abs(x).max(axis=axis, keepdims=True) if scales == "row" else abs(x).max()
    scale = np.maximum(largest, np.finfo(np.float32).tiny) / np.float32(LEVELS)
    return (np.rint(x / scale) * scale).astype(x.dtype, copy=False)


@contextmanager
def simulate_int8(model: GPT, rounding: Rounding) -> Iterator[None]:
    """Round the blocks' matrices and inputs to 8 bits and back in a context; use `no_grad` and one row a batch.

    Activations have a scale for what comes together: give rows one at a time.
    """
    with ExitStack() as undo:
        for block in model.blocks:
            for name, layer in block.named_layers():
                if isinstance(layer, Dense) and rounding.only in ("", name):
                    undo.callback(setattr, layer.weights, "array", layer.weights.array)
                    if rounding.weights:
                        layer.weights.array = rounded(layer.weights.array, rounding.weights, axis=0)
                    if rounding.activations:
                        undo.callback(add_hook(layer, "substitutions", _rounds_input(rounding)))
            if rounding.stream:
                undo.callback(
                    add_hook(block, "changes", lambda out, *args: Tensor(rounded(out.array, "tensor"), False))
                )
        yield


def _rounds_input(rounding: Rounding) -> Any:
    """Return a substitution that rounds a layer's input, but the first token's only if `rounding.first`."""

    def substitute(layer: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        x, *rest = args
        if rounding.first:
            new = rounded(x.array, rounding.activations)
        else:
            new = np.concatenate([x.array[:, :1], rounded(x.array[:, 1:], rounding.activations)], axis=1)
        return layer, (Tensor(new, False), *rest)

    return substitute
