"""Building blocks of the loops that Numba compiles: compilation, type dispatch, exponentials and bfloat16 conversion.

Sums may be made in any order, so that processors add several numbers at once. Infinity and NaN are kept, but where it
is said.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, wraps
from inspect import Parameter, Signature
from typing import Any

import numba
import numba.extending
import numpy as np
from llvmlite import binding, ir
from numba import types

from tricycle_accelerators import split_precision
from tricycle_accelerators.processor import vendor_and_features

intrinsic: Any = numba.extending.intrinsic  # whose own type says nothing of the argument that it leaves out
ANY_ORDER = {"nsz", "arcp", "contract", "reassoc"}  # of LLVM's flags
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}
# Of functions that compiled loops call; without wrappers for Python all loops are compiled in a tenth less time.
NOT_FOR_PYTHON: Any = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def _features() -> dict[str, bool]:
    """Return the features (LLVM name: present) of the processor that Numba compiles for; {} if LLVM cannot tell.

    That is this one, unless NUMBA_CPU_NAME names another; NUMBA_CPU_FEATURES lists its features then.
    """
    config: Any = numba.config
    if config.CPU_NAME:
        words = (config.CPU_FEATURES or "").split(",")
        return {word[1:]: word[0] == "+" for word in words if word}
    try:
        features = dict(binding.get_host_cpu_features())
    except RuntimeError:  # LLVM does not know how to ask this system
        return {}
    # LLVM 20 does not read Linux's asimddp, but emits these instructions for the processors that it knows by name.
    if "asimddp" in vendor_and_features()[1] and binding.get_host_cpu_name() != "generic":
        features["dotprod"] = True
    return features


FEATURES = _features()
IS_ARM64 = binding.get_default_triple().startswith(("aarch64", "arm64"))
HAS_FMA = FEATURES.get("fma", False) or IS_ARM64
HAS_FLOAT16 = bool(FEATURES.get("f16c") or IS_ARM64)  # whether an instruction converts float16
HAS_BFLOAT, HAS_AMX = FEATURES.get("avx512bf16", False), FEATURES.get("amx-bf16", False)
WORD = ir.IntType(32)
ZERO, ONE = np.float32(0), np.float32(1)
LOG2_E = np.float32(math.log2(math.e))
LOG2_E_REST = np.float32(math.log2(math.e) - float(LOG2_E))
LINE = 16  # float32 in a line of a cache
MAX_EXPONENT = np.float32(87)  # e to this is near the ends of float32
LARGEST, OFFSET, SMALLEST = map(
    np.float32, (split_precision.MAX_STEPS, split_precision.OFFSET, split_precision.MIN_MAX_ABS)
)


def compile_loop(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator: `numba.njit` for these signatures, no GIL, sums in any order, cached on disk if possible."""
    return _cached_if_possible(partial(numba.njit, signature, fastmath=ANY_ORDER, **OPTIONS))


def compile_callback(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator: `numba.cfunc`, for a function that is called by its address, cached on disk if possible."""
    return _cached_if_possible(partial(numba.cfunc, signature, error_model="numpy"))


def _cached_if_possible(decorator: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator of Numba that keeps machine code on disk, or only compiles if it cannot be kept or read."""

    def compile_(function: Callable[..., Any]) -> Any:
        try:
            return decorator(cache=True)(function)
        except (RuntimeError, OSError, EOFError):  # there is no place to keep it, a full disk, or a file cut off
            return decorator()(function)

    return compile_


# A decorator, with options of `numba.njit`, for functions that only compiled loops call: in Python they run uncompiled.
inner_function: Any = partial(numba.extending.register_jitable, **OPTIONS, **NOT_FOR_PYTHON)


def overload_by_types(implementation_for: Callable[..., Any]) -> Any:
    """Return a Numba function that `implementation_for` implements by types; in Python NotImplementedError."""

    @wraps(implementation_for)
    def stub(*arguments: Any) -> Any:
        raise NotImplementedError

    numba.extending.overload(stub, strict=False, jit_options=NOT_FOR_PYTHON)(implementation_for)
    return stub


def emitted_intrinsic(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator: a Numba intrinsic of a signature, from a function (builder, *arguments) that emits its code.

    The function returns the LLVM value of the result, or None if there is none.
    """
    parameters = [Parameter(f"argument_{i}", Parameter.POSITIONAL_OR_KEYWORD) for i in range(1 + len(signature.args))]

    def decorate(emit: Callable[..., Any]) -> Any:
        def code(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
            result = emit(builder, *arguments)
            return context.get_dummy_value() if result is None else result

        typed: Any = wraps(emit)(lambda context, *arguments: (signature, code))
        typed.__signature__ = Signature(parameters)  # Numba would take `*arguments` for a tuple
        return intrinsic(typed)

    return decorate


@intrinsic
def pointer_to(context: Any, address: Any, like: Any) -> Any:
    """Convert an address to a pointer to numbers of the type of `like`, or of its elements (Numba intrinsic)."""
    pointer = types.CPointer(like.dtype if isinstance(like, types.Array) else like)

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(pointer))

    return pointer(types.intp, like), code


@numba.njit(inline="always")
def contiguous_row(x: Any, i: int) -> Any:
    """Return x[i] as a view that Numba takes for contiguous, so that loops vectorize; the caller guarantees it."""
    part = x[i]
    return numba.carray(pointer_to(part.ctypes.data, x), part.shape)


@emitted_intrinsic(types.float32(types.int32))
def _power_of_two(builder: Any, n: Any) -> Any:
    """Compute 2^n of an int32 as float32 by setting the exponent bits, which vectorizes."""
    return builder.bitcast(builder.shl(builder.add(n, WORD(127)), WORD(23)), ir.FloatType())


@emitted_intrinsic(types.float32(types.float32, types.float32))
def maximum(builder: Any, a: Any, b: Any) -> Any:
    """Return the larger of two float32 values by compare and select (Numba intrinsic); not defined for NaN."""
    above = builder.fcmp_ordered(">", a, b, flags=("fast",))
    return builder.select(above, a, b, flags=("fast",))


@inner_function()
def aligned_empty(n_rows: int, n_columns: int) -> np.ndarray:
    """Allocate float32 (n_rows, n_columns) from the start of a cache line, not initialized."""
    flat = np.empty(n_rows * n_columns + LINE, np.float32)
    skip = -(flat.ctypes.data // 4) % LINE
    return flat[skip : skip + n_rows * n_columns].reshape(n_rows, n_columns)


@inner_function()
def copy_row(row: np.ndarray, out: np.ndarray) -> None:
    """Write the first numbers of a row into `out`; for `out[:] = row` Numba compiles an error message, 2 s long."""
    for j in range(len(out)):
        out[j] = row[j]


@numba.njit(inline="always")
def max_abs_if_finite(x: np.ndarray) -> Any:
    """Return the largest absolute value of a float32 row, at least SMALLEST; 0 if a number is not finite."""
    broken, largest = ZERO, SMALLEST
    for j in range(len(x)):
        broken += x[j] * ZERO
        largest = maximum(abs(x[j]), largest)
    return largest if broken == 0 else ZERO


@emitted_intrinsic(types.float32(types.uint16))
def bfloat16_to_float32(builder: Any, bits: Any) -> Any:
    """Convert the bits of a bfloat16 (uint16) to float32 by a shift to the upper 16 bits (Numba intrinsic)."""
    return builder.bitcast(builder.shl(builder.zext(bits, WORD), WORD(16)), ir.FloatType())


@emitted_intrinsic(types.float32(types.uint16))
def float16_to_float32(builder: Any, bits: Any) -> Any:
    """Convert the bits of a float16 (uint16) to float32; NaN on a processor without HAS_FLOAT16 (Numba intrinsic)."""
    if not HAS_FLOAT16:
        return ir.Constant(ir.FloatType(), math.nan)
    return builder.fpext(builder.bitcast(bits, ir.HalfType()), ir.FloatType())


@emitted_intrinsic(types.uint32(types.float32))
def _bits(builder: Any, x: Any) -> Any:
    """Return the bits of a float32 as uint32 (Numba intrinsic)."""
    return builder.bitcast(x, WORD)


class BFloat(ir.Type):
    """The LLVM type bfloat, which llvmlite does not define."""

    def _to_string(self) -> str:
        """Return LLVM's name of the type, "bfloat"."""
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        """Return whether the other type is bfloat, too."""
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


@emitted_intrinsic(types.uint16(types.float32))
def _narrowed_by_processor(builder: Any, x: Any) -> Any:
    """Convert a float32 to the bits of a bfloat16 by an instruction of the processor (Numba intrinsic)."""
    return builder.bitcast(builder.fptrunc(x, BFloat()), ir.IntType(16))


@numba.njit(inline="always")
def _narrowed_by_bits(x: Any) -> Any:
    """Convert a float32 to the bits of a bfloat16 by integer operations, ties to even; NaN stays NaN."""
    bits = _bits(x)
    upper = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.uint16(upper if x == x else np.uint32(0x7FC0))


@numba.njit(inline="always")
def float32_to_bfloat16(x: Any) -> Any:
    """Convert a float32 to the bits of the nearest bfloat16, ties to even; NaN stays NaN."""
    return _narrowed_by_processor(x) if HAS_BFLOAT else _narrowed_by_bits(x)


@emitted_intrinsic(types.float32(types.float32, types.float32, types.float32))
def _multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Compute a b + c of float32, with one rounding where the processor has FMA."""
    return builder.fma(a, b, c) if HAS_FMA else builder.fadd(builder.fmul(a, b), c)


@emitted_intrinsic(types.void())
def prefer_512_bit_registers(builder: Any) -> None:
    """Set an LLVM attribute so that the calling function is vectorized with 512-bit registers (Numba intrinsic).

    On Intel's processors LLVM would take half of them, for the first that had them slowed down by it.
    """
    set.add(builder.function.attributes, '"prefer-vector-width"="512"')  # llvmlite's own `add` knows but few


@numba.njit(inline="always")
def _exp_between(x: Any) -> Any:
    """Compute e^x of a float32 from -87 to 87, with a relative error of 2e-7.

    As y 2^n, y by a polynomial: many at a time, as math.exp is not. What x log2(e) is rounded by is added again.
    """
    prefer_512_bit_registers()
    n = np.floor(x * LOG2_E + np.float32(0.5))
    f = _multiply_add(x, LOG2_E, -n) + x * LOG2_E_REST
    y = np.float32(1.535336188319500e-4)
    y = y * f + np.float32(1.339887440266574e-3)
    y = y * f + np.float32(9.618437357674640e-3)
    y = y * f + np.float32(5.550332471162809e-2)
    y = y * f + np.float32(2.402264791363012e-1)
    y = y * f + np.float32(6.931472028550421e-1)
    y = y * f + ONE
    return y * _power_of_two(np.int32(n))


@numba.njit(inline="always")
def exp(x: Any) -> Any:
    """Compute e^x of a float32, with x clipped to -87 ... 87; NaN stays NaN."""
    x = -MAX_EXPONENT if x < -MAX_EXPONENT else x
    x = MAX_EXPONENT if x > MAX_EXPONENT else x
    return _exp_between(x)


@numba.njit(inline="always")
def exp_underflowing_to_zero(x: Any) -> Any:
    """Compute e^x of a float32 of at most 87; return 0 below -87; NaN stays NaN."""
    y = _exp_between(-MAX_EXPONENT if x < -MAX_EXPONENT else x)
    return ZERO if x < -MAX_EXPONENT else y


@numba.njit(inline="always")
def multiply_by_sigmoid(x: Any, u: Any) -> Any:
    """Compute x * sigmoid(u) = x / (1 + e^-u) of float32.

    Where e^-u overflows, the result is x times 0, which is NaN for an infinite x.
    """
    return x * ZERO if u < -MAX_EXPONENT else x / (ONE + exp(-u))


# -------------------------------------------------------------------- one loop for float32 and for bfloat16
# A bfloat16 is given by its bits, as uint16. These are for loops that are compiled for arrays of either.
@overload_by_types
def to_bfloat16_bits(x: Any) -> Any:
    """Convert a float32 to the bits of a bfloat16; return bits (uint16) unchanged."""
    return (lambda x: x) if x == types.uint16 else (lambda x: float32_to_bfloat16(x))


@overload_by_types
def to_float32(x: Any) -> Any:
    """Convert the bits of a bfloat16 (uint16) to float32; return a float32 unchanged."""
    return (lambda x: bfloat16_to_float32(x)) if x == types.uint16 else (lambda x: x)


@overload_by_types
def convert_for(array: Any, x: Any) -> Any:
    """Convert float32 for an array: bfloat16 bits for uint16, else unchanged; NotImplementedError outside of Numba."""
    return (lambda array, x: float32_to_bfloat16(x)) if array.dtype == types.uint16 else (lambda array, x: x)
