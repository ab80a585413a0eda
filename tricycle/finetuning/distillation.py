"""Distillation: a student learns the probabilities that a teacher gives to all tokens, not the next token alone.

Source: Hinton, Vinyals and Dean 2015, "Distilling the knowledge in a neural network", section 2.

Shapes: B texts, T tokens, V of the vocabulary.
"""

from __future__ import annotations

from typing import Any

from tricycle import kernels
from tricycle.devices import Array
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.ops import as_floating
from tricycle.tensor import Tensor, record
from tricycle.training import BatchLossFn


def distillation_loss(student: GPT, teacher: GPT, temperature: float = 2.0, hard_weight: float = 0.1) -> BatchLossFn:
    """Return the loss of batches of tokens and labels: a mean of two losses over tokens, in nats.

    The soft loss is the square of the temperature times the Kullback-Leibler divergence of the student's softmax from
    the teacher's, both of logits divided by the temperature; the factor keeps its gradients at the size of the hard
    loss's, the cross-entropy of the labels.

    Args:
        teacher: not trained.
        temperature: above 0; a higher one brings out the teacher's small probabilities.
        hard_weight: the share of the hard loss, 0 to 1.

    Raises:
        ValueError: a number out of range; vocabularies that differ; a teacher that reads fewer tokens at once.
    """
    if not temperature > 0 or not 0 <= hard_weight <= 1:
        got = f"{temperature!r} and {hard_weight!r}"
        raise ValueError(f"distillation_loss: expected a temperature above 0 and a hard_weight from 0 to 1, got {got}")
    sizes = [(model.config.vocab_size, model.config.context_window) for model in (student, teacher)]
    if sizes[0][0] != sizes[1][0] or sizes[0][1] > sizes[1][1]:
        expected = f"a student with a vocabulary of {sizes[1][0]} and a context window of at most {sizes[1][1]}"
        raise ValueError(
            f"distillation_loss: expected {expected}, as the teacher has, got {sizes[0][0]}, {sizes[0][1]}"
        )
    cross_entropy = CrossEntropy()

    def batch_loss(batch: Any, factor: Any) -> Tensor:
        tokens, labels = (student.place(part) for part in batch)
        with teacher.evaluating():
            target = teacher(tokens).array
        logits = student(tokens)
        soft = _soft_loss(logits, target, temperature, (1 - hard_weight) * factor)
        return soft + cross_entropy(labels, logits, hard_weight * factor) if hard_weight else soft

    return batch_loss


def _soft_loss(logits: Tensor, target: Array, temperature: float, factor: Any) -> Tensor:
    """Return factor temperature^2 KL(target || logits), a mean over tokens; both are logits (B, T, V)."""
    n_tokens = logits.array[..., 0].size
    log_q, log_p = (kernels.log_softmax(as_floating(x) / temperature) for x in (logits.array, target))
    p = logits.xp.exp(log_p)
    value = (p * (log_p - log_q)).sum() * (temperature**2 * factor / n_tokens)

    def back(grad: Array, needs_grad: Any) -> tuple[Array]:
        slope = (logits.xp.exp(log_q) - p) * (grad * (temperature * factor / n_tokens))
        return (slope.astype(logits.array.dtype),)

    return record(value, (logits,), back, "distillation")
