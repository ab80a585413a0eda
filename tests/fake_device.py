"""A fake GPU array on the host, which raises errors where CuPy's arrays would raise or synchronize.

Operations that mix host and device or wait for the device raise TypeError: NumPy arrays as operands, `np.asarray`,
`float()`, `bool()` and NumPy indices; and, as with CuPy, products of 16-bit arrays with more than two axes. Python
numbers are allowed as operands. `item()` and `asnumpy` read values and are recorded. Tests register the type in
`devices.ARRAY_MODULES` to check that code uses only the array module of its arrays.
"""

from __future__ import annotations

import operator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from tricycle import kernels

UNSUPPORTED_ARGUMENTS = {"initial", "where"}  # of reductions, in CuPy
METHODS = """
all any argmax astype copy cumsum diagonal fill max mean min ravel repeat reshape squeeze sum swapaxes transpose
view
""".split()
OPERATORS = "add sub mul truediv floordiv mod pow matmul lt le gt ge eq ne and_ or_ lshift rshift".split()
LINEAR_ALGEBRA = "solve inv det slogdet cholesky eigh svd"
PRODUCTS = {"matmul", "einsum", "tensordot", "dot"}
reads: list[str] = []  # an entry for each read of the host from the device


def unwrap(value: Any) -> Any:
    if isinstance(value, FakeArray):
        return value.host_array
    if isinstance(value, np.ndarray):
        raise TypeError(f"a host array of shape {value.shape} with an array on the device")
    if isinstance(value, (list, tuple)):
        return type(value)(unwrap(item) for item in value)
    return value


def wrap(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return FakeArray(np.asarray(value))
    return tuple(map(wrap, value)) if isinstance(value, (list, tuple)) else value


def check_product(*arrays: Any) -> None:
    """Raise an error for 16-bit arrays with more than two axes, whose products CuPy makes slowly or not at all."""
    operands = [array.host_array for array in arrays if isinstance(array, FakeArray)]
    if any(array.ndim > 2 and array.dtype.name in ("float16", "bfloat16") for array in operands):
        raise TypeError(f"a product of {[f'{array.dtype} {array.shape}' for array in operands]} on the device")


def on_device(function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        if function.__name__ in PRODUCTS:
            check_product(*args)
        if args and isinstance(args[0], np.generic) and not isinstance(function, np.ufunc):
            raise TypeError(f"{function.__name__}: a NumPy scalar in place of an array on the device")
        if UNSUPPORTED_ARGUMENTS & set(kwargs):
            raise TypeError(f"{function.__name__}: no such argument on the device: {kwargs}")
        return wrap(function(*map(unwrap, args), **{name: unwrap(value) for name, value in kwargs.items()}))

    return call


def unsupported(name: str) -> Any:
    def call(self: FakeArray, *args: Any) -> Any:
        raise TypeError(f"{name} of an array on the device")

    return call


class FakeArray:
    __array_ufunc__ = None
    __hash__ = None
    device = SimpleNamespace(id=0)
    base = None  # so that no arrays are known to be parts of one array

    def __init__(self, host_array: np.ndarray) -> None:
        self.host_array = host_array

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "dtype", "ndim", "size", "strides", "flags", "nbytes"):
            return getattr(self.host_array, name)
        if name in METHODS:
            return on_device(getattr(self.host_array, name))
        raise AttributeError(f"no {name} on the device")

    @property
    def T(self) -> FakeArray:
        return FakeArray(self.host_array.T)

    def item(self) -> Any:
        reads.append("item")
        return self.host_array.item()

    def __len__(self) -> int:
        return len(self.host_array)

    def __getitem__(self, index: Any) -> FakeArray:
        return wrap(self.host_array[unwrap(index)])

    def __setitem__(self, index: Any, value: Any) -> None:
        self.host_array[unwrap(index)] = unwrap(value)

    __array__, __float__, __bool__, __int__, __index__, __iter__ = map(
        unsupported, ["np.asarray", "float()", "bool()", "int()", "an index", "iteration"]
    )
    __neg__, __abs__ = (lambda self, f=f: wrap(f(self.host_array)) for f in (operator.neg, operator.abs))


def in_place(ufunc: Any) -> Any:
    def call(self: FakeArray, other: Any) -> FakeArray:
        ufunc(self.host_array, unwrap(other), out=self.host_array)
        return self

    return call


for _name in OPERATORS:
    _stem, _function = _name.rstrip("_"), on_device(getattr(operator, _name))
    setattr(FakeArray, f"__{_stem}__", lambda self, other, f=_function: f(self, other))
    setattr(FakeArray, f"__r{_stem}__", lambda self, other, f=_function: f(other, self))
for _name, _ufunc in {"add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.divide}.items():
    setattr(FakeArray, f"__i{_name}__", in_place(_ufunc))


class FakeModule(ModuleType):
    """A stand-in for the module `cupy`."""

    linalg = SimpleNamespace(**{name: on_device(getattr(np.linalg, name)) for name in LINEAR_ALGEBRA.split()})
    lib = SimpleNamespace(stride_tricks=SimpleNamespace(as_strided=on_device(np.lib.stride_tricks.as_strided)))

    @staticmethod
    def asarray(value: Any, dtype: Any = None) -> FakeArray:
        return FakeArray(np.array(value.host_array if isinstance(value, FakeArray) else value, dtype=dtype))

    @staticmethod
    def asnumpy(array: FakeArray) -> np.ndarray:
        reads.append("asnumpy")
        return array.host_array.copy()

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(np, name)
        if isinstance(attribute, np.ufunc):
            call = on_device(attribute)
            call.at = on_device(attribute.at)
            return call
        return on_device(attribute) if callable(attribute) and not isinstance(attribute, type) else attribute


fake_module = FakeModule("fake")


def to_host(array: Any) -> np.ndarray:
    """Copy an array to the host; replaces `devices.to_cpu`."""
    return fake_module.asnumpy(array) if isinstance(array, FakeArray) else np.asarray(array)


def to_16_bits(array: FakeArray, precision: str) -> FakeArray:
    """Convert float32 to the 16-bit type of a precision, as `matmul_operand` and `to_compute_dtype` do on a GPU."""
    if precision not in ("bfloat16", "float16") or array.dtype != np.float32:
        return array
    if precision == "float16":
        return array.astype(np.float16)
    import ml_dtypes

    return array.astype(ml_dtypes.bfloat16)


# The implementations that a GPU needs; all other kernels are the reference ones.
IMPLEMENTATIONS = {
    "matmul_operand": [to_16_bits],
    "to_compute_dtype": [to_16_bits],
    "matmul_operand_and_sums": [
        lambda array, precision: (to_16_bits(array, precision), kernels.sum_rows.reference(array))
    ],
}


def to_device(array: Any, device: int = 0) -> FakeArray:
    """Copy an array to the fake device; replaces `devices.to_gpu`."""
    return array if isinstance(array, FakeArray) else FakeArray(np.array(array))
