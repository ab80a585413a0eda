"""What the tests of one file share: a bench, and on it a run that is left alone."""

import pytest

from .runs import Bench, Case


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("chaos"))


@pytest.fixture(scope="module")
def whole(bench) -> Case:
    """It has not begun."""
    return bench.case("whole")
