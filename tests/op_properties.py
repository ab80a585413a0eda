"""Hypothesis strategies for calls of each op of the registry and of layers, for test_properties.py.

Hypothesis draws shapes (with sizes 0 and 1), options and axes; the values are generated from a seed, distinct and at a
distance from kinks and poles. Each call has an equivalent in PyTorch, on float64 tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import samples
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
from tricycle import extra_ops, ops, softmaxes
from tricycle.activations import ReLUSquared
from tricycle.tensor import Tensor

Draw = Callable[[st.SearchStrategy], Any]


class Call(NamedTuple):
    """One call of one op.

    Attributes:
        run: takes a Tensor for each input.
        inputs: float64 arrays; integers for labels.
        torch: the same call; takes the module, then a tensor of float64 for each input.
        accepts_integers: whether its inputs may also be integers or booleans, which are converted to float32.
        accepts_float16: whether float16 inputs cause no larger error than their rounding.
        batched: per input, the flag `is_batched`; all False if it is empty.
        n_dtype_inputs: the number of first inputs that determine the dtype of the result; None for all.
    """

    run: Callable[..., Tensor]
    inputs: tuple[np.ndarray, ...]
    torch: Callable[..., Any]
    accepts_integers: bool = False
    accepts_float16: bool = True
    batched: tuple[bool, ...] = ()
    n_dtype_inputs: int | None = None


PROPERTIES: dict[str, Callable[[Draw], Call]] = {}  # of ops
LAYERS: dict[str, Callable[[Draw], Call]] = {}


def register(
    name: str, table: dict[str, Callable[[Draw], Call]] = PROPERTIES
) -> Callable[[Callable[[Draw], Call]], Callable[[Draw], Call]]:
    def add_to_table(draw_call: Callable[[Draw], Call]) -> Callable[[Draw], Call]:
        table[name] = draw_call
        return draw_call

    return add_to_table


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
ELEMENTWISE = {name: (op, make is samples.positive, torch_op) for name, op, make, _, torch_op in samples.UNARY}
ACCEPT_INTEGERS = {"exp", "sin", "cos", "tanh", "sigmoid", "Sigmoid", "Tanh", "ReLUSquared", "ExactGeLU", "Swish"}


def _elementwise(name: str) -> Callable[[Draw], Call]:
    op, is_positive, torch_op = ELEMENTWISE[name]

    def draw_call(draw: Draw) -> Call:
        x = signed(draw, draw(SHAPES)) * draw(st.sampled_from([1, 4]))
        return Call(op, (np.abs(x) if is_positive else x,), torch_op, accepts_integers=name in ACCEPT_INTEGERS)

    return draw_call


for _name in ELEMENTWISE:
    PROPERTIES[_name] = _elementwise(_name)


@register("GeLU")
def _gelu(draw):
    approximate, x = draw(st.booleans()), signed(draw, draw(SHAPES)) * draw(st.sampled_from([1, 4]))
    torch_op = lambda torch, x: torch.nn.functional.gelu(x, approximate="tanh" if approximate else "none")
    return Call(activation.GeLU(approximate), (x,), torch_op, accepts_integers=True)


@register("softcap")
def _soft_cap(draw):
    cap = draw(st.sampled_from([0.5, 1.5, 30.0]))
    return Call(
        lambda x: functions.softcap(x, cap), (signed(draw, draw(SHAPES)),), lambda torch, x: cap * (x / cap).tanh()
    )


@register("to_compute_dtype")
def _to_compute_dtype(draw):
    x = signed(draw, draw(SHAPES))
    return Call(lambda x: functions.to_compute_dtype(x, "float32") * 2, (x,), lambda torch, x: x * 2)


# -------------------------------------------------------------------- two inputs, and a number on either side


def _binary(name: str) -> Callable[[Draw], Call]:
    op, torch_op = next((op, torch_op) for each, op, _, _, torch_op in samples.BINARY if each == name)

    def draw_call(draw: Draw) -> Call:
        side = draw(st.sampled_from(["both", "both", "left", "right"]))
        arrays = [signed(draw, shape) for shape in broadcastable_shapes(draw, 2)]
        if name == "pow":
            arrays = [np.abs(array) for array in arrays]
        if side == "both":
            return Call(op, tuple(arrays), torch_op)
        number = draw(st.sampled_from([2, -1, 0.75, 3.0]))
        if name == "pow" and side == "right":
            number = abs(number)
        if side == "left":
            like_x = lambda torch, x: torch_op(torch, x, torch.full_like(x, number))
            return Call(lambda x: op(x, number), (arrays[0],), like_x)
        return Call(
            lambda y: op(number, y), (arrays[1],), lambda torch, y: torch_op(torch, torch.full_like(y, number), y)
        )

    return draw_call


for _name, *_ in samples.BINARY:
    PROPERTIES[_name] = _binary(_name)


@register("where")
def _where(draw):
    mask_shape, *shapes = broadcastable_shapes(draw, 3)
    condition = normal(draw, *mask_shape) > 0
    inputs = tuple(signed(draw, shape) for shape in shapes)
    torch_where = lambda torch, x, y: torch.where(torch.tensor(condition), x, y)
    return Call(lambda x, y: extra_ops.where(condition, x, y), inputs, torch_where)


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
    return Call(lambda *xs: extra_ops.concatenate(xs, axis), tuple(inputs), lambda torch, *xs: torch.cat(xs, axis))


@register("stack")
def _stack(draw):
    shape = draw(SHAPES)
    axis = draw(st.integers(-len(shape) - 1, len(shape)))
    inputs = tuple(signed(draw, shape) for _ in range(draw(st.integers(1, 3))))
    return Call(lambda *xs: extra_ops.stack(xs, axis), inputs, lambda torch, *xs: torch.stack(xs, axis))


@register("reshape")
def _reshape(draw):
    x = signed(draw, draw(SHAPES))
    new = list(draw(st.permutations(x.shape)))
    new.insert(draw(st.integers(0, len(new))), 1)
    if x.size and draw(st.booleans()):
        new[draw(st.integers(0, len(new) - 1))] = -1
    return Call(lambda x: ops.reshape(x, *new), (x,), lambda torch, x: x.reshape(new))


@register("split_heads")
def _split_heads(draw):
    n_heads, size = draw(SOME), draw(SOME)
    x = signed(draw, (draw(SMALL), draw(SMALL), 2 * n_heads * size))

    def run(x):
        queries, keys = ops.split_heads(x, (n_heads, n_heads), size)
        return queries + 2 * keys

    def torch_run(torch, x):
        queries, keys = x.reshape(*x.shape[:2], 2 * n_heads, size).split(n_heads, dim=2)
        return queries + 2 * keys

    return Call(run, (x,), torch_run)


@register("transpose")
def _transpose(draw):
    x = signed(draw, draw(SHAPES))
    order = draw(st.permutations(range(x.ndim)))
    order = [axis - x.ndim * draw(st.booleans()) for axis in order]
    return Call(lambda x: extra_ops.transpose(x, *order), (x,), lambda torch, x: x.permute(order))


def _index(draw: Draw, shape: tuple[int, ...]) -> Any:
    kind = draw(st.sampled_from(["basic", "arrays", "mask"] if shape and 0 not in shape else ["basic"]))
    if kind == "basic":
        return draw(hnp.basic_indices(shape, allow_newaxis=True))
    if kind == "mask":
        return draw(hnp.arrays(bool, shape[: draw(st.integers(1, len(shape)))]))
    results = hnp.array_shapes(max_dims=2, min_side=0, max_side=4)
    return draw(hnp.integer_array_indices(shape, result_shape=results))


@register("getitem")
def _getitem(draw):
    """Select the elements by flat index in PyTorch, which lacks negative steps and NumPy's indexing rules."""
    x = signed(draw, draw(SHAPES))
    index = _index(draw, x.shape)
    places = np.asarray(np.arange(x.size).reshape(x.shape)[index])
    flat = places.ravel()
    return Call(
        lambda x: x[index], (x,), lambda torch, x: x.reshape(-1)[torch.tensor(flat.copy())].reshape(places.shape)
    )


# -------------------------------------------------------------------- reductions
def _reduction(name: str, torch_name: str) -> Callable[[Draw], Call]:
    def draw_call(draw: Draw) -> Call:
        x = signed(draw, draw(SHAPES if name == "sum" else FULL))
        axis = draw(st.none() | hnp.valid_tuple_axes(x.ndim, min_size=1) if x.ndim else st.none())
        keep = draw(st.booleans())
        axes = tuple(range(x.ndim)) if axis is None else axis

        def torch_op(torch: Any, x: Any) -> Any:
            return getattr(x, torch_name)(axes, keepdim=keep) if axes else x * 1

        return Call(lambda x: ops.OPS[name](x, axis, keep), (x,), torch_op)

    return draw_call


for _name, _torch_name in {"sum": "sum", "mean": "mean", "max": "amax", "min": "amin"}.items():
    PROPERTIES[_name] = _reduction(_name, _torch_name)


# -------------------------------------------------------------------- products
@register("matmul")
def _matmul(draw):
    drawn = hnp.mutually_broadcastable_shapes(signature=np.matmul.signature, max_dims=2, min_side=0, max_side=4)
    inputs = tuple(signed(draw, shape) for shape in draw(drawn).input_shapes)
    return Call(einsum.matmul, inputs, lambda torch, x, y: x @ y)


def draw_terms(draw: Draw) -> tuple[list[str], list[tuple[int, ...]]]:
    """Draw terms of an einsum and matching shapes, with repeated axes, a broadcast "...", and sizes from 0."""
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
    return terms, shapes


def _subscripts(draw: Draw) -> tuple[list[str], str, list[tuple[int, ...]]]:
    """Draw terms, output and shapes of an einsum."""
    terms, shapes = draw_terms(draw)
    present = sorted(set("".join(terms)) - {"."})
    output = draw(st.permutations(present))[: draw(st.integers(0, len(present)))]
    if any("..." in term for term in terms):
        output.insert(draw(st.integers(0, len(output))), "...")
    return terms, "".join(output), shapes


@register("Einsum")
def _einsum(draw):
    """Draw an einsum; for batched inputs, only PyTorch's subscripts contain the batch axis."""
    terms, output, shapes = _subscripts(draw)
    batched = [draw(st.booleans()) for _ in terms]
    shapes = [(2, *shape) if flag else shape for shape, flag in zip(shapes, batched)]
    batched_terms = ["z" * flag + term for term, flag in zip(terms, batched)]
    full = f"{','.join(batched_terms)}->{'z' * any(batched)}{output}"

    def torch_einsum(torch: Any, *xs: Any) -> Any:
        if set(full) <= set(",->"):  # PyTorch has no notation for numbers alone
            return torch.stack([x.reshape(()) for x in xs]).prod()
        return torch.einsum(full, *xs)

    inputs = tuple(signed(draw, shape) for shape in shapes)
    op = einsum.Einsum(f"{','.join(terms)}->{output}")
    return Call(op, inputs, torch_einsum, batched=tuple(batched))


@register("linear")
def _linear(draw):
    lead = draw(hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=4))
    from_size, to_size = draw(SMALL), draw(SMALL)
    shapes = [(*lead, from_size), (from_size, to_size)] + [(to_size,)] * draw(st.booleans())
    inputs = tuple(signed(draw, shape) for shape in shapes)
    return Call(functions.linear, inputs, lambda torch, x, w, *b: x @ w + (b[0] if b else 0), n_dtype_inputs=2)


# -------------------------------------------------------------------- softmax and its kin, gates
def torch_adaptive(torch: Any, x: Any) -> Any:
    plain = x.softmax(-1)
    entropy = -(plain * torch.where(plain > 0, plain, 1).log()).sum(-1, keepdim=True)
    beta = -0.037 * entropy**4 + 0.481 * entropy**3 - 2.3 * entropy**2 + 4.917 * entropy - 1.791
    return (x * torch.where((entropy > 0.5) & (beta > 1), beta, 1)).softmax(-1)


def _register_row_op(name: str, op: Callable, torch_op: Callable) -> None:
    def draw_call(draw: Draw) -> Call:
        x = normal(draw, *draw(ROWS)) * draw(st.sampled_from([1, 5]))
        return Call(op, (x,), torch_op, accepts_float16=name != "AdaptiveSoftmax")

    PROPERTIES[name] = draw_call


_register_row_op("Softmax", functions.Softmax(), lambda torch, x: x.softmax(-1))
_register_row_op("Softmax1", functions.Softmax1(), samples.torch_softmax1)
_register_row_op("LogSoftmax", functions.LogSoftmax(), lambda torch, x: x.log_softmax(-1))
_register_row_op("AdaptiveSoftmax", softmaxes.AdaptiveSoftmax(), torch_adaptive)


@register("SinkSoftmax")
def _sink_softmax(draw):
    x = normal(draw, *draw(hnp.array_shapes(min_dims=2, max_dims=4, min_side=1, max_side=6)))
    sinks = normal(draw, *x.shape[:-2]) * draw(st.sampled_from([1, 5]))

    return Call(softmaxes.SinkSoftmax(), (x, sinks), samples.torch_sink_softmax, accepts_float16=False)


@register("BlockSoftmax")
def _block_softmax(draw):
    n_blocks, correction = draw(SOME), draw(st.sampled_from(["learned", "none", "exact"]))
    x = normal(draw, *draw(hnp.array_shapes(min_dims=2, max_dims=3, min_side=1, max_side=6)))
    inputs = [x, normal(draw, *x.shape[:-2], n_blocks, x.shape[-2])] if correction == "learned" else [x]

    def torch_op(torch: Any, x: Any, *scales: Any) -> Any:
        if correction == "exact":
            return x.softmax(-1)
        return samples.torch_block_softmax(torch, x, *(scales or [torch.ones(n_blocks, x.shape[-2])]))

    return Call(softmaxes.BlockSoftmax(n_blocks, correction), tuple(inputs), torch_op, accepts_float16=False)


def _register_gate(name: str, make: Callable[[], Callable], torch_gate: Callable) -> None:
    def draw_call(draw: Draw) -> Call:
        *lead, half = draw(ROWS)
        x = signed(draw, (*lead, 2 * half))
        halves = lambda torch, x: x[..., :half] * torch_gate(torch, x[..., half:])
        return Call(make(), (x,), halves)

    PROPERTIES[name] = draw_call


_register_gate("GLU", activation.GLU, lambda torch, x: x.sigmoid())
_register_gate("SwiGLU", activation.SwiGLU, lambda torch, x: torch.nn.functional.silu(x))
_register_gate("Gated", lambda: activation.Gated(ReLUSquared()), lambda torch, x: x.relu() ** 2)


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

    def torch_op(torch: Any, labels: Any, logits: Any) -> Any:
        options = {"ignore_index": -100 if ignored is None else ignored, "label_smoothing": smoothing}
        return torch.nn.functional.cross_entropy(logits.reshape(-1, n_classes), labels.reshape(-1), **options)

    return Call(loss.CrossEntropy(ignored, smoothing), (labels, logits), torch_op)


@register("MeanSquaredError")
def _mean_squared_error(draw):
    shape = draw(FULL)
    inputs = signed(draw, shape), normal(draw, *shape)
    return Call(loss.MeanSquaredError(), inputs, lambda torch, x, y: ((x - y) ** 2).mean())


# -------------------------------------------------------------------- attention
def torch_attention(torch: Any, tensors: Any, op: attention.Attention, mask: np.ndarray | None) -> Any:
    """Compute attention in plain PyTorch: grouped heads, window, soft-cap, mask, and any softmax."""
    q, k, v = (x.transpose(1, 2) for x in tensors)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if op.scale is None else op.scale)
    if op.softcap is not None:
        scores = op.softcap * (scores / op.softcap).tanh()
    places = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2] - torch.arange(k.shape[2])
    visible = torch.ones_like(places, dtype=torch.bool)
    if op.causal:
        visible = (places >= 0) & (places < (op.window or 10**9))
    if mask is not None:
        visible = visible & torch.tensor(mask[(slice(None), *[None] * (4 - mask.ndim))])
    visible = visible.expand(scores.shape)
    any_seen = visible.any(-1, keepdim=True)
    scores = torch.where(any_seen, torch.where(visible, scores, -torch.inf), 0)
    if op.softmax.name == "softmax1":
        weights = samples.torch_softmax1(torch, scores)
    else:
        weights = scores.softmax(-1)
    return (torch.where(any_seen, weights, 0) @ v).transpose(1, 2)


@register("Attention")
def _attention(draw):
    causal = draw(st.booleans())
    op = attention.Attention(
        draw(st.sampled_from(["softmax", "softmax1"])),
        causal,
        draw(st.sampled_from([None, 1, 3])) if causal else None,
        draw(st.sampled_from([None, 0.3])),
        draw(st.sampled_from([None, 1.5])),
    )
    n_items, n_queries, key_heads, shared = draw(SMALL), draw(SMALL), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    n_queries = draw(st.sampled_from([n_queries, 17]))
    n_keys = draw(st.sampled_from([n_queries, n_queries + 2, 0, 5]))
    size, value_size = draw(SOME), draw(SOME)
    mask = draw(st.sampled_from([None, (n_items, n_keys), (n_items, n_queries, n_keys)]))
    mask = None if mask is None else normal(draw, *mask) < 0.5
    inputs = (
        normal(draw, n_items, n_queries, key_heads * shared, size),
        normal(draw, n_items, n_keys, key_heads, size),
        normal(draw, n_items, n_keys, key_heads, draw(st.sampled_from([size, value_size]))),
    )
    torch_op = lambda torch, *xs: torch_attention(torch, xs, op, mask)
    return Call(lambda *tensors: op(*tensors, mask=mask), inputs, torch_op, n_dtype_inputs=1)


@register("Rotary")
def _rotary(draw):
    shape = draw(SMALL), draw(SMALL), draw(SOME), 2 * draw(SOME)
    offset, base = draw(st.sampled_from([0, 7])), draw(st.sampled_from([100.0, 10_000.0]))

    def torch_op(torch: Any, x: Any) -> Any:
        half = x.shape[-1] // 2
        speeds = base ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(offset, offset + x.shape[1], dtype=torch.float64)[:, None] * speeds
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.cat([turned.real, turned.imag], -1)

    return Call(lambda x: attention.Rotary(base)(x, offset), (normal(draw, *shape),), torch_op)


# -------------------------------------------------------------------- recurrence
@register("recurrence")
def _recurrence(draw):
    cell = draw(st.sampled_from(list(recurrent.CELLS)))
    kind = recurrent.CELLS[cell]
    n_steps, n_items, channels, size = draw(st.sampled_from([0, 1, 3, 9])), draw(SOME), draw(SOME), draw(SOME)
    active = normal(draw, n_steps, n_items, 1) > -0.5 if draw(st.booleans()) else None
    columns = kind.n_gates * size
    shapes = [(n_steps, n_items, channels), (kind.n_states, n_items, size), (channels, columns), (size, columns)]
    inputs = tuple(normal(draw, *shape) for shape in shapes + [(columns,)] * (2 * draw(st.booleans())))
    run = lambda x, *others: recurrent.recurrence(x, *others, cell=cell, active=active)
    return Call(
        run, inputs, lambda torch, *xs: samples.torch_recurrence(torch, cell, active, *xs), accepts_float16=False
    )


# -------------------------------------------------------------------- convolution
def _draw_window(draw: Draw) -> tuple[tuple[int, ...], ...]:
    kernel, stride, padding = ((draw(SOME), draw(SOME)) for _ in range(3))
    return kernel, stride, tuple(p - 1 for p in padding)


@register("unfold")
def _unfold(draw):
    kernel, stride, padding = _draw_window(draw)
    sizes = tuple(max(1, k - 2 * p) + draw(SMALL) for k, p in zip(kernel, padding))
    x = signed(draw, (draw(SOME), *sizes, draw(SOME)))

    torch_op = lambda torch, x: samples.torch_unfold(torch, x, kernel, stride, padding)
    return Call(lambda x: convolution.unfold(x, kernel, stride, padding), (x,), torch_op)


@register("fold")
def _fold(draw):
    kernel, stride, padding = _draw_window(draw)
    sizes = tuple(max(1, k - 2 * p) + draw(SMALL) for k, p in zip(kernel, padding))
    places = [(n + 2 * p - k) // s + 1 for n, k, s, p in zip(sizes, kernel, stride, padding)]
    columns = signed(draw, (draw(SOME), *places, draw(SOME) * kernel[0] * kernel[1]))
    torch_op = lambda torch, columns: samples.torch_fold(torch, columns, sizes, kernel, stride, padding)
    return Call(lambda columns: convolution.fold(columns, sizes, kernel, stride, padding), (columns,), torch_op)


# -------------------------------------------------------------------- layers
def _call_with_parameters(layer: Any, *names: str) -> Callable[..., Tensor]:
    """Return a function of a layer's input and the named parameters."""

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        for name, parameter in zip(names, parameters):
            setattr(layer, name, parameter)
        return layer(x)

    return run


def _norm(subtract_mean: bool) -> Callable[[Draw], Call]:
    def draw_call(draw: Draw) -> Call:
        *lead, size = draw(ROWS)
        size += 1
        has_bias = subtract_mean and draw(st.booleans())
        layer = layers.LayerNorm(size, has_bias) if subtract_mean else layers.RMSNorm(size)
        x = normal(draw, *lead, size) * 2 + 1
        parameters = [normal(draw, size) for _ in range(1 + has_bias)]

        def torch_op(torch: Any, x: Any, gain: Any, bias: Any = 0) -> Any:
            x = x - x.mean(-1, keepdim=True) if subtract_mean else x
            return x / ((x * x).mean(-1, keepdim=True) + 1e-5).sqrt() * gain + bias

        run = _call_with_parameters(layer, "gain", "bias")
        return Call(run, (x, *parameters), torch_op, accepts_float16=False, n_dtype_inputs=1)

    return draw_call


LAYERS |= {"LayerNorm": _norm(True), "RMSNorm": _norm(False)}


@register("Embedding", LAYERS)
def _embedding(draw):
    n_ids, size = draw(SOME), draw(SOME)
    ids = np.random.default_rng(draw(SEEDS)).integers(0, n_ids, draw(SHAPES))
    run = _call_with_parameters(layers.Embedding(n_ids, size), "weights")
    flat = lambda torch, ids, table: table[ids.reshape(-1)].reshape(*ids.shape, size)
    return Call(run, (ids, signed(draw, (n_ids, size))), flat, accepts_float16=False)


@register("Dense", LAYERS)
def _dense(draw):
    from_size, to_size = draw(SOME), draw(SOME)
    x = signed(draw, (*draw(hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=4)), from_size))
    run = _call_with_parameters(layers.Dense(from_size, to_size), "weights", "bias")
    inputs = x, signed(draw, (from_size, to_size)), signed(draw, (to_size,))
    return Call(run, inputs, lambda torch, x, w, b: x @ w + b, n_dtype_inputs=2)


@register("Conv2d", LAYERS)
def _conv2d(draw):
    kernel, stride, padding = _draw_window(draw)
    sizes = tuple(max(1, k - 2 * p) + draw(SMALL) for k, p in zip(kernel, padding))
    from_size, to_size = draw(SOME), draw(SOME)
    run = _call_with_parameters(convolution.Conv2d(from_size, to_size, kernel, stride, padding), "weights", "bias")
    n_under = kernel[0] * kernel[1]
    shapes = (draw(SMALL), *sizes, from_size), (n_under * from_size, to_size), (to_size,)

    def torch_op(torch: Any, x: Any, w: Any, b: Any) -> Any:
        w = w.reshape(*kernel, from_size, to_size).permute(3, 2, 0, 1).contiguous()
        return torch.nn.functional.conv2d(x.permute(0, 3, 1, 2), w, b, stride, padding).permute(0, 2, 3, 1)

    return Call(run, tuple(signed(draw, shape) for shape in shapes), torch_op, accepts_float16=False, n_dtype_inputs=2)


@register("ConvTranspose2d", LAYERS)
def _conv_transpose2d(draw):
    kernel, stride, padding = _draw_window(draw)
    sizes = tuple(draw(SOME) + 2 * p for p in padding)  # so that something is left
    from_size, to_size = draw(SOME), draw(SOME)
    layer = convolution.ConvTranspose2d(from_size, to_size, kernel, stride, padding)
    n_under = kernel[0] * kernel[1]
    shapes = (draw(SOME), *sizes, from_size), (from_size, n_under * to_size), (to_size,)

    def torch_op(torch: Any, x: Any, w: Any, b: Any) -> Any:
        w = w.reshape(from_size, *kernel, to_size).permute(0, 3, 1, 2).contiguous()
        x = x.permute(0, 3, 1, 2)
        return torch.nn.functional.conv_transpose2d(x, w, b, stride, padding).permute(0, 2, 3, 1)

    run = _call_with_parameters(layer, "weights", "bias")
    return Call(run, tuple(signed(draw, shape) for shape in shapes), torch_op, accepts_float16=False)
