"""Measure outliers of weights and of the residual stream, and attention sinks.

Shapes: L layers, H heads, T tokens, S keys, C channels.
"""

from typing import Any, NamedTuple

import numpy as np

from tricycle.models import GPT
from tricycle.tensor import no_grad
from tricycle_lab.probe import Probe, excess_kurtosis, unassigned_weight

FIRST_QUERY = 16  # queries before it see so few keys that each gets much
MASSIVE = 0.1  # a token is massive where it reaches this share of the largest value of the stream


class OutlierMeasurements(NamedTuple):
    """Outliers and attention sinks of a model: means over texts of one length and queries from FIRST_QUERY on.

    Attributes:
        first: share of the weight that goes to the first token, (L, H).
        massive: share that goes to all massive tokens, the first included if it is one, (L, H).
        nothing: share that goes to no token, (L, H).
        largest_first: largest value of the stream at the first token, behind each block (L,), median over texts.
        largest_later: the same at all tokens from the second on, that are not massive.
        kurtosis: excess kurtosis of the stream behind each block, (L,), median over texts.
        later_kurtosis: kurtosis without massive tokens and the first.
        tokens: of the massive tokens: text, place, id.
    """

    first: np.ndarray
    massive: np.ndarray
    nothing: np.ndarray
    largest_first: np.ndarray
    largest_later: np.ndarray
    kurtosis: np.ndarray
    later_kurtosis: np.ndarray
    tokens: list[tuple[int, int, int]]

    def as_dict(self) -> dict[str, Any]:
        """Return all fields by name as lists, rounded to 4 decimals, for JSON."""
        arrays = {name: value for name, value in self._asdict().items() if name != "tokens"}
        return {name: np.round(value, 4).tolist() for name, value in arrays.items()} | {"tokens": self.tokens}


def measure_outliers(model: GPT, ids: np.ndarray) -> OutlierMeasurements:
    """Measure outliers and attention sinks of a model on token ids (N, T), one text at a time.

    Args:
        ids: whole numbers (N, T), T above FIRST_QUERY.
    """
    found: dict[str, list[Any]] = {name: [] for name in OutlierMeasurements._fields if name != "tokens"}
    tokens = []
    for number, row in enumerate(ids):
        streams, weights = _run(model, row)
        is_massive = massive_tokens(streams)
        tokens += [(number, int(place), int(row[place])) for place in np.flatnonzero(is_massive)]
        late = weights[:, :, FIRST_QUERY:]
        found["first"].append(late[..., 0].mean(axis=-1))
        found["massive"].append(late[..., is_massive].sum(axis=-1).mean(axis=-1))
        found["nothing"].append(unassigned_weight(late).mean(axis=-1))
        is_later = ~is_massive
        is_later[0] = False
        found["largest_first"].append(abs(streams[:, 0]).max(axis=-1))
        found["largest_later"].append(abs(streams[:, is_later]).max(axis=(1, 2)))
        found["kurtosis"].append([excess_kurtosis(stream) for stream in streams])
        found["later_kurtosis"].append([excess_kurtosis(stream[is_later]) for stream in streams])
    shares = {name: np.mean(found[name], axis=0) for name in ("first", "massive", "nothing")}
    sizes = {name: np.median(values, axis=0) for name, values in found.items() if name not in shares}
    return OutlierMeasurements(**shares, **sizes, tokens=tokens)


def _run(model: GPT, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the residual stream after each block (L, T, C), and the attention weights (L, H, T, S), in float32."""
    names = [f"blocks.{i}" for i in range(len(model.blocks))]
    with model.evaluating(), Probe(model, *names, "blocks.*.attention") as probe, no_grad():
        model.hidden_states(model.place(row[None]))
        streams = np.stack([probe.activations[name][0] for name in names])
        weights = np.stack([probe.weights[f"{name}.attention"][0] for name in names])
    return streams, weights


def massive_tokens(streams: np.ndarray) -> np.ndarray:
    """Return a mask (T,), True for tokens with outliers of the residual stream in its largest layer.

    A token is massive where its largest value is at least MASSIVE of the largest of all, and ten times the median
    token's (Sun et al. 2024, "Massive Activations in Large Language Models", ask for more than 100 and 1,000 medians
    of all values).

    Args:
        streams: (L, T, C).
    """
    sizes = abs(streams).max(axis=2)  # (L, T)
    layer = sizes.max(axis=1).argmax()
    at = sizes[layer]
    return (at >= MASSIVE * at.max()) & (at >= 10 * np.median(at))


def attention_maps(model: GPT, row: np.ndarray, layers: list[int]) -> dict[str, np.ndarray]:
    """Return {"layer i": attention weights (H, T, T)} of some layers for one text, ids (T,)."""
    weights = _run(model, row)[1]
    return {f"layer {i}": weights[i] for i in layers}


# -------------------------------------------------------------------- weights
def weight_outliers(model: GPT) -> dict[str, Any]:
    """Return "matrices", (kurtosis, largest value in SDs) by layer, and "heads", kurtosis by layer and head.

    Returns:
        "matrices": by name of the matrix, a pair for each layer; "heads": for queries, keys and values, the kurtosis
        of each layer's heads (L, H or fewer).
    """
    matrices: dict[str, list[list[float]]] = {}
    heads: dict[str, list[list[float]]] = {"queries": [], "keys": [], "values": []}
    for block in model.blocks:
        named: dict[str, Any] = {
            "attention.qkv": block.attention.qkv,
            "attention.projection": block.attention.projection,
            "mlp.up": block.mlp.up,
            "mlp.projection": block.mlp.projection,
        }
        for name, layer in named.items():
            matrices.setdefault(name, []).append(_outliers(layer.weights.numpy()))
        for name, parts in _head_parts(block.attention).items():
            heads[name].append([round(excess_kurtosis(part), 3) for part in parts])
    matrices["token_embedding"] = [_outliers(model.token_embedding.weights.numpy())]
    return {"matrices": matrices, "heads": heads}


def _outliers(matrix: np.ndarray) -> list[float]:
    """Return [kurtosis, largest absolute value in standard deviations] of a matrix."""
    return [round(excess_kurtosis(matrix), 3), round(float(abs(matrix).max() / matrix.std()), 2)]


def _head_parts(attention: Any) -> dict[str, list[np.ndarray]]:
    """Return {"queries", "keys", "values": a list of each head's columns of the QKV weights}."""
    counts = {"queries": attention.n_heads, "keys": attention.n_key_heads, "values": attention.n_key_heads}
    matrix, size = attention.qkv.weights.numpy(), attention.head_size
    parts: dict[str, list[np.ndarray]] = {}
    start = 0
    for name, count in counts.items():
        parts[name] = [matrix[:, start + i * size : start + (i + 1) * size] for i in range(count)]
        start += count * size
    return parts
