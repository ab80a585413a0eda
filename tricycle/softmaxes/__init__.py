"""The ways to turn scores into weights that a config may name. `functions.py` has the base and the two simplest.

A new one is a function with its gradient, and a line here.
"""

from __future__ import annotations

from collections.abc import Callable

from tricycle.functions import RowSoftmax, Softmax, Softmax1
from tricycle.softmaxes.adaptive import AdaptiveSoftmax
from tricycle.softmaxes.blocks import BlockSoftmax
from tricycle.softmaxes.sink import SinkSoftmax

__all__ = ["SOFTMAXES", "AdaptiveSoftmax", "BlockSoftmax", "SinkSoftmax", "new_softmax"]

SOFTMAXES: dict[str, Callable[[], RowSoftmax]] = {
    "softmax": Softmax,
    "softmax1": Softmax1,
    "adaptive": AdaptiveSoftmax,
    "blocks": BlockSoftmax,
    "sink": SinkSoftmax,
}


def new_softmax(softmax: str | RowSoftmax, n_blocks: int = 2) -> RowSoftmax:
    """A variant by its name in SOFTMAXES, or as it is.

    Raises:
        ValueError: an unknown name.
        TypeError: neither name nor variant.
    """
    if isinstance(softmax, RowSoftmax):
        return softmax
    if not isinstance(softmax, str):
        raise TypeError(f"softmax: expected a name or a RowSoftmax, got {softmax!r}")
    if softmax not in SOFTMAXES:
        raise ValueError(f"softmax: expected one of {', '.join(SOFTMAXES)}, got {softmax!r}")
    return BlockSoftmax(n_blocks) if softmax == "blocks" else SOFTMAXES[softmax]()
