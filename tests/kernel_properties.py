"""Hypothesis strategies for the arguments of kernels with several implementations, for test_kernel_properties.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from attention_cases import cubes, cubes_backward, poisoned
from hypothesis import strategies as st
from test_kernels import CASES, IN_PLACE

from tricycle import kernels
from tricycle.kernels import ScoreOptions

Draw = Callable[[st.SearchStrategy], Any]


class Arguments(NamedTuple):
    """The arguments of a kernel call.

    Attributes:
        values: floats as float64.
        written: the positions of output arguments; the return value is the output if there are none.
    """

    values: list[Any]
    written: tuple[int, ...] = ()


ARGUMENTS: dict[str, Callable[[Draw], Arguments]] = {}
LENGTHS = st.sampled_from([0, 1, 2, 3, 5, 7, 16, 17, 33, 70])
POSITIVE_LENGTHS = st.sampled_from([1, 2, 3, 5, 7, 16, 17, 33, 70])
FEW = st.integers(1, 3)


def register(*names: str) -> Callable[[Callable], Callable]:
    def add_to_table(draw_arguments: Callable[..., Arguments]) -> Callable[..., Arguments]:
        for name in names:
            ARGUMENTS[name] = partial(draw_arguments, name=name) if len(names) > 1 else draw_arguments
        return draw_arguments

    return add_to_table


def generator(draw: Draw) -> np.random.Generator:
    return np.random.default_rng(draw(st.integers(0, 2**16)))


def any_shape(draw: Draw) -> tuple[int, ...]:
    """Draw a shape with at most 5000 elements."""
    shape = draw(st.lists(LENGTHS, max_size=3))
    while np.prod(shape) > 5000:
        shape[shape.index(max(shape))] = 3
    return tuple(shape)


# -------------------------------------------------------------------- arguments from the builders of test_kernels
def shape_of(draw: Draw, *sizes: st.SearchStrategy) -> tuple[int, ...]:
    return tuple(map(draw, sizes))


BOOLEANS = st.booleans()
N_GATES_AND_SAVED = {"rnn": (1, 1), "gru": (3, 2), "lstm": (4, 3)}
N_STATES_AND_GRADS = {"rnn": (1, 1), "gru": (1, 2), "lstm": (2, 1)}


def _quantized_matmul(draw: Draw) -> tuple[Any, ...]:
    kinds = ["int8", "float16"] + ["bfloat16"] * (find_spec("ml_dtypes") is not None)
    sizes = st.sampled_from([1, 2, 7, 33, 64, 576])
    return draw(LENGTHS), draw(sizes), draw(sizes), draw(st.sampled_from(kinds)), draw(BOOLEANS), draw(BOOLEANS)


def _route(draw: Draw) -> tuple[Any, ...]:
    n_experts = draw(POSITIVE_LENGTHS)
    n_active = draw(st.integers(1, n_experts))
    return draw(LENGTHS), n_experts, draw(BOOLEANS), n_active, draw(BOOLEANS), draw(BOOLEANS)


def _groups(draw: Draw) -> tuple[Any, ...]:
    return draw(st.lists(LENGTHS, min_size=1, max_size=3)), draw(POSITIVE_LENGTHS), draw(LENGTHS)


def _recurrence(draw: Draw, name: str) -> tuple[Any, ...]:
    sizes = draw(st.integers(0, 4)), draw(st.integers(0, 34)), draw(FEW), draw(BOOLEANS), draw(BOOLEANS)
    return *N_GATES_AND_SAVED[name], *sizes, *([draw(BOOLEANS)] if name == "rnn" else [])


def _recurrence_backward(draw: Draw, name: str) -> tuple[Any, ...]:
    n_gates, n_kept, *sizes = _recurrence(draw, name)
    n_states, n_grads = N_STATES_AND_GRADS[name]
    return name, n_gates, n_states, n_kept, n_grads, *sizes


# by kernel: draws the arguments of its builder after the generator
SIZES: dict[str, Callable[[Draw], tuple[Any, ...]]] = {
    **dict.fromkeys(
        "gelu gelu_with_derivative exact_gelu exact_gelu_backward relu_squared sigmoid sum_squares add".split(),
        lambda draw: (any_shape(draw),),
    ),
    "gelu_backward": lambda draw: (any_shape(draw), draw(st.sampled_from(["x", "slope"]))),
    "softmax": lambda draw: ((*any_shape(draw), draw(LENGTHS)), draw(BOOLEANS)),
    "softmax_backward": lambda draw: ((*any_shape(draw), draw(LENGTHS)),),
    "log_softmax": lambda draw: ((*any_shape(draw), draw(LENGTHS)),),
    "swiglu": lambda draw: ((*any_shape(draw), 2 * draw(LENGTHS)),),
    "swiglu_backward": lambda draw: (any_shape(draw), draw(LENGTHS)),
    "apply_rope": lambda draw: (draw(LENGTHS), draw(LENGTHS), draw(FEW), 2 * draw(FEW)),
    "sum_rows": lambda draw: (shape_of(draw, LENGTHS, LENGTHS),),
    **dict.fromkeys(
        ("matmul_operand", "matmul_operand_and_sums"), lambda draw: (shape_of(draw, LENGTHS, LENGTHS), "float32")
    ),
    "embedding_backward": lambda draw: (draw(LENGTHS), draw(POSITIVE_LENGTHS), draw(LENGTHS)),
    "add_at": lambda draw: (draw(LENGTHS), draw(POSITIVE_LENGTHS), draw(LENGTHS)),
    "layer_norm": lambda draw: ((*any_shape(draw), draw(POSITIVE_LENGTHS)), draw(BOOLEANS), draw(BOOLEANS)),
    "layer_norm_backward": lambda draw: ((*any_shape(draw), draw(POSITIVE_LENGTHS)), draw(BOOLEANS)),
    "batched_matmul": lambda draw: (
        (*draw(st.lists(st.integers(0, 5), max_size=2)), draw(LENGTHS)),
        draw(LENGTHS),
        draw(LENGTHS),
    ),
    "add_matmul": lambda draw: shape_of(draw, st.sampled_from([0, 3, 300]), LENGTHS, st.sampled_from([1, 48, 64])),
    "project": lambda draw: (shape_of(draw, LENGTHS, LENGTHS, LENGTHS), draw(LENGTHS), draw(BOOLEANS)),
    "quantized_matmul": _quantized_matmul,
    "route": _route,
    "mix_swiglu_experts": lambda draw: shape_of(draw, FEW, POSITIVE_LENGTHS, POSITIVE_LENGTHS, FEW),
    **dict.fromkeys(("grouped_matmul", "grouped_weight_gradients"), _groups),
    "sum_by_token": lambda draw: (*shape_of(draw, LENGTHS, FEW, LENGTHS), draw(BOOLEANS)),
    "sum_by_token_backward": lambda draw: shape_of(draw, LENGTHS, FEW, LENGTHS),
    "orthogonalize": lambda draw: (shape_of(draw, st.integers(0, 5), POSITIVE_LENGTHS, POSITIVE_LENGTHS),),
    **{name: partial(_recurrence, name=name) for name in N_GATES_AND_SAVED},
    **{f"{name}_backward": partial(_recurrence_backward, name=name) for name in N_GATES_AND_SAVED},
}


@register(*SIZES)
def _build_arguments(draw, name):
    values = list(CASES[name][0](generator(draw), *SIZES[name](draw)))
    return Arguments(values, tuple(range(len(values)))[IN_PLACE.get(name, slice(0))])


@register("multiply")
def _multiply(draw):
    shape, rng = any_shape(draw), generator(draw)
    return Arguments([rng.standard_normal(shape), rng.standard_normal(draw(st.sampled_from([shape, shape, ()])))])


@register("cross_entropy")
def _cross_entropy(draw):
    sizes = draw(POSITIVE_LENGTHS), draw(POSITIVE_LENGTHS), draw(st.sampled_from([0.0, 0.1]))
    logits, *others = CASES["cross_entropy"][0](generator(draw), *sizes)
    return Arguments([logits * draw(st.sampled_from([0.2, 1, 20])), *others])


@register("matmul")
def _matmul(draw):
    n, k, m = draw(LENGTHS), draw(LENGTHS), draw(LENGTHS)
    values = CASES["matmul"][0](generator(draw), n, k, m, draw(BOOLEANS))
    return Arguments([*values, np.full((n, m), np.nan)], (3,)) if draw(BOOLEANS) else Arguments([*values])


@register("adamw")
def _adamw(draw):
    sizes = any_shape(draw), draw(st.sampled_from([1, 5, 1000])), draw(st.sampled_from([0.0, 0.1]))
    factor = draw(st.sampled_from([None, 0.5, 0.0, 1.0]))
    return Arguments([*CASES["adamw"][0](generator(draw), *sizes), factor], (0, 2, 3))


# -------------------------------------------------------------------- attention
def _attention_inputs(draw: Draw) -> tuple[list[np.ndarray], ScoreOptions, np.ndarray | None, np.random.Generator]:
    """Draw q, k and v, score options, a mask that hides some rows completely, and a generator."""
    items, queries, keys = draw(st.integers(0, 3)), draw(LENGTHS), draw(LENGTHS)
    key_heads, shared, size, rng = draw(FEW), draw(FEW), draw(FEW), generator(draw)
    value_size = draw(st.sampled_from([size, size, 4]))
    shapes = (queries, key_heads * shared, size), (keys, key_heads, size), (keys, key_heads, value_size)
    offset = draw(st.sampled_from([None, keys - queries, 0, 4, -2, keys + 6]))
    window = None if offset is None else draw(st.sampled_from([None, 1, 9, 40]))
    score_options = ScoreOptions(draw(st.sampled_from([0.7, 3.0])), offset, window, draw(st.sampled_from([None, 1.5])))
    mask = None
    if draw(st.booleans()):
        full = items, key_heads * shared, queries, keys
        shape = [draw(st.sampled_from([1, n])) if n else n for n in full[:-1]]
        mask = np.where(rng.random((*shape, keys)) < draw(st.sampled_from([0.2, 0.8])), 0, -np.inf)
    return [rng.standard_normal((items, *shape)) for shape in shapes], score_options, mask, rng


@register("attention", "attention_backward")
def _attention(draw, name):
    (q, k, v), score_options, mask, rng = _attention_inputs(draw)
    off_by_one = draw(st.booleans())
    if name == "attention":
        return Arguments([q, k, v, score_options, off_by_one, mask])
    out, logsumexp = kernels.attention.reference(q, k, v, score_options, off_by_one, mask)
    values = [rng.standard_normal(out.shape), q, k, v, out, logsumexp, score_options, *poisoned(q, k, v), mask]
    return Arguments(values, (7, 8, 9))


@register("row_attention", "row_attention_backward")
def _row_attention(draw, name):
    (q, k, v), score_options, mask, rng = _attention_inputs(draw)
    if name == "row_attention":
        return Arguments([q, k, v, score_options, cubes, mask])
    grad = rng.standard_normal((*q.shape[:3], v.shape[3]))
    return Arguments([grad, q, k, v, score_options, cubes, cubes_backward, *poisoned(q, k, v), mask], (7, 8, 9))
