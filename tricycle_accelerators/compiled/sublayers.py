"""Whole sublayers of a transformer block for one token, with weights in quantized blocks, by spinning threads."""

from __future__ import annotations

from functools import partial
from types import NotImplementedType
from typing import Any

import numpy as np

from tricycle.devices import Array
from tricycle.kernels import ScoreOptions
from tricycle.kernels.sublayers import Linear, Norm
from tricycle_accelerators.compiled.attention import MASK_OR_CAP, MIN_SHARED_BYTES
from tricycle_accelerators.compiled.block_matmul import describe_parts, matrix_decline_reason
from tricycle_accelerators.compiled.elementwise import CONTIGUOUS, FLOAT32
from tricycle_accelerators.compiled.loader import load_loops
from tricycle_accelerators.compiled.vector_matmul import NO_SCALES, spin_team
from tricycle_accelerators.providers import decline_when

NO_ANGLES = np.empty((1, 0), np.float32)


def _decline_reason(x: np.ndarray, norm: Norm, *linears: Linear) -> str | None:
    """Return why the loops cannot run: not one float32 row, parameters of other types, no blocks; else None."""
    if len(x) != 1 or x.dtype != FLOAT32 or not x.flags.carray:
        return f"one row of float32 {CONTIGUOUS}, got {x.dtype} {x.shape}"
    for array in (norm.gain, norm.bias, *(linear.bias for linear in linears)):
        if array is not None and not (array.dtype == FLOAT32 and array.flags.carray):
            return f"parameters of float32 {CONTIGUOUS}"
    for matrix, _ in linears:
        if (why := matrix_decline_reason(matrix)) is not None:
            return why
    return None


def _mlp_decline_reason(x: np.ndarray, norm: Norm, up: Linear, down: Linear, activation: str) -> str | None:
    """Return why the loop cannot run, or None."""
    return _decline_reason(x, norm, up, down)


def _arguments(norm: Norm, *linears: Linear) -> list[tuple[Any, ...]]:
    """Return the norm and linear layers as the loops take them: arrays of length 0 or zeros for absent biases."""
    bias = norm.bias
    if bias is None:
        bias = np.zeros_like(norm.gain) if norm.subtract_mean else NO_SCALES
    found: list[tuple[Any, ...]] = [(norm.gain, bias, norm.eps, norm.subtract_mean)]
    for matrix, bias in linears:
        matrix.parts[0].check()  # all are of one file
        found.append((describe_parts(matrix), NO_SCALES if bias is None else bias))
    return found


@decline_when(_mlp_decline_reason)
def mlp_sublayer(x: np.ndarray, norm: Norm, up: Linear, down: Linear, activation: str) -> Array | NotImplementedType:
    """Return x + down(activation(up(norm(x)))) of a row; NotImplemented for infinity or NaN."""
    loops, blocks, y = load_loops("sublayer_loops"), load_loops("block_loops"), np.empty_like(x)
    arguments = _arguments(norm, up, down)
    job = partial(
        loops.mlp_sublayer, x, *arguments, activation == "swiglu", y, blocks.multiply_block_rows.address
    )
    return NotImplemented if spin_team().run(job) == blocks.NOT_FINITE else y


def _attention_decline_reason(
    x: np.ndarray,
    norm: Norm,
    qkv: Linear,
    projection: Linear,
    rope: tuple[np.ndarray, np.ndarray] | None,
    cached: tuple[np.ndarray, np.ndarray],
    score_options: ScoreOptions,
    off_by_one: bool,
) -> str | None:
    """Return why the loop cannot run: as for an MLP, a soft-cap, or a cache or angles not of float32; else None."""
    if score_options.softcap is not None:
        return MASK_OR_CAP
    for array in (*cached, *(rope or ())):
        if array.dtype != FLOAT32 or not array[0].flags.carray:
            return f"a cache, cosines and sines of float32 {CONTIGUOUS}"
    if cached[0].shape != cached[1].shape:
        return "keys and values of one shape"
    return _decline_reason(x, norm, qkv, projection)


@decline_when(_attention_decline_reason)
def attention_sublayer(
    x: np.ndarray,
    norm: Norm,
    qkv: Linear,
    projection: Linear,
    rope: tuple[np.ndarray, np.ndarray] | None,
    cached: tuple[np.ndarray, np.ndarray],
    score_options: ScoreOptions,
    off_by_one: bool,
) -> Array | NotImplementedType:
    """Return x + projection(attention of norm(x)) of a row, extending the cache; NotImplemented for infinity or NaN."""
    loops, blocks, y = load_loops("sublayer_loops"), load_loops("block_loops"), np.empty_like(x)
    functions = blocks.multiply_block_rows.address, load_loops("decode_loops").attend_to_units.address
    keys, values = cached[0][0], cached[1][0]
    window = score_options.window
    first = 0 if window is None else max(0, len(keys) - window)
    is_shared = keys.nbytes >= MIN_SHARED_BYTES
    options = score_options.scale, off_by_one, first, is_shared
    cos, sin = (NO_ANGLES, NO_ANGLES) if rope is None else rope
    arguments = _arguments(norm, qkv, projection)
    job = partial(loops.attention_sublayer, x, *arguments, cos, sin, keys, values, options, y, functions)
    return NotImplemented if spin_team().run(job) == blocks.NOT_FINITE else y
