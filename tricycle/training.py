"""The training loop, and the two parts of an update: `compute_gradients` and `apply_gradients`.

Programs pass a `Session` for checkpoints, evaluation, logging, distributed training and signals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from tricycle import devices
from tricycle.autograd import Mode, graph_mode
from tricycle.devices import array_module
from tricycle.layers import Layer, generators_in
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.optimisers import Optimiser, gradient_norm
from tricycle.tensor import Tensor

# batch_loss(batch, factor): the mean loss of the batch's labels times a factor, a number or a 0-d array on the device.
BatchLossFn = Callable[[Any, Any], Tensor]


class NonFiniteError(ArithmeticError):
    """A loss or gradient is NaN or infinite; the update changed no weights."""


class Gradients(NamedTuple):
    """The mean loss over all labels (a 0-d array on a GPU), and the number of labels (1 if unknown)."""

    loss: Any
    n_labels: Any


class Session:
    """Callbacks of the training loop. By default they do nothing; programs override what they need."""

    reducer: Callable[[Layer], Any] | None = None  # see `compute_gradients`
    loss_scale: Any = None

    def __init__(self, n_steps: float) -> None:
        self.step, self.n_steps = 0, n_steps  # updates made, and in total; the total may change during training

    def batches(self, source: Any) -> AbstractContextManager[tuple[Sequence[Any], Sequence[Any] | None]]:
        """Return a context manager giving an update's batches, and label counts or None; here the next batch, None."""
        return nullcontext(([next(source)], None))

    def replay(self, batch_loss: BatchLossFn, batches: Sequence[Any], n_labels: Any, max_norm: float) -> Any:
        """Make an update by replaying a recorded one, and return its loss and norm; by default do nothing: None."""

    def log(self, loss: Any, norm: Any) -> None:
        """Log the mean loss of an update and the gradient norm before clipping; by default do nothing."""

    def recover(self, error: NonFiniteError) -> None:
        """Return after a non-finite update, to skip it or after a rollback; raise the error, as by default."""
        raise error

    def should_stop(self) -> bool:
        """Return whether to end training before the last step; by default False."""
        return False

    def evaluate(self) -> None:
        """If due, save the model, and evaluate the held-out loss or generate samples; by default do nothing."""

    def save(self) -> None:
        """Save a checkpoint at the end of training; by default do nothing."""


def train(
    model: Layer,
    optimiser: Optimiser,
    batches: Iterator[Any],
    n_steps: int = 0,
    batch_loss: BatchLossFn | None = None,
    schedule: Callable[[int], float] | None = None,
    max_norm: float = 0.0,
    session: Session | None = None,
) -> bool:
    """Make `n_steps` updates, or a session's updates, evaluations and saves; return False if the session stopped.

    Args:
        batches: an iterator of arguments of `batch_loss`; a session may draw several for an update.
        n_steps: the number of updates, if there is no session.
        batch_loss: by default the cross-entropy of batches of inputs and labels.
        schedule: maps the number of an update (1, 2, ...) to its learning rate; replaces the optimizer's own, if any.
        max_norm: see `apply_gradients`.

    Raises:
        NonFiniteError: a loss or a gradient is NaN or infinite, and the session does not recover.
    """
    batch_loss, session = batch_loss or supervised_loss(model, CrossEntropy()), session or Session(n_steps)
    while True:
        try:
            session.evaluate()
            if session.should_stop() or session.step >= session.n_steps:
                session.save()
                return session.step >= session.n_steps
            if schedule is not None:
                optimiser.schedule, optimiser.learning_rate = None, schedule(session.step + 1)
            with session.batches(batches) as (inputs, n_labels):
                result = session.replay(batch_loss, inputs, n_labels, max_norm)
                if result is None:
                    grads = compute_gradients(model, batch_loss, inputs, n_labels, session.reducer, session.loss_scale)
                    result = grads.loss, apply_gradients(model, optimiser, grads, max_norm, session.loss_scale)
            session.step += 1
            session.log(*result)
        except NonFiniteError as error:
            session.recover(error)


def compute_gradients(
    model: Layer,
    batch_loss: BatchLossFn,
    batches: Sequence[Any],
    n_labels: Sequence[Any] | None = None,
    reducer: Callable[[Layer], Any] | None = None,
    loss_scale: Any = None,
) -> Gradients:
    """Add the mean loss's gradients to `grad`, return loss and label count; clear `grad` on NonFiniteError (CPU only).

    They are added to existing gradients (gradient accumulation); with several processes, to rank 0's, for all.

    Args:
        n_labels: the number of labels of each batch; required for several batches.
        reducer: for distributed training, `tricycle.distributed.processes.ProcessGroup.reducer`.
        loss_scale: for float16, `tricycle.training_state.LossScale`, also an argument of `apply_gradients`.

    Raises:
        ValueError: no batch, no labels, or no `n_labels` for several batches.
        NonFiniteError: a loss is NaN or infinite; the gradients are cleared. (On a GPU, the loss is not read.)
    """
    n_labels = [1] if n_labels is None and len(batches) == 1 else n_labels
    if n_labels is None or len(n_labels) != len(batches):
        got = f"{len(batches)} and {'none' if n_labels is None else len(n_labels)}"
        raise ValueError(f"compute_gradients: expected a batch or more, and n_labels for each of several, got {got}")
    counts = [int_unless_on_gpu(n) for n in n_labels]
    pending: Any = None if reducer is None else reducer(model)
    total = sum(counts) if pending is None else pending.total_labels(sum(counts))
    mean, problem = 0.0, ""
    if isinstance(total, int) and total == 0:
        raise ValueError("compute_gradients: expected at least one label to count, got none")
    # overflow is detected below; activations that no gradient needs are freed
    with np.errstate(all="ignore"), graph_mode(Mode(run_block=Layer.run_and_free)):
        for index, (batch, n) in enumerate(zip(batches, counts)):
            if isinstance(n, int) and n == 0:
                continue  # a batch without labels does not contribute
            if pending is not None:
                pending.start_batch()
            share = n / total
            compute_loss = partial(batch_loss, batch, share if loss_scale is None else share * loss_scale.scale)
            loss = compute_loss()
            value: Any = loss.array if loss.on_gpu else float(loss)
            mean = mean + value
            if isinstance(value, float) and not math.isfinite(value):
                problem = f"the loss is {value}; the first non-finite tensor is {_first_nonfinite(compute_loss, model)}"
                model.zero_grad()
                break
            is_last = pending is not None and index == len(batches) - 1
            loss.backward(on_input=pending.on_gradient_complete if is_last else None)
    mean = mean if loss_scale is None else mean / loss_scale.scale
    if pending is not None:
        mean, problem = pending.finish(mean, problem)
    if problem:
        raise NonFiniteError(problem)
    return Gradients(mean, total)


def _first_nonfinite(compute_loss: Callable[[], Tensor], model: Layer) -> str:
    """Recompute the loss; describe the first parameter, else result, that is not finite, or say "none but the loss"."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    problems = [f"the parameter {name}" for parameter, name in names.items() if not _all_finite(parameter)]
    places = count()

    def check(tensor: Tensor) -> None:
        place = next(places)
        if not problems and not _all_finite(tensor):
            parameters = ", ".join(names[arg] for arg in tensor.args if arg in names)
            title = f"{tensor.name} with {parameters}" if parameters else tensor.name
            problems.append(f"the result of {title} (operation {place}, shape {tensor.shape})")

    states = [(generator, generator.bit_generator.state) for generator in generators_in(model)]
    with graph_mode(Mode(on_record=check)):
        compute_loss()
    for generator, state in states:
        generator.bit_generator.state = state
    return problems[0] if problems else "none but the loss"


def _all_finite(tensor: Tensor) -> bool:
    return bool(tensor.xp.isfinite(tensor.array).all())


@np.errstate(all="ignore")
def apply_gradients(
    model: Layer, optimiser: Optimiser, grads: Gradients, max_norm: float = 0.0, loss_scale: Any = None
) -> Any:
    """Clip gradients, update, clear them; return the norm; if not finite only clear, and on a CPU NonFiniteError.

    Returns the norm before clipping: a number, or for a model on a GPU an unread 0-d array, without synchronization.

    Raises:
        NonFiniteError: a gradient is NaN or infinite; the weights are unchanged. (On a GPU, they are without an error.)
    """
    scale, n_skipped = (1.0, 0) if loss_scale is None else (loss_scale.scale, loss_scale.n_skipped)
    norm = gradient_norm(model) / scale
    if isinstance(norm, float):
        if not math.isfinite(norm):
            bad = [name for name, p in model.named_parameters() if p.grad is not None and not _all_finite(p.grad)]
            model.zero_grad()
            first = bad[0] if bad else "none: their squares are too large"
            raise NonFiniteError(f"the norm of the gradients is {norm}; the first bad one is of {first}")
        is_finite, factor = True, (min(1.0, max_norm / norm) if max_norm and norm else 1.0) / scale
    else:
        xp = array_module(norm)
        is_finite = xp.isfinite(norm + grads.loss)
        clip = max_norm / xp.maximum(norm, max_norm) if max_norm else 1.0
        factor = xp.where(is_finite, clip / scale, 0)  # with 0 the optimizer changes nothing
    optimiser.update(model.named_parameters(), factor, n_skipped)
    model.zero_grad()
    if loss_scale is not None:
        loss_scale.adapt(is_finite)
    return norm


def train_on_batch(
    model: Layer, optimiser: Optimiser, batch_loss: BatchLossFn, batch: Any, max_norm: float = 0.0
) -> Any:
    """Make one update from one batch; return the mean loss; NonFiniteError, without update, if it is not finite."""
    grads = compute_gradients(model, batch_loss, [batch])
    apply_gradients(model, optimiser, grads, max_norm)
    return grads.loss


def supervised_loss(model: Layer, loss_fn: CrossEntropy) -> BatchLossFn:
    """Return a function (batch, factor) -> factor * loss of batches (inputs, labels); for a GPT it calls `GPT.loss`."""

    def batch_loss(batch: Any, factor: Any) -> Tensor:
        inputs, labels = batch
        if isinstance(model, GPT):
            return model.loss(model.place(inputs), model.place(labels), loss_fn, factor)
        return loss_fn(model.place(labels), model(model.place(inputs)), factor)

    return batch_loss


def int_unless_on_gpu(count: Any) -> Any:
    """Convert a count to an int, except a 0-d array on a GPU, which reading would synchronize."""
    return count if devices.is_array(count) and devices.on_gpu(count) else int(count)
