"""Hypothesis strategies for calls of each op of the registry and of layers, for the generic tests of ops.

An op of `tricycle.ops.OPS` without a strategy fails a test of test_registry.py. Hypothesis draws shapes (with sizes 0
and 1), options and axes; the values are generated from a seed, distinct and at a distance from kinks and poles. Each
call has an equivalent in the functions that NumPy and PyTorch share, or in PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import tricycle.activation as activation
import tricycle.attention as attention
import tricycle.einsum as einsum
import tricycle.functions as functions
import tricycle.layers as layers
import tricycle.loss as loss
import tricycle.sequences.convolution as convolution
import tricycle.sequences.recurrent as recurrent
from tricycle import extra_ops, linalg, ops, softmaxes
from tricycle.activations import ClampedSwiGLU, ExactGeLU, ReLUSquared
from tricycle.sequences.relative_positions import RelativePositionSoftmax, position_buckets
from tricycle.state_spaces.delta_rule import GatedDeltaRule
from tricycle.state_spaces.scan import StateSpaceScan
from tricycle.tensor import Tensor, to_tensor
from tricycle.transforms import functional_call

Draw = Callable[[st.SearchStrategy], Any]


class Sample(NamedTuple):
    """One call of one op.

    Attributes:
        call: takes a Tensor for each input.
        inputs: float64 arrays; integers for labels.
        expected: the same call; takes `numpy` or `torch`, then an array in float64 for each input.
        accepts_integers: whether its inputs may also be integers or booleans, which are converted to float32.
        accepts_float16: whether float16 inputs cause no larger error than their rounding.
        batched: per input, the flag `is_batched`; all False if it is empty.
        n_dtype_inputs: the number of first inputs that determine the dtype of the result; None for all.
        needs_torch: whether `expected` calls functions that only PyTorch has.
    """

    call: Callable[..., Tensor]
    inputs: tuple[np.ndarray, ...]
    expected: Callable[..., Any]
    accepts_integers: bool = False
    accepts_float16: bool = True
    batched: tuple[bool, ...] = ()
    n_dtype_inputs: int | None = None
    needs_torch: bool = False

    def tensors(self) -> list[Tensor]:
        """Return the inputs as new Tensors, in float64."""
        flags = self.batched or (False,) * len(self.inputs)
        return [to_tensor(array, dtype=array.dtype, is_batched=flag) for array, flag in zip(self.inputs, flags)]


DrawSample = Callable[[Draw], Sample]
PROPERTIES: dict[str, DrawSample] = {}  # of ops
LAYERS: dict[str, DrawSample] = {}


N_SAMPLES = {"Attention": 120, "Einsum": 50, "getitem": 40, "Rotary": 40}


def samples_of(name: str) -> list[Sample]:
    """Return the same samples of an op or layer at each call: 12, or N_SAMPLES of those with many options."""
    samples: list[Sample] = []

    @settings(max_examples=N_SAMPLES.get(name, 12), phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def collect(data: Any) -> None:
        samples.append((PROPERTIES | LAYERS)[name](data.draw))

    collect()
    return samples


def register(name: str, table: dict[str, DrawSample] = PROPERTIES) -> Callable[[DrawSample], None]:
    return lambda draw_call: table.update({name: draw_call})


# -------------------------------------------------------------------- values and shapes
SEEDS = st.integers(0, 2**16)
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
ROWS = hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5)
FULL = hnp.array_shapes(min_dims=0, max_dims=3, min_side=1, max_side=4)
SMALL = st.integers(0, 3)
SOME = st.integers(1, 4)


def signed(draw: Draw, shape: tuple[int, ...]) -> np.ndarray:
    """Return distinct values of both signs, with absolute values from 0.5 to 1.5."""
    size = int(np.prod(shape))
    order = np.random.default_rng(draw(SEEDS)).permutation(size)
    return np.where(order % 2, 1, -1).reshape(shape) * (0.5 + order.reshape(shape) / max(size, 1))


def normal(draw: Draw, *shape: int) -> np.ndarray:
    return np.random.default_rng(draw(SEEDS)).standard_normal(shape)


def broadcastable_shapes(draw: Draw, n: int) -> tuple[tuple[int, ...], ...]:
    """Draw n shapes that broadcast."""
    return draw(hnp.mutually_broadcastable_shapes(num_shapes=n, max_dims=4, min_side=0, max_side=3)).input_shapes


# -------------------------------------------------------------------- elementwise
def sigmoid(xp: Any, x: Any) -> Any:
    return 1 / (1 + xp.exp(-x))


# name: op, edge values, the function of NumPy or PyTorch
UNARY: dict[str, tuple[Callable, list[float], Callable]] = {
    "exp": (extra_ops.exp, [-30, 0, 5], lambda xp, x: xp.exp(x)),
    "log": (extra_ops.log, [1e-3, 1, 1e4], lambda xp, x: xp.log(x)),
    "sqrt": (extra_ops.sqrt, [1e-2, 1, 1e4], lambda xp, x: xp.sqrt(x)),
    "sin": (extra_ops.sin, [-30, 0, 30], lambda xp, x: xp.sin(x)),
    "cos": (extra_ops.cos, [-30, 0, 30], lambda xp, x: xp.cos(x)),
    "absolute": (extra_ops.absolute, [-1e3, 1e3], lambda xp, x: abs(x)),
    "softplus": (extra_ops.softplus, [-30, 0, 30], lambda xp, x: xp.log(1 + xp.exp(x))),
    "tanh": (ops.tanh, [-30, 0, 30], lambda xp, x: xp.tanh(x)),
    "sigmoid": (ops.sigmoid, [-30, 0, 30], lambda xp, x: sigmoid(xp, x)),
    "negative": (extra_ops.negative, [-1e3, 0, 1e3], lambda xp, x: -x),
    "Sigmoid": (functions.Sigmoid(), [-30, 0, 30], lambda xp, x: sigmoid(xp, x)),
    "Tanh": (functions.Tanh(), [-30, 0, 30], lambda xp, x: xp.tanh(x)),
    "ReLU": (activation.ReLU(), [-1e3, 1e3], lambda xp, x: x * (x > 0)),
    "ReLUSquared": (ReLUSquared(), [-100, 100], lambda xp, x: x * x * (x > 0)),
    "Swish": (activation.Swish(), [-30, 0, 30], lambda xp, x: x * sigmoid(xp, x)),
}
ACCEPT_INTEGERS = {"exp", "sin", "cos", "tanh", "sigmoid", "Sigmoid", "Tanh", "ReLUSquared", "Swish"}


def _elementwise(name: str, draw: Draw) -> Sample:
    op, edges, expected = UNARY[name]
    x = draw(st.sampled_from([1, 4])) * signed(draw, draw(SHAPES))
    x = np.abs(x) if name in ("log", "sqrt") else x
    if draw(st.sampled_from([False, False, False, True])):
        x = np.array(edges, np.float64)
    return Sample(op, (x,), expected, accepts_integers=name in ACCEPT_INTEGERS)


PROPERTIES |= {name: partial(_elementwise, name) for name in UNARY}


def _gelu(op: Callable, approximate: str, draw: Draw) -> Sample:
    use_edges = draw(st.sampled_from([False, False, True]))
    x = np.array([-30.0, -5, 0, 5, 30]) if use_edges else signed(draw, draw(SHAPES))
    gelu = lambda torch, x: torch.nn.functional.gelu(x, approximate=approximate)
    return Sample(op, (x,), gelu, accepts_integers=True, needs_torch=True)


PROPERTIES["GeLU"] = partial(_gelu, activation.GeLU(), "tanh")
PROPERTIES["ExactGeLU"] = partial(_gelu, ExactGeLU(), "none")


@register("softcap")
def _soft_cap(draw):
    cap = draw(st.sampled_from([0.5, 1.5, 30.0]))
    return Sample(
        lambda x: functions.softcap(x, cap), (signed(draw, draw(SHAPES)),), lambda xp, x: cap * xp.tanh(x / cap)
    )


@register("to_compute_dtype")
def _to_compute_dtype(draw):
    x = signed(draw, draw(SHAPES))
    precision = draw(st.sampled_from(["float32", "bfloat16"]))  # converted on GPUs only
    return Sample(lambda x: functions.to_compute_dtype(x, precision) * 2, (x,), lambda xp, x: x * 2)


# -------------------------------------------------------------------- two inputs, and a number on either side
BINARY: dict[str, tuple[Callable, Callable]] = {
    "add": (ops.add, lambda xp, x, y: x + y),
    "sub": (extra_ops.subtract, lambda xp, x, y: x - y),
    "mul": (ops.multiply, lambda xp, x, y: x * y),
    "div": (extra_ops.divide, lambda xp, x, y: x / y),
    "pow": (extra_ops.power, lambda xp, x, y: x**y),
    "maximum": (extra_ops.maximum, lambda xp, x, y: xp.maximum(x, y)),
    "minimum": (extra_ops.minimum, lambda xp, x, y: xp.minimum(x, y)),
}


def _binary(name: str, draw: Draw) -> Sample:
    op, expected = BINARY[name]
    side = draw(st.sampled_from(["both", "both", "left", "right"]))
    x, y = (signed(draw, shape) for shape in broadcastable_shapes(draw, 2))
    number = draw(st.sampled_from([2, -1, 0, 0.75, 3.0] if name == "pow" else [2, -1, 0.75, 3.0]))
    if name == "pow" and side == "both" and draw(st.booleans()):
        y = np.rint(2 * y).astype(int)  # negative numbers have powers of whole numbers only
    elif name == "pow" and (side != "left" or number != int(number)):
        x, number = np.abs(x), abs(number) or 2
    if side == "both":
        return Sample(op, (x, y), expected)
    if side == "left":
        return Sample(lambda x: op(x, number), (x,), lambda xp, x: expected(xp, x, xp.full_like(x, number)))
    return Sample(lambda y: op(number, y), (y,), lambda xp, y: expected(xp, xp.full_like(y, number), y))


PROPERTIES |= {name: partial(_binary, name) for name in BINARY}


@register("where")
def _where(draw):
    mask_shape, *shapes = broadcastable_shapes(draw, 3)
    condition = normal(draw, *mask_shape) > 0
    inputs = tuple(signed(draw, shape) for shape in shapes)
    expected = lambda xp, x, y: xp.where(xp.asarray(condition), x, y)
    return Sample(lambda x, y: extra_ops.where(x.xp.asarray(condition), x, y), inputs, expected)


# -------------------------------------------------------------------- joining, shapes, indexing
@register("concatenate")
def _concatenate(draw):
    shape = draw(hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=3))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    inputs = []
    for _ in range(draw(st.integers(1, 3))):
        longer = list(shape)
        longer[axis] = draw(SMALL)
        inputs.append(signed(draw, tuple(longer)))
    return Sample(lambda *xs: extra_ops.concatenate(xs, axis), tuple(inputs), lambda xp, *xs: xp.concatenate(xs, axis))


@register("stack")
def _stack(draw):
    shape = draw(SHAPES)
    axis = draw(st.integers(-len(shape) - 1, len(shape)))
    inputs = tuple(signed(draw, shape) for _ in range(draw(st.integers(1, 3))))
    return Sample(lambda *xs: extra_ops.stack(xs, axis), inputs, lambda xp, *xs: xp.stack(xs, axis))


@register("reshape")
def _reshape(draw):
    x = signed(draw, draw(SHAPES))
    new = list(draw(st.permutations(x.shape)))
    new.insert(draw(st.integers(0, len(new))), 1)
    if x.size and draw(st.booleans()):
        new[draw(st.integers(0, len(new) - 1))] = -1
    return Sample(lambda x: ops.reshape(x, *new), (x,), lambda xp, x: x.reshape(new))


@register("split_heads")
def _split_heads(draw):
    n_heads, size = draw(SOME), draw(SOME)
    x = signed(draw, (draw(SMALL), draw(SMALL), 2 * n_heads * size))

    def run(x):
        queries, keys = ops.split_heads(x, (n_heads, n_heads), size)
        return queries + 2 * keys

    def expected(xp, x):
        heads = x.reshape(*x.shape[:2], 2 * n_heads, size)
        return heads[:, :, :n_heads] + 2 * heads[:, :, n_heads:]

    return Sample(run, (x,), expected)


@register("transpose")
def _transpose(draw):
    x = signed(draw, draw(SHAPES))
    order = draw(st.permutations(range(x.ndim)))
    order = [axis - x.ndim * draw(st.booleans()) for axis in order]
    return Sample(
        lambda x: extra_ops.transpose(x, *order), (x,), lambda xp, x: xp.moveaxis(x, tuple(order), tuple(range(x.ndim)))
    )


def _index(draw: Draw, shape: tuple[int, ...]) -> Any:
    kind = draw(st.sampled_from(["basic", "arrays", "mask"] if shape and 0 not in shape else ["basic"]))
    if kind == "basic":
        return draw(hnp.basic_indices(shape, allow_newaxis=True))
    if kind == "mask":
        return draw(hnp.arrays(bool, shape[: draw(st.integers(1, len(shape)))]))
    results = hnp.array_shapes(max_dims=2, min_side=0, max_side=4)
    index = draw(hnp.integer_array_indices(shape, result_shape=results))
    return index[0] if len(index) == 1 else index


@register("getitem")
def _getitem(draw):
    """Select the elements by flat index in PyTorch, which lacks negative steps and NumPy's indexing rules."""
    x = signed(draw, draw(SHAPES))
    index = _index(draw, x.shape)
    places = np.asarray(np.arange(x.size).reshape(x.shape)[index])
    expected = lambda xp, x: x.reshape(-1)[xp.asarray(places.ravel().copy())].reshape(places.shape)
    if isinstance(index, np.ndarray) and draw(st.booleans()):
        return Sample(lambda x, ids: x[ids], (x, index), lambda xp, x, ids: expected(xp, x))
    return Sample(lambda x: x[index], (x,), expected)


# -------------------------------------------------------------------- reductions
def _reduction(name: str, xp_name: str, draw: Draw) -> Sample:
    x = signed(draw, draw(SHAPES if name == "sum" else FULL))
    axis = draw(st.none() | hnp.valid_tuple_axes(x.ndim, min_size=1) if x.ndim else st.none())
    keep = draw(st.booleans())
    axes = tuple(range(x.ndim)) if axis is None else axis

    def expected(xp: Any, x: Any) -> Any:
        return getattr(xp, xp_name)(x, axis=axes, keepdims=keep) if axes else x * 1

    return Sample(lambda x: ops.OPS[name](x, axis, keep), (x,), expected)


for _name, _xp_name in {"sum": "sum", "mean": "mean", "max": "amax", "min": "amin"}.items():
    PROPERTIES[_name] = partial(_reduction, _name, _xp_name)


# -------------------------------------------------------------------- products
@register("matmul")
def _matmul(draw):
    drawn = hnp.mutually_broadcastable_shapes(signature=np.matmul.signature, max_dims=2, min_side=0, max_side=4)
    x, y = (signed(draw, shape) for shape in draw(drawn).input_shapes)
    y = np.rint(3 * y).astype(int) if draw(st.sampled_from([False, False, True])) else y
    return Sample(einsum.matmul, (x, y), lambda xp, x, y: x @ (xp.asarray(1.0, dtype=x.dtype) * y))


def _subscripts(draw: Draw) -> tuple[list[str], str, list[tuple[int, ...]]]:
    """Draw terms, output and shapes of an einsum, with repeated axes, a broadcast "...", and sizes from 0."""
    sizes = {letter: draw(st.integers(0 if letter == "d" else 1, 3)) for letter in "abcd"}
    hidden = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    terms, shapes = [], []
    for _ in range(draw(st.integers(1, 3))):
        letters = draw(st.text("abcd", max_size=3))
        before, shape = draw(st.integers(0, len(letters))), [sizes[c] for c in letters]
        if draw(st.booleans()):
            own = [draw(st.sampled_from([1, n])) for n in hidden[draw(st.integers(0, len(hidden))) :]]
            letters, shape = f"{letters[:before]}...{letters[before:]}", [*shape[:before], *own, *shape[before:]]
        terms.append(letters)
        shapes.append(tuple(shape))
    present = sorted(set("".join(terms)) - {"."})
    output = draw(st.permutations(present))[: draw(st.integers(0, len(present)))]
    if any("..." in term for term in terms):
        output.insert(draw(st.integers(0, len(output))), "...")
    return terms, "".join(output), shapes


@register("Einsum")
def _einsum(draw):
    """Draw an einsum; for batched inputs, only PyTorch's subscripts contain the batch axis."""
    terms, output, shapes = _subscripts(draw)
    explicit = f"->{output}"
    if draw(st.sampled_from([False, False, True])):
        letters = "".join(terms)
        output = "..." * ("." in letters) + "".join(c for c in sorted(set(letters)) if letters.count(c) == 1)
        explicit = ""
    batched = [draw(st.booleans()) for _ in terms]
    shapes = [(2, *shape) if flag else shape for shape, flag in zip(shapes, batched)]
    batched_terms = ["z" * flag + term for term, flag in zip(terms, batched)]
    full = f"{','.join(batched_terms)}->{'z' * any(batched)}{output}"

    def expected(xp: Any, *xs: Any) -> Any:
        if set(full) <= set(",->"):  # PyTorch has no notation for numbers alone
            return math.prod(xs)
        return xp.einsum(full, *xs)

    inputs = tuple(signed(draw, shape) for shape in shapes)
    op = einsum.Einsum(",".join(terms) + explicit)
    return Sample(op, inputs, expected, batched=tuple(batched))


@register("linear")
def _linear(draw):
    lead = draw(hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=4))
    from_size, to_size = draw(SMALL), draw(SMALL)
    shapes = [(*lead, from_size), (from_size, to_size)] + [(to_size,)] * draw(st.booleans())
    inputs = tuple(signed(draw, shape) for shape in shapes)
    return Sample(functions.linear, inputs, lambda xp, x, w, *b: x @ w + (b[0] if b else 0), n_dtype_inputs=2)


# -------------------------------------------------------------------- linear algebra
def _draw_batch(draw: Draw) -> tuple[int, ...]:
    return draw(hnp.array_shapes(min_dims=0, max_dims=2, min_side=1, max_side=2))


def _draw_square(draw: Draw) -> np.ndarray:
    n = draw(SOME)
    return signed(draw, (*_draw_batch(draw), n, n))


def _dominant(xp: Any, x: Any) -> Any:
    """Return invertible matrices, of small condition, whose determinant is negative for odd sizes."""
    return x - xp.asarray(3.0 * x.shape[-1] * np.eye(x.shape[-1]))


def _on_dominant(name: str, draw: Draw) -> Sample:
    call = lambda x: getattr(linalg, name)(_dominant(x.xp, x))
    expected = lambda xp, x: getattr(xp.linalg, name)(_dominant(xp, x))
    return Sample(call, (_draw_square(draw),), expected, accepts_float16=False)


PROPERTIES |= {name: partial(_on_dominant, name) for name in ("inv", "det")}


@register("solve")
def _solve(draw):
    n, lead = draw(SOME), hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=2, min_side=1, max_side=2)
    (for_a, for_b), width = draw(lead).input_shapes, draw(SOME)
    b = signed(draw, (n,) if draw(st.booleans()) else (*for_b, n, width))
    inputs = signed(draw, (*for_a, n, n)), b
    expected = lambda xp, a, b: xp.linalg.inv(_dominant(xp, a)) @ b
    return Sample(lambda a, b: linalg.solve(_dominant(a.xp, a), b), inputs, expected, accepts_float16=False)


@register("slogdet")
def _slogdet(draw):
    def run(x):
        sign, log = linalg.slogdet(_dominant(x.xp, x))
        return log * sign

    expected = lambda xp, x: math.prod(xp.linalg.slogdet(_dominant(xp, x)))
    return Sample(run, (_draw_square(draw),), expected, accepts_float16=False)


@register("cholesky")
def _cholesky(draw):
    def positive(xp: Any, x: Any, transposed: Any) -> Any:
        return x @ transposed + xp.asarray(np.eye(x.shape[-1]))

    run = lambda x: linalg.cholesky(positive(x.xp, x, np.swapaxes(x, -1, -2)))
    expected = lambda xp, x: xp.linalg.cholesky(positive(xp, x, x.swapaxes(-1, -2)))
    return Sample(run, (_draw_square(draw),), expected, accepts_float16=False)


@register("eigh")
def _eigh(draw):
    """Draw symmetric matrices with distinct eigenvalues; compare squares of eigenvectors, which have no sign."""
    x = _draw_square(draw)
    diagonal = np.diag(2.0 * np.arange(x.shape[-1]))

    def run(x):
        values, vectors = linalg.eigh(0.05 * (x + np.swapaxes(x, -1, -2)) + x.xp.asarray(diagonal))
        return extra_ops.concatenate([values[..., None, :], vectors * vectors], axis=-2)

    def expected(xp: Any, x: Any) -> Any:
        values, vectors = xp.linalg.eigh(0.05 * (x + x.swapaxes(-1, -2)) + xp.asarray(diagonal))
        return xp.concatenate([values[..., None, :], vectors * vectors], axis=-2)

    return Sample(run, (x,), expected, accepts_float16=False)


@register("svd")
def _svd(draw):
    """Draw matrices with distinct singular values; compare squares of singular vectors, which have no sign."""
    m, n = draw(SOME), draw(SOME)
    x = signed(draw, (*_draw_batch(draw), m, n))
    diagonal = np.diag(2.0 + 2 * np.arange(4))[:m, :n]

    def run(x):
        u, s, vh = linalg.svd(0.1 * x + x.xp.asarray(diagonal))
        return extra_ops.concatenate([s[..., None, :], u * u, np.swapaxes(vh * vh, -1, -2)], axis=-2)

    def expected(xp: Any, x: Any) -> Any:
        u, s, vh = xp.linalg.svd(0.1 * x + xp.asarray(diagonal), full_matrices=False)
        return xp.concatenate([s[..., None, :], u * u, (vh * vh).swapaxes(-1, -2)], axis=-2)

    return Sample(run, (x,), expected, accepts_float16=False)


# -------------------------------------------------------------------- softmax and its kin, gates
HIDDEN = -1e9  # the score of a masked key; -inf would make PyTorch's gradients NaN where it is multiplied


def softmax(xp: Any, x: Any, further: Any = 0.0) -> Any:
    """Compute softmax over the last axis; `further` is added to the sum of the exponentials."""
    e = xp.exp(x)
    return e / (further + e.sum(-1, keepdims=True))


def adaptive_softmax(xp: Any, x: Any) -> Any:
    plain = softmax(xp, x)
    entropy = -(plain * xp.log(xp.where(plain > 0, plain, 1.0))).sum(-1, keepdims=True)
    beta = -0.037 * entropy**4 + 0.481 * entropy**3 - 2.3 * entropy**2 + 4.917 * entropy - 1.791
    return softmax(xp, x * xp.where((entropy > 0.5) & (beta > 1), beta, 1.0))


def sink_softmax(xp: Any, x: Any, sinks: Any) -> Any:
    return softmax(xp, x, xp.exp(sinks)[..., None, None])


def block_softmax(xp: Any, x: Any, scales: Any, length: int | None = None) -> Any:
    step = -(-(length or x.shape[-1]) // scales.shape[-2])
    parts = [x[..., start : start + step] for start in range(0, x.shape[-1], step)]
    # a block without visible keys gets zeros
    parts = [
        softmax(xp, part, 1.0 * (part <= HIDDEN).all(-1, keepdims=True)) * scales[..., i, :, None]
        for i, part in enumerate(parts)
    ]
    return xp.concatenate(parts, -1)


def _row_op(op: Callable, expected: Callable, draw: Draw) -> Sample:
    x = normal(draw, *draw(ROWS | st.just((3, 300)))) * draw(st.sampled_from([0.1, 1, 5]))
    return Sample(op, (x,), expected, accepts_float16=not isinstance(op, softmaxes.AdaptiveSoftmax))


for _op, _expected in (
    (functions.Softmax(), softmax),
    (functions.Softmax1(), lambda xp, x: softmax(xp, x, 1.0)),
    (functions.LogSoftmax(), lambda xp, x: x - xp.log(xp.exp(x).sum(-1, keepdims=True))),
    (softmaxes.AdaptiveSoftmax(), adaptive_softmax),
):
    PROPERTIES[type(_op).__name__] = partial(_row_op, _op, _expected)


@register("SinkSoftmax")
def _sink_softmax(draw):
    x = normal(draw, *draw(hnp.array_shapes(min_dims=2, max_dims=4, min_side=1, max_side=6)))
    sinks = normal(draw, *x.shape[:-2]) * draw(st.sampled_from([1, 5]))

    return Sample(softmaxes.SinkSoftmax(), (x, sinks), sink_softmax, accepts_float16=False)


@register("RelativePositionSoftmax")
def _relative_position_softmax(draw):
    op = RelativePositionSoftmax(4, 4, bidirectional=draw(st.booleans()))
    n_heads, n_queries, more = draw(SMALL), draw(SMALL), draw(st.integers(0, 3))
    n_keys = n_queries + (0 if op.bidirectional else more)
    x, table = normal(draw, draw(SMALL), n_heads, n_queries, n_keys), normal(draw, 4, n_heads)
    ids = position_buckets(op, n_queries, n_keys)
    expected = lambda xp, x, table: softmax(xp, x + xp.moveaxis(table[ids], 2, 0))
    return Sample(op, (x, table), expected, accepts_float16=False)


@register("StateSpaceScan")
def _state_space_scan(draw):
    n_items, n_tokens = draw(SMALL), draw(SMALL)
    groups, shared, size, state, chunk_size = (draw(SOME) for _ in range(5))
    v = normal(draw, n_items, n_tokens, groups * shared, size)
    k, q = (normal(draw, n_items, n_tokens, groups, state) for _ in range(2))

    def expected(xp: Any, v: Any, decays: Any, k: Any, q: Any) -> Any:
        """Attention with weights that decay between key and query."""
        k, q = (x[:, :, np.arange(groups).repeat(shared)] for x in (k, q))
        sums = xp.cumsum(decays, 1)
        within = xp.asarray(np.tri(n_tokens))[None, :, :, None] * xp.exp(sums[:, :, None] - sums[:, None])
        scores = (q[:, :, None] * k[:, None]).sum(-1) * within  # (B, T, S, H)
        return (scores[..., None] * v[:, None]).sum(2)

    return Sample(StateSpaceScan(chunk_size), (v, normal(draw, *v.shape[:3]), k, q), expected, accepts_float16=False)


@register("GatedDeltaRule")
def _gated_delta_rule(draw):
    n_items, n_tokens = draw(SMALL), draw(SMALL)
    groups, shared, size, state, chunk_size = (draw(SOME) for _ in range(5))
    v = normal(draw, n_items, n_tokens, groups * shared, size)
    decays, strengths = (normal(draw, *v.shape[:3]) for _ in range(2))
    k, q = (normal(draw, n_items, n_tokens, groups, state) / 4 for _ in range(2))

    def expected(xp: Any, v: Any, decays: Any, k: Any, q: Any, strengths: Any) -> Any:
        """The recurrence, one token at a time."""
        k, q = (x[:, :, np.arange(groups).repeat(shared)][..., None] for x in (k, q))
        s, outputs = 0 * k.sum(1) * v.sum(1)[:, :, None], []
        for t in range(n_tokens):
            s = s * xp.exp(decays[:, t, :, None, None])
            errors = v[:, t] - (s * k[:, t]).sum(-2)
            s = s + k[:, t] * (strengths[:, t, :, None] * errors)[:, :, None]
            outputs.append((s * q[:, t]).sum(-2))
        return xp.stack(outputs, 1) if outputs else v

    return Sample(GatedDeltaRule(chunk_size), (v, decays, k, q, strengths), expected, accepts_float16=False)


@register("BlockSoftmax")
def _block_softmax(draw):
    n_blocks, correction = draw(SOME), draw(st.sampled_from(["learned", "none", "exact"]))
    x = normal(draw, *draw(hnp.array_shapes(min_dims=2, max_dims=3, min_side=1, max_side=6)))
    inputs = [x, normal(draw, *x.shape[:-2], n_blocks, x.shape[-2])] if correction == "learned" else [x]

    def expected(xp: Any, x: Any, *scales: Any) -> Any:
        if correction == "exact":
            return softmax(xp, x)
        return block_softmax(xp, x, *(scales or [xp.asarray(np.ones((n_blocks, x.shape[-2])))]))

    return Sample(softmaxes.BlockSoftmax(n_blocks, correction), tuple(inputs), expected, accepts_float16=False)


def _gated(op: Callable, gate: Callable, draw: Draw) -> Sample:
    *lead, half = draw(ROWS)
    return Sample(op, (signed(draw, (*lead, 2 * half)),), lambda xp, x: x[..., :half] * gate(xp, x[..., half:]))


for _op, _gate in (
    (activation.GLU(), sigmoid),
    (activation.SwiGLU(), lambda xp, x: x * sigmoid(xp, x)),
    (activation.Gated(ReLUSquared()), lambda xp, x: x * x * (x > 0)),
):
    PROPERTIES[type(_op).__name__] = partial(_gated, _op, _gate)


@register("ClampedSwiGLU")
def _clamped_swiglu(draw):
    *lead, half = draw(ROWS)
    size = draw(st.sampled_from([1.0, 7.77]))  # no number is exactly 7, where half of the gradient passes

    def expected(xp: Any, x: Any) -> Any:
        a, b = xp.clip(x[..., :half], -7.0, 7.0), xp.clip(x[..., half:], -1e9, 7.0)
        return (a + 1) * b * sigmoid(xp, 1.702 * b)

    return Sample(ClampedSwiGLU(), (size * signed(draw, (*lead, 2 * half)),), expected)


# -------------------------------------------------------------------- losses
@register("CrossEntropy")
def _cross_entropy(draw):
    lead, n_classes = draw(FULL), draw(SOME)
    labels = np.random.default_rng(draw(SEEDS)).integers(0, n_classes, lead)
    ignored = draw(st.sampled_from([None, -1, -100]))
    if ignored is not None and labels.size > 1:
        labels[normal(draw, *lead) > 0.5] = ignored
        labels.reshape(-1)[0] = 0
    smoothing = draw(st.sampled_from([0.0, 0.1, 0.5]))
    logits = normal(draw, *lead, n_classes) * draw(st.sampled_from([1, 5]))

    def expected(xp: Any, _: Any, logits: Any) -> Any:
        rows, flat = logits.reshape(-1, n_classes), labels.reshape(-1)
        counted = np.ones(flat.shape) if ignored is None else 1.0 * (flat != ignored)
        truth = (1 - smoothing) * np.eye(n_classes)[flat.clip(0)] + smoothing / n_classes
        logs = rows - xp.log(xp.exp(rows).sum(-1, keepdims=True))
        return -(xp.asarray(truth * counted[:, None]) * logs).sum() / counted.sum()

    return Sample(loss.CrossEntropy(ignored, smoothing), (labels, logits), expected)


@register("MeanSquaredError")
def _mean_squared_error(draw):
    shape = draw(FULL)
    inputs = signed(draw, shape), normal(draw, *shape)
    return Sample(loss.MeanSquaredError(), inputs, lambda xp, x, y: ((x - y) ** 2).mean())


# -------------------------------------------------------------------- attention
def attention_of(xp: Any, tensors: Any, op: Any, mask: np.ndarray | None, *parameters: Any) -> Any:
    """Compute attention step by step: grouped heads, window, soft-cap, mask, and any softmax."""
    q, k, v = (x.swapaxes(1, 2) for x in tensors)
    heads = xp.asarray(np.arange(q.shape[1]) // (q.shape[1] // k.shape[1]))
    k, v = k[:, heads], v[:, heads]
    scores = q @ k.swapaxes(2, 3) * (q.shape[-1] ** -0.5 if op.scale is None else op.scale)
    if op.softcap is not None:
        scores = op.softcap * xp.tanh(scores / op.softcap)
    n_queries, n_keys = scores.shape[2:]
    places = np.arange(n_queries)[:, None] + n_keys - n_queries - np.arange(n_keys)
    visible = np.ones(tuple(scores.shape), bool)
    if op.causal:
        visible &= (places >= 0) & (places < (op.window or 10**9))
    if mask is not None:
        visible &= mask[(slice(None), *[None] * (4 - mask.ndim))]
    any_seen, visible = xp.asarray(visible.any(-1, keepdims=True)), xp.asarray(visible)
    scores = xp.where(any_seen, xp.where(visible, scores, HIDDEN), 0.0)
    weights = attention_weights(xp, op.softmax, scores, max(0, n_keys - n_queries) * op.causal, *parameters)
    return (xp.where(any_seen, weights, 0.0) @ v).swapaxes(1, 2)


def attention_weights(xp: Any, variant: Any, scores: Any, first: int = 0, *parameters: Any) -> Any:
    """Compute the weights of a softmax variant for scores (B, H, T, S) of queries from position `first` on."""
    if variant.name == "adaptive_softmax":
        return adaptive_softmax(xp, scores)
    if variant.name == "sink_softmax":
        return sink_softmax(xp, scores, *parameters)
    if variant.name == "block_softmax" and variant.correction != "exact":
        positions, length = np.arange(first, first + scores.shape[2]), variant.length or scores.shape[3]
        if not variant.per_position:
            positions = positions // -(-length // variant.n_blocks)
        scales = parameters[0] if parameters else xp.asarray(np.ones((variant.n_blocks, first + scores.shape[2])))
        return block_softmax(xp, scores, scales[..., xp.asarray(positions)], length)
    return softmax(xp, scores, 1.0 * (variant.name == "softmax1"))


def _attention_softmax(draw: Draw, n_heads: int, n_queries: int, n_keys: int) -> tuple[Any, list[np.ndarray]]:
    """Draw a softmax variant and its parameters."""
    name = draw(st.sampled_from(["softmax", "softmax1", "adaptive", "sink", "blocks", "blocks"]))
    if name == "sink":
        return name, [normal(draw, n_heads)]
    if name != "blocks" or not 0 < n_queries <= n_keys:
        return "softmax" if name == "blocks" else name, []
    n_blocks, correction = (
        draw(st.sampled_from([1, 2, 3])),
        draw(st.sampled_from(["learned", "learned", "none", "exact"])),
    )
    per_head, per_position = draw(st.booleans()), draw(st.booleans())
    window = n_keys + draw(SMALL)
    softmax = softmaxes.BlockSoftmax(n_blocks, correction, per_head, window, per_position)
    shape = ((n_heads,) if per_head else ()) + (n_blocks, window if per_position else n_blocks)
    return softmax, [normal(draw, *shape)] if correction == "learned" else []


@register("Attention")
def _attention(draw):
    causal = draw(st.booleans())
    n_items, n_queries, key_heads, shared = draw(SMALL), draw(SMALL), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    n_queries = draw(st.sampled_from([n_queries, 17]))
    n_keys = draw(st.sampled_from([n_queries, n_queries + 2, 0, 5]))
    n_heads = key_heads * shared
    softmax, parameters = _attention_softmax(draw, n_heads, n_queries, n_keys)
    window = draw(st.sampled_from([None, 1, 3])) if causal else None
    scale, softcap = draw(st.sampled_from([None, 0.3])), draw(st.sampled_from([None, 1.5]))
    op = attention.Attention(softmax, causal, window, scale, softcap)
    size, value_size = draw(SOME), draw(SOME)
    shapes = [None, (n_items, n_keys), (n_items, n_queries, n_keys), (n_items, n_heads, n_queries, n_keys)]
    mask = draw(st.sampled_from(shapes))
    mask = None if mask is None else normal(draw, *mask) < 0.5
    inputs = (
        normal(draw, n_items, n_queries, n_heads, size),
        normal(draw, n_items, n_keys, key_heads, size),
        normal(draw, n_items, n_keys, key_heads, draw(st.sampled_from([size, value_size]))),
    )
    call = op if mask is None else lambda q, k, v, *scales: op(q, k, v, mask, *scales)
    if mask is None and parameters:
        call = lambda q, k, v, scales: op(q, k, v, None, scales)
    expected = lambda xp, q, k, v, *others: attention_of(xp, (q, k, v), op, mask, *others)
    accepts_float16 = softmax in ("softmax", "softmax1")
    return Sample(call, (*inputs, *parameters), expected, accepts_float16=accepts_float16, n_dtype_inputs=1)


@register("Rotary")
def _rotary(draw):
    shape = draw(SMALL), draw(SMALL), draw(SOME), 4 * draw(SOME)
    offset, base = draw(st.sampled_from([0, 7])), draw(st.sampled_from([100.0, 10_000.0]))
    llama3 = attention.RotaryScaling("llama3", 8.0, original_window=64)
    scaling = draw(st.sampled_from([None, attention.RotaryScaling("linear", 4.0), llama3]))
    op = attention.Rotary(base, draw(st.sampled_from([1.0, 0.5])), scaling)

    def expected(xp: Any, x: Any) -> Any:
        half = int(x.shape[-1] * op.fraction) // 2
        speeds = base ** (-np.arange(half) / half)
        angles = np.arange(offset, offset + x.shape[1])[:, None, None] * (
            scaling.scale_frequencies(speeds) if scaling else speeds
        )
        cos, sin, a, b = xp.asarray(np.cos(angles)), xp.asarray(np.sin(angles)), x[..., :half], x[..., half : 2 * half]
        return xp.concatenate([a * cos - b * sin, a * sin + b * cos, x[..., 2 * half :]], -1)

    return Sample(op if offset == 0 else lambda x: op(x, offset), (normal(draw, *shape),), expected)


# -------------------------------------------------------------------- recurrence
def torch_recurrence(torch: Any, cell: str, active: np.ndarray | None, x: Any, initial: Any, *weights: Any) -> Any:
    """Run PyTorch's recurrent cell for each step."""
    name = {"tanh": "rnn_tanh_cell", "relu": "rnn_relu_cell", "gru": "gru_cell", "lstm": "lstm_cell"}[cell]
    weights = [w.mT if w.ndim == 2 else w for w in weights]
    states = [initial]
    for t in range(len(x)):
        before = states[-1]
        after = getattr(torch, name)(x[t], tuple(before) if cell == "lstm" else before[0], *weights)
        after = torch.stack(after) if cell == "lstm" else after[None]
        states.append(after if active is None else torch.where(torch.tensor(active[t]), after, before))
    return torch.stack(states, 1)


@register("recurrence")
def _recurrence(draw):
    cell = draw(st.sampled_from(list(recurrent.CELLS)))
    kind = recurrent.CELLS[cell]
    n_steps, n_items, channels, size = draw(st.sampled_from([0, 1, 3, 9])), draw(SOME), draw(SOME), draw(SOME)
    active = normal(draw, n_steps, n_items, 1) > -0.5 if draw(st.booleans()) else None
    columns = kind.n_gates * size
    shapes = [(n_steps, n_items, channels), (kind.n_states, n_items, size), (channels, columns), (size, columns)]
    inputs = tuple(normal(draw, *shape) for shape in shapes + [(columns,)] * (2 * draw(st.booleans())))
    seen = lambda x: None if active is None else x.xp.asarray(active)
    run = lambda x, *others: recurrent.recurrence(x, *others, cell=cell, active=seen(x))
    expected = lambda torch, *xs: torch_recurrence(torch, cell, active, *xs)
    return Sample(run, inputs, expected, accepts_float16=False, needs_torch=True)


# -------------------------------------------------------------------- convolution
def torch_unfold(torch: Any, x: Any, kernel: tuple, stride: tuple, padding: tuple) -> Any:
    """Return PyTorch's patches of (B, H, W, C) in Tricycle's order, with channels last."""
    n_items, *_, channels = x.shape
    sizes = [(n + 2 * p - k) // s + 1 for n, k, s, p in zip(x.shape[1:], kernel, stride, padding)]
    columns = torch.nn.functional.unfold(x.permute(0, 3, 1, 2), kernel, padding=padding, stride=stride)
    columns = columns.reshape(n_items, channels, kernel[0] * kernel[1], -1).permute(0, 3, 2, 1)
    return columns.reshape(n_items, *sizes, -1)


def torch_fold(torch: Any, columns: Any, sizes: tuple, kernel: tuple, stride: tuple, padding: tuple) -> Any:
    n_items, n_rows, n_columns, width = columns.shape
    columns = columns.reshape(n_items, n_rows * n_columns, kernel[0] * kernel[1], -1).permute(0, 3, 2, 1)
    columns = columns.reshape(n_items, width, -1)
    return torch.nn.functional.fold(columns, sizes, kernel, padding=padding, stride=stride).permute(0, 2, 3, 1)


def _draw_window(draw: Draw) -> tuple[tuple[int, ...], ...]:
    kernel, stride, padding = ((draw(SOME), draw(SOME)) for _ in range(3))
    return kernel, stride, tuple(p - 1 for p in padding)


@register("unfold")
def _unfold(draw):
    kernel, stride, padding = _draw_window(draw)
    sizes = tuple(max(1, k - 2 * p) + draw(SMALL) for k, p in zip(kernel, padding))
    x = signed(draw, (draw(SOME), *sizes, draw(SOME)))

    expected = lambda torch, x: torch_unfold(torch, x, kernel, stride, padding)
    return Sample(lambda x: convolution.unfold(x, kernel, stride, padding), (x,), expected, needs_torch=True)


@register("fold")
def _fold(draw):
    kernel, stride, padding = _draw_window(draw)
    sizes = tuple(max(1, k - 2 * p) + draw(SMALL) for k, p in zip(kernel, padding))
    places = [(n + 2 * p - k) // s + 1 for n, k, s, p in zip(sizes, kernel, stride, padding)]
    columns = signed(draw, (draw(SOME), *places, draw(SOME) * kernel[0] * kernel[1]))
    expected = lambda torch, columns: torch_fold(torch, columns, sizes, kernel, stride, padding)
    call = lambda columns: convolution.fold(columns, sizes, kernel, stride, padding)
    return Sample(call, (columns,), expected, needs_torch=True)


# -------------------------------------------------------------------- layers
def with_parameters(layer: Any, *names: str) -> Callable[..., Tensor]:
    """Return a function of a layer's input and the named parameters."""
    return lambda x, *parameters: functional_call(layer, dict(zip(names, parameters)), x)


def _norm(subtract_mean: bool, draw: Draw) -> Sample:
    *lead, size = draw(ROWS)
    size += 1
    has_bias = subtract_mean and draw(st.booleans())
    layer = layers.LayerNorm(size, has_bias) if subtract_mean else layers.RMSNorm(size)
    x = 2 * signed(draw, (*lead, size))  # near 0 a gradient is the difference of large numbers
    parameters = [normal(draw, size) for _ in range(1 + has_bias)]

    def expected(xp: Any, x: Any, gain: Any, bias: Any = 0.0) -> Any:
        x = x - x.mean(-1, keepdims=True) if subtract_mean else x
        return x / ((x * x).mean(-1, keepdims=True) + 1e-5) ** 0.5 * gain + bias

    call = with_parameters(layer, "gain", "bias")
    return Sample(call, (x, *parameters), expected, accepts_float16=False, n_dtype_inputs=1)


LAYERS |= {"LayerNorm": partial(_norm, True), "RMSNorm": partial(_norm, False)}


@register("Embedding", LAYERS)
def _embedding(draw):
    n_ids, size = draw(SOME), draw(SOME)
    ids = np.random.default_rng(draw(SEEDS)).integers(0, n_ids, draw(SHAPES))
    run = with_parameters(layers.Embedding(n_ids, size), "weights")
    flat = lambda xp, ids, table: table[ids.reshape(-1)].reshape(*ids.shape, size)
    return Sample(run, (ids, signed(draw, (n_ids, size))), flat, accepts_float16=False)
