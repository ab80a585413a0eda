"""NaN and infinity in a batch, gradient, weight or optimizer moment: the NaN policies, and finite checkpoints."""

import json
from dataclasses import replace

import numpy as np
import pytest
import test_training
from test_training import TOKENS, new_run, train

from tricycle import training, training_state
from tricycle.checkpoint import load_checkpoint
from tricycle.training import NonFiniteError
from tricycle.training_state import new_state, resume_state
from tricycle_cli import text_task, updates
from tricycle_cli.run import Run, read_metrics

from .runs import differences

CONFIG = replace(test_training.CONFIG, accumulation_steps=1, sample_interval=10)
BAD_STEP = 8
WEIGHT = "blocks.0.mlp.up.weights"


class NaNInjector:
    """Inserts NaN or large values at a step or for a batch, and counts the affected updates."""

    def __init__(self, kind: str, monkeypatch) -> None:
        self.kind, self.count = kind, 0
        self.left = {"always": 10**9}.get(kind, 1)
        usual_batches, usual_loss = updates.RunSession.batches, training.supervised_loss
        usual_norm = training.gradient_norm

        def batches(session, source):
            state = session.state
            self.state, self.counted = state, False
            if kind in ("weight", "moment") and state.step == BAD_STEP - 1 and self.left:
                self.count_update()
                parameter = dict(state.model.named_parameters())[WEIGHT]
                arrays = {"weight": parameter.array, "moment": state.optimiser.state_of(parameter)[1]["first"]}
                arrays[kind][0, 0] = np.nan
            return usual_batches(session, source)

        def supervised_loss(model, loss_fn):
            original = usual_loss(model, loss_fn)
            factor = {"batch": np.nan, "always": np.nan, "spike": 1e6}.get(kind, 1.0)

            def batch_loss(batch, share):
                # a batch is identified by its position, and is bad whenever it is used
                is_bad = self.state.dataset.position == BAD_STEP * CONFIG.batch_size or kind == "always"
                if is_bad and factor != 1.0:
                    self.count_update()
                    return original(batch, share) * factor
                return original(batch, share)

            return batch_loss

        def gradient_norm(model):
            if kind == "gradient" and self.state.step == BAD_STEP - 1 and self.left:
                self.count_update()
                dict(model.named_parameters())[WEIGHT].grad.array[0, 0] = np.inf
            return usual_norm(model)

        monkeypatch.setattr(updates.RunSession, "batches", batches)
        monkeypatch.setattr(training, "supervised_loss", supervised_loss)
        monkeypatch.setattr(training, "gradient_norm", gradient_norm)

    def count_update(self) -> None:
        if not self.counted:  # a bad loss is computed again, to name its cause
            self.left -= 1
            self.count += 1
        self.counted = True


@pytest.fixture
def saved(monkeypatch) -> list:
    """Check that all saved checkpoints are finite, and return a list of their names and steps."""
    files = []
    original = training_state.save_checkpoint

    def save(path, model, tokeniser, optimiser, *args):
        original(path, model, tokeniser, optimiser, *args)
        checkpoint = load_checkpoint(path)
        assert all(np.isfinite(array).all() for array in checkpoint.tensors.values())
        files.append((path.name, checkpoint.about["progress"]["step"]))

    monkeypatch.setattr(training_state, "save_checkpoint", save)
    return files


def events(run: Run) -> list:
    return [(line["step"], line["on_nan"]) for line in read_metrics(run.metrics) if "on_nan" in line]


def steps(run: Run) -> list:
    return [line["step"] for line in read_metrics(run.metrics) if "loss" in line]


# -------------------------------------------------------------------- policies
@pytest.mark.parametrize("kind", ["batch", "gradient", "weight", "moment"])
def test_stop_policy_ends_the_run_with_an_error(tmp_path, monkeypatch, saved, kind):
    NaNInjector(kind, monkeypatch)
    printed = []
    run, state = new_run(tmp_path, on_nan="stop"), new_state(CONFIG, TOKENS)
    run.print_line = printed.append
    bad_step = BAD_STEP + (kind == "moment")  # a bad moment changes weights, which the next update detects
    with pytest.raises(NonFiniteError, match=f"step {bad_step}: "):
        train(state, run)
    assert events(run) == [(bad_step, "stop")]
    assert any("the run stops" in line for line in printed)
    assert resume_state(run.last, TOKENS).step == 5
    run = new_run(tmp_path, on_nan="stop")
    if kind != "batch":  # the same batch would be used again
        assert train(resume_state(run.last, TOKENS), run) is True
        assert events(run) == []  # the resumed run has no such event


@pytest.mark.parametrize("kind", ["batch", "gradient"])
def test_skip_policy_skips_the_update_and_finishes(tmp_path, monkeypatch, saved, kind):
    injector = NaNInjector(kind, monkeypatch)
    printed = []
    run, state = new_run(tmp_path, on_nan="skip"), new_state(CONFIG, TOKENS)
    run.print_line = printed.append
    assert train(state, run) is True
    assert injector.count == 1
    assert events(run) == [(BAD_STEP, "skip")]
    assert steps(run) == [step for step in range(1, 21) if step != BAD_STEP]
    assert any(line.startswith(f"step {BAD_STEP}: the ") and "skipped" in line for line in printed)
    assert state.step == 20 and state.optimiser.n_steps == 19
    assert not state.first_nonfinite()


@pytest.mark.parametrize("kind", ["weight", "moment"])
def test_skip_policy_stops_for_nonfinite_weights(tmp_path, monkeypatch, saved, kind):
    NaNInjector(kind, monkeypatch)
    run = new_run(tmp_path, on_nan="skip")
    with pytest.raises(NonFiniteError, match=WEIGHT):
        train(new_state(CONFIG, TOKENS), run)
    assert resume_state(run.last, TOKENS).step == 5


@pytest.mark.parametrize("kind", ["batch", "gradient", "weight", "moment"])
def test_rollback_policy_resumes_from_the_checkpoint_and_finishes(tmp_path, monkeypatch, saved, kind):
    injector = NaNInjector(kind, monkeypatch)
    run, state = new_run(tmp_path, on_nan="rollback"), new_state(CONFIG, TOKENS)
    assert train(state, run) is True
    assert injector.count == 1
    assert events(run) == [(5, "rollback")]
    (event,) = [line for line in read_metrics(run.metrics) if "on_nan" in line]
    bad_step = BAD_STEP + (kind == "moment")
    assert event["bad_step"] == bad_step and event["rollback"] == 1 and event["not_finite"]
    assert steps(run) == list(range(1, 21))
    assert not state.first_nonfinite()
    assert state.dataset.position == (20 + bad_step - 5) * CONFIG.batch_size  # no batch was used twice
    assert run.samples.read_text().count("--- sample at step 10") == 1
    held_out = [line["step"] for line in read_metrics(run.metrics) if "held_out_loss" in line]
    assert held_out == [5, 10, 15]


def test_bad_moment_before_a_checkpoint_is_not_saved(tmp_path, monkeypatch, saved):
    """The update returns normally; the check before the next checkpoint detects the NaN."""
    monkeypatch.setattr(f"{__name__}.BAD_STEP", 10)
    NaNInjector("moment", monkeypatch)
    run, state = new_run(tmp_path, on_nan="rollback"), new_state(CONFIG, TOKENS)
    assert train(state, run) is True
    assert events(run) == [(5, "rollback")]
    assert steps(run) == list(range(1, 21))


# -------------------------------------------------------------------- persistent NaN
def test_skip_policy_stops_after_ten_updates(tmp_path, monkeypatch, saved):
    injector = NaNInjector("always", monkeypatch)
    run = new_run(tmp_path, on_nan="skip")
    with pytest.raises(NonFiniteError, match=r"step 11: .*10 skipped"):
        train(new_state(CONFIG, TOKENS), run)
    assert injector.count == 11
    assert {step for _, step in saved} == {0}  # no checkpoint is saved while weights may be bad
    assert events(run) == [(step, "skip") for step in range(1, 11)] + [(11, "stop")]


def test_rollback_policy_stops_after_three_rollbacks(tmp_path, monkeypatch, saved):
    injector = NaNInjector("always", monkeypatch)
    run = new_run(tmp_path, on_nan="rollback")
    with pytest.raises(NonFiniteError, match=r"step 1: .*3 rollbacks"):
        train(new_state(CONFIG, TOKENS), run)
    assert injector.count == 4
    assert [action for _, action in events(run)] == ["rollback"] * 4 + ["stop"]


def test_loss_spike_is_accepted(tmp_path, monkeypatch, saved):
    injector = NaNInjector("spike", monkeypatch)
    run, state = new_run(tmp_path, on_nan="stop"), new_state(CONFIG, TOKENS)
    assert train(state, run) is True
    assert injector.count == 1
    assert events(run) == []
    losses = {line["step"]: line["loss"] for line in read_metrics(run.metrics) if "loss" in line}
    assert losses[BAD_STEP] > 1e6 > 10 > losses[20]


def test_nonfinite_held_out_loss_is_logged(tmp_path, monkeypatch, saved):
    original = text_task.evaluate
    losses = iter([np.nan, np.inf])
    monkeypatch.setattr(text_task, "evaluate", lambda *args, **more: (next(losses, original(*args)[0]), 99))
    run, state = new_run(tmp_path), new_state(CONFIG, TOKENS)
    assert train(state, run) is True
    first, second = (line for line in read_metrics(run.metrics) if "not_finite" in line)
    assert first["step"] == 5 and "held-out loss is nan" in first["not_finite"]
    assert second["step"] == 10 and "held-out loss is inf" in second["not_finite"]
    assert np.isfinite(state.best_loss) and ("best.safetensors", 15) in saved
    for line in run.metrics.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


# -------------------------------------------------------------------- kills after NaN
@pytest.mark.nightly_except(5)
@pytest.mark.parametrize("policy", ["skip", "rollback"])
@pytest.mark.parametrize("at", [6, BAD_STEP, 9, 12, 19])
def test_resumed_run_after_nan_is_equal(tmp_path, monkeypatch, saved, policy, at):
    """The same batch is bad whenever it is used."""
    NaNInjector("batch", monkeypatch)
    reference, run = new_run(tmp_path / "reference", on_nan=policy), new_run(tmp_path / "run", on_nan=policy)
    train(new_state(CONFIG, TOKENS), reference)
    state = new_state(CONFIG, TOKENS)
    calls = []

    def stop():
        calls.append(state.step)
        if len(calls) == at:
            raise KeyboardInterrupt
        return False

    run.stop = stop
    with pytest.raises(KeyboardInterrupt):
        train(state, run)
    run = new_run(tmp_path / "run", on_nan=policy)
    assert train(resume_state(run.last, TOKENS), run) is True
    assert differences(run.folder, reference.folder) == []


def test_kill_between_event_and_checkpoint(tmp_path, monkeypatch, saved):
    """After a kill between the rollback event and its checkpoint, the resumed run logs the event only once."""
    NaNInjector("batch", monkeypatch)
    run = new_run(tmp_path, on_nan="rollback")
    original = Run.save

    def save(run, state, path):
        if state.n_rollbacks:
            raise KeyboardInterrupt
        original(run, state, path)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Run, "save", save)
        train(new_state(CONFIG, TOKENS), run)
    assert events(run) == [(5, "rollback")]
    run = new_run(tmp_path, on_nan="rollback")
    assert train(resume_state(run.last, TOKENS), run) is True
    assert events(run) == [(5, "rollback")]
