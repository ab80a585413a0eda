"""Malicious pickles: none runs code, crashes, or exceeds the limits of time and memory."""

import functools
import os
import pickle
import subprocess
import sys

import pytest
from hostile import pickles

from tricycle.models import GPT
from tricycle_cli.pickles import load_pickled_model

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
KINDS = ("command", "instruction", "numpy", "bomb", "damage")


@pytest.fixture
def attempt():
    from hostile.worker import attempt

    return attempt


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_all_attacks_are_rejected(tmp_path, attempt, kind):
    path = tmp_path / "model.pkl"
    read = functools.partial(load_pickled_model, path)
    for title, content in pickles.all_attacks(kind).items():
        path.write_bytes(content)
        outcome = attempt(read, tmp_path, len(content))
        assert outcome.is_acceptable, (title, outcome)
        assert outcome.kind == "refused" or kind == "damage", title
        assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pkl"], title


def test_valid_pickle_is_loaded(tmp_path, attempt):
    path = tmp_path / "model.pkl"
    assert len(pickles.all_attacks()) > 250
    path.write_bytes(pickle.dumps(GPT(pickles.CONFIG)))
    assert attempt(lambda: load_pickled_model(path), tmp_path, 0).kind == "model"


@pytest.mark.nightly
@pytest.mark.parametrize("title", ["os.system", "exec", "open", "subprocess"])
def test_monitor_detects_attacks_executed_by_the_pickle_module(tmp_path, attempt, title):
    """Load the attacks with Python's `pickle`, which executes them."""
    content = pickles.all_attacks("command")[f"command: REDUCE {title}"]
    outcome = attempt(lambda: pickle.loads(content), tmp_path, len(content))
    assert outcome.kind == "escaped" or (tmp_path / pickles.MARKER).exists()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "action"),
    [
        ("crashed", lambda: os.abort()),
        ("traceback", lambda: {}["key"]),
        ("memory", lambda: bytearray(b"x") * 300_000_000),
        ("slow", lambda: sum(range(10**8))),
        ("escaped", lambda: subprocess.run(["true"])),
        ("escaped", lambda: open("../escaped", "w").close()),
        ("lines", lambda: 1 / 0 if print("two", file=sys.stderr) is None else None),
        ("status", lambda: os._exit(9)),
    ],
)
def test_monitor_classifies_each_failure(tmp_path, attempt, monkeypatch, kind, action):
    monkeypatch.setattr("hostile.worker.MAX_SECONDS", 0.3)
    outcome = attempt(action, tmp_path, 0)
    assert outcome.kind == kind, outcome
