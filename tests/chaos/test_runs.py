"""The comparison of runs: equal runs have no differences, and differences are named."""

import json
import shutil

import pytest

from .runs import differences

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def finished(workspace):
    case = workspace.new_run("one")
    assert case.train().status == 0
    return case.run_folder


@pytest.fixture
def pair(finished, tmp_path):
    """A finished run, and a copy of it for changes."""
    return finished, shutil.copytree(finished, tmp_path / "copy")


def test_runs_with_equal_settings_are_equal(workspace, finished):
    case = workspace.new_run("other")
    assert case.train().status == 0
    assert differences(finished, case.run_folder) == []


@pytest.mark.parametrize("name", ["samples.txt", "loss.png", "config.json"])
def test_different_bytes_are_reported(pair, name):
    run, other = pair
    (other / name).write_bytes((run / name).read_bytes() + b" ")
    assert differences(run, other) == [f"{name}: its content"]


def test_different_losses_are_reported_and_speeds_are_not(pair):
    run, other = pair
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[0]["tokens_per_second"] = 1.0
    (other / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert differences(run, other) == []
    lines[2]["loss"] += 1e-6
    (other / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (difference,) = differences(run, other)
    assert difference.startswith("metrics.jsonl: ") and "'step': 3" in difference


def test_additional_files_are_reported(pair):
    run, other = pair
    (other / ".last.safetensors.1-1.part").touch()
    (difference,) = differences(run, other)
    assert ".part" in difference


def test_different_weights_are_reported(workspace, finished):
    case = workspace.new_run("seed", "--seed", "5")
    assert case.train().status == 0
    found = "\n".join(differences(case.run_folder, finished))
    assert all(f"last.safetensors: {part}" in found for part in ("model.", "optimiser.", "generator"))
