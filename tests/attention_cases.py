"""Sizes, scorings and arguments of attention for tests, and attention as plain loops."""

from itertools import product
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from tricycle.kernels import KERNELS, Scoring, rows  # noqa: F401  (it defines kernels too)

NAMES = ("attention_scores", "attention", "attention_backward", "row_attention", "row_attention_backward")
reference = SimpleNamespace(**{name: KERNELS[name].plain for name in NAMES})


class Sizes(NamedTuple):
    items: int
    queries: int
    keys: int
    heads: int
    key_heads: int
    size: int


# 16 queries and blocks of 128 are where the CPU's version turns
PLAIN = [
    Sizes(1, 1, 1, 1, 1, 1),
    Sizes(2, 5, 5, 3, 3, 4),
    Sizes(1, 3, 7, 2, 2, 4),
    Sizes(2, 16, 16, 2, 2, 3),
    Sizes(2, 17, 17, 3, 3, 5),
    Sizes(1, 16, 41, 2, 2, 3),
    Sizes(1, 1, 300, 2, 2, 2),
    Sizes(1, 127, 127, 1, 1, 4),
    Sizes(1, 128, 128, 1, 1, 1),
    Sizes(1, 129, 129, 2, 2, 4),
    Sizes(1, 130, 257, 1, 1, 8),
    Sizes(1, 257, 300, 1, 1, 2),
    Sizes(0, 17, 17, 2, 2, 2),
    Sizes(1, 0, 3, 1, 1, 2),
]
SHARED = [  # key heads that several query heads share
    Sizes(2, 5, 7, 6, 2, 4),
    Sizes(1, 50, 50, 6, 2, 3),
    Sizes(2, 141, 170, 3, 1, 4),
    Sizes(1, 3, 300, 4, 1, 2),
    Sizes(1, 40, 33, 8, 1, 5),
]


def scale_of(size: int) -> float:
    return 1 / max(1, size) ** 0.5


def plain_scorings(sizes: Sizes) -> list[Scoring]:
    """All keys, the last query at the last key, and later queries that see all while earlier ones do not."""
    offsets = None, sizes.keys - sizes.queries, sizes.keys // 2
    return [Scoring(scale_of(sizes.size), offset) for offset in offsets]


def scorings(sizes: Sizes) -> list[Scoring]:
    """Return every sort of offset with every sort of window and cap: with some a query sees no key, with some the
    queries are positioned behind the last key, and some windows hide nothing."""
    most = sizes.keys + sizes.queries
    bands = [(None, None), *product((0, sizes.keys - sizes.queries, 4, sizes.keys + 6), (None, 1, 9, most, 2**62))]
    return [Scoring(0.7, offset, window, cap) for (offset, window), cap in product(bands, (None, 1.5))]


def some_scorings(sizes: Sizes) -> list[Scoring]:
    """A few of these."""
    offset, most = sizes.keys - sizes.queries, sizes.keys + sizes.queries
    bands = [(None, None, 1.5), (offset, 9, None), (4, 1, 1.5), (0, None, 1.5), (offset, most, None)]
    return [Scoring(0.7, *band) for band in bands]


SCORED = [(sizes, scoring) for sizes in PLAIN for scoring in plain_scorings(sizes)]
SCORED += [(sizes, scoring) for sizes in SHARED for scoring in some_scorings(sizes)]
FUSED = [(*each, nothing) for each in SCORED for nothing in (True, False)]


# -------------------------------------------------------------------- arguments of the kernels
def qkv(rng, sizes: Sizes) -> tuple[np.ndarray, ...]:
    """q, k and v as the library hands them over: slices of one packed array where all have as many heads."""
    items, queries, keys, heads, key_heads, size = sizes
    tokens = max(queries, keys)
    if heads == key_heads:
        packed = rng.standard_normal((items, tokens, 3, heads, size))
        return packed[:, :queries, 0], packed[:, :keys, 1], packed[:, :keys, 2]
    packed = rng.standard_normal((items, tokens, heads + 2 * key_heads, size))
    k, v = packed[:, :keys, heads : heads + key_heads], packed[:, :keys, heads + key_heads :]
    return packed[:, :queries, :heads], k, v


def poisoned(*arrays: np.ndarray) -> list[np.ndarray]:
    return [np.full(array.shape, np.nan, array.dtype) for array in arrays]


def attention(rng, sizes, scoring, nothing):
    return *qkv(rng, sizes), scoring, nothing


def attention_backward(rng, sizes, scoring, nothing):
    q, k, v = qkv(rng, sizes)
    out, log_total = reference.attention(q, k, v, scoring, nothing)
    return rng.standard_normal(q.shape), q, k, v, out, log_total, scoring, *poisoned(q, k, v)


def attention_scores(rng, sizes, scoring):
    return *qkv(rng, sizes)[:2], scoring


def cubes(scores):
    """Rows that are no softmax; hidden keys get 0."""
    return np.where(np.isneginf(scores), 0, scores) ** 3


def cubes_backward(grad, scores, weights):
    return 3 * grad * np.where(np.isneginf(scores), 0, scores) ** 2


def row_attention(rng, sizes, scoring):
    return *qkv(rng, sizes), scoring, cubes


def row_attention_backward(rng, sizes, scoring):
    q, k, v = qkv(rng, sizes)
    return rng.standard_normal(q.shape), q, k, v, scoring, cubes, cubes_backward, *poisoned(q, k, v)


CASES = {
    "attention_scores": (attention_scores, SCORED),
    "attention": (attention, FUSED),
    "attention_backward": (attention_backward, FUSED),
    "row_attention": (row_attention, SCORED),
    "row_attention_backward": (row_attention_backward, SCORED),
}


# -------------------------------------------------------------------- plain loops
def loop_scores(q, k, scoring: Scoring, mask=None) -> np.ndarray:
    """One score at a time."""
    (items, queries, heads, _), keys, sharing = q.shape, k.shape[1], q.shape[2] // k.shape[2]
    scores = np.empty((items, heads, queries, keys))
    for b, h, t, s in np.ndindex(scores.shape):
        score = scoring.scale * float(q[b, t, h] @ k[b, s, h // sharing])
        if scoring.cap is not None:
            score = scoring.cap * np.tanh(score / scoring.cap)
        last = None if scoring.offset is None else t + scoring.offset
        if last is not None and s > last:
            score = -np.inf
        if last is not None and scoring.window is not None and s <= last - scoring.window:
            score = -np.inf
        scores[b, h, t, s] = score
    return scores if mask is None else scores + mask


def loop_attention(q, k, v, scoring: Scoring, nothing: bool, mask=None) -> tuple[np.ndarray, np.ndarray]:
    """One query at a time."""
    scores, sharing = loop_scores(q, k, scoring, mask), q.shape[2] // k.shape[2]
    out, log_total = np.zeros((*q.shape[:3], v.shape[3])), np.full(scores.shape[:3], -np.inf)
    for b, h, t in np.ndindex(scores.shape[:3]):
        weights = np.exp(scores[b, h, t])
        total = weights.sum() + nothing
        if total > 0:
            out[b, t, h] = weights @ v[b, :, h // sharing] / total
            log_total[b, h, t] = np.log(total)
    return out, log_total
