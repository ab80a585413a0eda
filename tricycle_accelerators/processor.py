"""What this processor is."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")  # of Linux


def parse_cpuinfo(cpuinfo: str) -> dict[str, str]:
    """What the text of Linux's /proc/cpuinfo says of the last core: "flags", "vendor_id" and so on."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


# Cache: valid for the life of the process: depends on the processor alone.
@cache
def vendor_and_features() -> tuple[str, frozenset[str]]:
    """Return its vendor and its features by Linux's names; ("", none) where neither the system nor Python tells."""
    if not CPUINFO.exists():
        return platform.processor(), frozenset()  # of Windows: "Intel64 Family 6 Model 143, GenuineIntel"
    fields = parse_cpuinfo(CPUINFO.read_text(encoding="utf-8", errors="replace"))
    return fields.get("vendor_id", ""), frozenset(fields.get("flags", "").split())


def is_intel() -> bool:
    return "GenuineIntel" in vendor_and_features()[0]


def has_slow_bfloat16() -> bool:
    """Whether products of bfloat16 take longer than of float32 with the instructions of AVX-512.

    They do on Intel's: 80 and 150 GFLOP/s of a core (Emerald Rapids). On AMD's they take half the time.
    """
    return is_intel()


def has_amx_bfloat16() -> bool:
    """Whether it has AMX for bfloat16, which is many times as fast as either."""
    return "amx_bf16" in vendor_and_features()[1]


def has_fast_bfloat16() -> bool:
    """Return whether it has instructions for products of bfloat16 that are faster than those of float32."""
    return has_amx_bfloat16() or ("avx512_bf16" in vendor_and_features()[1] and not has_slow_bfloat16())
