"""`Tensor`: an array with the operation that computed it, for automatic differentiation.

`record` stores the inputs (`args`) and the backward function of an operation in its result, for `Tensor.backward`.
Operators and further methods come from `ops.py`, `extra_ops.py`, `einsum.py` and `tensor_methods.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

from tricycle import autograd, devices, kernels
from tricycle.autograd import Backward
from tricycle.devices import Array, array_module

Operand: TypeAlias = "Tensor | Array | int | float | Sequence[Any]"
Axis: TypeAlias = int | tuple[int, ...] | None


class Tensor:
    """An array with a gradient.

    Attributes:
        array: the NumPy or CuPy array.
        grad: the gradient of an input or parameter after `backward`, a Tensor of the same shape and dtype, or None.
        args: the input Tensors of the operation that computed this Tensor; () for inputs and parameters.
        back_fns: one function per arg, from the gradient of this Tensor (a Tensor) to that of the arg; can be assigned.
        is_batched: whether axis 0 is the batch. Only `Einsum` reads it.
        name: the operation that computed this Tensor, shown when it is printed.
    """

    __slots__ = tuple("array grad args requires_grad is_batched name _backward _saved _version __weakref__".split())
    _copied: ClassVar[tuple[str, ...]] = ("requires_grad", "is_batched", "name")  # copied along with the array
    __array_ufunc__: ClassVar[Any] = None  # for `array + tensor`, replaced by numpy_protocol.py
    __hash__ = object.__hash__  # by identity, because == returns a Tensor

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
        # operations on 0-d arrays return NumPy scalars
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
        """The length of each axis."""
        return self.array.shape

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.array.ndim

    @property
    def dtype(self) -> np.dtype:
        """The data type of the elements."""
        return self.array.dtype

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.array.size

    @property
    def xp(self) -> ModuleType:
        """The module of the array, `numpy` or `cupy`."""
        return array_module(self.array)

    @property
    def on_gpu(self) -> bool:
        """Whether the array is in GPU memory."""
        return devices.on_gpu(self.array)

    def numpy(self) -> np.ndarray:
        """Return the values as a NumPy array, without a copy if the array is in host memory."""
        return devices.to_cpu(self.array)

    def zero_grad(self) -> None:
        """Set `grad` to None."""
        self.grad = None

    def backward(
        self, retain_graph: bool = False, create_graph: bool = False, on_input: Callable[[Tensor], None] | None = None
    ) -> None:
        """Add the gradient of the Tensor's sum to leaves' `grad`; free the graph, unless it is retained or created.

        Args:
            retain_graph: keep the graph for another call of `backward` instead of freeing it.
            create_graph: make gradients that can be differentiated, see `tricycle.transforms`; retains the graph.
            on_input: called with each input as soon as its gradient is complete.

        Raises:
            RuntimeError: no input of this Tensor requires a gradient; or see `autograd.walk_backward`.
        """
        if not self.requires_grad:
            raise RuntimeError("backward: this Tensor does not require a gradient (one made by create_graph=True does)")
        if create_graph:
            return self.backward_with_graph(on_input)
        ones = self.xp.ones_like(self.array) if self.ndim else devices.one(self.xp, str(self.array.device), self.dtype)
        sums = autograd.GradientSums(retain_graph)
        for leaf, grad in autograd.walk_backward(autograd.topological_order(self), ones, sums):
            if grad.shape != leaf.array.shape:
                what = autograd.describe(leaf)
                raise RuntimeError(f"backward: expected the gradient of {what}, got shape {grad.shape}")
            # the user may change the gradient in place, so it must not share memory
            held = leaf.grad
            grad = sums.unshare(leaf, grad) if held is None else kernels.in_chunks(self.xp.add, held.array, grad)
            leaf.grad = Tensor(grad, False, leaf.is_batched)
            if on_input is not None:
                on_input(leaf)

    if TYPE_CHECKING:  # attached by ops.py, extra_ops.py, einsum.py, tensor_methods.py and transforms.py
        back_fns: tuple[Callable[[Tensor], Array | Tensor], ...]
        backward_with_graph: Callable[..., None]
        close_to: Callable[..., bool]
        item: Callable[[], Any]
        to_gpu: Callable[..., Tensor]
        split: Callable[..., list[Tensor]]
        einsum: Callable[[str], Tensor]

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

        def __int__(self) -> int: ...
        def __float__(self) -> float: ...
        def __len__(self) -> int: ...
        def __getitem__(self, index: Any) -> Tensor: ...
        def __iter__(self) -> Iterator[Tensor]: ...


def record(
    array: Array,
    args: tuple[Tensor, ...],
    backward: Backward | None,
    name: str | None,
    is_batched: bool | None = None,
    saved: tuple[Any, ...] = (),
) -> Tensor:
    """Return the result of an operation as a Tensor; store its inputs and backward function if a gradient can flow.

    Args:
        backward: called as backward(grad, needs_grad, *saved), see `autograd.Backward`.
        is_batched: by default, whether any of the args is batched.
        saved: arrays for `backward`. For small operations a tuple is faster than a closure (garbage collection).
    """
    requires_grad = any_batched = False
    for arg in args:
        if arg.requires_grad:
            requires_grad = True
        if arg.is_batched:
            any_batched = True
    if is_batched is None:
        is_batched = any_batched
    modes = autograd.current_modes.get()  # via the module, which is faster than an imported name
    for mode in modes:  # a loop is faster than `all`
        requires_grad = requires_grad and mode.builds_graph
    if not requires_grad:
        return Tensor(array, False, is_batched, name)
    result = Tensor(array, True, is_batched, name, args, backward, saved)
    for mode in modes:
        if mode.on_record is not None:
            mode.on_record(result)
    return result


def to_tensor(
    x: Operand, *, dtype: Any = None, requires_grad: bool = True, is_batched: bool = False, name: str | None = None
) -> Tensor:
    """Make a Tensor of a number, list, array or Tensor, by default float32 (bool stays); TypeError if not numeric.

    Args:
        x: the values. An array of the right dtype is not copied.
        dtype: float32 unless given; `int` and other integer dtypes keep labels and indices. Booleans stay booleans.
        requires_grad: whether `backward` computes its gradient; always False for integers and booleans.

    Raises:
        TypeError: `x` does not hold numbers.
        ValueError: a list of uneven rows.
    """
    array: Array = x.array if isinstance(x, Tensor) else x
    if not devices.is_array(array) or (array_module(array) is np and not hasattr(array, "keeps_type")):
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
    """Return a context manager that disables graph building in this thread: results cannot be differentiated."""
    return autograd.graph_mode(autograd.Mode(builds_graph=False))
