"""Training: all that it is made of, one update of it, and the loss on text that it has not seen.

State in, state out; the model sees none of it. The loop with its folder and its clock is `tricycle_cli.run`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tricycle import backend
from tricycle.backend import Array, array_module
from tricycle.checkpoint import load_checkpoint, save_checkpoint
from tricycle.configs import GPTConfig
from tricycle.dataset import CausalLMDataset
from tricycle.layers import Layer
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.ops import check_range
from tricycle.optimisers import AdamW, Muon, clip_gradients, gradient_norm
from tricycle.scheduler import SCHEDULES
from tricycle.tensor import Tensor, topological_order
from tricycle.tokeniser import BPETokeniser

# With a limit in minutes, the number of updates is estimated after these, while less than a quarter of the
# time is over; then it stays, and so does everything that depends on it.
ESTIMATE_STEPS = tuple(24 * 2**doubling for doubling in range(16))
IGNORED = -1

# float16 reaches from 6e-8 to 65,504, so the loss is multiplied by a scale that brings its gradients there, which are
# divided by it afterwards. It is halved when they leave the range, and doubled after so many updates that went well
# (Micikevicius et al. 2018, section 3.2).
FIRST_SCALE, GROWTH_STEPS = 2.0**16, 2000


class NonFiniteError(ArithmeticError):
    """Training met NaN or infinity. The update that met it changed no weights."""


@dataclass
class TrainingState:
    """All that training is made of: what a checkpoint must hold to go on bit for bit.

    Attributes:
        step: updates made.
        total_steps: updates to make; 0 until the first ones have been timed.
        seconds: spent so far, in all sittings.
        evaluated_step: the step of the latest held-out estimate.
        best_loss: the lowest held-out loss so far, nats a token.
        loss_scaling: of float16 on a GPU, where it lies: the scale, updates since it changed, updates left out.
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
    loss_scaling: Array = field(default_factory=lambda: np.array([FIRST_SCALE, 0, 0], np.float32))

    PROGRESS = ("step", "total_steps", "seconds", "evaluated_step", "best_loss")

    def save(self, path: Path, tokeniser: BPETokeniser | None) -> None:
        progress = {name: getattr(self, name) for name in self.PROGRESS}
        progress["loss_scaling"] = backend.to_cpu(self.loss_scaling).tolist()
        save_checkpoint(path, self.model, tokeniser, self.optimiser, self.dataset, progress)

    def learning_rate(self, step: int) -> float:
        """The rate of an update, numbered from 1."""
        config = self.config
        # while the number of updates is not known yet, they are few: the warm-up is long enough
        total = self.total_steps or max(10 * config.warmup_steps, ESTIMATE_STEPS[0])
        warmup = min(config.warmup_steps, total // 10)
        return SCHEDULES[config.schedule](config.max_learning_rate, config.min_learning_rate, warmup, total)(step)


def new_state(config: GPTConfig, tokens: Any, on_gpu: bool = False, model: GPT | None = None) -> TrainingState:
    """A fresh optimiser and dataset (and model, unless given) for a config and a run of training tokens."""
    model = model or GPT(config)
    if on_gpu:
        model.to_gpu()
    moments, decay = (config.beta1, config.beta2), config.weight_decay
    if config.optimiser == "muon":
        optimiser: AdamW = Muon(
            config.max_learning_rate, moments, weight_decay=decay, matrix_rate=config.matrix_rate,
            precision=config.precision,
        )
    else:
        optimiser = AdamW(config.max_learning_rate, moments, weight_decay=decay)
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
    state.loss_scaling = np.array(progress.get("loss_scaling", state.loss_scaling), np.float32)
    for name in state.PROGRESS:
        if type(progress.get(name)) is not type(getattr(state, name)):
            raise ValueError(f"{path}: expected {name} in the checkpoint to be a number, got {progress.get(name)!r}")
        setattr(state, name, progress[name])
    return state


# -------------------------------------------------------------------- one update
@np.errstate(all="ignore")  # what overflows is looked for below, and named
def train_step(state: TrainingState) -> tuple[Any, Any]:
    """One update: batches, losses, gradients, clipping, the optimiser.

    Returns:
        the mean loss in nats a token, and the norm of the gradients before clipping: numbers, or of a model on a GPU
        0-d arrays there, for `read_steps`: nothing here waits for the device.

    Raises:
        NonFiniteError: a loss or a gradient is NaN or infinite; the weights are as before. (On a GPU they are too, but
            `read_steps` says so.)
    """
    config, model = state.config, state.model
    on_gpu, loss_fn, scale = next(model.parameters()).on_gpu, CrossEntropy(), _loss_scale(state)
    step, share = state.step + 1, 1 / config.accumulation_steps
    total: Any = 0.0
    for _ in range(config.accumulation_steps):
        inputs, outputs = (model.place(ids) for ids in next(state.dataset))
        loss = loss_fn(outputs, model(inputs), share if scale is None else scale * share)
        value = loss.array if on_gpu else float(loss)
        if not on_gpu and not math.isfinite(value):
            bad_name = _first_bad(loss, model)
            model.zero_grad()
            raise NonFiniteError(f"step {step}: the loss is {value}; the first bad tensor is {bad_name}")
        total += value
        loss.backward()
    if on_gpu:
        total = total if scale is None else total / scale
        return total, _update_unread(state, total, scale)
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


def _loss_scale(state: TrainingState) -> Array | None:
    """The scale, a 0-d array on the device, where one is needed."""
    like = next(state.model.parameters())
    if not like.on_gpu or state.config.precision != "float16":
        return None
    state.loss_scaling = like.xp.asarray(state.loss_scaling)
    return state.loss_scaling[0]


def _update_unread(state: TrainingState, loss: Array, scale: Array | None) -> Array:
    """Clip and update without a look at any value: where one is not finite, weights and moments stay as they are.

    Returns:
        the norm of the gradients.
    """
    model, optimiser, xp, n_skipped = state.model, state.optimiser, array_module(loss), 0
    norm: Array = gradient_norm(model) / (1 if scale is None else scale)
    fine, factor = xp.isfinite(loss + norm), xp.minimum((state.config.max_gradient_norm or math.inf) / norm, 1)
    if scale is not None:
        factor, n_fine, n_skipped = factor / scale, state.loss_scaling[1] + 1, state.loss_scaling[2]
        grown = xp.where(n_fine < GROWTH_STEPS, scale, 2 * scale), n_fine % GROWTH_STEPS, n_skipped
        shrunk = xp.maximum(scale / 2, 1), xp.zeros_like(scale), n_skipped + 1
        state.loss_scaling = xp.where(fine, xp.stack(grown), xp.stack(shrunk))
    optimiser.learning_rate = state.learning_rate(state.step + 1)
    optimiser.step()
    optimiser.update(model.named_parameters(), xp.where(fine, factor, 0), n_skipped)
    model.zero_grad()
    state.step += 1
    return norm


def read_steps(state: TrainingState, results: list[tuple[Any, Any]]) -> list[tuple[float, float]]:
    """What `train_step` returned for the latest updates, as numbers, by one read of the device.

    Raises:
        NonFiniteError: a loss or a norm is NaN or infinite (with float16, a norm that no smaller scale would help).
    """
    if not results or isinstance(results[0][0], float):
        return results
    values = backend.to_cpu(array_module(results[0][0]).stack([value for result in results for value in result]))
    found = [(loss, norm) for loss, norm in values.reshape(-1, 2).tolist()]
    for step, (loss, norm) in enumerate(found, state.step + 1 - len(found)):
        by_scale = state.config.precision == "float16" and not math.isfinite(norm) and state.loss_scaling[0].item() > 1
        if not math.isfinite(loss) or not (math.isfinite(norm) or by_scale):
            said = f"the loss is {loss} and the norm of the gradients {norm}, so its update changed nothing"
            raise NonFiniteError(f"step {step}: {said} (on a CPU the first bad tensor is named)")
    return found


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
    losses: list[tuple[Tensor, int]] = []  # read at the end: until then a GPU need not be waited for
    with model.evaluating():
        for first in range(0, len(windows), batch_size):
            batch = windows[first : first + batch_size]
            rows = np.stack([np.asarray(tokens[start : start + length + 1], np.int64) for start, _ in batch])
            check_range("evaluate: tokens", rows, model.config.vocab_size)  # on a GPU nobody would notice
            labels = rows[:, 1:].copy()
            for row, (_, n_new) in zip(labels, batch):
                row[: length - n_new] = IGNORED
            n_labels = sum(n_new for _, n_new in batch)
            losses.append((loss_fn(model.place(labels), model(model.place(rows[:, :-1]))), n_labels))
    count = sum(n_labels for _, n_labels in losses)
    return sum(float(loss) * n_labels for loss, n_labels in losses) / count, count


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
