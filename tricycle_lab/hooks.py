"""Hooks on the `forward` of layers and ops, which record or change results; `probe.py` and experiments use them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import numpy as np

from tricycle.attention import Attention
from tricycle.blocks import TransformerBlock
from tricycle.devices import Array
from tricycle.extra_ops import concatenate, where
from tricycle.functions import RowSoftmax
from tricycle.layers import Layer
from tricycle.state_spaces.mamba import MambaBlock
from tricycle.tensor import Tensor

RemoveHook = Callable[[], None]
Observer = Callable[..., None]  # called with the layer or op, its result, and its arguments
Change = Callable[..., Any]  # maps the result and the arguments to another result
Substitution = Callable[[Any, tuple[Any, ...]], tuple[Any, tuple[Any, ...]]]  # maps an op and its arguments to others
Value = Tensor | Array | float | Callable[[Tensor], Any]


class HookedForward:
    """A replacement of `forward` of one layer or op that calls the original one and all hooks.

    Attributes:
        substitutions: called before `forward`; they return the op to call in its place, and its arguments.
        changes: called in order with the result; they return another result.
        observers: called last, with the final result.
    """

    def __init__(self, target: Any) -> None:
        self.target = target
        self.own_forward = {"forward": target.forward} if "forward" in vars(target) else {}
        self.forward = target.forward
        self.substitutions: list[Substitution] = []
        self.changes: list[Change] = []
        self.observers: list[Observer] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the target with its substitutions, apply the changes, and call the observers."""
        target = self.target
        for substitution in self.substitutions:
            target, args = substitution(target, args)
        out = (self.forward if target is self.target else target)(*args, **kwargs)
        for change in self.changes:
            out = change(out, *args)
        for observer in self.observers:
            observer(target, out, *args, **kwargs)
        return out


def add_hook(target: Any, kind: str, function: Callable[..., Any]) -> RemoveHook:
    """Append a hook to "observers", "changes" or "substitutions" of target.forward; return a function to remove it.

    All hooks of a target share one `HookedForward`, so they can be removed in any order. Without hooks the original
    `forward` is restored.

    Args:
        kind: "observers", "changes" or "substitutions".
    """
    hooked = target.forward if isinstance(target.forward, HookedForward) else HookedForward(target)
    functions = getattr(hooked, kind)
    functions.append(function)
    target.forward = hooked

    def remove() -> None:
        index = next(i for i, other in enumerate(functions) if other is function)
        del functions[index]
        if not (hooked.substitutions or hooked.changes or hooked.observers):
            del target.forward
            vars(target).update(hooked.own_forward)

    return remove


def attention_of(layer: Layer) -> Any:
    """Return an attention layer's `attention` if it has `score_options`; None for others, such as whole blocks."""
    attention = getattr(layer, "attention", None)
    return attention if hasattr(attention, "score_options") else None


def op_with_heads(layer: Layer) -> Any:
    """Return the op of a layer whose result is (B, T, H, E): attention, the scan of a state, or None."""
    return getattr(layer, "scan", None) if hasattr(layer, "token_weights") else attention_of(layer)


# -------------------------------------------------------------------- changes
def make_replacement(caller: str, value: Value, heads: Sequence[int] | None, positions: Sequence[int] | None) -> Change:
    """Return a hook that replaces a result by a value that broadcasts to it, only at heads and positions if given.

    The result of a layer is (..., T, C); with heads it is that of an attention op, (B, T, H, E).
    """

    def change(out: Any, *args: Any) -> Tensor:
        if not isinstance(out, Tensor):
            raise ValueError(f"{caller}: expected a layer that returns one Tensor, got {type(out).__name__}")
        new = value(out) if callable(value) else value
        if new is None:  # NumPy would convert it to NaN
            raise ValueError(f"{caller}: expected a function that returns a value, got None")
        shape = new.shape if isinstance(new, Tensor) else np.shape(new)
        try:
            fits = np.broadcast_shapes(shape, out.shape) == out.shape
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(f"{caller}: expected a value that broadcasts to {out.shape}, got shape {shape}")
        selected = _selection_mask(caller, out, heads, positions)
        if not isinstance(new, Tensor):
            new = Tensor(out.xp.asarray(new, out.dtype), requires_grad=False)
        return where(selected, new, out)

    return change


def make_ablation(layer: Layer, caller: str, heads: Sequence[int] | None, positions: Sequence[int] | None) -> Change:
    """Return a change hook that sets the result of a layer or of heads to 0; a block returns its input instead."""
    if not isinstance(layer, (TransformerBlock, MambaBlock)) or heads is not None:
        return make_replacement(caller, 0.0, heads, positions)
    n_channels = getattr(layer, "sizes", [None])[0]  # a block of several streams passes on more than its streams

    def skip(out: Tensor, x: Tensor, *args: Any) -> Tensor:
        selected = _selection_mask(caller, out, None, positions)
        if n_channels is None:
            return where(selected, x, out)
        return concatenate([where(selected, x[..., :n_channels], out[..., :n_channels]), out[..., n_channels:]], -1)

    return skip


def _selection_mask(caller: str, out: Tensor, heads: Sequence[int] | None, positions: Sequence[int] | None) -> Any:
    """Return booleans that broadcast to a result: True for the selected heads and positions; ValueError if 1-D."""
    selected = np.ones((), bool)
    if heads is not None:
        selected = _index_mask(caller, "heads", heads, out.shape[-2])[:, None]
    if positions is not None:
        if out.ndim < 2:
            raise ValueError(f"{caller}: expected a layer that returns (..., tokens, channels), got shape {out.shape}")
        axis = 1 if heads is None else 2  # the axes after the tokens: channels, or heads and their channels
        selected = _index_mask(caller, "positions", positions, out.shape[-1 - axis])[(..., *[None] * axis)] & selected
    return out.xp.asarray(selected)


def _index_mask(caller: str, argument: str, indices: Sequence[int], size: int) -> np.ndarray:
    """Return booleans (size,), True at the indices, which may be negative; ValueError if out of range."""
    mask = np.zeros(size, bool)
    for index in indices:
        if not -size <= index < size:
            raise ValueError(f"{caller}: expected {argument} from {-size} to {size - 1}, got {index}")
        mask[index] = True
    return mask


def as_indices(caller: str, argument: str, indices: Any) -> list[int] | None:
    """Convert an integer or a 1-D sequence of integers to a list, and None to None; else raise ValueError."""
    if indices is None:
        return None
    array = np.atleast_1d(np.asarray(indices))
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{caller}: expected {argument} as integers, got {indices!r}")
    return [int(index) for index in array]


# -------------------------------------------------------------------- softmax variants
def substitute_softmax(layer: Any, softmax: str | RowSoftmax | None, temperature: float | None) -> Substitution:
    """Return a hook, (op, args) to (op, args), for `layer`'s attention op: other softmax, or scores / temperature."""
    changed = copy(layer)  # shares all weights, but has its own op and softmax scales
    if softmax is not None:
        changed.use_softmax(softmax)

    def substitute(op: Attention, args: tuple[Any, ...]) -> tuple[Attention, tuple[Any, ...]]:
        query, key, value, mask, scales, *rest = (*args, None, None)[: max(5, len(args))]
        new_softmax = op.softmax
        if softmax is not None:
            new_softmax, scales = changed.attention.softmax, changed.softmax_scales
        new = Attention(new_softmax, op.causal, op.window, op.scale, op.softcap)
        if temperature is not None:
            # cap tanh(s / cap) / t = (cap / t) tanh((s / t) / (cap / t))
            new.scale = (query.shape[3] ** -0.5 if op.scale is None else op.scale) / temperature
            new.softcap = None if op.softcap is None else op.softcap / temperature
        return new, (query, key, value, mask, scales, *rest)

    return substitute
