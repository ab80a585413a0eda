"""Distillation: training of a student model on the next-token probabilities of a teacher model.

`tricycle distill` uses this loss.

Source: Hinton, Vinyals and Dean 2015, "Distilling the knowledge in a neural network", section 2.

Shapes: B texts, T tokens, V of the vocabulary.
"""

from __future__ import annotations

from typing import Any

from tricycle import kernels
from tricycle.create_graph import unfused
from tricycle.devices import Array
from tricycle.functions import LogSoftmax
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.ops import as_floating
from tricycle.tensor import Tensor, record
from tricycle.training import BatchLossFn


def distillation_loss(student: GPT, teacher: GPT, temperature: float = 2.0, hard_weight: float = 0.1) -> BatchLossFn:
    """Return f(batch, factor) = factor (T^2 KL(teacher || student) + cross-entropy), weighted; ValueError on mismatch.

    The soft loss is temperature^2 KL(teacher || student), where both softmaxes are of logits divided by the
    temperature; the factor makes its gradients comparable to those of the hard loss, the cross-entropy of the labels.

    Args:
        student: the model to train.
        teacher: evaluated without gradients.
        temperature: above 0; a higher one emphasizes the teacher's small probabilities.
        hard_weight: the weight of the hard loss, 0 to 1; the soft loss has the weight 1 - hard_weight.

    Raises:
        ValueError: a value out of range, different vocabularies, or a teacher with a smaller context window.
    """
    if not temperature > 0 or not 0 <= hard_weight <= 1:
        got = f"{temperature!r} and {hard_weight!r}"
        raise ValueError(f"distillation_loss: expected a temperature above 0 and a hard_weight from 0 to 1, got {got}")
    sizes = [(model.config.vocab_size, model.config.context_window) for model in (student, teacher)]
    if sizes[0][0] != sizes[1][0] or sizes[0][1] > sizes[1][1]:
        expected = f"the teacher's vocabulary of {sizes[1][0]} and a context window of at most {sizes[1][1]}"
        raise ValueError(f"distillation_loss: expected a student with {expected}, got {sizes[0][0]} and {sizes[0][1]}")
    cross_entropy = CrossEntropy()

    def batch_loss(batch: Any, factor: Any) -> Tensor:
        tokens, labels = (student.place(part) for part in batch)
        with teacher.evaluating():
            target = teacher(tokens).array

        def mixed_loss(labels: Any, logits: Tensor, factor: Any) -> Tensor:
            soft = _soft_loss(logits, target, temperature, (1 - hard_weight) * factor)
            return soft + cross_entropy(labels, logits, hard_weight * factor) if hard_weight else soft

        return student.loss(tokens, labels, mixed_loss, factor)  # with the router loss of a mixture of experts

    return batch_loss


def _soft_loss(logits: Tensor, target: Array, temperature: float, factor: Any) -> Tensor:
    """Return factor * temperature^2 * KL(target || logits), a mean over tokens; both are logits (B, T, V)."""
    n_tokens = logits.array[..., 0].size
    log_q, log_p = (kernels.log_softmax(as_floating(x) / temperature) for x in (logits.array, target))
    p = logits.xp.exp(log_p)
    value = (p * (log_p - log_q)).sum() * (temperature**2 * factor / n_tokens)

    def back(grad: Array, needs_grad: Any) -> tuple[Array]:
        slope = (logits.xp.exp(log_q) - p) * (grad * (temperature * factor / n_tokens))
        return (slope.astype(logits.array.dtype),)

    return record(value, (logits,), back, "distillation")


@unfused("tricycle.finetuning.distillation._soft_loss")
def _soft_cross_entropy(node: Tensor, v: Any) -> Tensor:
    """Recompute the loss on Tensors, up to a constant (the teacher's entropy), with the same gradients."""
    log_q = LogSoftmax()(node.args[0] / v.temperature)
    return (log_q * -v.p).sum() * (v.temperature**2 * v.factor / v.n_tokens)
