"""Memory, open files and folder sizes of runs; `python -m tests.chaos.long` measures long runs."""

import sys

import pytest

from .long import ResourceUsage, generate_long, train_long
from .runs import Workspace

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(sys.platform != "linux", reason="memory and open files known by /proc"),
]


def test_run_of_150_steps_leaves_no_files_open(tmp_path):
    """Check that no file stays open; memory is only meaningful in longer runs."""
    case = Workspace(tmp_path).new_run("long")
    usage, largest = train_long(case, 150)
    assert len(usage.at) == 150
    assert len(set(usage.files[15:])) == 1
    checkpoint = (case.run_folder / "last.safetensors").stat().st_size / 1e6
    assert 2 * checkpoint < largest < 3 * checkpoint + 0.2
    usage = generate_long(case, 30)
    assert len(set(usage.files[3:])) == 1


@pytest.mark.long
def test_memory_and_open_files_stay_constant_in_a_long_run(tmp_path):
    case = Workspace(tmp_path).new_run("long")
    usage, _ = train_long(case, 5000)
    assert usage.is_flat
    assert generate_long(case, 1200).is_flat


def test_growing_memory_and_open_files_are_detected():
    usage = ResourceUsage(list(range(0, 1000, 10)), [50 + step / 500 for step in range(0, 1000, 10)], [5] * 100)
    assert usage.slope(usage.memory) == pytest.approx(2)
    assert not usage.is_flat
    assert ResourceUsage(usage.at, [50.0] * 100, [5] * 100).is_flat
    assert not ResourceUsage(usage.at, [50.0] * 100, [*[5] * 99, 6]).is_flat
