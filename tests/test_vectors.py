"""Products of a few rows and a matrix, and attention of one query, which threads share while they spin."""

import itertools
import os
import threading
import time

import numpy as np
import pytest
from test_threads import interrupted

from tricycle.kernels import ScoreOptions
from tricycle.kernels.quantized import QuantizedMatrix
from tricycle.kernels.reference import attention as reference
from tricycle_accelerators import matmul_plan, threads

pytest.importorskip("numba")
pytest.importorskip("ml_dtypes")
from tricycle_accelerators.compiled import attention, decode_loops, vector_loops, vector_matmul

KINDS = ["float32", *["float16"] * vector_loops.HAS_FLOAT16, "bfloat16", "int8"]
OPENBLAS = matmul_plan.Machine("AuthenticAMD", frozenset({"avx2"}), "openblas", frozenset())
# (columns, inner): four rows of more than about 1,400 terms are multiplied in blocks of terms
SHAPES = [(1, 1), (5, 64), (300, 576), (577, 100), (64, 1536), (4097, 67), (2, 130), (37, 2048), (19, 3073)]


@pytest.fixture
def team(monkeypatch):
    """A team with two helpers, even on a machine with one processor, that multiplies more than one row."""
    monkeypatch.setattr(vector_matmul, "this_machine", lambda: OPENBLAS)
    monkeypatch.setattr(threads, "n_threads", lambda: 3)
    monkeypatch.setattr(matmul_plan, "MIN_VECTOR_BYTES", 0)
    monkeypatch.setattr(matmul_plan, "MIN_VECTORS_BYTES", 0)
    monkeypatch.setattr(vector_matmul, "LATE_PAUSES", 10**9)  # there may be fewer processors
    vector_matmul.spin_team.cache_clear()
    yield vector_matmul.spin_team()
    with threads.pool_lock:
        threads._stop_serving_helpers()
    vector_matmul.spin_team.cache_clear()


def matrix_of(kind, shape, seed=0):
    """Return (inner, columns) as a kernel takes it."""
    floats = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    if kind == "float32":
        return floats.T
    return QuantizedMatrix.quantize(floats.T, kind, transposed=True)


def kernel_of(matrix):
    return vector_matmul.quantized_matmul if isinstance(matrix, QuantizedMatrix) else vector_matmul.matmul


def product_of(x, matrix, bias=None):
    return kernel_of(matrix)(x, matrix, bias)


def expected_of(x, matrix, bias=0):
    numbers = np.asarray(matrix, np.float64)
    return x.astype(np.float64) @ numbers + bias


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_is_that_of_float64(team, kind, shape):
    matrix = matrix_of(kind, shape)
    rng = np.random.default_rng(3)
    bias = rng.standard_normal(shape[0]).astype(np.float32)
    for scale, n_rows in ((1e-6, 1), (300, 1), *((1, n) for n in (*range(1, 17), 63))):
        x = rng.standard_normal((n_rows, shape[1])).astype(np.float32) * np.float32(scale)
        product = product_of(x, matrix, bias)
        expected = expected_of(x, matrix, bias)
        assert product.dtype == np.float32
        assert np.linalg.norm(product - expected) <= 1e-4 * np.linalg.norm(expected)


@pytest.mark.parametrize("n_rows", [1, 7, 12])
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_bit_equal_with_any_number_of_helpers(team, monkeypatch, kind, n_rows):
    matrix = matrix_of(kind, (1500, 576))
    x = np.random.default_rng(4).standard_normal((n_rows, 576)).astype(np.float32)
    results, begin = set(), time.monotonic()
    while not team.shared[team.loops.SERVING]:  # helpers come after the first
        results.add(product_of(x, matrix).tobytes())
        assert time.monotonic() < begin + 60
    results |= {product_of(x, matrix).tobytes() for _ in range(50)}
    with threads.pool_lock:  # another caller has the helpers
        results.add(product_of(x, matrix).tobytes())
    monkeypatch.setattr(threads, "n_threads", lambda: 1)
    results.add(product_of(x, matrix).tobytes())
    assert len(results) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_non_finite_values_propagate_and_zeros_give_zeros(team, kind):
    matrix = matrix_of(kind, (40, 256))
    for broken in (np.inf, -np.inf, np.nan):
        x = np.ones((1, 256), np.float32)
        x[0, 17] = broken
        assert not np.isfinite(product_of(x, matrix)).any(), broken
    assert not product_of(np.zeros((1, 256), np.float32), matrix).any()


def test_an_interrupt_leaves_the_helpers_to_others(team):
    matrix, x = matrix_of("float32", (64, 96)), np.ones((1, 96), np.float32)
    for n in itertools.count(1):
        was_interrupted = interrupted(vector_matmul, n, lambda: product_of(x, matrix))
        assert not threads.pool_lock.locked()
        if not was_interrupted:
            break


def test_read_only_matrix_is_multiplied_without_a_copy(team):
    matrix = matrix_of("bfloat16", (64, 96))
    matrix.values.setflags(write=False)
    x = np.ones((1, 96), np.float32)
    np.testing.assert_allclose(product_of(x, matrix), expected_of(x, matrix), rtol=1e-4, atol=1e-4)
    assert np.shares_memory(matrix.prepared["rows"][0], matrix.values)


@pytest.mark.parametrize("kind", KINDS)
def test_several_matrices_in_turn(team, kind):
    """As a model uses them, some of which are freed meanwhile: their threads have prefetched what comes next."""
    rng = np.random.default_rng(5)
    for _ in range(3):
        matrices = [matrix_of(kind, (200 + 50 * i, 128), i) for i in range(5)]
        for _ in range(20):
            for matrix in matrices:
                x = rng.standard_normal((1, 128)).astype(np.float32)
                np.testing.assert_allclose(product_of(x, matrix), expected_of(x, matrix), rtol=1e-3, atol=2e-3)


def test_parallel_for_gets_all_threads_between_products(team):
    matrix = matrix_of("float32", (500, 300))
    x = np.ones((1, 300), np.float32)
    for _ in range(20):
        product = product_of(x, matrix)
        done = []
        threads.parallel_for(done.append, range(7))
        assert sorted(done) == list(range(7))
        np.testing.assert_allclose(product, expected_of(x, matrix), rtol=1e-4, atol=1e-4)
    assert team.shared[team.loops.SERVING] == 0


@pytest.mark.parametrize("is_long", [False, True])
def test_long_job_starts_the_helpers_that_are_idle(team, is_long):
    """A product of a prompt follows kernels that other workers share; after these, a first product has no helpers."""
    threads.parallel_for(lambda i: None, range(3))
    seen = []
    helpers = threads._started[:2]  # an earlier test may have started more
    team.run(lambda box, n_threads: seen.append([helper.finished for helper in helpers]) or 0, is_long)
    assert seen == [[not is_long] * 2]


def test_helper_serves_a_long_job_that_begins_while_it_stops(team, monkeypatch):
    served = []

    def serve_jobs(box, part):
        served.append(part)
        team.n_long_jobs += len(served) < 3

    monkeypatch.setattr(team.loops, "serve_jobs", serve_jobs)
    team.serve(1)
    assert served == [1, 1, 1]


def test_callers_in_several_threads(team):
    matrix = matrix_of("int8", (900, 512))
    rows = np.random.default_rng(6).standard_normal((4, 1, 512)).astype(np.float32)
    expected = [product_of(x, matrix).tobytes() for x in rows]
    wrong = []

    def call(i):
        wrong.extend(1 for _ in range(200) if product_of(rows[i], matrix).tobytes() != expected[i])

    callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_helpers_that_keep_others_waiting_are_left_out_for_a_while(team, monkeypatch):
    monkeypatch.setattr(vector_matmul, "LATE_PAUSES", 0)  # each pause of waiting is counted, as if it were a second
    monkeypatch.setattr(vector_matmul, "PAUSE_SECONDS", 1.0)
    matrix = matrix_of("float32", (500, 300))
    start = time.monotonic()
    while team.policy and time.monotonic() - start < 20:
        product_of(np.ones((1, 300), np.float32), matrix)
    assert not team.policy


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_forked_process_starts_separate_helper_threads(team):
    matrix = matrix_of("int8", (900, 512))
    x = np.random.default_rng(7).standard_normal((1, 512)).astype(np.float32)
    expected = [product_of(x, matrix).tobytes() for _ in range(50)]
    child = os.fork()
    if child == 0:
        os._exit(int(any(product_of(x, matrix).tobytes() != expected[0] for _ in range(50))))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(set(expected)) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_unsupported_arguments_are_declined_with_a_reason(team, monkeypatch, kind):
    matrix, x = matrix_of(kind, (40, 64)), np.ones((1, 64), np.float32)
    is_quantized = isinstance(matrix, QuantizedMatrix)
    decline_reason = kernel_of(matrix).decline_reason
    assert decline_reason(x, matrix) is None
    by_rows = (matrix.T, "lies by rows") if is_quantized else (np.ascontiguousarray(matrix), "by columns")
    for row, other, phrase in (
        (np.ones((65, 64), np.float32), matrix, "got 65"),
        (np.ones((0, 64), np.float32), matrix, "got 0"),
        (x.astype(np.float64), matrix, "float32"),
        (np.ones((1, 128), np.float32)[:, ::2], matrix, "in one piece"),
        (np.ones((1, by_rows[0].shape[0]), np.float32), *by_rows),
    ):
        assert phrase in decline_reason(row, other)
        assert product_of(row, other) is NotImplemented
    if is_quantized:
        monkeypatch.setattr(vector_loops, "HAS_FLOAT16", False)
        for shape, dtype, phrase in (((64, 0), kind, "with numbers"), ((64, 40), "float16", "converts float16")):
            other = QuantizedMatrix.quantize(np.ones(shape, np.float32), dtype, transposed=True)
            assert phrase in decline_reason(x, other)
            assert not other.prepared  # asking makes nothing
        return
    assert decline_reason(x, matrix, out=np.empty((1, 40), np.float32)).startswith("a place or a dtype")
    monkeypatch.setattr(matmul_plan, "MIN_VECTOR_BYTES", 2**17)
    assert "131072 bytes" in decline_reason(x, matrix)
    monkeypatch.setattr(matmul_plan, "MIN_VECTORS_BYTES", 2**18)
    assert "262144 bytes" in decline_reason(np.ones((2, 64), np.float32), matrix)
    monkeypatch.setattr(vector_matmul, "this_machine", lambda: OPENBLAS._replace(blas="mkl"))
    assert "1 to 1 rows, got 2" in decline_reason(np.ones((2, 64), np.float32), matrix)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("n_keys", [1, decode_loops.UNIT - 1, decode_loops.UNIT + 1, 5 * decode_loops.UNIT + 3])
@pytest.mark.parametrize("size", [20, 64, 176])  # of heads: rows of parts of a register, and of whole ones
@pytest.mark.parametrize("off_by_one", [False, True])
def test_attention_of_one_query_does_not_depend_on_threads(team, monkeypatch, dtype, n_keys, size, off_by_one):
    if dtype == "float16" and not vector_loops.HAS_FLOAT16:
        pytest.skip("the processor does not convert float16")
    monkeypatch.setattr(attention, "MIN_SHARED_BYTES", 0)
    rng = np.random.default_rng(n_keys)
    q = rng.standard_normal((1, 1, 6, size)).astype(np.float32)
    k, v = rng.standard_normal((2, 1, n_keys, 3, size)).astype(np.dtype(dtype))
    options = ScoreOptions(0.3, n_keys - 1)
    shared = attention.attention(q, k, v, options, off_by_one)
    monkeypatch.setattr(threads, "n_threads", lambda: 1)
    alone = attention.attention(q, k, v, options, off_by_one)
    expected = reference.attention(*(x.astype(np.float64) for x in (q, k, v)), options, off_by_one)
    for one, other, exact in zip(shared, alone, expected):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(one, exact, 2e-6, 2e-6)
