"""Tests of the benchmarks without AVX-512: its use is found, and the variables prevent it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from programs import call, good

from benchmarks import avx2
from tricycle_accelerators import processor

HAS_AVX512 = "avx512f" in processor.vendor_and_features()[1] and Path("/proc/self/arch_status").exists()
LOOP = """
import time
import numpy as np
a, end = np.ones((512, 512), np.float32), time.monotonic() + 6
while time.monotonic() < end:
    a @ a
"""


@pytest.mark.slow
@pytest.mark.skipif(not HAS_AVX512, reason="needs Linux and a processor with AVX-512")
def test_use_of_avx512_is_found_and_prevented():
    pinned = {**avx2.VARIABLES, "OPENBLAS_CORETYPE": "SkylakeX"}
    for variables, is_used in [(pinned, True), (avx2.VARIABLES, False)]:
        status, users, n_processes = avx2.run([sys.executable, "-c", LOOP], {**os.environ, **variables})
        assert status == 0 and n_processes == 1 and bool(users) == is_used
    status, users, _ = avx2.run([sys.executable, "-c", "raise SystemExit(3)"], dict(os.environ))
    assert status == 3 and not users


@pytest.mark.nightly
@pytest.mark.skipif(not HAS_AVX512, reason="needs Linux and a processor with AVX-512")
def test_a_benchmark_runs_without_avx512():
    words = "train --shape tiny --peer none --rounds 1 --seconds 5 --warmup 0"
    lines = good(call("-m", "benchmarks.avx2", *words.split())).splitlines()
    assert "Haswell" in "\n".join(lines) and lines[-2].startswith("tricycle") and "used AVX-512" in lines[-1]


@pytest.mark.skipif(os.name == "nt", reason="a shell script")
def test_compiler_gets_haswell_for_native(tmp_path):
    """All other arguments reach the compiler unchanged."""
    for name, text in [("wrapper", avx2.COMPILER), ("g++", '#!/bin/sh\nprintf "%s\\n" "$@"\n')]:
        path = tmp_path / name
        path.write_text(text)
        path.chmod(0o755)
    words = ["-O3", "a b.cpp", "-march=native", "-o", "$x"]
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    run = subprocess.run([tmp_path / "wrapper", *words], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["-march=haswell" if word == "-march=native" else word for word in words]
