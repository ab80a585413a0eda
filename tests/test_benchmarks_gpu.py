"""benchmarks.gpu runs through on a CPU, and one part that fails does not lose the others."""

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
def test_it_runs_through_on_a_cpu(tmp_path):
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
        ours = results["training"][case]["tricycle"]
        assert ours["seconds"] > 0 and len(ours["bursts"]) == 2 and len(ours["losses"]) == 4
        assert all(4 < loss < 7 for loss in ours["losses"])
    names = [row[0] for row in results["timeline"]["rows"]]
    assert {"matmul", "attention", "attention_backward", "adamw", "elsewhere"} <= set(names)
    assert sum(row[2] for row in results["timeline"]["rows"]) == pytest.approx(results["timeline"]["step"])
    assert results["generation"]["tricycle"].keys() == {"1", "32"}
    try:
        import torch  # noqa: F401
    except ImportError:
        assert "No module named 'torch'" in results["training"]["gpt2"]["torch"]["error"]
    else:
        theirs = results["training"]["gpt2"]["torch"]
        assert theirs["losses"][0] == pytest.approx(np.log(256), rel=0.1)


def test_without_a_gpu_it_says_so(tmp_path):
    from tricycle.devices import gpu_problem

    if gpu_problem() is None:
        pytest.skip("here is one")
    done = call("-m", "benchmarks.gpu", "--output", str(tmp_path / "out"))
    assert done.returncode == 2 and "no GPU can be used: " in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_part_that_fails_does_not_lose_the_others(tmp_path, monkeypatch, capsys):
    def fails(arguments, deadline):
        raise ZeroDivisionError("out of luck")

    monkeypatch.setitem(gpu.PART_FUNCTIONS, "compile", fails)
    monkeypatch.setitem(gpu.PART_FUNCTIONS, "tests", lambda arguments, deadline: ({"n": 1}, "good"))
    words = ["gpu", "--device", "cpu", "--quick", "--output", str(tmp_path), "--parts", "compile", "tests"]
    monkeypatch.setattr(sys, "argv", words)
    assert gpu.main() == 1
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert results == {"compile": {"error": "ZeroDivisionError: out of luck"}, "tests": {"n": 1}}
    assert "failed: compile" in capsys.readouterr().out


def test_no_part_begins_without_time(tmp_path, monkeypatch):
    words = ["gpu", "--device", "cpu", "--minutes", "0", "--output", str(tmp_path), "--parts", "training"]
    monkeypatch.setattr(sys, "argv", words)
    assert gpu.main() == 0
    assert "no time left" in (tmp_path / "report.md").read_text(encoding="utf-8")


@pytest.fixture
def arguments(tmp_path):
    sizes = {"steps": 1, "turns": 1, "warmup": 1, "new_tokens": 2}
    return argparse.Namespace(device="cpu", quick=True, cases=["gpt2"], compile=False, output=tmp_path, **sizes)


@pytest.mark.nightly
def test_a_side_that_fails_is_told_and_the_others_go_on(arguments):
    deadline = time.monotonic() + 100
    results = gpu.train_case(gpu.TINY, ["tricycle", "nobody"], arguments, deadline)
    assert results["tricycle"]["seconds"] > 0
    assert results["nobody"]["error"] == "nobody: KeyError: 'nobody'"


@pytest.mark.nightly
def test_a_side_that_takes_too_long_is_ended(arguments):
    worker = gpu.Worker("tricycle", gpu.TINY, "cpu", time.monotonic() - 1)
    with pytest.raises(gpu.SideError, match=r"tricycle ended with status"):
        worker.ask("burst", n=10**9)
    with pytest.raises(gpu.SideError, match="tricycle has ended"):
        worker.ask("burst", n=1)
    worker.close()


@pytest.mark.nightly
def test_programs_that_are_not_there_or_take_too_long(arguments):
    assert gpu.run_command(["no-such-program"], time.monotonic() + 9) == (-1, "no-such-program is not installed")
    status, text = gpu.run_command([sys.executable, "-c", "import time; time.sleep(60)"], time.monotonic() + 0.1)
    assert status == -1 and text.startswith("stopped after 1 s")
    assert gpu.run_command([sys.executable, "-c", "print(1)"], time.monotonic() + 60) == (0, "1\n")


def test_tables():
    assert gpu.markdown_table(["a", "long"], [[1.5, "x"], [12345.6, ""]]).splitlines() == [
        "|      a | long |",
        "|-------:|-----:|",
        "|    1.5 |    x |",
        "| 12,346 |      |",
    ]


def test_products_are_those_of_a_step():
    shapes = gpu_workers.matmul_shapes(gpu.TINY)
    assert len(shapes) == 15 and shapes[0] == ("qkv", 64, 32, 96) and shapes[2] == ("qkv dw", 32, 64, 96)
    for name, n, k, m in shapes:
        a, b = gpu_workers.matmul_operands(name, n, k, m, lambda *shape: np.ones(shape))
        assert (a @ b).shape == (n, m) and (a @ b).flat[0] == k


def test_the_floor_names_kernels():
    assert set(gpu.FLOOR) <= set(kernels.KERNELS)


def test_both_sides_begin_with_one_loss():
    """The same model: the same number of parameters, and the loss of a uniform guess."""
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    for config in gpu.QUICK_CASES.values():
        ours, theirs = gpu_workers.Tricycle(config, False), gpu_workers.Torch(config, False)
        assert ours.state.model.n_parameters == sum(p.numel() for p in theirs.model.parameters())
        for side in (ours, theirs):
            assert side.burst(2)["losses"][0] == pytest.approx(np.log(config.vocab_size), rel=0.05)
