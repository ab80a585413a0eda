"""Threads of BLAS and OpenMP for short products: when they are asked, and that it makes no difference to the result."""

import math
import os

import numpy as np
import pytest

from tricycle_accelerators import cpu, spin_threads, threads
from tricycle_accelerators.spin_threads import LATE_SECONDS, MAX_REST_SECONDS, MIN_REST_SECONDS


@pytest.fixture
def trust(monkeypatch):
    monkeypatch.setattr(threads, "n_threads", lambda: 2)
    monkeypatch.setattr(spin_threads, "spin_policy", spin_threads.SpinPolicy())
    return spin_threads.spin_policy


def test_lost_time_lengthens_the_pause_of_spin_threads(trust, monkeypatch):
    now, rests = 1000.0, []
    monkeypatch.setattr(spin_threads, "perf_counter", lambda: now)
    for _ in range(7):
        assert trust
        while trust:
            trust.record_seconds(LATE_SECONDS * 4, 1000)
        rests.append(trust.until - now)
        now = trust.until
    assert rests[:3] == pytest.approx([MIN_REST_SECONDS, 2 * MIN_REST_SECONDS, 4 * MIN_REST_SECONDS])
    assert max(rests) == pytest.approx(MAX_REST_SECONDS)


def test_rare_late_product_causes_no_pause(trust):
    for _ in range(20):
        trust.record_seconds(LATE_SECONDS * 4, 1000)
        for _ in range(300):
            trust.record_seconds(LATE_SECONDS / 100, 1000)
        assert trust


def test_same_loss_rests_threads_of_short_products_alone(trust):
    for _ in range(40):  # a large model's token takes 0.1 s, of which 4 ms are lost
        trust.record(0.1, 0.004)
        assert trust
    trust.lost = trust.spent = 0.0
    trust.record(0.004, 0.004)
    assert trust
    trust.record(0.004, 0.004)
    assert not trust


def test_a_large_matrix_may_take_longer_and_one_thread_starts_no_spin_threads(trust, monkeypatch):
    for _ in range(10):
        trust.record_seconds(LATE_SECONDS * 4, 10**9)
    assert trust
    monkeypatch.setattr(threads, "n_threads", lambda: 1)
    assert not trust


@pytest.mark.parametrize("shape", [(576, 960), (64, 4097), (5000, 67), (1536, 576), (257, 1031)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_have_the_same_bits_with_and_without_spin_threads(trust, shape, dtype):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, shape[0])).astype(dtype)
    matrix = rng.standard_normal(shape).astype(dtype).copy(order="F")
    results = []
    for until in (0.0, math.inf):
        trust.until = until
        results.append(cpu.matrices.matmul(x, matrix, np.ones(shape[1], dtype)).tobytes())
    assert results[0] == results[1]
    if spin_threads._blas() is not None:
        trust.until = 0.0
        assert spin_threads.multiply_vector(x, matrix) is not None
        trust.until = math.inf
        assert spin_threads.multiply_vector(x, matrix) is None


def test_blas_has_its_number_of_threads_back_and_its_limit_disables_spin_threads(trust, monkeypatch):
    monkeypatch.setattr(threads, "blas_limit", threads._BlasLimit())  # an earlier test may hold it for good
    before = [library.num_threads for library in threads.blas_libraries()]
    row, matrix = np.ones((1, 900), np.float32), np.ones((900, 600), np.float32, order="F")
    with threads.single_blas_thread():
        assert spin_threads.multiply_vector(row, matrix) is None
    assert (spin_threads.multiply_vector(row, matrix) is None) == (spin_threads._blas() is None)
    assert [library.num_threads for library in threads.blas_libraries()] == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_process_does_not_wait_for_spin_threads_of_its_parent(trust):
    spin_threads.disable_after_fork()
    child = os.fork()
    if child == 0:
        os._exit(1 if trust else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert trust
