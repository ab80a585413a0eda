"""The training loop: state in, state out. The model sees none of it.

A run folder holds config.json, tokeniser.json, metrics.jsonl, samples.txt, loss.png, and the checkpoints
last.safetensors and best.safetensors.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tricycle.checkpoint import load_checkpoint, save_checkpoint
from tricycle.configs import GPTConfig
from tricycle.dataset import CausalLMDataset
from tricycle.files import atomic_write
from tricycle.generate import generate
from tricycle.layers import Layer
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.ops import check_range
from tricycle.optimisers import AdamW, clip_gradients, gradient_norm
from tricycle.scheduler import WarmupCosine
from tricycle.tensor import Tensor, topological_order
from tricycle.tokeniser import BPETokeniser

# With a limit in minutes, the number of updates is estimated after these, while less than a quarter of the
# time is over; then it stays, and so does everything that depends on it. The first few, slow ones are not timed.
UNTIMED_STEPS = 4
ESTIMATE_STEPS = tuple(24 * 2**doubling for doubling in range(16))
SAMPLE_TOKENS = 160
LINES_GATHERED = 50
IGNORED = -1
# The final estimate moves its windows on by half their length: each token sees at least half a window before it.
FINAL_OVERLAP = 2


class NonFiniteError(ArithmeticError):
    """Training met NaN or infinity. Raised before the weights are touched."""


@dataclass
class TrainingState:
    """All that training is made of: what a checkpoint must hold to go on bit for bit.

    Attributes:
        step: updates made.
        total_steps: updates to make; 0 until the first ones have been timed.
        seconds: spent so far, in all sittings.
        evaluated_step: the step of the latest held-out estimate.
        best_loss: the lowest held-out loss so far, nats a token.
    """

    config: GPTConfig
    model: GPT
    optimiser: AdamW
    dataset: CausalLMDataset
    step: int = 0
    total_steps: int = 0
    seconds: float = 0.0
    evaluated_step: int = -1
    best_loss: float = math.inf

    PROGRESS = ("step", "total_steps", "seconds", "evaluated_step", "best_loss")

    def save(self, path: Path, tokeniser: BPETokeniser | None) -> None:
        progress = {name: getattr(self, name) for name in self.PROGRESS}
        save_checkpoint(path, self.model, tokeniser, self.optimiser, self.dataset, progress)

    def learning_rate(self, step: int) -> float:
        """The rate of an update, numbered from 1."""
        config = self.config
        # while the number of updates is not known yet, they are few: the warm-up is long enough
        total = self.total_steps or max(10 * config.warmup_steps, ESTIMATE_STEPS[0])
        warmup = min(config.warmup_steps, total // 10)
        return WarmupCosine(config.max_learning_rate, config.min_learning_rate, warmup, total)(step)


def new_state(config: GPTConfig, tokens: Any, on_gpu: bool = False, model: GPT | None = None) -> TrainingState:
    """A fresh optimiser and dataset (and model, unless given) for a config and a run of training tokens."""
    model = model or GPT(config)
    if on_gpu:
        model.to_gpu()
    optimiser = AdamW(config.max_learning_rate, (config.beta1, config.beta2), weight_decay=config.weight_decay)
    dataset = CausalLMDataset(tokens, config.vocab_size, config.batch_size, config.context_window, config.seed)
    state = TrainingState(config, model, optimiser, dataset.batch().shuffle().to_tensor())
    if not config.minutes or 0 < config.steps <= ESTIMATE_STEPS[0]:
        state.total_steps = config.steps
    return state


def resume_state(path: Path, tokens: Any, on_gpu: bool = False) -> TrainingState:
    """The state that a checkpoint was saved from.

    Raises:
        ValueError: the checkpoint is damaged, or was made with other tokens.
    """
    checkpoint = load_checkpoint(path)
    state = new_state(checkpoint.config, tokens, on_gpu, checkpoint.model())
    progress = checkpoint.restore(state.model, state.optimiser, state.dataset)
    for name in state.PROGRESS:
        if type(progress.get(name)) is not type(getattr(state, name)):
            raise ValueError(f"{path}: expected {name} in the checkpoint to be a number, got {progress.get(name)!r}")
        setattr(state, name, progress[name])
    return state


# -------------------------------------------------------------------- one update
@np.errstate(all="ignore")  # what overflows is looked for below, and named
def train_step(state: TrainingState) -> tuple[float, float]:
    """One update: batches, losses, gradients, clipping, AdamW.

    Returns:
        the mean loss in nats a token, and the norm of the gradients before clipping.

    Raises:
        NonFiniteError: a loss or a gradient is NaN or infinite; the weights are as before.
    """
    config, model = state.config, state.model
    loss_fn = CrossEntropy()
    step = state.step + 1
    total = 0.0
    for _ in range(config.accumulation_steps):
        inputs, outputs = (model.place(ids) for ids in next(state.dataset))
        loss = loss_fn(outputs, model(inputs))
        value = float(loss)
        if not math.isfinite(value):
            bad_name = _first_bad(loss, model)
            model.zero_grad()
            raise NonFiniteError(f"step {step}: the loss is {value}; the first bad tensor is {bad_name}")
        total += value / config.accumulation_steps
        if config.accumulation_steps > 1:
            loss = loss * (1 / config.accumulation_steps)
        loss.backward()
    norm = clip_gradients(model, config.max_gradient_norm) if config.max_gradient_norm else gradient_norm(model)
    if not math.isfinite(norm):
        bad = [name for name, p in model.named_parameters() if p.grad is not None and not _all_finite(p.grad)]
        model.zero_grad()
        first = bad[0] if bad else "none: their squares are too large"
        raise NonFiniteError(f"step {step}: the norm of the gradients is {norm}; the first bad one is of {first}")
    state.optimiser.learning_rate = state.learning_rate(step)
    state.optimiser.step()
    model.update(state.optimiser)
    state.step = step
    return total, norm


def _all_finite(tensor: Tensor) -> bool:
    return bool(tensor.xp.isfinite(tensor.array).all())


def _first_bad(loss: Tensor, model: Layer) -> str:
    """The name of the first Tensor, in the order of computation, that is not finite."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        if not _all_finite(parameter):
            return f"the parameter {name}"
    for place, tensor in enumerate(topological_order(loss)):
        if not _all_finite(tensor):
            users = [names[id(arg)] for arg in tensor.args if id(arg) in names]
            of = f" with {', '.join(users)}" if users else ""
            return f"the result of {tensor.name}{of} (operation {place}, shape {tensor.shape})"
    return "none but the loss"


# -------------------------------------------------------------------- held-out loss
def evaluate(model: GPT, tokens: Any, batch_size: int, n_batches: int = 0, stride: int = 0) -> tuple[float, int]:
    """The loss on a run of tokens, each predicted once (the first one is only read).

    Args:
        tokens: at least two ids.
        n_batches: look only at so many batches, spread evenly; 0 for all.
        stride: how far windows move on; a smaller one than the context window gives each token more context
            and costs more. 0 for the context window.

    Returns:
        the mean loss in nats a token, and how many tokens were predicted.

    Raises:
        ValueError: fewer than two tokens.
    """
    if len(tokens) < 2:
        raise ValueError(f"evaluate: expected at least 2 tokens, got {len(tokens)}")
    length = min(model.config.context_window, len(tokens) - 1)
    windows = list(_windows(len(tokens) - 1, length, min(stride or length, length)))
    if n_batches and n_batches * batch_size < len(windows):
        chosen = np.linspace(0, len(windows) - 1, n_batches * batch_size).astype(int)
        windows = [windows[i] for i in chosen]
    loss_fn = CrossEntropy(ignore_index=IGNORED)
    total, count = 0.0, 0
    with model.evaluating():
        for first in range(0, len(windows), batch_size):
            batch = windows[first : first + batch_size]
            rows = np.stack([np.asarray(tokens[start : start + length + 1], np.int64) for start, _ in batch])
            check_range("evaluate: tokens", rows, model.config.vocab_size)  # on a GPU nobody would notice
            labels = rows[:, 1:].copy()
            for row, (_, n_new) in zip(labels, batch):
                row[: length - n_new] = IGNORED
            n_labels = sum(n_new for _, n_new in batch)
            total += float(loss_fn(model.place(labels), model(model.place(rows[:, :-1])))) * n_labels
            count += n_labels
    return total / count, count


def _windows(n_pairs: int, length: int, stride: int) -> Iterator[tuple[int, int]]:
    """Where windows of a length start, and how many of each one's last labels no earlier window had."""
    covered = 0
    while covered < n_pairs:
        end = min(n_pairs, covered + (length if covered == 0 else stride))
        yield end - length, end - covered
        covered = end


@dataclass
class HeldOut:
    """Held-out text, as tokens and as the bytes that losses in bits a byte refer to.

    Attributes:
        tokens: the first is only read, so it should be the end of some text.
        n_bytes: how many bytes the tokens stand for.
    """

    tokens: Any
    n_bytes: int

    def bits_per_byte(self, nats_per_token: float) -> float:
        """What a loss means for the text itself, whatever the vocabulary."""
        return nats_per_token * (len(self.tokens) - 1) / math.log(2) / max(1, self.n_bytes)


# -------------------------------------------------------------------- the loop
@dataclass
class Run:
    """Where a run leaves its files, and how it speaks.

    Attributes:
        folder: the run folder.
        say: prints a line above the progress bar.
        stop: asked after every update; True saves and leaves.
        spent: seconds that preparing took; they count towards `minutes`.
    """

    folder: Path
    tokeniser: BPETokeniser
    held_out: HeldOut
    say: Callable[[str], None] = print
    stop: Callable[[], bool] = lambda: False
    spent: float = 0.0
    show_progress: bool = True
    _log: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.last, self.best = self.folder / "last.safetensors", self.folder / "best.safetensors"
        self.metrics = self.folder / "metrics.jsonl"

    def record(self, **values: Any) -> None:
        """Add a line to metrics.jsonl; a few are gathered before they are written."""
        self._log.append({name: float(f"{v:.6g}") if isinstance(v, float) else v for name, v in values.items()})
        if len(self._log) >= LINES_GATHERED:
            self.flush()

    def flush(self) -> None:
        with self.metrics.open("a", encoding="utf-8", newline="\n") as file:
            file.writelines(json.dumps(line) + "\n" for line in self._log)
        self._log.clear()

    def forget_after(self, step: int) -> None:
        """Drop what a resumed run will write again: later updates, and estimates from this step on."""
        lines = read_metrics(self.metrics)
        kept = [line for line in lines if line["step"] < step or (line["step"] == step and "loss" in line)]
        with atomic_write(self.metrics, text=True) as file:
            file.writelines(json.dumps(line) + "\n" for line in kept)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; one that a crash cut off is left out."""
    lines = []
    if path.is_file():
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                lines.append(json.loads(text))
    return [line for line in lines if isinstance(line, dict) and isinstance(line.get("step"), int)]


def train(state: TrainingState, run: Run) -> bool:
    """Train until the config's steps or minutes are used up, or `run.stop()` says so.

    The last checkpoint is saved before each held-out estimate and before samples are drawn, and at the end.

    Returns:
        whether training came to its end (and was not stopped).

    Raises:
        NonFiniteError: the loss or a gradient is not finite. The checkpoints are as they were.
    """
    from tqdm import tqdm

    config = state.config
    run.forget_after(state.step)
    if not run.last.exists():
        _save(state, run)  # a folder that cannot be written says so now, not after hours
    _pause(state, run)  # where the run was left before what was due
    tokens_per_step = config.batch_size * config.context_window * config.accumulation_steps
    times: list[float] = []
    with tqdm(total=state.total_steps or None, initial=state.step, unit="step", disable=not run.show_progress,
              dynamic_ncols=True, mininterval=0.5, smoothing=0.05) as bar:
        while not state.total_steps or state.step < state.total_steps:
            started = time.perf_counter()
            loss, norm = train_step(state)
            seconds = time.perf_counter() - started
            state.seconds += seconds
            times.append(seconds)
            speed = tokens_per_step / seconds
            rate = state.optimiser.learning_rate
            run.record(step=state.step, loss=loss, learning_rate=rate, gradient_norm=norm, tokens_per_second=speed)
            if config.minutes and len(times) > UNTIMED_STEPS:
                used = (run.spent + state.seconds) / (config.minutes * 60)
                young = state.step in ESTIMATE_STEPS and used < 1 / 4
                if young or (not state.total_steps and (used > 1 / 8 or state.step == ESTIMATE_STEPS[0])):
                    state.total_steps = _affordable_steps(state, run, float(np.mean(times[UNTIMED_STEPS:])))
                bar.total = state.total_steps
            bar.set_postfix_str(f"loss {loss:.3f}, rate {rate:.1e}, {speed:,.0f} tokens/s", refresh=False)
            bar.update()
            if run.stop() and state.step != state.total_steps:
                _save(state, run)
                return False
            _pause(state, run)
    _save(state, run)
    return True


def _pause(state: TrainingState, run: Run) -> None:
    """A checkpoint, then the held-out estimate and the sample that are due at this step, but not at the last."""
    config = state.config
    evaluation_due = state.step % config.eval_interval == 0
    sample_due = config.sample_interval and state.step % config.sample_interval == 0
    if state.step in (0, state.total_steps) or not (evaluation_due or sample_due):
        return
    _save(state, run)
    if evaluation_due:
        estimate(state, run)
    if sample_due:
        show_sample(state, run)


def _save(state: TrainingState, run: Run) -> None:
    run.flush()
    state.save(run.last, run.tokeniser)


def _affordable_steps(state: TrainingState, run: Run, seconds_per_step: float) -> int:
    """How many updates fit in the config's minutes, after what has been spent and what the end will cost."""
    config = state.config
    n_tokens = config.batch_size * config.context_window
    # a forward pass alone takes about a third of an update
    forward = seconds_per_step / config.accumulation_steps / 3
    final = FINAL_OVERLAP * len(run.held_out.tokens) / n_tokens * forward + 10
    estimates = config.eval_batches * forward / config.eval_interval
    left = config.minutes * 60 - run.spent - state.seconds - final
    steps = state.step + max(1, int(left / (seconds_per_step + estimates)))
    return min(steps, config.steps) if config.steps else steps


def estimate(state: TrainingState, run: Run) -> float:
    """Estimate the held-out loss, record it, and keep the best checkpoint; returns nats a token."""
    config = state.config
    loss, n_tokens = evaluate(state.model, run.held_out.tokens, config.batch_size, config.eval_batches)
    bits = run.held_out.bits_per_byte(loss)
    state.evaluated_step = state.step
    run.record(step=state.step, held_out_loss=loss, bits_per_byte=bits)
    run.say(f"step {state.step}: held-out loss {loss:.4f} nats a token, {bits:.3f} bits a byte ({n_tokens:,} tokens)")
    if loss < state.best_loss:
        state.best_loss = loss
        state.save(run.best, run.tokeniser)
    run.flush()
    return loss


def show_sample(state: TrainingState, run: Run, n_tokens: int = SAMPLE_TOKENS, prompt: str = "") -> str:
    """Print some generated text and add it to samples.txt."""
    end = run.tokeniser.end_of_text
    ids = list(run.tokeniser.encode(prompt))[-state.config.context_window :] or [end]
    seed = np.random.default_rng((state.config.seed, state.step))
    n_vocab = run.tokeniser.n_vocab
    drawn = generate(state.model, ids, n_tokens, 0.8, top_p=0.95, seed=seed, stop_token=end, n_vocab=n_vocab)
    text = prompt + run.tokeniser.decode([token for token in drawn if token != end])
    title = f"--- sample at step {state.step}"
    with (run.folder / "samples.txt").open("a", encoding="utf-8", newline="\n") as file:
        file.write(f"{title}\n{text}\n")
    run.say(f"{title}\n{text}\n---")
    return text
