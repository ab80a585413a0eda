"""Training in three verbs: the gradients of a batch, their mean over processes, and the update.

    grads = gradients(model, loss_of, batches)
    grads = mean_over_processes(grads)
    norm = apply(model, optimiser, grads)

They are the same on a CPU and on a GPU, and for any model and loss. Below them stands what a GPT's training is made of:
state in, state out; the model sees none of it. Loops with their folders and clocks belong to programs, such as
`tricycle_cli.run`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tricycle import devices
from tricycle.autograd import topological_order
from tricycle.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from tricycle.configs import GPTConfig
from tricycle.dataset import CausalLMDataset
from tricycle.devices import Array, array_module
from tricycle.distributed.processes import ALONE, Draws, GradientSum, Processes
from tricycle.distributed.shards import ShardedOptimiser, Shards, load_of
from tricycle.layers import Layer
from tricycle.loss import CrossEntropy
from tricycle.models import GPT, LOGITS_AT_ONCE, least_numbers
from tricycle.optimiser_rules.muon import Muon
from tricycle.optimisers import AdamW, Optimiser, State, gradient_norm
from tricycle.recompute import Situation, free_activations
from tricycle.scheduler import SCHEDULES
from tricycle.tensor import Tensor, no_grad
from tricycle.tokeniser import Tokeniser

# How many updates a run is taken to have at least while its number of updates is not known, because it is limited in
# minutes and nothing has been timed.
LEAST_STEPS = 24

# float16 reaches from 6e-8 to 65,504, so the loss is multiplied by a scale that brings its gradients there, which are
# divided by it afterwards. It is halved when they leave the range, and doubled after so many updates that went well
# (Micikevicius et al. 2018, section 3.2).
FIRST_SCALE, GROWTH_STEPS = 2.0**16, 2000

# From a batch and a factor to the mean loss over the batch's labels, multiplied by the factor: a number, or a 0-d array
# on the model's device. `CrossEntropy` takes it as its third argument.
LossOf = Callable[[Any, Any], Tensor]


class NonFiniteError(ArithmeticError):
    """Training met NaN or infinity. The update that met it changed no weights."""


# -------------------------------------------------------------------- the first verb
class Gradients(NamedTuple):
    """What a batch gave.

    Attributes:
        loss: the mean over its labels: a number, or of a model on a GPU a 0-d array there, which nobody has read.
        n_labels: how many labels counted; 1 where nobody said.
        parameters: each with the gradient of that loss as its `grad`, if it has one.
        pending: with several processes, the sum over all of them that has begun; `mean_over_processes` waits for it.
    """

    loss: Any
    n_labels: Any
    parameters: list[Tensor]
    pending: GradientSum | None = None

    @property
    def loss_sum(self) -> Any:
        """Over the labels."""
        return self.loss * self.n_labels


def labelled(model: Layer, loss_fn: CrossEntropy) -> LossOf:
    """The loss of batches that are pairs of inputs and labels, which are whole numbers; a GPT's by `GPT.loss`."""

    def loss_of(batch: Any, factor: Any) -> Tensor:
        inputs, labels = batch
        if isinstance(model, GPT):
            return model.loss(model.place(inputs), model.place(labels), loss_fn, factor)
        return loss_fn(model.place(labels), model(model.place(inputs)), factor)

    return loss_of


def count_labels(labels: Any, ignore_index: int | None = None) -> Any:
    """How many labels count, an array's or a Tensor's; a 0-d array where they lie on a GPU and some may be ignored."""
    array = labels.array if isinstance(labels, Tensor) else labels
    if ignore_index is None:
        return array.size
    return _number((array != ignore_index).sum())


def _number(count: Any) -> Any:
    """As a whole number, unless it lies on a GPU."""
    return count if devices.is_array(count) and devices.on_gpu(count) else int(count)


@np.errstate(all="ignore")  # what overflows is looked for, and named
def gradients(
    model: Layer,
    loss_of: LossOf,
    batches: Sequence[Any],
    n_labels: Sequence[Any] | None = None,
    scale: Array | None = None,
    processes: Processes = ALONE,
) -> Gradients:
    """Forward and backward passes over batches, one after another: as one over all of them at once.

    Each label counts as much as any other, in whichever batch it stands, and of whichever process. Gradients are added
    to those that are there (to rank 0's; with several processes all have the same).

    Args:
        batches: what `loss_of` takes, one or more.
        n_labels: of how many labels each batch's loss is the mean, as `count_labels` says; needed for several batches.
        scale: the losses are multiplied by it, and so the gradients are; a 0-d array on the model's device.
        processes: those that do this together, each with batches of its own. During the last backward pass the sum of
            their gradients begins; `mean_over_processes` must follow.

    Raises:
        ValueError: no batch, several and no number of labels for each, or no label at all.
        NonFiniteError: a loss is NaN or infinite; there are no gradients then. (On a GPU nobody has looked, and with
            several processes `mean_over_processes` raises it.)
    """
    counts, total, pending = _begin(model, batches, n_labels, processes)
    mean: Any = 0.0
    for index, (batch, count) in enumerate(zip(batches, counts)):
        if isinstance(count, int) and count == 0:
            continue  # a mean over nothing, which would count nothing
        processes.answer()
        share = count / total
        compute_loss = partial(loss_of, batch, share if scale is None else share * scale)
        with free_activations():
            loss = compute_loss()
        mean = mean + _value(loss, compute_loss, model, pending)
        if pending is not None and pending.problem:
            break
        is_last = index == len(batches) - 1
        loss.backward(on_input=pending.is_complete if pending is not None and is_last else None)
    if scale is not None:
        mean = mean / scale
    return Gradients(mean, total, list(model.parameters()), pending)


def _begin(
    model: Layer, batches: Sequence[Any], n_labels: Sequence[Any] | None, processes: Processes
) -> tuple[list[Any], Any, GradientSum | None]:
    """How many labels of each batch count, of all batches of all processes, and where gradients are summed.

    Raises:
        ValueError: as of `gradients`.
    """
    counts = _counts(batches, n_labels, may_be_none=processes.size > 1)
    total = sum(counts)
    pending = None
    if processes.size > 1:
        total = int(processes.sum([float(total)])[0])
        pending = processes.gradient_sum(model)
    if isinstance(total, int) and total == 0:
        raise ValueError("gradients: expected at least one label to count, got none")
    return counts, total, pending


def _counts(batches: Sequence[Any], n_labels: Sequence[Any] | None, may_be_none: bool) -> list[Any]:
    """How many labels of each batch count.

    Raises:
        ValueError: as of `gradients`.
    """
    if n_labels is None and len(batches) == 1:
        return [1]
    if not (batches or may_be_none) or n_labels is None or len(n_labels) != len(batches):
        got = f"{len(batches)} and {'none' if n_labels is None else len(n_labels)}"
        raise ValueError(f"gradients: expected a batch or more, and n_labels for each of several, got {got}")
    return [_number(count) for count in n_labels]


def _value(loss: Tensor, compute_loss: Callable[[], Tensor], model: Layer, pending: GradientSum | None) -> Any:
    """A loss as a number; on a GPU as it is.

    Args:
        compute_loss: gave this loss, and is called a second time where it is bad, to name what was bad first.

    Raises:
        NonFiniteError: it is NaN or infinite. With several processes that is noted, for all to raise it together.
    """
    if loss.on_gpu:
        return loss.array
    value = float(loss)
    if not math.isfinite(value):
        problem = f"the loss is {value}; the first bad tensor is {_first_bad(compute_loss, model)}"
        model.zero_grad()
        if pending is None:
            raise NonFiniteError(problem)
        pending.problem = problem
    return value


def _first_bad(compute_loss: Callable[[], Tensor], model: Layer) -> str:
    """The name of the first Tensor, in the order of computation, that is not finite.

    The loss is computed again, and all of its Tensors are kept this time: the first pass forgot what the way back does
    not need. Dropout draws other masks; its generators are put back, so that the run goes on as if nobody had looked.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        if not _all_finite(parameter):
            return f"the parameter {name}"
    with Situation(model).again():
        loss = compute_loss()
    for place, tensor in enumerate(topological_order(loss)):
        if not _all_finite(tensor):
            users = [names[id(arg)] for arg in tensor.args if id(arg) in names]
            of = f" with {', '.join(users)}" if users else ""
            return f"the result of {tensor.name}{of} (operation {place}, shape {tensor.shape})"
    return "none but the loss"


def _all_finite(tensor: Tensor) -> bool:
    return bool(tensor.xp.isfinite(tensor.array).all())


# -------------------------------------------------------------------- the second verb
def mean_over_processes(grads: Gradients) -> Gradients:
    """The gradients of all processes together; of one process they are its own.

    Loss sums and numbers of labels are added up, and each gradient becomes the mean of all processes' gradients,
    weighed by their numbers of labels. (`gradients` has weighed them already: here is waited for their sum.)

    Raises:
        NonFiniteError: the loss of a process is NaN or infinite; there are no gradients then, in any of them.
    """
    if grads.pending is None:
        return grads
    loss, problems = grads.pending.finish(grads.loss)
    if problems:
        raise NonFiniteError("; ".join(f"rank {rank}: {problem}" for rank, problem in problems.items()))
    return grads._replace(loss=loss, pending=None)


# -------------------------------------------------------------------- the third verb
@np.errstate(all="ignore")
def apply(
    model: Layer, optimiser: Optimiser, grads: Gradients, max_norm: float = 0.0, loss_scaling: Array | None = None
) -> Any:
    """One update of the optimiser, with gradients scaled down to a common norm; they are forgotten afterwards.

    Args:
        max_norm: the most that the norm of all gradients together may be; 0 leaves them.
        loss_scaling: as of `TrainingState`, on the model's device; its first number is the scale that `gradients` had.
            It is adapted, in place.

    Returns:
        the norm before: a number, or of a model on a GPU a 0-d array there. Nothing here waits for the device.

    Raises:
        NonFiniteError: a gradient is NaN or infinite; the weights are as before. (On a GPU they are too, but nobody has
            looked: see `read_steps`.)
    """
    scale = 1.0 if loss_scaling is None else loss_scaling[0]
    norm = gradient_norm(model) / scale
    fine = _is_finite(norm, grads.loss)
    if isinstance(norm, float) and not fine:
        raise _bad_gradient(norm, model)
    factor = _where(fine, _share_kept(norm, max_norm) / scale)
    n_skipped = 0 if loss_scaling is None else loss_scaling[2]
    optimiser.update(model.named_parameters(), factor, n_skipped)
    model.zero_grad()
    if loss_scaling is not None:
        _adapt(loss_scaling, fine)
    return norm


def _bad_gradient(norm: float, model: Layer) -> NonFiniteError:
    """The error that names the first gradient that is not finite, which is forgotten with all others."""
    bad = [name for name, p in model.named_parameters() if p.grad is not None and not _all_finite(p.grad)]
    model.zero_grad()
    first = bad[0] if bad else "none: their squares are too large"
    return NonFiniteError(f"the norm of the gradients is {norm}; the first bad one is of {first}")


def _is_finite(norm: Any, loss: Any) -> Any:
    """Whether both are: True or False, or of a norm on a GPU a 0-d array there."""
    if isinstance(norm, float):
        return math.isfinite(norm)  # the loss has been looked at
    return array_module(norm).isfinite(norm + loss)


def _where(fine: Any, factor: Any) -> Any:
    """The factor, or 0 where something was not finite, so that the optimiser changes nothing."""
    return factor if fine is True else array_module(fine).where(fine, factor, 0)


def _share_kept(norm: Any, max_norm: float) -> Any:
    """What gradients of a norm are multiplied by, so that their norm is at most another one."""
    if not max_norm:
        return 1.0
    if isinstance(norm, float):
        return min(1.0, max_norm / norm) if norm else 1.0
    xp = array_module(norm)
    return max_norm / xp.maximum(norm, max_norm)


def _adapt(loss_scaling: Array, fine: Array) -> None:
    """The scale after an update, in place: halved where a gradient left the range, doubled after many that did not."""
    xp = array_module(loss_scaling)
    scale, n_fine, n_skipped = loss_scaling[0], loss_scaling[1] + 1, loss_scaling[2]
    grown = xp.where(n_fine < GROWTH_STEPS, scale, 2 * scale)
    went_well = xp.stack([grown, n_fine % GROWTH_STEPS, n_skipped])
    left_out = xp.stack([xp.maximum(scale / 2, 1), xp.zeros_like(scale), n_skipped + 1])
    loss_scaling[...] = xp.where(fine, went_well, left_out)


# -------------------------------------------------------------------- the three together
def train_on_batch(model: Layer, optimiser: Optimiser, loss_of: LossOf, batch: Any, max_norm: float = 0.0) -> Any:
    """The three verbs for one batch. Returns the mean loss, as `Gradients.loss` gives it.

    Raises:
        NonFiniteError: as of `gradients` and `apply`.
    """
    grads = mean_over_processes(gradients(model, loss_of, [batch]))
    apply(model, optimiser, grads, max_norm)
    return grads.loss


# -------------------------------------------------------------------- a GPT's training
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
        figures: what else the latest update's line of metrics says, by names.
        processes: those that train together: the batches of an update are shared out among them.
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
    figures: dict[str, float] = field(default_factory=dict)
    processes: Processes = ALONE
    draws: Draws | None = None

    PROGRESS = ("step", "total_steps", "seconds", "evaluated_step", "best_loss")
    LATER = ("samples_size", "n_skips", "n_rollbacks")  # the same, which older checkpoints lack

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
        save_checkpoint(path, self.kept(), tokeniser, self.optimiser, self.dataset, progress, states)

    def kept(self) -> Any:
        """What a checkpoint holds the parameters of: the model, or that part of it which learns."""
        return self.model

    @property
    def n_tokens(self) -> int:
        """That an update reads."""
        return self.config.batch_size * self.config.context_window * self.config.accumulation_steps

    def first_bad(self) -> str:
        """The name of the first weight or moment that is not finite; "" where all are."""
        for name, parameter in self.kept().named_parameters():
            arrays = {"parameter": parameter.array}
            arrays |= self.optimiser.state_of(parameter)[1]
            for kind, array in arrays.items():
                if not np.isfinite(devices.to_cpu(array)).all():
                    return f"the {kind} {name}" if kind == "parameter" else f"the {kind} of {name}"
        return ""

    def take_up(self, checkpoint: Checkpoint) -> None:
        """Put everything but the weights where it stood when a checkpoint was saved.

        Raises:
            ValueError: something is missing, does not fit, or is not finite.
        """
        path = checkpoint.path
        progress = checkpoint.restore(self.kept(), self.optimiser, self.dataset)
        self.loss_scaling = np.array(progress.get("loss_scaling", self.loss_scaling), np.float32)
        for name in (*self.PROGRESS, *self.LATER):
            value = progress.get(name, getattr(self, name) if name in self.LATER else None)
            if type(value) is not type(getattr(self, name)):
                raise ValueError(f"{path}: expected {name} in the checkpoint to be a number, got {value!r}")
            setattr(self, name, value)

    def go_back(self, path: Path) -> None:
        """Put everything where it stood when a checkpoint was saved, the weights too, in place.

        Raises:
            ValueError: as of `take_up`.
        """
        checkpoint = _load(path, self.processes)
        model = checkpoint.model()
        self.model.load_state_dict(model.state_dict())
        self.model.generator.bit_generator.state = model.generator.bit_generator.state
        self.model.zero_grad()
        self.take_up(checkpoint)

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


def least_memory(config: GPTConfig) -> int:
    """Bytes that training takes in any case: what would take more than there is need not be begun.

    Weights, gradients and moments; what a pass takes; and the tokens of an update.
    """
    n_numbers = least_numbers(config)
    n_moments = 1 if config.optimiser == "muon" else 2
    n_tokens = config.batch_size * config.context_window
    tokens = 2 * 8 * n_tokens * config.accumulation_steps
    return (2 + n_moments) * 4 * n_numbers + memory_of_pass(config, n_tokens) + tokens


def memory_of_pass(config: GPTConfig, n_tokens: int) -> int:
    """Bytes that the forward pass over so many tokens leaves for the backward pass, and the logits.

    Of each block: its input, both norms' results, what attention gives and the sum with it; queries, keys and values,
    as they were and turned; and in the MLP what comes before and after the activation.
    """
    heads, key_heads = (n * config.channels_per_head for n in (config.n_heads, config.key_heads))
    attention = (heads + key_heads) * (2 if config.positions == "rotary" else 1) + key_heads
    block = 5 * config.embedding_dim + attention + config.mlp_width * (3 if config.is_gated else 2)
    logits = 2 * min(config.vocab_size, LOGITS_AT_ONCE // n_tokens)
    if config.recompute:
        kept = config.n_layers * config.embedding_dim + max(block, logits)
    else:
        kept = config.n_layers * block + logits
    return n_tokens * kept * (2 if config.precision in ("bfloat16", "float16") else 4)


def new_optimiser(config: GPTConfig) -> Optimiser:
    """The optimiser that a config asks for."""
    betas = config.beta1, config.beta2
    if config.optimiser == "muon":
        return Muon(
            config.max_learning_rate,
            betas,
            weight_decay=config.weight_decay,
            matrix_rate=config.matrix_rate,
            precision=config.precision,
        )
    return AdamW(config.max_learning_rate, betas, weight_decay=config.weight_decay)


def new_state(
    config: GPTConfig,
    tokens: Any,
    on_gpu: bool = False,
    model: GPT | None = None,
    processes: Processes = ALONE,
    shard_optimiser: bool = False,
) -> TrainingState:
    """A fresh optimiser and dataset (and model, unless given) for a config and a run of training tokens.

    Args:
        processes: those that train together; all make the same state.
        shard_optimiser: what the optimiser remembers of a parameter, one of them alone keeps.
    """
    model = model or GPT(config)
    model.recompute = config.recompute
    if on_gpu:
        model.to_gpu()
    dataset = CausalLMDataset(tokens, config.vocab_size, config.batch_size, config.context_window, config.seed)
    state = TrainingState(config, model, new_optimiser(config), dataset.batch().shuffle().to_tensor())
    state.processes = processes
    if shard_optimiser and processes.size > 1:
        shards = Shards(processes, model, partial(load_of, state.optimiser))
        state.optimiser = ShardedOptimiser(state.optimiser, shards)
    if not config.minutes or 0 < config.steps <= LEAST_STEPS:
        state.total_steps = config.steps
    return state


def _load(path: Path, processes: Processes) -> Checkpoint:
    """A checkpoint that rank 0 reads, for all."""
    checkpoint: Any = load_checkpoint(path) if processes.is_first else None
    return processes.agree(checkpoint)


def resume_state(
    path: Path, tokens: Any, on_gpu: bool = False, processes: Processes = ALONE, shard_optimiser: bool = False
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
    state.take_up(checkpoint)
    return state


def train_step(state: TrainingState) -> tuple[Any, Any]:
    """One update of a GPT: the three verbs with the batches, the learning rate and the limits of its config.

    Returns:
        the mean loss in nats a token, and the norm of the gradients before clipping: numbers, or of a model on a GPU
        0-d arrays there, for `read_steps`: nothing here waits for the device.

    Raises:
        NonFiniteError: a loss or a gradient is NaN or infinite; the weights are as before. (On a GPU they are too, but
            `read_steps` says so.)
    """
    config, model, optimiser, processes = state.config, state.model, state.optimiser, state.processes
    processes.at(f"update {state.step + 1}")
    loss_scaling = _loss_scaling(state)
    scale = None if loss_scaling is None else loss_scaling[0]
    try:
        with _own_batches(state) as batches:
            n_labels = [count_labels(labels) for _, labels in batches]
            grads = gradients(model, labelled(model, CrossEntropy()), batches, n_labels, scale, processes)
        grads = mean_over_processes(grads)
        optimiser.learning_rate = state.learning_rate(state.step + 1)
        norm = apply(model, optimiser, grads, config.max_gradient_norm, loss_scaling)
    except NonFiniteError as error:
        raise NonFiniteError(f"step {state.step + 1}: {error}") from None
    state.step += 1
    return grads.loss, norm


@contextmanager
def _own_batches(state: TrainingState) -> Iterator[list[tuple[Any, Any]]]:
    """The batches of an update that are this process's own, dropout masks included.

    Afterwards the dataset and the model's generator stand where they would if all had been computed here.
    """
    dataset, processes, n_batches = state.dataset, state.processes, state.config.accumulation_steps
    own = processes.share(n_batches)
    start, size = dataset.position, state.config.batch_size
    dataset.position = start + own.start * size
    batches = [next(dataset) for _ in own]
    dataset.position = start + n_batches * size
    if processes.size == 1 or not state.config.dropout:
        yield batches
        return
    generator = state.model.generator
    before = generator.bit_generator.state
    if state.draws is None:
        with no_grad():
            state.model(state.model.place(batches[0][0]))
        state.draws = Draws.between(before, generator.bit_generator.state)
    state.draws.skip(generator, before, own.start)
    try:
        yield batches
    finally:
        state.draws.skip(generator, before, n_batches)


def _loss_scaling(state: TrainingState) -> Array | None:
    """The state's numbers of loss scaling, brought to the device, where they are needed."""
    like = next(state.model.parameters())
    if not like.on_gpu or state.config.precision != "float16":
        return None
    state.loss_scaling = like.xp.asarray(state.loss_scaling)
    return state.loss_scaling


def read_steps(state: TrainingState, results: list[tuple[Any, Any]]) -> list[tuple[float, float]]:
    """What `train_step` returned for the latest updates, as numbers, by one read of the device.

    Raises:
        NonFiniteError: a loss or a norm is NaN or infinite (with float16, a norm that no smaller scale would help).
    """
    read, bad = look_at_steps(state, results)
    for step, reason in bad.items():
        raise NonFiniteError(f"step {step}: {reason}")
    return read


def look_at_steps(
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
