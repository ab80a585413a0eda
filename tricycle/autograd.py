"""Reverse-mode automatic differentiation: the backward pass over the graph of Tensors.

Each node of the graph is a Tensor with the inputs of its operation (`args`) and one backward function, which maps the
gradient of the result to those of the inputs. `walk_backward` visits the nodes in reverse topological order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

from tricycle import kernels
from tricycle.devices import Array, array_module, joined_view, owns_memory

NeedsGrad: TypeAlias = Sequence[bool]  # which args of an operation need a gradient
# backward(grad, needs_grad, *saved) maps the gradient of the result, an array, to one for each arg: an array, a
# SlicedGradient, an OwnedGradient, or None for zero. The value for an arg that needs no gradient is ignored.
Backward: TypeAlias = Callable[..., Sequence[Any]]


class Node(Protocol):
    """The attributes of a Tensor that the backward pass uses."""

    array: Array
    args: tuple[Any, ...]
    requires_grad: bool
    name: str | None
    _backward: Any
    _saved: tuple[Any, ...]
    _version: int


AnyNode = TypeVar("AnyNode", bound=Node)


def walk_backward(order: list[AnyNode], root_grad: Array, sums: GradientSums) -> Iterator[tuple[AnyNode, Array]]:
    """Run the backward pass lazily, freeing the graph unless `sums` retains it; yield leaves and gradients.

    `order` is the `topological_order` of the root, and is emptied. `sums` must be empty, and keeps the gradients of its
    `inputs`, at which the pass ends. Arrays may share memory.

    Raises:
        RuntimeError: the graph was freed by an earlier walk, or an array in it has been changed in place.
    """
    add, take = sums.add, sums.take
    add(order[-1:], (True,), (root_grad,))
    while order:
        node = order.pop()
        grad = take(node)
        args, backward, saved = node.args, node._backward, node._saved
        if not args:
            if grad is not None:
                yield node, grad
            continue
        if grad is not None and node._version != n_changes:
            check_unchanged(node)
        if not sums.retain_graph:
            node.args, node._backward, node._saved, node._version = (), None, (), -1
        del node  # frees its array, unless referenced elsewhere, before the backward function allocates new arrays
        if grad is not None:
            needs_grad = [arg.requires_grad for arg in args]
            add(args, needs_grad, backward(grad, needs_grad, *saved))


def topological_order(*roots: AnyNode, inputs: Iterable[AnyNode] = ()) -> list[AnyNode]:
    """Return the nodes from `inputs` (excluded) to the roots, args before results; RuntimeError if they were freed."""
    order: list[AnyNode] = []
    seen: set[AnyNode] = set(inputs)  # by identity, as Tensors are hashed
    stack: list[Any] = [*reversed(roots)]  # no recursion: a chain of 100,000 operations exceeds Python's stack
    while stack:
        node = stack.pop()
        if node is None:  # all args of the node below it are in `order`
            order.append(stack.pop())
        elif node not in seen:
            if node._version < 0:
                rule = "call backward(retain_graph=True) to keep it"
                raise RuntimeError(f"backward: the graph was freed by an earlier backward(); {rule}")
            seen.add(node)
            stack += (node, None)
            for arg in reversed(node.args):
                if arg.requires_grad and arg not in seen:
                    stack.append(arg)
    return order


class SlicedGradient(NamedTuple):
    """A gradient that is 0 outside of one slice, `gradient[index] = array`; `unique`: no element is selected twice."""

    array: Array
    index: Any
    unique: bool = False


class OwnedGradient(NamedTuple):
    """A gradient whose memory only a freed graph shares, so that others of the same arg may be added to it in place."""

    array: Array


class GradientSums:
    """The accumulated gradients of nodes that the backward pass has not reached yet.

    A gradient may share memory (an addition passes the same array to both inputs). Only arrays allocated here, or that
    came as `OwnedGradient` from a graph not retained, are added to in place, never 0-d sums: they are NumPy scalars.
    """

    def __init__(self, retain_graph: bool = False) -> None:
        self.retain_graph = retain_graph
        self.arrays: dict[Node, Array] = {}
        self.slices: dict[Node, list[SlicedGradient]] = {}
        self.owned: set[int] = set()  # ids of nodes, which exist until the backward pass reaches them
        self.handed_out: dict[int, Array] = {}

    def add(self, args: Sequence[Node], needs_grad: NeedsGrad, gradients: Sequence[Any]) -> None:
        """Add each gradient, if needed and not None, to its arg's sum, in the arg's dtype; only collect sliced ones."""
        arrays, owned = self.arrays, self.owned
        for arg, needs, grad in zip(args, needs_grad, gradients, strict=True):
            if not needs or grad is None:
                continue
            kind = type(grad)
            if kind is SlicedGradient:
                self.slices.setdefault(arg, []).append(grad)
                continue
            array = grad if kind is np.ndarray else getattr(grad, "array", grad)  # a Tensor is accepted, too
            dtype = arg.array.dtype
            if array.dtype is not dtype:
                array = array.astype(dtype, copy=False)
            own = array if kind is OwnedGradient and array.size > 1 and not self.retain_graph else None
            if arg in arrays:
                add = kernels.add if array.size >= kernels.LARGE else kernels.add.reference
                array = own = add(arrays[arg], array, arrays[arg] if id(arg) in owned else own)
            arrays[arg] = array
            if own is not None and own.size > 1:
                owned.add(id(arg))

    def take(self, node: Node) -> Array | None:
        """Remove and return the complete gradient of a node, its slices added to the sum; None if it has none."""
        grad, slices = self.arrays.pop(node, None), self.slices.pop(node, None)
        if slices is None:
            return grad
        if grad is None:
            return sum_slices(slices, node.array).astype(node.array.dtype, copy=False)
        if id(node) not in self.owned:
            grad = kernels.in_chunks(array_module(grad).copy, grad)
        _add_slices(grad, slices)
        return grad

    def unshare(self, leaf: Node, grad: Array) -> Array:
        """Return the gradient of a leaf, copied if its memory is shared with another array."""
        is_shared = isinstance(grad, np.generic) or not owns_memory(grad) or id(grad) in self.handed_out
        if (is_shared or self.retain_graph) and id(leaf) not in self.owned:
            grad = kernels.in_chunks(array_module(grad).copy, grad)
        self.handed_out[id(grad)] = grad
        return grad


def sum_slices(slices: list[SlicedGradient], like: Array) -> Array:
    """Return the sum of sliced gradients as an array like `like`, 0 elsewhere; a view if they adjoin in memory."""
    if neighbours := _neighbours(slices, like.shape):
        whole = joined_view(neighbours)  # no copy if they are adjacent in memory
        return array_module(like).concatenate(neighbours, axis=-1) if whole is None else whole
    total = kernels.empty(like, like.shape)
    total[...] = 0
    _add_slices(total, slices)
    return total


def _add_slices(total: Array, slices: list[SlicedGradient]) -> None:
    """Add each slice's gradient to `total` in place, repeatedly for elements that its index selects repeatedly."""
    for array, index, unique in slices:
        parts = index if isinstance(index, tuple) else (index,)
        if unique or all(isinstance(part, (int, np.integer, slice, type(None), type(...))) for part in parts):
            total[index] += array
        else:
            kernels.add_at(total, index, array)


def _neighbours(slices: list[SlicedGradient], shape: tuple[int, ...]) -> list[Array]:
    """Return the arrays of slices that partition the last axis of this shape, in order; [] if they do not."""
    for _, index, _ in slices:
        if not isinstance(index, tuple) or not index or not all(isinstance(part, slice) for part in index):
            return []
        if index[:-1] != (slice(None),) * (len(shape) - 1):
            return []
    placed = sorted(slices, key=lambda part: part.index[-1].indices(shape[-1]))
    starts, stops, steps = zip(*(part.index[-1].indices(shape[-1]) for part in placed))
    return [part.array for part in placed] if (*starts, shape[-1]) == (0, *stops) and set(steps) == {1} else []


_changing = threading.Lock()
n_changes = 0  # in-place changes so far; a Tensor's version is this count at its creation or last change


def increment_versions(tensors: Iterable[Node]) -> None:
    """Record an in-place change of inputs or parameters: `backward` through earlier results raises a RuntimeError."""
    global n_changes
    with _changing:
        n_changes += 1
        for tensor in tensors:
            tensor._version = n_changes


def check_unchanged(node: Node) -> None:
    """Raise a RuntimeError if a leaf among the args of a node was changed after the node was computed."""
    for arg in node.args:
        if arg._version > node._version and not arg.args:
            what = f"{describe(arg)} was changed in place after {node.name or 'a result'} was computed from it"
            raise RuntimeError(f"backward: {what}: compute the result again")


def describe(node: Node) -> str:
    """Return "NAME of shape SHAPE" for a Tensor (NAME is "a Tensor" if it has none), for error messages."""
    return f"{node.name or 'a Tensor'} of shape {node.array.shape}"


class Mode(NamedTuple):
    """Settings of graph building and evaluation within a `with` block of one thread."""

    builds_graph: bool = True  # results can be differentiated
    evaluates: bool = False  # layers behave as in evaluation, regardless of their `training`
    on_record: Callable[[Any], None] | None = None  # called with each result that can be differentiated
    run_block: Callable[..., Any] | None = None  # calls each block of a model, as run_block(block, x, ...)


# The active modes of this thread. Each block removes its own mode: blocks in generators end in any order.
current_modes: ContextVar[tuple[Mode, ...]] = ContextVar("current_modes", default=())


@contextmanager
def graph_mode(mode: Mode) -> Iterator[None]:
    """Activate a mode in this thread within a `with` block; at its end remove only this mode, even out of order."""
    mode = mode._replace()  # a new object: a decorator enters the same mode repeatedly
    current_modes.set((*current_modes.get(), mode))
    try:
        yield
    finally:
        current_modes.set(tuple(other for other in current_modes.get() if other is not mode))


def evaluation() -> AbstractContextManager[None]:
    """Return a context manager that disables graph building and dropout in this thread."""
    return graph_mode(Mode(builds_graph=False, evaluates=True))


def is_evaluating() -> bool:
    """Return whether a block of `evaluation` is active in this thread."""
    return any(mode.evaluates for mode in current_modes.get())


def grad_enabled_for(*args: Node) -> bool:
    """Return whether an operation on these Tensors records a backward function, and so must save its inputs."""
    return any(arg.requires_grad for arg in args) and all(mode.builds_graph for mode in current_modes.get())
