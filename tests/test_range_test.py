"""The learning-rate range test: its suggestion, its determinism, and that it does not change the model."""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from test_programs import TRAIN, call, good
from test_training import CONFIG, TOKENS

from tricycle.models import GPT
from tricycle.training import NonFiniteError
from tricycle.training_state import new_state, train_step
from tricycle_cli.find_rate import find_learning_rate
from tricycle_lab import range_test as testing
from tricycle_lab.range_test import analyze_losses, plot_range_test, range_test

RATES = np.geomspace(1e-6, 1, 200)
X = np.log10(RATES)


def curve(fall: float = -3, rise: float = -1, noise: float = 0.0) -> np.ndarray:
    """A loss that falls around a rate, and rises around another."""
    down, up = 1 / (1 + np.exp(-4 * (X - fall))), np.exp(6 * (X - rise))
    return 6 - 3 * down + 3 * up + noise * np.random.default_rng(0).standard_normal(len(X))


# -------------------------------------------------------------------- analysis of a loss curve
@pytest.mark.parametrize("noise", [0, 0.1])
def test_suggestion_of_a_curve_that_falls_and_rises(noise: float) -> None:
    test = analyze_losses(RATES, curve(noise=noise))
    assert -3.5 < np.log10(test.steepest_rate) < -2.5
    assert -1.5 < np.log10(test.divergence_rate) < -0.9
    assert test.suggestion == pytest.approx(np.sqrt(test.steepest_rate * test.divergence_rate / 10), rel=0.05)


def test_suggestion_is_at_most_a_tenth_of_the_divergence_rate() -> None:
    """A NaN counts as divergence."""
    test = analyze_losses(RATES, curve(fall=-3, rise=-2.6))
    assert test.suggestion == pytest.approx(test.divergence_rate / 10, rel=0.05)
    assert test.suggestion < test.steepest_rate
    test = analyze_losses(RATES[:120], np.append(curve(rise=9)[:119], np.nan))
    assert test.divergence_rate == RATES[119]
    assert test.suggestion == pytest.approx(RATES[119] / 10, rel=0.05)
    test = analyze_losses(RATES, curve(rise=9))
    assert test.divergence_rate is None
    assert test.suggestion == pytest.approx(test.steepest_rate, rel=0.05)


@pytest.mark.parametrize("losses", [np.full(200, 5.0), 5 + 0.01 * np.random.default_rng(0).standard_normal(200), X + 9])
def test_a_loss_that_never_falls_has_no_suggestion(losses: np.ndarray) -> None:
    assert analyze_losses(RATES, losses).suggestion is None


@pytest.mark.parametrize("n", [1, 2, 3])
def test_range_test_of_a_loss_that_is_nan_at_once(n: int, tmp_path: Path) -> None:
    test = analyze_losses(RATES[:n], np.append(np.full(n - 1, 5.0), np.nan))
    assert test.suggestion is None
    plot_range_test(test, tmp_path / "a.png")


# -------------------------------------------------------------------- a test of a model
def content(model: GPT) -> list[bytes]:
    return [parameter.array.tobytes() for parameter in model.parameters()]


def test_the_model_is_restored_and_the_result_is_deterministic() -> None:
    config = replace(CONFIG, dropout=0.3)
    model = GPT(config)
    before, drawn = content(model), model.generator.bit_generator.state
    first, second = (range_test(config, TOKENS, model, n_steps=40) for _ in range(2))
    assert first.losses.tobytes() == second.losses.tobytes()
    assert first.losses.tobytes() == range_test(config, TOKENS, n_steps=40).losses.tobytes()  # a new model is the same
    assert content(model) == before
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.generator.bit_generator.state == drawn
    assert first.losses[0] != first.losses[10]
    np.testing.assert_allclose(first.rates[:3], np.geomspace(1e-6, 1, 40)[:3])


def test_an_error_restores_the_model() -> None:
    model = GPT(CONFIG)
    before = content(model)

    def stop(step: int) -> None:
        if step == 30:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        range_test(CONFIG, TOKENS, model, n_steps=40, progress=stop)
    assert content(model) == before


def test_a_non_finite_loss_ends_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    results = iter([*[(5.0, 1.0)] * 24, NonFiniteError("the loss is nan")])

    def step(state: object) -> tuple[float, float]:
        if isinstance(result := next(results), Exception):
            raise result
        return result

    monkeypatch.setattr(testing, "train_step", step)
    test = range_test(CONFIG, TOKENS, n_steps=40)
    assert len(test.losses) == 25
    assert np.isnan(test.losses[-1])


@pytest.mark.parametrize("settings", [{"low": 0.0}, {"low": 1.0, "high": 0.1}, {"n_steps": 19}, {"high": float("inf")}])
def test_invalid_ranges(settings: dict) -> None:
    with pytest.raises(ValueError, match=r"range_test: .*low < high.*20 steps"):
        range_test(CONFIG, TOKENS, **settings)


# -------------------------------------------------------------------- the command
def test_without_matplotlib_no_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r'--find-learning-rate.*matplotlib.*"tricycle-gpt\[plot\]"'):
        find_learning_rate(CONFIG, TOKENS, None, False, tmp_path / "rate")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_suggestion_is_a_good_rate(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A short training run has a lower loss than runs with a tenth or ten times of the rate."""
    config = replace(CONFIG, embedding_dim=16, accumulation_steps=1, batch_size=8, dropout=0.0)
    rate = range_test(config, TOKENS).suggestion
    means = []
    for factor in (0.1, 1, 10):
        changed = replace(config, max_learning_rate=rate * factor, min_learning_rate=rate * factor / 10, steps=60)
        state = new_state(changed, TOKENS)
        means.append(np.mean([train_step(state)[0] for _ in range(60)][-10:]))
    assert means[1] == min(means)
    find_learning_rate(config, TOKENS, None, False, tmp_path / "rate")
    output = capsys.readouterr().out
    assert f"suggestion: --max-learning-rate {rate:.1e} --min-learning-rate " in output
    rows = list(csv.DictReader((tmp_path / "rate" / "learning_rate.csv").open()))
    assert len(rows) > 100
    assert imread(tmp_path / "rate" / "learning_rate.png").shape[0] > 300


@pytest.mark.slow
def test_learning_rate_range_test_flag(tmp_path: Path, cache: Path, text: Path) -> None:
    folder = tmp_path / "rate"
    words = ["--preset", "debug", "--data", "text", "--files", text, "--run-folder", folder]
    out = good(call(TRAIN, *words, "--find-learning-rate", "--context-window", "16", "--batch-size", "4"))
    assert "suggestion: --max-learning-rate " in out
    assert sorted(path.name for path in folder.iterdir()) == ["learning_rate.csv", "learning_rate.png"]
