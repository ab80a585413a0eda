"""`TrainingState`: model, optimizer, dataset and progress of a GPT's training, for bit-exact resume from a checkpoint.

It is trained by the loop in `tricycle.training` through `StateSession`, which adds loss scaling for float16 and the
division of batches among several processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tricycle import devices
from tricycle.activation_checkpointing import checkpoint_activations
from tricycle.batches import CausalLMDataset
from tricycle.checkpoint import (
    A_CHECKPOINT,
    Checkpoint,
    load_checkpoint,
    new_model,
    save_checkpoint,
    wrap_content_errors,
)
from tricycle.configs import GPTConfig
from tricycle.configs.size import min_n_weights
from tricycle.devices import Array, array_module
from tricycle.distributed.processes import SINGLE_PROCESS, GeneratorAdvance, ProcessGroup
from tricycle.distributed.shards import ShardedOptimiser, Shards, update_cost
from tricycle.loss import CrossEntropy
from tricycle.models import GPT, n_logit_rows
from tricycle.optimiser_rules import OPTIMISERS
from tricycle.optimiser_rules.schedules import SCHEDULES
from tricycle.optimisers import Optimiser, State
from tricycle.recorded_updates import RecordedUpdates
from tricycle.tensor import Tensor, no_grad
from tricycle.tokeniser import Tokeniser
from tricycle.training import (
    BatchLossFn,
    NonFiniteError,
    Session,
    apply_gradients,
    compute_gradients,
    int_unless_on_gpu,
    supervised_loss,
    train,
)

# The assumed minimum number of updates of a run that is limited in minutes, until the first updates are timed.
MIN_STEPS = 24

# float16 represents 6e-8 to 65,504, so the loss is multiplied by a scale, by which the gradients are divided later. The
# scale is halved when gradients overflow, and doubled after GROWTH_STEPS updates without overflow (Micikevicius et al.
# 2018, section 3.2).
FIRST_SCALE, GROWTH_STEPS = 2.0**16, 2000


@dataclass
class LossScale:
    """The loss scale of float16 training, an argument of `training.compute_gradients` and `apply_gradients`.

    Attributes:
        numbers: (3,) on the model's device: the scale, the updates since it changed, and the skipped updates.
    """

    numbers: Array

    @property
    def scale(self) -> Array:
        """The factor of the loss, a 0-d array on a GPU, a NumPy scalar on a CPU."""
        return self.numbers[0]

    @property
    def n_skipped(self) -> Array:
        """The number of skipped updates, a 0-d array on a GPU, a NumPy scalar on a CPU."""
        return self.numbers[2]

    def adapt(self, is_finite: Array) -> None:
        """In place: on overflow halve the scale (minimum 1), count a skip; double it after GROWTH_STEPS good steps."""
        xp = array_module(self.numbers)
        scale, n_fine, n_skipped = self.numbers[0], self.numbers[1] + 1, self.numbers[2]
        grown = xp.where(n_fine < GROWTH_STEPS, scale, 2 * scale)
        went_well = xp.stack([grown, n_fine % GROWTH_STEPS, n_skipped])
        left_out = xp.stack([xp.maximum(scale / 2, 1), xp.zeros_like(scale), n_skipped + 1])
        self.numbers[...] = xp.where(is_finite, went_well, left_out)


@dataclass
class TrainingState:
    """The complete state of a training run, as saved in a checkpoint for bit-exact resume.

    Attributes:
        step: the number of updates made.
        total_steps: the number of updates to make; 0 until the first updates are timed.
        seconds: the training time so far, over all sessions.
        evaluated_step: the step of the latest held-out estimate.
        best_loss: the lowest held-out loss so far, in nats per token.
        loss_scaling: for float16 on a GPU: the scale, the updates since it changed, and the skipped updates.
        samples_size: the size in bytes of the samples file at the checkpoint; -1 if unknown.
        n_skips: the number of consecutive updates skipped because of non-finite values, up to now.
        n_rollbacks: the number of rollbacks to a checkpoint because of non-finite values.
        n_worse: the number of consecutive evaluations without a new lowest loss, up to now.
        processes: the processes among which the batches of an update are divided.
        batch_loss: the loss function of a batch; None for the cross-entropy of inputs and labels.
        draws: how far one batch advances the model's random generator; None until measured.
        recorded: on a GPU, the recording of an update, which is replayed; None before the first update.
    """

    config: GPTConfig
    model: GPT
    optimiser: Optimiser
    dataset: CausalLMDataset
    step: int = 0
    total_steps: int = 0
    seconds: float = 0.0
    evaluated_step: int = -1
    best_loss: float = math.inf
    loss_scaling: Array = field(default_factory=lambda: np.array([FIRST_SCALE, 0, 0], np.float32))
    samples_size: int = -1
    n_skips: int = 0
    n_rollbacks: int = 0
    n_worse: int = 0
    processes: ProcessGroup = SINGLE_PROCESS
    batch_loss: BatchLossFn | None = None
    draws: GeneratorAdvance | None = None
    recorded: RecordedUpdates | None = field(default=None, repr=False, compare=False)

    PROGRESS = ("step", "total_steps", "seconds", "evaluated_step", "best_loss")
    LATER = ("samples_size", "n_skips", "n_rollbacks", "n_worse")  # missing in older checkpoints

    def save(
        self, path: Path, tokeniser: Tokeniser | None, states: dict[Tensor, tuple[int, State]] | None = None
    ) -> None:
        """Atomically write weights, tokenizer, optimizer, data position, progress; NonFiniteCheckpointError for NaN.

        Args:
            states: the gathered optimizer state, if it is sharded.

        Raises:
            NonFiniteCheckpointError: a weight or optimizer state is not finite; nothing is written.
        """
        progress = {name: getattr(self, name) for name in (*self.PROGRESS, *self.LATER)}
        progress["loss_scaling"] = devices.to_cpu(self.loss_scaling).tolist()
        save_checkpoint(path, self.saved_module(), tokeniser, self.optimiser, self.dataset, progress, states)

    def saved_module(self) -> Any:
        """Return the layer whose parameters a checkpoint stores: here the model; a subclass may return a part."""
        return self.model

    @property
    def n_tokens(self) -> int:
        """The number of tokens per update: batch size times context window times accumulation steps."""
        return self.config.batch_size * self.config.context_window * self.config.accumulation_steps

    def count_labels(self, batch: Any) -> Any:
        """Return the number of all labels of a batch (inputs, labels); none is ignored."""
        return count_labels(batch[1])

    def extra_metrics(self) -> dict[str, float]:
        """Return further metrics of the latest update by name; by default none."""
        return {}

    def train_arguments(self) -> dict[str, Any]:
        """Return a dict of model, optimizer, dataset, loss, schedule and maximum norm: keyword arguments of `train`."""
        return {
            "model": self.model,
            "optimiser": self.optimiser,
            "batches": self.dataset,
            "batch_loss": self.batch_loss,
            "schedule": self.learning_rate,
            "max_norm": self.config.max_gradient_norm,
        }

    def first_nonfinite(self) -> str:
        """Name the first non-finite array, "the parameter NAME" or "the STATE of NAME"; return "" if all are finite."""
        for name, parameter in self.saved_module().named_parameters():
            arrays = {"parameter": parameter.array}
            arrays |= self.optimiser.state_of(parameter)[1]
            for kind, array in arrays.items():
                if not np.isfinite(devices.to_cpu(array)).all():
                    return f"the {kind} {name}" if kind == "parameter" else f"the {kind} of {name}"
        return ""

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore optimizer, data position, loss scale and progress in place, not weights; ValueError for a misfit.

        Raises:
            ValueError: something is missing, does not fit, or is not finite.
        """
        progress = checkpoint.restore(self.saved_module(), self.optimiser, self.dataset)
        with wrap_content_errors(checkpoint.path, A_CHECKPOINT):
            self.loss_scaling = np.array(progress.get("loss_scaling", self.loss_scaling), np.float32).reshape(3)
            for name in (*self.PROGRESS, *self.LATER):
                value = progress.get(name, getattr(self, name) if name in self.LATER else None)
                if type(value) is not type(getattr(self, name)):
                    raise ValueError(f"expected {name} to be a number, got {value!r}")
                setattr(self, name, value)

    def roll_back(self, path: Path) -> None:
        """Restore everything from a checkpoint file in place, including weights and random state; clear the gradients.

        Raises:
            ValueError: as of `restore`.
        """
        checkpoint = _load(path, self.processes)
        model = checkpoint.model()
        self.model.load_state_dict(model.state_dict())
        self.model.generator.bit_generator.state = model.generator.bit_generator.state
        self.model.zero_grad()
        self.restore(checkpoint)

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of update number `step`, counted from 1, by the config's schedule with warm-up.

        The last update has the minimum rate; if that is 0, the schedule ends one update later, so that the last update
        has an effect.
        """
        config = self.config
        # until the number of updates is known, assume that they are all in the warm-up
        total = self.total_steps or max(10 * config.warmup_steps, MIN_STEPS)
        warmup = min(config.warmup_steps, total // 10)
        total += config.min_learning_rate == 0
        return SCHEDULES[config.schedule](config.max_learning_rate, config.min_learning_rate, warmup, total)(step)


def count_labels(labels: Any, ignore_index: int | None = None) -> Any:
    """Return the number of labels that are not ignored; a 0-d array for labels on a GPU with an `ignore_index`."""
    array = labels.array if isinstance(labels, Tensor) else labels
    return array.size if ignore_index is None else int_unless_on_gpu((array != ignore_index).sum())


def training_bytes(config: GPTConfig) -> int:
    """Return a lower bound of the bytes for training: weights, gradients, optimizer state, activations and tokens."""
    n_numbers = min_n_weights(config)
    n_state_arrays = OPTIMISERS[config.optimiser].n_state_arrays
    n_tokens = config.batch_size * config.context_window
    tokens = 2 * 8 * n_tokens * config.accumulation_steps
    return (2 + n_state_arrays) * 4 * n_numbers + activation_bytes(config, n_tokens) + tokens


def activation_bytes(config: GPTConfig, n_tokens: int) -> int:
    """Estimate the bytes of activations and logits of `n_tokens` tokens in a training step, as the config sets it.

    For each block: its input, the outputs of both norms and of attention, and the residual sum; queries, keys and
    values, before and after RoPE; and the hidden layer of the MLP before and after the activation.
    """
    heads, key_heads = (n * config.channels_per_head for n in (config.n_heads, config.key_heads))
    attention = (heads + key_heads) * (2 if config.positions == "rotary" else 1) + key_heads
    mlp = config.mlp_width * (3 if config.is_gated else 2)
    if config.n_experts:  # with the input and the result of each active expert
        mlp = config.n_active_experts * (mlp + 2 * config.embedding_dim)
    block = 5 * config.embedding_dim + attention + mlp
    logits = 2 * config.vocab_size * min(n_tokens, n_logit_rows(config.vocab_size)) // n_tokens
    if config.recompute:
        kept = config.n_layers * config.embedding_dim + max(block, logits)
    else:
        kept = config.n_layers * block + logits
    return n_tokens * kept * (2 if config.precision in ("bfloat16", "float16") else 4)


def new_optimiser(config: GPTConfig) -> Optimiser:
    """Make the optimizer of a config from its entry in `OPTIMISERS`."""
    row = OPTIMISERS[config.optimiser]
    return row.kind(config.max_learning_rate, **{name: getattr(config, name) for name in row.fields})


def new_state(
    config: GPTConfig,
    tokens: Any,
    on_gpu: bool = False,
    model: GPT | None = None,
    processes: ProcessGroup = SINGLE_PROCESS,
    shard_optimiser: bool = False,
) -> TrainingState:
    """Make a config's initial state (model, optimizer, shuffled batches); a given model goes to the GPU if `on_gpu`.

    Args:
        processes: the processes of distributed training; all make the same state.
        shard_optimiser: whether the optimizer state is sharded over the processes.
    """
    model = model or new_model(config)
    model.recompute = checkpoint_activations if config.recompute else None
    if on_gpu:
        model.to_gpu()
    dataset = CausalLMDataset(tokens, config.vocab_size, config.batch_size, config.context_window, config.seed)
    state = TrainingState(config, model, new_optimiser(config), dataset.batch().shuffle().to_tensor())
    state.processes = processes
    if not config.is_decoder:
        state.batch_loss = lambda batch, factor: model.loss(model.place(batch[0]), model.place(batch[1]), None, factor)
    if shard_optimiser and processes.size > 1:
        shards = Shards(processes, model, partial(update_cost, state.optimiser))
        state.optimiser = ShardedOptimiser(state.optimiser, shards)
    if not config.minutes or 0 < config.steps <= MIN_STEPS:
        state.total_steps = config.steps
    return state


def _load(path: Path, processes: ProcessGroup) -> Checkpoint:
    """Load a checkpoint on rank 0, and broadcast it; all processes must call this."""
    checkpoint: Any = load_checkpoint(path) if processes.is_rank_zero else None
    return processes.broadcast(checkpoint)


def resume_state(
    path: Path,
    tokens: Any,
    on_gpu: bool = False,
    processes: ProcessGroup = SINGLE_PROCESS,
    shard_optimiser: bool = False,
) -> TrainingState:
    """Make a training state from a checkpoint, which rank 0 alone reads; ValueError if damaged or for other tokens.

    Args:
        path: of the checkpoint, saved by any number of processes; only rank 0 reads it.
        shard_optimiser: see `new_state`.
    """
    checkpoint = _load(path, processes)
    state = new_state(checkpoint.config, tokens, on_gpu, checkpoint.model(), processes, shard_optimiser)
    state.restore(checkpoint)
    return state


class StateSession(Session):
    """A session of the training loop that takes steps, batches, loss scale and processes from a `TrainingState`."""

    def __init__(self, state: TrainingState) -> None:
        self.state = state
        self.reducer = state.processes.reducer

    @property
    def step(self) -> int:
        """The number of updates made."""
        return self.state.step

    @step.setter
    def step(self, step: int) -> None:
        """Set the number of updates made."""
        self.state.step = step

    @property
    def n_steps(self) -> float:  # type: ignore[override]
        """The total number of updates; infinite until it is known."""
        return self.state.total_steps or math.inf

    @property
    def loss_scale(self) -> LossScale | None:
        """The loss scale, moved to the GPU; None unless the model trains in float16 on a GPU."""
        state = self.state
        like = next(state.model.parameters())
        if not like.on_gpu or state.config.precision != "float16":
            return None
        state.loss_scaling = like.xp.asarray(state.loss_scaling)
        return LossScale(state.loss_scaling)

    def replay(self, batch_loss: BatchLossFn, batches: Sequence[Any], n_labels: Any, max_norm: float) -> Any:
        """Replay an update and return its loss and norm, on one GPU, if the loss is the usual one; else return None."""
        state, model, optimiser = self.state, self.state.model, self.state.optimiser
        is_usual = type(state) is TrainingState and state.batch_loss is None and state.processes.size == 1
        if not is_usual or model.recompute is not None or not next(model.parameters()).on_gpu:
            return None
        if state.recorded is None or (state.recorded.model, state.recorded.optimiser) != (model, optimiser):
            state.recorded = RecordedUpdates(model, optimiser)

        def update(batches: Sequence[Any]) -> tuple[Any, Any]:
            grads = compute_gradients(model, batch_loss, batches, n_labels, None, self.loss_scale)
            return grads.loss, apply_gradients(model, optimiser, grads, max_norm, self.loss_scale)

        return state.recorded.replay(update, batches, *n_labels, state.config, state.loss_scaling)

    @contextmanager
    def batches(self, source: CausalLMDataset) -> Iterator[tuple[list[Any], list[Any]]]:
        """Yield this process's batches and label counts; leave data and dropout draws as after all processes' batches.

        Afterwards the dataset and the generator are in the same state as if one process had computed all batches.
        """
        state, config = self.state, self.state.config
        processes, n_batches = state.processes, config.accumulation_steps
        processes.set_status(f"update {state.step + 1}")
        own = processes.shard(n_batches)
        start = source.position
        source.position = start + own.start * config.batch_size
        batches = [next(source) for _ in own]
        source.position = start + n_batches * config.batch_size
        n_labels = [state.count_labels(batch) for batch in batches]
        if processes.size == 1 or not config.dropout:
            yield batches, n_labels
            return
        generator = state.model.generator
        before = generator.bit_generator.state
        if state.draws is None:
            with no_grad():
                (state.batch_loss or supervised_loss(state.model, CrossEntropy()))(batches[0], 1.0)
            state.draws = GeneratorAdvance.from_states(before, generator.bit_generator.state)
        state.draws.skip(generator, before, own.start)
        try:
            yield batches, n_labels
        finally:
            state.draws.skip(generator, before, n_batches)


class _OneUpdate(StateSession):
    def __init__(self, state: TrainingState) -> None:
        super().__init__(state)
        self._last = state.step + 1
        self.result: tuple[Any, Any] = (math.nan, math.nan)

    @property
    def n_steps(self) -> float:  # type: ignore[override]
        """The number of the one update, at which training stops."""
        return self._last

    def log(self, loss: Any, norm: Any) -> None:
        """Store loss and norm as the result; nothing is written."""
        self.result = loss, norm

    def recover(self, error: NonFiniteError) -> None:
        """Raise the error again, with the number of the step; an update is not repeated."""
        raise NonFiniteError(f"step {self.step + 1}: {error}") from None


def train_step(state: TrainingState) -> tuple[Any, Any]:
    """Make one update in place; return loss and norm before clipping; NonFiniteError, without update, if not finite.

    Returns:
        the mean loss in nats per token, and the norm of the gradients before clipping: numbers, or for a model on a GPU
        0-d arrays for `read_steps`, without synchronization.

    Raises:
        NonFiniteError: a loss or a gradient is NaN or infinite; the weights are unchanged. (On a GPU, `read_steps`
            raises it.)
    """
    session = _OneUpdate(state)
    train(**state.train_arguments(), session=session)
    return session.result


def read_steps(state: TrainingState, results: list[tuple[Any, Any]]) -> list[tuple[float, float]]:
    """Convert the results of `train_step` for the latest updates to floats; raise NonFiniteError if one failed.

    Raises:
        NonFiniteError: a loss or a norm is NaN or infinite (with float16, a norm that no smaller scale would help).
    """
    read, bad = read_steps_and_errors(state, results)
    for step, reason in bad.items():
        raise NonFiniteError(f"step {step}: {reason}")
    return read


def read_steps_and_errors(
    state: TrainingState, results: list[tuple[Any, Any]]
) -> tuple[list[tuple[float, float]], dict[int, str]]:
    """Return `train_step` results as floats, {step: reason} of non-finite updates; float results pass unchecked."""
    if not results or isinstance(results[0][0], float):
        return results, {}
    values = devices.to_cpu(array_module(results[0][0]).stack([value for result in results for value in result]))
    read = [(loss, norm) for loss, norm in values.reshape(-1, 2).tolist()]
    bad = {}
    for step, (loss, norm) in enumerate(read, state.step + 1 - len(read)):
        by_scale = state.config.precision == "float16" and not math.isfinite(norm) and state.loss_scaling[0].item() > 1
        if not math.isfinite(loss) or not (math.isfinite(norm) or by_scale):
            reason = f"the loss is {loss} and the norm of the gradients {norm}, so its update changed nothing"
            bad[step] = f"{reason} (on a CPU, the first non-finite tensor is reported)"
    return read, bad
