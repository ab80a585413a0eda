"""The CUDA kernels under the names of `tricycle.kernels.reference`: each looks at its arrays and launches.

What a kernel does not take (float64, rows that are too long, head sizes above 128) goes to the reference. Arrays that
are not contiguous are copied first. Nothing here waits for the device or reads from it.
"""

from __future__ import annotations

import math
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from tricycle.backend import Array, array_module
from tricycle.kernels import reference
from tricycle_accelerators.cuda import attention as cudnn
from tricycle_accelerators.cuda import gemm, launch
from tricycle_accelerators.cuda.launch import HEAD_SIZES, MASK, SIZES, STEPS, TYPES, struct

i32, i64, f32 = np.int32, np.int64, np.float32


def _kind(*arrays: Array) -> str | None:
    """The element type of arrays that share it, as CUDA C++ names it; None where no kernel takes it."""
    dtype = arrays[0].dtype
    return TYPES.get(dtype.name) if all(array.dtype == dtype for array in arrays) else None


def _dense(x: Array) -> Array:
    return x if x.flags.c_contiguous else array_module(x).ascontiguousarray(x)


def _floats(x: Array) -> Array:
    """As contiguous float32."""
    return _dense(_cast(x, np.dtype(f32)))


def _empty(like: Array, shape: tuple[int, ...] | None = None, dtype: Any = None) -> Array:
    xp = array_module(like)
    return xp.empty(like.shape if shape is None else shape, like.dtype if dtype is None else dtype)


def _whole(n: int, kind: str, *arrays: Array) -> int:
    """How many elements a thread may read at once of rows of n: 16 bytes of them, or 1."""
    width = 4 if kind == "float" else 8
    return width if n % width == 0 and all(launch.address(array) % 16 == 0 for array in arrays) else 1


# -------------------------------------------------------------------- elementwise
def _elementwise(name: str, plain: Any, x: Array, n_results: int) -> Any:
    kind = _kind(x)
    if kind is None or not x.size:
        return plain(x)
    results = [_empty(x) for _ in range(n_results)]
    plan = launch.elementwise(x.size, launch.pack(x.dtype.itemsize))
    launch.launch("elementwise", name, (kind,), plan, _dense(x), *results, i64(x.size))
    return results[0] if n_results == 1 else tuple(results)


def gelu(x: Array) -> Array:
    return _elementwise("gelu", reference.gelu, x, 1)


def gelu_with_slope(x: Array) -> tuple[Array, Array]:
    return _elementwise("gelu_with_slope", reference.gelu_with_slope, x, 2)


def gelu_backward(grad: Array, x: Array | None, slope: Array | None) -> Array:
    return reference.gelu_backward(grad, x, slope) if slope is None else multiply(grad, slope)


def relu_squared(x: Array) -> tuple[Array, Array]:
    return _elementwise("relu_squared", reference.relu_squared, x, 2)


def sigmoid(x: Array) -> Array:
    return _elementwise("sigmoid", reference.sigmoid, x, 1)


def multiply(a: Array, b: Array) -> Array:
    """Two arrays of one shape, or an array and a 0-d one."""
    kind = _kind(a)
    fits = type(b) is type(a) and (b.ndim == 0 or (b.shape == a.shape and b.dtype == a.dtype))
    if kind is None or not a.size or not fits:
        return reference.multiply(a, b)
    out, plan = _empty(a), launch.elementwise(a.size, launch.pack(a.dtype.itemsize))
    if b.ndim:
        launch.launch("elementwise", "multiply", (kind,), plan, _dense(a), _dense(b), out, i64(a.size))
    else:
        launch.launch("elementwise", "scale", (kind,), plan, _dense(a), _floats(b), out, i64(a.size))
    return out


@cache
def _small(precision: str) -> np.dtype | None:
    """The dtype of 16 bits that a precision means, if it means one."""
    if precision == "float16":
        return np.dtype(np.float16)
    if precision != "bfloat16":
        return None
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError("precision bfloat16 on a GPU needs ml_dtypes (pip install ml_dtypes)") from error
    return np.dtype(ml_dtypes.bfloat16)


def _cast(x: Array, dtype: np.dtype) -> Array:
    """x in another dtype, in the memory order that it has."""
    if x.dtype == dtype:
        return x
    pair = TYPES.get(x.dtype.name, ""), TYPES.get(dtype.name, "")
    if pair not in launch.KERNELS["elementwise"]["cast"] or not x.size:
        return x.astype(dtype)
    if x.ndim == 2 and x.flags.f_contiguous and not x.flags.c_contiguous:
        return _cast(x.T, dtype).T
    out = _empty(x, dtype=dtype)
    launch.launch("elementwise", "cast", pair, launch.elementwise(x.size, 8), _dense(x), out, i64(x.size))
    return out


def operand(x: Array, precision: str) -> Array:
    small = _small(precision)
    return x if small is None or x.dtype.itemsize == 2 else _cast(x, small)


def operand_and_sums(x: Array, precision: str) -> tuple[Array, Array]:
    return operand(x, precision), sum_rows(x)


def activations(x: Array, precision: str) -> Array:
    return operand(x, precision)


def random_mask(like: Array, shape: tuple[int, ...], keep: float, generator: np.random.Generator) -> Array:
    """Zeros and 1 / keep in the dtype of `like`, drawn on the device from one number of a host generator."""
    kind, size = _kind(like), math.prod(shape)
    if kind is None or not size:
        return reference.random_mask(like, shape, keep, generator)
    mask, seed = _empty(like, shape), int(generator.integers(2**63))
    keys = np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32)
    launch.launch("dropout", "random_mask", (kind,), launch.elementwise(size, 4), mask, i64(size), f32(keep), *keys)
    return mask


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    kind = _kind(x)
    if kind is None or not x.size or x.shape[-1] % 2:
        return reference.rotate(x, cos, sin)
    x = x if x.strides[-1] == x.dtype.itemsize else _dense(x)
    out, (_, n_tokens, n_heads, size) = _empty(x), x.shape
    steps = [i64(step // x.dtype.itemsize) for step in x.strides[:3]]
    numbers = i64(x.size // 2), i32(n_tokens), i32(n_heads), i32(size // 2), *steps
    plan = launch.elementwise(x.size // 2, 1)
    launch.launch("elementwise", "rotate", (kind,), plan, x, _floats(cos), _floats(sin), out, *numbers)
    return out


# -------------------------------------------------------------------- rows
def _rows(name: str, template: tuple[str, ...], x: Array, *others: Array) -> Array:
    out, size = _empty(x), x.shape[-1]
    n_rows = x.size // size
    plan = launch.teams(n_rows, size, x.dtype.itemsize)
    launch.launch("rows", name, template, plan, _dense(x), *map(_dense, others), out, i64(n_rows), i64(size))
    return out


def softmax(x: Array) -> Array:
    kind = _kind(x)
    return reference.softmax(x) if kind is None or not x.size else _rows("softmax", (kind, "false"), x)


def softmax1(x: Array) -> Array:
    kind = _kind(x)
    return reference.softmax1(x) if kind is None or not x.size else _rows("softmax", (kind, "true"), x)


def log_softmax(x: Array) -> Array:
    kind = _kind(x)
    return reference.log_softmax(x) if kind is None or not x.size else _rows("log_softmax", (kind,), x)


def softmax_backward(grad: Array, y: Array) -> Array:
    kind = _kind(grad, y)
    if kind is None or not y.size or grad.shape != y.shape:
        return reference.softmax_backward(grad, y)
    return _rows("softmax_backward", (kind,), grad, y)


def cross_entropy(logits: Array, labels: Array, weights: Array, smoothing: float = 0.0) -> Array:
    kind = _kind(logits)
    if kind is None or not logits.size:
        return reference.cross_entropy(logits, labels, weights, smoothing)
    return _cross_entropy(kind, logits, labels, weights, smoothing, None)


def cross_entropy_with_slope(
    logits: Array, labels: Array, weights: Array, smoothing: float = 0.0, out: Array | None = None
) -> tuple[Array, Array]:
    """
    Args:
        out: where the slope goes; the logits themselves, if nobody needs them any more.
    """
    kind = _kind(logits)
    if kind is None or not logits.size:
        return reference.cross_entropy_with_slope(logits, labels, weights, smoothing)
    if out is None:
        out = _empty(logits)
    elif out.shape != logits.shape or out.dtype != logits.dtype or not out.flags.c_contiguous:
        wanted = f"a contiguous out of shape {logits.shape} and {logits.dtype}"
        raise ValueError(f"cross_entropy_with_slope: expected {wanted}, got {out.shape} and {out.dtype}")
    return _cross_entropy(kind, logits, labels, weights, smoothing, out), out


def _cross_entropy(
    kind: str, logits: Array, labels: Array, weights: Array, smoothing: float, slope: Array | None
) -> Array:
    n_rows, size = logits.shape
    if labels.shape != (n_rows,) or weights.shape != (n_rows,):
        found = f"{labels.shape} and {weights.shape}"
        raise ValueError(f"cross_entropy: expected labels and weights of shape ({n_rows},), got {found}")
    costs, ids = _empty(logits, (n_rows,), f32), _dense(labels.astype(i64, copy=False))
    numbers = i64(n_rows), i64(size), f32(smoothing)
    plan = launch.teams(n_rows, size, logits.dtype.itemsize)
    launch.launch(
        "rows", "cross_entropy", (kind,), plan, _dense(logits), ids, _floats(weights), costs, slope, *numbers
    )
    return _whole_sum(costs, "float", "false")


# -------------------------------------------------------------------- sums
def _whole_sum(x: Array, kind: str, squares: str) -> Array:
    plan = launch.whole_sum(x.size, x.dtype.itemsize)
    n_blocks = plan.grid[0]
    total = _empty(x, (), f32)
    found = total if n_blocks == 1 else _empty(x, (n_blocks,), f32)
    launch.launch("reduce", "sum_all", (kind, squares), plan, _dense(x), found, i64(x.size))
    if n_blocks > 1:
        one = launch.Plan((1, 1), plan.block)
        launch.launch("reduce", "sum_all", ("float", "false"), one, found, total, i64(n_blocks))
    return total


def sum_squares(x: Array) -> Array:
    """The sum of x * x over everything, a 0-d float32 array."""
    kind = _kind(x)
    return (x * x).sum() if kind is None or not x.size else _whole_sum(x, kind, "true")


def sum_rows(x: Array) -> Array:
    kind = _kind(x)
    return reference.sum_rows(x) if kind is None or not x.size else _column_sums(_dense(x), kind)


def _column_sums(x: Array, kind: str) -> Array:
    n_rows, size = x.shape
    plan, chunk = launch.column_sums(n_rows, size, x.dtype.itemsize)
    found = _empty(x, (plan.grid[1], size), f32)
    launch.launch("reduce", "sum_rows", (kind,), plan, x, found, i64(n_rows), i64(size), i64(chunk))
    return found[0] if len(found) == 1 else _column_sums(found, "float")


# -------------------------------------------------------------------- normalisation
def layer_norm(x: Array, gain: Array, bias: Array | None, eps: float, centred: bool) -> tuple[Array, Array, Array]:
    kind = _kind(x)
    if kind is None or not x.size:
        return reference.layer_norm(x, gain, bias, eps, centred)
    size, statistics = x.shape[-1], (*x.shape[:-1], 1)
    y, mean, scale = _empty(x), _empty(x, statistics, f32), _empty(x, statistics, f32)
    given = _dense(x), _floats(gain), None if bias is None else _floats(bias)
    numbers = i64(x.size // size), i32(size), f32(eps), i32(centred)
    plan = launch.teams(x.size // size, size, x.dtype.itemsize)
    launch.launch("norm", "layer_norm", (kind,), plan, *given, y, mean, scale, *numbers)
    return y, mean, scale


def layer_norm_backward(
    grad: Array, x: Array, gain: Array, mean: Array, scale: Array, centred: bool
) -> tuple[Array, Array, Array]:
    kind = _kind(grad, x)
    if kind is None or not x.size:
        return reference.layer_norm_backward(grad, x, gain, mean, scale, centred)
    size, given = x.shape[-1], (_dense(grad), _dense(x), _floats(gain), _floats(mean), _floats(scale))
    at_once, n_rows = _whole(size, kind, *given[:3]), x.size // size
    found = launch.norm_backward(n_rows, size, at_once)
    if found is None:
        return reference.layer_norm_backward(grad, x, gain, mean, scale, centred)
    plan, held = found
    dx, sums = _empty(x), _empty(x, (plan.grid[0], 2 * size), f32)
    template, numbers = (kind, str(at_once), str(held)), (i64(n_rows), i32(size), i32(centred))
    launch.launch("norm", "layer_norm_backward", template, plan, *given, dx, sums, *numbers)
    total = _column_sums(sums, "float")
    return dx, total[:size], total[size:]


# -------------------------------------------------------------------- tables
def embedding_backward(grad: Array, ids: Array, n_rows: int) -> Array:
    kind = _kind(grad)
    if kind is None or not grad.size or not n_rows:
        return reference.embedding_backward(grad, ids, n_rows)
    xp, (n_tokens, size) = array_module(grad), grad.shape
    grad, ids = _dense(grad), _dense(ids.astype(i64, copy=False))
    n_tiles = launch.up(n_tokens, launch.TOKENS)
    counts, (ranks, ordered) = xp.zeros((n_tiles, n_rows), i32), (_empty(grad, (n_tokens,), i32) for _ in range(2))
    totals, starts = _empty(grad, (n_rows,), i32), _empty(grad, (n_rows + 1,), i32)
    n, rows, tiles = i64(n_tokens), i64(n_rows), launch.Plan((n_tiles, 1), (launch.TOKENS, 1)).check()
    launch.launch("embedding", "rank_tokens", (), tiles, ids, ranks, counts, n, rows)
    launch.launch("embedding", "add_tiles", (), launch.elementwise(n_rows, 1), counts, totals, i64(n_tiles), rows)
    launch.launch("embedding", "start_rows", (), launch.Plan((1, 1), (1024, 1)), totals, starts, rows)
    launch.launch("embedding", "sort_tokens", (), tiles, ids, ranks, counts, starts, ordered, n, rows)
    at_once, table = _whole(size, kind, grad), _empty(grad, (n_rows, size), f32)
    plan = launch.token_sums(n_rows, size, at_once)
    numbers = rows, i64(size), i32(launch.MANY)
    launch.launch("embedding", "sum_tokens", (kind, str(at_once)), plan, grad, ordered, starts, table, *numbers)
    return table


# -------------------------------------------------------------------- optimiser
def adamw(
    weights: Array, grad: Array, first: Array, second: Array, step: Any, learning_rate: Any,
    betas: tuple[float, float], eps: float, decay: float, factor: Array | None = None,
) -> None:
    """`step`, `learning_rate` and `factor` may be 0-d arrays on the device."""
    changed = weights, first, second
    if not weights.flags.c_contiguous and weights.flags.f_contiguous:
        adamw(weights.T, grad.T, first.T, second.T, step, learning_rate, betas, eps, decay, factor)
        return
    kind, plain = _kind(grad), any(a.dtype != f32 or not a.flags.c_contiguous for a in changed)
    if kind is None or plain or any(a.shape != weights.shape for a in (grad, *changed)):
        reference.adamw(weights, grad, first, second, step, learning_rate, betas, eps, decay, factor)
        return
    if not weights.size:
        return

    def number(value: Any) -> tuple[Any, Array | None]:
        on_device = hasattr(value, "ndim") and not isinstance(value, np.generic)
        return (f32(0), _floats(value)) if on_device else (f32(value), None)

    logs = (f32(math.log(beta)) if beta else f32(-math.inf) for beta in betas)
    at = None if factor is None else _floats(factor)
    numbers = *number(step), *number(learning_rate), at, *map(f32, betas), *logs, f32(eps), f32(decay)
    plan = launch.elementwise(weights.size, launch.pack(grad.dtype.itemsize))
    launch.launch("adamw", "adamw", (kind,), plan, weights, _dense(grad), first, second, i64(weights.size), *numbers)


# -------------------------------------------------------------------- matrices
def matmul(
    a: Array, b: Array, bias: Array | None = None, out: Array | None = None, dtype: Any = None,
    precision: str = "float32",
) -> Array:
    return gemm.matmul(a, b, bias, out, dtype, precision)


# -------------------------------------------------------------------- attention
def _steps(x: Array) -> np.ndarray:
    """Of (B, T, H, D), in elements."""
    return struct(STEPS, *(step // x.dtype.itemsize for step in x.strides[:3]))


def _rows_lie_apart(x: Array, bytes_: int) -> bool:
    """Whether each (D,) lies in one piece that starts at a multiple of so many bytes."""
    places = (launch.address(x), *(step for step, n in zip(x.strides[:3], x.shape) if n > 1))
    return (x.strides[-1] == x.dtype.itemsize or x.shape[-1] == 1) and all(place % bytes_ == 0 for place in places)


def _in_rows(x: Array, bytes_: int) -> Array:
    return x if _rows_lie_apart(x, bytes_) else array_module(x).array(x, order="C")


def _sizes(q: Array, k: Array, offset: int | None, nothing: bool) -> np.ndarray:
    n_items, n_queries, n_heads, size = q.shape
    numbers = n_items, n_queries, k.shape[1], n_heads, size, offset is not None, offset or 0, nothing
    return struct(SIZES, *numbers, 1 / math.sqrt(size))


def _mask(mask: Array | None) -> tuple[np.ndarray, Array | None]:
    """The argument, and the array that it points into."""
    if mask is None:
        return struct(MASK, 0, 0, 0, 0), None
    mask = _floats(mask)
    steps = (step // 4 if n > 1 else 0 for step, n in zip(mask.strides[:3], mask.shape))
    return struct(MASK, launch.address(mask), *steps), mask


def _way(q: Array, *others: Array) -> SimpleNamespace | None:
    """Which kernels take arrays (B, T, H, D) like these: on tensor cores or in float32; None: none do."""
    kind, size = _kind(q, *others), q.shape[-1]
    if kind is None or not q.size or not others[0].size or size > 128:
        return None
    if kind != "float" and size in HEAD_SIZES and launch.has_tensor_cores():
        tile = launch.columns_tile(size)
        return SimpleNamespace(
            name="attention_mma", dtype=q.dtype, bytes=16, threads=128, rows=64, backward_rows=64,
            forward=(kind, str(size), str(tile)), backward=(kind, str(size), str(launch.backward_columns_tile(size))),
            shared=launch.tensor_core_shared(size),
        )
    padded = next(each for each in launch.PADDED_SIZES if each >= size)
    forward, backward = launch.forward_tile(padded), launch.backward_tile(padded)
    return SimpleNamespace(
        name="attention", dtype=np.dtype(f32), bytes=4, threads=256, rows=forward,
        backward_rows=backward, forward=(str(padded), str(forward)), backward=(str(padded), str(backward)),
        shared=launch.float_shared(padded),
    )


def attention(
    q: Array, k: Array, v: Array, offset: int | None, nothing: bool, mask: Array | None = None
) -> tuple[Array, Array]:
    found = cudnn.forward(q, k, v, offset, nothing, mask)
    way = _way(q, k, v) if found is None else None
    if way is None:
        return reference.attention(q, k, v, offset, nothing, mask) if found is None else found
    (n_items, n_queries, n_heads, _), dtype = q.shape, q.dtype
    q, k, v = (_in_rows(_cast(x, way.dtype), way.bytes) for x in (q, k, v))
    out, log_total = _empty(q, q.shape), _empty(q, (n_items, n_heads, n_queries), f32)
    at, kept = _mask(mask)
    arguments = q, k, v, out, log_total, _sizes(q, k, offset, nothing), *map(_steps, (q, k, v, out)), at
    plan = launch.attention_tiles(n_queries, n_items * n_heads, way.rows, way.threads, way.shared.forward)
    launch.launch(way.name, way.name, way.forward, plan, *arguments)
    del kept  # it had to live until here
    return _cast(out, dtype), log_total


def attention_backward(
    grad: Array, q: Array, k: Array, v: Array, out: Array, log_total: Array, offset: int | None,
    dq: Array, dk: Array, dv: Array, mask: Array | None = None,
) -> None:
    if cudnn.backward(grad, q, k, v, out, log_total, offset, dq, dk, dv, mask):
        return
    way = _way(q, k, v, grad, out)
    if way is None:
        reference.attention_backward(grad, q, k, v, out, log_total, offset, dq, dk, dv, mask)
        return
    n_items, n_queries, n_heads, _ = q.shape
    grad, q, k, v, out = (_in_rows(_cast(x, way.dtype), way.bytes) for x in (grad, q, k, v, out))
    log_total, inner = _floats(log_total), _empty(q, (n_items, n_heads, n_queries), f32)
    sizes, (at, kept) = _sizes(q, k, offset, False), _mask(mask)
    plan = launch.teams(inner.size, 1, 4)
    kind = TYPES[way.dtype.name]
    launch.launch("attention", "attention_inner", (kind,), plan, grad, out, inner, sizes, _steps(grad), _steps(out))
    # gradients go straight to where they are wanted, if that lies as the kernels write
    wanted = dq, dk, dv
    fits = [x.dtype == way.dtype and _rows_lie_apart(x, way.bytes) for x in wanted]
    dq, dk, dv = (x if fit else _empty(q, x.shape, way.dtype) for x, fit in zip(wanted, fits))
    given, steps = (grad, q, k, v, log_total, inner), tuple(map(_steps, (grad, q, k, v)))
    for part, n_tokens, results in (("queries", n_queries, (dq,)), ("keys", k.shape[1], (dk, dv))):
        shared = getattr(way.shared, part)
        plan = launch.attention_tiles(n_tokens, n_items * n_heads, way.backward_rows, way.threads, shared)
        arguments = *given, *results, sizes, *steps, *map(_steps, results), at
        launch.launch(way.name, f"{way.name}_backward_{part}", way.backward, plan, *arguments)
    for x, fit, result in zip(wanted, fits, (dq, dk, dv)):
        if not fit:
            x[...] = result
    del kept


# -------------------------------------------------------------------- recurrence
def _runs(*arrays: Array | None) -> bool:
    """Whether the recurrent kernels take these: contiguous float32 (and booleans), and something to do."""
    given = [array for array in arrays if array is not None]
    return all(a.flags.c_contiguous and a.size and a.dtype.name in ("float32", "bool") for a in given)


def _forward(name: str, plain: Any, gates, states, weights, bias, active, options: tuple) -> None:
    if not _runs(gates, states, bias, active) or weights.dtype != f32:
        plain(gates, states, weights, bias, active, *options)
        return
    n_steps, n_items, _ = gates.shape
    size, recurrent = states.shape[-1], _empty(gates, gates.shape[1:])
    plan = launch.elementwise(n_items * size, 1)
    numbers = i64(states[0].size), i64(n_items), i32(size), *map(i32, options)
    for t in range(n_steps):
        before, after, moves = states[0, t], states[0, t + 1], None if active is None else active[t]
        matmul(before, weights, None, recurrent)
        launch.launch("recurrent", name, (), plan, gates[t], recurrent, bias, before, after, moves, *numbers)


def _backward(name: str, plain: Any, grad, gates, states, weights, active, d_gates, d_states, options: tuple) -> None:
    if not _runs(grad, gates, states, active, d_gates, d_states) or weights.dtype != f32:
        plain(grad, gates, states, weights, active, d_gates, d_states, *options)
        return
    n_steps, n_items, _ = gates.shape
    size, across, d_output = states.shape[-1], weights.T, d_states[0]
    plan = launch.elementwise(n_items * size, 1)
    steps = i64(states[0].size), i64(grad[0].size), i64(d_gates[0].size)
    numbers = *steps, i64(n_items), i32(size), *map(i32, options)
    for t in reversed(range(n_steps)):
        moves, d = None if active is None else active[t], d_gates[0, t]
        arrays = gates[t], states[0, t], states[0, t + 1], grad[0, t], d_states, d, moves
        launch.launch("recurrent", name, (), plan, *arrays, *numbers)
        d_output += matmul(d_gates[-1, t], across)


def rnn(gates, states, weights, bias, active, relu: bool) -> None:
    _forward("rnn", reference.rnn, gates, states, weights, bias, active, (relu,))


def rnn_backward(grad, gates, states, weights, active, d_gates, d_states, relu: bool) -> None:
    plain = reference.rnn_backward
    _backward("rnn_backward", plain, grad, gates, states, weights, active, d_gates, d_states, (relu,))


def gru(gates, states, weights, bias, active) -> None:
    _forward("gru", reference.gru, gates, states, weights, bias, active, ())


def gru_backward(grad, gates, states, weights, active, d_gates, d_states) -> None:
    _backward("gru_backward", reference.gru_backward, grad, gates, states, weights, active, d_gates, d_states, ())


def lstm(gates, states, weights, bias, active) -> None:
    _forward("lstm", reference.lstm, gates, states, weights, bias, active, ())


def lstm_backward(grad, gates, states, weights, active, d_gates, d_states) -> None:
    _backward("lstm_backward", reference.lstm_backward, grad, gates, states, weights, active, d_gates, d_states, ())
