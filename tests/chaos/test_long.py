"""Long runs leave nothing behind: a short one here, and python -m tests.chaos.long for the figures."""

import os
import sys

import pytest

from .long import MOST_SLOPE, Measures, generate_long, train_long
from .runs import Bench

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(sys.platform != "linux", reason="memory and open files known by /proc"),
]


def flat(measures: Measures) -> bool:
    first = len(measures.at) // 5
    return measures.slope(measures.memory) < MOST_SLOPE and len(set(measures.files[first:])) == 1


@pytest.mark.slow
def test_a_run_of_some_length(tmp_path):
    """No file stays open; memory is measured over longer runs, where its first growth counts for little."""
    case = Bench(tmp_path).case("long")
    measures, largest = train_long(case, 150)
    assert len(measures.at) == 150
    assert len(set(measures.files[15:])) == 1
    checkpoint = (case.run / "last.safetensors").stat().st_size / 1e6
    assert 2 * checkpoint < largest < 3 * checkpoint + 0.2
    measures = generate_long(case, 30)
    assert len(set(measures.files[3:])) == 1


@pytest.mark.slow
@pytest.mark.skipif("TRICYCLE_LONG" not in os.environ, reason="takes minutes: TRICYCLE_LONG=1 runs it")
def test_a_long_run(tmp_path):
    case = Bench(tmp_path).case("long")
    measures, _ = train_long(case, 5000)
    assert flat(measures)
    assert flat(generate_long(case, 1200))


def test_what_grows_is_seen():
    measures = Measures(list(range(0, 1000, 10)), [50 + step / 500 for step in range(0, 1000, 10)], [5] * 100)
    assert measures.slope(measures.memory) == pytest.approx(2)
    assert not flat(measures)
    assert flat(Measures(measures.at, [50.0] * 100, [5] * 100))
    assert not flat(Measures(measures.at, [50.0] * 100, [*[5] * 99, 6]))
