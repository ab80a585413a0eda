"""Configuration of all tests: three tiers, warnings as errors, a seeded generator, and GPU tests only with a GPU.

The tiers (CONTRIBUTING.md, section Tests): `pytest` runs the tests without a mark, `pytest -m slow` those marked
`slow`, and `pytest -m nightly` those marked `nightly`. Of the cases of a test marked `nightly_except(n)` one in n is in
the tier of the test, the others are nightly. TRICYCLE_NIGHTLY=28 selects one of 28 parts of the nightly tests, each day
another one; TRICYCLE_NIGHTLY=3/28 selects that part.
"""

import datetime
import gc
import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from hypothesis import settings

from tricycle import devices

settings.register_profile("tricycle", max_examples=60, deadline=None, derandomize=True, database=None)
settings.load_profile("tricycle")


def pytest_configure(config):
    # Programs that tests call in this process would tune it permanently; test_host tunes separate processes.
    os.environ.setdefault("TRICYCLE_TUNE_HOST", "0")
    config.nightly_part = nightly_part(os.environ.get("TRICYCLE_NIGHTLY", ""))
    if config.nightly_part:
        # The workers of xdist must select the same part, even if they start after midnight.
        os.environ["TRICYCLE_NIGHTLY"] = "{}/{}".format(*config.nightly_part)
    for category in ("RuntimeWarning", "DeprecationWarning:tricycle", "ResourceWarning:tricycle"):
        config.addinivalue_line("filterwarnings", f"error::{category}")
    # This warning occurred three times, for small products of finite numbers with unknown cause; it stays a warning.
    config.addinivalue_line("filterwarnings", "default:invalid value encountered in matmul:RuntimeWarning")


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, for pytest -n
def pytest_xdist_make_scheduler(config, log):
    """Run all tests of a file in one process, because some depend on results of others."""
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log)


def nightly_part(value: str) -> tuple[int, int] | None:
    """Return the part of the nightly tests that a value of TRICYCLE_NIGHTLY selects: index and number of parts."""
    if not value:
        return None
    match = re.fullmatch(r"(?:(\d+)/)?([1-9]\d*)", value)
    if match is None or (match[1] and int(match[1]) >= int(match[2])):
        raise pytest.UsageError(f"TRICYCLE_NIGHTLY: expected N, or K/N with K from 0 to N - 1, got {value!r}")
    n_parts = int(match[2])
    return int(match[1] or datetime.date.today().toordinal() % n_parts), n_parts


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Disable garbage collection while tests are collected, then exclude the 36,000 of them from later passes."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_sessionstart(session):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.nightly_part and not hasattr(session.config, "workerinput"):
        number, n_parts = session.config.nightly_part
        reporter.write_line(
            f"nightly tests: one part in {n_parts}; to repeat it: TRICYCLE_NIGHTLY={number}/{n_parts} pytest -m nightly"
        )


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(config, items):
    mark_all_but_some_cases_as_nightly(items)
    for item in items:
        if item.get_closest_marker("nightly"):
            item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "slow"]
        if item.get_closest_marker("long") and "TRICYCLE_LONG" not in os.environ:
            item.add_marker(pytest.mark.skip(reason="takes minutes: TRICYCLE_LONG=1 runs it"))
    deselect_other_nightly_parts(config, items)
    deselect_gpu_tests(config, items)


def mark_all_but_some_cases_as_nightly(items) -> None:
    """Mark the cases of tests with `nightly_except(n)` as nightly, except one in n, selected by a hash of its name."""
    cases: dict[str, list] = {}
    for item in items:
        if item.get_closest_marker("nightly_except") and not item.get_closest_marker("nightly"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for test_cases in cases.values():
        (n,) = test_cases[0].get_closest_marker("nightly_except").args
        test_cases.sort(key=lambda item: crc32(item.name.encode()))
        for item in test_cases[math.ceil(len(test_cases) / n) :]:
            item.add_marker(pytest.mark.nightly)


def deselect_other_nightly_parts(config, items) -> None:
    """Deselect the nightly tests that are not in the part that TRICYCLE_NIGHTLY selects."""
    if config.nightly_part:
        number, n_parts = config.nightly_part
        kept, others = [], []
        for item in items:
            is_other = item.get_closest_marker("nightly") and crc32(item.nodeid.encode()) % n_parts != number
            (others if is_other else kept).append(item)
        items[:] = kept
        config.hook.pytest_deselected(items=others)


def deselect_gpu_tests(config, items) -> None:
    """Deselect the GPU tests if there is no GPU; `-m gpu` skips them with the reason, which takes more time."""
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
    """Set PyTorch to one thread: two thread pools that compete for cores take seconds instead of milliseconds."""
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


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Iterator[Path]:
    """Set TRICYCLE_CACHE to a new folder, so that a text is tokenized once for all programs of a module's tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRICYCLE_CACHE", str(folder := tmp_path_factory.mktemp("cache")))
        yield folder


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """A file of 30 kB with words in random order."""
    from chaos.runs import write_text

    path = tmp_path_factory.mktemp("texts") / "a text.txt"
    write_text(path, n_lines=600)
    return path


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
