"""Atomic operations on a mailbox: an array of 64-bit integers through which compiled threads communicate."""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils

from tricycle_accelerators.compiled.jit import intrinsic
from tricycle_accelerators.compiled.registers import INDEX, PAIR


def _place(builder: Any, arguments: Any) -> Any:
    """Emit the pointer to the 64-bit integer at (address, index), the first two arguments."""
    address, index = arguments[:2]
    return builder.inttoptr(builder.add(address, builder.mul(index, INDEX(8))), INDEX.as_pointer())


@intrinsic
def atomic_load(context: Any, address: Any, index: Any) -> Any:
    """Load the 64-bit integer at an index of the mailbox at `address` atomically (acquire; Numba intrinsic)."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_place(builder, arguments), "acquire", 8)

    return types.int64(types.intp, types.intp), code


@intrinsic
def atomic_store(context: Any, address: Any, index: Any, value: Any) -> Any:
    """Store a 64-bit integer at an index of the mailbox atomically (release; Numba intrinsic)."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[2], _place(builder, arguments), "release", 8)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.int64), code


@intrinsic
def atomic_add(context: Any, address: Any, index: Any, value: Any) -> Any:
    """Add to the 64-bit integer at an index of the mailbox atomically; return nothing (Numba intrinsic)."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.atomic_rmw("add", _place(builder, arguments), arguments[2], "acq_rel")
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.int64), code


@intrinsic
def compare_exchange(context: Any, address: Any, index: Any, expected: Any, value: Any) -> Any:
    """Replace a 64-bit integer of the mailbox atomically if it has the expected value; return whether it had."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pair = builder.cmpxchg(_place(builder, arguments), arguments[2], arguments[3], "acq_rel", "acquire")
        return builder.extract_value(pair, 1)

    return types.boolean(types.intp, types.intp, types.int64, types.int64), code


@intrinsic
def pause(context: Any) -> Any:
    """Execute the processor's spin-wait hint (x86 `pause`, ARM `yield`; Numba intrinsic)."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        name, kinds, values = "llvm.x86.sse2.pause", [], []
        if binding.get_default_triple().startswith(("aarch64", "arm64")):
            name, kinds, values = "llvm.aarch64.hint", [PAIR], [PAIR(1)]
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), kinds), name)
        builder.call(function, values)
        return context.get_dummy_value()

    return types.void(), code
