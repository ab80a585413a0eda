"""The benchmark of products prints its table; how fast is no test's business."""

import re

import numpy as np
import pytest
from test_programs import call, good

from benchmarks.products import PASSES, operands, tricycle_product
from tricycle_accelerators import compiled, mkl, onednn


@pytest.mark.slow
def test_a_row_for_each_pass():
    words = "--layer 64 48 80 --peer none --threads 2 --turns 1 --seconds 0 --settling 0".split()
    rows = good(call("-m", "benchmarks.products", *words)).splitlines()
    usable = [f"-{provider.PROVIDER}" for provider in (compiled, mkl, onednn) if provider.problem() is None]
    assert re.split(r"  +", rows[2])[3:] == ["tricycle", *usable, "speed-up"]
    for row, name in zip(rows[3:], PASSES, strict=True):
        words = re.split(r" {2,}", row)
        assert words[:2] == ["64x48x80", name] and words[2] in ("numpy", "plain", "numba")
        assert len(words) == 4 + len(usable) and all(float(rate.replace(",", "")) > 0 for rate in words[3:])


@pytest.mark.parametrize("which", range(3), ids=PASSES)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_operands_have_the_layouts_of_a_layer(which, precision):
    """x (N, K), weights (K, M) and the gradient (N, M) by rows; two of these are seen transposed."""
    a, b = operands(((5, 3, 4), which))
    assert (a.shape, b.shape) == [((5, 3), (3, 4)), ((5, 4), (4, 3)), ((3, 5), (5, 4))][which]
    assert (a.flags.c_contiguous, b.flags.c_contiguous) == (which != 2, which != 1)
    multiply, _ = tricycle_product(((5, 3, 4), which), precision)
    np.testing.assert_allclose(multiply(), a @ b, 0.05, 0.05)
