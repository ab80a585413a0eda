"""benchmarks/transforms: all sides compute the same, tables, and the rewriting of the page; speed is not tested."""

import importlib.util

import numpy as np
import pytest
from programs import call, good

from benchmarks import transforms, transforms_probes, transforms_workers
from benchmarks.interleave import Schedule
from benchmarks.transforms_workers import SIDES, mlp_inputs, mlp_loss, new_step

PACKAGES = dict(transforms.SIDES.values())


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")


# -------------------------------------------------------------------- the same work
@pytest.mark.nightly
@pytest.mark.parametrize("task", ["chain", "mlp-small", "hvp-tiny"])
@pytest.mark.parametrize("side", [side for side in SIDES if side != "tricycle"])
def test_each_side_computes_the_same_as_tricycle_twice(side, task, monkeypatch):
    needs(PACKAGES[side])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(transforms_workers, "CHAIN_LENGTH", 5)
    expected, step = new_step("tricycle", task)(), new_step(side, task)
    for _ in range(2):
        for actual, array in zip(step(), expected, strict=True):
            assert actual.dtype == np.float32
            np.testing.assert_allclose(actual, array, 1e-4, 1e-4 * abs(array).max())


def test_gradient_of_the_mlp_matches_a_difference():
    weights, x, y = mlp_inputs("small")
    slopes = new_step("tricycle", "mlp-small")()
    assert [slope.shape for slope in slopes] == [array.shape for pair in weights for array in pair]
    wide = [(matrix.astype(np.float64), bias.astype(np.float64)) for matrix, bias in weights]
    losses = []
    for sign in (1, -2):
        wide[1][0][3, 4] += sign * 1e-4
        losses.append(mlp_loss(wide, x, y, np.tanh))
    assert slopes[2][3, 4] == pytest.approx((losses[0] - losses[1]) / 2e-4, rel=1e-3)


def test_chain_returns_gradients_of_its_inputs(monkeypatch):
    monkeypatch.setattr(transforms_workers, "CHAIN_LENGTH", 1)
    x, b, c = new_step("tricycle", "chain")()
    np.testing.assert_allclose([*x, *b, *c], [0.999, 1.0, 1.0])


# -------------------------------------------------------------------- probes
@pytest.mark.parametrize("name", transforms_probes.PROBES)
def test_probes_of_tricycle(name):
    """Each probe passes; `vmap` is a loop, and two functions of linear algebra are missing."""
    result = transforms_probes.PROBES[name](transforms_probes.tricycle())
    assert result == {"linear algebra, both orders": "all but qr, pinv"}.get(name, "yes")


def test_probes_report_missing_functions_and_wrong_derivatives(monkeypatch):
    broken = transforms_probes.tricycle()
    broken.vmap, tanh = None, broken.tanh
    broken.tanh = lambda x: tanh(x) * 1.001
    monkeypatch.setitem(transforms_probes.LIBRARIES, "broken", lambda: broken)
    results = dict(transforms_probes.probe("broken"))
    assert results["`vmap` of a gradient"] == "no such function"
    assert results["forward mode"] == results["third derivative by nested gradients"] == "no: ValueError"
    assert results["nested containers"] == "yes"


# -------------------------------------------------------------------- measurement
class ScriptedWorker:
    """A worker whose steps take the seconds of SCRIPTED, of which the last repeats; it ends where there is none."""

    SCRIPTED = {"tricycle": [1.0, 2.0], "autograd": [9.0, 2.0], "jax": [9.0, 3.0], "torch": []}
    started: list[str] = []

    def __init__(self, side, threads, module, *arguments):
        assert arguments == (side, "2")
        self.side, self.steps = side, []
        self.started.append(side)

    def request(self, command):
        if command != "step":
            self.steps = list(self.SCRIPTED[self.side])
            return None
        if not self.steps:
            raise RuntimeError(f"the worker {self.side} ended")
        return self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]

    def close(self):
        pass


def test_slow_steps_are_made_once_and_ended_workers_started_again(monkeypatch, capsys):
    monkeypatch.setattr(transforms, "Worker", ScriptedWorker)
    monkeypatch.setattr("benchmarks.interleave.PAUSE_SECONDS", 0.0)
    ScriptedWorker.started = []
    sides = list(ScriptedWorker.SCRIPTED)
    times = transforms.measure(["chain", "hvp-S"], sides, 2, 1, Schedule(1, 0.0, 0.0))
    expected = {"tricycle": 2.0, "autograd": 9.0, "jax": 3.0, "torch": np.nan}
    for row in times.values():
        np.testing.assert_equal(row, expected)
    assert ScriptedWorker.started == [*sides, "torch"]
    assert "hvp-S: the worker torch ended" in capsys.readouterr().err


# -------------------------------------------------------------------- tables and the page
def test_cells_have_the_unit_of_their_row_and_the_ratio():
    n_nodes = 2 * transforms_workers.CHAIN_LENGTH
    assert transforms.cell("chain", 5e-6 * n_nodes, 2e-6 * n_nodes) == "5.00 (2.50)"
    assert transforms.cell("hvp-S", 1.2345, 1.2345) == "1,234"
    table = transforms.speed_table({"chain": {"tricycle": 1e-3, "jax": float("nan")}}, {"A": "tricycle", "B": "jax"}, 4)
    assert table.splitlines()[-1] == "| node of a chain `x * b + c`, µs | 1.00 | - |"


def test_page_keeps_its_text_around_the_tables(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- speed -->\nold\n<!-- end of speed -->\nb\n", encoding="utf-8")
    transforms.replace_block(page, "speed", "new")
    assert page.read_text(encoding="utf-8") == "a\n<!-- speed -->\nnew\n<!-- end of speed -->\nb\n"
    with pytest.raises(ValueError, match="expected the comments '<!-- probes -->'"):
        transforms.replace_block(page, "probes", "new")


@pytest.mark.nightly
def test_benchmark_writes_both_tables(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- {name} -->\n\n<!-- end of {name} -->\n" for name in ("speed", "probes")), "utf-8")
    words = "--tasks chain hvp-tiny --sides Tricycle --rounds 1 --seconds 0 --warmup 0 --threads 1 --batch 1"
    good(call("-m", "benchmarks.transforms", *words.split(), "--write", str(page)))
    lines = page.read_text(encoding="utf-8").splitlines()
    rows = [line.split("|")[1:-1] for line in lines if line.startswith("| ")]
    assert [row[0].strip().partition(",")[0] for row in rows[1:3]] == [
        "node of a chain `x * b + c`",
        "Hessian-vector product of GPT tiny",
    ]
    assert all(float(row[1].replace(",", "")) > 0 for row in rows[1:3])
    assert [row[0].strip() for row in rows[4:]] == list(transforms_probes.PROBES)
    assert "1 threads" in lines[1] and "Tricycle 0" in lines[1]
