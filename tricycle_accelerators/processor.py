"""Facts about this machine's processor: vendor, features, bfloat16 and AMX support."""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache
from pathlib import Path

import numpy as np

CPUINFO = Path("/proc/cpuinfo")  # of Linux
# Names of NumPy's features that include instruction sets, and names of those by Linux.
NUMPY_FEATURES = {"X86_V3": "avx2", "AVX2": "avx2", "X86_V4": "avx512f", "AVX512F": "avx512f", "ASIMD": "asimd"}


def parse_cpuinfo(cpuinfo: str) -> dict[str, str]:
    """Parse the text of Linux's /proc/cpuinfo to the fields of the last core, such as "flags" and "vendor_id"."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


# Cache: valid for the life of the process: depends on the processor and on NPY_DISABLE_CPU_FEATURES alone.
@cache
def vendor_and_features() -> tuple[str, frozenset[str]]:
    """Return the processor's vendor and features as Linux names them, by /proc/cpuinfo, else NumPy's; cached.

    Without AVX-512 and AMX where NPY_DISABLE_CPU_FEATURES names X86_V4 or AVX512F. Elsewhere than on Linux the
    features are those of `NUMPY_FEATURES` that NumPy uses.
    """
    if not CPUINFO.exists():
        simd = (np.show_config(mode="dicts") or {}).get("SIMD Extensions", {})
        used = {*simd.get("baseline", ()), *simd.get("found", ())} & NUMPY_FEATURES.keys()
        # Windows gives "Intel64 Family 6 Model 143, GenuineIntel".
        return platform.processor(), frozenset(NUMPY_FEATURES[name] for name in used)
    fields = parse_cpuinfo(CPUINFO.read_text(encoding="utf-8", errors="replace"))
    features = frozenset(fields.get("flags", fields.get("Features", "")).split())  # of x86 and of ARM
    if not {"X86_V4", "AVX512F"}.isdisjoint(os.environ.get("NPY_DISABLE_CPU_FEATURES", "").replace(",", " ").split()):
        features = frozenset(name for name in features if not name.startswith(("avx512", "amx")))
    return fields.get("vendor_id", ""), features


def is_intel() -> bool:
    """Return whether the processor is Intel's."""
    return "GenuineIntel" in vendor_and_features()[0]


def has_amx_bfloat16() -> bool:
    """Return whether the processor has AMX instructions for bfloat16."""
    return "amx_bf16" in vendor_and_features()[1]


def has_fast_bfloat16() -> bool:
    """Return whether the processor's bfloat16 products are faster than its float32 products.

    Those of AVX-512 take half the time on AMD's processors, and longer on Intel's: 80 and 150 GFLOP/s of a core
    (Emerald Rapids).
    """
    return has_amx_bfloat16() or ("avx512_bf16" in vendor_and_features()[1] and not is_intel())


# Cache: valid for the life of the process, to which the system gives the permission.
@cache
def request_amx() -> bool:
    """Ask Linux to let this process use AMX's tile registers; return whether it does.

    Source: Linux, Documentation/arch/x86/xstate.rst.
    """
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return has_amx_bfloat16() and not ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data)
