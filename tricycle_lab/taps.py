"""Listeners and changes at single layers and ops of a model that runs: what probes are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import numpy as np

from tricycle.attention import Attention
from tricycle.blocks import TransformerBlock
from tricycle.devices import Array
from tricycle.extra_ops import where
from tricycle.functions import RowSoftmax
from tricycle.layers import Layer
from tricycle.tensor import Tensor

Undo = Callable[[], None]
Listener = Callable[..., None]  # of what ran, its result, and what it was called with
Change = Callable[..., Any]  # from the result and the arguments to what goes on instead
Exchange = Callable[[Any, tuple[Any, ...]], tuple[Any, tuple[Any, ...]]]  # another op, with other arguments
Value = Tensor | Array | float | Callable[[Tensor], Any]


class Tap:
    """Stands in for the `forward` of one layer or op: calls it, changes what it gives and tells all listeners.

    Attributes:
        exchanges: what to call in its place. changes: of the result, one after the other. listeners: told at last.
    """

    def __init__(self, part: Any) -> None:
        self.part = part
        self.before = {"forward": part.forward} if "forward" in vars(part) else {}
        self.forward = part.forward
        self.exchanges: list[Exchange] = []
        self.changes: list[Change] = []
        self.listeners: list[Listener] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        part = self.part
        for exchange in self.exchanges:
            part, args = exchange(part, args)
        out = (self.forward if part is self.part else part)(*args, **kwargs)
        for change in self.changes:
            out = change(out, *args)
        for listener in self.listeners:
            listener(part, out, *args, **kwargs)
        return out


def tap(part: Any, kind: str, function: Callable[..., Any]) -> Undo:
    """Let a function listen to a layer or op, or change it; returns what ends that.

    All functions of one part share a tap, so that they may leave in any order; the last one takes it away.

    Args:
        kind: "listeners", "changes" or "exchanges".
    """
    own = part.forward if isinstance(part.forward, Tap) else Tap(part)
    functions = getattr(own, kind)
    functions.append(function)
    part.forward = own

    def leave() -> None:
        place = next(i for i, other in enumerate(functions) if other is function)
        del functions[place]
        if not (own.exchanges or own.changes or own.listeners):
            del part.forward
            vars(part).update(own.before)

    return leave


def attention_of(layer: Layer) -> Any:
    """Return the attention op of a layer, if it has one."""
    attention = getattr(layer, "attention", None)
    return attention if hasattr(attention, "score_options") else None


# -------------------------------------------------------------------- changes
def replacing(title: str, value: Value, heads: Sequence[int] | None, positions: Sequence[int] | None) -> Change:
    """A change of what a layer gives, (..., T, C), or with heads of what attention gives, (B, T, H, E)."""

    def change(out: Any, *args: Any) -> Tensor:
        if not isinstance(out, Tensor):
            raise ValueError(f"{title}: expected a layer that gives one Tensor, got {type(out).__name__}")
        new = value(out) if callable(value) else value
        shape = new.shape if isinstance(new, Tensor) else np.shape(new)
        try:
            fits = np.broadcast_shapes(shape, out.shape) == out.shape
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(f"{title}: expected a value that fits {out.shape}, got shape {shape}")
        chosen = _chosen(title, out, heads, positions)
        if not isinstance(new, Tensor):
            new = Tensor(out.xp.asarray(new, out.dtype), requires_grad=False)
        return where(chosen, new, out)

    return change


def nothing_of(layer: Layer, title: str, heads: Sequence[int] | None, positions: Sequence[int] | None) -> Change:
    """The change that switches a layer off, or some heads of its attention; what came into a block goes on."""
    if isinstance(layer, TransformerBlock) and heads is None:
        return lambda out, x, *args: where(_chosen(title, out, None, positions), x, out)
    return replacing(title, 0.0, heads, positions)


def _chosen(title: str, out: Tensor, heads: Sequence[int] | None, positions: Sequence[int] | None) -> Any:
    """Booleans that broadcast to the result: True for what is replaced."""
    chosen = np.ones((), bool)
    if heads is not None:
        chosen = _marked(title, "heads", heads, out.shape[-2])[:, None]
    if positions is not None:
        if out.ndim < 2:
            raise ValueError(f"{title}: expected a layer that gives (..., tokens, channels), got shape {out.shape}")
        axis = 1 if heads is None else 2  # behind tokens are channels, or heads and their channels
        chosen = _marked(title, "positions", positions, out.shape[-1 - axis])[(..., *[None] * axis)] & chosen
    return out.xp.asarray(chosen)


def _marked(title: str, what: str, places: Sequence[int], count: int) -> np.ndarray:
    marked = np.zeros(count, bool)
    for place in places:
        if not -count <= place < count:
            raise ValueError(f"{title}: expected {what} from {-count} to {count - 1}, got {place}")
        marked[place] = True
    return marked


def as_places(title: str, what: str, places: Any) -> list[int] | None:
    """Return whole numbers from one or several; raise ValueError for anything else."""
    if places is None:
        return None
    array = np.atleast_1d(np.asarray(places))
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"{title}: expected {what} as whole numbers, got {places!r}")
    return [int(place) for place in array]


# -------------------------------------------------------------------- other ways to weigh keys
def weighing(layer: Any, softmax: str | RowSoftmax | None, temperature: float | None) -> Exchange:
    """What puts another attention in the place of a layer's own: another softmax, or scores over a temperature."""
    changed = copy(layer)  # which shares all weights, and gets an op and scales of its own
    if softmax is not None:
        changed.use_softmax(softmax)

    def exchange(op: Attention, args: tuple[Any, ...]) -> tuple[Attention, tuple[Any, ...]]:
        query, key, value, mask, scales, *rest = (*args, None, None)[: max(5, len(args))]
        chosen = op.softmax
        if softmax is not None:
            chosen, scales = changed.attention.softmax, changed.softmax_scales
        new = Attention(chosen, op.causal, op.window, op.scale, op.softcap)
        if temperature is not None:
            # cap tanh(s / cap) / t is what a cap and scores over t give, too
            new.scale = (query.shape[3] ** -0.5 if op.scale is None else op.scale) / temperature
            new.softcap = None if op.softcap is None else op.softcap / temperature
        return new, (query, key, value, mask, scales, *rest)

    return exchange
