"""Attention kernels for CuPy arrays: cuDNN where it supports them, else CUDA kernels (tensor cores or float32)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from tricycle.devices import Array, array_module
from tricycle.kernels import ScoreOptions
from tricycle_accelerators.cuda import arrays, cudnn, launch
from tricycle_accelerators.cuda.arrays import f32
from tricycle_accelerators.providers import decline_when


def _strides(x: Array) -> np.ndarray:
    """Return the strides of (B, T, H, D), in elements, as a kernel argument."""
    return launch.struct_argument(launch.STRIDES, *(stride // x.dtype.itemsize for stride in x.strides[:3]))


def _has_aligned_rows(x: Array, bytes_: int) -> bool:
    """Return whether each head vector (D,) of x is contiguous and starts at a multiple of `bytes_` bytes."""
    places = (launch.device_address(x), *(stride for stride, n in zip(x.strides[:3], x.shape) if n > 1))
    return (x.strides[-1] == x.dtype.itemsize or x.shape[-1] == 1) and all(place % bytes_ == 0 for place in places)


def _with_aligned_rows(x: Array, bytes_: int) -> Array:
    """Return x, or a C-ordered copy unless its rows are contiguous and aligned to this number of bytes."""
    return x if _has_aligned_rows(x, bytes_) else array_module(x).array(x, order="C")


def _sizes(q: Array, k: Array, score_options: ScoreOptions, off_by_one: bool) -> np.ndarray:
    """Return the kernel argument (a struct) of the shapes and score options; a window that hides nothing becomes 0."""
    n_items, n_queries, n_heads, size = q.shape
    lengths = n_items, n_queries, k.shape[1], n_heads, k.shape[2], size
    offset, window = score_options.offset or 0, score_options.window or 0
    if window >= n_queries + abs(offset):  # it hides nothing, and may be too large for the kernels' arithmetic
        window = 0
    seen = score_options.offset is not None, offset, window
    return launch.struct_argument(
        launch.SIZES, *lengths, *seen, off_by_one, score_options.scale, score_options.softcap or 0
    )


def _mask(mask: Array | None) -> tuple[np.ndarray, Array | None]:
    """Return the kernel argument (address and strides) of a mask or None, and the float32 array it points into."""
    if mask is None:
        return launch.struct_argument(launch.MASK, 0, 0, 0, 0), None
    mask = arrays.contiguous_float32(mask)
    strides = (stride // 4 if n > 1 else 0 for stride, n in zip(mask.strides[:3], mask.shape))
    return launch.struct_argument(launch.MASK, launch.device_address(mask), *strides), mask


def _select_kernels(q: Array) -> SimpleNamespace:
    """Return kernels' names, tiles, launch settings: tensor cores for 16 bits if size and GPU allow, else float32."""
    kind, size = arrays.cuda_type(q.dtype), q.shape[-1]
    if kind != "float" and size in launch.TENSOR_CORE_TILES and launch.has_tensor_cores():
        return SimpleNamespace(
            name="attention_mma",
            dtype=q.dtype,
            bytes=16,
            threads=128,
            rows=64,
            backward_rows=64,
            forward=(kind, str(size), str(launch.TENSOR_CORE_TILES[size])),
            backward=(kind, str(size), str(launch.TENSOR_CORE_BACKWARD_TILES[size])),
            shared=launch.tensor_core_shared_memory(size),
        )
    padded = next(each for each in launch.PADDED_SIZES if each >= size)
    forward, backward = launch.FLOAT32_TILES[padded], launch.FLOAT32_BACKWARD_TILES[padded]
    return SimpleNamespace(
        name="attention",
        dtype=np.dtype(f32),
        bytes=4,
        threads=256,
        rows=forward,
        backward_rows=backward,
        forward=(str(padded), str(forward)),
        backward=(str(padded), str(backward)),
        shared=launch.float32_shared_memory(padded),
    )


def _attention_decline_reason(q: Array, k: Array, v: Array, *_: Any, **__: Any) -> str | None:
    """Return why no CUDA kernel (nor cuDNN, which supports fewer) takes these arrays, or None."""
    if q.shape[-1] > launch.PADDED_SIZES[-1]:
        return f"a head size above {launch.PADDED_SIZES[-1]}"
    if k.shape != v.shape:
        return f"keys and values of one shape, got {k.shape} and {v.shape}"
    if not q.dtype == k.dtype == v.dtype:
        return f"queries, keys and values of one dtype, got {q.dtype}, {k.dtype} and {v.dtype}"
    return arrays.array_decline_reason(q) if k.size else "no keys"


@decline_when(_attention_decline_reason)
def attention(
    q: Array,
    k: Array,
    v: Array,
    score_options: ScoreOptions,
    off_by_one: bool,
    mask: Array | None = None,
    dtype: Any = None,
) -> tuple[Array, Array]:
    """Return output (B, T, H, D) and float32 logsumexp (B, H, T) by cuDNN or CUDA; NotImplemented if neither fits."""
    dtype = dtype or q.dtype
    results = cudnn.attention_forward(q, k, v, score_options, off_by_one, mask)
    if results is not None:
        return arrays.cast(results[0], dtype), results[1]
    way = _select_kernels(q)
    n_items, n_queries, n_heads, _ = q.shape
    q, k, v = (_with_aligned_rows(arrays.cast(x, way.dtype), way.bytes) for x in (q, k, v))
    out, logsumexp = arrays.empty_like(q, q.shape), arrays.empty_like(q, (n_items, n_heads, n_queries), f32)
    at, kept = _mask(mask)
    arguments = q, k, v, out, logsumexp, _sizes(q, k, score_options, off_by_one), *map(_strides, (q, k, v, out)), at
    plan = launch.plan_attention(n_queries, n_items * n_heads, way.rows, way.threads, way.shared.forward)
    launch.launch(way.name, way.name, way.forward, plan, *arguments)
    del kept  # it had to live until here
    return arrays.cast(out, dtype), logsumexp


def _attention_backward_decline_reason(
    grad: Array, q: Array, k: Array, v: Array, out: Array, *_: Any, **__: Any
) -> str | None:
    """Return why no CUDA kernel runs: `grad` or `out` not in q's dtype, or as for the forward pass; else None."""
    if not grad.dtype == out.dtype == q.dtype:
        return f"an output and a gradient in {q.dtype}, got {out.dtype} and {grad.dtype}"
    return _attention_decline_reason(q, k, v)


@decline_when(_attention_backward_decline_reason)
def attention_backward(
    grad: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    logsumexp: Array,
    score_options: ScoreOptions,
    dq: Array,
    dk: Array,
    dv: Array,
    mask: Array | None = None,
) -> None:
    """Write the attention gradients into dq, dk and dv by cuDNN, else CUDA; return NotImplemented if neither fits."""
    if cudnn.attention_backward(grad, q, k, v, out, logsumexp, score_options, dq, dk, dv, mask):
        return
    way = _select_kernels(q)
    n_items, n_queries, n_heads, _ = q.shape
    grad, q, k, v, out = (_with_aligned_rows(arrays.cast(x, way.dtype), way.bytes) for x in (grad, q, k, v, out))
    logsumexp, inner = arrays.contiguous_float32(logsumexp), arrays.empty_like(q, (n_items, n_heads, n_queries), f32)
    sizes, (at, kept) = _sizes(q, k, score_options, False), _mask(mask)
    plan = launch.plan_rows(inner.size, 1, 4)
    kind = arrays.cuda_type(way.dtype)
    launch.launch("attention", "attention_inner", (kind,), plan, grad, out, inner, sizes, _strides(grad), _strides(out))
    # gradients go straight to where they are wanted, if that lies as the kernels write
    wanted = dq, dk, dv
    fits = [x.dtype == way.dtype and _has_aligned_rows(x, way.bytes) for x in wanted]
    dq, dk, dv = (x if fit else arrays.empty_like(q, x.shape, way.dtype) for x, fit in zip(wanted, fits))
    operands, strides = (grad, q, k, v, logsumexp, inner), tuple(map(_strides, (grad, q, k, v)))
    n_keys, n_key_heads = k.shape[1:3]
    for part, n_tokens, n_tiled, results in (
        ("queries", n_queries, n_heads, (dq,)),
        ("keys", n_keys, n_key_heads, (dk, dv)),
    ):
        shared = getattr(way.shared, part)
        plan = launch.plan_attention(n_tokens, n_items * n_tiled, way.backward_rows, way.threads, shared)
        arguments = *operands, *results, sizes, *strides, *map(_strides, results), at
        launch.launch(way.name, f"{way.name}_backward_{part}", way.backward, plan, *arguments)
    for x, fit, result in zip(wanted, fits, (dq, dk, dv)):
        if not fit:
            x[...] = result
    del kept
