"""Logit lens and tuned lens: the next-token predictions that the residual stream after each block contains.

The logit lens applies the last norm and the output head to the residual stream after a block. The tuned lens first maps
the stream by an affine translator of the block, fitted to predict the stream after the last block. The translators are
fitted by least squares, in closed form, and not by gradient descent on the KL divergence.

Sources: nostalgebraist 2020 (logit lens); Belrose et al. 2023, "Eliciting Latent Predictions from Transformers with the
Tuned Lens"; Din et al. 2023, "Jump to Conclusions" (least squares).

Shapes: N texts, T tokens, L layers, C channels, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tricycle.devices import to_cpu
from tricycle.models import GPT
from tricycle.pretrained.safetensors_weights import read_tensors, write_tensors
from tricycle.system.files import atomic_write
from tricycle.tensor import Tensor
from tricycle_lab.attribution import check_decoder, check_tokens
from tricycle_lab.recorded_run import record_run

MATRICES, BIASES = "matrices", "biases"  # names of the tensors in a file


class TunedLens(NamedTuple):
    """Affine translators of all blocks but the last one.

    Attributes:
        matrices: (L - 1, C, C), multiplied from the right.
        biases: (L - 1, C).
    """

    matrices: np.ndarray
    biases: np.ndarray

    def translate(self, layer: int, x: np.ndarray) -> np.ndarray:
        """Return the predicted last residual stream (..., C) of the stream x after a block; x after the last one."""
        return x if layer == len(self.matrices) else x @ self.matrices[layer] + self.biases[layer]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the translators to a safetensors file atomically, in float32."""
        tensors = {MATRICES: self.matrices, BIASES: self.biases}
        with atomic_write(path) as file:
            write_tensors(file, {name: array.shape for name, array in tensors.items()}, tensors.items(), "F32")

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: GPT) -> TunedLens:
        """Read the translators of a model from a safetensors file; ValueError if they do not fit or are not finite."""
        tensors, _ = read_tensors(Path(path))
        n_layers, width = len(model.blocks), model.config.embedding_dim
        expected = {MATRICES: (n_layers - 1, width, width), BIASES: (n_layers - 1, width)}
        got = {name: tensor.shape for name, tensor in tensors.items()}
        if got != expected:
            raise ValueError(f"{path}: expected tensors {expected}, got {got}")
        lens = cls(*(np.asarray(tensors[name].read(), np.float32) for name in expected))
        if not all(np.isfinite(array).all() for array in lens):
            raise ValueError(f"{path}: expected finite values, got infinity or NaN")
        return lens


class LensScores(NamedTuple):
    """Means over tokens for each layer, in nats, each (L,).

    Attributes:
        kl: the KL divergence from the model's predictions to those of the lens.
        cross_entropy: the loss of the predictions of the lens on the next token.
    """

    kl: np.ndarray
    cross_entropy: np.ndarray


def fit_lens(model: GPT, texts: Sequence[Sequence[int]], ridge: float = 0.01) -> TunedLens:
    """Fit by weighted ridge regression; return a tuned lens for each layer but the last; ValueError if `ridge` <= 0.

    A token's weight is 1 / the mean square of its last stream, because the last norm divides by it. The penalty draws
    translators to the identity, which is the logit lens.

    Args:
        texts: token ids of texts, each at most the context window.
        ridge: the penalty on each channel, relative to the channel's mean square.

    Raises:
        ValueError: no texts, ids out of range, or a penalty that is not above 0.
    """
    if not ridge > 0:
        raise ValueError(f"fit_lens: expected a ridge above 0, got {ridge}")
    check_decoder("fit_lens", model)
    n_layers, width = len(model.blocks), model.config.embedding_dim
    products = np.zeros((n_layers - 1, width + 1, width + 1))
    targets = np.zeros((n_layers - 1, width + 1, width))
    for streams in _streams("fit_lens", model, texts):
        last = streams[-1].astype(np.float64)
        scale = 1 / np.sqrt(np.mean(last**2, axis=-1, keepdims=True) + 1e-12)
        for layer, stream in enumerate(streams[:-1]):
            x = np.concatenate([stream, np.ones((len(stream), 1))], axis=1) * scale
            products[layer] += x.T @ x
            targets[layer] += x.T @ ((last - stream) * scale)
    matrices, biases = [], []
    for product, target in zip(products, targets):
        penalty = ridge * product.diagonal() + 1e-12
        penalty[-1] = 0  # the bias
        solution = np.linalg.solve(product + np.diag(penalty), target)
        matrices.append(np.eye(width) + solution[:-1])
        biases.append(solution[-1])
    shape = n_layers - 1, width
    return TunedLens(
        np.reshape(matrices, (*shape, width)).astype(np.float32), np.reshape(biases, shape).astype(np.float32)
    )


def evaluate_lens(model: GPT, texts: Sequence[Sequence[int]], lens: TunedLens | None = None) -> LensScores:
    """Return a lens's KL divergence from the model and cross-entropy, by layer (L,), in nats; ValueError for one token.

    Args:
        texts: token ids of texts with at least two tokens, not those that the lens was fitted on.
        lens: None for the logit lens.

    Raises:
        ValueError: no texts, a text with one token, or ids out of range.
    """
    check_decoder("evaluate_lens", model)
    totals = np.zeros((2, len(model.blocks)))
    n_tokens = 0
    for tokens, streams in zip(texts, _streams("evaluate_lens", model, texts)):
        if len(tokens) < 2:
            raise ValueError("evaluate_lens: expected texts of at least two tokens, got one")
        expected = lens_log_probabilities(model, streams[-1][:-1], len(streams) - 1)
        rows, next_tokens = np.arange(len(tokens) - 1), np.asarray(tokens[1:])
        for layer, stream in enumerate(streams):
            predicted = lens_log_probabilities(model, stream[:-1], layer, lens)
            totals[0, layer] += (np.exp(expected) * (expected - predicted)).sum(dtype=np.float64)
            totals[1, layer] -= predicted[rows, next_tokens].sum(dtype=np.float64)
        n_tokens += len(rows)
    return LensScores(*(totals / n_tokens))


def lens_log_probabilities(model: GPT, x: np.ndarray, layer: int, lens: TunedLens | None = None) -> np.ndarray:
    """Return the log-probabilities (T, V) that a lens predicts from the stream x (T, C) after a layer."""
    x = x if lens is None else lens.translate(layer, x)
    with model.evaluating():
        logits = to_cpu(model.logits(model.place(Tensor(np.asarray(x, np.float32), requires_grad=False))).array)
    logits = logits.astype(np.float32) - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def _streams(caller: str, model: GPT, texts: Sequence[Sequence[int]]) -> Iterator[list[np.ndarray]]:
    """Yield the residual streams (T, C) after each block, for each text; ValueError without texts."""
    if not len(texts):
        raise ValueError(f"{caller}: expected at least one text, got none")
    for tokens in texts:
        check_tokens(caller, tokens, model.config.vocab_size)
        yield [to_cpu(x[0]) for x in record_run(model, tokens).stream[1:]]
