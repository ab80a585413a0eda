"""All sublayers of a model's blocks for a few tokens, by spinning threads.

The products are those of `vector_matmul` and `block_matmul`, so results have the same bits as without this module.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from types import NotImplementedType
from typing import Any, NamedTuple

import numpy as np

from tricycle.devices import Array
from tricycle.kernels.quantized_blocks import BlockMatrix
from tricycle.kernels.sublayers import AttentionState, Linear, Norm, Sublayer, Sublayers
from tricycle_accelerators.compiled import block_matmul, vector_matmul
from tricycle_accelerators.compiled.attention import MASK_OR_CAP
from tricycle_accelerators.compiled.elementwise import CONTIGUOUS, FLOAT32
from tricycle_accelerators.compiled.loader import load_loops
from tricycle_accelerators.compiled.vector_matmul import TOO_FEW, address_of, spin_team
from tricycle_accelerators.providers import decline_when


def _matrix_decline_reason(x: np.ndarray, matrix: Any) -> str | None:
    """Return why no loop multiplies rows x with a matrix; else None."""
    if isinstance(matrix, np.ndarray):
        return vector_matmul.matmul_decline_reason(x, matrix)
    if isinstance(matrix, BlockMatrix):
        return block_matmul.matrix_decline_reason(matrix)
    return vector_matmul.matrix_decline_reason(matrix)


def _norms(sublayer: Sublayer) -> list[Norm | None]:
    """Return the norms of a sublayer in the order of the loops' table: of input, result, queries and keys."""
    return [sublayer.norm, sublayer.post_norm, *(sublayer.qk_norms or ())]


def _parameters_decline_reason(x: np.ndarray, sublayer: Sublayer) -> str | None:
    """Return why the loops cannot use the parameters of a sublayer for rows x; else None."""
    _, first, last, activation, *_ = sublayer
    linears, size = (first, last), x.shape[-1]
    norms = [norm for norm in _norms(sublayer) if norm is not None]
    parameters = [norm.gain for norm in norms] + [norm.bias for norm in norms] + [linear.bias for linear in linears]
    for array in parameters:
        if array is not None and not (array.dtype == FLOAT32 and array.flags.carray):
            return f"parameters of float32 {CONTIGUOUS}"
    n_hidden, n_first = last.weights.shape[0], first.weights.shape[1]
    if activation:  # of attention `_memory_decline_reason` knows more
        n_first = n_hidden * (1 if activation == "gelu" else 2)
    gains = [norm.gain.shape for norm in (sublayer.norm, sublayer.post_norm) if norm is not None]
    shapes = [*gains, first.weights.shape, last.weights.shape]
    biases = [(norm.gain.shape, norm.bias.shape) for norm in norms if norm.bias is not None]
    if shapes != [(size,)] * len(gains) + [(size, n_first), (n_hidden, size)] or any(a != b for a, b in biases):
        return f"parameters for {size} and {n_hidden} channels, got shapes {shapes}"
    if sublayer.score_options.softcap is not None:
        return MASK_OR_CAP
    for matrix, bias in linears:
        if bias is not None and bias.shape != matrix.shape[1:]:
            return f"a bias for {matrix.shape[1]} channels, got {bias.shape}"
        if (why := _matrix_decline_reason(x, matrix)) is not None:
            return why
    return None


def _memory_decline_reason(sublayer: Sublayer, keys: Sequence[Array], values: Sequence[Array]) -> str | None:
    """Return why the loops cannot attend: a cache that is not of float32, or other sizes; else None."""
    if not all(array.dtype == FLOAT32 and array.flags.carray for array in (*keys, *values)):
        return f"caches of float32 {CONTIGUOUS}"
    _, _, n_key_heads, size = shape = keys[0].shape
    if any(k.shape != v.shape or (len(k), *k.shape[2:]) != (1, n_key_heads, size) for k, v in zip(keys, values)):
        return "keys and values of one shape, of one text each"
    n_hidden = sublayer.first.weights.shape[1] - 2 * n_key_heads * size
    if n_hidden <= 0 or n_hidden % (n_key_heads * size) or n_hidden != sublayer.last.weights.shape[0]:
        return f"queries that fit keys {shape}"
    for norm, n_channels in zip(sublayer.qk_norms or (), (n_hidden, n_key_heads * size)):
        if norm.gain.shape not in ((size,), (n_channels,)):
            return f"norms for {size} or {n_channels} channels, got {norm.gain.shape}"
    return None


def _rope_decline_reason(rope: Any, n_tokens: int, head_size: int) -> str | None:
    """Return why the loops cannot rotate tokens' heads: angles not of float32, or of another shape; else None."""
    cos, sin = rope
    if not all(angles.dtype == FLOAT32 and angles.flags.carray for angles in rope):
        return f"cosines and sines of float32 {CONTIGUOUS}"
    if not cos.shape == sin.shape == (n_tokens, min(cos.shape[-1], head_size // 2)):
        return f"angles that fit {n_tokens} tokens and heads of {head_size} channels, got {cos.shape}"
    return None


def _decline_reason(x: np.ndarray, sublayers: Sublayers, states: Sequence[AttentionState | None]) -> str | None:
    """Return why the loops, which check no bounds, cannot run; else None. Parameters are checked at the first step."""
    if not x.size or x.dtype != FLOAT32 or not x.flags.carray:
        return f"rows of float32 {CONTIGUOUS}, got {x.dtype} {x.shape}"
    reasons: dict[tuple[int, ...], str | None] = sublayers.prepared.setdefault("reasons", {})
    if x.shape not in reasons:
        each = (_parameters_decline_reason(x, sublayer) for sublayer in sublayers)
        reasons[x.shape] = next((why for why in each if why is not None), None)
    if (reason := reasons[x.shape]) is not None:
        return reason
    attention = [sublayer for sublayer, state in zip(sublayers, states, strict=True) if state is not None]
    ropes, keys, values, counts = _columns(states)
    if any(len(column) != len(x) for columns in (keys, values, counts) for column in columns):
        return f"keys, values and numbers of tokens for each of {len(x)} rows"
    memory: _Memory | None = sublayers.prepared.get("memory")
    if memory is None or not memory.has(keys, values):
        for sublayer, *arrays in zip(attention, keys, values):
            if (why := _memory_decline_reason(sublayer, *arrays)) is not None:
                return why
    checked: tuple[Any, int] = None, 0
    for rope, arrays, of_tokens in zip(ropes, keys, counts):
        head_size = arrays[0].shape[3]
        for array, n_tokens in zip(arrays, of_tokens):
            if not 0 < n_tokens <= array.shape[1]:
                return f"memory for {n_tokens} tokens, got {array.shape[1]}"
        if rope is not None and (rope is not checked[0] or head_size != checked[1]):  # layers share angles
            if (why := _rope_decline_reason(rope, len(x), head_size)) is not None:
                return why
            checked = rope, head_size
    return None


def _columns(states: Sequence[AttentionState | None]) -> Sequence[tuple[Any, ...]]:
    """Return all ropes, keys, values and numbers of tokens of the states that are not None."""
    return tuple(zip(*(state for state in states if state is not None))) or ((), (), (), ())


class _Memory(NamedTuple):
    """Weak references to keys and values that the loops can use, and two arguments of the loops with their properties.

    Attributes:
        fields: of the sublayers, with the shapes of heads.
        tokens: with the addresses.
    """

    arrays: list[weakref.ref[np.ndarray]]
    fields: np.ndarray
    tokens: np.ndarray

    def has(self, keys: Sequence[Sequence[Array]], values: Sequence[Sequence[Array]]) -> bool:
        """Return whether these are the same arrays."""
        arrays = list(chain(*keys, *values))
        return len(arrays) == len(self.arrays) and all(array is ref() for array, ref in zip(arrays, self.arrays))


class _Table(NamedTuple):
    """Sublayers as `sublayer_loops` takes them, and what lives as long: tables of matrices.

    Attributes:
        fields, numbers: the arguments of `run_sublayers`, without states.
        attention: the indices of attention sublayers.
        files: parts of matrices, of which one for each file is checked before it is read.
    """

    fields: np.ndarray
    numbers: np.ndarray
    attention: list[int]
    files: list[Any]
    matrices: list[np.ndarray]


def _new_table(sublayers: Sublayers) -> _Table:
    """Return a table of sublayers."""
    loops = load_loops("sublayer_loops")
    kinds = {"swiglu": loops.SWIGLU, "gelu": loops.GELU, "geglu": loops.GEGLU, "": loops.ATTENTION}
    numbers = np.zeros((len(sublayers), loops.N_NUMBERS))
    table = _Table(np.zeros((len(sublayers), loops.N_FIELDS), np.int64), numbers, [], [], [])
    for i, sublayer in enumerate(sublayers):
        fields, score_options = table.fields[i], sublayer.score_options
        fields[loops.KIND] = kinds[sublayer.activation]
        fields[loops.OFF_BY_ONE], fields[loops.WINDOW] = sublayer.off_by_one, score_options.window or 0
        numbers[i, [loops.SCORE_SCALE, loops.SCALE]] = score_options.scale, sublayer.scale
        for place, norm in enumerate(_norms(sublayer)):
            if norm is not None:
                start = loops.NORM + place * loops.N_NORM
                fields[start : start + loops.N_NORM] = _describe_norm(norm)
                numbers[i, loops.EPS + place] = norm.eps
        for start, linear in zip((loops.FIRST, loops.LAST), (sublayer.first, sublayer.last)):
            matrix, fields[start : start + loops.N_LINEAR] = _describe_linear(linear)
            table.matrices.append(matrix)
            if isinstance(linear.weights, BlockMatrix):
                table.files.append(linear.weights.parts[0])
        if not sublayer.activation:
            table.attention.append(i)
    return table


def _describe_norm(norm: Norm) -> tuple[int, ...]:
    """Return the fields of a norm."""
    bias = 0 if norm.bias is None else norm.bias.ctypes.data
    return norm.gain.ctypes.data, bias, norm.bias is not None, norm.subtract_mean, norm.unit_offset, len(norm.gain)


def _describe_linear(linear: Linear) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return the table of a linear layer's matrix, and the fields of the layer."""
    weights, function = linear.weights, 0
    if isinstance(weights, BlockMatrix):
        loops, matrix = load_loops("block_loops"), block_matmul.describe_parts(weights)
        multiply, function = loops.multiply_by_blocks, loops.FUNCTIONS.ctypes.data
    else:
        multiply, matrix = load_loops("vector_loops").multiply_by_rows, vector_matmul.describe_matrix(weights)
    bias = (0, 0) if linear.bias is None else (linear.bias.ctypes.data, len(linear.bias))
    return matrix, (multiply.address, matrix.ctypes.data, len(matrix), function, weights.shape[1], *bias)


def _new_memory(
    table: _Table, n_tokens: int, keys: Sequence[Sequence[Array]], values: Sequence[Sequence[Array]]
) -> _Memory:
    """Return references to keys and values of tokens in attention sublayers, and arguments of the loops for them."""
    loops, decoding, fields = load_loops("sublayer_loops"), load_loops("decode_loops"), table.fields.copy()
    tokens = np.zeros((len(keys), n_tokens, decoding.N_COLUMNS), np.int64)
    for i, of_tokens, of_keys, of_values in zip(table.attention, tokens, keys, values):
        fields[i, [loops.N_KEY_HEADS, loops.HEAD_SIZE]] = of_keys[0].shape[2:]
        of_tokens[:, decoding.KEYS] = [address_of(array) for array in of_keys]
        of_tokens[:, decoding.VALUES] = [address_of(array) for array in of_values]
    return _Memory([weakref.ref(array) for array in chain(*keys, *values)], fields, tokens)


def _describe_ropes(ropes: Iterable[Any]) -> list[tuple[int, int, int]]:
    """Return the fields of attention's angles, COS to N_ANGLES, for each layer."""
    described = []
    last, angles = None, (0, 0, 0)
    for rope in ropes:
        if rope is not last:  # layers share angles
            last, angles = rope, (0, 0, 0) if rope is None else (*map(address_of, rope), rope[0].shape[1])
        described.append(angles)
    return described


@decline_when(_decline_reason)
def run_sublayers(
    x: np.ndarray, sublayers: Sublayers, states: Sequence[AttentionState | None]
) -> Array | NotImplementedType:
    """Return rows after all sublayers, extending caches; NotImplemented for infinity or NaN in quantized blocks."""
    loops, decoding = load_loops("sublayer_loops"), load_loops("decode_loops")
    table: _Table | None = sublayers.prepared.get("table")
    if table is None:
        table = sublayers.prepared["table"] = _new_table(sublayers)
    for part in table.files:
        part.check()
    ropes, keys, values, counts = _columns(states)
    memory: _Memory | None = sublayers.prepared.get("memory")
    if memory is None or not memory.has(keys, values):
        memory = sublayers.prepared["memory"] = _new_memory(table, len(x), keys, values)
    fields, tokens, y = memory.fields.copy(), memory.tokens.copy(), np.empty_like(x)
    if table.attention:
        fields[table.attention, loops.COS : loops.N_KEY_HEADS] = _describe_ropes(ropes)
        tokens[:, :, decoding.N_TOKENS] = counts
    job = partial(loops.run_sublayers, x, fields, table.numbers, tokens, y, decoding.attend_to_units.address)
    waited = spin_team().run(job, is_long=True)
    return NotImplemented if waited < TOO_FEW else y
