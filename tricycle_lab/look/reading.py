"""What a model computed while it read a text, and the numbers of it that a page shows.

Shapes: T tokens that are predicted from, S keys, H heads, C channels, V vocabulary.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tricycle.devices import Array, to_cpu
from tricycle.tensor import Tensor
from tricycle_accelerators import threads
from tricycle_lab.look.changes import Changes
from tricycle_lab.probe import entropy, excess_kurtosis

N_RIVALS = 10
N_LENS = 3  # tokens of each layer that the lens shows
LENS_AT_ONCE = 2**24  # logits
ROWS_AT_ONCE = 8  # that fit into a processor's cache
HIDDEN = 0  # the byte of a key that is not seen

Look = Callable[[], tuple[Array, Array]]


@dataclass
class Site:
    """One layer with attention.

    Attributes:
        name: as in `Layer.named_layers`.
        kind: "self", "cross" or "source": an encoder's own.
        n_heads: H.
        looked: gives scores and weights, (H, T, S) each.
        op, args: what was called with queries (1, T, H, D), keys and values (1, S, K, D), and what there is more.
    """

    name: str
    kind: str
    n_heads: int
    looked: Look | None = None
    op: Any = None
    args: tuple[Any, ...] = ()
    held: tuple[np.ndarray, np.ndarray] | None = field(default=None, repr=False)  # what `look` has computed already

    def look(self) -> tuple[np.ndarray, np.ndarray]:
        """Scores and weights, computed when they are first asked for."""
        if self.looked is None:
            raise ValueError(f"{self.name}: it did not run")
        if self.held is None:
            scores, weights = (to_cpu(array) for array in self.looked())
            self.held = scores.astype(np.float32, copy=False), weights.astype(np.float32, copy=False)
        return self.held


@dataclass
class Predictions:
    """What was predicted after each token, (T,) each.

    Attributes:
        log_p: of the token that came, but after the last.
        rank: how many tokens were found likelier than that.
        best, best_p: the likeliest token, and its probability.
        entropy: of all that may come, in nats.
    """

    log_p: np.ndarray
    rank: np.ndarray
    best: np.ndarray
    best_p: np.ndarray
    entropy: np.ndarray

    def first(self, count: int) -> Predictions:
        """Those after the first so many tokens."""
        return Predictions(*(numbers[:count] for numbers in vars(self).values()))


@dataclass
class Reading:
    """A text that was read.

    Attributes:
        ids: (T,). texts: of each. sources: texts of what an encoder read; None without one.
        sites: layers with attention, in order.
        stream: the residual stream (T, C) before the first block and after each, by name.
        logits: makes (..., V) of a stream (..., C); None for a model that says nothing.
        say: the text of an id.
        predictions: None where there are no logits.
        source: ids of what an encoder read.
        said: logits (T, V) of a model without a residual stream.
        changes: what was changed in the model.
    """

    ids: list[int]
    texts: list[str]
    sources: list[str] | None
    sites: list[Site]
    stream: dict[str, np.ndarray]
    logits: Callable[[Tensor], Tensor] | None
    say: Callable[[int], str]
    predictions: Predictions | None = None
    source: tuple[int, ...] = ()
    said: np.ndarray | None = None
    changes: Changes = field(default_factory=Changes)

    def same(self, ids: Sequence[int], source: Sequence[int]) -> bool:
        """Whether it is of this text, and of this source."""
        return self.ids == list(ids) and self.source == tuple(source)

    def site(self, name: str) -> Site:
        """By its name.

        Raises:
            ValueError: there is none.
        """
        for site in self.sites:
            if site.name == name:
                return site
        raise ValueError(f"expected one of {', '.join(site.name for site in self.sites)}, got {name!r}"[:300])

    # ---------------------------------------------------------------- what pages get
    def view(self) -> dict[str, Any]:
        """The tokens with their probabilities, and which layers there are."""
        shown: dict[str, Any] = {
            "ids": self.ids,
            "tokens": self.texts,
            "sources": self.sources,
            "sites": [{"name": site.name, "kind": site.kind, "heads": site.n_heads} for site in self.sites],
            "states": list(self.stream),
            "predictions": None,
        }
        if self.predictions is not None:
            said = self.predictions
            shown["predictions"] = {
                "logP": _rounded(said.log_p),
                "rank": said.rank.tolist(),
                "best": [self.say(int(token)) for token in said.best],
                "bestP": _rounded(said.best_p, 5),
                "entropy": _rounded(said.entropy, 3),
            }
        return shown

    def attention(self, name: str, head: int, small: bool = False) -> dict[str, Any]:
        """The maps of one head before and after the softmax, as bytes in base64.

        Of a weight w the byte is 255 sqrt(w), of a score 1 + 254 (s - low) / (high - low), and 0 where a key is hidden.

        Args:
            small: bytes are deflated first, for a file; to inflate them takes a browser longer than to fetch them.

        Raises:
            ValueError: no such layer or head.
        """
        all_scores, all_weights = self.site(name).look()
        if not 0 <= head < len(all_weights):
            raise ValueError(f"expected a head from 0 to {len(all_weights) - 1}, got {head}")
        scores, weights = all_scores[head], np.nan_to_num(all_weights[head])
        seen = scores > -np.inf
        finite = scores[seen & np.isfinite(scores)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
        shares = (np.nan_to_num(scores, posinf=high, neginf=low) - low) / max(high - low, 1e-30)
        roots = np.rint(np.sqrt(np.clip(weights, 0, 1)) * 255).astype(np.uint8)
        return {
            "shape": list(weights.shape),
            "deflated": small,
            "weights": _packed(roots, small),
            "scores": _packed(np.where(seen, 1 + np.rint(shares * 254), HIDDEN).astype(np.uint8), small),
            "low": _figure(low),
            "high": _figure(high),
            "entropy": _rounded(entropy(weights), 2),
            "nothing": _rounded(1 - weights.sum(axis=-1), 2),
            "scoreKurtosis": _figure(_kurtosis(finite)),
            "weightKurtosis": _figure(_kurtosis(weights[seen])),
        }

    def overview(self, start: int, stop: int) -> dict[str, Any]:
        """A number or two for every head of some of the layers with attention, counted from 0."""
        heads = []
        for site in self.sites[max(0, start) : max(0, stop)]:
            held = site.held
            scores, weights = site.look()
            seen = scores > -np.inf
            kurtosis = [_figure(_kurtosis(row[mask])) for row, mask in zip(scores, seen)]
            mean = entropy(np.nan_to_num(weights)).mean(axis=-1)
            heads.append({"name": site.name, "entropy": _rounded(mean, 3), "scoreKurtosis": kurtosis})
            site.held = held
        return {"heads": heads}

    def states(self) -> list[dict[str, Any]]:
        """The stream: norms, kurtosis and outliers."""
        return [_state(name, x) for name, x in self.stream.items()]

    def token(self, place: int) -> dict[str, Any]:
        """What comes after one token: the likeliest, and what each layer would say.

        Raises:
            ValueError: a place that is not there.
        """
        if not 0 <= place < len(self.ids):
            raise ValueError(f"expected a token from 0 to {len(self.ids) - 1}, got {place}")
        following = self.ids[place + 1] if place + 1 < len(self.ids) else None
        if self.said is not None:
            return {"place": place, "rivals": self._likeliest(self.said[place], N_RIVALS, following)["top"], "lens": []}
        if self.logits is None:
            return {"place": place, "rivals": [], "lens": []}
        logits = self._numbers(np.stack([x[place] for x in self.stream.values()]))
        lens = [self._likeliest(row, N_LENS, following) for row in logits]
        return {"place": place, "rivals": self._likeliest(logits[-1], N_RIVALS, following)["top"], "lens": lens}

    def lens(self) -> dict[str, Any]:
        """What each layer would say after each token: the likeliest token, and its probability."""
        if self.logits is None or not self.stream:
            return {"tokens": [], "p": []}
        best = np.zeros((len(self.stream), len(self.ids)), np.int64)
        p = np.zeros(best.shape)
        for state, x in enumerate(self.stream.values()):
            for rows, logits in self._in_parts(x):
                _, _, best[state, rows], p[state, rows], _ = summed_up(logits, np.zeros(len(logits), np.int64))
        texts = {int(token): self.say(int(token)) for token in np.unique(best)}
        return {"texts": texts, "tokens": best.tolist(), "p": [_rounded(row, 3) for row in p]}

    # ---------------------------------------------------------------- numbers
    def predict(self, x: np.ndarray, known: Predictions | None = None) -> None:
        """Compute the predictions from the last state of the stream (T, C).

        Args:
            known: of the first tokens, which need not be computed again.
        """
        start = 0 if known is None else len(known.log_p)
        following = np.array([*self.ids[1:], -1])[start:]
        made = [summed_up(logits, following[rows]) for rows, logits in self._in_parts(x[start:])]
        parts = [] if known is None else [list(vars(known).values())]
        self.predictions = Predictions(*(np.concatenate(numbers) for numbers in zip(*parts, *made)))

    def _in_parts(self, x: np.ndarray) -> Any:
        """Some rows at a time, and their logits."""
        step = max(1, LENS_AT_ONCE // self._numbers(x[:1]).shape[-1])
        for start in range(0, len(x), step):  # few at a time, for they are many numbers
            rows = slice(start, min(start + step, len(x)))
            yield rows, self._numbers(x[rows])

    def _numbers(self, x: np.ndarray) -> np.ndarray:
        if self.logits is None:
            raise ValueError("expected a model that predicts tokens")
        return to_cpu(self.logits(Tensor(x, requires_grad=False)).array).astype(np.float32, copy=False)

    def _likeliest(self, logits: np.ndarray, count: int, following: int | None) -> dict[str, Any]:
        """The likeliest tokens of a row of logits, and how the one that came is placed among them."""
        count = min(count, len(logits))
        top = np.argpartition(logits, -count)[-count:]
        top = top[np.argsort(-logits[top], kind="stable")]
        highest = float(logits.max())
        logsumexp = highest + math.log(float(np.exp(logits - highest).sum(dtype=np.float64)))
        said: dict[str, Any] = {
            "top": [
                {
                    "id": int(token),
                    "text": self.say(int(token)),
                    "p": _figure(math.exp(float(logits[token]) - logsumexp)),
                }
                for token in top
            ]
        }
        if following is not None:
            said["rank"] = int((logits > logits[following]).sum())
            said["p"] = _figure(math.exp(float(logits[following]) - logsumexp))
        return said


def summed_up(logits: np.ndarray, following: np.ndarray) -> list[np.ndarray]:
    """The fields of `Predictions` for some rows (R, V); the logits are overwritten."""
    starts = range(0, len(logits), ROWS_AT_ONCE)
    parts: dict[int, list[np.ndarray]] = {}

    def work(start: int) -> None:
        rows = slice(start, start + ROWS_AT_ONCE)
        parts[start] = _summed_up_rows(logits[rows], following[rows])

    threads.parallel_for(work, starts)
    return [np.concatenate(numbers) for numbers in zip(*(parts[start] for start in starts))]


def _summed_up_rows(logits: np.ndarray, following: np.ndarray) -> list[np.ndarray]:
    rows = np.arange(len(logits))
    came = logits[rows, following]
    rank = np.count_nonzero(logits > came[:, None], axis=-1)
    best = logits.argmax(axis=-1)
    top = logits[rows, best]
    logits -= top[:, None]
    exponentials = np.exp(logits)
    total = exponentials.sum(axis=-1)
    with np.errstate(invalid="ignore"):  # a logit of -inf, whose share is nothing
        mean = np.array([share @ logit for share, logit in zip(exponentials, logits)]) / total
    return [came - top - np.log(total), rank, best, 1 / total, np.log(total) - mean]


def _kurtosis(values: np.ndarray) -> float:
    return excess_kurtosis(values) if values.size else math.nan


def _state(name: str, x: np.ndarray) -> dict[str, Any]:
    """Norms of the tokens, and the largest values of all: which channel, at which token."""
    sizes = abs(x)
    largest = sizes.max(axis=0)
    channels = np.argsort(-largest)[:3]
    median = float(np.median(largest))
    outliers = []
    for channel in channels:
        place = int(sizes[:, channel].argmax())
        times = float(largest[channel]) / median if median else math.nan
        value = float(x[place, channel])
        outliers.append({"channel": int(channel), "place": place, "value": _figure(value), "times": _figure(times)})
    norms = np.sqrt(np.square(x, dtype=np.float64).sum(axis=-1))
    return {
        "name": name,
        "norms": [_figure(float(norm)) for norm in norms],
        "kurtosis": _figure(excess_kurtosis(x)),
        "outliers": outliers,
    }


# -------------------------------------------------------------------- as JSON
def _packed(array: np.ndarray, small: bool) -> str:
    """Bytes in base64, deflated first or not."""
    return base64.b64encode(zlib.compress(array.tobytes(), 1) if small else array.tobytes()).decode("ascii")


def _figure(value: float) -> float | None:
    """Four digits; None for what JSON does not know."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _rounded(array: np.ndarray, digits: int = 4) -> list[float | None]:
    """Digits after the point; None for what JSON does not know."""
    values = np.round(array.astype(np.float64), digits).tolist()
    return [value if math.isfinite(value) else None for value in values]
