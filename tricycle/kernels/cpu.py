"""Faster versions for NumPy arrays: the same names and results as in `reference.py`.

Two ideas do the work. Elementwise chains go through memory in pieces that stay in a core's cache, with
results written into place; and attention looks at one block of queries of one head at a time, so that its
memory grows with T, not T squared, and keys after the block cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from tricycle.kernels import reference
from tricycle.kernels.reference import SQRT_2_OVER_PI

PIECE = 65_536  # elements: with a few temporaries of this size, about half of a usual 1 MB second-level cache
QUERY_BLOCK = 128


def _pieces(n_rows: int, row_size: int) -> Iterator[slice]:
    step = max(1, PIECE // max(1, row_size))
    for start in range(0, n_rows, step):
        yield slice(start, start + step)


def gelu(x: np.ndarray) -> np.ndarray:
    flat = np.ascontiguousarray(x).reshape(-1)
    y = np.empty_like(flat)
    for piece in _pieces(flat.size, 1):
        a, t = flat[piece], _gelu_tanh(flat[piece])
        t += 1
        t *= a
        np.multiply(t, 0.5, out=y[piece])
    return y.reshape(x.shape)


def gelu_backward(grad: np.ndarray, x: np.ndarray) -> np.ndarray:
    flat, flat_grad = np.ascontiguousarray(x).reshape(-1), np.ascontiguousarray(grad).reshape(-1)
    dx = np.empty_like(flat)
    for piece in _pieces(flat.size, 1):
        a, t, out = flat[piece], _gelu_tanh(flat[piece]), dx[piece]
        # 1 + t + x (1 - t^2) slope(x), slope(x) = c (1 + 3 * 0.044715 x^2)
        np.multiply(a, a, out=out)
        out *= 3 * 0.044715 * SQRT_2_OVER_PI
        out += SQRT_2_OVER_PI
        out *= a
        out *= 1 - t * t
        out += t
        out += 1
        out *= flat_grad[piece]
        out *= 0.5
    return dx.reshape(x.shape)


def _gelu_tanh(a: np.ndarray) -> np.ndarray:
    t = a * a
    t *= 0.044715 * SQRT_2_OVER_PI
    t += SQRT_2_OVER_PI
    t *= a
    return np.tanh(t, out=t)


def layer_norm(x, gain, bias, eps, centred):
    rows = np.ascontiguousarray(x).reshape(-1, x.shape[-1])
    y = np.empty_like(rows)
    mean, scale = np.empty((len(rows), 1), x.dtype), np.empty((len(rows), 1), x.dtype)
    for piece in _pieces(*rows.shape):
        y[piece], mean[piece], scale[piece] = reference.layer_norm(rows[piece], gain, bias, eps, centred)
    statistics = (*x.shape[:-1], 1)
    return y.reshape(x.shape), mean.reshape(statistics), scale.reshape(statistics)


def layer_norm_backward(grad, x, gain, mean, scale, centred):
    rows, row_grads = (np.ascontiguousarray(a).reshape(-1, x.shape[-1]) for a in (x, grad))
    mean, scale = mean.reshape(-1, 1), scale.reshape(-1, 1)
    dx, dgain, dbias = np.empty_like(rows), np.zeros_like(gain), np.zeros_like(gain)
    for piece in _pieces(*rows.shape):
        dx[piece], more_gain, more_bias = reference.layer_norm_backward(
            row_grads[piece], rows[piece], gain, mean[piece], scale[piece], centred
        )
        dgain += more_gain
        dbias += more_bias
    return dx.reshape(x.shape), dgain, dbias


def embedding_backward(grad: np.ndarray, ids: np.ndarray, n_rows: int) -> np.ndarray:
    """Rows of one id stand together after a sort, and are summed in one run (`np.add.at` takes them singly)."""
    table = np.zeros((n_rows, grad.shape[-1]), grad.dtype)
    if ids.size:
        order = np.argsort(ids, kind="stable")
        present, starts = np.unique(ids[order], return_index=True)
        table[present] = np.add.reduceat(grad[order], starts, axis=0)
    return table


def cross_entropy(logits, labels, weights):
    total, log_total = np.zeros((), logits.dtype), np.empty(len(labels), logits.dtype)
    for piece in _pieces(*logits.shape):
        part, log_total[piece] = reference.cross_entropy(logits[piece], labels[piece], weights[piece])
        total += part
    return total, log_total


def cross_entropy_backward(scale, logits, labels, weights, log_total):
    grad = np.empty_like(logits)
    for piece in _pieces(*logits.shape):
        grad[piece] = reference.cross_entropy_backward(
            scale, logits[piece], labels[piece], weights[piece], log_total[piece]
        )
    return grad


def _blocks(n_queries: int, n_keys: int, causal: bool) -> Iterator[tuple[slice, int]]:
    """Blocks of queries, each with how many keys its last query sees."""
    for start in range(0, n_queries, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, n_queries)
        yield slice(start, stop), n_keys - n_queries + stop if causal else n_keys


def _block_scores(q: np.ndarray, k: np.ndarray, causal: bool) -> np.ndarray:
    """q k^T for one block of (scaled) queries; hidden are only keys beside the diagonal, the block's last ones."""
    scores = q @ k.T
    if causal:
        n = len(q)
        scores[:, -n:][reference.causal_mask(np, n, n)] = -np.inf
    return scores


def attention(q, k, v, causal):
    (n_items, n_queries, n_heads, size), n_keys = q.shape, k.shape[1]
    if n_queries < 16 or (causal and n_queries > n_keys):  # a few queries: one batched product is quicker
        return reference.attention(q, k, v, causal)
    out, log_total = np.empty(q.shape, q.dtype), np.empty((n_items, n_heads, n_queries), q.dtype)
    for item in range(n_items):
        for head in range(n_heads):
            keys, values = k[item, :, head], v[item, :, head]
            queries = q[item, :, head] * (1 / math.sqrt(size))
            for block, seen in _blocks(n_queries, n_keys, causal):
                weights = _block_scores(queries[block], keys[:seen], causal)
                largest = weights.max(axis=-1, keepdims=True)
                weights -= largest
                np.exp(weights, out=weights)
                total = weights.sum(axis=-1, keepdims=True)
                np.divide(weights @ values[:seen], total, out=out[item, block, head])
                log_total[item, head, block] = (largest + np.log(total))[:, 0]
    return out, log_total


def attention_backward(grad, q, k, v, out, log_total, causal, dq, dk, dv):
    (n_items, n_queries, n_heads, size), n_keys = q.shape, k.shape[1]
    if n_queries < 16 or (causal and n_queries > n_keys):
        return reference.attention_backward(grad, q, k, v, out, log_total, causal, dq, dk, dv)
    scale = 1 / math.sqrt(size)
    inner = np.einsum("bthd,bthd->bht", grad, out)
    for item in range(n_items):
        for head in range(n_heads):
            keys, values = k[item, :, head], v[item, :, head]
            queries = q[item, :, head] * scale
            key_sum, value_sum = np.zeros(keys.shape, q.dtype), np.zeros(values.shape, q.dtype)
            for block, seen in _blocks(n_queries, n_keys, causal):
                weights = _block_scores(queries[block], keys[:seen], causal)
                weights -= log_total[item, head, block, None]
                np.exp(weights, out=weights)
                out_grad = grad[item, block, head]
                value_sum[:seen] += weights.T @ out_grad
                dscores = out_grad @ values[:seen].T
                dscores -= inner[item, head, block, None]
                dscores *= weights
                np.multiply(dscores @ keys[:seen], scale, out=dq[item, block, head])
                key_sum[:seen] += dscores.T @ queries[block]
            dk[item, :, head], dv[item, :, head] = key_sum, value_sum


def adamw(weights, grad, first, second, step, learning_rate, betas, eps, decay):
    if not all(a.flags.c_contiguous for a in (weights, grad, first, second)):
        return reference.adamw(weights, grad, first, second, step, learning_rate, betas, eps, decay)
    w, g, m, v = (a.reshape(-1) for a in (weights, grad, first, second))
    for piece in _pieces(weights.size, 1):
        reference.adamw(w[piece], g[piece], m[piece], v[piece], step, learning_rate, betas, eps, decay)
