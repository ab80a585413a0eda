"""A resumed run verifies its training text, and keeps its NaN policy."""

import json
import os
import signal

import pytest

from .kills import MonitoredProcess
from .runs import differences, finish

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(os.name != "posix", reason="POSIX signals")]


@pytest.fixture(scope="module")
def reference(workspace):
    case = workspace.new_run("reference", "--on-nan", "rollback")
    assert case.train().status == 0
    return case


def test_resuming_with_changed_text_is_rejected(workspace, reference):
    """Change one letter, so that the number of tokens stays the same."""
    case = workspace.new_run("changed", "--on-nan", "rollback")
    program = MonitoredProcess(case, case.start_args)
    assert program.wait_for_phase("update", 6)
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
    assert differences(case.run_folder, reference.run_folder) == []


def test_nan_policy_persists_until_another_is_named(reference):
    def on_nan() -> str:
        return json.loads((reference.run_folder / "data.json").read_text())["on_nan"]

    assert on_nan() == "rollback"
    assert reference.resume().status == 0
    assert on_nan() == "rollback"
    assert finish(reference.start([*reference.resume_args, "--on-nan", "stop"])).status == 0
    assert on_nan() == "stop"
    assert finish(reference.start([*reference.resume_args, "--on-nan", "rollback"])).status == 0


@pytest.mark.parametrize("value", ['"never"', "3", "null"])
def test_resuming_with_an_invalid_nan_policy_is_rejected(reference, value):
    path = reference.run_folder / "data.json"
    content = path.read_text()
    path.write_text(content.replace('"rollback"', value))
    done = reference.resume()
    path.write_text(content)
    assert done.status == 1
    assert "expected data and files" in done.error_lines[0]
