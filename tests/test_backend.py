"""Which library holds an array, moves, and the mask that dropout draws."""

import os
import subprocess
import sys
import threading
import types

import numpy as np
import pytest

from tricycle import backend, kernels, to_tensor


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


class CudaError(RuntimeError):
    pass


def fake_cupy(monkeypatch, driver: int, count=None, toolkit: int = 13020) -> None:
    """A CuPy for CUDA 13 on a machine with that driver."""

    def device_count():
        if count is None:
            raise CudaError("cudaErrorInsufficientDriver: CUDA driver version is insufficient")
        return count

    cupy = types.ModuleType("cupy")
    pool = types.SimpleNamespace(free_bytes=lambda: 5)
    cupy.get_default_memory_pool = lambda: pool
    cupy.cuda = types.SimpleNamespace(
        runtime=types.SimpleNamespace(
            CUDARuntimeError=CudaError, getDeviceCount=device_count, driverGetVersion=lambda: driver,
            runtimeGetVersion=lambda: toolkit, memGetInfo=lambda: (10, 100),
        )
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "cupy", cupy)


@pytest.mark.parametrize(
    ("driver", "count", "said"),
    [
        (0, None, "there is no NVIDIA driver, so no NVIDIA GPU that could be used"),
        (12040, None, "the driver is for CUDA 12, CuPy for 13: install driver 580 or newer, or tricycle-gpt[cuda12]"),
        (13010, None, "CUDA reports: cudaErrorInsufficientDriver: CUDA driver version is insufficient"),
        (13010, 0, "CUDA sees no device"),
        (13010, 1, None),
    ],
)
def test_why_no_gpu_can_be_used(monkeypatch, driver, count, said):
    fake_cupy(monkeypatch, driver, count)
    problem = backend.gpu_problem.__wrapped__()
    assert (problem is None) if said is None else problem.startswith(said)


def test_a_cupy_that_is_not_there_or_broken(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert backend.gpu_problem.__wrapped__().startswith("CuPy is not installed (pip install")

    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name == "cupy":
                raise ImportError("libnvrtc.so.13: no such file")

    monkeypatch.delitem(sys.modules, "cupy")
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    assert backend.gpu_problem.__wrapped__() == "CuPy cannot be loaded: libnvrtc.so.13: no such file"


def test_memory_that_a_new_array_could_have(monkeypatch):
    fake_cupy(monkeypatch, 13010, 1)
    assert backend.gpu_memory() == (15, 100)


def test_gpu_problem_is_one_line():
    problem = backend.gpu_problem()
    assert problem is None or (problem and "\n" not in problem)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_random_mask(dtype):
    like = np.ones((), dtype)
    masks = [kernels.random_mask(like, (200, 50), 0.8, np.random.default_rng(7)) for _ in range(2)]
    np.testing.assert_array_equal(*masks)
    assert masks[0].dtype == dtype and masks[0].shape == (200, 50)
    np.testing.assert_allclose(np.unique(masks[0]), [0, 1.25])
    assert abs(masks[0].mean() - 1) < 0.02
    assert not np.array_equal(masks[0], kernels.random_mask(like, (200, 50), 0.8, np.random.default_rng(8)))


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
    masks = [backend.to_cpu(kernels.random_mask(moved, (40, 50), 0.5, np.random.default_rng(7))) for _ in range(2)]
    np.testing.assert_array_equal(*masks)
    assert set(np.unique(masks[0])) == {0, 2} and abs(masks[0].mean() - 1) < 0.1


# -------------------------------------------------------------------- worker threads
@pytest.fixture(params=[1, 2, 3])
def threads(request, monkeypatch):
    monkeypatch.setattr(backend, "n_threads", lambda: request.param)
    backend._helpers.cache_clear()
    yield request.param
    backend._helpers.cache_clear()


@pytest.mark.parametrize("n_items", [0, 1, 2, 7, 100])
def test_every_item_is_worked_on_once(threads, n_items):
    seen = []
    backend.parallel(seen.append, range(n_items))
    assert sorted(seen) == list(range(n_items))


def test_as_many_threads_as_asked_for_work_at_a_time(threads):
    everyone = threading.Barrier(threads)  # passes only when all are there
    backend.parallel(lambda item: everyone.wait(timeout=30), range(threads))


def test_blas_has_one_thread_inside_and_its_own_after(threads):
    before = [library.num_threads for library in backend.blas_libraries()]
    inside = []
    backend.parallel(lambda item: inside.extend(lib.num_threads for lib in backend.blas_libraries()), range(4))
    assert [library.num_threads for library in backend.blas_libraries()] == before
    assert set(inside) <= ({1} if threads > 1 else set(before))


def test_work_inside_work_is_done_by_the_same_thread(threads):
    done = []
    backend.parallel(lambda i: backend.parallel(lambda j: done.append((i, j)), range(3)), range(4))
    assert sorted(done) == [(i, j) for i in range(4) for j in range(3)]


@pytest.mark.parametrize("bad", [0, 5])
def test_an_error_comes_out_and_the_threads_live_on(threads, bad):
    def work(item):
        if item == bad:
            raise KeyError(item)

    for _ in range(3):
        with pytest.raises(KeyError, match=str(bad)):
            backend.parallel(work, range(10))
    seen = []
    backend.parallel(seen.append, range(10))
    assert sorted(seen) == list(range(10))


def test_two_callers_at_once(threads):
    seen = []
    callers = [
        threading.Thread(target=lambda: [backend.parallel(seen.append, range(10)) for _ in range(50)]) for _ in range(2)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert sorted(seen) == sorted([*range(10)] * 100)


def run_with(code: str, **variables: str) -> subprocess.CompletedProcess:
    names = ("TRICYCLE_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in names} | variables
    return subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", env=environment)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"TRICYCLE_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "2"}, 2),
        ({"OMP_NUM_THREADS": "2,1"}, 2),
        ({"TRICYCLE_NUM_THREADS": "1", "OMP_NUM_THREADS": "2"}, 1),
    ],
)
def test_variables_set_the_number_of_threads(variables, expected):
    code = "from tricycle import backend; n = backend.n_threads(); libs = backend.blas_libraries();"
    code += "print(n, *{library.num_threads for library in libs} if n == 1 else [])"
    found = run_with(code, **variables).stdout.split()
    assert found in ([str(expected)], [str(expected), "1"])


@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5"])
def test_a_wrong_number_of_threads_is_refused(value):
    result = run_with("from tricycle import backend; backend.n_threads()", TRICYCLE_NUM_THREADS=value)
    wanted = f"ValueError: TRICYCLE_NUM_THREADS: expected a whole number above 0, got '{value}'"
    assert result.stderr.strip().endswith(wanted)


def test_numpy_alone_is_enough():
    code = "import sys; sys.modules['threadpoolctl'] = None; from tricycle import backend, kernels; import numpy as np;"
    code += "a = np.ones((300, 300), np.float32); print(backend.blas_libraries(), kernels.matmul(a, a)[0, 0])"
    assert run_with(code).stdout.split() == ["()", "300.0"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
def test_a_forked_process_makes_its_own_threads():
    code = """
import os, sys
from tricycle import backend
backend.parallel(lambda item: None, range(4))
child = os.fork()
seen = []
backend.parallel(seen.append, range(4))
if child == 0:
    os._exit(0 if sorted(seen) == [0, 1, 2, 3] else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run_with(code, TRICYCLE_NUM_THREADS="2").stdout.strip() == "0"


TRAIN = """
import hashlib, numpy as np
from tricycle import to_tensor
from tricycle.configs import GPTConfig
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.optimisers import AdamW
model = GPT(GPTConfig(vocab_size=300, context_window=160, embedding_dim=96, n_heads=3, n_layers=2, batch_size=8))
rng, optimiser = np.random.default_rng(0), AdamW(1e-3)
for _ in range(3):
    ids = rng.integers(0, 300, (2, 8, 160))
    CrossEntropy()(to_tensor(ids[0], dtype=int), model(to_tensor(ids[1], dtype=int))).backward()
    model.update(optimiser)
print(hashlib.sha256(b"".join(p.numpy().tobytes() for p in model.parameters())).hexdigest())
"""


@pytest.mark.parametrize("n", ["1", "2", "3"])
def test_training_gives_the_same_bits_in_every_run(n):
    first, second = (run_with(TRAIN, TRICYCLE_NUM_THREADS=n) for _ in range(2))
    assert first.stdout == second.stdout and len(first.stdout) == 65, first.stderr
