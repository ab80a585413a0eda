"""The recorded forward pass of a model over one text, and the statistics of it that the model viewer shows.

Shapes: T tokens (queries), S keys, H heads, C channels, V vocabulary.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tricycle.devices import Array, to_cpu
from tricycle.sampling import top_indices
from tricycle.tensor import Tensor
from tricycle_accelerators import threads
from tricycle_lab.look.interventions import Interventions
from tricycle_lab.probe import entropy, excess_kurtosis

N_TOP_TOKENS = 10
N_LENS_TOKENS = 3  # the most probable tokens of each layer in the logit lens of one position
MAX_CHUNK_LOGITS = 2**24  # the logits of one chunk of rows
ROWS_PER_TASK = 8  # rows of logits that fit into a processor cache
MASKED = 0  # the byte of the score of a masked key

ComputeMaps = Callable[[], tuple[Array, Array]]


@dataclass
class AttentionLayer:
    """One attention layer, and what it was called with in a forward pass.

    Attributes:
        name: the name in `Layer.named_layers`.
        kind: "self"; "cross"; "encoder", the self-attention of the encoder of an encoder-decoder; or "state", a layer
            of Mamba or DeltaNet, whose scores are the factors by which it adds earlier tokens, weights their shares.
        n_heads: H.
        compute_maps: a function that returns scores and weights, (H, T, S) each; None before the forward pass.
        op: the attention op.
        args: the arguments of the op: queries (1, T, H, D), keys and values (1, S, K, D), and further ones.
        decays: of a layer with a state, the logarithm of the fraction of its state that it keeps at each token, (H, T).
        cached_maps: the result of `maps`, if it was called before; of one layer of a trace.
    """

    name: str
    kind: str
    n_heads: int
    compute_maps: ComputeMaps | None = None
    op: Any = None
    args: tuple[Any, ...] = ()
    decays: np.ndarray | None = None
    cached_maps: tuple[np.ndarray, np.ndarray] | None = field(default=None, repr=False)

    def maps(self) -> tuple[np.ndarray, np.ndarray]:
        """Return scores and weights, (H, T, S) float32, cached at the first call; ValueError for a layer not run."""
        if self.compute_maps is None:
            raise ValueError(f"{self.name}: expected a layer that ran in the forward pass, got one that did not")
        if self.cached_maps is None:
            scores, weights = (to_cpu(array) for array in self.compute_maps())
            self.cached_maps = scores.astype(np.float32, copy=False), weights.astype(np.float32, copy=False)
        return self.cached_maps


@dataclass
class Predictions:
    """The next-token predictions at each position, (T,) each.

    Attributes:
        log_probs: log-probability of the actual next token; without meaning at the last position.
        ranks: the number of tokens that are more probable than the actual next token.
        top_tokens: the most probable token.
        top_probs: the probability of that token.
        entropy: the entropy of the distribution, in nats.
    """

    log_probs: np.ndarray
    ranks: np.ndarray
    top_tokens: np.ndarray
    top_probs: np.ndarray
    entropy: np.ndarray


@dataclass
class Trace:
    """The recorded forward pass of a model over one text.

    Attributes:
        ids: the tokens, (T,).
        texts: the text of each token.
        source_texts: the text of each source token; None without an encoder-decoder.
        attention_layers: the attention layers, in model order.
        stream: the residual stream (T, C) before the first block and after each block, by name.
        unembed: a function from residual stream (..., C) to logits (..., V); None for a model without logits.
        token_text: a function from a token to its text.
        predictions: None for a model without logits.
        source_ids: the source tokens of an encoder-decoder.
        logits: (T, V), for a model without residual stream only.
        interventions: the interventions during the forward pass.
        n_channels: of the residual stream, if blocks append keys, values and later inputs to it; None for all.
        routing: the router weights (T, E) of each mixture of experts, 0 for experts that a token does not select.
    """

    ids: list[int]
    texts: list[str]
    source_texts: list[str] | None
    attention_layers: list[AttentionLayer]
    stream: dict[str, np.ndarray]
    unembed: Callable[[Tensor], Tensor] | None
    token_text: Callable[[int], str]
    predictions: Predictions | None = None
    source_ids: tuple[int, ...] = ()
    logits: np.ndarray | None = None
    interventions: Interventions = field(default_factory=Interventions)
    n_channels: int | None = None
    routing: dict[str, np.ndarray] = field(default_factory=dict)

    def attention_layer(self, name: str) -> AttentionLayer:
        """Return the attention layer with this name; raise ValueError if there is none."""
        by_name = {layer.name: layer for layer in self.attention_layers}
        if name not in by_name:
            raise ValueError(f"expected one of {', '.join(by_name)}, got {name!r}"[:300])
        return by_name[name]

    # ---------------------------------------------------------------- JSON for the page
    def summary(self) -> dict[str, Any]:
        """Return JSON data: ids, tokens, attentionLayers, mixtures, streamNames; sourceTokens, predictions or None."""
        summary: dict[str, Any] = {
            "ids": self.ids,
            "tokens": self.texts,
            "sourceTokens": self.source_texts,
            "attentionLayers": [
                {"name": layer.name, "kind": layer.kind, "nHeads": layer.n_heads} for layer in self.attention_layers
            ],
            "mixtures": [_summarize_routing(name, weights) for name, weights in self.routing.items()],
            "streamNames": list(self.stream),
            "predictions": None,
        }
        if self.predictions is not None:
            summary["predictions"] = {
                "logProbs": _round_decimals(self.predictions.log_probs),
                "ranks": self.predictions.ranks.tolist(),
                "topTokens": [self.token_text(int(token)) for token in self.predictions.top_tokens],
                "topProbs": _round_decimals(self.predictions.top_probs, 5),
                "entropy": _round_decimals(self.predictions.entropy, 3),
            }
        return summary

    def attention_map(self, name: str, head: int, deflate: bool = False) -> dict[str, Any]:
        """Return a head's map as JSON data: shape, base64 weights and scores, range, statistics; ValueError without it.

        The byte of a weight w is 255 sqrt(w); that of a score s is 1 + 254 (s - min) / (max - min), and 0 if the key is
        masked.

        Args:
            name: the name of the attention layer.
            head: the index of the head.
            deflate: compress the bytes. This saves space in a file; from a server, uncompressed bytes are faster.

        Raises:
            ValueError: no such layer or head.
        """
        layer = self.attention_layer(name)
        for other in self.attention_layers:
            if other is not layer:
                other.cached_maps = None  # the maps of all layers would need too much memory
        all_scores, all_weights = layer.maps()
        if not 0 <= head < len(all_weights):
            raise ValueError(f"expected a head from 0 to {len(all_weights) - 1}, got {head}")
        scores, weights = all_scores[head], np.nan_to_num(all_weights[head])
        visible = scores > -np.inf
        finite = scores[visible & np.isfinite(scores)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
        fractions = (np.nan_to_num(scores, posinf=high, neginf=low) - low) / max(high - low, 1e-30)
        weight_bytes = np.rint(np.sqrt(np.clip(weights, 0, 1)) * 255).astype(np.uint8)
        score_bytes = np.where(visible, 1 + np.rint(fractions * 254), MASKED).astype(np.uint8)
        return {
            "shape": list(weights.shape),
            "deflated": deflate,
            "weights": _encode_base64(weight_bytes, deflate),
            "scores": _encode_base64(score_bytes, deflate),
            "minScore": round_significant(low),
            "maxScore": round_significant(high),
            "entropy": _round_decimals(entropy(weights), 2),
            "unassigned": _round_decimals(1 - weights.sum(axis=-1), 2),
            "scoreKurtosis": round_significant(_kurtosis(finite)),
            "weightKurtosis": round_significant(_kurtosis(weights[visible])),
            "kept": None if layer.decays is None else _round_decimals(np.exp(layer.decays[head])),
        }

    def router_map(self, name: str, deflate: bool = False) -> dict[str, Any]:
        """Return a mixture's router weights as JSON data: shape [E, T], base64 bytes 255 w / max, max; or ValueError.

        Args:
            name: the name of the mixture. deflate: as in `attention_map`.

        Raises:
            ValueError: no such mixture.
        """
        if name not in self.routing:
            raise ValueError(f"expected one of {', '.join(self.routing) or 'no mixtures'}, got {name!r}"[:300])
        weights = np.nan_to_num(self.routing[name]).T
        largest = max(float(weights.max()), 1e-30)
        levels = np.maximum(np.rint(255 * weights / largest), weights > 0).astype(np.uint8)
        data = {"shape": list(weights.shape), "deflated": deflate, "max": round_significant(largest)}
        return {**data, "weights": _encode_base64(levels, deflate)}

    def head_statistics(self, start: int, stop: int) -> dict[str, Any]:
        """Return {"layers": [...]}: name, and entropy, scoreKurtosis, unassigned, any halfLife of these heads.

        The half-life is that of the state of a layer in tokens, at the mean decay of the text.
        """
        layers = []
        for layer in self.attention_layers[max(0, start) : max(0, stop)]:
            cached = layer.cached_maps
            scores, weights = layer.maps()
            visible = scores > -np.inf
            kurtosis = [round_significant(_kurtosis(row[mask])) for row, mask in zip(scores, visible)]
            mean = entropy(np.nan_to_num(weights)).mean(axis=-1)
            statistics = {"name": layer.name, "entropy": _round_decimals(mean, 3), "scoreKurtosis": kurtosis}
            unassigned = np.zeros(len(weights)) if layer.decays is not None else 1 - weights.sum(-1).mean(-1)
            statistics["unassigned"] = _round_decimals(unassigned, 3)
            if layer.decays is not None:
                rates = -layer.decays.mean(axis=-1, dtype=np.float64)
                statistics["halfLife"] = [round_significant(math.log(2) / rate if rate else math.inf) for rate in rates]
            layers.append(statistics)
            layer.cached_maps = cached  # the maps of all layers would need too much memory
        return {"layers": layers}

    def stream_statistics(self) -> list[dict[str, Any]]:
        """Return name, norms, kurtosis and outliers of the residual stream before the first and after each block."""
        return [_stream_statistics(name, x[:, : self.n_channels]) for name, x in self.stream.items()]

    def top_predictions(self, position: int) -> dict[str, Any]:
        """Return "position", "top" next tokens and logit-"lens" by layer, [] if unknown; ValueError if out of range."""
        if not 0 <= position < len(self.ids):
            raise ValueError(f"expected a position from 0 to {len(self.ids) - 1}, got {position}")
        next_token = self.ids[position + 1] if position + 1 < len(self.ids) else None
        top, lens = [], []
        if self.logits is not None:
            top = self._top_k(self.logits[position], N_TOP_TOKENS, next_token)["top"]
        elif self.unembed is not None:
            rows = [x[position, : self.n_channels] for x in self.stream.values()]
            logits = self._compute_logits(np.stack(rows))
            top = self._top_k(logits[-1], N_TOP_TOKENS, next_token)["top"]
            lens = [self._top_k(row, N_LENS_TOKENS, next_token) for row in logits]
        return {"position": position, "top": top, "lens": lens}

    def logit_lens(self) -> dict[str, Any]:
        """Return the most probable "tokens"[layer][position] by logit lens, or []; their "probs"; "texts" by id."""
        if self.unembed is None or not self.stream:
            return {"tokens": [], "probs": []}
        top = np.zeros((len(self.stream), len(self.ids)), np.int64)
        probs = np.zeros(top.shape)
        for i, x in enumerate(self.stream.values()):
            for rows, logits in self._logits_in_chunks(x):
                _, _, top[i, rows], probs[i, rows], _ = summarize_logits(logits, np.zeros(len(logits), np.int64))
        texts = {int(token): self.token_text(int(token)) for token in np.unique(top)}
        return {"texts": texts, "tokens": top.tolist(), "probs": [_round_decimals(row, 3) for row in probs]}

    # ---------------------------------------------------------------- logits
    def compute_predictions(self, x: np.ndarray, known: Predictions | None = None) -> None:
        """Set `predictions` from the residual stream after the last block (T, C); those in `known` are reused.

        Args:
            x: the residual stream.
            known: the predictions at the first positions, which are not computed again.
        """
        start = 0 if known is None else len(known.log_probs)
        next_tokens = np.array([*self.ids[1:], -1])[start:]
        computed = [summarize_logits(logits, next_tokens[rows]) for rows, logits in self._logits_in_chunks(x[start:])]
        parts = [] if known is None else [list(vars(known).values())]
        self.predictions = Predictions(*(np.concatenate(arrays) for arrays in zip(*parts, *computed)))

    def _logits_in_chunks(self, x: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield chunks of rows of the residual stream, and their logits; all logits would need too much memory."""
        step = max(1, MAX_CHUNK_LOGITS // self._compute_logits(x[:1]).shape[-1])
        for start in range(0, len(x), step):
            rows = slice(start, min(start + step, len(x)))
            yield rows, self._compute_logits(x[rows])

    def _compute_logits(self, x: np.ndarray) -> np.ndarray:
        """Return float32 logits (N, V) of rows of the residual stream (N, C); ValueError for an encoder."""
        if self.unembed is None:
            raise ValueError("expected a model that predicts tokens, got an encoder")
        return to_cpu(self.unembed(Tensor(x, requires_grad=False)).array).astype(np.float32, copy=False)

    def _top_k(self, logits: np.ndarray, k: int, next_token: int | None) -> dict[str, Any]:
        """Return "top" k tokens ("id", "text", "prob"), and "rank" from 0 and "prob" of the next token, if any."""
        k = min(k, len(logits))
        top = top_indices(logits, k)
        highest = float(logits.max())
        logsumexp = highest + math.log(float(np.exp(logits - highest).sum(dtype=np.float64)))

        def prob(token: int) -> float | None:
            return round_significant(math.exp(float(logits[token]) - logsumexp))

        result: dict[str, Any] = {
            "top": [{"id": int(token), "text": self.token_text(int(token)), "prob": prob(token)} for token in top]
        }
        if next_token is not None:
            result["rank"] = int((logits > logits[next_token]).sum())
            result["prob"] = prob(next_token)
        return result


def summarize_logits(logits: np.ndarray, next_tokens: np.ndarray) -> list[np.ndarray]:
    """Return log-probs of next_tokens, ranks, top tokens, top probabilities, entropies, (n,) each; overwrite logits."""
    starts = range(0, len(logits), ROWS_PER_TASK)
    parts: dict[int, list[np.ndarray]] = {}

    def summarize(start: int) -> None:
        rows = slice(start, start + ROWS_PER_TASK)
        parts[start] = _summarize_rows(logits[rows], next_tokens[rows])

    threads.parallel_for(summarize, starts)
    return [np.concatenate(arrays) for arrays in zip(*(parts[start] for start in starts))]


def _summarize_rows(logits: np.ndarray, next_tokens: np.ndarray) -> list[np.ndarray]:
    """Return each row's log-probability and rank of the next token, top token, its probability, and entropy."""
    rows = np.arange(len(logits))
    actual = logits[rows, next_tokens]
    ranks = np.count_nonzero(logits > actual[:, None], axis=-1)
    top = logits.argmax(axis=-1)
    highest = logits[rows, top]
    logits -= highest[:, None]
    exponentials = np.exp(logits)
    total = exponentials.sum(axis=-1)
    with np.errstate(invalid="ignore"):  # 0 times -inf, for a token that cannot be predicted
        mean = np.array([exponential @ logit for exponential, logit in zip(exponentials, logits)]) / total
    return [actual - highest - np.log(total), ranks, top, 1 / total, np.log(total) - mean]


def _kurtosis(values: np.ndarray) -> float:
    """Return the excess kurtosis, or NaN of no values."""
    return excess_kurtosis(values) if values.size else math.nan


def _summarize_routing(name: str, weights: np.ndarray) -> dict[str, Any]:
    """Return the name, nActive experts of a token, and the load of each: its fraction of all selections (T, E)."""
    counts = np.count_nonzero(weights, axis=0)
    n_selected = max(1, int(counts.sum()))
    return {"name": name, "nActive": -(-n_selected // len(weights)), "load": _round_decimals(counts / n_selected)}


def _stream_statistics(name: str, x: np.ndarray) -> dict[str, Any]:
    """Return the norm of each token, the kurtosis, and the three channels with the largest absolute values."""
    magnitudes = abs(x)
    largest = magnitudes.max(axis=0)
    channels = np.argsort(-largest)[:3]
    median = float(np.median(largest))
    outliers = []
    for channel in channels:
        position = int(magnitudes[:, channel].argmax())
        value = round_significant(float(x[position, channel]))
        ratio = round_significant(float(largest[channel]) / median if median else math.nan)
        outliers.append({"channel": int(channel), "position": position, "value": value, "ratio": ratio})
    norms = np.sqrt(np.square(x, dtype=np.float64).sum(axis=-1))
    return {
        "name": name,
        "norms": [round_significant(float(norm)) for norm in norms],
        "kurtosis": round_significant(excess_kurtosis(x)),
        "outliers": outliers,
    }


# -------------------------------------------------------------------- encoding as JSON
def _encode_base64(array: np.ndarray, deflate: bool) -> str:
    """Return an array's bytes, compressed by zlib if `deflate`, as base64 text."""
    content = zlib.compress(array.tobytes(), 1) if deflate else array.tobytes()
    return base64.b64encode(content).decode("ascii")


def round_significant(value: float) -> float | None:
    """Round to four significant digits; return None for nan and infinity, which JSON does not have."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _round_decimals(array: np.ndarray, digits: int = 4) -> list[float | None]:
    """Round to a number of decimals; None stands for nan and infinity, which JSON does not have."""
    values = np.round(array.astype(np.float64), digits).tolist()
    return [value if math.isfinite(value) else None for value in values]
