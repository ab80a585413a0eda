"""What is kept for later calls: each cache says when it is valid, and those that could be wrong are filled at the worst
moment.
"""

import os
import re
import threading
from dataclasses import dataclass

import numpy as np
import pytest
from programs import ROOT, good
from test_threads import blas_threads, run_threads, run_with

from tricycle.attention import RotaryScaling
from tricycle.attention import rotary as rotary_module
from tricycle.attention.rotary import Rotary
from tricycle.kernels import dispatch
from tricycle_accelerators import threads

PACKAGES = ("tricycle", *(path.name for path in ROOT.glob("tricycle_*") if path.is_dir()))
DECORATOR = re.compile(r"\s*@(functools\.)?((lru_)?cache|cached_property)\b")


def test_every_cache_has_a_validity_comment():
    found, silent = 0, []
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        lines = path.read_text(encoding="utf-8").split("\n")
        for number, line in enumerate(lines):
            if DECORATOR.match(line):
                found += 1
                if not lines[number - 1].lstrip().startswith("# Cache: "):
                    silent.append(f"{path.relative_to(ROOT)}:{number + 1}")
    assert not silent, f"{len(silent)} of {found} caches lack a line '# Cache: ' above them: {silent}"
    assert found > 40


FILL_CACHES = """
import importlib, inspect, pkgutil, re, sys
from types import ModuleType
import numpy as np
from threadpoolctl import threadpool_limits
import tricycle, tricycle_accelerators
from tricycle import kernels
from tricycle_accelerators import threads

threads._n_processors = lambda: 2
for library in threads.blas_libraries():
    threads.set_blas_threads(library, 2)

def caches():
    for package in (tricycle, tricycle_accelerators):
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if ".cuda" in found.name or found.name.endswith("__main__"):
                continue
            module = importlib.import_module(found.name)
            for name, value in vars(module).items():
                is_cache = hasattr(value, "cache_info") and value.__module__ == found.name
                if is_cache and not inspect.signature(value).parameters:
                    yield f"{found.name}.{name}", value

def described(value):
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(described, value)]
    return re.sub(" at 0x[0-9a-f]+|handle [0-9a-f]+|, num_threads=[0-9]+|0x[0-9a-f]+|[0-9]{9,}", "", repr(value))

def fill():
    for name, cache in sorted(found, key=lambda item: item[0], reverse=REVERSE):
        if not name.endswith("host._tune"):  # whose purpose is to change the process
            try:
                print(name, described(cache()))
            except (ImportError, RuntimeError) as error:  # what is not installed
                print(name, error)

found = list(caches())
"""
MOMENTS = {
    "a hold": "with threads.single_blas_thread(): fill()",
    "shared work": "threads.parallel_for(lambda part: fill() if part == 0 else None, range(4))",
    "a user's limit": "with threadpool_limits(1): fill()",
}


def _filled(moment: str, reverse: bool) -> list[str]:
    return sorted(good(run_with(FILL_CACHES.replace("REVERSE", str(reverse)) + moment)).splitlines())


@pytest.mark.nightly_except(3)
@pytest.mark.parametrize("moment", MOMENTS)
def test_cached_values_do_not_depend_on_when_they_are_computed(moment):
    """Each cache of a function without arguments, filled while threads or BLAS are held, beside a quiet process."""
    pytest.importorskip("numba")
    quiet = _filled("fill()", reverse=False)
    assert len(quiet) > 8
    assert _filled(MOMENTS[moment], reverse=True) == quiet


@dataclass(frozen=True)
class Halved(RotaryScaling):
    """A rule of a user, with something that equality does not see."""

    def scale_frequencies(self, speeds):
        return speeds / self.by["factor"]


def test_rope_angles_of_user_scaling_are_not_cached(monkeypatch):
    scaling = Halved("linear", 2.0)
    by = {"factor": 2.0}
    object.__setattr__(scaling, "by", by)
    x = np.random.default_rng(0).standard_normal((1, 5, 2, 8)).astype(np.float32)
    rotary = Rotary(scaling=scaling)
    before = rotary(x).array
    by["factor"] = 4.0
    expected = Rotary(scaling=RotaryScaling("linear", 4.0))(x).array
    assert np.abs(rotary(x).array - before).max() > 0.01
    np.testing.assert_array_equal(rotary(x).array, expected)
    plain = RotaryScaling("linear", 3.0)
    rotary = Rotary(scaling=plain)
    rotary(x)
    hits = rotary_module._angles.cache_info().hits
    rotary(x)
    assert rotary_module._angles.cache_info().hits == hits + 1
    monkeypatch.setattr(RotaryScaling, "scale_frequencies", lambda self, speeds: speeds * 0)
    np.testing.assert_array_equal(rotary(x).array, x)


def test_provider_registered_during_a_lookup_is_used(monkeypatch):
    kernel = dispatch.Kernel(lambda x: "plain")
    looking, registered = threading.Event(), threading.Event()

    class Slow(dict):
        """Versions whose reader is held up in the middle of a look-up."""

        def get(self, key, default=()):
            found = super().get(key, default)
            looking.set()
            registered.wait(0.2)
            return found

    monkeypatch.setattr(kernel, "registered", Slow())
    other = threading.Thread(target=kernel, args=(np.zeros(1),))
    other.start()
    looking.wait(10)
    kernel.register(np.ndarray)(lambda x: "fast")
    registered.set()
    other.join()
    assert kernel(np.zeros(1)) == "fast"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
def test_permanent_blas_limit_survives_a_fork(monkeypatch):
    """As where a server's thread starts processes."""
    hold = threads._BlasLimit()
    if not threads.blas_libraries():
        pytest.skip("no BLAS that can be held")
    main = blas_threads()
    hold.usual = [(library, 7) for library in threads.blas_libraries()]
    hold.holders = {hold}
    run_threads(hold.forget_other_threads)  # in a thread that holds nothing, as the child of a fork
    assert hold.is_permanent
    assert blas_threads() == main
