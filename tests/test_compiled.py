"""What Numba compiles, beside the plain versions; `test_kernels.py` has more of these."""

import subprocess
import sys

import numpy as np
import pytest

from tricycle import kernels
from tricycle.kernels import Scoring
from tricycle_accelerators import attention_blocks, threads
from tricycle_accelerators.compiled import attention, generation, optimisers, recurrence
from tricycle_accelerators.compiled.generation import loops

pytest.importorskip("numba")


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_they_are_asked():
    """So that the cases of `test_kernels.py` are about them."""
    assert generation.normalise(normal(2, 8), np.ones(8, np.float32), None, 1e-5, False) is not NotImplemented
    assert generation.normalise(normal(2, 8), *np.ones((2, 8), np.float32), 1e-5, True) is not NotImplemented
    assert generation.gated_swish(normal(2, 8)) is not NotImplemented
    assert generation.attend_one(normal(4, 8), normal(5, 2, 8), normal(5, 2, 8), 0.3, None, False) is not NotImplemented
    assert generation.turn(normal(2, 4, 8), normal(2, 4), normal(2, 4)) is None
    assert generation.normalise(normal(2, 8).astype(np.float64), None, None, 1e-5, False) is NotImplemented


@pytest.mark.parametrize("factor", [None, 0.3, 0.0, np.float32(np.nan)])
def test_adamw(factor):
    """Large enough to be asked, and not a multiple of anything."""
    arrays = [normal(70_001, seed=i) for i in range(3)]
    arrays.append(np.abs(normal(70_001, seed=4)) * 1e-3)
    arrays[1][:5] = 0
    arrays[3][:5] = 0
    expected = [a.astype(np.float64) for a in arrays]
    numbers = 7, 0.01, (0.9, 0.99), 1e-8, 0.1, factor
    assert optimisers.adamw(*arrays, *numbers) is None
    kernels.adamw.plain(*expected, *numbers)
    for mine, theirs in zip(arrays, expected):
        np.testing.assert_allclose(mine, theirs, 1e-5, 1e-6)
    assert optimisers.adamw(*(a[:100] for a in arrays), *numbers) is NotImplemented
    assert optimisers.adamw(*(a[::-1] for a in arrays), *numbers) is NotImplemented


@pytest.mark.parametrize("name", ["gated_swish", "attend_one"])
def test_exponents_far_apart(name):
    if name == "gated_swish":
        arguments = [np.concatenate([normal(3, 300), np.linspace(-200, 200, 900, dtype=np.float32).reshape(3, 300)], 1)]
    else:
        arguments = [200 * normal(4, 8), normal(50, 2, 8), normal(50, 2, 8, seed=1), 1.0, None, True]
    with np.errstate(over="ignore"):
        expected = getattr(kernels, name).plain(*arguments)
    np.testing.assert_allclose(getattr(kernels, name)(*arguments), expected, 1e-5, 1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_comes_through(bad):
    """Broken weights are noticed by who draws tokens: here nothing may hide them."""
    x = normal(1, 64)
    x[0, 37] = bad
    gain = np.ones(64, np.float32)
    assert not np.isfinite(kernels.normalise(x, gain, None, 1e-5, False)).all()
    assert not np.isfinite(kernels.normalise(x, gain, gain, 1e-5, True)).all()
    assert not np.isfinite(kernels.gated_swish(x)).all()
    values = normal(5, 1, 64)
    values[3, 0, 1] = bad
    assert not np.isfinite(kernels.attend_one(normal(2, 64), normal(5, 1, 64), values, 0.1, None, False)).all()
    halves = np.empty((2, 64), np.int8)
    assert not loops().split_int8(x, halves, np.empty(1, np.float32))
    assert not loops().split_bfloat16(x, halves.view(np.int8).repeat(2, 1).view(np.uint16))


@pytest.mark.parametrize("n_rows", [1, 5])
def test_halves_of_8_bits_are_the_number(n_rows):
    x = normal(n_rows, 70) * np.geomspace(1e-20, 1e20, n_rows, dtype=np.float32)[:, None]
    halves = np.empty((2 * n_rows, 70), np.int8)
    steps = np.empty(n_rows, np.float32)
    assert loops().split_int8(x, halves, steps)
    joined = np.empty_like(x)
    loops().join_int8(halves.astype(np.float32), steps, joined)
    assert (np.abs(joined - x) <= 0.51 * steps[:, None]).all()
    assert (np.abs(x).max(axis=1) / steps <= 32_512.01).all()


def test_halves_of_16_bits_are_the_number():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = normal(3, 70)
    halves = np.empty((6, 70), ml_dtypes.bfloat16)
    assert loops().split_bfloat16(x, halves.view(np.uint16))
    np.testing.assert_array_equal(halves[:3], x.astype(ml_dtypes.bfloat16))
    np.testing.assert_allclose(halves[:3].astype(np.float32) + halves[3:].astype(np.float32), x, 2**-16)


def test_nothing_is_imported_before_it_is_needed():
    program = """
import sys
import numpy as np
from tricycle import kernels
kernels.matmul(np.ones((2, 2)), np.ones((2, 2)))
assert "numba" not in sys.modules
kernels.gated_swish(np.ones((1, 2), np.float32))
assert "numba" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


# -------------------------------------------------------------------- attention
def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray, scoring: Scoring, nothing: bool, plain: bool) -> list:
    """The result, the logs of sums, and the gradients of q, k and v."""
    forward = kernels.attention.plain if plain else attention.attention
    backward = kernels.attention_backward.plain if plain else attention.attention_backward
    out, logs = forward(q, k, v, scoring, nothing)
    gradients = [np.empty_like(array) for array in (q, k, v)]
    assert backward(np.cos(out), q, k, v, out, logs, scoring, *gradients) is not NotImplemented
    return [out, logs, *gradients]


@pytest.mark.parametrize("window", [None, 1, 20, 64, 100])
@pytest.mark.parametrize("nothing", [False, True])
@pytest.mark.parametrize("factor", [1, 8])
def test_sums_of_exponentials_over_many_blocks(window, nothing, factor):
    """Scores up to some hundred, whose largest may come in any block of keys."""
    q, k, v = factor * normal(2, 140, 4, 8), factor * normal(2, 180, 2, 8, seed=1), normal(2, 180, 2, 8, seed=2)
    scoring = Scoring(0.5, 40, window)
    expected = attended(*(array.astype(np.float64) for array in (q, k, v)), scoring, nothing, plain=True)
    for mine, theirs in zip(attended(q, k, v, scoring, nothing, plain=False), expected):
        np.testing.assert_allclose(mine, theirs, 1e-3, 1e-4 * np.abs(theirs).max() + 1e-4)


def test_a_broken_score_is_not_hidden():
    q, k, v = normal(1, 40, 2, 8), normal(1, 40, 2, 8), normal(1, 40, 2, 8)
    k[0, 3, 1, 0] = np.nan
    results = attended(q, k, v, Scoring(0.5, 0), False, plain=False)
    for result in results:
        assert not np.isfinite(result).all()
    assert np.isfinite(results[0][:, :3]).all()  # queries before the key
    assert np.isfinite(results[0][:, :, 0]).all()  # and the other head


# -------------------------------------------------------------------- products and recurrent layers
@pytest.mark.parametrize("n_rows", [1, 5, 6, 12, 13, 32])
@pytest.mark.parametrize(("n_terms", "n_columns"), [(1, 1), (7, 31), (50, 33), (300, 64)])
def test_products_of_panels(n_rows, n_terms, n_columns):
    from tricycle_accelerators.compiled import products

    x, matrix = normal(n_rows, n_terms), normal(n_terms, n_columns, seed=1)
    for right in (matrix, np.asfortranarray(matrix)):
        cut = products.panels(right)
        bias = normal(len(cut) * products.PANEL)
        for steps in (x[None], normal(n_rows, 3, n_terms).swapaxes(0, 1)):
            wide = np.full((len(steps), n_rows, n_columns + 1), np.nan, np.float32)
            products.multiply(steps, cut, bias, wide[..., :-1])
            expected = steps.astype(np.float64) @ matrix + bias[:n_columns]
            np.testing.assert_allclose(wide[..., :-1], expected, 1e-4, 1e-4)
            assert np.isnan(wide[..., -1]).all()


def test_recurrent_layers_are_asked():
    """With weights laid out before, and without; not for a few steps, nor where an array is not in one piece."""
    gates, states, weights = normal(4, 6, 20), normal(3, 5, 6, 5, seed=1), normal(5, 20, seed=2)
    strided = np.empty((4, 12, 20), np.float32)[:, ::2]
    for matrix in (weights, kernels.repeated(weights)):
        assert recurrence.lstm(gates, states, matrix, None, None) is None
        assert recurrence.lstm(gates[:1], states[:, :2], matrix, None, None) is NotImplemented
        assert recurrence.lstm(strided, states, matrix, None, None) is NotImplemented


@pytest.mark.parametrize("cell", ["LSTM", "GRU", "RNN"])
def test_threads_of_recurrent_layers_give_the_same_bits(cell, monkeypatch):
    from tricycle.sequences import recurrent
    from tricycle.tensor import to_tensor

    layer, x = getattr(recurrent, cell)(5, 7, generator=0), normal(35, 11, 5)
    results = []
    for n_threads in (1, 3):
        monkeypatch.setattr(threads, "n_threads", lambda n=n_threads: n)
        inputs = to_tensor(x)
        outputs, _ = layer(inputs, lengths=np.arange(35) % 11 + 1)
        outputs.backward()
        results.append((outputs.array, inputs.grad.array))
    for one, three in zip(*results):
        np.testing.assert_array_equal(one, three)
