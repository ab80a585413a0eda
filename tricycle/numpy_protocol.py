"""NumPy functions of Tensors, by NumPy's protocols, and the exchange of memory with other libraries by DLPack.

`np.tanh(x) @ w` or `np.sum(x, axis=1)` call the operations of Tricycle where they receive a Tensor, so that code
written for NumPy can be differentiated. `UFUNCS` and `FUNCTIONS` have the operations. The functions in `CONSTANT`,
whose results have no gradient, compute with the arrays. Any other function raises a TypeError. The last lines attach
the methods to `Tensor`.

Source: NEP 13 (`__array_ufunc__`) and NEP 18 (`__array_function__`); the DLPack specification.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tricycle import create_graph, devices, extra_ops, linalg, ops
from tricycle.einsum import Einsum, matmul
from tricycle.tensor import Axis, Operand, Tensor, to_tensor


# -------------------------------------------------------------------- ufuncs
def _constant_ufunc(ufunc: np.ufunc) -> Callable[..., Tensor]:
    """Return an operation that calls a ufunc with the arrays of Tensors; its result requires no gradient."""

    def op(*inputs: Operand) -> Tensor:
        tensors = ops.as_tensors(*inputs)
        result = getattr(tensors[0].xp, ufunc.__name__)(*(t.array for t in tensors))
        return Tensor(result, False, any(t.is_batched for t in tensors))

    return op


UFUNCS: dict[np.ufunc, Callable[..., Any]] = {
    np.add: ops.add,
    np.subtract: extra_ops.subtract,
    np.multiply: ops.multiply,
    np.divide: extra_ops.divide,
    np.power: extra_ops.power,
    np.maximum: extra_ops.maximum,
    np.minimum: extra_ops.minimum,
    np.matmul: matmul,
    np.negative: extra_ops.negative,
    np.positive: lambda x: x,
    np.square: lambda x: ops.multiply(x, x),
    np.reciprocal: lambda x: extra_ops.divide(1, x),
    np.absolute: extra_ops.absolute,
    np.exp: extra_ops.exp,
    np.log: extra_ops.log,
    np.sqrt: extra_ops.sqrt,
    np.sin: extra_ops.sin,
    np.cos: extra_ops.cos,
    np.tanh: ops.tanh,
    np.less: Tensor.__lt__,
    np.less_equal: Tensor.__le__,
    np.greater: Tensor.__gt__,
    np.greater_equal: Tensor.__ge__,
    np.equal: Tensor.__eq__,
    np.not_equal: Tensor.__ne__,
    **{ufunc: _constant_ufunc(ufunc) for ufunc in (np.sign, np.floor, np.ceil, np.rint, np.trunc)},
    **{ufunc: _constant_ufunc(ufunc) for ufunc in (np.isnan, np.isinf, np.isfinite)},
    **{ufunc: _constant_ufunc(ufunc) for ufunc in (np.logical_not, np.logical_and, np.logical_or)},
}


def apply_ufunc(ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
    """Apply a ufunc's operation to Tensors, arrays and numbers (NEP 13); TypeError if there is none.

    Raises:
        TypeError: the ufunc has no operation; or a method such as `reduce`, or an argument such as `out`, is used.
    """
    name = f"numpy.{ufunc.__name__}"
    if method != "__call__":
        raise _unsupported(f"{name}.{method}")
    if ufunc not in UFUNCS:
        raise _unsupported(name)
    if options:
        raise TypeError(f"{name}: expected no argument besides the operands of a Tensor, got {', '.join(options)}")
    return UFUNCS[ufunc](*inputs)


def _unsupported(name: str) -> TypeError:
    """Return, without raising it, the TypeError for a function that has no operation on Tensors."""
    advice = "compose it of functions in tricycle.numpy_protocol, or call it with x.numpy() if it needs no gradient"
    return TypeError(f"{name}: expected a function with an operation on Tensors, got one without: {advice}")


class UfuncMethod:
    """The attribute `Tensor.__array_ufunc__`: `apply_ufunc` for NumPy, which reads it from the type, else None.

    CuPy reads it from the Tensor, and calls `Tensor.__radd__` for `array + tensor` where it is None.
    """

    def __get__(self, instance: Tensor | None, owner: type[Tensor]) -> Callable[..., Any] | None:
        """Return `_call_ufunc` when read from the class, as NumPy does, and None from an instance."""
        return _call_ufunc if instance is None else None


def _call_ufunc(x: Tensor, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
    """Apply a ufunc as `apply_ufunc` does; NumPy calls this as the method `__array_ufunc__` of x."""
    return apply_ufunc(ufunc, method, *inputs, **options)


# -------------------------------------------------------------------- functions
def _swapaxes(a: Tensor, axis1: int, axis2: int) -> Tensor:
    """Return a with two axes exchanged; ValueError out of range."""
    return a.transpose(np.empty(range(a.ndim)).swapaxes(axis1, axis2).shape)  # axis i has the length i


def _concatenate(arrays: Sequence[Tensor], axis: int | None = 0) -> Tensor:
    """Concatenate arrays along an axis, or flattened if it is None."""
    if axis is None:
        return extra_ops.concatenate([ops.reshape(x, -1) for x in ops.as_tensors(*arrays)])
    return extra_ops.concatenate(arrays, axis)


def _expand_dims(a: Tensor, axis: int | Sequence[int]) -> Tensor:
    """Return a with new axes of length 1 at these places of the result; ValueError out of range."""
    return a.reshape(np.expand_dims(np.broadcast_to(np.empty(()), a.shape), axis).shape)


def _squeeze(a: Tensor, axis: Axis = None) -> Tensor:
    """Remove all axes of length 1, or these; ValueError if one has another length."""
    return a.reshape(np.broadcast_to(np.empty(()), a.shape).squeeze(axis).shape)


def _var(a: Tensor, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the population variance over axes, without a correction."""
    centered = a - a.mean(axis, True)
    return (centered * centered).mean(axis, keepdims)


def _std(a: Tensor, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the population standard deviation over axes, with a gradient of 0 where it is 0."""
    variance = _var(a, axis, keepdims)
    is_zero = variance.array == 0
    return extra_ops.where(is_zero, 0.0, extra_ops.where(is_zero, 1.0, variance).sqrt())


def _clip(a: Operand, a_min: Operand | None = None, a_max: Operand | None = None) -> Operand:
    """Limit a to a_min and a_max, either of which may be None; if both are, return a itself."""
    a = a if a_min is None else extra_ops.maximum(a, a_min)
    return a if a_max is None else extra_ops.minimum(a, a_max)


def _dot(a: Operand, b: Operand) -> Tensor:
    """Compute `numpy.dot` of operands with at most 2 axes; ValueError for more."""
    a, b = ops.as_tensors(a, b)
    if a.ndim > 2 or b.ndim > 2:
        raise ValueError(f"numpy.dot: expected at most 2 axes, got shapes {a.shape} and {b.shape}: use matmul")
    return matmul(a, b) if a.ndim and b.ndim else ops.multiply(a, b)


def _svd(a: Tensor, full_matrices: bool = True) -> tuple[Tensor, ...]:
    """Compute the reduced SVD (U, s, Vh); TypeError for `full_matrices` (default) of a matrix that is not square."""
    if full_matrices and a.ndim > 1 and a.shape[-1] != a.shape[-2]:
        raise TypeError(f"numpy.linalg.svd: expected full_matrices=False for a Tensor of shape {a.shape}")
    return linalg.svd(a)


FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    np.sum: extra_ops.sum,
    np.mean: extra_ops.mean,
    np.max: extra_ops.max,
    np.amax: extra_ops.max,
    np.min: extra_ops.min,
    np.amin: extra_ops.min,
    np.concatenate: _concatenate,
    np.stack: extra_ops.stack,
    np.where: extra_ops.where,
    np.reshape: lambda a, shape: a.reshape(shape),
    np.ravel: lambda a: a.reshape(-1),
    np.transpose: lambda a, axes=None: a.transpose(() if axes is None else tuple(axes)),
    np.swapaxes: _swapaxes,
    np.expand_dims: _expand_dims,
    np.squeeze: _squeeze,
    np.broadcast_to: lambda array, shape: create_graph.broadcast(array, shape),
    np.var: _var,
    np.std: _std,
    np.clip: _clip,
    np.dot: _dot,
    np.einsum: lambda subscripts, *operands: Einsum(subscripts)(*operands),
    np.linalg.solve: linalg.solve,
    np.linalg.inv: linalg.inv,
    np.linalg.det: linalg.det,
    np.linalg.slogdet: linalg.slogdet,
    np.linalg.cholesky: linalg.cholesky,
    np.linalg.eigh: linalg.eigh,
    np.linalg.svd: _svd,
}
# Functions whose results have no gradient: they compute with the arrays, and return what NumPy returns.
CONSTANT: set[Callable[..., Any]] = {
    *(np.shape, np.ndim, np.size, np.zeros_like, np.ones_like, np.full_like, np.empty_like, np.result_type),
    *(np.argmax, np.argmin, np.argsort, np.nonzero, np.count_nonzero, np.any, np.all, np.searchsorted, np.unique),
    *(np.allclose, np.isclose, np.array_equal, np.shares_memory, np.may_share_memory),
    *(np.array2string, np.array_repr, np.array_str, np.copyto, np.save, np.savez, np.savetxt),
}


def apply_function(
    x: Tensor, func: Callable[..., Any], types: Any, args: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Apply the operation for a NumPy function to arguments with a Tensor (NEP 18); TypeError if it is unsupported.

    Raises:
        TypeError: the function has no operation, or the operation does not have an argument.
    """
    if func in CONSTANT:
        return func(*_arrays(args), **{key: _arrays(value) for key, value in options.items()})
    name = f"{func.__module__}.{func.__name__}"
    if func not in FUNCTIONS:
        raise _unsupported(name)
    operation = FUNCTIONS[func]
    try:
        inspect.signature(operation).bind(*args, **options)
    except TypeError as error:
        expected = ", ".join(inspect.signature(operation).parameters)
        raise TypeError(f"{name}: expected for a Tensor the arguments {expected}: {error}") from None
    return operation(*args, **options)


def _arrays(value: Any) -> Any:
    """Return nested tuples and lists with each Tensor replaced by its array; other values unchanged."""
    if type(value) in (tuple, list):
        return type(value)(_arrays(item) for item in value)
    return value.array if isinstance(value, Tensor) else value


# -------------------------------------------------------------------- DLPack
CPU, CUDA = 1, 2  # types of devices in DLPack


def to_dlpack(x: Tensor, **options: Any) -> Any:
    """Return a DLPack capsule of the array, which shares its memory, without graph; called by `torch.from_dlpack(x)`.

    Args:
        options: those of the method of NumPy's or CuPy's arrays, such as `stream` and `max_version`.

    Raises:
        BufferError: DLPack lacks the dtype, or the array is read-only and the other library reads older versions.
    """
    return x.array.__dlpack__(**options)


def dlpack_device(x: Tensor) -> tuple[int, int]:
    """Return the type of the device, 1 for host memory and 2 for CUDA, and its number."""
    kind, number = x.array.__dlpack_device__()
    return int(kind), int(number)


def from_dlpack(x: Any, *, requires_grad: bool = True, is_batched: bool = False, name: str | None = None) -> Tensor:
    """Make a Tensor that shares the memory of an array of another library, such as a PyTorch tensor; keep its dtype.

    Args:
        x: an object with the methods `__dlpack__` and `__dlpack_device__`, in host memory or on a CUDA GPU.
        requires_grad: whether `backward` computes its gradient; always False for integers and booleans.

    Raises:
        TypeError: x does not have the methods, or holds no numbers that NumPy knows.
        BufferError: the library refuses, as PyTorch does for a tensor that requires a gradient.
        ValueError: x is on another kind of device.
        RuntimeError: x is on a GPU that CuPy cannot use here.
    """
    if not hasattr(x, "__dlpack__") or not hasattr(x, "__dlpack_device__"):
        got = type(x).__name__
        raise TypeError(
            f"from_dlpack: expected an object with __dlpack__ and __dlpack_device__, got {got}: use to_tensor"
        )
    kind = int(x.__dlpack_device__()[0])
    if kind not in (CPU, CUDA):
        raise ValueError(f"from_dlpack: expected host memory or CUDA (types {CPU}, {CUDA}), got device type {kind}")
    if kind == CUDA and (problem := devices.gpu_problem()):
        raise RuntimeError(f"from_dlpack: expected host memory, got an array on a GPU: {problem}")
    module: Any = np if kind == CPU else sys.modules["cupy"]  # `gpu_problem` has imported it
    try:
        array = module.from_dlpack(x)
    except RuntimeError as error:  # "Unsupported dtype"
        raise TypeError(f"from_dlpack: expected numbers of a dtype that {module.__name__} has: {error}") from None
    return to_tensor(array, dtype=array.dtype, requires_grad=requires_grad, is_batched=is_batched, name=name)


for _name, _method in {
    "__array_ufunc__": UfuncMethod(),
    "__array_function__": apply_function,
    "__dlpack__": to_dlpack,
    "__dlpack_device__": dlpack_device,
}.items():
    setattr(Tensor, _name, _method)
