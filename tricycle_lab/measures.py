"""Measures of a decoder as tables with a row for each layer or head: for `tricycle inspect` and the model viewer.

Slow measures yield a table repeatedly under the same title, with NaN in the rows that are not computed yet.

Shapes: T tokens, L layers, H heads, C channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tricycle_lab.attribution import LogitAttribution
from tricycle_lab.circuits import mean_head_effects, measure_faithfulness, rank_heads, task_prompts
from tricycle_lab.head_scores import score_heads
from tricycle_lab.lens import TunedLens, lens_log_probabilities
from tricycle_lab.linear_probe import collect_activations, new_classifier, probe_accuracy
from tricycle_lab.look.inspectable import InspectableStack
from tricycle_lab.patching import Prompts, estimate_patches, iterate_patches
from tricycle_lab.path_patching import patch_paths
from tricycle_lab.sparse_autoencoder import SparseAutoencoder, typical_tokens

TITLES = {
    "stream": "residual stream after each layer",
    "attention": "attention layers",
    "mlp": "MLPs",
    "heads": "heads",
    "heads_by_position": "heads by position",
}
N_FEATURES = 20  # of an autoencoder, in a table


class Table(NamedTuple):
    """Values of rows and columns, with labels.

    Attributes:
        title: what the values are.
        values: (rows, columns), or (L, H, columns) with a row for each head.
        columns: a label of each column.
        column_name: what a column is, such as "head" or "position".
        row_name: what a row is.
        rows: a label of each row; None for indices.
        texts: a further text of each value, such as a predicted token; None without.
    """

    title: str
    values: np.ndarray
    columns: Sequence[str]
    column_name: str = "head"
    row_name: str = "layer"
    rows: Sequence[str] | None = None
    texts: Sequence[Sequence[str]] | None = None


def score_tables(inspectable: InspectableStack) -> Iterator[Table]:
    """Yield the scores of all heads: induction, previous token and duplicate token."""
    scores = score_heads(inspectable.model, start=inspectable.start_token)
    for name, values in scores._asdict().items():
        yield Table(name.replace("_", " "), values, _head_labels(values))


def attribution_tables(result: LogitAttribution) -> Iterator[Table]:
    """Yield the contributions to a logit of heads, and of MLPs and biases."""
    others = np.stack([result.mlps, result.attention_biases], axis=1)
    yield Table("heads", result.heads, _head_labels(result.heads))
    yield Table("MLPs and attention biases", others, ["MLP", "attention bias"], "part")


def patch_tables(
    inspectable: InspectableStack, prompts: Prompts, kinds: Sequence[str], batch_size: int = 64
) -> Iterator[Table]:
    """Yield a Table per kind and layer: effects of activation patching up to that layer, NaN for later layers."""
    tokens = _token_labels(inspectable, prompts.clean)
    n_layers = len(inspectable.model.blocks)
    for kind in kinds:
        values = np.empty(0)
        for layer, effects in enumerate(iterate_patches(inspectable.model, prompts, kind, batch_size)):
            values = values if layer else np.full((n_layers, *effects.shape), np.nan)
            values[layer] = effects
            labels = (_head_labels(values),) if kind == "heads" else (tokens, "position")
            yield Table(TITLES[kind], values.copy(), *labels)


def estimate_tables(inspectable: InspectableStack, prompts: Prompts) -> Iterator[Table]:
    """Yield the effects of attribution patching: of the residual stream, and of heads."""
    effects = estimate_patches(inspectable.model, prompts)
    yield Table(TITLES["stream"], effects["stream"], _token_labels(inspectable, prompts.clean), "position")
    yield Table(TITLES["heads"], effects["heads"], _head_labels(effects["heads"]))


def path_tables(
    inspectable: InspectableStack, prompts: Prompts, receiver: tuple[int, int] | None = None, batch_size: int = 64
) -> Iterator[Table]:
    """Yield the effects of path patching from heads to the logits, or to the head `receiver`."""
    values = patch_paths(inspectable.model, prompts, receiver, batch_size=batch_size)
    yield Table(f"direct paths from heads to {receiver or 'the logits'}", values, _head_labels(values))


def circuit_tables(
    inspectable: InspectableStack, task: str, n_prompts: int = 10, exact: bool = False
) -> Iterator[Table]:
    """Yield a Table of heads' mean effects on a task, then the strongest heads' faithfulness after each further prompt.

    Args:
        inspectable: the model.
        task: a name in `circuits.TASKS`.
        n_prompts: pairs of prompts, at least 2; the first half orders the heads, and the second half measures them.
        exact: order the heads by exact patching in place of gradients.

    Raises:
        ValueError: as of `task_prompts`.
    """
    pairs = task_prompts(task, inspectable.encode, n_prompts, start=inspectable.start_token)
    ranking, measured = pairs[: n_prompts // 2], pairs[n_prompts // 2 :]
    effects = mean_head_effects(inspectable.model, ranking, exact)
    yield Table("effects of heads", effects, _head_labels(effects))
    heads = rank_heads(effects)
    counts = sorted({0, len(heads), *(2**i for i in range(20) if 2**i < len(heads))})
    values = np.full((len(measured), len(counts)), np.nan)
    for i, pair in enumerate(measured):
        values[i] = measure_faithfulness(inspectable.model, pair, heads, counts)
        yield Table("faithfulness of the strongest heads", values.copy(), [*map(str, counts)], "heads", "prompt")


def lens_tables(
    inspectable: InspectableStack, streams: Sequence[np.ndarray], tokens: Sequence[str], lens: TunedLens | None
) -> Iterator[Table]:
    """Yield a Table per layer: a lens's probability of the final prediction by position, NaN for later layers.

    The texts of the table are the most probable tokens after each layer.

    Args:
        inspectable: the model.
        streams: the residual stream (T, C) after each block.
        tokens: a label of each position.
        lens: None for the logit lens.
    """
    last = len(streams) - 1
    predicted = lens_log_probabilities(inspectable.model, streams[last], last).argmax(axis=-1)
    values = np.full((len(streams), len(tokens)), np.nan)
    texts = [[""] * len(tokens) for _ in streams]
    for layer, stream in enumerate(streams):
        logs = lens_log_probabilities(inspectable.model, stream, layer, lens)
        values[layer] = np.exp(logs[np.arange(len(logs)), predicted])
        texts[layer] = [inspectable.token_text(int(token)) for token in logs.argmax(axis=-1)]
        title = f"{'logit' if lens is None else 'tuned'} lens: probability of the model's prediction"
        yield Table(title, values.copy(), tokens, "position", texts=texts)


def probe_tables(
    inspectable: InspectableStack,
    labeled: Sequence[tuple[str, str]],
    streams: Sequence[np.ndarray],
    tokens: Sequence[str],
) -> Iterator[Table]:
    """Yield tables per layer: held-out accuracy of linear probes, and the probability of a label at each position.

    Args:
        inspectable: the model.
        labeled: (label, text) of each text that the probes are fitted to, at its last token.
        streams: the residual stream (T, C) after each block, of the text with T positions.
        tokens: a label of each position.

    Raises:
        ImportError, ValueError: as of `probe_accuracy` and `collect_activations`.
    """
    labels = [label for label, _ in labeled]
    names = sorted(set(labels))
    shown = names[1:] if len(names) == 2 else names  # two probabilities have the sum 1
    texts = [inspectable.encode_input(text) for _, text in labeled]
    activations = collect_activations(inspectable.model, texts)
    accuracy = np.full((len(streams), 1), np.nan)
    values = {name: np.full((len(streams), len(tokens)), np.nan) for name in shown}
    for layer, (rows, stream) in enumerate(zip(activations.values(), streams)):
        accuracy[layer] = probe_accuracy(rows, labels)
        yield Table("linear probes: accuracy on held-out texts", accuracy.copy(), ["accuracy"], "part")
        probabilities = new_classifier().fit(rows, labels).predict_proba(stream)
        for name in shown:
            values[name][layer] = probabilities[:, names.index(name)]
            yield Table(f"linear probes: probability of {name}", values[name].copy(), tokens, "position")


def feature_tables(
    autoencoder: SparseAutoencoder, stream: np.ndarray, tokens: Sequence[str], position: int
) -> Iterator[Table]:
    """Yield a Table of the strongest features at a position, for all typical tokens; ValueError if it is not typical.

    Args:
        autoencoder: of the residual stream after a block.
        stream: that residual stream, (T, C).
        tokens: a label of each position.
        position: the position whose strongest features are the rows; fewer than 20 if fewer are active.

    Raises:
        ValueError: the position is that of a token that autoencoders do not describe (see `typical_tokens`).
    """
    typical = typical_tokens(stream)
    if position not in typical:
        raise ValueError("expected a token that the autoencoder describes, got the first one or an attention sink")
    activations = np.full((len(stream), autoencoder.encoder.to_size), np.nan)
    activations[typical] = autoencoder.activations(stream[typical])
    order = np.argsort(-activations[position], kind="stable")[:N_FEATURES]
    features = [int(feature) for feature in order if activations[position, feature] > 0]
    rows = [str(feature) for feature in features]
    yield Table("activations of features", activations[:, features].T, tokens, "position", "feature", rows)


def _head_labels(values: np.ndarray) -> list[str]:
    """Return the indices of the columns of values (L, H) as texts."""
    return [str(head) for head in range(values.shape[1])]


def _token_labels(inspectable: InspectableStack, ids: Sequence[int]) -> list[str]:
    """Return the texts of tokens."""
    return [inspectable.token_text(token) for token in ids]
