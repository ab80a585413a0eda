"""Memory of large results that is kept from one step to the next."""

from __future__ import annotations

import gc
import itertools
import mmap
import os
import sys
import tracemalloc
from functools import partial

import numpy as np
import pytest
from programs import call, good
from test_threads import interrupted, run_threads

from tricycle import kernels, to_tensor
from tricycle.configs import GPTConfig
from tricycle.debug import use_reference
from tricycle.devices import owns_memory
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.optimisers import AdamW
from tricycle_accelerators import buffers

MB = 2**20
on_unix = pytest.mark.skipif(not hasattr(mmap, "MAP_PRIVATE"), reason="Windows has no private mappings")


@pytest.fixture
def arena(monkeypatch):
    """One of this test alone, of small ranges: all tests together stay below a limit of 2 GB of addresses."""
    monkeypatch.setattr(buffers, "_arena", buffers._Arena())
    monkeypatch.setattr(buffers, "RANGE_BYTES", 2**26)
    return buffers._arena


def some(n_megabytes: float, dtype=np.float32) -> np.ndarray:
    return buffers.empty((int(n_megabytes * MB) // np.dtype(dtype).itemsize,), dtype)


def address(array: np.ndarray) -> int:
    return array.ctypes.data


# -------------------------------------------------------------------- arrays
@on_unix
def test_large_array_is_aligned_and_owns_its_memory(arena):
    array = buffers.empty((3, 5, 2**17 + 1), np.float32)
    assert (array.shape, array.dtype, type(array)) == ((3, 5, 2**17 + 1), np.float32, np.ndarray)
    assert array.flags.c_contiguous and array.flags.writeable and address(array) % 64 == 0
    assert owns_memory(array) and owns_memory(np.empty(3))
    for view in (array[1:], array.reshape(-1), array.T, array.view(np.uint32), np.empty(3)[:2]):
        assert not owns_memory(view)
    end = address(array) + array.nbytes + 4  # of its last cache line, which no other array shares
    assert array.nbytes % 64 == 60 and arena.ranges[0].used_end == end


@on_unix
def test_empty_array_of_a_kernel_reuses_memory(arena):
    like = np.empty(3, np.float16)
    first = kernels.empty(like, (2, MB))
    assert (first.shape, first.dtype) == ((2, MB), np.float16)
    place = address(first)
    del first
    assert address(kernels.empty(like, (MB, 2))) == place
    with use_reference():
        assert kernels.empty(like, (MB, 2)).base is None


def test_small_array_uses_numpy_memory(arena):
    array = buffers.empty((10, 10), np.float64)
    assert array.base is None and not arena.ranges
    assert not buffers.zeros((4, 4), np.float32).any()


@pytest.mark.parametrize("shape", [(0, 3), (5, 7), (3, 2**18)])
def test_aligned_array_of_any_size_starts_at_a_cache_line(arena, shape):
    others = [np.empty(1 + i, np.uint8) for i in range(20)]  # so that malloc's next address is any
    for dtype in (np.uint8, np.float32, np.float64):
        array = buffers.aligned_empty(shape, dtype)
        assert (array.shape, array.dtype) == (shape, dtype) and array.flags.c_contiguous
        assert address(array) % buffers.ALIGNMENT == 0
        others.append(array)


@on_unix
def test_memory_is_reused_after_the_last_view_is_deleted(arena):
    first = some(2)
    place, view = address(first), first[3:]
    del first
    other = some(2)
    assert address(other) != place
    view.fill(7)
    del view
    zeros = buffers.zeros((MB // 2,), np.float32)
    assert address(zeros) == place and not zeros.any()


@on_unix
def test_adjacent_free_blocks_are_merged(arena):
    """Three arrays side by side leave room for one of their sum, in whatever order they go."""
    for order in ((0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)):
        arrays = {i: some(1 + i) for i in range(3)}
        place = address(arrays[0])
        for i in order:
            del arrays[i]
        assert address(some(6)) == place
        arena.collect()
        assert len(arena.free) == 1


@on_unix
def test_unused_addresses_are_taken_last(arena, monkeypatch):
    """Memory that arrays have used is reused in any range before the rest of a range that takes no memory yet."""
    monkeypatch.setattr(buffers, "RANGE_BYTES", 2**24)
    held = [some(3) for _ in range(6)]  # 15 MB in one range, 3 in the next, which remains nearly unused
    kept = held.pop()
    used = sum(whole.used_end - whole.start for whole in arena.ranges)
    held.clear()
    held = [some(2), some(5), some(4)]
    assert len(arena.ranges) == 2 and sum(whole.used_end - whole.start for whole in arena.ranges) == used
    held.append(some(8))  # joined to the free part before it, as far as that goes
    assert len(arena.ranges) == 2 and kept.nbytes


@on_unix
def test_limit_on_addresses_makes_ranges_smaller(arena, monkeypatch):
    import resource

    monkeypatch.setattr(buffers, "RANGE_BYTES", 2**30)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**31, 2**31))
    held = some(2)
    assert arena.ranges[0].bytes.size == 2**28 and held.size


@on_unix
@pytest.mark.parametrize("n_bytes", [2**30, 2**24])
def test_arrays_never_overlap(arena, monkeypatch, n_bytes):
    """Arrays of random sizes come and go, in one range or many; each keeps the number that it was filled with."""
    monkeypatch.setattr(buffers, "RANGE_BYTES", n_bytes)
    rng = np.random.default_rng(0)
    held: list[tuple[np.ndarray, float]] = []
    for number in range(100):
        if held and rng.random() < 0.5:
            array, was = held.pop(rng.integers(len(held)))
            assert (array == was).all()
            del array
        array = some(rng.uniform(1, 5))
        array.fill(number)
        held.append((array[rng.integers(3) :], number))  # some live on as views
    assert all((array == was).all() for array, was in held)
    n_bytes = sum(whole.bytes.size for whole in arena.ranges)
    assert n_bytes - sum(size for size, _ in arena.free) >= sum(array.nbytes for array, _ in held)
    del array
    held.clear()
    arena.collect()
    assert sorted(arena.free) == sorted((whole.used_end - whole.start, whole.start) for whole in arena.ranges)


@on_unix
def test_concurrent_allocation_and_release(arena):
    def work(number: int) -> None:
        for _ in range(200):
            array = some(1 + number % 3)
            array[::1024] = number
            wrong.extend([number] * int((array[::1024] != number).any()))

    wrong: list[int] = []
    run_threads(*[partial(work, i) for i in range(8)])
    assert not wrong


@on_unix
def test_arrays_in_reference_cycles_are_released(arena):
    cycle: list = [some(2)]
    cycle.append(cycle)
    place = address(cycle[0])
    del cycle
    gc.collect()
    assert address(some(2)) == place


# -------------------------------------------------------------------- without address space or at a fork
def test_falls_back_to_numpy_without_address_space(arena, monkeypatch):
    def refuse(*_, **__):
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    array = some(2)
    assert array.base is None
    buffers.release()


@on_unix
def test_array_larger_than_a_range(arena, monkeypatch):
    monkeypatch.setattr(buffers, "RANGE_BYTES", 4 * MB)
    array, others = some(10), [some(3), some(3)]
    assert [whole.bytes.size for whole in arena.ranges].count(10 * MB) == 1 and len(arena.ranges) == 3
    array.fill(1)
    assert owns_memory(array) and len({address(each) for each in (array, *others)}) == 3


@on_unix
def test_an_interrupt_neither_locks_the_memory_nor_lends_it_twice(arena):
    def take():
        held.extend([some(2), some(70), some(3)])

    for n in itertools.count(1):
        held = [some(1), some(3), some(2), some(1)]
        del held[1:3]
        was_interrupted = interrupted(buffers, n, take)
        held.extend([some(2), some(3), some(1)])
        for i, array in enumerate(held):
            array.fill(i)
        assert all((array == i).all() for i, array in enumerate(held)), n
        assert not arena.lock.locked() and held[-1].base is not None, n
        if not was_interrupted:
            break


def test_numpy_memory_while_the_lock_is_held_at_a_fork_or_memory_is_traced(arena):
    with arena.lock:
        assert some(2).base is None
    tracemalloc.start()
    array = some(2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak >= array.nbytes and array.base is None


# -------------------------------------------------------------------- back to the system
def run_python(code: str) -> list[str]:
    return good(call("-c", code)).split()


RESIDENT = """
import os, time
import numpy as np
from tricycle_accelerators import buffers
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
before = resident()
array = buffers.empty((64 * 2**18,), np.float32)
kept = buffers.empty((2**18,), np.float32)
array.fill(1)
kept.fill(2)
del array
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux tells of a process")
@pytest.mark.parametrize("statement", ["buffers.release()", "time.sleep(1.0)"])
def test_free_memory_is_returned_to_the_system(statement):
    """When it is asked to, and by itself when nothing was taken for a while."""
    code = RESIDENT.replace("before =", "buffers.IDLE_SECONDS = 0.2; before =")
    code += f"held = resident()\n{statement}\nprint(held - before, resident() - before, kept.min())"
    held, left, number = map(float, run_python(code))
    assert held > 60 and left < 20 and number == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
@pytest.mark.skipif(sys.platform == "darwin", reason="macOS forbids much after a fork")
def test_forked_process_has_separate_memory():
    code = """
import os, sys
import numpy as np
from tricycle_accelerators import buffers
array = buffers.empty((2**20,), np.float32)
array.fill(1)
child = os.fork()
if child == 0:
    array.fill(2)
    other = buffers.empty((2**20,), np.float32)
    other.fill(3)
    os._exit(int(array.max() != 2 or other.base is None))
status = os.waitpid(child, 0)[1]
print(status, array.max())
"""
    assert run_python(code) == ["0", "1.0"]


# -------------------------------------------------------------------- training
@on_unix
def test_memory_is_constant_after_the_second_step(arena, monkeypatch):
    config = GPTConfig(vocab_size=512, context_window=128, embedding_dim=128, n_heads=4, n_layers=2, batch_size=8)
    model, optimiser = GPT(config), AdamW(1e-3)
    tokens = np.random.default_rng(0).integers(0, 512, (8, 129))
    inputs, labels = to_tensor(tokens[:, :-1], dtype=int), to_tensor(tokens[:, 1:], dtype=int)
    ends, take = [], arena.take
    monkeypatch.setattr(arena, "take", lambda size: (lease := take(size), ends.append(sum(lease.place)))[0])
    highest = []
    for _ in range(4):
        CrossEntropy()(labels, model(inputs)).backward()
        model.update(optimiser)
        highest.append(max(ends))
    assert 0 < highest[0] <= highest[1] == highest[2] == highest[3]
