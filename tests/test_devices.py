"""Array modules, transfers between host and GPU, and dropout masks."""

import re
import subprocess
import sys
import types

import numpy as np
import pytest

from tricycle import devices, kernels, to_tensor
from tricycle.system.memory import gpu_memory


@pytest.mark.parametrize(
    "array", [np.ones(2), np.float32(1), np.ma.array([1]), np.ones(2).view(np.recarray)], ids=lambda a: type(a).__name__
)
def test_array_module_of_numpy_arrays(array):
    assert devices.array_module(array) is np
    assert devices.is_array(array) and not devices.on_gpu(array)


@pytest.mark.parametrize("value", [1, 1.5, [1], None, "a", to_tensor(1)], ids=lambda v: type(v).__name__)
def test_array_module_rejects_other_types(value):
    assert not devices.is_array(value)
    with pytest.raises(TypeError, match=f"array.*got {type(value).__name__}$"):
        devices.array_module(value)


def test_to_cpu_returns_host_arrays_unchanged():
    array = np.ones(2)
    assert devices.to_cpu(array) is array
    assert type(devices.to_cpu(np.float32(1))) is np.ndarray


def test_to_gpu_warns_with_the_reason(monkeypatch):
    monkeypatch.setattr(devices, "gpu_problem", lambda: "none is here")
    tensor, array = to_tensor([1]), np.ones(2)
    with pytest.warns(UserWarning, match=r"to_gpu: .*none is here"):
        assert tensor.to_gpu() is tensor and not tensor.on_gpu
    with pytest.warns(UserWarning, match="none is here"):
        assert devices.to_gpu(array) is array


class CudaError(RuntimeError):
    pass


def fake_cupy(monkeypatch, driver: int, count=None) -> None:
    """A CuPy for CUDA 13 on a machine with that driver."""

    def device_count():
        if count is None:
            raise CudaError("cudaErrorInsufficientDriver: CUDA driver version is insufficient")
        return count

    runtime = types.SimpleNamespace(
        CUDARuntimeError=CudaError,
        getDeviceCount=device_count,
        driverGetVersion=lambda: driver,
        runtimeGetVersion=lambda: 13020,
        memGetInfo=lambda: (10, 100),
    )
    cupy = types.ModuleType("cupy")
    cupy.get_default_memory_pool = lambda: types.SimpleNamespace(free_bytes=lambda: 5)
    cupy.cuda = types.SimpleNamespace(runtime=runtime)
    monkeypatch.setitem(sys.modules, "cupy", cupy)


@pytest.mark.parametrize(
    ("driver", "count", "message"),
    [
        (0, None, "no NVIDIA driver"),
        (12040, None, r".*CUDA 12, .*13: .*driver 580.*tricycle-gpt\[cuda12\]"),
        (13010, None, "CUDA reports: cudaErrorInsufficientDriver"),
        (13010, 0, "CUDA sees no device"),
        (13010, 1, None),
    ],
)
def test_gpu_problem_messages(monkeypatch, driver, count, message):
    fake_cupy(monkeypatch, driver, count)
    problem = devices.gpu_problem.__wrapped__()
    assert (problem is None) if message is None else re.match(message, problem)


def test_missing_or_broken_cupy_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert devices.gpu_problem.__wrapped__().startswith("CuPy is not installed")

    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name == "cupy":
                raise ImportError("libnvrtc.so.13: no such file")

    monkeypatch.delitem(sys.modules, "cupy")
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    assert "libnvrtc.so.13" in devices.gpu_problem.__wrapped__()


def test_gpu_memory_reports_free_and_total(monkeypatch):
    fake_cupy(monkeypatch, 13010, 1)
    assert gpu_memory() == (15, 100)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dropout_mask_is_0_or_scaled_1(dtype):
    like = np.ones((), dtype)
    masks = [kernels.dropout_mask(like, (200, 50), 0.8, np.random.default_rng(7)) for _ in range(2)]
    np.testing.assert_array_equal(*masks)
    assert masks[0].dtype == dtype and masks[0].shape == (200, 50)
    np.testing.assert_allclose(np.unique(masks[0]), [0, 1.25])
    assert abs(masks[0].mean() - 1) < 0.02
    assert not np.array_equal(masks[0], kernels.dropout_mask(like, (200, 50), 0.8, np.random.default_rng(8)))


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
def test_arrays_round_trip_through_the_gpu():
    array = np.float32([1, 2])
    moved = devices.to_gpu(array)
    assert devices.on_gpu(moved) and devices.to_gpu(moved) is moved
    np.testing.assert_array_equal(devices.to_cpu(moved), array)
    masks = [devices.to_cpu(kernels.dropout_mask(moved, (40, 50), 0.5, np.random.default_rng(7))) for _ in range(2)]
    np.testing.assert_array_equal(*masks)
    assert set(np.unique(masks[0])) == {0, 2} and abs(masks[0].mean() - 1) < 0.1
