"""The comparison of runs: equal runs have no differences, and differences are named."""

import json

import pytest

from .runs import differences

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def pair(workspace):
    cases = [workspace.new_run(name) for name in ("one", "other")]
    for case in cases:
        done = case.train()
        assert done.status == 0, done.err
    return [case.run_folder for case in cases]


def test_runs_with_equal_settings_are_equal(pair):
    assert differences(*pair) == []


@pytest.mark.parametrize("name", ["samples.txt", "loss.png", "config.json"])
def test_different_bytes_are_reported(pair, name):
    run, other = pair
    content = (run / name).read_bytes()
    (run / name).write_bytes(content + b" ")
    assert differences(run, other) == [f"{name}: its content"]
    (run / name).write_bytes(content)


def test_different_losses_are_reported_and_speeds_are_not(pair):
    run, other = pair
    path = run / "metrics.jsonl"
    content = path.read_text()
    lines = [json.loads(line) for line in content.splitlines()]
    lines[0]["tokens_per_second"] = 1.0
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert differences(run, other) == []
    lines[2]["loss"] += 1e-6
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (difference,) = differences(run, other)
    assert difference.startswith("metrics.jsonl: ") and "'step': 3" in difference
    path.write_text(content)


def test_additional_files_are_reported(pair):
    run, other = pair
    (run / ".last.safetensors.1-1.part").touch()
    (difference,) = differences(run, other)
    assert ".part" in difference
    (run / ".last.safetensors.1-1.part").unlink()


def test_different_weights_are_reported(workspace, pair):
    case = workspace.new_run("seed", "--seed", "5")
    assert case.train().status == 0
    difference = differences(case.run_folder, pair[0])
    assert any("last.safetensors: model." in line for line in difference)
    assert any("last.safetensors: optimiser." in line for line in difference)
    assert any("last.safetensors: generator" in line for line in difference)
