"""Sparse autoencoders: the residual stream of a model as sums of a few out of many learned directions (features).

Sources: Bricken et al. 2023, "Towards Monosemanticity"; Gao et al. 2024, "Scaling and evaluating sparse autoencoders"
(TopK, loss on dead features); Rajamanoharan et al. 2024, "Jumping Ahead" (JumpReLU).

Shapes: R rows (tokens), C channels, F features.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from tricycle.devices import to_cpu
from tricycle.extra_ops import where
from tricycle.layers import Dense, Layer
from tricycle.models import GPT
from tricycle.ops import check_positive
from tricycle.optimisers import AdamW
from tricycle.parameter import Parameter
from tricycle.pretrained.safetensors_weights import read_tensors, write_tensors
from tricycle.system.files import atomic_write
from tricycle.tensor import Tensor
from tricycle_lab.attribution import check_decoder, check_tokens
from tricycle_lab.recorded_run import record_run, run_blocks

Kind = Literal["topk", "jumprelu"]
BANDWIDTH = 0.03  # of the kernel that estimates gradients of thresholds; activations are of the order of 1
DEAD_AFTER = 50  # steps without activation, after which TopK trains a feature on the remaining error
MAX_RELATIVE_NORM = 8  # of a token's residual stream, relative to the median of its text
DEAD_FACTOR = 1 / 32  # of the loss of dead features


class SparseAutoencoder(Layer):
    """An autoencoder with more features than channels, of which a few are active in each row.

    Args:
        width: C. n_features: F.
        k: the number of active features of a row with "topk".
        kind: "topk" keeps the k largest activations; "jumprelu" those above a learned threshold of each feature.
        mean, scale: subtracted from rows, (C,), and then multiplied with them, so that their mean square is 1.
        seed: of the initial weights.
    """

    def __init__(
        self,
        width: int,
        n_features: int,
        k: int = 16,
        kind: Kind = "topk",
        mean: np.ndarray | None = None,
        scale: float = 1.0,
        seed: int = 0,
    ) -> None:
        check_positive("SparseAutoencoder", width=width, n_features=n_features, k=k)
        if kind not in ("topk", "jumprelu") or (kind == "topk" and k > n_features):
            expected = f"topk or jumprelu, and k of at most {n_features}"
            raise ValueError(f"SparseAutoencoder: expected {expected}, got {kind!r} and {k}")
        self.k, self.kind, self.scale = k, kind, scale
        self.mean = np.zeros(width, np.float32) if mean is None else np.asarray(mean, np.float32)
        directions = np.random.default_rng(seed).standard_normal((n_features, width)).astype(np.float32)
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        self.encoder, self.decoder = Dense(width, n_features), Dense(n_features, width)
        self.encoder.weights.array[...], self.decoder.weights.array[...] = directions.T, directions
        self.log_thresholds = Parameter(np.full(n_features, np.log(0.1), np.float32), "bias")

    def normalize(self, x: np.ndarray) -> np.ndarray:
        """Return rows (R, C) without the mean, and with the scale of the autoencoder."""
        return np.asarray((x - self.mean) * self.scale, np.float32)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return activations (R, F) of normalized rows (R, C), and their values before sparsity."""
        before = self.encoder(x)
        if self.kind == "topk":
            threshold = np.partition(before.array, -self.k, axis=1)[:, -self.k, None]
            return where((before.array >= threshold) & (before.array > 0), before, 0.0), before
        thresholds = np.exp(self.log_thresholds.array)
        active = where(before.array > thresholds, before, 0.0)
        return active + self._through_threshold(before.array, -thresholds), before

    def count_active(self, before: Tensor) -> Tensor:
        """Return the mean number of active features of a row, with a gradient to the thresholds of "jumprelu"."""
        thresholds = np.exp(self.log_thresholds.array)
        count = Tensor(np.asarray(before.array > thresholds, np.float32), requires_grad=False)
        return (count + self._through_threshold(before.array, -1.0)).sum() / len(before.array)

    def _through_threshold(self, before: np.ndarray, slope: np.ndarray | float) -> Tensor:
        """Return zeros whose gradient to the thresholds is `slope` times the density of values at the threshold."""
        thresholds = np.exp(self.log_thresholds.array)
        density = (abs(before - thresholds) < BANDWIDTH / 2) / BANDWIDTH
        change = self.log_thresholds - self.log_thresholds.array  # 0, with a gradient of 1
        return change * np.asarray(slope * density * thresholds, np.float32)

    def forward(self, x: Tensor) -> Tensor:
        """Return reconstructions (R, C) of normalized rows."""
        return self.decoder(self.encode(x)[0])

    def reconstruct(self, x: np.ndarray) -> np.ndarray:
        """Return reconstructions of rows (R, C) of the residual stream, in its own scale."""
        with self.evaluating():
            return to_cpu(self(Tensor(self.normalize(x), requires_grad=False)).array) / self.scale + self.mean

    def save(self, path: str | os.PathLike[str], layer: int) -> None:
        """Write the weights, with mean and scale, to a safetensors file atomically, in float32.

        Args:
            layer: the index of the block whose residual stream the autoencoder describes.
        """
        tensors = {name: parameter.array for name, parameter in self.named_parameters()}
        tensors |= {"mean": self.mean, "scale": np.full(1, self.scale, np.float32)}
        shapes = {name: array.shape for name, array in tensors.items()}
        with atomic_write(path) as file:
            write_tensors(
                file, shapes, tensors.items(), "F32", {"kind": self.kind, "k": str(self.k), "layer": str(layer)}
            )

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: GPT) -> tuple[SparseAutoencoder, int]:
        """Read an autoencoder of a model, and the index of its block; ValueError if it does not fit or is not finite.

        Raises:
            FileNotFoundError: no such file.
            ValueError: a damaged file, or tensors and metadata that no `save` of an autoencoder of this model writes.
        """
        tensors, metadata = read_tensors(Path(path))
        width, n_layers = model.config.embedding_dim, len(model.blocks)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        n_features = math.prod(shapes.get("log_thresholds", ()))
        weights = {"encoder.weights": (width, n_features), "decoder.weights": (n_features, width)}
        biases = {"encoder.bias": (n_features,), "decoder.bias": (width,), "log_thresholds": (n_features,)}
        expected = {**weights, **biases, "mean": (width,), "scale": (1,)}
        k, layer = (metadata.get(name, "") for name in ("k", "layer"))
        if shapes != expected or not (k.isdecimal() and layer.isdecimal() and int(layer) < n_layers):
            wanted = f"an autoencoder of {width} channels after one of {n_layers} blocks"
            raise ValueError(
                f"{path}: expected {wanted}, with k and layer in its metadata, got {shapes} {metadata}"[:500]
            )
        arrays = {name: np.asarray(tensor.read(), np.float32) for name, tensor in tensors.items()}
        if not all(np.isfinite(array).all() for array in arrays.values()):
            raise ValueError(f"{path}: expected finite values, got infinity or NaN")
        kind: Any = metadata.get("kind")
        autoencoder = cls(width, n_features, int(k), kind, arrays.pop("mean"), float(arrays.pop("scale")[0]))
        for name, parameter in autoencoder.named_parameters():
            parameter.array[...] = arrays[name]
        return autoencoder, int(layer)

    def activations(self, x: np.ndarray) -> np.ndarray:
        """Return the activations of the features (R, F) of rows (R, C) of the residual stream."""
        with self.evaluating():
            return to_cpu(self.encode(Tensor(self.normalize(x), requires_grad=False))[0].array)


@dataclass(frozen=True)
class TrainingOptions:
    """Options of `train_autoencoder`.

    Attributes:
        n_steps: optimizer steps.
        batch_size: rows in a step.
        learning_rate: of Adam; it falls to 0 in the last fifth of the steps.
        sparsity: the factor of the number of active features in the loss of "jumprelu".
        seed: of the initial weights and of the order of rows.
    """

    n_steps: int = 1000
    batch_size: int = 256
    learning_rate: float = 2e-3
    sparsity: float = 0.05
    seed: int = 0


def train_autoencoder(
    rows: np.ndarray, n_features: int, k: int = 16, kind: Kind = "topk", options: TrainingOptions | None = None
) -> SparseAutoencoder:
    """Train a sparse autoencoder on rows (R, C) by AdamW and return it; ValueError if not finite, or under 2 rows.

    The loss is the mean squared error, relative to the variance of the rows. With "topk", features that were not active
    for 50 steps reconstruct the remaining error, which revives them; with "jumprelu", active features are counted.

    Raises:
        ValueError: rows that are no finite matrix with at least two rows, or options out of range.
    """
    options = options or TrainingOptions()
    check_positive("train_autoencoder", n_steps=options.n_steps, batch_size=options.batch_size)
    if not (options.learning_rate > 0 and options.sparsity >= 0):
        got = f"{options.learning_rate} and {options.sparsity}"
        raise ValueError(f"train_autoencoder: expected a learning rate above 0 and sparsity of at least 0, got {got}")
    if rows.ndim != 2 or len(rows) < 2 or not np.isfinite(rows).all():
        raise ValueError(f"train_autoencoder: expected a finite matrix of at least 2 rows, got shape {rows.shape}")
    mean = rows.mean(axis=0, dtype=np.float64)
    scale = 1 / np.sqrt(np.mean((rows - mean) ** 2, dtype=np.float64) + 1e-12)
    # Rows of mean square 1 have norms of sqrt(C), which makes activations large; with norms of 1 they are at most 1.
    scale /= np.sqrt(rows.shape[1])
    autoencoder = SparseAutoencoder(rows.shape[1], n_features, k, kind, mean, float(scale), options.seed)
    generator = np.random.default_rng(options.seed)
    fall = max(1, options.n_steps // 5)
    schedule = lambda step: options.learning_rate * min(1.0, (options.n_steps - step + 1) / fall)
    optimiser = AdamW(schedule, weight_decay=0.0)
    last_active = np.zeros(n_features, int)
    for step in range(options.n_steps):
        x = autoencoder.normalize(rows[generator.integers(0, len(rows), options.batch_size)])
        for parameter in autoencoder.parameters():
            parameter.grad = None
        loss, active = _loss(autoencoder, x, step - last_active > DEAD_AFTER, options.sparsity)
        last_active[active] = step
        loss.backward()
        optimiser.update(autoencoder.named_parameters())
        directions = autoencoder.decoder.weights.array
        directions /= np.linalg.norm(directions, axis=1, keepdims=True) + 1e-12
    return autoencoder


def _loss(
    autoencoder: SparseAutoencoder, x: np.ndarray, dead: np.ndarray, sparsity: float
) -> tuple[Tensor, np.ndarray]:
    """Return the loss of normalized rows x, and booleans (F,) of the features that are active in any row."""
    active, before = autoencoder.encode(Tensor(x, requires_grad=False))
    error = autoencoder.decoder(active) - x
    loss = (error * error).sum() / len(x)
    if autoencoder.kind == "jumprelu":
        loss = loss + autoencoder.count_active(before) * sparsity
    elif dead.any():
        candidates = np.where(dead, before.array, -np.inf)
        n = min(int(dead.sum()), max(autoencoder.k, x.shape[1] // 2))
        chosen = dead & (candidates >= np.partition(candidates, -n, axis=1)[:, -n, None])
        revived = where(chosen, before, 0.0) @ autoencoder.decoder.weights + error.array
        loss = loss + (revived * revived).sum() * (DEAD_FACTOR / len(x))
    return loss, (active.array > 0).any(axis=0)


# -------------------------------------------------------------------- a model's stream
def typical_tokens(stream: np.ndarray) -> np.ndarray:
    """Return the indices of a text's tokens, without the first and those of over 8 times the median norm, in `stream`.

    The first token and others with more than 8 times the median norm (attention sinks) are left out: their massive
    activations would be most of the variance.
    """
    norms = np.linalg.norm(stream, axis=-1)
    is_typical = norms <= MAX_RELATIVE_NORM * np.median(norms)
    is_typical[0] = False
    return np.flatnonzero(is_typical)


def collect_stream(model: GPT, texts: Sequence[Sequence[int]], layer: int) -> np.ndarray:
    """Return the residual stream after a block at the typical tokens of texts (see `typical_tokens`), (R, C).

    Raises:
        ValueError: no texts, texts of fewer than two tokens, ids out of range, or no such block.
    """
    _check("collect_stream", model, texts, layer)
    streams = (to_cpu(record_run(model, tokens).stream[layer + 1][0]) for tokens in texts)
    return np.concatenate([stream[typical_tokens(stream)] for stream in streams])


class AutoencoderScores(NamedTuple):
    """How well an autoencoder describes the residual stream of texts.

    Attributes:
        n_dead: the number of features that are active at no token.
        n_active: the mean number of active features of a token.
        explained: the fraction of the variance of the stream that the reconstruction explains.
        loss: of the model, in nats per token.
        loss_reconstructed: of the model with the reconstructions in place of the stream of typical tokens.
        loss_ablated: of the model with the mean of the stream in its place.
    """

    n_dead: int
    n_active: float
    explained: float
    loss: float
    loss_reconstructed: float
    loss_ablated: float

    @property
    def recovered(self) -> float:
        """Return the fraction of the loss between the ablated and the intact model that the reconstructions recover."""
        return (self.loss_ablated - self.loss_reconstructed) / (self.loss_ablated - self.loss)


def score_autoencoder(
    model: GPT, autoencoder: SparseAutoencoder, texts: Sequence[Sequence[int]], layer: int
) -> AutoencoderScores:
    """Return an autoencoder's scores on unseen texts: dead and active features, explained variance, three losses.

    Raises:
        ValueError: no texts, texts of fewer than two tokens, ids out of range, or no such block.
    """
    _check("score_autoencoder", model, texts, layer)
    counts = np.zeros(autoencoder.encoder.to_size, int)
    losses, errors, variances, n_rows, n_tokens = np.zeros(3), 0.0, 0.0, 0, 0
    for tokens in texts:
        recording = record_run(model, tokens)
        stream = recording.stream[layer + 1]
        typical = typical_tokens(to_cpu(stream[0]))
        rows = to_cpu(stream[0])[typical]
        counts += (autoencoder.activations(rows) > 0).sum(axis=0)
        reconstructed = autoencoder.reconstruct(rows)
        errors += ((rows - reconstructed) ** 2).sum(dtype=np.float64)
        variances += ((rows - autoencoder.mean) ** 2).sum(dtype=np.float64)
        for i, replacement in enumerate((rows, reconstructed, np.broadcast_to(autoencoder.mean, rows.shape))):
            x = stream.copy()
            x[0, typical] = model.place(Tensor(np.array(replacement, np.float32), requires_grad=False)).array
            losses[i] += _total_loss(model, x, tokens, layer, recording)
        n_rows += len(rows)
        n_tokens += len(tokens) - 1
    loss, loss_reconstructed, loss_ablated = losses / n_tokens
    n_dead, n_active = int((counts == 0).sum()), counts.sum() / max(1, n_rows)
    return AutoencoderScores(n_dead, n_active, 1 - errors / variances, loss, loss_reconstructed, loss_ablated)


def _total_loss(model: GPT, x: np.ndarray, tokens: Sequence[int], layer: int, recording: Any) -> float:
    """Return the sum of the losses of all tokens but the first, for a stream x (1, T, C) after a block."""
    with model.evaluating():
        logits = to_cpu(model.logits(Tensor(run_blocks(model, layer + 1, x, recording)[0, :-1], False)).array)
    logits = logits.astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    chosen = logits[np.arange(len(tokens) - 1), np.asarray(tokens[1:])]
    return float((np.log(np.exp(logits).sum(axis=-1)) - chosen).sum())


class Occurrence(NamedTuple):
    """An activation of a feature: its value, and the text and position of its token."""

    value: float
    text: int
    position: int


def strongest_occurrences(
    model: GPT, autoencoder: SparseAutoencoder, texts: Sequence[Sequence[int]], layer: int, n: int = 5
) -> tuple[np.ndarray, list[list[Occurrence]]]:
    """Return (fraction of tokens that activate each feature, (F,); its n strongest tokens, at most one per text).

    Raises:
        ValueError: no texts, ids out of range, or no such block.
    """
    _check("strongest_occurrences", model, texts, layer)
    found: list[list[Occurrence]] = [[] for _ in range(autoencoder.encoder.to_size)]
    counts, n_rows = np.zeros(len(found)), 0
    for text, tokens in enumerate(texts):
        stream = to_cpu(record_run(model, tokens).stream[layer + 1][0])
        typical = typical_tokens(stream)
        active = autoencoder.activations(stream[typical])
        counts += (active > 0).sum(axis=0)
        n_rows += len(active)
        for feature in np.flatnonzero(active.max(axis=0, initial=0) > 0):
            row = int(active[:, feature].argmax())  # at most one token of each text, so that the texts differ
            found[feature].append(Occurrence(float(active[row, feature]), text, int(typical[row])))
            found[feature].sort(key=lambda occurrence: -occurrence.value)
            del found[feature][n:]
    return counts / max(1, n_rows), found


def _check(caller: str, model: GPT, texts: Sequence[Sequence[int]], layer: int) -> None:
    """Raise a ValueError unless the model is a decoder, each text has two tokens or more, and the block exists."""
    check_decoder(caller, model)
    for tokens in texts:
        check_tokens(caller, tokens, model.config.vocab_size)
    if not len(texts) or min(map(len, texts)) < 2:
        raise ValueError(f"{caller}: expected at least one text, each of two tokens or more")
    if not 0 <= layer < len(model.blocks):
        raise ValueError(f"{caller}: expected a layer from 0 to {len(model.blocks) - 1}, got {layer}")
