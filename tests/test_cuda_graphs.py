"""Recorders of CUDA graphs on a stand-in for CuPy, whose graphs call the recorded steps; test_gpu.py has a GPU's."""

import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tricycle.kernels.recording import RecordingError
from tricycle_accelerators.cuda import graphs


class FakeStream:
    """Collects the steps that are submitted between `begin_capture` and `end_capture`."""

    def __init__(self, non_blocking: bool = False) -> None:
        self.steps: list[Callable[[], None]] | None = None

    def __enter__(self) -> None:
        fake.stack.append(self)

    def __exit__(self, *error: Any) -> None:
        fake.stack.pop()

    def begin_capture(self) -> None:
        self.steps = []

    def end_capture(self) -> SimpleNamespace:
        if self.steps is None:
            raise RuntimeError("no capture")
        steps, self.steps = self.steps, None
        return SimpleNamespace(launch=lambda stream: [step() for step in steps])

    def record(self) -> str:
        return "event"

    def wait_event(self, event: str) -> None:
        assert event == "event"


class FakeCupy:
    """The parts of CuPy that a recorder calls; arrays are NumPy's."""

    uint64 = np.uint64
    zeros = staticmethod(np.zeros)

    def __init__(self) -> None:
        self.stack = [FakeStream()]
        self.allocate_pinned = self.default_pinned = lambda n_bytes: None
        self.used, self.freed = 1e9, 0
        pool = SimpleNamespace(total_bytes=lambda: self.used, free_all_blocks=self.free)
        self.get_default_memory_pool = lambda: pool
        self.get_default_pinned_memory_pool = lambda: SimpleNamespace(malloc=self.default_pinned)
        self.cuda = SimpleNamespace(
            Device=lambda number: nullcontext(),
            MemoryPool=lambda: SimpleNamespace(malloc=None, total_bytes=lambda: 7),
            Stream=FakeStream,
            get_current_stream=lambda: self.stack[-1],
            runtime=SimpleNamespace(memGetInfo=lambda: (0, 80e9)),
            set_pinned_memory_allocator=lambda allocate: setattr(self, "allocate_pinned", allocate),
            using_allocator=lambda malloc: nullcontext(),
        )

    def free(self) -> None:
        self.freed += 1

    def asarray(self, value: Any) -> np.ndarray:
        self.allocate_pinned(np.asarray(value).nbytes)
        return np.array(value)

    def submit(self, step: Callable[[], None]) -> None:
        """Run a step on the current stream, or record it."""
        steps = self.stack[-1].steps
        step() if steps is None else steps.append(step)


fake: FakeCupy


@pytest.fixture
def recorder(monkeypatch) -> graphs.Recorder:
    global fake
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    graphs._stream.cache_clear()
    yield graphs.Recorder(0)
    graphs._stream.cache_clear()


def weighted(x: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """Return factor * x plus the last two draws, computed by one step."""
    seeds = [graphs.draw(lambda: drawn.pop(0))[1] for _ in range(2)]
    result = np.zeros(3)

    def step() -> None:
        result[...] = factor * x + seeds[0] + 10 * seeds[1]

    fake.submit(step)
    return result


drawn: list[int] = []


def test_replays_use_new_inputs_and_seeds(recorder):
    recorder.record(weighted, [np.ones(3), np.float32(2)])
    assert fake.freed == 1 and recorder.n_bytes == 7
    results = []
    for factor in (2, 3):
        drawn.extend([factor, 1])
        results.append(recorder.replay([np.arange(3.0), np.float32(factor)]))
    np.testing.assert_array_equal(results[0], 2 * np.arange(3.0) + 12)  # a copy, which the second replay left alone
    np.testing.assert_array_equal(results[1], 3 * np.arange(3.0) + 13)
    assert fake.allocate_pinned is fake.default_pinned and graphs._recording.get() is None


def test_draws_are_immediate_outside_of_recordings():
    assert graphs.draw(lambda: 5) == (5, None)


def test_copies_from_the_host_end_a_recording_of_this_thread_alone(recorder):
    elsewhere = []

    def copy() -> np.ndarray:
        other = threading.Thread(target=lambda: elsewhere.append(fake.asarray(np.ones(2))))
        other.start()
        other.join()
        return fake.asarray(np.ones(2))

    with pytest.raises(RecordingError, match="16 bytes are copied from the host"):
        recorder.record(copy, [])
    assert len(elsewhere) == 1 and fake.allocate_pinned is fake.default_pinned
    assert graphs._stream(0, threading.get_ident()).steps is None and graphs._recording.get() is None


@pytest.mark.parametrize("ended", [False, True], ids=["open", "ended by the error"])
@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (RuntimeError("cannot  be\nrecorded"), RecordingError, "^RuntimeError: cannot be recorded$"),
        (MemoryError("too much"), RecordingError, "^MemoryError: too much$"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
    ],
)
def test_failed_functions_end_the_recording(recorder, error, expected, message, ended):
    def fail() -> None:
        if ended:
            fake.stack[-1].steps = None
        raise error

    with pytest.raises(expected, match=message):
        recorder.record(fail, [])
    assert graphs._stream(0, threading.get_ident()).steps is None and graphs._recording.get() is None
    drawn.extend([0, 0])
    recorder.record(weighted, [np.ones(3), np.float32(2)])  # the stream can record again
    np.testing.assert_array_equal(recorder.replay([np.ones(3), np.float32(2)]), [2, 2, 2])


def test_large_models_are_not_recorded(recorder):
    fake.used = 41e9
    with pytest.raises(RecordingError, match=r"41\.0 of 80\.0 GB are in use"):
        recorder.record(weighted, [np.ones(3), np.float32(2)])
    assert not fake.freed


def test_too_many_draws_are_not_recorded(recorder, monkeypatch):
    monkeypatch.setattr(graphs, "MAX_DRAWS", 1)
    with pytest.raises(RecordingError, match="more than 1 random masks"):
        recorder.record(weighted, [np.ones(3), np.float32(2)])


def test_recorders_can_be_excluded(monkeypatch):
    like = SimpleNamespace(device=SimpleNamespace(id=3))
    assert graphs.new_recorder(like).device == 3
    monkeypatch.setenv("TRICYCLE_KERNELS", "-cuda_graphs")
    assert graphs.new_recorder(like) is NotImplemented
