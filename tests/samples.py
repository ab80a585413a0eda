"""Sample inputs of every op in the registry, for the generic tests of test_registry.py.

An op of `tricycle.ops.OPS` without a sample fails a test. To add one, add a row to a table below, or a call of `add`,
with inputs at a distance from kinks, and the PyTorch function if there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from packed_attention import CrossAttention, SelfAttention

import tricycle.activation as activation
import tricycle.attention as attention
import tricycle.einsum as einsum
import tricycle.functions as functions
import tricycle.loss as loss
import tricycle.sequences.convolution as convolution
import tricycle.sequences.recurrent as recurrent
from tricycle import extra_ops, ops, softmaxes
from tricycle.activations import ExactGeLU, ReLUSquared
from tricycle.tensor import Tensor, to_tensor


class Sample(NamedTuple):
    """One call of one op.

    Attributes:
        op: the name in the registry.
        call: takes a Tensor for each input.
        inputs: float64 arrays (integers for labels), read-only.
        torch: the same call in PyTorch; takes the module, then its tensors.
        batched: per input, the flag `is_batched`.
    """

    op: str
    call: Callable[..., Tensor]
    inputs: tuple[np.ndarray, ...]
    torch: Callable[..., Any] | None
    batched: tuple[bool, ...]

    def tensors(self, dtype: Any = np.float64, change: Callable = lambda array: array) -> list[Tensor]:
        """Return the inputs as Tensors with `change` applied; floats have `dtype`."""
        return [
            to_tensor(change(a), dtype=a.dtype if a.dtype.kind in "biu" else dtype, is_batched=flag)
            for a, flag in zip(self.inputs, self.batched)
        ]

    def __str__(self) -> str:
        return f"{self.op}-{'-'.join('x'.join(map(str, a.shape)) or 'scalar' for a in self.inputs)}"


SAMPLES: dict[str, list[Sample]] = {}
_rng = np.random.default_rng(42)


class IntegerInput(list):
    """An integer input, such as labels and indices."""


def add(op: str, call: Callable, *inputs: Any, torch: Callable | None = None, batched: tuple[bool, ...] = ()) -> None:
    arrays = []
    for x in inputs:
        array = np.array(x, dtype=np.int64 if isinstance(x, IntegerInput) else np.float64)
        array.flags.writeable = False
        arrays.append(array)
    flags = batched or (False,) * len(arrays)
    SAMPLES.setdefault(op, []).append(Sample(op, call, tuple(arrays), torch, flags))


# -------------------------------------------------------------------- inputs
def normal(*shape: int) -> np.ndarray:
    return _rng.standard_normal(shape)


def normals(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    return [normal(*shape) for shape in shapes]


def positive(*shape: int) -> np.ndarray:
    return _rng.uniform(0.5, 2.5, shape)


def nonzero(*shape: int) -> np.ndarray:
    """Return values of both signs, with absolute values of at least 0.3."""
    return _rng.choice([-1, 1], shape) * _rng.uniform(0.3, 2, shape)


def distinct(*shape: int, offset: float = 0.0) -> np.ndarray:
    """Return values at least 0.5 apart, and at least 0.25 from the values with an offset of 0.25."""
    size = int(np.prod(shape))
    return (_rng.permutation(size) - size // 2).reshape(shape) * 0.5 + offset


def distinct_with_offset(*shape: int) -> np.ndarray:
    return distinct(*shape, offset=0.25)


# -------------------------------------------------------------------- elementwise, one input
SHAPES = [(), (1,), (5,), (2, 3), (2, 1, 3), (0,), (2, 0, 3)]

# name, op, inputs, edge values, PyTorch
UNARY = [
    ("exp", extra_ops.exp, normal, [-30, 0, 5], lambda torch, x: x.exp()),
    ("log", extra_ops.log, positive, [1e-3, 1, 1e4], lambda torch, x: x.log()),
    ("sqrt", extra_ops.sqrt, positive, [1e-2, 1, 1e4], lambda torch, x: x.sqrt()),
    ("sin", extra_ops.sin, normal, [-30, 0, 30], lambda torch, x: x.sin()),
    ("cos", extra_ops.cos, normal, [-30, 0, 30], lambda torch, x: x.cos()),
    ("absolute", extra_ops.absolute, nonzero, [-1e3, 1e3], lambda torch, x: x.abs()),
    ("tanh", ops.tanh, normal, [-30, 0, 30], lambda torch, x: x.tanh()),
    ("sigmoid", ops.sigmoid, normal, [-30, 0, 30], lambda torch, x: x.sigmoid()),
    ("negative", extra_ops.negative, normal, [-1e3, 0, 1e3], lambda torch, x: -x),
    ("Sigmoid", functions.Sigmoid(), normal, [-30, 0, 30], lambda torch, x: x.sigmoid()),
    ("Tanh", functions.Tanh(), normal, [-30, 0, 30], lambda torch, x: x.tanh()),
    ("ReLU", activation.ReLU(), nonzero, [-1e3, 1e3], lambda torch, x: x.relu()),
    ("ReLUSquared", ReLUSquared(), nonzero, [-1e3, 1e3], lambda torch, x: x.relu() ** 2),
    ("GeLU", activation.GeLU(), normal, [-30, 0, 30], lambda torch, x: torch.nn.functional.gelu(x, approximate="tanh")),
    ("GeLU", activation.GeLU(False), normal, [-30, -5, 0, 5, 30], lambda torch, x: torch.nn.functional.gelu(x)),
    ("ExactGeLU", ExactGeLU(), normal, [-30, -5, 0, 5, 30], lambda torch, x: torch.nn.functional.gelu(x)),
    ("Swish", activation.Swish(), normal, [-30, 0, 30], lambda torch, x: torch.nn.functional.silu(x)),
]
for _name, _op, _make, _edges, _torch in UNARY:
    for _shape in SHAPES:
        add(_name, _op, _make(*_shape), torch=_torch)
    add(_name, _op, _edges, torch=_torch)
    add(_name, _op, _make(3, 2), torch=_torch, batched=(True,))

# -------------------------------------------------------------------- elementwise, two inputs
_PLAIN_PAIRS = [((3,), (3,)), ((2, 3), (3,)), ((3,), (2, 3)), ((2, 1), (1, 3)), ((), (2, 2)), ((2, 2), ()), ((), ())]
SHAPE_PAIRS = [*_PLAIN_PAIRS, ((4, 1, 3), (2, 1)), ((1,), (5,)), ((0, 3), (1, 3)), ((2, 1), (2, 0))]

BINARY = [
    ("add", ops.add, normal, normal, lambda torch, x, y: x + y),
    ("add_residual", functions.add_residual, normal, normal, lambda torch, x, y: x + y),
    ("sub", extra_ops.subtract, normal, normal, lambda torch, x, y: x - y),
    ("mul", ops.multiply, normal, normal, lambda torch, x, y: x * y),
    ("div", extra_ops.divide, normal, nonzero, lambda torch, x, y: x / y),
    ("pow", extra_ops.power, positive, normal, lambda torch, x, y: x**y),
    ("maximum", extra_ops.maximum, distinct, distinct_with_offset, lambda torch, x, y: torch.maximum(x, y)),
    ("minimum", extra_ops.minimum, distinct, distinct_with_offset, lambda torch, x, y: torch.minimum(x, y)),
]
for _name, _op, _left, _right, _torch in BINARY:
    for _a, _b in SHAPE_PAIRS:
        add(_name, _op, _left(*_a), _right(*_b), torch=_torch)
    add(_name, _op, _left(2, 3), _right(3), torch=_torch, batched=(True, False))
    # a number on either side is no input
    _torch_fn = lambda torch, x, op=_torch: op(torch, x, x * 0 + 1.375)
    add(_name, lambda x, op=_op: op(x, 1.375), _left(2, 3), torch=_torch_fn)
    _torch_fn = lambda torch, y, op=_torch: op(torch, y * 0 + 1.375, y)
    add(_name, lambda y, op=_op: op(1.375, y), _right(2, 3), torch=_torch_fn)
for _exponent in (0, 1, 2, 3, -1, -2, 0.5, 2.5):
    _base = nonzero(4) if isinstance(_exponent, int) else positive(4)
    add("pow", lambda x, n=_exponent: x**n, _base, torch=lambda torch, x, n=_exponent: x**n)
# a Tensor of whole numbers
add("pow", extra_ops.power, [-2.0, -1.5, 0.5, 3.0], IntegerInput([2, 3, 2, -1]), torch=lambda torch, x, n: x**n)

# -------------------------------------------------------------------- choosing, joining
for _condition, _a, _b in [
    ([True, False, True], (3,), (3,)),
    ([[True], [False]], (3,), (2, 1)),
    (True, (2,), ()),
    ([[False]], (0, 1), (1, 2)),
]:
    _torch = lambda torch, x, y, c=_condition: torch.where(torch.tensor(c), x, y)
    add("where", lambda x, y, c=_condition: extra_ops.where(c, x, y), *normals(_a, _b), torch=_torch)
_JOINED = [(0, (2, 3), (1, 3), (4, 3)), (1, (2, 1), (2, 4)), (-1, (2, 0), (2, 2)), (-2, (1, 2), (1, 2)), (0, (3,))]
for _axis, *_shapes in _JOINED:
    _torch = lambda torch, *xs, axis=_axis: torch.cat(xs, axis)
    _call = lambda *xs, axis=_axis: extra_ops.concatenate(xs, axis=axis)
    add("concatenate", _call, *normals(*_shapes), torch=_torch)
for _axis, _n, _shape in [(0, 3, (2, 3)), (1, 2, (2, 3)), (-1, 2, (2, 3)), (0, 2, ()), (0, 1, (4,)), (1, 2, (0, 2))]:
    _torch = lambda torch, *xs, axis=_axis: torch.stack(xs, axis)
    add("stack", lambda *xs, axis=_axis: extra_ops.stack(xs, axis=axis), *normals(*[_shape] * _n), torch=_torch)

# -------------------------------------------------------------------- reductions
_PLAIN_AXES = [(None, (2, 3)), (0, (2, 3)), (-1, (2, 3)), ((0, 2), (2, 3, 4)), ((-1, 0), (2, 3, 4))]
AXES = [*_PLAIN_AXES, (None, ()), (0, (1,)), (1, (3, 1)), (1, (0, 2)), (None, (1, 1))]
REDUCTIONS = {"sum": "sum", "mean": "mean", "max": "amax", "min": "amin"}
for _name, _method in REDUCTIONS.items():
    for _axis, _shape in AXES:
        for _keep in (False, True):
            _torch = lambda torch, x, f=_method, axis=_axis, keep=_keep: getattr(x, f)(
                tuple(range(x.ndim)) if axis is None else axis, keepdim=keep
            )
            _call = lambda x, op=ops.OPS[_name], axis=_axis, keep=_keep: op(x, axis, keep)
            add(_name, _call, distinct(*_shape), torch=_torch)
    add(_name, lambda x, op=ops.OPS[_name]: op(x, axis=()), distinct(2, 3))
    add(_name, lambda x, op=ops.OPS[_name]: op(x, axis=1), distinct(2, 3), batched=(True,))
add("sum", lambda x: extra_ops.sum(x, 0), normal(0, 3), torch=lambda torch, x: x.sum(0))

# -------------------------------------------------------------------- shapes and indexing
for _shape, _new in [((2, 3), (3, 2)), ((2, 3), (-1,)), ((6,), (1, 2, -1)), ((), (1, 1)), ((0, 3), (3, 0)), ((1,), ())]:
    _torch = lambda torch, x, new=_new: x.reshape(new)
    add("reshape", lambda x, new=_new: ops.reshape(x, *new), normal(*_shape), torch=_torch)
_ORDERS = [((2, 3), (1, 0)), ((2, 3, 4), (2, 0, 1)), ((2, 3, 4), (0, -1, 1)), ((3,), (0,)), ((0, 2, 1), (1, 2, 0))]
for _shape, _order in _ORDERS:
    _torch = lambda torch, x, order=_order: x.permute(order)
    add("transpose", lambda x, order=_order: extra_ops.transpose(x, *order), normal(*_shape), torch=_torch)
add("transpose", extra_ops.transpose, normal(2, 3, 4), torch=lambda torch, x: x.permute(2, 1, 0))
add("transpose", extra_ops.transpose, normal(), torch=lambda torch, x: x)

_SLICES = [slice(1, None), slice(None, None, 2), slice(2, 2), ..., None, ()]
_TUPLES = [(0, 1), (slice(None), 0), (..., -1), (0, None, slice(1, 3)), ([0, 1, 0], [1, 1, 1]), (slice(None), [0, 0])]
_ARRAYS = [[0, 2, 0], [], np.array([[0, 1], [1, 1]]), np.array([True, False, True]), np.int64(1)]
INDICES = [0, -1, *_SLICES, *_TUPLES, *_ARRAYS]
for _index in INDICES:
    add("getitem", lambda x, index=_index: x[index], normal(3, 2, 4), torch=lambda torch, x, index=_index: x[index])
for _index in (slice(None, None, -1), (2, slice(3, None, -2)), (0, ..., [1, 1])):  # PyTorch has none or means another
    add("getitem", lambda x, index=_index: x[index], normal(3, 4))
add("getitem", lambda x: x[()], normal(2), batched=(True,))
add("getitem", lambda x, ids: x[ids], normal(4, 2), IntegerInput([[3, 0], [3, 3]]), torch=lambda torch, x, ids: x[ids])

# -------------------------------------------------------------------- products
_PRODUCTS = [((2, 3), (3, 4)), ((3,), (3,)), ((2, 3), (3,)), ((3,), (3, 2)), ((5, 2, 3), (3, 4)), ((2, 3), (5, 3, 4))]
_PRODUCTS += [((4, 1, 2, 3), (5, 3, 1)), ((1, 1), (1, 1)), ((2, 0), (0, 3)), ((0, 2), (2, 3)), ((2, 2, 3), (3,))]
for _a, _b in _PRODUCTS:
    add("matmul", einsum.matmul, *normals(_a, _b), torch=lambda torch, x, y: x @ y)
add(
    "matmul",
    einsum.matmul,
    normal(2, 3),
    IntegerInput([[1, 0], [2, -1], [0, 3]]),
    torch=lambda torch, x, y: x @ y.to(x.dtype),
)

# subscripts, shapes; None where PyTorch's einsum has no such notation
EINSUMS = [
    ("ij->ji", (2, 3)),
    ("ij->ij", (2, 3)),
    ("ij->i", (2, 3)),
    ("ij->", (2, 3)),
    ("ii->i", (3, 3)),
    ("ii->", (3, 3)),
    ("ii", (3, 3)),
    ("iij->ij", (2, 2, 3)),
    ("iji->j", (2, 3, 2)),
    ("iii->i", (2, 2, 2)),
    ("ji", (2, 3)),
    ("->", ()),
    ("ij,jk->ik", (2, 3), (3, 4)),
    ("ij,jk", (2, 3), (3, 4)),
    ("ij,kj->ki", (2, 3), (4, 3)),
    ("i,j->ij", (2,), (3,)),
    ("ij,ij->", (2, 3), (2, 3)),
    ("ij,ij->ij", (2, 3), (2, 3)),
    ("bij,bjk->bik", (2, 3, 4), (2, 4, 5)),
    ("i,->i", (3,), ()),
    ("zxTb,bW->zxTW", (2, 3, 4, 5), (5, 6)),
    ("ij,ij,ij->j", (2, 3), (2, 3), (2, 3)),
    ("ij,jk,kl->il", (2, 3), (3, 4), (4, 2)),
    ("a,ab,bc,cd->d", (2,), (2, 3), (3, 2), (2, 4)),
    ("ij,k->i", (2, 3), (4,)),
    ("ii,ij->j", (3, 3), (3, 2)),
    ("aab,bc->ac", (2, 2, 3), (3, 4)),
    ("...ij,...jk->...ik", (5, 2, 3), (5, 3, 4)),
    ("...ij,...jk->...ik", (2, 1, 2, 3), (5, 3, 4)),
    ("i...->...i", (2, 3, 4)),
    ("...,...", (2, 3), (3,)),
    ("...i->...", (2, 3)),
    ("i...j,j->i...", (2, 3, 4), (4,)),
    ("ij,jk->ik", (2, 1), (1, 3)),
    ("ij,jk->ik", (2, 0), (0, 3)),
    ("ij,jk->ik", (0, 2), (2, 3)),
    ("ij,ij->ij", (1, 1), (1, 1)),
]
for _subscripts, *_shapes in EINSUMS:
    _torch = (lambda torch, *xs, s=_subscripts: torch.einsum(s, *xs)) if _subscripts != "->" else None
    add("Einsum", einsum.Einsum(_subscripts), *normals(*_shapes), torch=_torch)
# with a batch the subscripts describe one item
for _subscripts, _full, _flags, *_shapes in [
    ("ij->ji", "bij->bji", (True,), (5, 2, 3)),
    ("i->", "bi->b", (True,), (5, 2)),
    ("ii->i", "bii->bi", (True,), (2, 3, 3)),
    ("ij,jk->ik", "bij,jk->bik", (True, False), (5, 2, 3), (3, 4)),
    ("ij,jk->ik", "ij,bjk->bik", (False, True), (2, 3), (5, 3, 4)),
    ("ij,jk->ik", "bij,bjk->bik", (True, True), (5, 2, 3), (5, 3, 4)),
    ("...j,jk->...k", "b...j,jk->b...k", (True, False), (5, 2, 3), (3, 4)),
]:
    _torch = lambda torch, *xs, s=_full: torch.einsum(s, *xs)
    add("Einsum", einsum.Einsum(_subscripts), *normals(*_shapes), batched=_flags, torch=_torch)

for _shape in [(3,), (2, 3), (2, 4, 3), (1, 3), (0, 3)]:
    add("linear", functions.linear, normal(*_shape), normal(3, 5), normal(5), torch=lambda torch, x, w, b: x @ w + b)
    add("linear", functions.linear, normal(*_shape), normal(3, 5), torch=lambda torch, x, w: x @ w)
_op = lambda x: functions.to_compute_dtype(x, "bfloat16") * 2
add("to_compute_dtype", _op, normal(2, 3), torch=lambda torch, x: x * 2)


def _combine(q, k, v):
    return q * k + v


add(
    "split_heads",
    lambda x: _combine(*ops.split_heads(x, (2, 1, 1), 3)),
    normal(2, 3, 12),
    torch=lambda torch, x: _combine(*x.reshape(2, 3, 4, 3).split((2, 1, 1), dim=2)),
)


# -------------------------------------------------------------------- softmax variants, gates
def torch_softmax1(torch, x):
    """Compute softmax with an additional score of 0, whose weight is dropped."""
    return torch.cat([x, torch.zeros_like(x[..., :1])], -1).softmax(-1)[..., :-1] if x.shape[-1] else x


def _add_row_op(name, op, torch, shapes):
    for shape in shapes:
        add(name, op, normal(*shape), torch=torch)
    add(name, op, normal(2, shapes[0][-1]), torch=torch, batched=(True,))
    add(name, op, [[0] * 4, [-50, 0, 50, 3], [1e3, 1e3 - 1, 0, -1e3]], torch=torch)


ROWS = [(4,), (1,), (2, 3), (2, 1, 5), (0, 3)]
_add_row_op("Softmax", functions.Softmax(), lambda torch, x: x.softmax(-1), [*ROWS, (2, 0)])
_add_row_op("Softmax1", functions.Softmax1(), torch_softmax1, ROWS)
# entropies on both sides of the threshold, and betas on both sides of 1
_add_row_op("AdaptiveSoftmax", softmaxes.AdaptiveSoftmax(), None, [*ROWS, (2, 40)])
_add_row_op("AdaptiveSoftmax", softmaxes.AdaptiveSoftmax((0.5, 1.5), threshold=0.1), None, ROWS)
add("AdaptiveSoftmax", softmaxes.AdaptiveSoftmax(), 8 * normal(3, 12))


def torch_block_softmax(torch, x, scales):
    parts = x.split(-(-x.shape[-1] // scales.shape[-2]), -1)
    return torch.cat([part.softmax(-1) * scales[..., i, :, None] for i, part in enumerate(parts)], -1)


for _shape, _scales in [((4, 6), (2, 4)), ((3, 4, 5), (2, 4)), ((2, 3, 4, 7), (3, 2, 4)), ((1, 2), (2, 1))]:
    add("BlockSoftmax", softmaxes.BlockSoftmax(2), normal(*_shape), normal(*_scales), torch=torch_block_softmax)
_add_row_op("BlockSoftmax", softmaxes.BlockSoftmax(3, "none"), None, ROWS)
_add_row_op("BlockSoftmax", softmaxes.BlockSoftmax(3, "exact"), lambda torch, x: x.softmax(-1), ROWS)


def torch_sink_softmax(torch, x, sinks):
    column = sinks.reshape(*sinks.shape, *[1] * min(x.ndim, 2)).expand(*x.shape[:-1], 1)
    return torch.cat([x, column], -1).softmax(-1)[..., :-1]


for _shape, _sinks in [((4,), ()), ((4, 6), ()), ((3, 4, 5), (3,)), ((2, 3, 4, 7), (3,)), ((2, 3, 4, 1), (2, 1))]:
    add("SinkSoftmax", softmaxes.SinkSoftmax(), normal(*_shape), normal(*_sinks), torch=torch_sink_softmax)
_add_row_op("SinkSoftmax", softmaxes.SinkSoftmax(), torch_softmax1, ROWS)
_add_row_op("LogSoftmax", functions.LogSoftmax(), lambda torch, x: x.log_softmax(-1), ROWS)
PAIRED_ROWS = [(4,), (2, 6), (2, 1, 2), (0, 4), (2, 0)]
for _gate in (activation.GeLU(), activation.GeLU(False), ReLUSquared(), functions.Tanh()):
    _add_row_op("Gated", activation.Gated(_gate), None, PAIRED_ROWS)
_add_row_op("GLU", activation.GLU(), lambda torch, x: torch.nn.functional.glu(x) if x.shape[-1] else x, PAIRED_ROWS)
_add_row_op(
    "SwiGLU",
    activation.SwiGLU(),
    lambda torch, x: x.chunk(2, -1)[0] * torch.nn.functional.silu(x.chunk(2, -1)[1]),
    PAIRED_ROWS,
)


# -------------------------------------------------------------------- losses
def _torch_cross_entropy(torch, labels, logits, ignore=-100, smoothing=0.0):
    return torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=ignore, label_smoothing=smoothing
    )


_cross_entropy = loss.CrossEntropy()
for _labels, _classes in [([1, 0, 2], 3), ([2], 4), ([[0, 1], [1, 1], [0, 0]], 2), ([0, 0], 1)]:
    _logits = normal(*np.shape(_labels), _classes)
    add("CrossEntropy", _cross_entropy, IntegerInput(_labels), _logits, torch=_torch_cross_entropy)
add("CrossEntropy", _cross_entropy, IntegerInput([1, 0]), [[50, -50, 0], [0, 0, 0]], torch=_torch_cross_entropy)
add(
    "CrossEntropy", _cross_entropy, IntegerInput([1, 0]), normal(2, 3), torch=_torch_cross_entropy, batched=(True, True)
)
for _smoothing in (0.0, 0.1, 0.5):
    _op = loss.CrossEntropy(ignore_index=-1, label_smoothing=_smoothing)
    _torch = lambda torch, *xs, e=_smoothing: _torch_cross_entropy(torch, *xs, ignore=-1, smoothing=e)
    add("CrossEntropy", _op, IntegerInput([[1, -1], [-1, 3]]), normal(2, 2, 4), torch=_torch)
for _shape in [(), (3,), (2, 3), (1, 1)]:
    _torch = lambda torch, x, y: torch.nn.functional.mse_loss(y, x)
    add("MeanSquaredError", loss.MeanSquaredError(), *normals(_shape, _shape), torch=_torch)


for _shape in SHAPES:
    add("softcap", lambda x: functions.softcap(x, 1.5), normal(*_shape), torch=lambda torch, x: 1.5 * (x / 1.5).tanh())


# -------------------------------------------------------------------- attention
def _torch_attention(torch, qkv, n_heads, causal):
    n_items, n_tokens, width = qkv.shape
    q, k, v = qkv.reshape(n_items, n_tokens, 3, n_heads, -1).permute(2, 0, 3, 1, 4)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return out.transpose(1, 2).reshape(n_items, n_tokens, width // 3)


for _heads, _causal in [(1, True), (2, True), (2, False)]:
    _op = SelfAttention(_heads, _causal)
    for _items, _tokens, _size in [(1, 1, 1), (2, 5, 3), (1, 19, 2)]:
        _torch = lambda torch, x, n=_heads, causal=_causal: _torch_attention(torch, x, n, causal)
        add("Attention", _op, normal(_items, _tokens, 3 * _heads * _size), torch=_torch)
for _name in ("softmax1", "adaptive"):
    for _causal, _tokens in [(True, 5), (False, 5), (True, 19)]:
        add("Attention", SelfAttention(2, _causal, _name), 2 * normal(2, _tokens, 12))
for _per_head, _tokens, _window in [(False, 5, 5), (True, 7, 9), (False, 37, 40), (True, 19, 32)]:
    for _causal in (True, False):
        _op = SelfAttention(2, _causal, softmaxes.BlockSoftmax(2, per_head=_per_head, length=_window))
        _inputs = normals((2, _tokens, 12), (*[2] * _per_head, 2, _window))
        add("Attention", lambda x, scales, op=_op: op(x, None, scales), *_inputs)
for _per_head, _tokens in [(False, 19), (True, 7)]:  # a scale for each pair of blocks
    _op = SelfAttention(2, True, softmaxes.BlockSoftmax(3, per_head=_per_head, length=20, per_position=False))
    _inputs = normals((2, _tokens, 12), (*[2] * _per_head, 3, 3))
    add("Attention", lambda x, scales, op=_op: op(x, None, scales), *_inputs)
for _causal, _tokens in [(True, 5), (False, 5), (True, 19)]:
    _op = SelfAttention(2, _causal, "sink")
    add("Attention", lambda x, sinks, op=_op: op(x, None, sinks), 2 * normal(2, _tokens, 12), normal(2))
for _correction in ("none", "exact"):
    _softmax = softmaxes.BlockSoftmax(3, _correction)
    add("Attention", SelfAttention(2, True, _softmax), normal(2, 19, 12))


def _torch_cross(torch, *tensors):
    q, k, v = (x.unflatten(-1, (2, -1)).transpose(1, 2) for x in tensors)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


for _name, _torch in [("softmax", _torch_cross), ("softmax1", None), ("adaptive", None)]:
    for _queries, _keys in [(3, 5), (18, 4)]:
        _inputs = normals((2, _queries, 4), (2, _keys, 4), (2, _keys, 4))
        add("Attention", CrossAttention(2, _name), *_inputs, torch=_torch)
_inputs = normals((1, 3, 2), (1, 7, 2), (1, 7, 2), (2, 8))
add("Attention", CrossAttention(1, softmaxes.BlockSoftmax(2, length=8)), *_inputs)
# masks: of lengths (one item has none at all), of pairs that hide some rows whole, and one for each head
for _shape in [(2, 7), (2, 5, 7), (2, 2, 1, 7), (2, 18, 7)]:
    _mask = _rng.random(_shape) < 0.6
    _mask[0, ..., 0] = True
    _mask[(1, *[0] * (len(_shape) - 2))] = False
    _queries = 18 if 18 in _shape else 5
    for _name in ("softmax", "softmax1", "adaptive", "sink"):
        _call = lambda *tensors, op=CrossAttention(2, _name), mask=_mask: op(*tensors, mask=mask)  # noqa: B008
        add("Attention", _call, *normals((2, _queries, 4), (2, 7, 4), (2, 7, 4)))
for _tokens, _softmax in [(5, "softmax"), (19, "softmax"), (19, "softmax1"), (19, softmaxes.BlockSoftmax(3, "exact"))]:
    _mask = _rng.random((2, _tokens)) < 0.6
    for _causal in (True, False):
        _op = SelfAttention(2, _causal, _softmax)
        add("Attention", lambda x, op=_op, mask=_mask: op(x, mask=mask), normal(2, _tokens, 12))
_op = SelfAttention(2, True, softmaxes.BlockSoftmax(2, length=20))
_mask = _rng.random((2, 19, 19)) < 0.7
_mask[:, :, 10:15] = False
add("Attention", lambda x, s, op=_op, mask=_mask: op(x, None, s, mask), normal(2, 19, 12), normal(2, 20))
# fewer heads of keys than of queries, windows, caps, a scale, values of another size
for _n_heads, _key_heads in [(1, 1), (4, 2), (6, 2), (3, 1)]:
    for _tokens, _keys in [(5, 5), (3, 7), (19, 19), (18, 25)]:
        for _options in (
            {},
            {"window": 3},
            {"window": 1},
            {"window": 40},
            {"softcap": 1.5},
            {"window": 4, "softcap": 2.0, "scale": 0.3},
            {"causal": False, "softcap": 1.0},
            {"softmax": "softmax1", "window": 5},
            {"softmax": "adaptive", "window": 6, "softcap": 3.0},
        ):
            _inputs = normals((2, _tokens, _n_heads, 4), (2, _keys, _key_heads, 4), (2, _keys, _key_heads, 4))
            add("Attention", attention.Attention(**_options), *_inputs)
for _key_heads, _window in [(2, None), (1, 4)]:
    _op = attention.Attention(softmaxes.BlockSoftmax(2, length=20), window=_window)
    _inputs = normals((1, 19, 4, 2), (1, 19, _key_heads, 2), (1, 19, _key_heads, 2), (2, 20))
    add("Attention", lambda q, k, v, s, op=_op: op(q, k, v, None, s), *_inputs)
for _key_heads, _options in [(2, {}), (1, {"window": 4}), (4, {"softcap": 1.5})]:
    _op = attention.Attention("sink", **_options)
    _inputs = normals((2, 19, 4, 2), (2, 21, _key_heads, 2), (2, 21, _key_heads, 3), (4,))
    add("Attention", lambda q, k, v, s, op=_op: op(q, k, v, None, s), *_inputs)
for _items, _tokens, _heads, _size in [(1, 1, 1, 2), (2, 5, 2, 4), (2, 3, 3, 8)]:
    add("Rotary", attention.Rotary(), normal(_items, _tokens, _heads, _size))
    add("Rotary", lambda x: attention.Rotary(base=100.0)(x, offset=3), normal(_items, _tokens, _heads, _size))
for _scaling in (attention.RotaryScaling("linear", 4.0), attention.RotaryScaling("llama3", 8.0, original_window=64)):
    add("Rotary", attention.Rotary(1000.0, scaling=_scaling), normal(2, 5, 2, 8))
for _fraction in (0.25, 0.5, 0.75):
    add("Rotary", attention.Rotary(fraction=_fraction), normal(2, 5, 2, 8))


# -------------------------------------------------------------------- recurrence
def torch_recurrence(torch, cell, active, x, initial, *weights):
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


for _cell, _kind in recurrent.CELLS.items():
    for _items, _steps, _channels, _size in [(1, 1, 1, 1), (2, 4, 3, 2), (3, 2, 2, 3), (1, 18, 1, 1)]:
        _active = None if _items < 3 else np.arange(_steps)[:, None, None] < np.array([[1], [2], [1]])
        _shapes = [(_channels, _kind.n_gates * _size), (_size, _kind.n_gates * _size)]
        _biases = [_shapes[0][1:]] * 2 if _steps > 1 else []
        add(
            "recurrence",
            lambda x, *others, cell=_cell, active=_active: recurrent.recurrence(
                x, *others, cell=cell, active=None if active is None else x.xp.asarray(active)
            ),
            *(normal(*shape) for shape in [(_steps, _items, _channels), (_kind.n_states, _items, _size)]),
            *(normal(*shape) for shape in [*_shapes, *_biases]),
            torch=lambda torch, *xs, c=_cell, a=_active: torch_recurrence(torch, c, a, *xs),
        )


# -------------------------------------------------------------------- convolution
def torch_unfold(torch, x, kernel, stride, padding):
    """Return PyTorch's patches of (B, H, W, C) in Tricycle's order, with channels last."""
    n_items, *_, channels = x.shape
    sizes = [(n + 2 * p - k) // s + 1 for n, k, s, p in zip(x.shape[1:], kernel, stride, padding)]
    columns = torch.nn.functional.unfold(x.permute(0, 3, 1, 2), kernel, padding=padding, stride=stride)
    columns = columns.reshape(n_items, channels, kernel[0] * kernel[1], -1).permute(0, 3, 2, 1)
    return columns.reshape(n_items, *sizes, -1)


def torch_fold(torch, columns, sizes, kernel, stride, padding):
    n_items, n_rows, n_columns, width = columns.shape
    columns = columns.reshape(n_items, n_rows * n_columns, kernel[0] * kernel[1], -1).permute(0, 3, 2, 1)
    columns = columns.reshape(n_items, width, -1)
    return torch.nn.functional.fold(columns, sizes, kernel, padding=padding, stride=stride).permute(0, 2, 3, 1)


for _sizes, _kernel, _stride, _padding in [
    ((4, 5), (2, 3), (1, 1), (0, 0)),
    ((5, 5), (3, 3), (2, 2), (1, 1)),
    ((6, 3), (2, 1), (3, 2), (2, 0)),
    ((1, 1), (1, 1), (1, 1), (0, 0)),
]:
    _options = _kernel, _stride, _padding
    _places = [(n + 2 * p - k) // s + 1 for n, k, s, p in zip(_sizes, *_options)]
    _torch = lambda torch, x, options=_options: torch_unfold(torch, x, *options)
    add("unfold", lambda x, options=_options: convolution.unfold(x, *options), normal(2, *_sizes, 3), torch=_torch)
    _torch = lambda torch, x, options=(_sizes, *_options): torch_fold(torch, x, *options)
    _columns = normal(2, *_places, 3 * _kernel[0] * _kernel[1])
    add("fold", lambda x, options=(_sizes, *_options): convolution.fold(x, *options), _columns, torch=_torch)
add("unfold", lambda x: convolution.unfold(x, (3,), (2,), (1,)), normal(2, 6, 2))
