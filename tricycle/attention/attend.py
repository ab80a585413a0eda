"""`Attention`: multi-head attention as one operation of queries, keys and values.

Shapes: B batch, T queries, S keys, H query heads, K key and value heads, D head size, E value size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from tricycle import kernels
from tricycle.autograd import NeedsGrad, grad_enabled_for
from tricycle.devices import Array, array_module, joined_view
from tricycle.functions import RowSoftmax, new_softmax
from tricycle.kernels import ScoreOptions
from tricycle.ops import Op, as_floating, as_tensors, check_device
from tricycle.tensor import Operand, Tensor, record

Mask = Tensor | Array | None

# Layers that mix each token with the previous one, by the config field that enables them: see `attention.shift`.
SHIFTS: dict[str, Any] = {}


class Attention(Op):
    """Multi-head attention, softmax(Q K^T / sqrt(D)) V, in memory linear in the numbers of queries and keys.

    Sources: Vaswani et al. 2017, section 3.2; shared heads of keys: Ainslie et al. 2023; sliding windows: Beltagy et
    al. 2020; soft-capping: Gemma Team 2024, section 2.

    Args:
        softmax: the softmax variant: a name in `functions.SOFTMAXES`, or an object.
        causal: each query attends to keys up to its own position; the last query is at the last key.
        window: sliding-window size, including the query's own position; None for no limit. Requires `causal`.
        scale: the factor of the dot products of queries and keys; by default 1 / sqrt(D).
        softcap: the bound c of logit soft-capping, c tanh(score / c); None disables it.
    """

    def __init__(
        self,
        softmax: str | RowSoftmax = "softmax",
        causal: bool = True,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> None:
        self.softmax: Any = new_softmax(softmax)
        self.causal, self.window, self.scale, self.softcap = causal, window, scale, softcap
        if window is not None and (window < 1 or not causal):
            raise ValueError(f"Attention: expected a window of 1 or more, with causal=True, got {window} and {causal}")
        if softcap is not None and not softcap > 0:
            raise ValueError(f"Attention: expected a softcap above 0, got {softcap!r}")

    def forward(
        self,
        query: Operand,
        key: Operand,
        value: Operand,
        mask: Mask = None,
        scales: Tensor | None = None,
        precision: str = "float32",
    ) -> Tensor:
        """Return attention (B, T, H, E) in the query's dtype; key heads are shared; `mask`: True for visible keys.

        Args:
            query: (B, T, H, D).
            key: (B, S, K, D), K a divisor of H: query head h uses key head h // (H / K).
            value: (B, S, K, E).
            mask: a further boolean mask, see `additive_mask`; the result is 0 where all keys are masked.
            scales: the parameter of a softmax variant with one, such as `BlockSoftmax`.
            precision: of the matrix products, for softmax variants with a fused kernel.
        """
        tensors = as_tensors(query, key, value)
        if hasattr(tensors[1].array, "attention"):  # quantized keys and values
            return tensors[1].array.attention(self, tensors[0], tensors[2], mask, scales, precision)
        q, k, v = originals = [as_floating(tensor.array) for tensor in tensors]
        _check_shapes(q, k, v)
        softmax = self.softmax
        if precision != "float32" and softmax.fused:
            q, k, v = _operands(originals, precision)
        hidden = None if mask is None else additive_mask("Attention", mask, q, q.shape[1], k.shape[1], q.shape[2])
        parameters = () if scales is None else (scales.array,)
        like_queries = {"dtype": originals[0].dtype} if softmax.fused else {}  # the operands may have 16 bits
        out, attend_backward = softmax.attend(q, k, v, self.score_options(q, k), hidden, *parameters, **like_queries)
        args = tensors if scales is None else (*tensors, scales)
        if not grad_enabled_for(*args):
            return record(out, args, None, "attention")
        new_grads, n_args = adjacent_like(originals), len(args)

        def backward(grad: Array, needs_grad: NeedsGrad, *options: Any) -> tuple[Array | None, ...]:
            grads = new_grads()
            return (*grads, attend_backward(grad, *grads))[:n_args]

        return record(out, args, backward, "attention", None, (self, hidden))

    def score_options(self, q: Array, k: Array) -> ScoreOptions:
        """Return the kernels' options: scale (default 1 / sqrt(D)), causal offset S - T or None, window, soft-cap."""
        scale = 1 / math.sqrt(q.shape[3]) if self.scale is None else self.scale
        offset = k.shape[1] - q.shape[1] if self.causal else None
        return ScoreOptions(scale, offset, self.window, self.softcap)


def _check_shapes(q: Array, k: Array, v: Array) -> None:
    check_device("Attention", q, k, v)
    fits = q.ndim == k.ndim == v.ndim == 4 and q.shape[::3] == k.shape[::3] and k.shape[:3] == v.shape[:3]
    if not fits or k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        expected = "query (B, T, H, D), key (B, S, K, D) and value (B, S, K, E), H a multiple of K"
        raise ValueError(f"Attention: expected {expected}, got shapes {q.shape}, {k.shape} and {v.shape}")


def additive_mask(op: str, mask: Mask, like: Array, n_queries: int, n_keys: int, n_heads: int = 1) -> Array | None:
    """Convert a boolean mask (B, S), (B, T, S) or (B, H, T, S) to 0 where True, else -inf; None to None.

    `like` has the batch size, dtype and device of the scores. All axes of the mask but S may be 1.
    """
    if mask is None:
        return None
    xp = array_module(like)
    array = mask.array if isinstance(mask, Tensor) else mask
    n_items = len(like)
    full = {2: (n_items, n_keys), 3: (n_items, n_queries, n_keys), 4: (n_items, n_heads, n_queries, n_keys)}
    shape = full.get(array.ndim, ())
    fits = [n in (1, m) for n, m in zip(array.shape[:-1], shape)]
    if not shape or array.dtype != bool or array.shape[-1] != n_keys or not all(fits):
        shapes = " or ".join(map(str, full.values()))
        raise ValueError(f"{op}: expected a mask of booleans of shape {shapes}, got {array.dtype} of {array.shape}")
    spread = array[(slice(None), *[None] * (4 - array.ndim))]
    return xp.where(xp.asarray(spread), 0, -xp.inf).astype(like.dtype)


# Queries, keys and values are usually adjacent views of one product: their gradients get the same layout.
def merge_heads(x: Any) -> Any:
    """Reshape an array or a Tensor (B, T, H, D) to (B, T, H * D), as a view if possible."""
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3])


def _operands(arrays: Sequence[Array], precision: str) -> list[Array]:
    """Convert arrays to operands of matrix products at a precision, in one pass if they are adjacent."""
    whole = joined_view([merge_heads(array) for array in arrays])
    if whole is None:
        return [kernels.matmul_operand(array, precision) for array in arrays]
    converted = kernels.matmul_operand(whole, precision)
    return list(arrays) if converted is whole else _parts(converted, [array.shape for array in arrays])


def adjacent_like(arrays: Sequence[Array]) -> Callable[[], list[Array]]:
    """Return a function that allocates uninitialized arrays of these shapes and dtypes, adjacent if these are."""
    xp = array_module(arrays[0])
    shapes, dtypes = [array.shape for array in arrays], [array.dtype for array in arrays]
    if joined_view([merge_heads(array) for array in arrays]) is None:
        return lambda: [xp.empty(shape, dtype) for shape, dtype in zip(shapes, dtypes)]
    width = sum(shape[2] * shape[3] for shape in shapes)
    return lambda: _parts(xp.empty((*shapes[0][:2], width), dtypes[0]), shapes)


def _parts(whole: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Split (B, T, C) along the last axis into views of these shapes (B, T, H, D)."""
    stops = accumulate(shape[2] * shape[3] for shape in shapes)
    return [whole[..., stop - shape[2] * shape[3] : stop].reshape(shape) for stop, shape in zip(stops, shapes)]
