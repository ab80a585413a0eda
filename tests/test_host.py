"""The host process: the library leaves it alone, programs tune theirs, and two of them do not meet on a processor."""

import os
import subprocess
import sys
import tempfile

import pytest

from tricycle_accelerators import host

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux tells of a process")

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
NAMES = ("TRICYCLE_NUM_THREADS", "TRICYCLE_TUNE_HOST", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def environment(**variables: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in NAMES} | variables


def python(code: str, **variables: str) -> list[str]:
    """The words that a program prints."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment(**variables), timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


# -------------------------------------------------------------------- as a library
def memory_use(first: str = "", last: str = "", **variables: str) -> tuple[float, float]:
    """How many MB training added, and how many of them are still there when the model is gone."""
    code = "train(64, 1, 1); before = memory(); most = train(384, 6, 2); gc.collect()"
    code += f"\n{last}\nprint(before, most, memory())"
    before, most, after = map(float, python(f"{LOOK}\n{first}\n{code}", **variables))
    return most - before, after - before


def gives_memory_back(n: str) -> bool:
    # where something small lies at the end of the C library's heap, it keeps what is free before it until it is asked
    added, left = memory_use(last="import ctypes; ctypes.CDLL(None).malloc_trim(0)", TRICYCLE_NUM_THREADS=n)
    assert added > 150
    return left < added / 4


@on_linux
@pytest.mark.parametrize("n", ["1", "2", "3"])
def test_a_process_that_used_the_library_gives_its_memory_back(n):
    """In one of three runs, for something small may stay in each of many pages."""
    assert any(gives_memory_back(n) for _ in range(3))


@on_linux
@pytest.mark.parametrize("n", ["1", "2", "3"])
def test_the_library_leaves_processors_and_blas_alone(n):
    code = """
usual = blas_threads()
mine = os.sched_getaffinity(0)
train(96, 2, 2)
n_helpers = sum(thread.name == "tricycle" for thread in threads.threading.enumerate())
print(n_helpers, set(processors().values()) == {frozenset(mine)}, blas_threads() == usual)
"""
    assert python(LOOK + code, TRICYCLE_NUM_THREADS=n) == [str(int(n) - 1), "True", "True"]


# -------------------------------------------------------------------- tuned
@on_linux
def test_a_tuned_process_keeps_its_memory():
    """Or the test above could not fail."""
    if python(LOOK + "print(host.tune_host().keeps_memory)") == ["False"]:
        pytest.skip("another C library than glibc")
    added, left = memory_use("host.tune_host()")
    assert left > added * 3 / 4


@on_linux
def test_one_variable_switches_all_of_it_off(tmp_path):
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
def test_another_value_of_the_variable_is_refused(monkeypatch, value):
    monkeypatch.setenv("TRICYCLE_TUNE_HOST", value)
    with pytest.raises(ValueError, match=f"TRICYCLE_TUNE_HOST: expected 0 or 1, got '{value}'"):
        host.tune_host()


def test_a_program_holds_blas_to_one_thread():
    code = "tuned = host.tune_host()\nprint(tuned.holds_blas, *blas_threads())\nprint(host.tune_host() == tuned)"
    held, *numbers, same = python(LOOK + code, TRICYCLE_NUM_THREADS="2")
    assert held == same == "True" and set(numbers) == {"1"}
    assert python(LOOK + "print(host.tune_host().holds_blas)", TRICYCLE_TUNE_HOST="0") == ["False"]


# -------------------------------------------------------------------- processors
PIN = """
import os, sys
from tricycle_accelerators import host, threads
host.tune_host()
threads.parallel(lambda item: None, range(9))
for helper in threads._helpers():
    print(*sorted(os.sched_getaffinity(helper.thread.native_id)), sep=",", end=" ", flush=True)
print("ready", flush=True)
sys.stdin.read()
"""
two_processors = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs Linux and two processors"
)


def start(folder, n: int) -> subprocess.Popen:
    command = [sys.executable, "-c", PIN]
    variables = environment(TRICYCLE_NUM_THREADS=str(n), TMPDIR=str(folder))
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables)


def processors_of(program: subprocess.Popen) -> list[set[int]]:
    """Where each of its helpers may run."""
    assert program.stdout
    *helpers, ready = program.stdout.readline().split()
    assert ready == "ready"
    return [{int(processor) for processor in helper.split(",")} for helper in helpers]


def pinned(program: subprocess.Popen) -> list[int]:
    return [processor for processors in processors_of(program) if len(processors) == 1 for processor in processors]


@two_processors
def test_two_programs_at_once_share_no_processor(tmp_path):
    programs = [start(tmp_path, 2) for _ in range(2)]
    found = [processor for program in programs for processor in pinned(program)]
    for program in programs:
        program.communicate()
    assert len(found) == len(set(found))


@two_processors
def test_one_program_alone_has_a_processor_for_each_helper_and_the_next_one_too(tmp_path):
    n = len(os.sched_getaffinity(0))
    first = start(tmp_path, n)
    mine = pinned(first)
    assert len(mine) == len(set(mine)) == n - 1
    second = start(tmp_path, n)  # all are claimed
    assert processors_of(second) == [os.sched_getaffinity(0)] * (n - 1)
    second.communicate()
    first.kill()  # nothing is left to be cleaned up by it
    first.communicate()
    third = start(tmp_path, n)
    assert sorted(pinned(third)) == sorted(mine)
    third.communicate()


@two_processors
def test_with_more_threads_than_processors_none_is_pinned(tmp_path):
    n = len(os.sched_getaffinity(0)) + 1
    program = start(tmp_path, n)
    assert processors_of(program) == [os.sched_getaffinity(0)] * (n - 1)
    other = start(tmp_path, 2)  # and what was claimed in vain is free
    assert len(pinned(other)) == 1
    other.communicate()
    program.communicate()


@two_processors
def test_a_forked_process_does_not_hold_what_its_parent_claimed(tmp_path):
    code = """
import os, sys, time
from tricycle_accelerators import host, threads
host.tune_host()
threads.parallel(lambda item: None, range(9))
child = os.fork()
if child == 0:
    os.close(1)
    os.close(2)
    threads.parallel(lambda item: None, range(9))
    time.sleep(60)
print(child)
"""
    variables = {"TRICYCLE_NUM_THREADS": "2", "TMPDIR": str(tmp_path)}
    (child,) = python("import warnings; warnings.simplefilter('ignore')\n" + code, **variables)
    try:
        program = start(tmp_path, 2)
        assert len(pinned(program)) == 1
        program.communicate()
    finally:
        os.kill(int(child), 9)


@two_processors
def test_a_folder_that_cannot_be_written_pins_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "missing"))
    assert host.claim_processors(2) == []


@pytest.mark.skipif(not hasattr(os, "O_NOFOLLOW"), reason="Unix alone")
def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    assert host._lock(tmp_path / "link") is None
    assert not (tmp_path / "target").exists()


def test_each_core_comes_once_before_any_comes_twice(monkeypatch):
    monkeypatch.setattr(host, "_core_of", lambda processor: f"core {processor % 3}")
    assert host._spread_over_cores(range(6)) == [0, 1, 2, 3, 4, 5]
    monkeypatch.setattr(host, "_core_of", lambda processor: f"core {processor // 2}")
    assert host._spread_over_cores(range(6)) == [0, 2, 4, 1, 3, 5]
