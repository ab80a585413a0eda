"""Training of any model: the loop, and the two verbs of an update, `compute_gradients` and `apply_gradients`.

    train(model, optimiser, batches, n_steps=1000)

Programs pass a `Session` for what surrounds the updates: checkpoints, evaluation, logs, several processes, signals.
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

# From a batch and a factor to the mean loss over the batch's labels, multiplied by the factor: a number, or a 0-d array
# on the model's device. `CrossEntropy` takes it as its third argument.
BatchLossFn = Callable[[Any, Any], Tensor]


class NonFiniteError(ArithmeticError):
    """Training met NaN or infinity. The update that met it changed no weights."""


class Gradients(NamedTuple):
    """The mean loss over all labels (on a GPU, a 0-d array), and their number (1 where it is not known)."""

    loss: Any
    n_labels: Any


class Session:
    """What surrounds the updates of a training: here, nothing. Programs override what they need."""

    reducer: Callable[[Layer], Any] | None = None  # as of `compute_gradients`
    loss_scale: Any = None

    def __init__(self, n_steps: float) -> None:
        self.step, self.n_steps = 0, n_steps  # updates made, and to make; the latter may change on the way

    def batches(self, source: Any) -> AbstractContextManager[tuple[Sequence[Any], Sequence[Any] | None]]:
        """Draw the batches of an update, and how many labels each has."""
        return nullcontext(([next(source)], None))

    def log(self, loss: Any, norm: Any) -> None:
        """Note what an update gave: the mean loss, and the norm of the gradients before clipping."""

    def recover(self, error: NonFiniteError) -> None:
        """Leave out an update that met NaN, or go back to a checkpoint; else raise the error."""
        raise error

    def should_stop(self) -> bool:
        """Return whether training is to end before its last step."""
        return False

    def should_evaluate(self) -> bool:
        """Return whether the model is to be evaluated now, and saved before."""
        return False

    def evaluate(self) -> None:
        """Measure the loss on held-out data, or draw samples."""

    def save(self) -> None:
        """Save a checkpoint."""


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
    """Train a model; return whether all steps were made, and the session did not end training before.

    Args:
        batches: what the session draws from; without one, what `batch_loss` takes.
        n_steps: updates to make, where there is no session.
        batch_loss: the cross-entropy of pairs of inputs and labels, unless given.
        schedule: from the number of an update (1, 2, ...) to its learning rate; the optimiser's own unless given.
        max_norm: as of `apply_gradients`.

    Raises:
        NonFiniteError: a loss or a gradient is NaN or infinite, and the session does not recover.
    """
    batch_loss, session = batch_loss or supervised_loss(model, CrossEntropy()), session or Session(n_steps)
    while True:
        try:
            if session.should_evaluate():
                session.save()
                session.evaluate()
            if session.should_stop() or session.step >= session.n_steps:
                session.save()
                return session.step >= session.n_steps
            with session.batches(batches) as (inputs, n_labels):
                grads = compute_gradients(model, batch_loss, inputs, n_labels, session.reducer, session.loss_scale)
            if schedule is not None:
                optimiser.learning_rate = schedule(session.step + 1)
            norm = apply_gradients(model, optimiser, grads, max_norm, session.loss_scale)
            session.step += 1
            session.log(grads.loss, norm)
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
    """Compute the gradients of batches, one after another, as of one batch of them all: each label counts the same.

    They are added to those that are there (with several processes, to rank 0's, and all get the same).

    Args:
        n_labels: of how many labels each batch's loss is the mean; needed for several batches.
        reducer: sums gradients over processes, `tricycle.distributed.processes.ProcessGroup.reducer`.
        loss_scale: for float16, `tricycle.training_state.LossScale`; `apply_gradients` needs the same.

    Raises:
        ValueError: no batch, several and no number of labels for each, or no label at all.
        NonFiniteError: a loss is NaN or infinite; there are no gradients then. (On a GPU no loss is read.)
    """
    n_labels = [1] if n_labels is None and len(batches) == 1 else n_labels
    if n_labels is None or len(n_labels) != len(batches):
        got = f"{len(batches)} and {'none' if n_labels is None else len(n_labels)}"
        raise ValueError(f"compute_gradients: expected a batch or more, and n_labels for each of several, got {got}")
    counts = [int_unless_on_gpu(n) for n in n_labels]
    pending = None if reducer is None else reducer(model)
    total = sum(counts) if pending is None else pending.total_labels(sum(counts))
    mean, problem = 0.0, ""
    if isinstance(total, int) and total == 0:
        raise ValueError("compute_gradients: expected at least one label to count, got none")
    # what overflows is looked for, and named; activations that no gradient needs are freed
    with np.errstate(all="ignore"), graph_mode(Mode(run_block=Layer.run_and_free)):
        for index, (batch, n) in enumerate(zip(batches, counts)):
            if isinstance(n, int) and n == 0:
                continue  # a mean over nothing, which would count nothing
            if pending is not None:
                pending.start_batch()
            share = n / total
            compute_loss = partial(batch_loss, batch, share if loss_scale is None else share * loss_scale.scale)
            loss = compute_loss()
            value: Any = loss.array if loss.on_gpu else float(loss)
            mean = mean + value
            if isinstance(value, float) and not math.isfinite(value):
                problem = f"the loss is {value}; the first bad tensor is {_first_bad(compute_loss, model)}"
                model.zero_grad()
                break
            loss.backward(
                on_input=pending.on_gradient_complete if pending is not None and index == len(batches) - 1 else None
            )
    mean = mean if loss_scale is None else mean / loss_scale.scale
    if pending is not None:
        mean, problem = pending.finish(mean, problem)
    if problem:
        raise NonFiniteError(problem)
    return Gradients(mean, total)


def _first_bad(compute_loss: Callable[[], Tensor], model: Layer) -> str:
    """Name the first Tensor, in the order of computation, that is not finite: the loss is computed again for it."""
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
    """Clip the gradients to a common norm (0 leaves them), update the parameters, and clear the gradients.

    Returns the norm before: a number, or of a model on a GPU a 0-d array there. Nothing here waits for the device.

    Raises:
        NonFiniteError: a gradient is NaN or infinite; the weights are as before. (On a GPU, too, but without error.)
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
        factor = xp.where(is_finite, clip / scale, 0)  # by 0 the optimiser changes nothing
    optimiser.update(model.named_parameters(), factor, n_skipped)
    model.zero_grad()
    if loss_scale is not None:
        loss_scale.adapt(is_finite)
    return norm


def train_on_batch(
    model: Layer, optimiser: Optimiser, batch_loss: BatchLossFn, batch: Any, max_norm: float = 0.0
) -> Any:
    """Make one update from one batch; return the mean loss. Raises like `compute_gradients` and `apply_gradients`."""
    grads = compute_gradients(model, batch_loss, [batch])
    apply_gradients(model, optimiser, grads, max_norm)
    return grads.loss


def supervised_loss(model: Layer, loss_fn: CrossEntropy) -> BatchLossFn:
    """Return the loss of batches that are pairs of inputs and labels (whole numbers); a GPT's by `GPT.loss`."""

    def batch_loss(batch: Any, factor: Any) -> Tensor:
        inputs, labels = batch
        if isinstance(model, GPT):
            return model.loss(model.place(inputs), model.place(labels), loss_fn, factor)
        return loss_fn(model.place(labels), model(model.place(inputs)), factor)

    return batch_loss


def int_unless_on_gpu(count: Any) -> Any:
    """Return a count as an int; a 0-d array on a GPU stays there, for to read it would wait for the device."""
    return count if devices.is_array(count) and devices.on_gpu(count) else int(count)
