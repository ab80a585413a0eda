"""Atomic operations on a mailbox: an array of 64-bit integers through which compiled threads communicate."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from tricycle_accelerators.compiled.jit import IS_ARM64, emitted_intrinsic
from tricycle_accelerators.compiled.registers import INDEX, PAIR, call


def _place(builder: Any, address: Any, index: Any) -> Any:
    """Emit the pointer to the 64-bit integer at an index of the mailbox at `address`."""
    return builder.inttoptr(builder.add(address, builder.mul(index, INDEX(8))), INDEX.as_pointer())


@emitted_intrinsic(types.int64(types.intp, types.intp))
def atomic_load(builder: Any, address: Any, index: Any) -> Any:
    """Load the 64-bit integer at an index of the mailbox at `address` atomically (acquire; Numba intrinsic)."""
    return builder.load_atomic(_place(builder, address, index), "acquire", 8)


@emitted_intrinsic(types.void(types.intp, types.intp, types.int64))
def atomic_store(builder: Any, address: Any, index: Any, value: Any) -> None:
    """Store a 64-bit integer at an index of the mailbox atomically (release; Numba intrinsic)."""
    builder.store_atomic(value, _place(builder, address, index), "release", 8)


@emitted_intrinsic(types.void(types.intp, types.intp, types.int64))
def atomic_add(builder: Any, address: Any, index: Any, value: Any) -> None:
    """Add to the 64-bit integer at an index of the mailbox atomically; return nothing (Numba intrinsic)."""
    builder.atomic_rmw("add", _place(builder, address, index), value, "acq_rel")


@emitted_intrinsic(types.boolean(types.intp, types.intp, types.int64, types.int64))
def compare_exchange(builder: Any, address: Any, index: Any, expected: Any, value: Any) -> Any:
    """Replace a 64-bit integer of the mailbox atomically if it has the expected value; return whether it had."""
    pair = builder.cmpxchg(_place(builder, address, index), expected, value, "acq_rel", "acquire")
    return builder.extract_value(pair, 1)


@emitted_intrinsic(types.void())
def pause(builder: Any) -> None:
    """Execute the processor's spin-wait hint (x86 `pause`, ARM `yield`; Numba intrinsic)."""
    if IS_ARM64:
        call(builder, "llvm.aarch64.hint", ir.VoidType(), PAIR(1))
    else:
        call(builder, "llvm.x86.sse2.pause", ir.VoidType())
