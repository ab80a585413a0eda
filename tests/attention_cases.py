"""Sizes, score options and arguments of attention and other kernels, and reference attention in plain loops."""

from itertools import product
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from tricycle.kernels import KERNELS, ScoreOptions
from tricycle.kernels import row_attention as row_kernels  # noqa: F401  (it defines kernels)

NAMES = ("attention_scores", "attention", "attention_backward", "row_attention", "row_attention_backward")
reference = SimpleNamespace(**{name: KERNELS[name].reference for name in NAMES})


class Sizes(NamedTuple):
    items: int
    queries: int
    keys: int
    heads: int
    key_heads: int
    size: int


# The CPU's kernel changes its method at 16 queries and at blocks of 128.
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
SHARED = [  # grouped-query attention
    Sizes(2, 5, 7, 6, 2, 4),
    Sizes(1, 50, 50, 6, 2, 3),
    Sizes(2, 141, 170, 3, 1, 4),
    Sizes(1, 3, 300, 4, 1, 2),
    Sizes(1, 40, 33, 8, 1, 5),
]


def plain_scorings(sizes: Sizes) -> list[ScoreOptions]:
    """Return score options without a mask, with causal masks, and with a causal mask that only some queries need."""
    offsets = None, sizes.keys - sizes.queries, sizes.keys // 2
    return [ScoreOptions(sizes.size**-0.5, offset) for offset in offsets]


def scorings(sizes: Sizes) -> list[ScoreOptions]:
    """Return combinations of offsets, windows and soft-caps.

    In some cases a query sees no key, or the queries are positioned after the last key, or the window hides no key.
    """
    most = sizes.keys + sizes.queries
    bands = [(None, None), *product((0, sizes.keys - sizes.queries, 4, sizes.keys + 6), (None, 1, 9, most, 2**62))]
    return [ScoreOptions(0.7, offset, window, cap) for (offset, window), cap in product(bands, (None, 1.5))]


def some_scorings(sizes: Sizes) -> list[ScoreOptions]:
    """Return a few of the combinations of `scorings`."""
    offset, most = sizes.keys - sizes.queries, sizes.keys + sizes.queries
    bands = [(None, None, 1.5), (offset, 9, None), (4, 1, 1.5), (0, None, 1.5), (offset, most, None)]
    return [ScoreOptions(0.7, *band) for band in bands]


SCORED = [(sizes, score_options) for sizes in PLAIN for score_options in plain_scorings(sizes)]
SCORED += [(sizes, score_options) for sizes in SHARED for score_options in some_scorings(sizes)]
FUSED = [(*each, off_by_one) for each in SCORED for off_by_one in (True, False)]


# -------------------------------------------------------------------- arguments of the kernels
def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def qkv(rng, sizes: Sizes) -> tuple[np.ndarray, ...]:
    """Return random q, k and v as the library passes them: slices of one array if the numbers of heads are equal."""
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


def attention(rng, sizes, score_options, off_by_one):
    return *qkv(rng, sizes), score_options, off_by_one


def attention_backward(rng, sizes, score_options, off_by_one):
    q, k, v = qkv(rng, sizes)
    out, logsumexp = reference.attention(q, k, v, score_options, off_by_one)
    return rng.standard_normal(q.shape), q, k, v, out, logsumexp, score_options, *poisoned(q, k, v)


def attention_scores(rng, sizes, score_options):
    return *qkv(rng, sizes)[:2], score_options


def cubes(scores):
    """Return the cubes of the scores, as attention weights that are not a softmax; masked keys get 0."""
    return np.where(np.isneginf(scores), 0, scores) ** 3


def cubes_backward(grad, scores, weights):
    return 3 * grad * np.where(np.isneginf(scores), 0, scores) ** 2


def row_attention(rng, sizes, score_options):
    return *qkv(rng, sizes), score_options, cubes


def row_attention_backward(rng, sizes, score_options):
    q, k, v = qkv(rng, sizes)
    return rng.standard_normal(q.shape), q, k, v, score_options, cubes, cubes_backward, *poisoned(q, k, v)


CASES = {
    "attention_scores": (attention_scores, SCORED),
    "attention": (attention, FUSED),
    "attention_backward": (attention_backward, FUSED),
    "row_attention": (row_attention, SCORED),
    "row_attention_backward": (row_attention_backward, SCORED),
}


# -------------------------------------------------------------------- plain loops
def loop_scores(q, k, score_options: ScoreOptions, mask=None) -> np.ndarray:
    """Compute the scores in a loop over single elements."""
    (items, queries, heads, _), keys, sharing = q.shape, k.shape[1], q.shape[2] // k.shape[2]
    scores = np.empty((items, heads, queries, keys))
    for b, h, t, s in np.ndindex(scores.shape):
        score = score_options.scale * float(q[b, t, h] @ k[b, s, h // sharing])
        if score_options.softcap is not None:
            score = score_options.softcap * np.tanh(score / score_options.softcap)
        last = None if score_options.offset is None else t + score_options.offset
        if last is not None and s > last:
            score = -np.inf
        if last is not None and score_options.window is not None and s <= last - score_options.window:
            score = -np.inf
        scores[b, h, t, s] = score
    return scores if mask is None else scores + mask


def loop_attention(q, k, v, score_options: ScoreOptions, off_by_one: bool, mask=None) -> tuple[np.ndarray, np.ndarray]:
    """Compute attention in a loop over queries."""
    scores, sharing = loop_scores(q, k, score_options, mask), q.shape[2] // k.shape[2]
    out, logsumexp = np.zeros((*q.shape[:3], v.shape[3])), np.full(scores.shape[:3], -np.inf)
    for b, h, t in np.ndindex(scores.shape[:3]):
        weights = np.exp(scores[b, h, t])
        total = weights.sum() + off_by_one
        if total > 0:
            out[b, t, h] = weights @ v[b, :, h // sharing] / total
            logsumexp[b, h, t] = np.log(total)
    return out, logsumexp
