"""Every kernel provider against the reference, on arguments from Hypothesis, with 1, 2, 3 and 7 threads.

Covers odd shapes, any memory layout, aliased inputs, and chunks so small that every thread gets some. The cases are the
same in every run. To run more cases, or with another seed:

    TRICYCLE_EXAMPLES=500 TRICYCLE_SEED=7 python -m pytest -m slow tests/test_kernel_properties.py
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from implementations import registered_by
from kernel_properties import ARGUMENTS, Arguments
from test_kernels import NOT_OPS, assert_close
from test_properties import LAYOUTS

from tricycle.kernels import KERNELS
from tricycle_accelerators import attention_blocks, chunks, cpu, matmul_plan, registry, threads

FASTER = registered_by(registry.register_numpy)  # from oneDNN, where available, and from the multithreaded provider
VERSIONS = [(name, i) for name in sorted(set(FASTER) - NOT_OPS) for i in range(len(FASTER[name]))]
WRITABLE = sorted(set(LAYOUTS) - {"read-only", "repeated"})
RETURNED_AS_THEY_CAME = {"matmul_operand", "matmul_operand_and_sums"}  # an input may come back itself

EXAMPLES, SEED = (int(os.environ.get(f"TRICYCLE_{name}", n)) for name, n in [("EXAMPLES", 20), ("SEED", 0)])


@pytest.fixture(scope="module", params=[1, 2, 3, 7], ids=lambda n: f"{n} threads")
def n_threads(request) -> Iterator[int]:
    """Use this number of threads on any machine, and split all work between them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads, "n_threads", lambda: request.param)
        patch.setattr(matmul_plan, "MIN_SHARED_WORK", 0)
        patch.setattr(cpu.attention, "MAX_BATCHED_SCORES", 0)
        patch.setattr(attention_blocks, "KEY_BLOCK", 24)
        patch.setattr(chunks, "CHUNK_SIZE", 64)
        yield request.param


# -------------------------------------------------------------------- one case
def laid_out(drawn: Arguments, dtype: type, layouts: list[str], share: bool) -> list[Any]:
    """Lay out the arguments in memory; with `share`, two inputs of equal shape become one array."""
    values: list[Any] = []
    for place, (value, layout) in enumerate(zip(drawn.values, layouts)):
        if isinstance(value, np.ndarray | np.float64):
            value = np.asarray(value).astype(dtype) if value.dtype.kind == "f" else value
            is_written = place in drawn.written
            usual = (layout == "repeated" and value.dtype.kind != "f") or (is_written and layout not in WRITABLE)
            if value.size and value.ndim:
                value = LAYOUTS["C" if usual else layout](value)
        values.append(value)
    read = [i for i, x in enumerate(values) if isinstance(x, np.ndarray) and x.dtype.kind == "f"]
    pairs = itertools.combinations((i for i in read if i not in drawn.written), 2)
    twins = [(i, j) for i, j in pairs if (values[i].shape, values[i].dtype) == (values[j].shape, values[j].dtype)]
    if share and twins:
        i, j = twins[0]
        values[i] = values[j]  # what comes later may have been computed from it
    return values


def fresh(values: list[Any], dtype: type | None = None) -> list[Any]:
    """Copy the arguments; convert floats to `dtype` if it is given."""
    return [
        np.array(x, dtype=dtype if x.dtype.kind == "f" else None) if isinstance(x, np.ndarray) else x for x in values
    ]


def call(kernel: Callable, values: list[Any], written: tuple[int, ...]) -> list[np.ndarray] | None:
    """Return the outputs of a kernel, or None if it declined; check that its inputs are unchanged."""
    before = fresh(values)
    result = kernel(*values)
    if result is NotImplemented:
        return None
    for place, (now, old) in enumerate(zip(values, before)):
        if isinstance(now, np.ndarray) and place not in written:
            np.testing.assert_array_equal(now, old)
    if written:
        assert result is None or result is values[written[0]]
        return [values[place] for place in written]
    return list(result) if isinstance(result, tuple) else [result]


def run_property(version: tuple[str, int], data: Any, layout: str | None = None) -> None:
    """Compare a version with the reference; `layout` is that of all inputs, otherwise it is drawn."""
    name, i = version
    drawn = ARGUMENTS[name](data.draw)
    dtype = data.draw(st.sampled_from([np.float32, np.float64]))
    if layout is None and data.draw(st.booleans()):
        layout = "C"
    layouts = [layout or data.draw(st.sampled_from(sorted(LAYOUTS))) for _ in drawn.values]
    share = data.draw(st.booleans())
    values, again = (laid_out(drawn, dtype, layouts, share) for _ in range(2))
    expected = call(KERNELS[name].reference, fresh(values, np.float64), drawn.written)
    results = call(FASTER[name][i], values, drawn.written)
    if results is None:
        return
    # Small singular values grow some thousandfold, with their error.
    if name == "orthogonalize" and dtype == np.float32:
        np.testing.assert_allclose(results[0], expected[0], 0, 2e-3)
    else:
        assert_close(name, results, expected, dtype)
    if name not in RETURNED_AS_THEY_CAME and not drawn.written:
        inputs = [x for x in values if isinstance(x, np.ndarray)]
        outputs = [x for x in results if x is not None]
        for one, other in [*itertools.product(outputs, inputs), *itertools.combinations(outputs, 2)]:
            assert not np.shares_memory(one, other)
    for result, reference in zip(call(FASTER[name][i], again, drawn.written) or [], results):
        np.testing.assert_array_equal(result, reference)  # results are bit-identical


# -------------------------------------------------------------------- tests
def test_every_kernel_with_providers_has_a_property_test():
    assert set(FASTER) - NOT_OPS <= set(ARGUMENTS) <= set(KERNELS)


QUICK = settings(max_examples=10, suppress_health_check=list(HealthCheck))
LONG = settings(QUICK, max_examples=EXAMPLES, derandomize=False)
each_version = pytest.mark.parametrize("version", VERSIONS, ids=lambda version: f"{version[0]}-{version[1]}")


@each_version
@QUICK
@given(data=st.data())
def test_provider_matches_reference(n_threads, version, data):
    run_property(version, data)


@each_version
@QUICK
@given(data=st.data())
def test_providers_accept_read_only_inputs(version, data):
    """Memory-mapped files are read-only."""
    run_property(version, data, "read-only")


@pytest.mark.nightly
@each_version
@seed(SEED)
@LONG
@given(data=st.data())
def test_provider_matches_reference_with_many_examples(n_threads, version, data):
    run_property(version, data)
