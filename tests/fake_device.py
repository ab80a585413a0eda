"""An array type that behaves as a GPU's would where it matters, on the host.

It refuses whatever would mix host and device or wait for the device: NumPy arrays beside it, `np.asarray`,
`float()`, `bool()` and NumPy indices; and, as CuPy does, products of 16-bit arrays with more than two axes. Numbers
may stand beside it; `item()` and `asnumpy` read values, and are counted. Installed in `devices.ARRAY_MODULES`, it shows
that code asks its arrays for `xp` and computes with nothing else.
"""

from __future__ import annotations

import operator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from tricycle import kernels

REFUSED_ARGUMENTS = {"initial", "where"}  # of reductions: CuPy's have none
METHODS = """
all any argmax astype copy cumsum diagonal fill max mean min ravel repeat reshape squeeze sum swapaxes transpose
""".split()
OPERATORS = "add sub mul truediv mod pow matmul lt le gt ge eq ne and_ or_".split()
PRODUCTS = {"matmul", "einsum", "tensordot", "dot"}
reads: list[str] = []  # one entry for each time that the host has read from the device


def unwrap(value: Any) -> Any:
    if isinstance(value, FakeArray):
        return value.held
    if isinstance(value, np.ndarray):
        raise TypeError(f"a host array of shape {value.shape} beside an array on the device")
    if isinstance(value, (list, tuple)):
        return type(value)(unwrap(item) for item in value)
    return value


def wrap(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return FakeArray(np.asarray(value))
    return tuple(map(wrap, value)) if isinstance(value, (list, tuple)) else value


def check_product(*arrays: Any) -> None:
    """CuPy multiplies 16-bit arrays with more than two axes in float32 and slowly, or not at all (bfloat16)."""
    held = [array.held for array in arrays if isinstance(array, FakeArray)]
    if any(array.ndim > 2 and array.dtype.name in ("float16", "bfloat16") for array in held):
        raise TypeError(f"a product of {[f'{array.dtype} {array.shape}' for array in held]} on the device")


def on_device(function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        if function.__name__ in PRODUCTS:
            check_product(*args)
        if REFUSED_ARGUMENTS & set(kwargs):
            raise TypeError(f"{function.__name__}: no such argument on the device: {kwargs}")
        return wrap(function(*map(unwrap, args), **{name: unwrap(value) for name, value in kwargs.items()}))

    return call


def refuse(name: str) -> Any:
    def call(self: FakeArray, *args: Any) -> Any:
        raise TypeError(f"{name} of an array on the device")

    return call


class FakeArray:
    __array_ufunc__ = None
    __hash__ = None
    device = SimpleNamespace(id=0)
    base = None  # so nothing is known to lie side by side

    def __init__(self, held: np.ndarray) -> None:
        self.held = held

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "dtype", "ndim", "size", "strides", "flags", "nbytes"):
            return getattr(self.held, name)
        if name in METHODS:
            return on_device(getattr(self.held, name))
        raise AttributeError(f"no {name} on the device")

    @property
    def T(self) -> FakeArray:
        return FakeArray(self.held.T)

    def item(self) -> Any:
        reads.append("item")
        return self.held.item()

    def __len__(self) -> int:
        return len(self.held)

    def __getitem__(self, index: Any) -> FakeArray:
        return wrap(self.held[unwrap(index)])

    def __setitem__(self, index: Any, value: Any) -> None:
        self.held[unwrap(index)] = unwrap(value)

    __array__, __float__, __bool__, __int__, __index__, __iter__ = map(
        refuse, ["np.asarray", "float()", "bool()", "int()", "an index", "iteration"]
    )
    __neg__, __abs__ = (lambda self, f=f: wrap(f(self.held)) for f in (operator.neg, operator.abs))


def in_place(ufunc: Any) -> Any:
    def call(self: FakeArray, other: Any) -> FakeArray:
        ufunc(self.held, unwrap(other), out=self.held)
        return self

    return call


for _name in OPERATORS:
    _plain, _function = _name.rstrip("_"), on_device(getattr(operator, _name))
    setattr(FakeArray, f"__{_plain}__", lambda self, other, f=_function: f(self, other))
    setattr(FakeArray, f"__r{_plain}__", lambda self, other, f=_function: f(other, self))
for _name, _ufunc in {"add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.divide}.items():
    setattr(FakeArray, f"__i{_name}__", in_place(_ufunc))


class FakeModule(ModuleType):
    """What `cupy` would be."""

    lib = SimpleNamespace(stride_tricks=SimpleNamespace(as_strided=on_device(np.lib.stride_tricks.as_strided)))

    @staticmethod
    def asarray(value: Any, dtype: Any = None) -> FakeArray:
        return FakeArray(np.array(value.held if isinstance(value, FakeArray) else value, dtype=dtype))

    @staticmethod
    def asnumpy(array: FakeArray) -> np.ndarray:
        reads.append("asnumpy")
        return array.held.copy()

    def __getattr__(self, name: str) -> Any:
        found = getattr(np, name)
        if isinstance(found, np.ufunc):
            call = on_device(found)
            call.at = on_device(found.at)
            return call
        return on_device(found) if callable(found) and not isinstance(found, type) else found


fake_module = FakeModule("fake")


def to_host(array: Any) -> np.ndarray:
    """Instead of `devices.to_cpu`."""
    return fake_module.asnumpy(array) if isinstance(array, FakeArray) else np.asarray(array)


def small(array: FakeArray, precision: str) -> FakeArray:
    """Convert float32 to the 16-bit type of a precision, as `matmul_operand` and `to_compute_dtype` do on a GPU."""
    if precision not in ("bfloat16", "float16") or array.dtype != np.float32:
        return array
    if precision == "float16":
        return array.astype(np.float16)
    import ml_dtypes

    return array.astype(ml_dtypes.bfloat16)


# The versions that a GPU must have: all other kernels are the plain ones.
VERSIONS = {
    "matmul_operand": [small],
    "to_compute_dtype": [small],
    "matmul_operand_and_sums": [lambda array, precision: (small(array, precision), kernels.sum_rows.reference(array))],
}


def to_device(array: Any, device: int = 0) -> FakeArray:
    """Instead of `devices.to_gpu`."""
    return array if isinstance(array, FakeArray) else FakeArray(np.array(array))
