"""benchmarks/patching: hooks of transformers compute the effects of patch_activations; speed is not tested."""

import io
import json

import numpy as np
import pytest
from tiny_models import write_folder

from benchmarks import patching, patching_workers
from benchmarks.patching_workers import all_cells, sample_cells, torch_effects
from tricycle.pretrained import load
from tricycle_lab.patching import Prompts, patch_activations

PROMPTS = Prompts([5, 6, 7, 8, 9, 10], [5, 6, 11, 8, 9, 10], (20, 21))
CELLS = all_cells(PROMPTS, 2, 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("hf") / "model")


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 3])
def test_hooks_compute_the_effects_of_tricycle(folder, monkeypatch, batch_size):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    grid = patch_activations(load(folder).model, PROMPTS, "heads_by_position")
    effects = torch_effects(folder, PROMPTS, batch_size)(CELLS)
    np.testing.assert_allclose(effects, grid[tuple(np.transpose(CELLS))], atol=1e-4)
    assert np.ptp(effects) > 0.01


def test_sample_is_part_of_the_cells_that_have_an_effect():
    assert CELLS[0] == (0, 0, 2) and len(CELLS) == 2 * 4 * 4
    assert sample_cells(CELLS, 2, 100) == CELLS
    assert sample_cells(CELLS, 1, 4) == [(0, head, 2) for head in range(4)]


def test_worker_answers_steps_and_values(folder, monkeypatch, capsys):
    monkeypatch.setattr(patching_workers, "make_prompts", lambda tokeniser: PROMPTS)
    monkeypatch.setattr("sys.argv", ["worker", "tricycle", str(folder), "2", "3", "4"])
    monkeypatch.setattr("sys.stdin", io.StringIO("step\nvalues\n"))
    patching_workers.main()
    seconds, values = map(json.loads, capsys.readouterr().out.splitlines())
    grid = patch_activations(load(folder).model, PROMPTS, "heads_by_position")
    assert seconds > 0
    np.testing.assert_allclose(values, grid[tuple(np.transpose(sample_cells(CELLS, 2, 3)))], atol=1e-5)


def test_table_scales_the_loops_and_other_effects_are_refused():
    lines = patching.table([10.0, 3.0, 2.0], 20.0, 64).splitlines()
    assert lines[2:4] == ["| Tricycle | 10.0 | 1.00 |", "| PyTorch hooks, one patch per pass | 60.0 | 6.00 |"]
    values = np.array([0.0, 1.0])
    assert patching.largest_difference([values, values + 5e-5, values]) == pytest.approx(5e-5)
    with pytest.raises(ValueError, match=r"differ by at most 0\.0001, got 0\.001"):
        patching.largest_difference([values, values, values - 1e-3])
