"""`Tensor`: an array that knows which operation made it, so that it can be differentiated.

A Tensor that an operation returned holds its inputs (`args`) and a backward function, which computes the gradients of
the inputs from the gradient of the Tensor: `record` puts both there. `Tensor.backward` then has `autograd.py` walk
through the graph. Operators and further methods come from `ops.py`, `extra_ops.py`, `einsum.py`, `tensor_methods.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

from tricycle import autograd, devices
from tricycle.autograd import Backward
from tricycle.devices import Array, array_module

Operand: TypeAlias = "Tensor | Array | int | float | Sequence[Any]"
Axis: TypeAlias = int | tuple[int, ...] | None


class Tensor:
    """An array with a gradient.

    Attributes:
        array: the NumPy or CuPy array.
        grad: of inputs and parameters after `backward`, the gradient of the result, in the array's shape and dtype.
        args: the Tensors that the operation behind this one took; () for inputs and parameters.
        back_fns: one function per arg, from the gradient of this Tensor (a Tensor) to that of the arg; can be set, too.
        is_batched: whether axis 0 is the batch. Only `Einsum` reads it.
        name: what made this Tensor, shown when it is printed.
    """

    __slots__ = tuple("array grad args requires_grad is_batched name _backward _saved _version __weakref__".split())
    _copied: ClassVar[tuple[str, ...]] = ("requires_grad", "is_batched", "name")  # what copies keep, with the array
    __array_ufunc__ = None  # NumPy leaves `array + tensor` to Tensor.__radd__ instead of looping over elements
    __hash__ = object.__hash__  # a comparison gives a Tensor, so a Tensor is found in a dict or set by identity alone

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
        self._version = autograd.n_changes  # -1 once its graph is freed

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
        """Return the values as a NumPy array (the array itself where it is one already)."""
        return devices.to_cpu(self.array)

    def zero_grad(self) -> None:
        """Set `grad` to None."""
        self.grad = None

    def backward(
        self, retain_graph: bool = False, create_graph: bool = False, on_input: Callable[[Tensor], None] | None = None
    ) -> None:
        """Add the gradient of this Tensor (of its sum, if it has many elements) to every input behind it.

        Args:
            retain_graph: keep the graph for another `backward`, instead of freeing it on the way.
            create_graph: refused with a NotImplementedError: gradients are constants.
            on_input: called with each input whose gradient is complete, while the pass goes on.

        Raises:
            RuntimeError: nothing behind this Tensor requires a gradient; or as `autograd.walk_backward`.
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
        sums = autograd.GradientSums()
        for leaf, grad in autograd.walk_backward(self, ones, sums, retain_graph):
            if grad.shape != leaf.array.shape:
                raise RuntimeError(f"backward: a gradient of shape {grad.shape} came for {autograd.describe(leaf)}")
            # the gradient becomes the user's, so it shares memory with nothing else
            grad = sums.own(leaf, grad) if leaf.grad is None else leaf.grad.array + grad
            leaf.grad = Tensor(grad, False, leaf.is_batched)
            if on_input is not None:
                on_input(leaf)

    if TYPE_CHECKING:  # ops.py, extra_ops.py, einsum.py and tensor_methods.py attach these
        back_fns: tuple[Callable[[Tensor], Array | Tensor], ...]

        def close_to(self, other: Operand, rtol: float = ..., atol: float = ..., equal_nan: bool = ...) -> bool: ...
        def _unary(self) -> Tensor: ...
        def _binary(self, other: Operand) -> Tensor: ...
        def _reduction(self, axis: Axis = None, keepdims: bool = False) -> Tensor: ...
        def _reordering(self, *sizes: int | Sequence[int]) -> Tensor: ...

        __add__ = __sub__ = __mul__ = __truediv__ = __pow__ = __matmul__ = _binary
        __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rpow__ = __rmatmul__ = _binary
        __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _binary  # type: ignore[assignment]
        __neg__ = exp = log = sqrt = detach = from_gpu = to_batched = from_batched = _unary
        sum = mean = max = min = _reduction
        reshape = transpose = _reordering

        def item(self) -> Any: ...
        def __int__(self) -> int: ...
        def __float__(self) -> float: ...
        def __len__(self) -> int: ...
        def to_gpu(self, device: int = 0) -> Tensor: ...
        def __getitem__(self, index: Any) -> Tensor: ...
        def __iter__(self) -> Iterator[Tensor]: ...
        def split(self, n_splits: int, axis: int = -1) -> list[Tensor]: ...
        def einsum(self, subscripts: str) -> Tensor: ...


def record(
    array: Array,
    args: tuple[Tensor, ...],
    backward: Backward | None,
    name: str | None,
    is_batched: bool | None = None,
    saved: tuple[Any, ...] = (),
) -> Tensor:
    """Return the result of an operation as a Tensor, with its history where a gradient can flow.

    Args:
        args: the Tensors that it was computed from.
        backward: called as backward(grad, needs_grad, *saved), as `autograd.Backward` says.
        is_batched: as any of the args is, unless given.
        saved: one tuple where a closure would be several objects: Python's garbage collector walks over every one,
            again and again while a graph grows, which costs more than a small operation itself.
    """
    requires_grad = any_batched = False
    for arg in args:
        if arg.requires_grad:
            requires_grad = True
        if arg.is_batched:
            any_batched = True
    if is_batched is None:
        is_batched = any_batched
    modes = autograd.current_modes.get()  # by the module: of an imported name, `get` would be looked up slowly
    if not requires_grad or (modes and not all(mode.builds_graph for mode in modes)):
        return Tensor(array, False, is_batched, name)
    result = Tensor(array, True, is_batched, name, args, backward, saved)
    if modes:  # nearly always there is none, and an empty loop is not free
        for mode in modes:
            if mode.on_record is not None:
                mode.on_record(result)
    return result


def to_tensor(
    x: Operand, *, dtype: Any = None, requires_grad: bool = True, is_batched: bool = False, name: str | None = None
) -> Tensor:
    """Make a Tensor of a number, a (nested) list, a NumPy or CuPy array, or another Tensor's values.

    Args:
        x: the values. An array that has the right dtype is used as it is, not copied.
        dtype: float32 unless given; `int` and other integer dtypes keep labels and indices. Booleans stay booleans.
        requires_grad: whether gradients flow to it; integers and booleans have none.

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
    dtype = (bool if array.dtype.kind == "b" else np.float32) if dtype is None else dtype
    for kind in (array.dtype, np.dtype(dtype)):
        if kind.kind not in "biuf" and kind.name != "bfloat16":
            raise TypeError(f"to_tensor: expected numbers, got dtype {kind}")
    array = array.astype(dtype, copy=False)
    return Tensor(array, requires_grad and array.dtype.kind not in "biu", is_batched, name)


def no_grad() -> AbstractContextManager[None]:
    """Build no graph within this block (and this thread): its results cannot be differentiated."""
    return autograd.graph_mode(autograd.Mode(builds_graph=False))
