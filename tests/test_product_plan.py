"""Which provider makes a matrix product and what threads share, for processors that this machine is not."""

from __future__ import annotations

import numpy as np
import pytest

from tricycle import kernels
from tricycle_accelerators import compiled, onednn, threads
from tricycle_accelerators.matmul_plan import Machine, MatmulPlan, MatmulSpec, plan_matmul, this_machine

AVX512 = {"avx2", "avx512f"}
ALL = frozenset({"numba", "onednn"})
MACHINES = {
    "Zen 4": Machine("AuthenticAMD", frozenset(AVX512 | {"avx512_bf16"}), "openblas", ALL),
    "Zen 5": Machine("AuthenticAMD", frozenset(AVX512 | {"avx512_bf16", "avx_vnni"}), "openblas", ALL),
    "AMX": Machine("GenuineIntel", frozenset(AVX512 | {"avx512_bf16", "amx_bf16"}), "openblas", ALL),
    "AMX, plain install": Machine("GenuineIntel", frozenset(AVX512 | {"amx_bf16"}), "openblas", frozenset()),
    "Intel, no AMX": Machine("GenuineIntel", frozenset(AVX512 | {"avx512_bf16"}), "openblas", ALL),
    "AVX2": Machine("AuthenticAMD", frozenset({"avx2"}), "openblas", frozenset({"numba"})),
    "Zen 4 with MKL's NumPy": Machine("AuthenticAMD", frozenset(AVX512), "mkl", frozenset({"numba"})),
    "Apple": Machine("", frozenset(), "accelerate", frozenset({"numba"})),
    "ARM server": Machine("ARM", frozenset({"asimd"}), "openblas", frozenset({"numba"})),
}
FORWARD = MatmulSpec(4096, 384, 1536)
WEIGHT_GRADIENT = MatmulSpec(384, 4096, 1536, left="columns")
ONE_ROW, ONE_ROW_BY_ROWS = MatmulSpec(1, 768, 3072, right="columns"), MatmulSpec(1, 768, 3072)
FEW, TRANSPOSED_HEAD = MatmulSpec(8, 768, 3072), MatmulSpec(16, 768, 50304, right="columns")
FEW_BY_COLUMNS = FEW._replace(right="columns")
ODD, SMALL = MatmulSpec(4095, 384, 1537), MatmulSpec(64, 16, 16)
NARROW, FEW_NARROW = FORWARD._replace(dtype="bfloat16"), FEW._replace(dtype="bfloat16")
WIDE = MatmulSpec(512, 768, 50304)
TABLE = [
    (FORWARD, "Zen 4", 2, "numba", "rows and columns"),
    (FORWARD, "Zen 5", 64, "numba", "rows and columns"),
    (FORWARD, "AMX", 2, "numba", "rows"),
    (FORWARD, "AMX, plain install", 2, "numpy", "rows"),
    (FORWARD, "Intel, no AMX", 2, "numpy", "rows"),
    (FORWARD, "AVX2", 4, "numpy", "rows"),
    (FORWARD, "Zen 4 with MKL's NumPy", 2, "numpy", "rows"),
    (FORWARD, "Apple", 8, "numpy", "rows"),
    (FORWARD, "ARM server", 64, "numpy", "rows"),
    (FORWARD, "Zen 4", 1, "numba", "nothing"),
    (FORWARD, "AMX", 1, "numba", "nothing"),
    (WIDE, "Zen 4", 2, "numba", "rows and columns"),
    (WIDE, "AMX", 2, "numba", "columns"),
    (ODD, "Zen 4", 2, "numpy", "rows"),
    (ODD._replace(n_columns=1536), "Zen 4", 2, "numba", "rows and columns"),
    (WEIGHT_GRADIENT, "Zen 4", 2, "numpy", "terms"),
    (WEIGHT_GRADIENT, "AMX", 2, "numba", "columns"),
    (MatmulSpec(384, 4096, 384, left="columns"), "AMX", 2, "numba", "terms"),
    (NARROW, "Zen 4", 2, "onednn", "rows"),
    (NARROW, "AMX", 2, "numba", "rows"),
    (NARROW, "AMX, plain install", 2, "numpy", "rows"),
    (NARROW, "Intel, no AMX", 2, "onednn", "rows"),
    (WEIGHT_GRADIENT._replace(dtype="bfloat16"), "Intel, no AMX", 2, "onednn", "terms"),
    (WEIGHT_GRADIENT._replace(dtype="bfloat16"), "Zen 4", 2, "onednn", "columns"),
    (WIDE._replace(dtype="bfloat16"), "AMX", 16, "numba", "columns"),
    (ODD, "AMX", 2, "numba", "rows"),
    (FEW_NARROW, "AMX", 2, "onednn", "columns"),
    (ONE_ROW, "Zen 4", 2, "numba", "columns"),
    (ONE_ROW, "AVX2", 64, "numba", "columns"),
    (ONE_ROW, "AMX, plain install", 2, "numpy", "columns"),
    (ONE_ROW_BY_ROWS, "Zen 4", 2, "numpy", "terms"),
    (FEW, "Zen 4", 2, "onednn", "columns"),
    (FEW, "AVX2", 2, "numpy", "columns"),
    (TRANSPOSED_HEAD, "AVX2", 2, "numba", "columns"),
    (TRANSPOSED_HEAD._replace(n_rows=64), "AVX2", 2, "numba", "columns"),
    (TRANSPOSED_HEAD._replace(n_rows=65), "AVX2", 2, "numpy", "columns"),
    (TRANSPOSED_HEAD._replace(n_rows=65), "Intel, no AMX", 2, "numpy", "columns"),
    (TRANSPOSED_HEAD._replace(n_rows=127), "Zen 4", 2, "numba", "columns"),
    (TRANSPOSED_HEAD._replace(n_rows=128), "Zen 4", 2, "numba", "rows and columns"),
    (MatmulSpec(8, 128, 256, right="columns"), "AVX2", 2, "numpy", "pieces of columns"),
    (TRANSPOSED_HEAD, "ARM server", 64, "numba", "columns"),
    (TRANSPOSED_HEAD, "Zen 4 with MKL's NumPy", 2, "numpy", "pieces of columns"),
    (TRANSPOSED_HEAD, "Apple", 8, "numpy", "pieces of columns"),
    (TRANSPOSED_HEAD, "Zen 5", 2, "numba", "columns"),
    (SMALL, "Zen 4", 2, "numpy", "nothing"),
    (SMALL, "ARM server", 64, "numpy", "nothing"),
]


@pytest.mark.parametrize(("product", "machine", "n_threads", "provider", "share"), TABLE)
def test_matmul_plan_of_each_processor(product, machine, n_threads, provider, share):
    assert plan_matmul(product, MACHINES[machine], n_threads) == MatmulPlan(provider, share)


@pytest.mark.parametrize(
    "product", [FORWARD, WEIGHT_GRADIENT, ONE_ROW, ONE_ROW_BY_ROWS, FEW, FEW_BY_COLUMNS, ODD, NARROW, FEW_NARROW]
)
def test_kernel_follows_the_plan(product):
    """On this machine, whichever it is."""
    usable = frozenset(provider.PROVIDER for provider in (compiled, onednn) if provider.unavailable_reason() is None)
    if product.dtype == "bfloat16" and "onednn" not in usable:
        pytest.skip(onednn.unavailable_reason())
    machine = this_machine()._replace(providers=usable)
    if not machine.features:
        pytest.skip("a system that does not tell the processor's features")
    a = np.zeros((product.n_rows, product.n_inner), np.float32, "C" if product.left == "rows" else "F")
    b = np.zeros((product.n_inner, product.n_columns), np.float32, "C" if product.right == "rows" else "F")
    a, b = (kernels.matmul_operand(x, product.dtype) for x in (a, b))
    planned = plan_matmul(product, machine, threads.n_threads())
    assert kernels.explain(kernels.matmul, a, b).provider == planned.provider
