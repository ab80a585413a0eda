"""Some more tokens of one text or of several, read with plain arrays: what generation spends its time in.

`GPT.forward` makes a Tensor of every step, because gradients may be asked for. Here nobody asks, and a token is so
little work that Tensors would cost more than what they hold. So this file walks the same layers once more, with as few
calls of NumPy as it can; what a layer is and why is said where the layer is.

The tokens of all texts are the rows of every matrix product, whatever their lengths: nothing is padded. Only attention
looks at one text at a time.

Shapes: R rows, which are the new tokens of all texts; T those of one text, S all its tokens so far; C channels, H heads
of queries, K heads of keys and values, D head size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

from tricycle import kernels
from tricycle.activation import GLU, Gated, GeLU, SwiGLU, is_swish
from tricycle.attention import Attention, KeyShift, KeyValueCache, Rotary, TokenShift
from tricycle.attention.rotary import angles
from tricycle.blocks import GPT2TransformerBlock, MLPBlock, MultiHeadSelfAttention, TransformerBlock
from tricycle.functions import Softmax, Softmax1
from tricycle.kernels import FEW_ROWS, FewBits, Scoring
from tricycle.layers import Dense, Dropout, Embedding, Layer, LayerNorm, RMSNorm
from tricycle.models import GPT
from tricycle.ops import Op, check_range
from tricycle.tensor import Tensor, no_grad

SHORT = 2**19  # scores of a token: more are shared by threads

# The methods whose results this file computes in another way, by class. Where one of them has been replaced, on the
# class, on an object or in a subclass, `covers` refuses the model, or the object itself is called.
REPLACED: dict[type, tuple[str, ...]] = {
    GPT: ("forward", "hidden", "logits", "_embed", "_check"),
    TransformerBlock: ("forward", "_add", "_for"),
    GPT2TransformerBlock: ("forward", "_add", "_for"),
    MultiHeadSelfAttention: ("forward", "_queries_keys_values", "_join_heads", "dtype_inside", "_check"),
    MLPBlock: ("forward", "dtype_inside"),
    LayerNorm: ("forward", "_gains"),
    RMSNorm: ("forward", "_gains"),
    Attention: ("forward", "_scoring"),
    Softmax: ("attend",),
    Softmax1: ("attend",),
    **dict.fromkeys((Embedding, Dense, Dropout, TokenShift, KeyShift, Rotary), ("forward",)),
    **dict.fromkeys((Gated, GLU, SwiGLU, GeLU), ("forward",)),
}
_CALLED = [(Layer, "__call__"), (Op, "__call__"), *((part, name) for part in REPLACED for name in REPLACED[part])]
_CLASSES, _NAMES = zip(*_CALLED)
_FUNCTIONS = [getattr(part, name) for part, name in _CALLED]


@np.errstate(all="ignore")  # broken weights are an error of `generate.sample`
def next_logits(
    model: GPT,
    tokens: Sequence[Sequence[int]],
    caches: Sequence[list[KeyValueCache]],
    every: bool = False,
) -> np.ndarray:
    """The logits after some more tokens of each text, in host memory; dropout is off.

    Args:
        tokens: of each text one or more.
        caches: of each text what `model.new_caches` gave, with what was read before; texts have caches of their own.
        every: the logits after each new token, and not only after the last of each text.

    Returns:
        (N, V) for N texts; with `every` (R, V).

    Raises:
        ValueError: ids outside the vocabulary, no token, or more than the context window.
    """
    if not covers(model):
        return _by_layers(model, tokens, caches, every)
    with no_grad():
        rows = _Rows.of(model, tokens, caches)
        x = _embed(model, rows)
        for i, block in enumerate(model.blocks):
            x = _block(block, x, rows, i)
        if not every:
            x = x[[text.rows.stop - 1 for text in rows.texts]]
        return _logits(model, x if model.norm is None else _norm(model.norm, x))


def covers(model: GPT) -> bool:
    """Return whether this file computes what the model's own layers compute.

    It does not where weights are on a GPU, where a part is of another class than those in REPLACED, and where a method
    that this file replaces is no longer the library's: a probe sets a `forward` on an object, a user a rule on a class.
    """
    if [*map(getattr, _CLASSES, _NAMES)] != _FUNCTIONS or not _are_known(
        model, model.token_embedding, model.position_embedding, model.dropout, model.norm
    ):
        return False
    for block in model.blocks:
        if not _are_known(block) or block.cross is not None:
            return False
        layer, mlp = block.attention, block.mlp
        norms = block.attention_norm, block.attention_post_norm, block.mlp_norm, block.mlp_post_norm
        if not _are_known(*norms, layer, mlp):
            return False
        inside = layer.shift, layer.key_shift, layer.query_norm, layer.key_norm, layer.attention, layer.rotary
        if not _are_known(*inside, layer.dropout, mlp.dropout) or not layer.attention.causal:
            return False
    return isinstance(model.token_embedding.weights.array, (np.ndarray, FewBits))


def _are_known(*parts: Any) -> bool:
    """Return whether each part is None or of a class in REPLACED, with none of its own methods there."""
    for part in parts:
        if part is not None:
            names = REPLACED.get(type(part))
            if names is None:
                return False
            own = part.__dict__
            for name in names:
                if name in own:
                    return False
    return True


def _by_layers(
    model: GPT, tokens: Sequence[Sequence[int]], caches: Sequence[list[KeyValueCache]], every: bool
) -> np.ndarray:
    """The same by the model's own layers, one text after the other."""
    with model.evaluating():
        logits = [
            model(model.place(np.array([list(new)])), known, not every).numpy()[0] for new, known in zip(tokens, caches)
        ]
    return np.concatenate(logits)


# -------------------------------------------------------------------- the rows
class _Text(NamedTuple):
    """One text among the rows.

    Attributes:
        rows: of its new tokens.
        caches: one for each block.
    """

    rows: slice
    caches: list[KeyValueCache]


class _Rows(NamedTuple):
    """What all blocks have in common.

    Attributes:
        ids: (R,).
        places: (R,) of the tokens in their texts.
        turns: cosines and sines by what makes them, for most layers turn queries and keys alike.
    """

    texts: list[_Text]
    ids: np.ndarray
    places: np.ndarray
    turns: dict[Any, tuple[np.ndarray, np.ndarray]]

    @classmethod
    def of(cls, model: GPT, tokens: Sequence[Sequence[int]], caches: Sequence[list[KeyValueCache]]) -> _Rows:
        window = model.config.context_window
        texts: list[_Text] = []
        places: list[int] = []
        ids: list[int] = []
        for new, known in zip(tokens, caches, strict=True):
            seen = known[0].length
            if not 0 < len(new) <= window - seen:
                earlier = f" after {seen} earlier ones" if seen else ""
                raise ValueError(
                    f"GPT(context_window={window}): expected 1 to {window} tokens, got {len(new)}{earlier}"
                )
            texts.append(_Text(slice(len(ids), len(ids) + len(new)), known))
            places += range(seen, seen + len(new))
            ids += new
        index = np.array(ids)
        check_range("next_logits", index, model.config.vocab_size)
        return cls(texts, index, np.array(places), {})


# -------------------------------------------------------------------- the two ends
def _embed(model: GPT, rows: _Rows) -> np.ndarray:
    """(R, C)."""
    x = _rows_of(model.token_embedding, rows.ids)
    if model.config.embedding_scale != 1:
        x = x * np.float32(model.config.embedding_scale)
    if model.embedding_projection is not None:
        x = product(model.embedding_projection, x)
    if model.position_embedding is not None:
        x = x + _rows_of(model.position_embedding, rows.places + model.config.position_offset)
    return x


def _rows_of(table: Embedding, index: np.ndarray) -> np.ndarray:
    rows: np.ndarray = table.weights.array[index]
    return rows.astype(np.float32) if rows.dtype.itemsize == 2 else rows


def _logits(model: GPT, x: np.ndarray) -> np.ndarray:
    """(N, C) to (N, V)."""
    if model.head_projection is not None:
        x = product(model.head_projection, x)
    if model.head is not None:
        logits = product(model.head, x)
    else:
        logits = _multiply(x, model.token_embedding.weights.array.T, None, model.precision)
    cap = model.config.logit_cap
    return cap * np.tanh(logits / cap) if cap else logits


# -------------------------------------------------------------------- products and norms
def product(layer: Layer, x: np.ndarray) -> np.ndarray:
    """What a layer that stands where a matrix does makes of rows (R, from_size).

    Whatever is no plain matrix in memory says itself what it does: weights of few bits, or a matrix that is a sum.
    """
    if type(layer) is not Dense or "forward" in vars(layer):
        return _call(layer, x)
    return _multiply(x, layer.weights.array, None if layer.bias is None else layer.bias.array, layer.precision)


def _multiply(x: np.ndarray, weights: np.ndarray | FewBits, bias: np.ndarray | None, precision: str) -> np.ndarray:
    if isinstance(weights, FewBits):
        return kernels.few_bits_matmul(x, weights, bias, precision)
    if len(x) <= FEW_ROWS or precision == "float32":
        return kernels.matmul(x, weights, bias)
    operands = kernels.operand(x, precision), kernels.operand(weights, precision)
    return kernels.matmul(*operands, bias, None, None, precision)


def _norm(norm: Any, x: np.ndarray) -> np.ndarray:
    """A LayerNorm or an RMSNorm of the last axis."""
    gain = None if norm.gain is None else norm.gain.array
    centred = type(norm) is LayerNorm
    if gain is not None and not centred and norm.unit_offset:
        gain = 1 + gain
    return kernels.normalise(x, gain, None if norm.bias is None else norm.bias.array, norm.eps, centred)


# -------------------------------------------------------------------- a block
def _block(block: TransformerBlock, x: np.ndarray, rows: _Rows, layer: int) -> np.ndarray:
    """(R, C) to (R, C)."""

    def attend(x: np.ndarray) -> np.ndarray:
        return _attention(block.attention, x, rows, layer)

    def widen(x: np.ndarray) -> np.ndarray:
        return _mlp(block.mlp, x)

    if block.parallel:
        normal = _norm(block.attention_norm, x)
        return x + attend(normal) + widen(normal if block.mlp_norm is None else _norm(block.mlp_norm, x))
    x = _add(block, x, block.attention_norm, attend, block.attention_post_norm)
    return _add(block, x, block.mlp_norm, widen, block.mlp_post_norm)


def _add(
    block: TransformerBlock, x: np.ndarray, norm: Any, part: Callable[[np.ndarray], np.ndarray], post_norm: Any
) -> np.ndarray:
    """x and a part of the block, normed where this block norms."""
    if block.norm_placement == "after":
        return _norm(norm, x + part(x))
    if block.norm_placement == "both":
        return x + _norm(post_norm, part(_norm(norm, x)))
    return x + part(_norm(norm, x))


def _mlp(mlp: MLPBlock, x: np.ndarray) -> np.ndarray:
    return product(mlp.projection, _activation(mlp.activation, product(mlp.up, x)))


def _activation(activation: Any, x: np.ndarray) -> np.ndarray:
    kind = type(activation)
    if kind not in REPLACED or "forward" in vars(activation):
        return _call(activation, x)
    if isinstance(activation, Gated):
        if is_swish(activation.activation):
            return kernels.gated_swish(x)
        half = x.shape[-1] // 2
        return x[..., :half] * _activation(activation.activation, x[..., half:])
    return kernels.gelu(x) if kind is GeLU and activation.approximate else _call(activation, x)


def _call(part: Any, x: np.ndarray) -> np.ndarray:
    """Return what a layer, an op or a function of Tensors makes of an array; dropout is off."""
    with part.evaluating() if getattr(part, "training", False) else nullcontext():
        result: np.ndarray = part(Tensor(x, False)).array
    return result


# -------------------------------------------------------------------- attention
def _attention(layer: MultiHeadSelfAttention, x: np.ndarray, rows: _Rows, number: int) -> np.ndarray:
    """(R, C) to (R, C), and remembers the new keys and values."""
    if layer.shift is not None:
        earlier = _earlier(x, rows, [text.caches[number].latest for text in rows.texts])
        for text in rows.texts:
            text.caches[number].latest = x[None, text.rows.stop - 1 : text.rows.stop]
        x = x + layer.shift.mix.array * earlier
    n_heads = layer.n_heads
    n_key_heads = layer.n_key_heads
    heads = product(layer.qkv, x).reshape(len(x), n_heads + 2 * n_key_heads, layer.head_size)
    last = n_heads + n_key_heads
    if layer.key_shift is not None:
        heads[:, n_heads:last] = _shifted_keys(layer.key_shift, heads[:, n_heads:last], rows, number)
    if layer.query_norm is not None and layer.key_norm is not None:
        heads[:, :n_heads] = _norm(layer.query_norm, heads[:, :n_heads])
        heads[:, n_heads:last] = _norm(layer.key_norm, heads[:, n_heads:last])
    if layer.rotary is not None:
        _turn(layer.rotary, heads[:, :last], rows)
    mixed = []
    for text in rows.texts:
        new = heads[text.rows]
        keys, values = text.caches[number].append(new[None, :, n_heads:last], new[None, :, last:])
        mixed.append(_mix(layer, new[:, :n_heads], keys, values))
    joined = mixed[0] if len(mixed) == 1 else np.concatenate(mixed)
    return product(layer.projection, joined.reshape(len(x), -1))


def _mix(layer: MultiHeadSelfAttention, q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """(T, H, D): what queries (T, H, D) make of keys and values (1, S, K, D), the last query being at the last key."""
    attention = layer.attention
    scale = 1 / math.sqrt(layer.head_size) if attention.scale is None else attention.scale
    n_new, n_seen = len(q), keys.shape[1]
    is_plain = type(attention.softmax) in (Softmax, Softmax1) and "attend" not in vars(attention.softmax)
    if n_new <= FEW_ROWS and is_plain and layer.n_heads * n_seen < SHORT:
        # each as if it came alone, so that it makes no difference whether it does
        past = range(n_seen - n_new + 1, n_seen + 1)
        few = [_mix_one(attention, scale, q[i], keys[0, :n], values[0, :n]) for i, n in enumerate(past)]
        return few[0][None] if n_new == 1 else np.stack(few)
    scales = () if layer.softmax_scales is None else (layer.softmax_scales.array,)
    scoring = Scoring(scale, n_seen - n_new, attention.window, attention.cap)
    mixed: np.ndarray = attention.softmax.attend(q[None], keys, values, scoring, None, *scales, dtype=q.dtype)[0][0]
    return mixed


def _mix_one(attention: Attention, scale: float, q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """(H, D): the same for one query (H, D)."""
    if attention.window is not None:
        keys = keys[-attention.window :]
        values = values[-attention.window :]
    return kernels.attend_one(q, keys, values, scale, attention.cap, attention.softmax.nothing)


def _turn(rotary: Rotary, heads: np.ndarray, rows: _Rows) -> None:
    """Queries and keys (R, H + K, D), in place."""
    n_turned = int(heads.shape[2] * rotary.fraction)
    key = (rotary.base, rotary.scaling, n_turned)
    if key not in rows.turns:
        rows.turns[key] = _angles(rotary, n_turned, rows)
    cos, sin = rows.turns[key]
    kernels.turn(heads, cos, sin)


def _angles(rotary: Rotary, n_turned: int, rows: _Rows) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines (R, n_turned / 2)."""
    parts = [
        angles(
            rotary.base, rotary.scaling, n_turned, int(rows.places[text.rows.start]), text.rows.stop - text.rows.start
        )
        for text in rows.texts
    ]
    cos, sin = (np.concatenate(part).astype(np.float32) for part in zip(*parts))
    return cos, sin


def _shifted_keys(shift: KeyShift, heads: np.ndarray, rows: _Rows, number: int) -> np.ndarray:
    """Keys (R, K, D) mixed with those of the token before in their text."""
    keys = heads.reshape(len(heads), -1).copy()
    earlier = _earlier(keys, rows, [text.caches[number].latest_keys for text in rows.texts])
    for text in rows.texts:
        text.caches[number].latest_keys = keys[None, text.rows.stop - 1 : text.rows.stop]
    mixed: np.ndarray = keys + shift.mix.array * (earlier - keys)
    return mixed.reshape(heads.shape)


def _earlier(x: np.ndarray, rows: _Rows, latest: list[Any]) -> np.ndarray:
    """For each row (R, C) the one before it in its text, of whose earlier rows the latest is known, or zeros."""
    earlier = np.zeros_like(x)
    earlier[1:] = x[:-1]
    for text, known in zip(rows.texts, latest):
        earlier[text.rows.start] = 0 if known is None else known[0, 0]
    return earlier
