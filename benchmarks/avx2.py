"""Any benchmark as on a processor with AVX2 and without AVX-512 (`python -m benchmarks.avx2 train --shape S`).

Environment variables limit NumPy, OpenBLAS, Numba, oneDNN, MKL, PyTorch and the C library, on all sides. While the
benchmark runs, Linux's records of the AVX-512 registers of each thread are read; if one was used, the status is 1.
llama.cpp must be compiled without AVX-512 (`CMAKE_ARGS=-DGGML_NATIVE=OFF`).

Source of the records: https://docs.kernel.org/filesystems/proc.html, "/proc/<pid>/arch_status".
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.workers import KEEP_BLAS_PINS

HASWELL = "+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe"
C_LIBRARY = "AVX512F,AVX512VL,AVX512BW,AVX512CD,AVX512DQ,AVX512ER,AVX512PF,AVX512_VNNI"
VARIABLES = {
    KEEP_BLAS_PINS: "1",
    "OPENBLAS_CORETYPE": "Haswell",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",  # Tricycle's plans read it, too
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": HASWELL,
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=" + ",".join(f"-{name}" for name in C_LIBRARY.split(",")),
}
# torch.compile calls it with -march=native.
COMPILER = """#!/bin/sh
for word do
    shift
    case $word in -march=native) word=-march=haswell ;; esac
    set -- "$@" "$word"
done
exec g++ "$@"
"""
START_SECONDS = 2.0  # a process inherits the record of its parent, and may have used the registers before its program
POLL_SECONDS = 0.5


def child_processes(parent: int) -> list[int]:
    """Return the process ids of all descendants of a process that run now."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
    found = [parent]
    for pid in found:
        found += [child for child, its_parent in parents.items() if its_parent == pid]
    return found[1:]


def seconds_since_start(pid: int) -> float:
    """Return the age of a process in seconds; FileNotFoundError if it has ended."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    ticks_per_second = os.sysconf("SC_CLK_TCK")  # type: ignore[attr-defined, unused-ignore]
    return float(Path("/proc/uptime").read_text().split()[0]) - ticks / ticks_per_second


def uses_avx512(pid: int) -> bool:
    """Return whether a process used AVX-512 registers since START_SECONDS after its start; FileNotFoundError if ended.

    Raises:
        FileNotFoundError: the process has ended.
    """
    age = seconds_since_start(pid)
    elapsed = [float(path.read_text().split()[-1]) for path in Path(f"/proc/{pid}/task").glob("*/arch_status")]
    return any(0 <= milliseconds / 1000 < age - START_SECONDS for milliseconds in elapsed)


def run(command: list[str], environment: dict[str, str]) -> tuple[int, dict[int, str], int]:
    """Run a command to its end; return (exit status, {id: command} of processes that used AVX-512, number of all)."""
    process = subprocess.Popen(command, env=environment)
    seen: set[int] = set()
    users: dict[int, str] = {}
    while process.poll() is None:
        time.sleep(POLL_SECONDS)
        for pid in [process.pid, *child_processes(process.pid)]:
            try:
                if uses_avx512(pid):
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                    users[pid] = shlex.join(word.decode(errors="replace") for word in words if word)
                seen.add(pid)
            except OSError:  # it has ended
                continue
    return process.returncode, users, len(seen)


def main() -> int:
    """Run sys.argv's benchmark, print processes that used AVX-512; return its status, or 1 if 0 but there were some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", help="module of benchmarks/, such as train")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the benchmark")
    arguments = parser.parse_args()
    if not Path("/proc/self/arch_status").exists():
        parser.error("expected Linux on x86-64 with /proc/PID/arch_status, which proves that AVX-512 is not used")
    with tempfile.TemporaryDirectory() as folder:
        compiler = Path(folder) / "g++-haswell"
        compiler.write_text(COMPILER)
        compiler.chmod(0o755)
        variables = {**VARIABLES, "CXX": str(compiler), "TORCHINDUCTOR_CACHE_DIR": folder}
        command = [sys.executable, "-m", f"benchmarks.{arguments.benchmark}", *arguments.arguments]
        status, users, n_processes = run(command, {**os.environ, **variables})
    for pid, words in users.items():
        print(f"process {pid} used AVX-512: {words}")
    if not users:
        print(f"AVX2: none of {n_processes} processes used AVX-512")
    return status or (1 if users else 0)


if __name__ == "__main__":
    sys.exit(main())
