"""experiments/quiet_attention: equal initialization, resuming, measures, and a small run."""

import json
import math

import numpy as np
import pytest
from tables import wrong_flags
from test_programs import NEEDS_SHAKESPEARE, call, good

from experiments.quiet_attention.__main__ import Arguments, main, measure, new_config, run
from tricycle.configs import DebugConfig, GPTConfig
from tricycle.evaluation import HeldOut, evaluate
from tricycle.training_state import new_state, train_step
from tricycle_lab.probe import excess_kurtosis

TINY = ["--quick", "--seeds", "2", "--steps", "3", "--batch-size", "2", "--measurements", "1", "--device", "cpu"]


def tiny(softmax: str = "softmax1") -> GPTConfig:
    small = DebugConfig(vocab_size=257, softmax=softmax, steps=6, dropout=0.2, batch_size=2)
    return GPTConfig.from_dict(small.to_dict())


@pytest.fixture
def tokens(rng) -> np.ndarray:
    return rng.integers(0, 256, 2000)


def test_settings_are_those_of_the_seed_document():
    config = new_config(Arguments(), on_gpu=True, seed=3, variant="softmax1")
    assert (config.n_layers, config.n_heads, config.embedding_dim, config.context_window) == (6, 6, 384, 256)
    assert (config.dropout, config.max_learning_rate, config.min_learning_rate, config.beta2) == (0.2, 1e-3, 1e-4, 0.99)
    assert (config.steps, config.batch_size, config.softmax, config.seed) == (5000, 64, "softmax1", 3)
    assert new_config(Arguments(), on_gpu=False, seed=0, variant="softmax").steps == 1000


def test_variants_start_with_equal_weights_batches_and_dropout_masks(tokens):
    states = [new_state(tiny(softmax), tokens) for softmax in ("softmax", "softmax1")]
    for one, other in zip(*(state.model.parameters() for state in states)):
        assert np.array_equal(one.array, other.array)
    for one, other in zip(*(next(state.dataset) for state in states)):
        assert np.array_equal(one.array, other.array)
    draws = [state.model.generator.random(5) for state in states]
    assert np.array_equal(*draws)


def test_measure_matches_evaluation_and_kurtosis(tokens):
    state, held_out = new_state(tiny(), tokens), HeldOut(tokens, 2000)
    row = measure(state, held_out)
    loss, _ = evaluate(state.model, tokens, 2, n_batches=48)
    assert row["loss"] == pytest.approx(loss) and row["perplexity"] == pytest.approx(math.exp(loss))
    weights = state.model.blocks[1].mlp.up.weights.array
    assert row["weight_kurtosis"]["blocks.1.mlp.up.weights"] == pytest.approx(excess_kurtosis(weights))
    assert {"blocks.0", "blocks.1", "blocks.1.attention"} <= row["activation_kurtosis"].keys()
    assert row["largest_activation"].keys() == row["activation_kurtosis"].keys()
    assert 0 < row["nothing"]["blocks.0.attention"] < 0.5
    plain = measure(new_state(tiny("softmax"), tokens), held_out)
    assert plain["nothing"]["blocks.0.attention"] == pytest.approx(0, abs=1e-6)


def test_interrupted_run_resumes_with_equal_measurements(tokens, tmp_path, monkeypatch):
    """A run interrupted in its sixth update resumes, with the measurements of an uninterrupted run."""
    held_out = HeldOut(tokens, 2000)
    run(tiny(), tokens, held_out, tmp_path / "whole", 3, on_gpu=False)
    made = []

    def dies(state):
        if len(made) == 5:
            raise KeyboardInterrupt
        made.append(state.step)
        return train_step(state)

    monkeypatch.setattr("experiments.quiet_attention.__main__.train_step", dies)
    with pytest.raises(KeyboardInterrupt):
        run(tiny(), tokens, held_out, tmp_path / "cut", 3, on_gpu=False)
    monkeypatch.undo()
    run(tiny(), tokens, held_out, tmp_path / "cut", 3, on_gpu=False)
    found = [(tmp_path / name / "measurements.json").read_text(encoding="utf-8") for name in ("whole", "cut")]
    assert found[0] == found[1]
    assert [row["step"] for row in json.loads(found[0])] == [0, 2, 4, 6]
    with pytest.raises(ValueError, match="settings"):
        run(tiny("softmax"), tokens, held_out, tmp_path / "cut", 3, on_gpu=False)


@pytest.mark.nightly
@NEEDS_SHAKESPEARE
def test_program_writes_results_and_prints_the_means(tmp_path):
    out = good(call("-m", "experiments.quiet_attention", *TINY, "--output", tmp_path))
    assert "After 3 steps, mean ± standard deviation of 2 seeds" in out
    assert {"results.json", "curves.png", "activations.png", "attention.html"} <= {p.name for p in tmp_path.iterdir()}
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert [[row["step"] for row in rows] for rows in results["softmax1"]] == [[0, 3], [0, 3]]
    line = next(line for line in out.splitlines() if line.startswith("| perplexity"))
    mean, _, deviation = line.split(" | ")[1].split()
    measured = [rows[-1]["perplexity"] for rows in results["softmax"]]  # with five digits
    assert float(mean) == pytest.approx(np.mean(measured), rel=1e-4)
    assert float(deviation) == pytest.approx(np.std(measured, ddof=1), abs=0.02)
    again = good(call("-m", "experiments.quiet_attention", *TINY, "--output", tmp_path))
    assert line in again


test_wrong_flags_are_refused = wrong_flags(
    main,
    (["--seeds", "0"], "--seeds.*got 0"),
    (["--measurements", "0"], "--measurements.*got 0"),
    (["--steps", "-1"], "--steps.*got -1"),
)
