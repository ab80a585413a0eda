"""Fused sublayers of blocks for a few tokens: when the kernel of `kernels/sublayers.py` can replace the layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from tricycle.activation import Gated, GeLU, SwiGLU
from tricycle.attention.attend import Attention
from tricycle.attention.cache import KeyValueCache, Segments
from tricycle.attention.rotary import Rotary
from tricycle.autograd import is_evaluating
from tricycle.blocks import FUSED, GPT2TransformerBlock, MLPBlock, MultiHeadSelfAttention, TransformerBlock
from tricycle.decoding.ragged import RaggedCache
from tricycle.functions import Softmax, Softmax1
from tricycle.kernels import FEW_ROWS
from tricycle.kernels.sublayers import AttentionState, Linear, Norm, Sublayer, Sublayers, run_sublayers
from tricycle.layers import Dense, Dropout, LayerNorm, RMSNorm
from tricycle.tensor import Tensor

FLOAT32 = np.dtype(np.float32)
MAX_TOKENS = 127  # new ones of all texts in float32
MAX_LENGTH = 64  # tokens of a text with more than FEW_ROWS new ones, for the kernel attends token by token
Norms = tuple[Any, Any]  # layers, or None: of a sublayer's input, and of its result
BLOCKS = TransformerBlock, GPT2TransformerBlock
# The methods that the kernel replaces, by the types of layers that it knows. Users may override each of them.
_NAMES: dict[type, tuple[str, ...]] = {
    **dict.fromkeys((Dense, Dropout, Rotary, GeLU, MLPBlock, Attention), ("forward",)),
    **dict.fromkeys((LayerNorm, RMSNorm), ("forward", "_gains")),
    **dict.fromkeys((Softmax, Softmax1), ("attend",)),
    **dict.fromkeys(BLOCKS, ("forward", "add_sublayer")),
    **dict.fromkeys((SwiGLU, Gated), ("forward", "_gate")),
    MultiHeadSelfAttention: ("forward", "_project", "_attend_to_cached"),
}
REPLACED = {kind: [(name, getattr(kind, name)) for name in names] for kind, names in _NAMES.items()}
_KINDS, _METHODS = zip(*((kind, name) for kind, names in _NAMES.items() for name in names))
_array = attrgetter("array")
_END = object()


def _is_known(layer: Any) -> bool:
    """Return whether a layer has a type in REPLACED, and the methods listed there, without an override or hook."""
    kind, own = type(layer), vars(layer)
    return kind in REPLACED and not any(name in own or getattr(kind, name) is not f for name, f in REPLACED[kind])


def _linear(layer: Any) -> Linear:
    """Return the parameters of a `Dense` layer."""
    return Linear(layer.weights.array, None if layer.bias is None else layer.bias.array)


def _norm(layer: Any, x: Tensor) -> Norm:
    """Return the parameters of a norm for x."""
    gain = layer._gains(x) if layer.gain is None else layer.gain.array
    bias = None if layer.bias is None else layer.bias.array
    unit_offset = layer.gain is not None and getattr(layer, "unit_offset", False)
    return Norm(gain, bias, layer.eps, layer._subtract_mean, unit_offset)


def _layers(part: Any, norms: Norms) -> list[Any]:
    """Return the layers of a sublayer whose types and methods decide whether the kernel can replace them."""
    layers = [part, *norms]
    if type(part) is MLPBlock:
        layers += [part.activation, part.up, part.projection, part.dropout]
        if type(part.activation) is Gated:
            layers.append(part.activation.activation)
    elif type(part) is MultiHeadSelfAttention:
        op = part.attention
        layers += [op, op.softmax, part.qkv, part.projection, part.dropout]
        layers += [part.rotary, part.query_norm, part.key_norm]
    return [layer for layer in layers if layer is not None]


def _activation_name(activation: Any) -> str | None:
    """Return the kernel's name of an activation of a type in REPLACED, or None for the exact GELU."""
    if type(activation) is SwiGLU:
        return "swiglu"
    is_gated = type(activation) is Gated
    is_approximate = (activation.activation if is_gated else activation).approximate
    return ("geglu" if is_gated else "gelu") if is_approximate else None


def _sublayer(part: Any, norms: Norms, scale: float, x: Tensor) -> Sublayer | None:
    """Return the parameters of x + scale * post_norm(part(norm(x))), or None unless all layers are of basic types."""
    sizes = {norm.size for norm in norms if norm is not None}
    if sizes != {x.array.shape[-1]} or not all(map(_is_known, _layers(part, norms))):
        return None  # in the first case the layer raises the error
    norm, post_norm = (None if layer is None else _norm(layer, x) for layer in norms)
    if type(part) is MLPBlock:
        name = _activation_name(part.activation)
        linears = _linear(part.up), _linear(part.projection)
        return None if name is None else Sublayer(norm, *linears, name, post_norm=post_norm, scale=scale)
    if part.uses_shift or not _has_fitting_norms(part):
        return None
    token, op = _new_tokens(part), part.attention
    qk_norms = None if part.query_norm is None else (_norm(part.query_norm, x), _norm(part.key_norm, x))
    options = op.score_options(token, token), op.softmax.off_by_one, post_norm, qk_norms, scale
    return Sublayer(norm, _linear(part.qkv), _linear(part.projection), "", *options)


def _has_fitting_norms(layer: Any) -> bool:
    """Return whether the norms of queries and keys, if there are any, have the sizes of what they normalize."""
    pairs = (layer.query_norm, layer.n_heads), (layer.key_norm, layer.n_key_heads)
    n_heads = [(norm, 1 if layer.qk_norm_per_head else n) for norm, n in pairs]
    return all(norm is None or norm.size == n * layer.head_size for norm, n in n_heads)


def _texts(cache: Any) -> Sequence[Any]:
    """Return the caches of all texts of a cache."""
    return cache.caches if type(cache) is RaggedCache else (cache,)


def _has_room(layer: Any, cache: Any, segments: Segments) -> bool:
    """Return whether a cache stores texts in float32 and has room for new tokens, few ones unless a text is short."""
    for text, (n_before, n_new) in zip(_texts(cache), segments):
        if type(text) is not KeyValueCache or text.dtype not in (None, FLOAT32):
            return False
        n_tokens = n_before + n_new
        if n_tokens > layer.context_window or (n_new > FEW_ROWS and n_tokens > MAX_LENGTH):
            return False
    return bool(segments)


def _new_tokens(layer: Any) -> np.ndarray:
    """Return an array of the shape of a few tokens' keys and values, without numbers."""
    return np.empty((1, MAX_LENGTH, layer.n_key_heads, layer.head_size), FLOAT32)


def _rope(layer: Any, segments: Segments, x: Tensor) -> Any:
    """Return the cosines and sines of an attention layer for the new tokens, or None."""
    return None if layer.rotary is None else layer.rotary.angles(layer.head_size, segments, x.array)


def _new_state(tokens: np.ndarray, cache: Any, segments: Segments, rope: Any) -> AttentionState:
    """Take places in the cache for the new tokens, of the shape of `tokens`; return what attention needs for them."""
    keys, values = [], []
    counts: list[int] = []
    for text, (_, n_new) in zip(_texts(cache), segments):
        new = tokens[:, :n_new]
        of_keys, of_values, stop = text.make_room(new, new)  # the kernel writes the keys and the values
        text.length += n_new
        keys += [of_keys] * n_new
        values += [of_values] * n_new
        counts += range(stop - n_new + 1, stop + 1)
    return AttentionState(rope, keys, values, counts)


def _run(x: Tensor, sublayers: Sublayers, states: Sequence[AttentionState | None]) -> Tensor:
    """Return tokens x (..., C) after sublayers."""
    y = run_sublayers(x.array.reshape(-1, x.array.shape[-1]), sublayers, states)
    return Tensor(y.reshape(x.array.shape), False, x.is_batched)


def _are_few(x: Tensor, n_most: int) -> bool:
    """Return whether x is 1 to `n_most` tokens (..., C) of float32 on a CPU, without gradients."""
    array = x.array
    are_few = 0 < array.size <= n_most * array.shape[-1]
    return are_few and type(array) is np.ndarray and array.dtype == FLOAT32 and is_evaluating()


def _segments(x: Tensor, cache: Any) -> Segments:
    """Return the segments of new tokens x (..., T, C); () unless they are one sequence for a cache of a known type."""
    n_tokens, size = x.array.shape[-2:]
    is_sequence = type(cache) in (KeyValueCache, RaggedCache) and x.array.size == n_tokens * size
    segments: Segments = cache.segments(n_tokens) if is_sequence else ()
    return segments


def fused_sublayer(
    x: Tensor, part: Any, norms: Norms, scale: float, cache: Any = None, mask: Any = None
) -> Tensor | None:
    """Return x + scale * post_norm(part(norm(x), cache)) of a few tokens by a kernel; None unless layers are basic."""
    has_cache = type(part) is MultiHeadSelfAttention
    if mask is not None or not _are_few(x, FEW_ROWS):
        return None
    segments = _segments(x, cache) if has_cache else ()
    if has_cache and not _has_room(part, cache, segments):
        return None
    sublayer = _sublayer(part, norms, scale, x)
    if sublayer is None:
        return None
    state = _new_state(_new_tokens(part), cache, segments, _rope(part, segments, x)) if has_cache else None
    return _run(x, Sublayers([sublayer]), [state])


# -------------------------------------------------------------------- all blocks
class _Blocks:
    """The sublayers of blocks, valid until a layer, an attribute of one, a method or a parameter's array is replaced.

    To look for that takes less time than to collect the parameters again for each token.

    Attributes:
        sublayers: None if the blocks have to compute one after the other.
        rope_keys: what the angles of each block's RoPE depend on besides the position.
        tokens: of the shape of a few tokens' keys and values in each block.
        n_most: how many tokens the kernel may take: FEW_ROWS if products of more rows are not of float32.
    """

    def __init__(self, blocks: Sequence[Any], x: Tensor) -> None:
        self.blocks = list(blocks)
        parts = [part for block in blocks for part in _parts(block)] if all(map(_is_plain, blocks)) else []
        layers = [*blocks, *(layer for part, norms, _ in parts for layer in _layers(part, norms))]
        self._layers = layers
        self._attributes = [vars(layer).values() for layer in layers]  # views, which change with the layers
        self._tensors = [value for values in self._attributes for value in values if isinstance(value, Tensor)]
        self._contents = list(self._read())
        sublayers = [_sublayer(*part, x) for part in parts]
        known = [sublayer for sublayer in sublayers if sublayer is not None]
        self.sublayers = Sublayers(known) if len(known) == 2 * len(self.blocks) else None
        attentions = [block.attention for block in blocks] if self.sublayers else []
        is_float32 = all(getattr(layer, "precision", "float32") == "float32" for layer in layers)
        self.n_most = MAX_TOKENS if is_float32 else FEW_ROWS
        self.rope_keys, self.tokens = [*map(_rope_key, attentions)], [*map(_new_tokens, attentions)]

    def _read(self) -> Iterator[Any]:
        """Iterate over the layers' types, attributes and parameter arrays, and all methods that the kernel replaces.

        The last item is _END, so that two sequences of different lengths differ before either ends.
        """
        arrays, methods = map(_array, self._tensors), map(getattr, _KINDS, _METHODS)
        return chain(map(type, self._layers), chain.from_iterable(self._attributes), arrays, methods, [_END])

    def are(self, blocks: Sequence[Any]) -> bool:
        """Return whether `blocks` are the same, and nothing in them has been replaced."""
        if len(blocks) != len(self.blocks) or not all(map(is_, blocks, self.blocks)):
            return False
        return all(map(is_, self._read(), self._contents))


def _rope_key(layer: Any) -> Any:
    """Return what the angles of an attention layer depend on besides the position, None without RoPE."""
    rotary = layer.rotary
    return None if rotary is None else (layer.head_size, rotary.base, rotary.fraction, id(rotary.scaling))


def _parts(block: Any) -> list[tuple[Any, Norms, float]]:
    """Return the sublayers of a block, each with its norms and the factor of its result."""
    norms = [(block.attention_norm, block.attention_post_norm), (block.mlp_norm, block.mlp_post_norm)]
    if block.norm_placement == "output":
        norms = [(None, norm) for norm, _ in norms]
    scale = getattr(block, "scale", 1)
    return [(block.attention, norms[0], scale), (block.mlp, norms[1], scale)]


def _is_plain(block: Any) -> bool:
    """Return whether a block is of a basic type, and adds attention, then its MLP, without a norm of their sums."""
    if type(block) not in BLOCKS or not _is_known(block):
        return False
    return block.norm_placement != "after" and not block.parallel


# Cache: valid while `_Blocks.are` returns True; an entry is deleted with the first cache of its text.
_known: WeakKeyDictionary[Any, _Blocks] = WeakKeyDictionary()


def fused_blocks(x: Tensor, blocks: Sequence[Any], caches: Sequence[Any], mask: Any = None) -> Tensor | None:
    """Return a few tokens x (1, T, C) after all blocks in one kernel; None unless all layers are of the basic types."""
    if mask is not None or not _are_few(x, MAX_TOKENS):
        return None
    segments, first = _segments(x, caches[0]), _texts(caches[0])[0]
    if not segments or type(first) is not KeyValueCache:
        return None
    known = _known.get(first)
    if known is None or not known.are(blocks):
        known = _known[first] = _Blocks(blocks, x)
    has_room = (_has_room(block.attention, cache, segments) for block, cache in zip(blocks, caches))
    if known.sublayers is None or not _are_few(x, known.n_most) or not all(has_room):
        return None
    states: list[AttentionState | None] = []
    ropes: dict[Any, Any] = {}
    for key, tokens, block, cache in zip(known.rope_keys, known.tokens, blocks, caches):
        if key not in ropes:
            ropes[key] = _rope(block.attention, segments, x)
        states += (_new_state(tokens, cache, segments, ropes[key]), None)
    return _run(x, known.sublayers, states)


FUSED[MLPBlock] = FUSED[MultiHeadSelfAttention] = fused_sublayer
FUSED[TransformerBlock] = FUSED[GPT2TransformerBlock] = fused_blocks
