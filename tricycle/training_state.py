"""The state of a GPT's training: what a checkpoint holds to resume it bit for bit, and what its updates are made of.

`tricycle.training` has the loop; here is what it trains: a config's model, optimiser and data, with float16's loss
scale, and shared out among several processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tricycle import devices
from tricycle.activation_checkpointing import checkpoint_activations
from tricycle.batches import CausalLMDataset
from tricycle.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from tricycle.configs import GPTConfig
from tricycle.configs.size import min_n_weights
from tricycle.devices import Array, array_module
from tricycle.distributed.processes import SINGLE_PROCESS, GeneratorAdvance, ProcessGroup
from tricycle.distributed.shards import ShardedOptimiser, Shards, update_cost
from tricycle.models import GPT, MAX_LOGITS
from tricycle.optimiser_rules import OPTIMISERS
from tricycle.optimiser_rules.schedules import SCHEDULES
from tricycle.optimisers import Optimiser, State
from tricycle.tensor import Tensor, no_grad
from tricycle.tokeniser import Tokeniser
from tricycle.training import BatchLossFn, NonFiniteError, Session, int_unless_on_gpu, train

# How many updates a run is taken to have at least while its number of updates is not known, because it is limited in
# minutes and nothing has been timed.
LEAST_STEPS = 24

# float16 reaches from 6e-8 to 65,504, so the loss is multiplied by a scale that brings its gradients there, which are
# divided by it afterwards. It is halved when they leave the range, and doubled after so many updates that went well
# (Micikevicius et al. 2018, section 3.2).
FIRST_SCALE, GROWTH_STEPS = 2.0**16, 2000


@dataclass
class LossScale:
    """The scale of float16's losses, as `training.compute_gradients` and `training.apply_gradients` take it.

    Attributes:
        numbers: (3,) on the model's device: the scale, updates since it changed, updates left out. Changed in place.
    """

    numbers: Array

    @property
    def scale(self) -> Array:
        return self.numbers[0]

    @property
    def n_skipped(self) -> Array:
        return self.numbers[2]

    def adapt(self, is_finite: Array) -> None:
        """Halve the scale where a gradient left the range, and double it after many updates where none did."""
        xp = array_module(self.numbers)
        scale, n_fine, n_skipped = self.numbers[0], self.numbers[1] + 1, self.numbers[2]
        grown = xp.where(n_fine < GROWTH_STEPS, scale, 2 * scale)
        went_well = xp.stack([grown, n_fine % GROWTH_STEPS, n_skipped])
        left_out = xp.stack([xp.maximum(scale / 2, 1), xp.zeros_like(scale), n_skipped + 1])
        self.numbers[...] = xp.where(is_finite, went_well, left_out)


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
        samples_size: bytes of samples that the run had written when it was saved; -1 where nobody counted.
        n_skips: how many of the latest updates were left out because something was not finite.
        n_rollbacks: how often training went back to a checkpoint because something was not finite.
        n_worse: how many of the latest evaluations had no lower loss than the best.
        processes: those that train together: the batches of an update are shared out among them.
        batch_loss: the loss of a batch; None for the cross-entropy of inputs and labels.
        draws: what one batch takes of the model's generator; None until it is needed and measured.
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

    PROGRESS = ("step", "total_steps", "seconds", "evaluated_step", "best_loss")
    LATER = ("samples_size", "n_skips", "n_rollbacks", "n_worse")  # the same, which older checkpoints lack

    def save(
        self, path: Path, tokeniser: Tokeniser | None, states: dict[Tensor, tuple[int, State]] | None = None
    ) -> None:
        """
        Args:
            states: of the optimiser, gathered, where they are sharded.

        Raises:
            NotFiniteError: a weight or a moment is not finite; nothing is written then.
        """
        progress = {name: getattr(self, name) for name in (*self.PROGRESS, *self.LATER)}
        progress["loss_scaling"] = devices.to_cpu(self.loss_scaling).tolist()
        save_checkpoint(path, self.saved_module(), tokeniser, self.optimiser, self.dataset, progress, states)

    def saved_module(self) -> Any:
        """What a checkpoint holds the parameters of: the model, or that part of it which learns."""
        return self.model

    @property
    def n_tokens(self) -> int:
        """That an update reads."""
        return self.config.batch_size * self.config.context_window * self.config.accumulation_steps

    def count_labels(self, batch: Any) -> Any:
        """Count the labels of a batch."""
        return count_labels(batch[1])

    def extra_metrics(self) -> dict[str, float]:
        """Return what else metrics say of the latest update, by names."""
        return {}

    def train_arguments(self) -> dict[str, Any]:
        """Return what `training.train` takes of this state."""
        return {
            "model": self.model,
            "optimiser": self.optimiser,
            "batches": self.dataset,
            "batch_loss": self.batch_loss,
            "schedule": self.learning_rate,
            "max_norm": self.config.max_gradient_norm,
        }

    def first_nonfinite(self) -> str:
        """The name of the first weight or moment that is not finite; "" where all are."""
        for name, parameter in self.saved_module().named_parameters():
            arrays = {"parameter": parameter.array}
            arrays |= self.optimiser.state_of(parameter)[1]
            for kind, array in arrays.items():
                if not np.isfinite(devices.to_cpu(array)).all():
                    return f"the {kind} {name}" if kind == "parameter" else f"the {kind} of {name}"
        return ""

    def restore(self, checkpoint: Checkpoint) -> None:
        """Put everything but the weights where it stood when a checkpoint was saved.

        Raises:
            ValueError: something is missing, does not fit, or is not finite.
        """
        path = checkpoint.path
        progress = checkpoint.restore(self.saved_module(), self.optimiser, self.dataset)
        self.loss_scaling = np.array(progress.get("loss_scaling", self.loss_scaling), np.float32)
        for name in (*self.PROGRESS, *self.LATER):
            value = progress.get(name, getattr(self, name) if name in self.LATER else None)
            if type(value) is not type(getattr(self, name)):
                raise ValueError(f"{path}: expected {name} in the checkpoint to be a number, got {value!r}")
            setattr(self, name, value)

    def roll_back(self, path: Path) -> None:
        """Put everything where it stood when a checkpoint was saved, the weights too, in place.

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
        """Return the rate of an update, numbered from 1.

        The last update has the lowest rate; where that is 0, which would be an update without effect, the schedule ends
        one update later.
        """
        config = self.config
        # while the number of updates is not known yet, they are few: the warm-up is long enough
        total = self.total_steps or max(10 * config.warmup_steps, LEAST_STEPS)
        warmup = min(config.warmup_steps, total // 10)
        total += config.min_learning_rate == 0
        return SCHEDULES[config.schedule](config.max_learning_rate, config.min_learning_rate, warmup, total)(step)


def count_labels(labels: Any, ignore_index: int | None = None) -> Any:
    """Count the labels that count, of an array or Tensor; a 0-d array where it is on a GPU and some may be ignored."""
    array = labels.array if isinstance(labels, Tensor) else labels
    return array.size if ignore_index is None else int_unless_on_gpu((array != ignore_index).sum())


def training_bytes(config: GPTConfig) -> int:
    """Bytes that training takes in any case: what would take more than there is need not be begun.

    Weights, gradients and moments; what a pass takes; and the tokens of an update.
    """
    n_numbers = min_n_weights(config)
    n_state_arrays = OPTIMISERS[config.optimiser].n_state_arrays
    n_tokens = config.batch_size * config.context_window
    tokens = 2 * 8 * n_tokens * config.accumulation_steps
    return (2 + n_state_arrays) * 4 * n_numbers + activation_bytes(config, n_tokens) + tokens


def activation_bytes(config: GPTConfig, n_tokens: int) -> int:
    """Bytes that the forward pass over so many tokens leaves for the backward pass, and the logits.

    Of each block: its input, both norms' results, what attention gives and the sum with it; queries, keys and values,
    as they were and turned; and in the MLP what comes before and after the activation.
    """
    heads, key_heads = (n * config.channels_per_head for n in (config.n_heads, config.key_heads))
    attention = (heads + key_heads) * (2 if config.positions == "rotary" else 1) + key_heads
    block = 5 * config.embedding_dim + attention + config.mlp_width * (3 if config.is_gated else 2)
    logits = 2 * min(config.vocab_size, MAX_LOGITS // n_tokens)
    if config.recompute:
        kept = config.n_layers * config.embedding_dim + max(block, logits)
    else:
        kept = config.n_layers * block + logits
    return n_tokens * kept * (2 if config.precision in ("bfloat16", "float16") else 4)


def new_optimiser(config: GPTConfig) -> Optimiser:
    """Return the optimizer of a config: that of its row in `OPTIMISERS`, with the fields that the row names."""
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
    """A fresh optimiser and dataset (and model, unless given) for a config and a run of training tokens.

    Args:
        processes: those that train together; all make the same state.
        shard_optimiser: the optimizer state of a parameter is kept by one of them alone.
    """
    model = model or GPT(config)
    model.recompute = checkpoint_activations if config.recompute else None
    if on_gpu:
        model.to_gpu()
    dataset = CausalLMDataset(tokens, config.vocab_size, config.batch_size, config.context_window, config.seed)
    state = TrainingState(config, model, new_optimiser(config), dataset.batch().shuffle().to_tensor())
    state.processes = processes
    if shard_optimiser and processes.size > 1:
        shards = Shards(processes, model, partial(update_cost, state.optimiser))
        state.optimiser = ShardedOptimiser(state.optimiser, shards)
    if not config.minutes or 0 < config.steps <= LEAST_STEPS:
        state.total_steps = config.steps
    return state


def _load(path: Path, processes: ProcessGroup) -> Checkpoint:
    """A checkpoint that rank 0 reads, for all."""
    checkpoint: Any = load_checkpoint(path) if processes.is_rank_zero else None
    return processes.broadcast(checkpoint)


def resume_state(
    path: Path,
    tokens: Any,
    on_gpu: bool = False,
    processes: ProcessGroup = SINGLE_PROCESS,
    shard_optimiser: bool = False,
) -> TrainingState:
    """The state that a checkpoint was saved from, by however many processes.

    Args:
        path: only rank 0 needs to see it.
        shard_optimiser: as of `new_state`.

    Raises:
        ValueError: the checkpoint is damaged, or was made with other tokens.
    """
    checkpoint = _load(path, processes)
    state = new_state(checkpoint.config, tokens, on_gpu, checkpoint.model(), processes, shard_optimiser)
    state.restore(checkpoint)
    return state


class StateSession(Session):
    """A session whose updates are those of a state: its number of steps, its batches, loss scale and processes."""

    def __init__(self, state: TrainingState) -> None:
        self.state = state
        self.reducer = state.processes.reducer

    @property
    def step(self) -> int:
        return self.state.step

    @step.setter
    def step(self, step: int) -> None:
        self.state.step = step

    @property
    def n_steps(self) -> float:  # type: ignore[override]
        """Infinite while the number of steps is not known."""
        return self.state.total_steps or math.inf

    @property
    def loss_scale(self) -> LossScale | None:
        """The scale of float16 on a GPU, where the state's numbers are brought; None where none is needed."""
        state = self.state
        like = next(state.model.parameters())
        if not like.on_gpu or state.config.precision != "float16":
            return None
        state.loss_scaling = like.xp.asarray(state.loss_scaling)
        return LossScale(state.loss_scaling)

    @contextmanager
    def batches(self, source: CausalLMDataset) -> Iterator[tuple[list[Any], list[Any]]]:
        """Draw the batches of an update that are this process's own, with the dropout masks that belong to them.

        Afterwards the dataset and the model's generator stand where they would if all had been computed here.
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
                state.model(state.model.place(batches[0][0]))
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
        return self._last

    def log(self, loss: Any, norm: Any) -> None:
        self.result = loss, norm

    def recover(self, error: NonFiniteError) -> None:
        raise NonFiniteError(f"step {self.step + 1}: {error}") from None


def train_step(state: TrainingState) -> tuple[Any, Any]:
    """Make one update, with the batches, the learning rate and the limits of the state's config.

    Returns:
        the mean loss in nats a token, and the norm of the gradients before clipping: numbers, or of a model on a GPU
        0-d arrays there, for `read_steps`: nothing here waits for the device.

    Raises:
        NonFiniteError: a loss or a gradient is NaN or infinite; the weights are as before. (On a GPU they are too, but
            `read_steps` says so.)
    """
    session = _OneUpdate(state)
    train(**state.train_arguments(), session=session)
    return session.result


def read_steps(state: TrainingState, results: list[tuple[Any, Any]]) -> list[tuple[float, float]]:
    """What `train_step` returned for the latest updates, as numbers, by one read of the device.

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
    """As `read_steps`, and by their numbers those that changed nothing because something was not finite, with why."""
    if not results or isinstance(results[0][0], float):
        return results, {}
    values = devices.to_cpu(array_module(results[0][0]).stack([value for result in results for value in result]))
    read = [(loss, norm) for loss, norm in values.reshape(-1, 2).tolist()]
    bad = {}
    for step, (loss, norm) in enumerate(read, state.step + 1 - len(read)):
        by_scale = state.config.precision == "float16" and not math.isfinite(norm) and state.loss_scaling[0].item() > 1
        if not math.isfinite(loss) or not (math.isfinite(norm) or by_scale):
            said = f"the loss is {loss} and the norm of the gradients {norm}, so its update changed nothing"
            bad[step] = f"{said} (on a CPU the first bad tensor is named)"
    return read, bad
