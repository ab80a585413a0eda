"""`Tensor`: an array that remembers how it was made, and automatic differentiation over such arrays.

A Tensor that an operation returned knows its inputs (`args`) and, for each of them, a function that
turns the gradient of the output into the gradient of that input (`back_fns`). `backward` visits every
Tensor behind a result once, each after everything that was computed from it, and applies the chain rule.
Nothing here knows what any operation computes: `ops.py` and `einsum.py` add the operators and methods.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from tricycle import backend
from tricycle.backend import Array, array_module

BackFn: TypeAlias = Callable[["Tensor"], "Array | Tensor"]
Operand: TypeAlias = "Tensor | Array | int | float | Sequence"
Axis: TypeAlias = int | tuple[int, ...] | None

ONES = "ones"  # the name of the gradient that a backward pass starts with
_grad_enabled: ContextVar[bool] = ContextVar("grad_enabled", default=True)


@contextmanager
def no_grad() -> Iterator[None]:
    """Within this block (and this thread) results remember nothing and cannot be differentiated."""
    token = _grad_enabled.set(False)
    try:
        yield
    finally:
        _grad_enabled.reset(token)


class Tensor:
    """An array with a gradient.

    Attributes:
        array: the NumPy or CuPy array.
        grad: after `backward`, the gradient of the result with respect to this Tensor, in its shape
            and dtype. Only Tensors that no operation made (inputs and parameters) keep one.
        args: the Tensors that the operation behind this one took; () for inputs and parameters.
        back_fns: one function per arg. It gets the gradient of this Tensor (a Tensor) and returns the
            gradient of that arg (an array or a Tensor).
        requires_grad: whether gradients flow to this Tensor.
        is_batched: whether axis 0 is the batch. Only `Einsum` reads it.
        name: what made this Tensor, shown when it is printed.
    """

    __slots__ = (
        "array", "grad", "args", "_back_fns", "_saved", "requires_grad", "is_batched", "name", "_freed", "__weakref__"
    )
    # NumPy then leaves `array + tensor` to Tensor.__radd__ instead of looping over elements
    __array_ufunc__ = None

    def __init__(
        self, array: Array, requires_grad: bool = True, is_batched: bool = False, name: str | None = None,
        args: tuple[Tensor, ...] = (), back_fns: tuple[Callable, ...] = (), saved: tuple[Array, ...] = (),
    ) -> None:
        # an operation on a 0-d array gives a NumPy scalar, which is no array
        self.array: Array = np.asarray(array) if isinstance(array, np.generic) else array
        self.grad: Tensor | None = None
        self.args = args
        self._back_fns = back_fns
        self._saved = saved
        self.requires_grad = requires_grad
        self.is_batched = is_batched
        self.name = name
        self._freed = False

    # ---------------------------------------------------------------- what it holds
    @property
    def back_fns(self) -> tuple[BackFn, ...]:
        return tuple(partial(back_fn, *self._saved) for back_fn in self._back_fns) if self._saved else self._back_fns

    @back_fns.setter
    def back_fns(self, back_fns: tuple[BackFn, ...]) -> None:
        self._back_fns, self._saved = back_fns, ()

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
        return backend.on_gpu(self.array)

    def numpy(self) -> np.ndarray:
        """The values as a NumPy array (the array itself where it is one already)."""
        return backend.to_cpu(self.array)

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
        if backend.is_array(array):
            array = backend.to_cpu(array)
        return bool(np.allclose(self.numpy(), array, rtol=rtol, atol=atol, equal_nan=equal_nan))

    # ---------------------------------------------------------------- printing
    def __str__(self) -> str:
        return _layout("Tensor(", self.numpy(), f", name={self.name})" if self.name else ")")

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else str(self)

    # ---------------------------------------------------------------- devices, flags, copies
    def to_gpu(self, device: int = 0) -> Tensor:
        """Move the array (and gradient) to a GPU, in place; returns self."""
        self.array = backend.to_gpu(self.array, device)
        if self.grad is not None:
            self.grad.to_gpu(device)
        return self

    def from_gpu(self) -> Tensor:
        """Move the array (and gradient) to host memory, in place; returns self."""
        self.array = backend.to_cpu(self.array)
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

    def __deepcopy__(self, memo: dict) -> Tensor:
        return Tensor(self.array.copy(), self.requires_grad, self.is_batched, self.name)

    def __setstate__(self, state: dict[str, Any]) -> None:
        Tensor.__init__(self, **state)

    # ---------------------------------------------------------------- differentiation
    def backward(self, retain_graph: bool = False) -> None:
        """Add the gradient of this Tensor (of its sum, if it has many elements) to every input behind it.

        The graph is freed on the way, so that memory falls as the pass goes on.

        Args:
            retain_graph: keep the graph, so that `backward` can run over it again.

        Raises:
            RuntimeError: nothing behind this Tensor requires a gradient, or the graph was freed by an
                earlier `backward`.
        """
        if not self.requires_grad:
            raise RuntimeError("backward: this Tensor does not require a gradient, nor does anything it was made from")
        order = topological_order(self)
        sums = _GradientSums()
        sums.add(self, self.xp.ones_like(self.array))
        while order:  # popped, so that a node's array can go as soon as nothing needs it
            node = order.pop()
            grad = sums.arrays.pop(id(node), None)
            if not node.args:
                if grad is not None:
                    _accumulate(node, grad, sums)
                continue
            if grad is not None:
                # one for all args: shared_backward goes by identity
                incoming = Tensor(grad, False, node.is_batched, ONES if node is self else None)
                for arg, back_fn in zip(node.args, node._back_fns, strict=True):
                    if arg.requires_grad:
                        sums.add(arg, back_fn(*node._saved, incoming))
            if not retain_graph:
                node.args, node.back_fns, node._freed = (), (), True

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
            return _grad_enabled.get()
    return False


def record(array: Array, args: tuple[Tensor, ...], back_fns: tuple[Callable, ...], name: str | None,
           is_batched: bool | None = None, saved: tuple[Array, ...] = ()) -> Tensor:
    """The result of an operation: `array`, with its history where a gradient can flow.

    Args:
        is_batched: as any of the args is, unless given.
        saved: what each of the back_fns takes before the gradient. All results of an op then share its back_fns,
            and each keeps one tuple where closures would be nine objects: Python's garbage collector walks over
            every one, again and again while a graph grows, which costs more than a small operation itself.
    """
    requires_grad = any_batched = False
    for arg in args:
        requires_grad = requires_grad or arg.requires_grad
        any_batched = any_batched or arg.is_batched
    if is_batched is None:
        is_batched = any_batched
    if requires_grad and _grad_enabled.get():
        return Tensor(array, True, is_batched, name, args, back_fns, saved)
    return Tensor(array, False, is_batched, name)


def to_tensor(
    x: Operand, *, dtype: Any = None, requires_grad: bool = True, is_batched: bool = False, name: str | None = None,
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
    if not backend.is_array(array) or array_module(array) is np:
        try:
            array = np.asarray(array)  # scalars, memory maps and other subclasses become plain arrays too
        except ValueError:
            raise ValueError("to_tensor: expected numbers in rows of equal length, got an uneven list") from None
    if dtype is None:
        dtype = np.float32 if array.dtype.kind != "b" else bool
    for found in (array.dtype, np.dtype(dtype)):
        if found.kind not in "biuf" and found.name != "bfloat16":
            raise TypeError(f"to_tensor: expected numbers, got dtype {found}")
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


def topological_order(root: Tensor) -> list[Tensor]:
    """Every Tensor behind `root` that requires a gradient, each after all that it was made from.

    Iterative, for a chain of a hundred thousand operations is deeper than Python's stack.
    """
    order: list[Tensor] = []
    seen: set[int] = set()
    stack: list[Any] = [root]
    while stack:
        node = stack.pop()
        if node is None:  # all that the Tensor below was made from is in the order by now
            order.append(stack.pop())
        elif id(node) not in seen:
            if node._freed:
                raise RuntimeError(
                    "backward: the graph behind this Tensor was freed by an earlier backward(); "
                    "call backward(retain_graph=True) to keep it, or compute the result again"
                )
            seen.add(id(node))
            stack += (node, None)
            for arg in reversed(node.args):
                if arg.requires_grad and id(arg) not in seen:
                    stack.append(arg)
    return order


class _GradientSums:
    """Gradients that have arrived at Tensors whose turn has not come yet.

    An array that arrives may be shared (an addition hands the same one to both inputs), so the first sum
    makes a new array; only arrays made here are added to in place. One element is never: the sum of 0-d arrays
    is a NumPy scalar, which += would replace, and NumPy takes three times as long for += as for + there.
    Ids stand for Tensors, which all live until their turn has come.
    """

    def __init__(self) -> None:
        self.arrays: dict[int, Array] = {}
        self.ours: set[int] = set()
        self.handed_out: dict[int, Array] = {}

    def add(self, node: Tensor, grad: Array | Tensor) -> None:
        array = grad.array if isinstance(grad, Tensor) else grad
        if array.dtype != node.array.dtype:
            array = array.astype(node.array.dtype)
        key = id(node)
        held = self.arrays.get(key)
        if held is None:
            self.arrays[key] = array
        elif key in self.ours:
            held += array
        else:
            self.arrays[key] = total = held + array
            if total.size > 1:
                self.ours.add(key)


def _accumulate(leaf: Tensor, grad: Array, sums: _GradientSums) -> None:
    """Add to the gradient of an input. It becomes the user's, so it shares memory with nothing else."""
    if grad.shape != leaf.shape:
        raise RuntimeError(f"backward: a gradient of shape {grad.shape} came for a Tensor of shape {leaf.shape}")
    if leaf.grad is not None:
        leaf.grad = Tensor(leaf.grad.array + grad, False, leaf.is_batched)
        return
    if isinstance(grad, np.generic) or not grad.flags.owndata or id(grad) in sums.handed_out:
        grad = grad.copy()
    sums.handed_out[id(grad)] = grad
    leaf.grad = Tensor(grad, False, leaf.is_batched)
