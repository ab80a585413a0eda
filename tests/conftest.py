"""What all tests share: warnings as errors, a seeded generator, GPU tests only where a GPU is."""

import os

import numpy as np
import pytest
from hypothesis import settings

from tricycle import devices

settings.register_profile("tricycle", max_examples=60, deadline=None, derandomize=True, database=None)
settings.load_profile("tricycle")


def pytest_configure(config):
    # programs that tests call in this process would tune it for good; test_host starts processes that are tuned
    os.environ.setdefault("TRICYCLE_TUNE_HOST", "0")
    config.addinivalue_line("markers", "gpu: needs CuPy and a CUDA device")
    config.addinivalue_line("markers", "slow: left out unless asked for by -m slow")
    for category in ("RuntimeWarning", "DeprecationWarning:tricycle", "ResourceWarning:tricycle"):
        config.addinivalue_line("filterwarnings", f"error::{category}")
    # seen three times, of small products whose numbers looked finite, and not understood: shown, so that it is not lost
    config.addinivalue_line("filterwarnings", "default:invalid value encountered in matmul:RuntimeWarning")


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, for pytest -n
def pytest_xdist_make_scheduler(config, log):
    """All tests of a file run in one process: some look at what the others of their file did."""
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log)


def pytest_collection_modifyitems(items):
    if any("gpu" in item.keywords for item in items) and (problem := devices.gpu_problem()):
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason=problem))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
