"""The host process: the library does not change it, programs tune it."""

import sys

import pytest
from programs import good
from test_threads import run_with

from tricycle_accelerators import host

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

LOOK = """
import gc, os, sys
import numpy as np
from tricycle import to_tensor
from tricycle.configs import GPTConfig
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.optimisers import AdamW, clip_gradients
from tricycle_accelerators import host, threads

def memory():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

def processors():
    return {int(task): frozenset(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")}

def blas_threads():
    return [library.num_threads for library in threads.blas_libraries()]

def train(width, n_layers, n_steps):
    sizes = dict(vocab_size=2000, context_window=128, embedding_dim=width, n_heads=4, n_layers=n_layers)
    model = GPT(GPTConfig(**sizes, batch_size=8))
    optimiser, rng = AdamW(1e-3), np.random.default_rng(0)
    for _ in range(n_steps):
        inputs, labels = rng.integers(0, 2000, (2, 8, 128))
        CrossEntropy()(to_tensor(labels, dtype=int), model(to_tensor(inputs, dtype=int))).backward()
        clip_gradients(model, 1.0)
        model.update(optimiser)
    return memory()
"""


def python(code: str, **variables: str) -> list[str]:
    """Return the words that a program prints."""
    return good(run_with(code, **variables)).split()


@on_linux
def test_threads_reserve_few_addresses_under_a_limit():
    """Six threads have stacks of 8 MB each, and would have arenas of 64 MB each."""
    added = """
import resource
from tricycle_accelerators import host, threads
if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
host.tune_host()
threads.n_threads = lambda: 7
def addresses():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize() >> 20
before = addresses()
threads.parallel_for(lambda _: bytearray(1000), range(100))
print(addresses() - before)
"""
    assert int(*python(added, TRICYCLE_TUNE_HOST="1")) < 200


# -------------------------------------------------------------------- use as a library
def memory_use(first: str = "", last: str = "", **variables: str) -> tuple[float, float]:
    """Return the MB that training added, and the MB of them that remain after the model is deleted."""
    code = "train(64, 1, 1); before = memory(); most = train(384, 6, 2); gc.collect()"
    code += f"\n{last}\nprint(before, most, memory())"
    before, most, after = map(float, python(f"{LOOK}\n{first}\n{code}", **variables))
    return most - before, after - before


def returns_memory(n: str) -> bool:
    # A small allocation at the end of the C heap keeps the free memory before it until malloc_trim is called.
    release = "from tricycle_accelerators import buffers; buffers.release()\n"
    added, left = memory_use(last=f"{release}import ctypes; ctypes.CDLL(None).malloc_trim(0)", TRICYCLE_NUM_THREADS=n)
    assert added > 150
    return left < added / 4


@pytest.mark.nightly
@on_linux
@pytest.mark.parametrize("n", ["1", "2", "3"])
def test_training_as_a_library_returns_memory_to_the_system(n):
    """Try three times: a small allocation can keep a page from being returned."""
    assert any(returns_memory(n) for _ in range(3))


@pytest.mark.nightly_except(3)
@on_linux
@pytest.mark.parametrize("n", ["1", "2", "3"])
def test_library_does_not_change_cpu_affinity_or_blas_threads(n):
    code = """
usual = blas_threads()
affinity = os.sched_getaffinity(0)
train(96, 2, 2)
n_helpers = sum(thread.name == "tricycle" for thread in threads.threading.enumerate())
print(n_helpers, set(processors().values()) == {frozenset(affinity)}, blas_threads() == usual)
"""
    assert python(LOOK + code, TRICYCLE_NUM_THREADS=n) == [str(int(n) - 1), "True", "True"]


# -------------------------------------------------------------------- tuned process
@pytest.mark.slow
@on_linux
def test_tuned_process_keeps_freed_memory():
    """Check that the test of untuned processes can fail."""
    if python(LOOK + "print(host.tune_host().keeps_memory)") == ["False"]:
        pytest.skip("the C library is not glibc")
    added, left = memory_use("host.tune_host()")
    assert left > added * 3 / 4


@pytest.mark.slow
@on_linux
def test_tune_host_0_disables_all_tuning(tmp_path):
    code = """
usual = blas_threads()
print(host.tune_host() == host.Tuning(), blas_threads() == usual)
train(64, 1, 1)
print(len(set(processors().values())), host._tune.cache_info().misses)
"""
    variables = {"TRICYCLE_NUM_THREADS": "2", "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    assert python(LOOK + code, TRICYCLE_TUNE_HOST="0", **variables) == ["True", "True", "1", "0"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", ["no", "2", "off"])
def test_invalid_tune_host_value_raises(monkeypatch, value):
    monkeypatch.setenv("TRICYCLE_TUNE_HOST", value)
    with pytest.raises(ValueError, match=f"TRICYCLE_TUNE_HOST: .*'{value}'"):
        host.tune_host()


def test_tune_host_limits_blas_to_one_thread():
    code = "tuned = host.tune_host()\nprint(tuned.holds_blas, *blas_threads())\nprint(host.tune_host() == tuned)"
    held, *numbers, same = python(LOOK + code, TRICYCLE_NUM_THREADS="2")
    assert held == same == "True" and set(numbers) == {"1"}
    assert python(LOOK + "print(host.tune_host().holds_blas)", TRICYCLE_TUNE_HOST="0") == ["False"]
