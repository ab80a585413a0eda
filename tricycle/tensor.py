"""`Tensor`: an array that remembers how it was made, and automatic differentiation over such arrays.

A Tensor that an operation returned knows its inputs (`args`) and one function that turns the gradient of the
output into the gradients of those inputs that want one. `backward` visits every Tensor behind a result once,
each after everything that was computed from it, and applies the chain rule.
Nothing here knows what any operation computes: `ops.py` and `einsum.py` add the operators and methods.
"""

from __future__ import annotations

import re
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import EllipsisType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from tricycle import devices, kernels
from tricycle.devices import Array, array_module, side_by_side

BackFn: TypeAlias = Callable[["Tensor"], "Array | Tensor"]
# backward(grad, wanted, *saved): from the gradient of the output, an array, to those of the inputs, one for each;
# None where nothing flows; anything in the place of an input that does not want one (`wanted` says which do).
Backward: TypeAlias = Callable[..., Sequence[Any]]
Operand: TypeAlias = "Tensor | Array | int | float | Sequence[Any]"
Axis: TypeAlias = int | tuple[int, ...] | None


class _Block:
    """A block of code within which results are other than usual.

    Attributes:
        remembers: whether they can be differentiated.
        evaluates: whether layers act as in evaluation, whatever their `training` was set to.
    """

    def __init__(self, remembers: bool, evaluates: bool = False) -> None:
        self.remembers = remembers
        self.evaluates = evaluates


# Those that this thread is in. Each is taken out by itself: blocks in generators end in any order.
_blocks: ContextVar[tuple[_Block, ...]] = ContextVar("blocks", default=())


@contextmanager
def _inside(block: _Block) -> Iterator[None]:
    _blocks.set((*_blocks.get(), block))
    try:
        yield
    finally:
        _blocks.set(tuple(other for other in _blocks.get() if other is not block))


@contextmanager
def no_grad() -> Iterator[None]:
    """Within this block (and this thread) results remember nothing and cannot be differentiated.

    A generator that yields inside the block is still inside it while it waits: so is whoever called it.
    """
    with _inside(_Block(remembers=False)):
        yield


@contextmanager
def evaluation() -> Iterator[None]:
    """Within this block (and this thread) layers are in evaluation mode and results cannot be differentiated."""
    with _inside(_Block(remembers=False, evaluates=True)):
        yield


def is_evaluating() -> bool:
    """Return whether this thread is in a block of `evaluation`."""
    return any(block.evaluates for block in _blocks.get())


@contextmanager
def remembering() -> Iterator[None]:
    """Within this block (and this thread) results can be differentiated, whatever blocks stand around it."""
    token = _blocks.set(())
    try:
        yield
    finally:
        _blocks.reset(token)


@contextmanager
def watch_arrays() -> Iterator[None]:
    """Within this block (and this thread) results remember what the arrays of their inputs, and their own, hold, and
    `backward` refuses where one has been changed in place since. For the search for a mistake: it reads every array
    once more.

    Elsewhere `backward` sees only what optimisers and `Layer.load_state_dict` change.
    """
    with _inside(_Block(remembers=True)):
        yield


_forgets: ContextVar[bool] = ContextVar("forgets", default=False)


@contextmanager
def forgetting() -> Iterator[None]:
    """Within this block (and this thread) `forget_inside` lets go of values: nobody will look at them."""
    token = _forgets.set(True)
    try:
        yield
    finally:
        _forgets.reset(token)


_changing = threading.Lock()
_n_changes = 0


def changed_in_place(tensors: Iterable[Tensor]) -> None:
    """Say that the arrays of these inputs or parameters hold other values now: a result that was computed from them
    before cannot be differentiated any more, for its gradient would mix the old values and the new.
    """
    global _n_changes
    with _changing:
        _n_changes += 1
        for tensor in tensors:
            tensor._made = _n_changes


class Tensor:
    """An array with a gradient.

    Attributes:
        array: the NumPy or CuPy array.
        grad: after `backward`, the gradient of the result with respect to this Tensor, in its shape
            and dtype. Only Tensors that no operation made (inputs and parameters) keep one.
        args: the Tensors that the operation behind this one took; () for inputs and parameters.
        back_fns: one function per arg. It gets the gradient of this Tensor (a Tensor) and returns the
            gradient of that arg (an array or a Tensor). They can be set, too.
        requires_grad: whether gradients flow to this Tensor.
        is_batched: whether axis 0 is the batch. Only `Einsum` reads it.
        name: what made this Tensor, shown when it is printed.
    """

    __slots__ = (
        "array",
        "grad",
        "args",
        "_backward",
        "_saved",
        "requires_grad",
        "is_batched",
        "name",
        "_made",
        "__weakref__",
    )
    # NumPy then leaves `array + tensor` to Tensor.__radd__ instead of looping over elements
    __array_ufunc__ = None

    def __init__(
        self,
        array: Array,
        requires_grad: bool = True,
        is_batched: bool = False,
        name: str | None = None,
        args: tuple[Tensor, ...] = (),
        backward: Backward | None = None,
        saved: tuple[Any, ...] = (),
    ) -> None:
        # an operation on a 0-d array gives a NumPy scalar, which is no array
        self.array: Array = np.asarray(array) if isinstance(array, np.generic) else array
        self.grad: Tensor | None = None
        self.args = args
        self._backward = backward
        self._saved = saved
        self.requires_grad = requires_grad
        self.is_batched = is_batched
        self.name = name
        # how many changes in place there had been; of an input the number of its last one; -1 once its graph is freed
        self._made = _n_changes

    # ---------------------------------------------------------------- what it holds
    @property
    def back_fns(self) -> tuple[BackFn, ...]:
        return tuple(_back_fn(self, i) for i in range(len(self.args)))

    @back_fns.setter
    def back_fns(self, back_fns: tuple[BackFn, ...]) -> None:
        self._backward = _separately(back_fns)
        self._saved = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def ndim(self) -> int:
        return self.array.ndim

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    @property
    def size(self) -> int:
        return self.array.size

    @property
    def xp(self) -> ModuleType:
        """`numpy` or `cupy`, whichever holds the array."""
        return array_module(self.array)

    @property
    def on_gpu(self) -> bool:
        return devices.on_gpu(self.array)

    def numpy(self) -> np.ndarray:
        """The values as a NumPy array (the array itself where it is one already)."""
        return devices.to_cpu(self.array)

    def item(self) -> Any:
        """The value of a one-element Tensor as a Python number."""
        if self.size != 1:
            raise ValueError(f"item: expected a Tensor of one element, got shape {self.shape}")
        return self.array.item()

    def __len__(self) -> int:
        if self.ndim == 0:
            raise TypeError("len: a Tensor without axes has no length")
        return self.shape[0]

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        if self.size != 1:
            instead = ".array.any(), .array.all() or close_to"
            raise ValueError(f"the truth of a Tensor of shape {self.shape} is ambiguous: use {instead}")
        return bool(self.item())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if self.on_gpu:
            raise TypeError("a Tensor on a GPU does not turn into a NumPy array by itself: call .numpy()")
        return np.array(self.array, dtype=dtype, copy=copy)

    def close_to(self, other: Operand, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
        """Whether all values are within `atol + rtol * |other|` of a Tensor's, an array's or a number's."""
        array = other.array if isinstance(other, Tensor) else other
        if devices.is_array(array):
            array = devices.to_cpu(array)
        return bool(np.allclose(self.numpy(), array, rtol=rtol, atol=atol, equal_nan=equal_nan))

    # ---------------------------------------------------------------- printing
    def __str__(self) -> str:
        return _layout("Tensor(", self.numpy(), f", name={self.name})" if self.name else ")")

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else str(self)

    # ---------------------------------------------------------------- devices, flags, copies
    def to_gpu(self, device: int = 0) -> Tensor:
        """Move the array (and gradient) to a GPU, in place; returns self.

        Raises:
            RuntimeError: this is the result of an operation, whose inputs would stay where they are.
        """
        if self.args:
            came = f"the result of {self.name or 'an operation'}, whose gradient goes back to where its inputs lie"
            raise RuntimeError(f"to_gpu: expected a Tensor without a history, got {came}; move detach() or its inputs")
        self.array = devices.to_gpu(self.array, device)
        if self.grad is not None:
            self.grad.to_gpu(device)
        return self

    def from_gpu(self) -> Tensor:
        """Move the array (and gradient) to host memory, in place; returns self."""
        self.array = devices.to_cpu(self.array)
        if self.grad is not None:
            self.grad.from_gpu()
        return self

    def to_batched(self) -> Tensor:
        """Say that axis 0 is the batch, in place; returns self."""
        if self.ndim == 0:
            raise ValueError("to_batched: a Tensor without axes has no batch axis")
        self.is_batched = True
        return self

    def from_batched(self) -> Tensor:
        """Say that no axis is a batch, in place; returns self."""
        self.is_batched = False
        return self

    def detach(self) -> Tensor:
        """The same array without its history; no gradient flows through."""
        return Tensor(self.array, requires_grad=False, is_batched=self.is_batched, name=self.name)

    def zero_grad(self) -> None:
        self.grad = None

    def __getstate__(self) -> dict[str, Any]:
        # a graph holds closures and never goes along; arrays go as NumPy's, so that they load on any machine
        state = {key: getattr(self, key) for key in ("requires_grad", "is_batched", "name")}
        return {"array": self.numpy(), **state}

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return Tensor(self.array.copy(), self.requires_grad, self.is_batched, self.name)

    def __setstate__(self, state: dict[str, Any]) -> None:
        Tensor.__init__(self, **state)

    # ---------------------------------------------------------------- differentiation
    def backward(
        self,
        retain_graph: bool = False,
        create_graph: bool = False,
        on_input: Callable[[Tensor], None] | None = None,
    ) -> None:
        """Add the gradient of this Tensor (of its sum, if it has many elements) to every input behind it.

        The graph is freed on the way, so that memory falls as the pass goes on. Gradients are constants: nothing can be
        differentiated through them.

        Args:
            retain_graph: keep the graph, so that `backward` can run over it again.
            create_graph: refused: there are no gradients of gradients.
            on_input: called with each input whose gradient is complete, while the pass goes on.

        Raises:
            RuntimeError: nothing behind this Tensor requires a gradient; the graph was freed by an earlier `backward`;
                or a parameter in it was changed in place since.
            NotImplementedError: `create_graph`.
        """
        if create_graph:
            raise NotImplementedError("backward: expected create_graph=False: there are no gradients of gradients")
        if not self.requires_grad:
            raise RuntimeError(
                "backward: this Tensor does not require a gradient, nor does anything it was made from "
                "(a gradient is a constant: there are no gradients of gradients)"
            )
        ones = self.xp.empty_like(self.array)
        ones.fill(1)
        sums = _GradientSums()
        for leaf, grad in _walk_back(self, ones, sums, retain_graph):
            _accumulate(leaf, grad, sums)
            if on_input is not None:
                on_input(leaf)

    if TYPE_CHECKING:  # ops.py and einsum.py attach these: here stand only their types

        def _arithmetic(self, other: Operand) -> Tensor: ...

        __add__ = __sub__ = __mul__ = __truediv__ = __pow__ = __matmul__ = _arithmetic
        __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rpow__ = __rmatmul__ = _arithmetic
        __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _arithmetic  # type: ignore[assignment]

        def __neg__(self) -> Tensor: ...
        def __getitem__(self, index: Any) -> Tensor: ...
        def __iter__(self) -> Iterator[Tensor]: ...
        def reshape(self, *shape: int | Sequence[int]) -> Tensor: ...
        def transpose(self, *axes: int | Sequence[int]) -> Tensor: ...
        def split(self, n_splits: int, axis: int = -1) -> list[Tensor]: ...
        def sum(self, axis: Axis = None, keepdims: bool = False) -> Tensor: ...
        def mean(self, axis: Axis = None, keepdims: bool = False) -> Tensor: ...
        def max(self, axis: Axis = None, keepdims: bool = False) -> Tensor: ...
        def min(self, axis: Axis = None, keepdims: bool = False) -> Tensor: ...
        def exp(self) -> Tensor: ...
        def log(self) -> Tensor: ...
        def sqrt(self) -> Tensor: ...
        def einsum(self, subscripts: str) -> Tensor: ...

    # comparison gives a Tensor, so a Tensor is found in a dict or set by identity alone
    __hash__ = object.__hash__


def remembers(*args: Tensor) -> bool:
    """Whether an operation on these Tensors will be differentiated: if not, nothing need be kept for its gradient."""
    for arg in args:
        if arg.requires_grad:
            return _remembering(_blocks.get())
    return False


def _remembering(blocks: tuple[_Block, ...]) -> bool:
    return not blocks or all(block.remembers for block in blocks)


def record(
    array: Array,
    args: tuple[Tensor, ...],
    backward: Backward | tuple[BackFn, ...] | None,
    name: str | None,
    is_batched: bool | None = None,
    saved: tuple[Any, ...] = (),
) -> Tensor:
    """The result of an operation: `array`, with its history where a gradient can flow.

    Args:
        backward: backward(grad, wanted) gives the gradients of all args, as arrays (or a `Part` of one, or `Fresh`),
            from that of the result. `wanted` has a boolean for each arg; in the place of one that does not want a
            gradient anything may stand. Or a tuple with a function for each arg, as `Tensor.back_fns` has them.
        is_batched: as any of the args is, unless given.
        saved: what `backward` takes after `wanted`. All results of an op can then share one function, and each keeps
            one tuple where a closure would be several objects: Python's garbage collector walks over every one, again
            and again while a graph grows, which costs more than a small operation itself.
    """
    requires_grad = any_batched = False
    for arg in args:
        if arg.requires_grad:
            requires_grad = True
        if arg.is_batched:
            any_batched = True
    if is_batched is None:
        is_batched = any_batched
    if not requires_grad:
        return Tensor(array, False, is_batched, name)
    blocks = _blocks.get()
    if blocks and not _remembering(blocks):
        return Tensor(array, False, is_batched, name)
    if isinstance(backward, tuple):
        backward = _separately(backward)
    result = Tensor(array, True, is_batched, name, args, backward, saved)
    if blocks:
        _watch(result)
    return result


def _check_unchanged(node: Tensor) -> None:
    """Refuse a result that is older than the last change of something that it was computed from."""
    for arg in node.args:
        if arg._made > node._made and not arg.args:
            raise RuntimeError(
                f"backward: {_described(arg)} was changed in place, by an optimiser or load_state_dict, after "
                f"{node.name or 'a result'} was computed from it: compute the result again"
            )


def _described(tensor: Tensor) -> str:
    return f"{tensor.name or 'a Tensor'} of shape {tensor.shape}"


def _watch(node: Tensor) -> None:
    """Have the backward of a result refuse where its array, or one of its inputs', has been changed in place."""
    watched = [(tensor, tensor.array) for tensor in node.args if devices.is_array(tensor.array)]
    sums = [_checksum(array) for _, array in watched]
    backward, own, own_sum = node._backward, node.array, _checksum(node.array)
    title = node.name or "a result"

    def checked(grad: Array, wanted: Sequence[bool], *saved: Any) -> Sequence[Any]:
        changed = [_described(tensor) for (tensor, array), before in zip(watched, sums) if _checksum(array) != before]
        if changed or _checksum(own) != own_sum:
            what = changed[0] if changed else "it"
            raise RuntimeError(f"backward: {what} was changed in place after {title} was computed")
        return backward(grad, wanted, *saved)  # type: ignore[misc]

    node._backward = checked


def _checksum(array: Array) -> int:
    return zlib.crc32(devices.to_cpu(array).tobytes())


def forget_inside(result: Tensor, start: Tensor) -> None:
    """In a block of `forgetting`: let go of the values of all that was computed on the way from one Tensor to another.

    Functions that compute gradients keep the arrays that they need, so backward passes give the same; the Tensors on
    the way are NaN from now on, in their shapes and dtypes. Spared is what a stranger's function was given, for it may
    look at its `array` only when it is called.
    """
    if not _forgets.get():
        return
    inside: dict[int, Tensor] = {}
    spared = {id(start), id(result)}
    stack = [result]
    while stack:
        node = stack.pop()
        if not _keeps_what_it_needs(node._backward):
            spared.update(map(id, (node, *node.args)))
        for arg in node.args:
            if arg.args and id(arg) not in inside and arg is not start:
                inside[id(arg)] = arg
                stack.append(arg)
    for key, tensor in inside.items():
        if key not in spared:
            array = tensor.array
            tensor.array = array_module(array).broadcast_to(array.dtype.type(np.nan), array.shape)


def _keeps_what_it_needs(backward: Backward | None) -> bool:
    """Whether it is one of ours: they look at no Tensor's array when they are called."""
    module = getattr(backward, "__module__", None) or ""
    return (
        module.startswith("tricycle.") and getattr(backward, "__qualname__", "").split(".")[0] != _separately.__name__
    )


def _separately(back_fns: tuple[BackFn, ...]) -> Backward:
    """One backward of a function for each arg."""

    def backward(grad: Array, wanted: Sequence[bool]) -> list[Any]:
        incoming = Tensor(grad, False)
        return [back_fn(incoming) if wants else None for back_fn, wants in zip(back_fns, wanted, strict=True)]

    return backward


def _back_fn(node: Tensor, i: int) -> BackFn:
    """The gradient of one arg of a node by itself, for who looks at the graph from outside."""
    arg, backward, saved = node.args[i], node._backward, node._saved
    wanted = [place == i for place in range(len(node.args))]

    def back_fn(grad: Tensor) -> Array | Tensor:
        gradient = backward(grad.array, wanted, *saved)[i]  # type: ignore[misc]
        if type(gradient) is Part:
            return _assembled([gradient], arg.array)
        return gradient.array if type(gradient) is Fresh else gradient

    return back_fn


def to_tensor(
    x: Operand,
    *,
    dtype: Any = None,
    requires_grad: bool = True,
    is_batched: bool = False,
    name: str | None = None,
) -> Tensor:
    """Make a Tensor of a number, a (nested) list, a NumPy or CuPy array, or another Tensor's values.

    Args:
        x: the values. An array that has the right dtype is used as it is, not copied.
        dtype: float32 unless given; `int` and other integer dtypes keep labels and indices whole.
            Booleans stay booleans.
        requires_grad: whether gradients flow to it; whole numbers and booleans have none.
        is_batched: whether axis 0 is the batch.
        name: shown when printed.

    Raises:
        TypeError: `x` does not hold numbers.
        ValueError: a list of uneven rows.
    """
    array: Array = x.array if isinstance(x, Tensor) else x
    if not devices.is_array(array) or array_module(array) is np:
        try:
            array = np.asarray(array)  # scalars, memory maps and other subclasses become plain arrays too
        except ValueError:
            raise ValueError("to_tensor: expected numbers in rows of equal length, got an uneven list") from None
    if dtype is None:
        dtype = np.float32 if array.dtype.kind != "b" else bool
    for kind in (array.dtype, np.dtype(dtype)):
        if kind.kind not in "biuf" and kind.name != "bfloat16":
            raise TypeError(f"to_tensor: expected numbers, got dtype {kind}")
    array = array.astype(dtype, copy=False)
    differentiable = array.dtype.kind not in "biu"
    return Tensor(array, requires_grad and differentiable, is_batched, name)


def _layout(prefix: str, array: np.ndarray, suffix: str) -> str:
    """NumPy's text of an array, rows joined by ", " where all of it fits on one line."""
    if array.ndim == 0:
        return f"{prefix}{array!s}{suffix}"  # !s: format() would go through a Python float
    text = np.array2string(array, prefix=prefix)
    joined = re.sub(r"\]\s*\n\s*\[", "], [", text)
    if "\n" not in joined and len(joined) <= np.get_printoptions()["linewidth"]:
        text = joined
    return prefix + text + suffix


def _walk_back(
    root: Tensor, root_grad: Array, sums: _GradientSums, retain_graph: bool = False
) -> Iterator[tuple[Tensor, Array]]:
    """The chain rule from a result to all inputs behind it: each with its whole gradient, which may share memory."""
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
        if grad is not None and node._made != _n_changes:
            _check_unchanged(node)
        if not retain_graph:
            node.args = ()
            node._backward = None
            node._saved = ()
            node._made = -1
        del node  # its array goes here, before others are made, where neither its backward nor anybody else holds it
        if grad is not None:
            wanted = [arg.requires_grad for arg in args]
            add(args, wanted, backward(grad, wanted, *saved))  # type: ignore[misc]


def gradients_of(result: Tensor, grad: Array, inputs: Sequence[Tensor]) -> list[Array | None]:
    """The gradients of some inputs behind a result, from that of the result. No Tensor's `grad` changes.

    For operations whose gradient is a backward pass of its own. The graph is freed on the way.

    Args:
        inputs: Tensors that no operation made.

    Returns:
        for each its gradient, which may share memory with others; None where none flows to it.
    """
    if not result.requires_grad:
        return [None for _ in inputs]
    arrived = {id(leaf): array for leaf, array in _walk_back(result, grad, _GradientSums())}
    return [arrived.get(id(tensor)) for tensor in inputs]


def topological_order(root: Tensor) -> list[Tensor]:
    """Every Tensor behind `root` that requires a gradient, each after all that it was made from.

    Iterative, for a chain of a hundred thousand operations is deeper than Python's stack.
    """
    order: list[Tensor] = []
    seen: set[Tensor] = set()  # by identity, as Tensors are found in sets
    stack: list[Any] = [root]
    while stack:
        node = stack.pop()
        if node is None:  # all that the Tensor below was made from is in the order by now
            order.append(stack.pop())
        elif node not in seen:
            if node._made < 0:
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


class Part(NamedTuple):
    """The gradient of an arg that is 0 outside of one part of it: `whole[index] = array`.

    An op that takes a part of its arg gives this instead of an array full of zeros. All parts of one arg are put
    together when its turn comes: a sequence that is taken apart step by step costs no more than its length.

    Attributes:
        once: whether it is known that no element is taken twice by the index.
    """

    array: Array
    index: Any
    once: bool = False


class Fresh(NamedTuple):
    """A gradient that shares memory with nothing else, so that whatever else arrives may be added to it in place."""

    array: Array


LARGE = 2**18  # numbers from which on a sum is shared by threads


class _GradientSums:
    """Gradients that have arrived at Tensors whose turn has not come yet.

    An array that arrives may be shared (an addition hands the same one to both inputs), so the first sum
    makes a new array; only arrays made here, or said to be `Fresh`, are added to in place. One element is never: the
    sum of 0-d arrays is a NumPy scalar, which += would replace, and NumPy takes three times as long for += as for +
    there.
    """

    def __init__(self) -> None:
        self.arrays: dict[Tensor, Array] = {}
        self.parts: dict[Tensor, list[Part]] = {}
        self.ours: set[int] = set()  # ids of Tensors, which all live until their turn has come
        self.handed_out: dict[int, Array] = {}

    def add(
        self, args: Sequence[Tensor], wanted: Sequence[bool], gradients: Sequence[Array | Tensor | Part | Fresh]
    ) -> None:
        """Those of some Tensors that want one."""
        arrays = self.arrays
        for arg, wants, grad in zip(args, wanted, gradients, strict=True):
            if not wants or grad is None:
                continue
            if type(grad) is Part:
                self.parts.setdefault(arg, []).append(grad)
                continue
            is_fresh = type(grad) is Fresh
            array: Array = grad.array if is_fresh or isinstance(grad, Tensor) else grad
            dtype = arg.array.dtype
            if array.dtype is not dtype:
                array = array.astype(dtype, copy=False)
            if arg not in arrays:
                arrays[arg] = array
                if is_fresh and array.size > 1:
                    self.ours.add(id(arg))
            elif array.size >= LARGE:
                place = arrays[arg] if id(arg) in self.ours else array if is_fresh else None
                arrays[arg] = kernels.add(arrays[arg], array, place)
                self.ours.add(id(arg))
            elif id(arg) in self.ours:
                arrays[arg] += array
            else:
                arrays[arg] = total = arrays[arg] + array
                if total.size > 1:
                    self.ours.add(id(arg))

    def take(self, node: Tensor) -> Array | None:
        """The whole gradient of a Tensor whose turn has come; None where none has arrived."""
        if node in self.parts:
            parts = self.parts.pop(node)
            if node not in self.arrays:
                self.arrays[node] = _assembled(parts, node.array).astype(node.array.dtype, copy=False)
            else:
                if id(node) not in self.ours:
                    self.arrays[node] = array_module(node.array).array(self.arrays[node])  # a copy
                _add_parts(self.arrays[node], parts)
        return self.arrays.pop(node, None)


def _assembled(parts: list[Part], like: Array) -> Array:
    """An array of that shape and dtype, 0 but for its parts; where they overlap they are summed.

    Parts that follow one another without gaps along the last axis are only put side by side; and if they lie so in
    memory already, that memory is the result.
    """
    xp = array_module(like)
    neighbours = _tiles(parts, like.shape)
    if neighbours:
        whole = side_by_side(neighbours)
        return xp.concatenate(neighbours, axis=-1) if whole is None else whole
    total = xp.zeros(like.shape, like.dtype)
    _add_parts(total, parts)
    return total


def _add_parts(total: Array, parts: list[Part]) -> None:
    """In place."""
    for array, index, once in parts:
        if once or is_basic(index):
            total[index] += array
        else:
            array_module(total).add.at(total, index, array)  # an element taken twice gets both gradients


def is_basic(index: Any) -> bool:
    """Whether no element can be taken twice by an index: numbers, slices, None and Ellipsis alone."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(isinstance(part, (int, np.integer, slice, type(None), EllipsisType)) for part in parts)


def _tiles(parts: list[Part], shape: tuple[int, ...]) -> list[Array]:
    """The arrays of parts that make up a whole along its last axis, in order; none if they do not."""
    placed: list[tuple[int, int, Array]] = []
    for array, index, _ in parts:
        if not (shape and isinstance(index, tuple) and len(index) == len(shape)):
            return []
        *before, last = index
        if not isinstance(last, slice) or any(place != slice(None) for place in before):
            return []
        start, stop, step = last.indices(shape[-1])
        if step != 1:
            return []
        placed.append((start, stop, array))
    placed.sort(key=lambda part: part[0])
    reached = 0
    for start, stop, _ in placed:
        if start != reached:
            return []
        reached = stop
    return [array for _, _, array in placed] if reached == shape[-1] else []


def _accumulate(leaf: Tensor, grad: Array, sums: _GradientSums) -> None:
    """Add to the gradient of an input. It becomes the user's, so it shares memory with nothing else."""
    if grad.shape != leaf.array.shape:
        raise RuntimeError(f"backward: a gradient of shape {grad.shape} came for a Tensor of shape {leaf.shape}")
    if leaf.grad is not None:
        leaf.grad = Tensor(leaf.grad.array + grad, False, leaf.is_batched)
        return
    is_shared = isinstance(grad, np.generic) or not grad.flags.owndata or id(grad) in sums.handed_out
    if is_shared and id(leaf) not in sums.ours:
        grad = grad.copy()
    sums.handed_out[id(grad)] = grad
    leaf.grad = Tensor(grad, False, leaf.is_batched)


# What a parameter can be: a matrix between hidden layers, a table of vectors for ids, a table for places, a factor or a
# summand for each channel, any other factors, and the matrix that gives the output.
ROLES = ("matrix", "embedding", "position", "gain", "bias", "scale", "head")


class Parameter(Tensor):
    """A Tensor that a model learns and that says what it is, so that an optimiser need not guess.

    Args:
        values: as `to_tensor` takes them.
        role: one of ROLES; None leaves it to the number of axes.

    Raises:
        ValueError: an unknown role.
    """

    __slots__ = ("role",)

    def __init__(self, values: Operand, role: str | None = None) -> None:
        if role is not None and role not in ROLES:
            raise ValueError(f"Parameter: expected role to be one of {', '.join(ROLES)}, got {role!r}")
        super().__init__(to_tensor(values).array)
        self.role = role

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "role": self.role}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.role = state["role"]
        super().__setstate__({name: value for name, value in state.items() if name != "role"})

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        twin = Parameter.__new__(Parameter)
        Tensor.__init__(twin, self.array.copy(), self.requires_grad, self.is_batched, self.name)
        twin.role = self.role
        return twin
