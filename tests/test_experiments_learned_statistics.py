"""experiments/learned_statistics: frozen weights, exact statistics, and a small run."""

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest
from studies import check_files, check_tables, run_study
from tables import wrong_flags
from test_programs import call

from experiments.learned_statistics import report
from experiments.learned_statistics.__main__ import main
from experiments.learned_statistics.blocks import (
    FrozenModel,
    Job,
    ResultRows,
    attention_of,
    average_scales,
    block_starts,
    equal_shares,
    exact_shares,
    use_block_softmax,
)
from experiments.learned_statistics.study import (
    FREE,
    Settings,
    all_rows,
    find_checkpoint,
    job_of,
    map_statistics,
    measure,
    new_evaluator,
    spread_windows,
)
from experiments.shared.results import read
from tricycle.checkpoint import save_checkpoint
from tricycle.configs import GPTConfig
from tricycle.evaluation import HeldOut
from tricycle.models import GPT
from tricycle.tokeniser import BPETokeniser
from tricycle.training_state import new_state, train_step

TINY = "--blocks 2 3 --width 8 --layers 2 --heads 2 --context-window 13 --batch-size 3 --steps 4"
TINY += " --scale-steps 2 --windows 6"
CONFIG = GPTConfig(vocab_size=257, context_window=13, embedding_dim=8, n_heads=2, n_layers=2, batch_size=3, steps=9)
# runs in a blink
SETTINGS = Settings(blocks=(2, 3), seeds=2, batch_size=3, scale_steps=5, windows=6)


TOKENS = np.random.default_rng(0).integers(0, 7, 800)
HELD_OUT = HeldOut(TOKENS[:200], 199)


@pytest.fixture
def frozen() -> FrozenModel:
    state = new_state(CONFIG, TOKENS)
    for _ in range(5):
        train_step(state)
    for block in state.model.blocks:  # weights of attention that differ from each other
        block.attention.qkv.weights.array *= 30
    state.model.freeze().eval()
    return FrozenModel(state.model, BPETokeniser(257), 13, lambda text, part, n: spread_windows(TOKENS, n, 13))


# -------------------------------------------------------------------- blocks and scales
@pytest.mark.parametrize("n_blocks", [2, 3, 8])
def test_exact_statistics_give_the_full_softmax(frozen, n_blocks):
    evaluator = new_evaluator(frozen, 0, SETTINGS)
    whole, exact, none = (
        measure(evaluator, Job(kind, n_blocks), HELD_OUT, SETTINGS)["loss"] for kind in ("whole", "exact", "none")
    )
    assert exact == pytest.approx(whole, rel=1e-6)
    assert none != pytest.approx(whole, rel=1e-4)


def test_equal_start_begins_with_equal_shares():
    assert [job_of(dataclasses.replace(SETTINGS, equal_start=equal), "learned").start for equal in (0, 1)] == [
        "1",
        "1 / k",
    ]


def test_equal_shares_are_1_over_visible_blocks():
    np.testing.assert_allclose(equal_shares(2, 5), np.tile([1, 1, 1, 1 / 2, 1 / 2], (2, 1)))
    np.testing.assert_allclose(equal_shares(3, 6)[0], [1, 1, 1 / 2, 1 / 2, 1 / 3, 1 / 3], rtol=1e-6)


@pytest.mark.parametrize("n_blocks", [2, 3, 5])
def test_measured_shares_sum_to_1_over_visible_blocks(frozen, n_blocks):
    shares = exact_shares(frozen, frozen.rows("", "train", 8), (n_blocks,)).mean[n_blocks]
    assert shares.shape == (2, 2, n_blocks, 13)
    np.testing.assert_allclose(shares.sum(axis=2), 1, rtol=1e-5)
    np.testing.assert_allclose(average_scales(shares, "position"), shares.mean(axis=1), rtol=1e-5)
    for i, start in enumerate(block_starts(n_blocks, 13)):
        assert (shares[:, :, i, :start] == 0).all()
        assert (shares[:, :, i, start:] > 0).all()


def test_map_statistics_of_full_and_unscaled_softmax(frozen):
    rows = frozen.rows("", "test", 4)[:, :-1]
    use_block_softmax(frozen.model, Job("whole"))
    whole = attention_of(frozen.model, rows)
    use_block_softmax(frozen.model, Job("none", 2))
    none = attention_of(frozen.model, rows)
    assert [w.shape for w in none.values()] == [(4, 2, 13, 13)] * 2
    assert map_statistics(whole, whole)["distance"] == [0, 0]
    # rows of the second block sum to 2, those of the first to 1: 6 of 13 are at least 1 away
    assert all(6 / 13 - 1e-5 <= distance < 3 * 6 / 13 for distance in map_statistics(none, whole)["distance"])
    assert all(0 < value < 1 for value in map_statistics(none, whole)["spikiness"])


# -------------------------------------------------------------------- rows
def test_result_rows_and_scales_are_stored_and_reused(frozen, tmp_path):
    settings = dataclasses.replace(SETTINGS, output=tmp_path)
    record, evaluator = ResultRows(settings, FREE, rows=[]), new_evaluator(frozen, 0, settings)
    row = {"model": 0, "kind": "learned", "blocks": 2, "seed": 1}
    assert record.row(row) is None
    job = job_of(settings, "learned", 2, 1)
    record.add(row, measure(evaluator, job, HELD_OUT, settings))
    again = ResultRows(dataclasses.replace(settings, seeds=5, blocks=(2,)), FREE)
    assert again.row(row) and not again.row({**row, "seed": 0}) and not again.row({**row, "model": 1})
    (path,) = (tmp_path / "scales" / "0").iterdir()
    assert path.name == f"{job.file_name}.npz"
    for a, b in zip(evaluator.scales(job)[0], new_evaluator(frozen, 0, settings).scales(job)[0], strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match=r"scale_steps 5.*6"):
        ResultRows(dataclasses.replace(settings, scale_steps=6), FREE)


# -------------------------------------------------------------------- the program
@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    generator = random.Random(0)
    path = tmp_path_factory.mktemp("texts") / "a text.txt"
    path.write_text(" ".join(generator.choices("one two three four".split(), k=900)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text) -> tuple[Path, list, str]:
    folder = tmp_path_factory.mktemp("runs") / "a run"
    words = [*TINY.split(), "--seeds", 2, "--files", text, "--output", folder]
    return folder, words, run_study(main, *words)


PICTURES = {"attention-best.png", "attention-worst.png", "spikiness.png", "scales.png"}


@pytest.mark.nightly
def test_run_writes_results_plots_and_tables(finished):
    folder, _, out = finished
    check_files(folder, {"results.json", "model-0.safetensors", "scales", "attention.html", *PICTURES}, 300)
    results = read(folder / "results.json")
    rows = [{key: row[key] for key in ("kind", "blocks", "seed")} for row in results["rows"]]
    assert rows == all_rows(dataclasses.replace(SETTINGS, seeds=2))
    assert len({row["perplexity"] for row in results["rows"]}) > 10
    check_tables(report.tables(results["rows"], results["attention"]), out)
    exact = report.recovered_loss(results["rows"], "exact", 2, 0)
    assert exact == pytest.approx(100, abs=5)  # of next to nothing after four steps


@pytest.mark.nightly
def test_finished_runs_are_skipped(finished):
    folder, words, out = finished
    before = (folder / "model-0.safetensors").stat().st_mtime_ns
    rows = read(folder / "results.json")["rows"]
    assert run_study(main, *words) == out
    assert (folder / "model-0.safetensors").stat().st_mtime_ns == before
    assert read(folder / "results.json")["rows"] == rows  # with the seconds that it took


@pytest.mark.nightly
def test_model_flag_accepts_a_run_folder(finished, text, tmp_path):
    run = tmp_path / "a run of its own"
    save_checkpoint(run / "last.safetensors", GPT(dataclasses.replace(CONFIG, vocab_size=300)), BPETokeniser(257))
    assert find_checkpoint(run) == run / "last.safetensors"
    words = [*TINY.split(), "--files", text, "--seeds", 1, "--model", run, "--output", tmp_path / "out"]
    out = run_study(main, *words)
    assert not list((tmp_path / "out").glob("*.safetensors"))
    assert out.count("| this study, 0 |") == 1


@pytest.mark.nightly
def test_models_with_another_softmax_or_vocabulary_are_rejected(text, tmp_path):
    for config, tokeniser, message in (
        (dataclasses.replace(CONFIG, softmax="softmax1"), None, "expected a model that learned with a plain softmax"),
        (dataclasses.replace(CONFIG, vocab_size=256), None, "expected a tokeniser of at most 256 tokens"),
    ):
        save_checkpoint(tmp_path / "odd.safetensors", GPT(config), tokeniser)
        words = ["--files", text, "--model", tmp_path / "odd.safetensors", "--output", tmp_path / "out"]
        with pytest.raises(ValueError, match=message):
            run_study(main, *words)


test_wrong_flags_are_refused = wrong_flags(
    main,
    (["--seeds", "0"], "--seeds.*got 0"),
    (["--scale-steps", "0"], "--scale-steps.*got 0"),
    (["--blocks", "2", "1"], "--blocks.*got 2 1"),
    (["--blocks", "2", "2"], "--blocks.*each once, got 2 2"),
    (["--model", "x", "--models", "2"], "--model.*got --models 2"),
    (["--scale-rate", "0"], "--scale-rate.*got 0.0"),
)


@pytest.mark.nightly
def test_missing_model_prints_a_one_line_error(tmp_path):
    done = call("-m", "experiments.learned_statistics", "--model", tmp_path / "no", "--output", tmp_path / "out")
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "no such file" in done.stderr
