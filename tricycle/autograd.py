"""Reverse-mode automatic differentiation: from a result back to every input behind it.

A node of the graph is a Tensor. The operation that made it left its inputs there (`args`) and one backward function,
which computes the gradients of the inputs from the gradient of the result. `walk_backward` visits each node once, after
all nodes that were computed from it, and calls its backward function: the chain rule. `tensor.py` imports this file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from types import EllipsisType
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

from tricycle import kernels
from tricycle.devices import Array, array_module, joined_view, owns_memory

NeedsGrad: TypeAlias = Sequence[bool]  # which args of an operation need a gradient
# backward(grad, needs_grad, *saved) returns one gradient for each arg from that of the result, an array: an array, a
# SlicedGradient or an OwnedGradient; None where nothing flows; anything for an arg that needs none.
Backward: TypeAlias = Callable[..., Sequence[Any]]

LARGE = 2**18  # from this number of elements on gradients are added by a kernel, which has threads


class Node(Protocol):
    """What the walk reads of a Tensor."""

    array: Array
    args: tuple[Any, ...]
    requires_grad: bool
    name: str | None
    _backward: Any
    _saved: tuple[Any, ...]
    _version: int


AnyNode = TypeVar("AnyNode", bound=Node)


def walk_backward(
    root: AnyNode, root_grad: Array, sums: GradientSums, retain_graph: bool = False
) -> Iterator[tuple[AnyNode, Array]]:
    """Yield each leaf (input or parameter) behind a result with its complete gradient, which may share memory.

    `root_grad` is the gradient of `root`, and `sums` is empty. Unless the graph is retained it is freed on the way.

    Raises:
        RuntimeError: the graph was freed by an earlier walk, or an array in it has been changed in place.
    """
    order = topological_order(root)
    add, take = sums.add, sums.take
    add((root,), (True,), (root_grad,))
    while order:
        node = order.pop()
        grad = take(node)
        args, backward, saved = node.args, node._backward, node._saved
        if not args:
            if grad is not None:
                yield node, grad
            continue
        if grad is not None and node._version != n_changes:
            _check_unchanged(node)
        if not retain_graph:
            node.args, node._backward, node._saved, node._version = (), None, (), -1
        del node  # its array is freed before the backward function allocates others, unless something else holds it
        if grad is not None:
            needs_grad = [arg.requires_grad for arg in args]
            add(args, needs_grad, backward(grad, needs_grad, *saved))


def topological_order(root: AnyNode) -> list[AnyNode]:
    """Return every node behind `root` that requires a gradient, each after its args; `root` is the last."""
    order: list[AnyNode] = []
    seen: set[AnyNode] = set()  # by identity: Tensors hash so
    stack: list[Any] = [root]  # no recursion: a chain of a hundred thousand operations is deeper than Python's stack
    while stack:
        node = stack.pop()
        if node is None:  # all args of the node below are in the order by now
            order.append(stack.pop())
        elif node not in seen:
            if node._version < 0:
                raise RuntimeError(
                    "backward: the graph behind this Tensor was freed by an earlier backward(); "
                    "call backward(retain_graph=True) to keep it, or compute the result again"
                )
            seen.add(node)
            stack += (node, None)
            for arg in reversed(node.args):
                if arg.requires_grad and arg not in seen:
                    stack.append(arg)
    return order


class SlicedGradient(NamedTuple):
    """The gradient of an arg that is 0 outside of one slice of it: `whole[index] = array`.

    All slices of one arg are put together when the walk reaches it. `once`: the index takes no element twice.
    """

    array: Array
    index: Any
    once: bool = False


class OwnedGradient(NamedTuple):
    """A gradient that shares memory with nothing else: other gradients of the same arg may be added to it in place."""

    array: Array


class GradientSums:
    """The gradients that have arrived at nodes that the walk has not reached yet.

    An array that arrives may be shared (an addition hands the same one to both inputs), so only arrays that were made
    here, or came as `OwnedGradient`, are added to in place. One element never is: 0-d sums are NumPy scalars.
    """

    def __init__(self) -> None:
        self.arrays: dict[Node, Array] = {}
        self.slices: dict[Node, list[SlicedGradient]] = {}
        self.owned: set[int] = set()  # ids of nodes, all of which live until the walk has reached them
        self.handed_out: dict[int, Array] = {}

    def add(self, args: Sequence[Node], needs_grad: NeedsGrad, gradients: Sequence[Any]) -> None:
        """Add the gradients of those args of an operation that need one."""
        arrays, owned = self.arrays, self.owned
        for arg, needs, grad in zip(args, needs_grad, gradients, strict=True):
            if not needs or grad is None:
                continue
            kind = type(grad)
            if kind is SlicedGradient:
                self.slices.setdefault(arg, []).append(grad)
                continue
            array = grad if kind is np.ndarray else getattr(grad, "array", grad)  # a Tensor is welcome, too
            dtype = arg.array.dtype
            if array.dtype is not dtype:
                array = array.astype(dtype, copy=False)
            if arg not in arrays:
                arrays[arg] = array
                if kind is OwnedGradient and array.size > 1:
                    owned.add(id(arg))
            elif array.size >= LARGE:
                out = arrays[arg] if id(arg) in owned else array if kind is OwnedGradient else None
                arrays[arg] = kernels.add(arrays[arg], array, out)
                owned.add(id(arg))
            elif id(arg) in owned:
                arrays[arg] += array
            else:
                arrays[arg] = total = arrays[arg] + array
                if total.size > 1:
                    owned.add(id(arg))

    def take(self, node: Node) -> Array | None:
        """Remove and return the whole gradient of a node; None where none has arrived."""
        grad = self.arrays.pop(node, None)
        if node not in self.slices:
            return grad
        slices = self.slices.pop(node)
        if grad is None:
            return assemble(slices, node.array).astype(node.array.dtype, copy=False)
        if id(node) not in self.owned:
            grad = array_module(grad).array(grad)  # a copy
        _add_slices(grad, slices)
        return grad

    def own(self, leaf: Node, grad: Array) -> Array:
        """Return the gradient of a leaf in memory that nothing else uses: itself, or a copy if it is shared."""
        is_shared = isinstance(grad, np.generic) or not owns_memory(grad) or id(grad) in self.handed_out
        if is_shared and id(leaf) not in self.owned:
            grad = grad.copy()
        self.handed_out[id(grad)] = grad
        return grad


def assemble(slices: list[SlicedGradient], like: Array) -> Array:
    """Return the sum of slices in the shape and dtype of `like`, 0 elsewhere."""
    xp = array_module(like)
    neighbours = _neighbours(slices, like.shape)
    if neighbours:
        whole = joined_view(neighbours)  # without a copy where they are so in memory
        return xp.concatenate(neighbours, axis=-1) if whole is None else whole
    total = xp.zeros(like.shape, like.dtype)
    _add_slices(total, slices)
    return total


def _add_slices(total: Array, slices: list[SlicedGradient]) -> None:
    for array, index, once in slices:
        parts = index if isinstance(index, tuple) else (index,)
        if once or all(isinstance(part, (int, np.integer, slice, type(None), EllipsisType)) for part in parts):
            total[index] += array
        else:
            array_module(total).add.at(total, index, array)  # an element that is taken twice gets both gradients


def _neighbours(slices: list[SlicedGradient], shape: tuple[int, ...]) -> list[Array]:
    """Return the arrays of slices that fill an array of this shape along its last axis, in order; [] if they do not."""
    for _, index, _ in slices:
        if not isinstance(index, tuple) or not index or not all(isinstance(part, slice) for part in index):
            return []
        if index[:-1] != (slice(None),) * (len(shape) - 1):
            return []
    placed = sorted(slices, key=lambda part: part.index[-1].indices(shape[-1]))
    starts, stops, steps = zip(*(part.index[-1].indices(shape[-1]) for part in placed))
    return [part.array for part in placed] if (*starts, shape[-1]) == (0, *stops) and set(steps) == {1} else []


_changing = threading.Lock()
n_changes = 0  # made in place so far; the version of a Tensor is its value when the Tensor was made or last changed


def increment_versions(tensors: Iterable[Node]) -> None:
    """Record that these inputs or parameters were changed in place: results computed from them before are stale."""
    global n_changes
    with _changing:
        n_changes += 1
        for tensor in tensors:
            tensor._version = n_changes


def _check_unchanged(node: Node) -> None:
    """Refuse a result that is older than the last change of a leaf that it was computed from."""
    for arg in node.args:
        if arg._version > node._version and not arg.args:
            raise RuntimeError(
                f"backward: {describe(arg)} was changed in place, by an optimiser or load_state_dict, after "
                f"{node.name or 'a result'} was computed from it: compute the result again"
            )


def describe(node: Node) -> str:
    """Return the name and shape of a Tensor, for error messages."""
    return f"{node.name or 'a Tensor'} of shape {node.array.shape}"


class Mode(NamedTuple):
    """What operations leave behind within a block (a `with` statement) and its thread."""

    builds_graph: bool = True  # results can be differentiated
    evaluates: bool = False  # layers act as in evaluation, whatever their `training` is
    on_record: Callable[[Any], None] | None = None  # called with each result that can be differentiated
    run_block: Callable[..., Any] | None = None  # how models call each of their blocks; as any layer unless given


# Those that this thread is in. Each is taken out by itself: blocks in generators end in any order.
current_modes: ContextVar[tuple[Mode, ...]] = ContextVar("current_modes", default=())


@contextmanager
def graph_mode(mode: Mode) -> Iterator[None]:
    """Add a mode within this block, also while a generator that yields inside it waits."""
    mode = mode._replace()  # an object of this block's own: a decorator enters the same mode again and again
    current_modes.set((*current_modes.get(), mode))
    try:
        yield
    finally:
        current_modes.set(tuple(other for other in current_modes.get() if other is not mode))


def evaluation() -> AbstractContextManager[None]:
    """Build no graph within this block (and this thread), and have layers act as in evaluation."""
    return graph_mode(Mode(builds_graph=False, evaluates=True))


def is_evaluating() -> bool:
    """Return whether this thread is in a block of `evaluation`."""
    return any(mode.evaluates for mode in current_modes.get())


def grad_enabled_for(*args: Node) -> bool:
    """Return whether an operation on these Tensors gets a backward function; if not, it need save nothing for one."""
    for arg in args:
        if arg.requires_grad:
            modes = current_modes.get()
            return not modes or all(mode.builds_graph for mode in modes)
    return False
