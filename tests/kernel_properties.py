"""How to draw the arguments of each kernel that has faster versions: what test_kernel_properties.py runs on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from attention_cases import cubes, cubes_backward
from hypothesis import strategies as st

from tricycle import kernels
from tricycle.kernels import KERNELS, Scoring
from tricycle.kernels.quantized import FewBits

Draw = Callable[[st.SearchStrategy], Any]


class Arguments(NamedTuple):
    """Of one call.

    Attributes:
        values: floats as float64.
        written: the places of those that the kernel writes; what it returns counts where there are none.
    """

    values: list[Any]
    written: tuple[int, ...] = ()


ARGUMENTS: dict[str, Callable[[Draw], Arguments]] = {}
LENGTHS = st.sampled_from([0, 1, 2, 3, 5, 7, 16, 17, 33, 70])
LEAST_1 = st.sampled_from([1, 2, 3, 5, 7, 16, 17, 33, 70])
FEW = st.integers(1, 3)


def of(*names: str) -> Callable[[Callable], Callable]:
    def enter(draw_arguments: Callable[..., Arguments]) -> Callable[..., Arguments]:
        for name in names:
            ARGUMENTS[name] = partial(draw_arguments, name=name) if len(names) > 1 else draw_arguments
        return draw_arguments

    return enter


def generator(draw: Draw) -> np.random.Generator:
    return np.random.default_rng(draw(st.integers(0, 2**16)))


def any_shape(draw: Draw, least_axes: int = 0) -> tuple[int, ...]:
    """Of a few thousand elements at most."""
    shape = draw(st.lists(LENGTHS, min_size=least_axes, max_size=3))
    while np.prod(shape) > 5000:
        shape[shape.index(max(shape))] = 3
    return tuple(shape)


def poison(*shape: int) -> np.ndarray:
    return np.full(shape, np.nan)


# -------------------------------------------------------------------- elementwise, sums
@of("gelu", "gelu_with_slope", "relu_squared", "sum_squares")
def _one(draw, name):
    return Arguments([generator(draw).standard_normal(any_shape(draw))])


@of("gelu_backward")
def _gelu_backward(draw):
    shape, rng = any_shape(draw), generator(draw)
    x = rng.standard_normal(shape)
    known = [x, None] if draw(st.booleans()) else [None, kernels.gelu_with_slope.plain(x)[1]]
    return Arguments([rng.standard_normal(shape), *known])


@of("swiglu")
def _swiglu(draw):
    shape = any_shape(draw)
    return Arguments([generator(draw).standard_normal((*shape[:-1], 2 * shape[-1] if shape else 2))])


@of("swiglu_backward")
def _swiglu_backward(draw):
    shape, rng = (*any_shape(draw), draw(LENGTHS)), generator(draw)
    return Arguments([rng.standard_normal(shape), rng.standard_normal((*shape[:-1], 2 * shape[-1]))])


@of("multiply")
def _multiply(draw):
    shape, rng = any_shape(draw), generator(draw)
    return Arguments([rng.standard_normal(shape), rng.standard_normal(draw(st.sampled_from([shape, shape, ()])))])


@of("add")
def _add(draw):
    shape, rng = any_shape(draw), generator(draw)
    return Arguments([rng.standard_normal(shape), rng.standard_normal(shape)])


@of("rotate")
def _rotate(draw):
    items, tokens, heads, half = draw(LENGTHS), draw(LENGTHS), draw(FEW), draw(FEW)
    rng = generator(draw)
    angles = rng.standard_normal((tokens, half))
    return Arguments([rng.standard_normal((items, tokens, heads, 2 * half)), np.cos(angles), np.sin(angles)])


@of("sum_rows")
def _sum_rows(draw):
    return Arguments([generator(draw).standard_normal((draw(LENGTHS), draw(LENGTHS)))])


@of("operand", "operand_and_sums")
def _operand(draw, name):
    return Arguments([generator(draw).standard_normal((draw(LENGTHS), draw(LENGTHS))), "float32"])


@of("embedding_backward")
def _embedding_backward(draw):
    n_ids, n_rows, channels, rng = draw(LENGTHS), draw(LEAST_1), draw(LENGTHS), generator(draw)
    return Arguments([rng.standard_normal((n_ids, channels)), rng.integers(0, n_rows, n_ids), n_rows])


@of("layer_norm", "layer_norm_backward")
def _layer_norm(draw, name):
    shape, centred, rng = (*any_shape(draw), draw(LEAST_1)), draw(st.booleans()), generator(draw)
    x, gain = rng.standard_normal(shape) * 2 + 1, rng.standard_normal(shape[-1])
    bias = rng.standard_normal(shape[-1]) if draw(st.booleans()) else None
    if name == "layer_norm":
        return Arguments([x, gain, bias, 1e-5, centred])
    _, mean, scale = kernels.layer_norm.plain(x, gain, None, 1e-5, centred)
    return Arguments([rng.standard_normal(shape), x, gain, mean, scale, centred])


@of("cross_entropy")
def _cross_entropy(draw):
    n, n_classes, rng = draw(LEAST_1), draw(LEAST_1), generator(draw)
    weights = rng.random(n) * (rng.random(n) < 0.8)
    smoothing = draw(st.sampled_from([0.0, 0.1]))
    logits = rng.standard_normal((n, n_classes)) * draw(st.sampled_from([1, 5, 100]))
    return Arguments([logits, rng.integers(0, n_classes, n), weights, smoothing])


# -------------------------------------------------------------------- products
@of("matmul")
def _matmul(draw):
    n, k, m, rng = draw(LENGTHS), draw(LENGTHS), draw(LENGTHS), generator(draw)
    bias = rng.standard_normal(m) if draw(st.booleans()) else None
    a, b = (rng.standard_normal(shape) for shape in ((n, k), (k, m)))
    if draw(st.booleans()):
        return Arguments([a, b, bias])
    return Arguments([a, b, bias, poison(n, m)], (3,))


@of("batched_matmul")
def _batched_matmul(draw):
    lead, rng = tuple(draw(st.lists(st.integers(0, 5), max_size=2))), generator(draw)
    n, k, m = draw(LENGTHS), draw(LENGTHS), draw(LENGTHS)
    return Arguments([rng.standard_normal((*lead, n, k)), rng.standard_normal((*lead, k, m))])


@of("project")
def _project(draw):
    sizes, rng = (draw(LENGTHS), draw(LENGTHS)), generator(draw)
    k, m = draw(LENGTHS), draw(LENGTHS)
    bias = rng.standard_normal(m) if draw(st.booleans()) else None
    out = np.full((*sizes, m), np.nan)
    return Arguments([rng.standard_normal((*sizes, k)), rng.standard_normal((k, m)), bias, out], written=(3,))


@of("few_bits_matmul")
def _few_bits_matmul(draw):
    n, rng = draw(LENGTHS), generator(draw)
    k, m = (draw(st.sampled_from([1, 2, 7, 33, 64, 576])) for _ in range(2))
    kinds = ["int8", "float16"] + ["bfloat16"] * (find_spec("ml_dtypes") is not None)
    kind, turned = draw(st.sampled_from(kinds)), draw(st.booleans())
    matrix = FewBits.of(rng.standard_normal((k, m)).astype(np.float32), kind, turned)
    return Arguments([rng.standard_normal((n, k)), matrix, rng.standard_normal(m) if draw(st.booleans()) else None])


@of("orthogonalise")
def _orthogonalise(draw):
    return Arguments([generator(draw).standard_normal((draw(st.integers(0, 5)), draw(LEAST_1), draw(LEAST_1)))])


# -------------------------------------------------------------------- attention
def _attention_inputs(draw: Draw) -> tuple[list[np.ndarray], Scoring, np.ndarray | None, np.random.Generator]:
    """q, k, v; scoring; a mask that hides some rows whole."""
    items, queries, keys = draw(st.integers(0, 3)), draw(LENGTHS), draw(LENGTHS)
    key_heads, shared, size, rng = draw(FEW), draw(FEW), draw(FEW), generator(draw)
    value_size = draw(st.sampled_from([size, size, 4]))
    shapes = (queries, key_heads * shared, size), (keys, key_heads, size), (keys, key_heads, value_size)
    offset = draw(st.sampled_from([None, keys - queries, 0, 4, -2, keys + 6]))
    window = None if offset is None else draw(st.sampled_from([None, 1, 9, 40]))
    scoring = Scoring(draw(st.sampled_from([0.7, 3.0])), offset, window, draw(st.sampled_from([None, 1.5])))
    mask = None
    if draw(st.booleans()):
        full = items, key_heads * shared, queries, keys
        shape = [draw(st.sampled_from([1, n])) if n else n for n in full[:-1]]
        mask = np.where(rng.random((*shape, keys)) < draw(st.sampled_from([0.2, 0.8])), 0, -np.inf)
    return [rng.standard_normal((items, *shape)) for shape in shapes], scoring, mask, rng


@of("attention", "attention_backward")
def _attention(draw, name):
    (q, k, v), scoring, mask, rng = _attention_inputs(draw)
    nothing = draw(st.booleans())
    if name == "attention":
        return Arguments([q, k, v, scoring, nothing, mask])
    out, log_total = kernels.attention.plain(q, k, v, scoring, nothing, mask)
    room = [poison(*x.shape) for x in (q, k, v)]
    values = [rng.standard_normal(out.shape), q, k, v, out, log_total, scoring, *room, mask]
    return Arguments(values, (7, 8, 9))


@of("row_attention", "row_attention_backward")
def _row_attention(draw, name):
    (q, k, v), scoring, mask, rng = _attention_inputs(draw)
    if name == "row_attention":
        return Arguments([q, k, v, scoring, cubes, mask])
    grad = rng.standard_normal((*q.shape[:3], v.shape[3]))
    room = [poison(*x.shape) for x in (q, k, v)]
    return Arguments([grad, q, k, v, scoring, cubes, cubes_backward, *room, mask], (7, 8, 9))


# -------------------------------------------------------------------- optimisers, recurrence
@of("adamw")
def _adamw(draw):
    shape, rng = any_shape(draw), generator(draw)
    weights, grad, first = (rng.standard_normal(shape) for _ in range(3))
    options = [draw(st.sampled_from([1, 5, 1000])), 0.01, (0.9, 0.95), 1e-8, draw(st.sampled_from([0.0, 0.1]))]
    factor = draw(st.sampled_from([None, 0.5, 0.0, 1.0]))
    return Arguments([weights, grad, first, rng.random(shape), *options, factor], (0, 2, 3))


GATES_AND_KEPT = {"rnn": (1, 1), "gru": (3, 2), "lstm": (4, 3)}


def _states(draw: Draw, name: str) -> tuple[list[Any], list[Any], np.random.Generator]:
    """Gates, states, weights and bias, and whether steps count: what the layers hand over, and the options."""
    n_gates, n_kept = GATES_AND_KEPT[name]
    steps, items, size, rng = draw(st.integers(0, 4)), draw(st.integers(0, 34)), draw(FEW), generator(draw)
    states = poison(n_kept, steps + 1, items, size)
    states[:, 0] = rng.standard_normal((n_kept, items, size))
    bias = rng.standard_normal(n_gates * size) if draw(st.booleans()) else None
    active = rng.random((steps, items, 1)) < 0.7 if draw(st.booleans()) else None
    gates = rng.standard_normal((steps, items, n_gates * size))
    weights = rng.standard_normal((size, n_gates * size))
    return [gates, states, weights, bias, active], [draw(st.booleans())] if name == "rnn" else [], rng


@of("rnn", "gru", "lstm")
def _recurrence(draw, name):
    values, options, _ = _states(draw, name)
    return Arguments([*values, *options], (0, 1))


@of("rnn_backward", "gru_backward", "lstm_backward")
def _recurrence_backward(draw, name):
    forward = name.removesuffix("_backward")
    (gates, states, weights, bias, active), options, rng = _states(draw, forward)
    KERNELS[forward].plain(gates, states, weights, bias, active, *options)
    n_states, n_grads = {"rnn": (1, 1), "gru": (1, 2), "lstm": (2, 1)}[forward]
    grad = rng.standard_normal((n_states, *states.shape[1:]))
    room = poison(n_grads, *gates.shape)
    return Arguments([grad, gates, states, weights, active, room, grad[:, -1].copy(), *options], (5, 6))
