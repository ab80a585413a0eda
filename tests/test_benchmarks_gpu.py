"""Tests that benchmarks.gpu runs on a CPU, and that the failure of a part does not stop the others."""

import argparse
import json
import sys
import time

import numpy as np
import pytest
from programs import call

from benchmarks import gpu, gpu_workers
from tricycle import kernels


@pytest.mark.nightly
def test_benchmark_runs_on_a_cpu(tmp_path):
    parts = ["environment", "products", "training", "timeline", "generation"]
    words = ["--device", "cpu", "--quick", "--no-compile", "--output", str(tmp_path / "out"), "--parts", *parts]
    done = call("-m", "benchmarks.gpu", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    assert [*results] == parts
    report = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert all(f"## {part}\n" in report for part in parts)
    assert results["environment"]["machine"].startswith("Tricycle")
    assert len(results["products"]["gpt2"]["tricycle"]) == 15
    for case in ("gpt2", "shakespeare"):
        result = results["training"][case]["tricycle"]
        assert result["seconds"] > 0 and len(result["bursts"]) == 2 and len(result["losses"]) == 4
        assert all(4 < loss < 7 for loss in result["losses"])
    names = [row[0] for row in results["timeline"]["rows"]]
    assert {"matmul", "attention", "attention_backward", "elsewhere"} <= set(names)
    assert {"adamw", "run_independent"} & set(names)
    assert sum(row[2] for row in results["timeline"]["rows"]) == pytest.approx(results["timeline"]["step"])
    assert results["generation"]["tricycle"].keys() == {"1", "32"}
    try:
        import torch  # noqa: F401
    except ImportError:
        assert "No module named 'torch'" in results["training"]["gpt2"]["torch"]["error"]
    else:
        result = results["training"]["gpt2"]["torch"]
        assert result["losses"][0] == pytest.approx(np.log(256), rel=0.1)


def test_missing_gpu_is_an_error(tmp_path):
    from tricycle.devices import gpu_problem

    if gpu_problem() is None:
        pytest.skip("this machine has a GPU")
    done = call("-m", "benchmarks.gpu", "--output", str(tmp_path / "out"))
    assert done.returncode == 2 and "no GPU" in done.stderr
    assert not (tmp_path / "out").exists()


def test_missing_installation_is_an_error(monkeypatch, capsys):
    """Without the entry points of an installed Tricycle, only reference kernels would be measured."""
    monkeypatch.setattr("tricycle.devices.gpu_problem", lambda: None)
    monkeypatch.setattr(gpu, "entry_points", lambda group: ())
    monkeypatch.setattr(sys, "argv", ["gpu"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "not installed" in capsys.readouterr().err


def test_failure_of_a_part_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    def fail(arguments, deadline):
        raise ZeroDivisionError("out of luck")

    monkeypatch.setitem(gpu.PARTS, "compile", fail)
    monkeypatch.setitem(gpu.PARTS, "tests", lambda arguments, deadline: ({"n": 1}, "good"))
    words = ["gpu", "--device", "cpu", "--quick", "--output", str(tmp_path), "--parts", "compile", "tests"]
    monkeypatch.setattr(sys, "argv", words)
    assert gpu.main() == 1
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert results == {"compile": {"error": "ZeroDivisionError: out of luck"}, "tests": {"n": 1}}
    assert "failed: compile" in capsys.readouterr().out


def test_no_part_starts_after_the_time_limit(tmp_path, monkeypatch):
    words = ["gpu", "--device", "cpu", "--minutes", "0", "--output", str(tmp_path), "--parts", "training"]
    monkeypatch.setattr(sys, "argv", words)
    assert gpu.main() == 0
    assert "no time left" in (tmp_path / "report.md").read_text(encoding="utf-8")


@pytest.fixture
def arguments(tmp_path):
    sizes = {"steps": 1, "rounds": 1, "warmup": 1, "new_tokens": 2}
    return argparse.Namespace(device="cpu", quick=True, cases=["gpt2"], compile=False, output=tmp_path, **sizes)


@pytest.mark.nightly
def test_failure_of_a_side_is_reported_and_does_not_stop_the_others(arguments):
    deadline = time.monotonic() + 100
    results = gpu.train_case(gpu.TINY, ["tricycle", "missing"], arguments, deadline)
    assert results["tricycle"]["seconds"] > 0
    assert results["missing"]["error"] == "missing: KeyError: 'missing'"


@pytest.mark.nightly
def test_side_that_exceeds_the_deadline_is_killed(arguments):
    worker = gpu.Worker("tricycle", gpu.TINY, "cpu", time.monotonic() - 1)
    with pytest.raises(gpu.SideError, match=r"tricycle.*status"):
        worker.request("burst", n=10**9)
    with pytest.raises(gpu.SideError, match="tricycle"):
        worker.request("burst", n=1)
    worker.close()


@pytest.mark.nightly
def test_missing_or_slow_commands_return_status_minus_1(arguments):
    status, text = gpu.run_command(["no-such-program"], time.monotonic() + 9)
    assert status == -1 and "no-such-program" in text
    status, text = gpu.run_command([sys.executable, "-c", "import time; time.sleep(60)"], time.monotonic() + 0.1)
    assert status == -1 and "1 s" in text
    assert gpu.run_command([sys.executable, "-c", "print(1)"], time.monotonic() + 60) == (0, "1\n")


def test_markdown_table_aligns_columns():
    assert gpu.markdown_table(["a", "long"], [[1.5, "x"], [12345.6, ""]]).splitlines() == [
        "|      a | long |",
        "|-------:|-----:|",
        "|    1.5 |    x |",
        "| 12,346 |      |",
    ]


def test_matmul_shapes_are_those_of_a_training_step():
    shapes = gpu_workers.matmul_shapes(gpu.TINY)
    assert len(shapes) == 15 and shapes[0] == ("qkv", 64, 32, 96) and shapes[2] == ("qkv dw", 32, 64, 96)
    for name, n, k, m in shapes:
        a, b = gpu_workers.matmul_operands(name, n, k, m, lambda *shape: np.ones(shape))
        assert (a @ b).shape == (n, m) and (a @ b).flat[0] == k


def test_lower_bounds_are_named_after_kernels():
    assert set(gpu.LOWER_BOUNDS) <= set(kernels.KERNELS)


def test_both_sides_have_equal_sizes_and_start_at_uniform_loss():
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    for config in gpu.QUICK_CASES.values():
        tricycle_side, torch_side = gpu_workers.Tricycle(config, False), gpu_workers.Torch(config, False)
        assert tricycle_side.state.model.n_parameters == sum(p.numel() for p in torch_side.model.parameters())
        for side in (tricycle_side, torch_side):
            assert side.burst(2)["losses"][0] == pytest.approx(np.log(config.vocab_size), rel=0.05)
