"""`Tensor`: an array that knows which operation made it, so that it can be differentiated.

A Tensor that an operation returned holds its inputs (`args`) and a backward function, which computes the gradients of
the inputs from the gradient of the Tensor: `record` puts both there. `Tensor.backward` then has `autograd.py` walk
through the graph. Nothing here knows what any operation computes: `ops.py` and `einsum.py` add operators and methods.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

from tricycle import autograd, devices
from tricycle.autograd import Backward, builds_graph
from tricycle.devices import Array, array_module

BackFn: TypeAlias = Callable[["Tensor"], "Array | Tensor"]
Operand: TypeAlias = "Tensor | Array | int | float | Sequence[Any]"
Axis: TypeAlias = int | tuple[int, ...] | None


class Tensor:
    """An array with a gradient.

    Attributes:
        array: the NumPy or CuPy array.
        grad: after `backward`, the gradient of the result with respect to this Tensor, in its shape and dtype. Only
            Tensors that no operation made (inputs and parameters) keep one.
        args: the Tensors that the operation behind this one took; () for inputs and parameters.
        back_fns: one function per arg. It gets the gradient of this Tensor (a Tensor) and returns the gradient of that
            arg (an array or a Tensor). They can be set, too.
        requires_grad: whether gradients flow to this Tensor.
        is_batched: whether axis 0 is the batch. Only `Einsum` reads it.
        name: what made this Tensor, shown when it is printed.
    """

    __slots__ = tuple("array grad args requires_grad is_batched name _backward _saved _version __weakref__".split())
    # NumPy then leaves `array + tensor` to Tensor.__radd__ instead of looping over elements
    __array_ufunc__ = None
    # a comparison gives a Tensor, so a Tensor is found in a dict or set by identity alone
    __hash__ = object.__hash__

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

    # ---------------------------------------------------------------- what it holds
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

    def item(self) -> Any:
        """Return the value of a one-element Tensor as a Python number."""
        if self.size != 1:
            raise ValueError(f"item: expected a Tensor of one element, got shape {self.shape}")
        return self.array.item()

    def close_to(self, other: Operand, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
        """Return whether all values are within `atol + rtol * |other|` of a Tensor's, an array's or a number's."""
        array = other.array if isinstance(other, Tensor) else other
        array = devices.to_cpu(array) if devices.is_array(array) else array
        return bool(np.allclose(self.numpy(), array, rtol=rtol, atol=atol, equal_nan=equal_nan))

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

    def __str__(self) -> str:
        array, end = self.numpy(), f", name={self.name})" if self.name else ")"
        if array.ndim == 0:
            return f"Tensor({array!s}{end}"  # !s: format() would go through a Python float
        text = np.array2string(array, prefix="Tensor(")
        one_line = re.sub(r"\]\s*\n\s*\[", "], [", text)
        fits = "\n" not in one_line and len(one_line) <= np.get_printoptions()["linewidth"]
        return f"Tensor({one_line if fits else text}{end}"

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else str(self)

    # ---------------------------------------------------------------- devices, flags, copies
    def to_gpu(self, device: int = 0) -> Tensor:
        """Move the array (and gradient) to a GPU, in place; return self.

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
        """Move the array (and gradient) to host memory, in place; return self."""
        self.array = devices.to_cpu(self.array)
        if self.grad is not None:
            self.grad.from_gpu()
        return self

    def to_batched(self) -> Tensor:
        """Declare axis 0 the batch, in place; return self."""
        if self.ndim == 0:
            raise ValueError("to_batched: a Tensor without axes has no batch axis")
        self.is_batched = True
        return self

    def from_batched(self) -> Tensor:
        """Declare that no axis is a batch, in place; return self."""
        self.is_batched = False
        return self

    def detach(self) -> Tensor:
        """Return a Tensor with the same array and without a history: no gradient flows through it."""
        return Tensor(self.array, requires_grad=False, is_batched=self.is_batched, name=self.name)

    def zero_grad(self) -> None:
        """Set `grad` to None."""
        self.grad = None

    # Copies and pickles leave the graph behind: it holds closures. Arrays are pickled as NumPy's: they load anywhere.
    _copied: ClassVar[tuple[str, ...]] = ("requires_grad", "is_batched", "name")

    def __getstate__(self) -> dict[str, Any]:
        return {"array": self.numpy(), **{name: getattr(self, name) for name in self._copied}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Tensor.__init__(self, state["array"])
        for name in self._copied:
            setattr(self, name, state[name])

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        twin = type(self).__new__(type(self))
        twin.__setstate__({"array": self.array.copy(), **{name: getattr(self, name) for name in self._copied}})
        return twin

    # ---------------------------------------------------------------- differentiation
    @property
    def back_fns(self) -> tuple[BackFn, ...]:
        return tuple(autograd.back_fn_of(self, i) for i in range(len(self.args)))

    @back_fns.setter
    def back_fns(self, back_fns: tuple[BackFn, ...]) -> None:
        def call_back_fns(grad: Array, needs_grad: Sequence[bool]) -> list[Any]:
            incoming = Tensor(grad, False)
            return [back_fn(incoming) if needs else None for back_fn, needs in zip(back_fns, needs_grad, strict=True)]

        self._backward, self._saved = call_back_fns, ()

    def backward(
        self, retain_graph: bool = False, create_graph: bool = False, on_input: Callable[[Tensor], None] | None = None
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
        sums = autograd.GradientSums()
        for leaf, grad in autograd.walk_backward(self, ones, sums, retain_graph):
            if grad.shape != leaf.array.shape:
                raise RuntimeError(
                    f"backward: a gradient of shape {grad.shape} came for a Tensor of shape {leaf.shape}"
                )
            # the gradient becomes the user's, so it shares memory with nothing else
            grad = sums.own(leaf, grad) if leaf.grad is None else leaf.grad.array + grad
            leaf.grad = Tensor(grad, False, leaf.is_batched)
            if on_input is not None:
                on_input(leaf)

    if TYPE_CHECKING:  # ops.py and einsum.py attach these

        def _unary(self) -> Tensor: ...
        def _binary(self, other: Operand) -> Tensor: ...
        def _reduction(self, axis: Axis = None, keepdims: bool = False) -> Tensor: ...
        def _reordering(self, *sizes: int | Sequence[int]) -> Tensor: ...

        __add__ = __sub__ = __mul__ = __truediv__ = __pow__ = __matmul__ = _binary
        __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rpow__ = __rmatmul__ = _binary
        __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _binary  # type: ignore[assignment]
        __neg__ = exp = log = sqrt = _unary
        sum = mean = max = min = _reduction
        reshape = transpose = _reordering

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
        array: the result.
        args: the Tensors that it was computed from.
        backward: backward(grad, needs_grad) returns one gradient for each arg (an array, in its shape) from that of the
            result. `needs_grad` has a boolean for each arg; anything may be returned for an arg that needs no gradient.
        name: of the operation.
        is_batched: as any of the args is, unless given.
        saved: what `backward` takes after `needs_grad`. All results of an op can then share one function, and each
            keeps one tuple where a closure would be several objects: Python's garbage collector walks over every one,
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
    if not requires_grad or (modes and not builds_graph(modes)):
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
    return Tensor(array, requires_grad and array.dtype.kind not in "biu", is_batched, name)


def no_grad() -> AbstractContextManager[None]:
    """Build no graph within this block (and this thread): its results cannot be differentiated."""
    return autograd.graph_mode(autograd.Mode(builds_graph=False))
