"""Which library holds an array, moves, and the mask that dropout draws."""

import subprocess
import sys

import numpy as np
import pytest

from tricycle import backend, to_tensor


@pytest.mark.parametrize(
    "array", [np.ones(2), np.float32(1), np.ma.array([1]), np.ones(2).view(np.recarray)], ids=lambda a: type(a).__name__
)
def test_numpy_computes_on_numpy_arrays(array):
    assert backend.array_module(array) is np
    assert backend.is_array(array) and not backend.on_gpu(array)


@pytest.mark.parametrize("value", [1, 1.5, [1], None, "a", to_tensor(1)], ids=lambda v: type(v).__name__)
def test_other_things_are_no_arrays(value):
    assert not backend.is_array(value)
    with pytest.raises(TypeError, match=f"^expected a NumPy or CuPy array, got {type(value).__name__}$"):
        backend.array_module(value)


def test_to_cpu_leaves_host_arrays():
    array = np.ones(2)
    assert backend.to_cpu(array) is array
    assert type(backend.to_cpu(np.float32(1))) is np.ndarray


def test_to_gpu_says_why_it_cannot(monkeypatch):
    monkeypatch.setattr(backend, "gpu_problem", lambda: "none is here")
    tensor, array = to_tensor([1]), np.ones(2)
    with pytest.warns(UserWarning, match="to_gpu: no GPU can be used, so this stays on the CPU: none is here"):
        assert tensor.to_gpu() is tensor and not tensor.on_gpu
    with pytest.warns(UserWarning, match="none is here"):
        assert backend.to_gpu(array) is array
    assert not backend.gpu_available()


def test_gpu_problem_is_one_line():
    problem = backend.gpu_problem()
    assert problem is None or (problem and "\n" not in problem)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_random_mask(dtype):
    like = np.ones((), dtype)
    masks = [backend.random_mask(np.random.default_rng(7), (200, 50), 0.8, like) for _ in range(2)]
    np.testing.assert_array_equal(*masks)
    assert masks[0].dtype == dtype and masks[0].shape == (200, 50)
    np.testing.assert_allclose(np.unique(masks[0]), [0, 1.25])
    assert abs(masks[0].mean() - 1) < 0.02
    assert not np.array_equal(masks[0], backend.random_mask(np.random.default_rng(8), (200, 50), 0.8, like))


def test_importing_tricycle_imports_no_cupy_and_draws_no_numbers():
    code = """
import sys, numpy as np
np.random.seed(0); before = np.random.get_state()[1].copy()
import tricycle, tricycle.layers, tricycle.loss
assert "cupy" not in sys.modules
assert (np.random.get_state()[1] == before).all()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gpu
def test_gpu_round_trip():
    array = np.float32([1, 2])
    moved = backend.to_gpu(array)
    assert backend.on_gpu(moved) and backend.to_gpu(moved) is moved
    np.testing.assert_array_equal(backend.to_cpu(moved), array)
    mask = backend.random_mask(np.random.default_rng(7), (4, 5), 0.5, moved)
    np.testing.assert_array_equal(
        backend.to_cpu(mask), backend.random_mask(np.random.default_rng(7), (4, 5), 0.5, array)
    )
