"""Scores of heads: constructed attention patterns have known scores, and a model's scores are those of its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tables import bad_input
from test_models import FAMILIES, TINY, lively

from tricycle.models import GPT
from tricycle.tensor import no_grad
from tricycle_cli.inspect import main
from tricycle_cli.scores import read_scores
from tricycle_lab.head_scores import score_heads, score_weights
from tricycle_lab.probe import Probe

N = 5


def pattern(distance: int, n_start: int) -> np.ndarray:
    """Return weights (T, T) of a head that looks back a number of tokens, at most to the first one."""
    n = n_start + 2 * N
    weights = np.zeros((n, n))
    weights[np.arange(n), np.maximum(np.arange(n) - distance, 0)] = 1
    return weights


@pytest.mark.parametrize("n_start", [0, 1, 3])
def test_constructed_patterns(n_start: int) -> None:
    heads = {"induction": N - 1, "previous_token": 1, "duplicate_token": N}
    weights = np.stack([pattern(distance, n_start) for distance in heads.values()])[None]
    scores = score_weights(np.concatenate([weights, weights]), N)
    np.testing.assert_allclose(scores.induction, [1, 0, 0])
    np.testing.assert_allclose(scores.previous_token[1], 1)
    # The heads that look further back attend to the first token from the second one.
    np.testing.assert_allclose(scores.previous_token[[0, 2]], 1 / (n_start + 2 * N - 1))
    np.testing.assert_allclose(scores.duplicate_token, [0, 0, 1])


def test_uniform_attention_has_the_mean_weight() -> None:
    n = 2 * N
    weights = np.tri(n) / np.arange(1, n + 1)[:, None]
    scores = score_weights(weights[None, None], N)
    second_half = (1 / np.arange(N + 1, n + 1)).mean()
    np.testing.assert_allclose(
        [scores.duplicate_token[0], scores.previous_token[0]], [second_half, (1 / np.arange(2, n + 1)).mean()]
    )
    np.testing.assert_allclose(scores.induction, second_half)


@pytest.mark.parametrize("start", [None, 2])
def test_scores_of_a_model_are_those_of_its_weights(start: int | None) -> None:
    model = lively(FAMILIES["mistral"]).eval()
    scores = score_heads(model, N, 3, 7, start)
    tokens = np.random.default_rng(7).integers(0, TINY.vocab_size, (3, N))
    texts = np.concatenate([tokens, tokens], axis=1)
    if start is not None:
        texts = np.concatenate([np.full((3, 1), start), texts], axis=1)
    with Probe(model) as probe, no_grad():
        model(texts)
    for layer in range(2):
        expected = score_weights(probe.weights[f"blocks.{layer}.attention"], N)
        for score, other in zip(scores, expected):
            assert score.shape == (2, 6)
            np.testing.assert_array_equal(score[layer], other)
    assert scores.previous_token.max() > 0.01


def test_default_length_fits_into_the_context() -> None:
    scores = score_heads(GPT(TINY))
    assert scores.induction.shape == (2, 2)
    assert 0 < scores.induction.min() < scores.induction.max() < 1


test_invalid_arguments = bad_input(
    {
        "too long": (lambda: score_heads(GPT(TINY), 11), "2 to 10 tokens to repeat, got 11"),
        "with start": (lambda: score_heads(GPT(TINY), 10, start=1), "2 to 9 tokens"),
        "start": (lambda: score_heads(GPT(TINY), start=11), "ids from 0 to 10"),
        "texts": (lambda: score_heads(GPT(TINY), n_texts=0), "n_texts"),
        "no model": (lambda: score_heads(None), "decoder"),
        "shape": (lambda: score_weights(np.zeros((1, 2, 9, 9)), 5), "T of at least 10"),
    }
)


def test_command_shows_the_scores_of_each_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores = {"induction_score": 0.25, "previous_token_score": 0.5, "duplicate_token_score": 0.125}
    lines = [{"step": 1, "loss": 4.0}, {"step": 5, "held_out_loss": 3.0, **scores}, {"step": 10, "held_out_loss": 2.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    main(["scores", str(tmp_path)])
    assert capsys.readouterr().out.splitlines()[2:] == [
        "      5         3.0000     0.2500          0.5000           0.1250"
    ]
    assert read_scores(tmp_path) == [(5, 3.0, 0.25, 0.5, 0.125)]
    (tmp_path / "metrics.jsonl").write_text("{}")
    with pytest.raises(ValueError, match=r"evaluation.*no head scores"):
        read_scores(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        read_scores(tmp_path / "other")


def test_runs_with_equal_names_are_drawn_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = {"induction_score": 0.25, "previous_token_score": 0.5, "duplicate_token_score": 0.125}
    folders = [tmp_path / name / "run" for name in ("a", "b")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 5, "held_out_loss": 3.0, **scores}))
    drawn: dict[str, Any] = {}
    monkeypatch.setattr("tricycle_cli.scores.require_matplotlib", lambda feature: None)
    monkeypatch.setattr("tricycle_cli.scores.plot_curves", lambda curves, *args: drawn.update(curves))
    main(["scores", *map(str, folders), "--out", "scores.png"])
    assert [*drawn] == [*map(str, folders)]
