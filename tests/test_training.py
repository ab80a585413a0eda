"""The training loop: resumed runs equal uninterrupted ones, losses are counted right, accidents change nothing."""

import errno
import inspect
import json
import math
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from chaos.runs import checkpoint_differences, differences, metrics_differences

from tricycle import training, training_state
from tricycle.checkpoint import load_checkpoint, save_checkpoint
from tricycle.configs import DebugConfig
from tricycle.configs.size import min_n_weights
from tricycle.evaluation import HeldOut
from tricycle.layers import Dense, Embedding, Sequential
from tricycle.loss import CrossEntropy, MeanSquaredError
from tricycle.models import GPT
from tricycle.optimiser_rules import OPTIMISERS
from tricycle.optimisers import AdamW, StochasticGradientDescent
from tricycle.tokeniser import BPETokeniser
from tricycle.training import NonFiniteError, apply_gradients, compute_gradients, supervised_loss, train_on_batch
from tricycle.training_state import count_labels, new_state, resume_state, train_step
from tricycle_cli import full_disk, text_task, updates
from tricycle_cli import run as running
from tricycle_cli.run import Run, read_metrics
from tricycle_cli.text_task import TextTask, write_sample

TEXT = "the cat sat on the mat and the dog sat on the log. " * 40
TOKENISER = BPETokeniser(257)
TOKENS = TOKENISER.encode(TEXT)
CONFIG = DebugConfig(
    vocab_size=257,
    context_window=8,
    embedding_dim=8,
    n_layers=1,
    batch_size=2,
    steps=20,
    warmup_steps=2,
    dropout=0.2,
    accumulation_steps=2,
    eval_interval=5,
    eval_batches=3,
    sample_interval=0,
    seed=3,
)
SAMPLED = replace(CONFIG, sample_interval=4)


def new_run(folder, **settings) -> Run:
    folder.mkdir(exist_ok=True)
    return Run(folder, TOKENISER, print_line=lambda text: None, show_progress=False, **settings)


def new_task() -> TextTask:
    task = TextTask(SimpleNamespace(track=()))
    task.held_out = HeldOut(TOKENS[:100], 99)
    return task


def train(state, run) -> bool:
    """Train as a command does, and return whether training came to its end."""
    with updates.update_session(state, run, new_task()) as session:
        return training.train(**state.train_arguments(), session=session)


def stop_at(state, step):
    return lambda: state.step == step


def crash_at(run: Run, state, step: int) -> None:
    """Train until the end of a step, without a last save."""

    def crash():
        if state.step == step:
            run.flush()
            raise KeyboardInterrupt

    run.stop = crash
    with pytest.raises(KeyboardInterrupt):
        train(state, run)


def step_of(path: Path) -> int:
    return load_checkpoint(path).about["progress"]["step"]


def same_files(a: Run, b: Run) -> None:
    for name in ("last.safetensors", "best.safetensors"):
        assert checkpoint_differences(a.folder / name, b.folder / name) == []
    assert metrics_differences(a.metrics, b.metrics) == []


def finished(config, folder) -> Run:
    run = new_run(folder)
    assert train(new_state(config, TOKENS), run) is True
    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Run:
    return finished(CONFIG, tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def sampled(tmp_path_factory) -> Run:
    return finished(SAMPLED, tmp_path_factory.mktemp("sampled"))


# -------------------------------------------------------------------- resuming
@pytest.mark.parametrize("stops", [(10,), (7,), (1,), (19,), (5, 6, 15)])
def test_resumed_run_equals_uninterrupted_run(tmp_path, whole, stops):
    """Weights, moments, generators, position, metrics and the best checkpoint, exactly. 5 and 10 have estimates."""
    run = new_run(tmp_path / "run")
    state = new_state(CONFIG, TOKENS)
    for step in stops:
        run.stop = stop_at(state, step)
        assert train(state, run) is False
        assert state.step == step
        state, run = resume_state(run.last, TOKENS), new_run(tmp_path / "run")
        assert state.step == step
    assert train(state, run) is True
    same_files(run, whole)


@pytest.mark.nightly_except(6)
@pytest.mark.parametrize("at", [3, 4, 5, 6, 9, 10, 12, 14, 20])
def test_resumed_run_after_a_crash_equals_uninterrupted_run(tmp_path, sampled, at):
    """From the checkpoint before the latest estimate or sample, whose lines are there already."""
    run, state = new_run(tmp_path), new_state(SAMPLED, TOKENS)
    crash_at(run, state, at)
    write_sample(state, run, 5, "the cat")  # one more, as if it had come further
    run = new_run(tmp_path)
    state = resume_state(run.last, TOKENS)
    assert state.step == max(step for step in range(at) if step % 4 == 0 or step % 5 == 0)
    assert train(state, run) is True
    assert differences(run.folder, sampled.folder) == []
    assert run.samples.read_text(encoding="utf-8").count("--- sample at step") == 4


def test_resuming_a_finished_run_changes_nothing(tmp_path, whole):
    for name in ("last.safetensors", "best.safetensors", "metrics.jsonl"):
        (tmp_path / name).write_bytes((whole.folder / name).read_bytes())
    run = new_run(tmp_path)
    assert train(resume_state(run.last, TOKENS), run) is True
    same_files(run, whole)


def test_truncated_metrics_line_is_replaced_on_resume(tmp_path):
    run = new_run(tmp_path)
    state = new_state(CONFIG, TOKENS)
    run.stop = stop_at(state, 10)
    train(state, run)
    content = run.metrics.read_bytes()
    run.metrics.write_bytes(content[:-20])
    assert len(read_metrics(run.metrics)) == content.count(b"\n") - 1
    state, run = resume_state(run.last, TOKENS), new_run(tmp_path)
    train(state, run)
    steps = [line["step"] for line in read_metrics(run.metrics) if "loss" in line]
    assert steps == [*range(1, 10), *range(11, 21)]
    assert all(json.loads(line) for line in run.metrics.read_text().splitlines())


def test_resuming_with_other_tokens_raises(whole):
    with pytest.raises(ValueError, match=r"last\.safetensors.*n_items"):
        resume_state(whole.last, TOKENS[:500])


def with_progress(path: Path, **changes) -> Path:
    """Save a checkpoint whose progress has these changes."""
    state = new_state(CONFIG, TOKENS)
    progress = {name: getattr(state, name) for name in state.PROGRESS}
    save_checkpoint(path, state.model, None, state.optimiser, state.dataset, {**progress, **changes})
    return path


@pytest.mark.parametrize(
    ("progress", "message"),
    [
        ({"step": "3"}, "/c: .*: expected step to be a number, got '3'"),
        ({"step": None}, "/c: .*: expected step to be a number, got None"),
        ({"seconds": []}, "/c: .*: expected seconds to be a number, got"),
        ({"best_loss": {}}, "/c: .*: expected best_loss to be a number"),
        ({"loss_scaling": {}}, "/c: expected .*not .dict"),
        ({"loss_scaling": [1, 2]}, "/c: expected .*shape"),
        ({"total_steps": 1.5}, "/c: .*: expected total_steps to be a number, got 1.5"),
        ({"loss_scaling": "x"}, "/c: .*could not convert"),
    ],
)
def test_bad_progress_is_rejected(tmp_path, progress, message):
    with pytest.raises(ValueError, match=message):
        resume_state(with_progress(tmp_path / "c", **progress), TOKENS)


def test_loading_progress_sets_only_progress(tmp_path):
    """A checkpoint without a loss scale gets the usual one."""
    again = resume_state(with_progress(tmp_path / "c", model=1, odd=2), TOKENS)
    assert isinstance(again.model, GPT)
    assert not hasattr(again, "odd")
    assert again.loss_scaling.tolist() == [2.0**16, 0, 0]


# -------------------------------------------------------------------- the loop
def test_loss_decreases_on_a_small_text(tmp_path):
    sizes = {"context_window": 16, "embedding_dim": 32, "batch_size": 8, "accumulation_steps": 1, "dropout": 0.0}
    config = replace(CONFIG, **sizes, steps=60, max_learning_rate=1e-2, eval_interval=20, sample_interval=30)
    run = new_run(tmp_path)
    samples = []
    run.print_line = samples.append
    train(new_state(config, TOKENS), run)
    trace = [line["loss"] for line in read_metrics(run.metrics) if "loss" in line]
    assert len(trace) == 60
    assert trace[0] == pytest.approx(math.log(257), rel=0.1)
    assert np.mean(trace[-5:]) < 0.45 * trace[0]
    held_out = [line for line in read_metrics(run.metrics) if "held_out_loss" in line]
    assert [line["step"] for line in held_out] == [20, 40]
    assert held_out[1]["held_out_loss"] < held_out[0]["held_out_loss"]
    assert sum("sample at step 30" in text for text in samples) == 1
    assert (tmp_path / "samples.txt").read_text(encoding="utf-8").startswith("--- sample at step 30\n")


def test_checkpoint_is_saved_before_evaluation_and_samples(tmp_path, monkeypatch):
    run = new_run(tmp_path)
    saved: dict[str, list] = {"evaluate_and_record": [], "write_sample": []}
    for module, name in ((updates, "evaluate_and_record"), (text_task, "write_sample")):
        look = lambda state, run, *task, name=name: saved[name].append((state.step, step_of(run.last)))
        monkeypatch.setattr(module, name, look)
    train(new_state(SAMPLED, TOKENS), run)
    assert saved["evaluate_and_record"] == [(step, step) for step in (5, 10, 15)]
    assert saved["write_sample"] == [(step, step) for step in (4, 8, 12, 16)]


def test_checkpoint_is_saved_before_the_first_update(tmp_path, monkeypatch):
    """A failure of the first one leaves it. It is out of memory here, and the message says what to lower."""

    def fail(*args):
        raise MemoryError

    run = new_run(tmp_path)
    monkeypatch.setattr(training, "compute_gradients", fail)
    with pytest.raises(MemoryError, match=r"out of memory.*--batch-size \(now 2"):
        train(new_state(CONFIG, TOKENS), run)
    assert step_of(run.last) == 0


def test_stop_at_the_last_step_finishes_the_run(tmp_path):
    state = new_state(replace(CONFIG, steps=3), TOKENS)
    run = new_run(tmp_path)
    run.stop = stop_at(state, 3)
    assert train(state, run) is True


@pytest.mark.parametrize("window", [8, 5])
def test_evaluation_of_all_windows_equals_the_final_loss(tmp_path, window):
    """The windows and the context of evaluations during training are those of the report."""
    config = replace(CONFIG, context_window=window, eval_batches=1000)
    task, state = new_task(), new_state(config, TOKENS)
    tokens = task.held_out.tokens
    loss, n_tokens = text_task.evaluate(state.model, tokens, 2, stride=max(1, window // 2))
    assert task.measure(state)["held_out_loss"] == loss and n_tokens == len(tokens) - 1
    sampled = task.measure(new_state(replace(config, eval_batches=2), TOKENS))["held_out_loss"]
    assert sampled != loss and abs(sampled - loss) < 0.05 * loss
    assert sampled == task.measure(new_state(replace(config, eval_batches=2), TOKENS))["held_out_loss"]


def test_best_checkpoint_has_the_lowest_loss(tmp_path, monkeypatch):
    values = iter([3.0, 2.0, 2.5, 1.5])
    monkeypatch.setattr(text_task, "evaluate", lambda *args, **more: (next(values), 99))
    run, state = new_run(tmp_path), new_state(CONFIG, TOKENS)
    best = []
    for state.step in (5, 10, 15, 20):
        assert updates.evaluate_and_record(state, run, new_task()) > 0
        best.append(load_checkpoint(run.best).about["progress"])
    assert [progress["step"] for progress in best] == [5, 10, 10, 20]
    assert [progress["best_loss"] for progress in best] == [3.0, 2.0, 2.0, 1.5]
    bits = [line["bits_per_byte"] for line in read_metrics(run.metrics)]
    assert bits == pytest.approx([loss / math.log(2) for loss in (3.0, 2.0, 2.5, 1.5)], rel=1e-5)


def test_learning_rate_over_a_run(tmp_path):
    config = replace(CONFIG, steps=40, warmup_steps=4, max_learning_rate=1e-2, min_learning_rate=1e-3)
    run = new_run(tmp_path)
    train(new_state(config, TOKENS), run)
    rates = [line["learning_rate"] for line in read_metrics(run.metrics) if "loss" in line]
    assert rates[:4] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    cosine = [1e-3 + 9e-3 * (1 + math.cos(math.pi * (step - 4) / 36)) / 2 for step in range(4, 41)]
    assert rates[3:] == pytest.approx(cosine, rel=1e-5)
    assert rates[-1] == pytest.approx(1e-3)


def test_warmup_is_at_most_a_tenth_of_the_run():
    state = new_state(replace(CONFIG, steps=50, warmup_steps=1000), TOKENS)
    assert state.learning_rate(5) == CONFIG.max_learning_rate
    assert state.learning_rate(4) < CONFIG.max_learning_rate
    assert state.learning_rate(50) == CONFIG.min_learning_rate


@pytest.mark.parametrize("n_steps", [1, 2, 3, 40])
def test_learning_rate_is_never_0(n_steps):
    state = new_state(replace(CONFIG, steps=n_steps, warmup_steps=4, min_learning_rate=0.0), TOKENS)
    rates = [state.learning_rate(step) for step in range(1, n_steps + 1)]
    assert min(rates) > 0 and state.learning_rate(n_steps + 1) == 0


@pytest.mark.parametrize(
    ("minutes", "steps", "spent", "expected"),
    [
        (5.0, 0, 0.0, (200, 290)),
        (5.0, 0, 120.0, (80, 170)),  # seconds of preparation count
        (5.0, 60, 0.0, (60, 60)),
        (5.0, 10, 0.0, (10, 10)),
        (0.1, 0, 0.0, (5, 7)),
    ],
)
def test_time_limit_in_minutes(tmp_path, monkeypatch, minutes, steps, spent, expected):
    """With a clock that says one second an update: about as many updates as fit, and some time for the end."""
    clock = iter(range(10**9))
    monkeypatch.setattr(updates.clock, "awake_seconds", lambda: float(next(clock)))
    config = replace(CONFIG, minutes=minutes, steps=steps, accumulation_steps=1, eval_interval=100)
    state = new_state(config, TOKENS)
    assert state.total_steps == (steps if 0 < steps <= updates.ESTIMATE_STEPS[0] else 0)
    assert train(state, new_run(tmp_path, spent=spent)) is True
    assert expected[0] <= state.step <= expected[1]
    assert state.step == state.total_steps == state.seconds


# -------------------------------------------------------------------- gradients and updates
PADDING = 0


def small_model(seed: int = 0) -> Sequential:
    """Tokens to logits, in float64."""
    model = Sequential(Embedding(7, 4, generator=seed), Dense(4, 7, generator=seed + 1))
    for parameter in model.parameters():
        parameter.array = parameter.array.astype(np.float64)
    return model


def uneven_batches(rng) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of one shape, with 6, 1, 3 and 0 labels that are no padding."""
    batches = []
    for n in (6, 1, 3, 0):
        labels = rng.integers(1, 7, (2, 3))
        labels.reshape(-1)[n:] = PADDING
        batches.append((rng.integers(0, 7, (2, 3)), labels))
    return batches


def as_one(batches) -> tuple[np.ndarray, np.ndarray]:
    inputs, labels = zip(*batches)
    return np.concatenate(inputs), np.concatenate(labels)


def test_accumulated_uneven_batches_equal_one_large_batch(rng):
    """Each label counts as much as any other, and a batch that has none counts nothing."""
    batches = uneven_batches(rng)
    loss_fn = CrossEntropy(PADDING)
    counts = [count_labels(labels, PADDING) for _, labels in batches]
    assert counts == [6, 1, 3, 0]
    parts, whole = small_model(), small_model()
    grads = compute_gradients(parts, supervised_loss(parts, loss_fn), batches, np.array(counts))
    expected = compute_gradients(whole, supervised_loss(whole, loss_fn), [as_one(batches)])
    assert grads.n_labels == 10
    assert grads.loss == pytest.approx(expected.loss, rel=1e-12)
    for result, reference in zip(parts.parameters(), whole.parameters(), strict=True):
        np.testing.assert_allclose(result.grad.array, reference.grad.array, rtol=1e-12, atol=1e-14)


def test_gradients_and_apply_accept_any_model_and_loss(rng):
    """Here by hand what gradient descent with clipping does."""
    model = Dense(3, 2, generator=0)
    x, y = rng.standard_normal((5, 3)), rng.standard_normal((5, 2))
    before = model.weights.array.copy()
    error = x @ before - y
    by_hand = [2 / error.size * x.T @ error, 2 / error.size * error.sum(axis=0)]
    norm = math.sqrt(sum(float((g**2).sum()) for g in by_hand))

    grads = compute_gradients(model, lambda batch, factor: MeanSquaredError()(y, model(batch)) * factor, [x])
    assert grads.loss == pytest.approx(float((error**2).mean()), rel=1e-5)
    found = apply_gradients(model, StochasticGradientDescent(0.1), grads, max_norm=norm / 4)
    assert found == pytest.approx(norm, rel=1e-5)
    np.testing.assert_allclose(model.weights.array, before - 0.1 * by_hand[0] / 4, rtol=1e-4, atol=1e-6)
    assert model.weights.grad is None


def test_non_finite_loss_names_its_source():
    model = Sequential(Dense(2, 2, generator=0))
    before = weights_of(model)
    with pytest.raises(NonFiniteError, match=r"loss is nan.* / 0\.0 "):
        train_on_batch(model, AdamW(), lambda batch, factor: ((model(batch) * 0) / 0.0).sum() * factor, np.ones((1, 2)))
    check_no_update(model, before)


@pytest.mark.parametrize(
    ("batches", "n_labels", "message"),
    [
        ([], None, "batch.*got 0"),
        ([1, 2], None, "n_labels.*2 and none"),
        ([1, 2], [3], "n_labels.*2 and 1"),
        ([1, 2], [0, 0], "at least one label"),
    ],
)
def test_mismatched_label_counts_are_rejected(batches, n_labels, message):
    model = small_model()
    with pytest.raises(ValueError, match=f"compute_gradients: .*{message}"):
        compute_gradients(model, supervised_loss(model, CrossEntropy()), batches, n_labels)


# -------------------------------------------------------------------- the loop by itself
def test_train_accepts_any_model(rng):
    batches = [uneven_batches(rng)[0]] * 30
    model, other = small_model(), small_model()
    assert training.train(model, AdamW(0.05), iter(batches), n_steps=30) is True
    optimiser = AdamW(0.05)
    losses = [train_on_batch(other, optimiser, supervised_loss(other, CrossEntropy()), batch) for batch in batches]
    assert losses[-1] < 0.5 * losses[0]
    for actual, expected in zip(model.parameters(), other.parameters(), strict=True):
        np.testing.assert_array_equal(actual.array, expected.array)


class Noted(training.Session):
    """Records the calls of the loop; evaluates after 2 updates, and stops after 3."""

    def __init__(self) -> None:
        super().__init__(n_steps=10)
        self.calls: list = []

    def log(self, loss, norm):
        self.calls.append(("log", self.step))

    def should_stop(self):
        return self.step == 3

    def evaluate(self):
        self.calls += [("evaluate", self.step)] * (self.step == 2)

    def save(self):
        self.calls.append(("save", self.step))

    def recover(self, error):
        self.calls.append(("recover", str(error)[:15]))


def test_session_callbacks(rng):
    session, rates = Noted(), []
    batches = iter([uneven_batches(rng)[0]] * 3)
    schedule = lambda step: rates.append(step) or 0.1
    optimiser = AdamW(lambda step: 0.5)
    assert training.train(small_model(), optimiser, batches, schedule=schedule, session=session) is False
    assert optimiser.learning_rate == 0.1  # of the argument, not of the optimizer's own schedule
    assert session.calls == [("log", 1), ("log", 2), ("evaluate", 2), ("log", 3), ("save", 3)]
    assert rates == [1, 2, 3]


def test_session_may_skip_an_update(rng):
    session, model = Noted(), Dense(1, 1, generator=0)
    batches = iter([np.full((1, 1), value) for value in (1.0, np.nan, 1.0, 1.0)])
    batch_loss = lambda batch, factor: model(batch).sum() * factor
    training.train(model, StochasticGradientDescent(0.1), batches, batch_loss=batch_loss, session=session)
    assert session.calls.index(("recover", "the loss is nan")) == 1
    assert [call for call in session.calls if call[0] == "log"] == [("log", 1), ("log", 2), ("log", 3)]
    with pytest.raises(NonFiniteError):
        training.train(model, AdamW(), iter([np.full((1, 1), np.nan)]), 1, batch_loss)


def test_training_loop_is_short():
    """With all that it calls in its file at most 150 lines."""
    functions = (training.train, training.compute_gradients, training.apply_gradients)
    assert sum(len(inspect.getsourcelines(function)[0]) for function in functions) <= 150


# -------------------------------------------------------------------- one update
def test_accumulated_gradients_equal_one_large_batch():
    big = new_state(replace(CONFIG, batch_size=6, accumulation_steps=1, dropout=0.0), TOKENS)
    small = new_state(replace(CONFIG, batch_size=2, accumulation_steps=3, dropout=0.0), TOKENS)
    for _ in range(5):
        (loss, norm), (other_loss, other_norm) = train_step(big), train_step(small)
        assert loss == pytest.approx(other_loss, rel=1e-5)
        assert norm == pytest.approx(other_norm, rel=1e-4)
    for (name, a), b in zip(big.model.named_parameters(), small.model.parameters(), strict=True):
        np.testing.assert_allclose(a.array, b.array, atol=2e-4, err_msg=name)
    assert big.dataset.position == small.dataset.position == 30


@pytest.mark.parametrize(("limit", "clipped"), [(0.0, False), (1e-3, True), (1e6, False)])
def test_update_clips_gradients(limit, clipped):
    """The first moment is a tenth of what the optimiser took for the gradient."""
    state = new_state(replace(CONFIG, max_gradient_norm=limit), TOKENS)
    _, norm = train_step(state)
    assert norm > 0.01
    moments = [state.optimiser.state_of(parameter)[1]["first"] for parameter in state.model.parameters()]
    taken = math.sqrt(sum(float((moment**2).sum()) for moment in moments)) / (1 - CONFIG.beta1)
    assert taken == pytest.approx(limit if clipped else norm, rel=1e-4)
    assert all(parameter.grad is None for parameter in state.model.parameters())


def weights_of(model) -> dict[str, np.ndarray]:
    return {name: parameter.array.copy() for name, parameter in model.named_parameters()}


def check_no_update(model, before: dict[str, np.ndarray]) -> None:
    for name, parameter in model.named_parameters():
        np.testing.assert_array_equal(parameter.array, before[name])
        assert parameter.grad is None


@pytest.mark.parametrize(
    ("value", "place", "named"),
    [
        (np.nan, (0, 0), r"loss is nan.*parameter blocks\.0\.mlp\.up\.weights"),
        (3e38, ..., r"result of dense with blocks\.0\.mlp\.up\.weights"),
    ],
)
@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_non_finite_loss_stops_before_the_update(tmp_path, value, place, named, accumulation_steps):
    config = replace(CONFIG, accumulation_steps=accumulation_steps)
    run, state = new_run(tmp_path, on_nan="stop"), new_state(config, TOKENS)
    saved = []

    def stop():
        if state.step == 7:
            dict(state.model.named_parameters())["blocks.0.mlp.up.weights"].array[place] = value
            saved.extend([run.last.read_bytes(), weights_of(state.model)])

    run.stop = stop
    with pytest.raises(NonFiniteError, match=f"step 8: .*{named}"):
        train(state, run)
    before, weights = saved
    assert run.last.read_bytes() == before
    check_no_update(state.model, weights)
    assert resume_state(run.last, TOKENS).step == 5
    if np.isnan(value):
        with pytest.raises(ValueError, match="finite weights"):
            state.save(run.last, None)
        assert run.last.read_bytes() == before


def test_non_finite_gradient_stops_before_the_update(monkeypatch):
    state = new_state(replace(CONFIG, accumulation_steps=1), TOKENS)
    plain = training.gradient_norm
    spoil = lambda model: model.norm.gain.grad.array.__setitem__(0, np.inf) or plain(model)
    monkeypatch.setattr(training, "gradient_norm", spoil)
    before = weights_of(state.model)
    with pytest.raises(NonFiniteError, match=r"step 1: .*norm.*inf.*norm\.gain"):
        train_step(state)
    check_no_update(state.model, before)
    assert state.step == state.optimiser.n_steps == 0


@pytest.mark.parametrize(
    ("on_gpu", "precision", "suggests_bfloat16"),
    [(False, "float32", False), (True, "float32", True), (True, "bfloat16", False)],
)
def test_memory_error_suggests_settings_to_lower(monkeypatch, on_gpu, precision, suggests_bfloat16):
    monkeypatch.setattr(updates, "gpu_memory", lambda: (1.5e9, 80e9))
    config = replace(CONFIG, precision=precision)
    advice = new_task().memory_advice(config, on_gpu)
    with pytest.raises(MemoryError) as caught, updates.advise_on_memory(on_gpu, advice):
        raise MemoryError("Unable to allocate 3.00 TiB.")
    message = str(caught.value)
    flags = r"--batch-size \(now 2;.*--accumulation-steps.*--context-window \(now 8\)"
    assert re.search(rf"3\.00 TiB.*{flags}.*{min_n_weights(config):,} weights", message)
    assert ("1.5 GB" in message and "80.0 GB" in message) == on_gpu
    assert ("--precision bfloat16" in message) == suggests_bfloat16


# -------------------------------------------------------------------- metrics and samples
def test_metrics_are_written_as_complete_lines(tmp_path):
    run = new_run(tmp_path)
    assert read_metrics(run.metrics) == []
    for step in range(running.MAX_BUFFERED_LINES + 3):
        run.record(step=step, loss=1 / 3)
    assert len(read_metrics(run.metrics)) == running.MAX_BUFFERED_LINES
    run.flush()
    run.flush()
    assert read_metrics(run.metrics) == [{"step": s, "loss": 0.333333} for s in range(running.MAX_BUFFERED_LINES + 3)]


def test_metrics_of_slow_updates_are_written_in_time(tmp_path, monkeypatch):
    run, start = new_run(tmp_path), time.monotonic()
    for step, (seconds, n_written) in enumerate([(0, 0), (6, 2), (7, 2), (12, 4)]):
        monkeypatch.setattr(running, "time", SimpleNamespace(monotonic=lambda now=start + seconds: now))
        run.record(step=step, loss=1.0)
        assert len(read_metrics(run.metrics)) == n_written


@pytest.mark.parametrize("window", [1, 2, 8])
@pytest.mark.parametrize("prompt", ["", "the cat sat on the mat"])
def test_samples_start_with_the_prompt(tmp_path, window, prompt):
    state, run = new_state(replace(CONFIG, context_window=window), TOKENS), new_run(tmp_path)
    text = write_sample(state, run, 10, prompt)
    assert text.startswith(prompt)
    assert write_sample(state, run, 10, prompt) == text
    assert (tmp_path / "samples.txt").read_text(encoding="utf-8") == f"--- sample at step 0\n{text}\n" * 2


@pytest.mark.parametrize(
    "damage",
    [
        b'\xff\xfe\n[1]\n"text"\n{"loss": 1.0}\n{"step": 2, "lo',
        b'{"step": 1, "loss": "high"}\n{"step": true, "loss": 1}\n{"step": 2, "loss": null}\n' + b"[" * 100_000,
    ],
)
def test_damaged_metrics_lines_are_skipped(tmp_path, damage):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 2, "said": "good"}\n' + damage)
    assert read_metrics(path) == [{"step": 1, "loss": 2, "said": "good"}]


def test_samples_without_recorded_size_are_kept(tmp_path):
    run, state = new_run(tmp_path), new_state(CONFIG, TOKENS)
    run.samples.write_text("a user's\n")
    run.truncate_to(state)
    assert run.samples.read_text() == "a user's\n"
    run.save(state, run.last)
    assert resume_state(run.last, TOKENS).samples_size == state.samples_size == len("a user's\n")
    run.samples.write_text("")
    run.truncate_to(state)
    assert run.samples.read_text() == ""


# -------------------------------------------------------------------- a full disk
class FullDisk:
    """Refuses the first checkpoints, as a full disk does."""

    def __init__(self, monkeypatch, n_refusals: int, number: int = errno.ENOSPC) -> None:
        self.left = n_refusals
        usual = training_state.save_checkpoint

        def save(path, *args):
            if self.left:
                self.left -= 1
                raise OSError(number, os.strerror(number), str(path))
            usual(path, *args)

        monkeypatch.setattr(training_state, "save_checkpoint", save)
        monkeypatch.setattr(full_disk, "MAX_RETRY_SECONDS", 0.01)


def test_run_waits_for_disk_space(tmp_path, monkeypatch, whole):
    FullDisk(monkeypatch, 3)
    printed: list[str] = []
    run = new_run(tmp_path / "run", on_full_disk="wait")
    run.print_line = printed.append
    assert train(new_state(CONFIG, TOKENS), run) is True
    full, again = [line for line in printed if not line.startswith("step")]
    assert re.match(rf"{re.escape(str(run.last))}: .*disk is full.*waiting", full) and "space again" in again
    same_files(run, whole)


def test_waiting_run_can_be_stopped(tmp_path, monkeypatch):
    FullDisk(monkeypatch, 10**9)
    run = new_run(tmp_path, on_full_disk="wait")
    answers = iter([False] * 5)
    run.stop = lambda: next(answers, True)
    with pytest.raises(OSError, match="No space left"):
        train(new_state(CONFIG, TOKENS), run)


@pytest.mark.parametrize(("policy", "number"), [("stop", errno.ENOSPC), ("wait", errno.EIO), ("wait", errno.EROFS)])
def test_other_disk_errors_are_raised_immediately(tmp_path, monkeypatch, policy, number):
    disk = FullDisk(monkeypatch, 10**9, number)
    with pytest.raises(OSError) as caught:
        train(new_state(CONFIG, TOKENS), new_run(tmp_path, on_full_disk=policy))
    assert caught.value.errno == number
    assert disk.left == 10**9 - 1


@pytest.mark.nightly
@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_run_folder_size_is_bounded(tmp_path, monkeypatch, optimiser):
    """At its largest moment, while a checkpoint is being written beside the last and the best."""
    config = replace(CONFIG, embedding_dim=64, steps=60, eval_interval=2, sample_interval=3, optimiser=optimiser)
    run, state = new_run(tmp_path), new_state(config, TOKENS)
    TOKENISER.save(tmp_path / "tokeniser.json")
    sizes, usual = [], os.replace

    def measured(source, place):
        sizes.append(sum(path.stat().st_size for path in tmp_path.iterdir()))
        usual(source, place)

    monkeypatch.setattr(os, "replace", measured)
    bound = full_disk.max_folder_bytes(state, TOKENISER)
    assert train(state, run) is True
    assert bound / 4 < max(sizes) < bound
    longest = max(map(len, run.metrics.read_text().splitlines()))
    assert longest < full_disk.LINE
    assert full_disk.describe_disk_space(state, TOKENISER, tmp_path) in ("up to 1 MB", "up to 2 MB", "up to 3 MB")


def test_insufficient_disk_space_raises_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(full_disk, "_free", lambda folder: 100_000)
    state = new_state(replace(CONFIG, embedding_dim=64), TOKENS)
    assert full_disk.describe_disk_space(state, TOKENISER, tmp_path).endswith(" MB (only 0.1 MB free)")
