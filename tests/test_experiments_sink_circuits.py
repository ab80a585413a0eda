"""experiments/sink_circuits: texts and prompts, changes, measures, and a small run."""

from dataclasses import replace

import numpy as np
import pytest
from studies import check_files, check_tables, run_study
from tables import wrong_flags
from tiny_models import lively_model

from experiments.shared.language_models import token_losses
from experiments.shared.results import read
from experiments.sink_circuits import report, study
from experiments.sink_circuits.__main__ import main

START = 399


@pytest.fixture(scope="module")
def texts():
    generator = np.random.default_rng(0)
    code = study.code_rows(np.arange(400), 3, 32, START, generator)
    return code, study.repeated_rows(4, 32, START, generator)


def test_repeated_rows_have_their_periods_and_distinct_tokens(texts):
    code, (rows, periods) = texts
    assert code.shape == (3, 33) and rows.shape == (4, 33) and (rows[:, 0] == START).all()
    for row, period in zip(rows[:, 1:], periods):
        assert len(set(row[:period])) == period and (row[period:] == row[:-period]).all()


def test_induction_prompts_swap_two_tokens():
    for clean, corrupted, answers in study.induction_prompts(START, np.random.default_rng(0)):
        assert sum(a != b for a, b in zip(clean, corrupted)) == 2 and clean[-1] == corrupted[-1]
        for prompt, answer in zip((clean, corrupted), answers):
            assert prompt[prompt.index(clean[-1]) + 1] == answer and prompt.count(clean[-1]) == 2


@pytest.mark.parametrize("softmax", study.VARIANTS)
def test_changes_of_the_first_token_and_of_the_softmax(texts, softmax):
    code, repeated = texts
    model = lively_model(softmax=softmax)
    losses = {name: study.changed_losses(model, code, repeated, change) for name, change in study.CHANGES.items()}
    assert losses["none"] == [token_losses(model, code).mean(), study.repetition_loss(model, *repeated)]
    assert (losses["standard softmax"] == losses["none"]) == (softmax == "softmax")
    assert losses["first token hidden"] != losses["none"] != losses["values of the first token removed"]


def test_hidden_first_token_has_no_effect_on_later_ones(texts):
    code, model = texts[0], lively_model()
    other = code.copy()
    other[:, 0] = 5
    intact = [token_losses(model, rows)[:, 1:] for rows in (code, other)]
    assert not np.allclose(*intact)
    with study.Probe(model, "blocks.*") as probe, study.ExitStack() as undo:
        study.hide_first_token(model, probe, undo)
        np.testing.assert_allclose(*(token_losses(model, rows)[:, 1:] for rows in (code, other)), atol=1e-5)


def test_measures_of_learned_sinks(texts):
    model = lively_model(softmax="sink")
    for block in model.blocks:
        block.attention.softmax_scales.array[...] = [-30, 0, 30, 1]
    measured = study.measure(model, *texts, START)
    assert measured["sinks"] == [[-30, 0, 30, 1]] * 2
    for nothing in measured["outliers"]["nothing"]:
        assert nothing[0] < 1e-3 and nothing[2] > 0.999 and 0 < nothing[1] < 1
    assert len(measured["faithfulness"]) == 9
    assert measured["faithfulness"][0] == pytest.approx(0, abs=0.01)
    assert measured["faithfulness"][-1] == pytest.approx(1, abs=0.01)


def test_figures_of_a_run():
    assert report.circuit_size({"faithfulness": [0, 0.5, 0.95, 0.8, 1.0]}) == 2
    assert report.steps_to_learn({"curve": [[10, 3.0], [20, 0.9], [30, 0.1]]}) == 20
    run = {"losses": {"none": [3.0, 0.5], "change": [3.5, 0.25]}, "heads": {"induction": [[0, 1]], "x": [[0.2, 0.4]]}}
    assert report.has_circuit(run) and report.of_induction_head("x")(run) == 40
    assert report.loss(0, "change")(run) == 0.5 and report.loss(1)(run) == 0.5


@pytest.mark.slow
def test_run_writes_results_plots_and_tables_and_resumes(tmp_path, monkeypatch):
    settings = ["--steps", "2", "--seeds", "1", "--texts", "2", "--output", tmp_path / "run"]
    out = run_study(main, *settings)
    check_files(tmp_path / "run", ["results.json", "circuits.png"])
    results = read(tmp_path / "run" / "results.json")
    assert [run["variant"] for run in results["runs"]] == list(study.VARIANTS)
    check_tables(report.tables(results["runs"]), out)
    monkeypatch.setattr(study, "train", None)
    assert run_study(main, *settings) == out


def test_batches_are_half_code_and_half_repetitions(texts):
    corpus = type("", (), {"train": np.arange(100, 400), "tokeniser": type("", (), {"end_of_text": START})})
    settings = replace(study.Settings(), batch_size=4, tokens=32)
    inputs, labels = next(study.batches(corpus, settings, 0))
    assert inputs.shape == labels.shape == (4, 32) and (inputs[:, 1:] == labels[:, :-1]).all()
    assert (labels[:2] >= 100).all() and (labels[2:] < study.N_RANDOM).all()


test_wrong_flags_are_refused = wrong_flags(
    main,
    (["--steps", "0"], "--steps.*got 0"),
    (["--tokens", "48"], "--tokens to be at least 49, got 48"),
    (["--tokens", "130"], "--tokens to be at most 129, got 130"),
    (["--seeds", "0"], "--seeds"),
)
