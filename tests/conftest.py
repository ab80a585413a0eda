"""What all tests share: three tiers, warnings as errors, a seeded generator, GPU tests only where a GPU is.

The tiers (CONTRIBUTING.md, section Tests): `pytest` runs the tests without a mark, `pytest -m slow` those marked
`slow`, and `pytest -m nightly` those marked `nightly`. Of the cases of a test marked `slow_except(n)` one in n is in
the first tier, the others are slow. TRICYCLE_NIGHTLY=14 selects one of 14 parts of the nightly tests, each day another
one; TRICYCLE_NIGHTLY=3/14 selects that part.
"""

import datetime
import math
import os
import re
import sys
from collections.abc import Iterator
from zlib import crc32

import numpy as np
import pytest
from hypothesis import settings

from tricycle import devices

settings.register_profile("tricycle", max_examples=60, deadline=None, derandomize=True, database=None)
settings.load_profile("tricycle")


def pytest_configure(config):
    # programs that tests call in this process would tune it for good; test_host starts processes that are tuned
    os.environ.setdefault("TRICYCLE_TUNE_HOST", "0")
    config.nightly_part = nightly_part(os.environ.get("TRICYCLE_NIGHTLY", ""))
    if config.nightly_part:
        # for the workers of xdist, which may start after midnight
        os.environ["TRICYCLE_NIGHTLY"] = "{}/{}".format(*config.nightly_part)
    for category in ("RuntimeWarning", "DeprecationWarning:tricycle", "ResourceWarning:tricycle"):
        config.addinivalue_line("filterwarnings", f"error::{category}")
    # seen three times, of small products whose numbers looked finite, and not understood: shown, so that it is not lost
    config.addinivalue_line("filterwarnings", "default:invalid value encountered in matmul:RuntimeWarning")


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, for pytest -n
def pytest_xdist_make_scheduler(config, log):
    """All tests of a file run in one process: some look at what the others of their file did."""
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log)


def nightly_part(chosen: str) -> tuple[int, int] | None:
    """The part of the nightly tests that TRICYCLE_NIGHTLY chooses: its number from 0, and the number of parts."""
    if not chosen:
        return None
    match = re.fullmatch(r"(?:(\d+)/)?([1-9]\d*)", chosen)
    if match is None or (match[1] and int(match[1]) >= int(match[2])):
        raise pytest.UsageError(f"TRICYCLE_NIGHTLY: expected N, or K/N with K from 0 to N - 1, got {chosen!r}")
    n_parts = int(match[2])
    return int(match[1] or datetime.date.today().toordinal() % n_parts), n_parts


def pytest_sessionstart(session):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.nightly_part and not hasattr(session.config, "workerinput"):
        number, n_parts = session.config.nightly_part
        reporter.write_line(
            f"nightly tests: one part in {n_parts}; to repeat it: TRICYCLE_NIGHTLY={number}/{n_parts} pytest -m nightly"
        )


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(config, items):
    mark_all_but_some_cases_as_slow(items)
    for item in items:
        if item.get_closest_marker("nightly"):
            item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "slow"]
    leave_other_parts_out(config, items)
    leave_gpu_tests_out(config, items)


def mark_all_but_some_cases_as_slow(items) -> None:
    """Of a test with `slow_except(n)`, keep one case in n, drawn by a hash of its name, and mark the others as slow."""
    cases: dict[str, list] = {}
    for item in items:
        if item.get_closest_marker("slow_except") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for same in cases.values():
        (n,) = same[0].get_closest_marker("slow_except").args
        same.sort(key=lambda item: crc32(item.name.encode()))
        for item in same[math.ceil(len(same) / n) :]:
            item.add_marker(pytest.mark.slow)


def leave_other_parts_out(config, items) -> None:
    """Deselect the nightly tests that are not in the part that TRICYCLE_NIGHTLY chooses."""
    if config.nightly_part:
        number, n_parts = config.nightly_part
        kept, others = [], []
        for item in items:
            is_other = item.get_closest_marker("nightly") and crc32(item.nodeid.encode()) % n_parts != number
            (others if is_other else kept).append(item)
        items[:] = kept
        config.hook.pytest_deselected(items=others)


def leave_gpu_tests_out(config, items) -> None:
    """Deselect thousands of tests where no GPU is, which takes less time than skipping them; `-m gpu` says why."""
    problem = devices.gpu_problem() if any("gpu" in item.keywords for item in items) else None
    if problem and "gpu" in config.option.markexpr:
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason=problem))
    elif problem:
        config.hook.pytest_deselected(items=[item for item in items if "gpu" in item.keywords])
        items[:] = [item for item in items if "gpu" not in item.keywords]


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """Two thread pools that wait for each other's cores take seconds for what is done in milliseconds."""
    torch = sys.modules.get("torch")
    before = torch and torch.get_num_threads()
    if torch:
        torch.set_num_threads(1)
    yield
    if torch:
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def browser():
    from browser import browsing

    with browsing() as opened:
        yield opened


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
