"""What a run folder says of a run counts: its text, and what is done where something is not finite."""

import json
import os
import signal

import pytest

from .kills import Watched
from .runs import differences, finish

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(os.name != "posix", reason="POSIX signals")]


@pytest.fixture(scope="module")
def whole(bench):
    case = bench.case("whole", "--on-nan", "rollback")
    assert case.train().status == 0
    return case


def test_a_text_that_has_changed(bench, whole):
    """By one letter, so that there are as many tokens as before."""
    case = bench.case("changed", "--on-nan", "rollback")
    program = Watched(case, case.words)
    assert program.wait_for("update", 6)
    program.process.send_signal(signal.SIGTERM)
    assert program.finish().status == 0
    content = case.text.read_bytes()
    case.text.write_bytes(content.replace(b"quick", b"quack", 1))
    done = case.resume()
    case.text.write_bytes(content)
    assert done.status == 1
    (line,) = done.error_lines
    assert "changed text" in line and "--init-from" in line
    assert case.resume().status == 0
    assert differences(case.run, whole.run) == []


def test_nan_policy_persists_until_another_is_named(whole):
    def on_nan() -> str:
        return json.loads((whole.run / "data.json").read_text())["on_nan"]

    assert on_nan() == "rollback"
    assert whole.resume().status == 0
    assert on_nan() == "rollback"
    assert finish(whole.start([*whole.resuming, "--on-nan", "stop"])).status == 0
    assert on_nan() == "stop"
    assert finish(whole.start([*whole.resuming, "--on-nan", "rollback"])).status == 0


@pytest.mark.parametrize("value", ['"never"', "3", "null"])
def test_folder_with_an_invalid_nan_policy(whole, value):
    path = whole.run / "data.json"
    content = path.read_text()
    path.write_text(content.replace('"rollback"', value))
    done = whole.resume()
    path.write_text(content)
    assert done.status == 1
    assert "expected data and files" in done.error_lines[0]
