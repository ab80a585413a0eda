"""Kernel of whole sublayers of transformer blocks for a few tokens: norm, products, attention or activation, residual.

In generation the calls of separate kernels take longer than their work, so a provider computes all sublayers of a model
in one call.

Shapes: N tokens, of one text or of several, C channels, H query heads, K key and value heads, D head size, S cached
tokens, M hidden channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from tricycle import kernels
from tricycle.devices import Array
from tricycle.kernels import ScoreOptions
from tricycle.kernels.dispatch import Kernel
from tricycle.kernels.quantized import QuantizedMatrix, quantized_matmul
from tricycle.kernels.ragged_attention import ragged_attention


class Norm(NamedTuple):
    """The parameters of a layer norm, or of an RMS norm (without `subtract_mean`): gain (C,), bias (C,) or None.

    With `unit_offset` the factors are 1 + gain.
    """

    gain: Array
    bias: Array | None
    eps: float
    subtract_mean: bool
    unit_offset: bool = False

    def __call__(self, x: Array) -> Array:
        """Normalize rows (N, C)."""
        gain = 1 + self.gain if self.unit_offset else self.gain
        return kernels.layer_norm(x, gain, self.bias, self.eps, self.subtract_mean)[0]


class Linear(NamedTuple):
    """The parameters of a linear layer: a matrix, an array or `QuantizedMatrix` (C, M), and a bias (M,) or None."""

    weights: Any
    bias: Array | None

    def __call__(self, x: Array) -> Array:
        """Map rows (N, C) to (N, M)."""
        is_quantized = isinstance(self.weights, QuantizedMatrix)
        product: Array = quantized_matmul(x, *self) if is_quantized else kernels.matmul(x, *self)
        return product


class Sublayer(NamedTuple):
    """The parameters of a sublayer, which one step after another uses.

    Attributes:
        norm: of the input, or None.
        first: from C to M channels (2 M if gated), or to (H + 2 K) D, all queries, keys and values.
        last: from M or H D to C channels.
        activation: of an MLP "swiglu", "gelu" or "geglu", of attention "".
        score_options: of attention; the offset is not used, for each token is the last one that it attends to.
        off_by_one: whether the softmax is softmax1.
        post_norm: of the result, before the input is added.
        qk_norms: of queries and of keys, with gains of (D,), or of (H D,) and (K D,).
        scale: the factor of what is added to the input.
    """

    norm: Norm | None
    first: Linear
    last: Linear
    activation: str = ""
    score_options: ScoreOptions = ScoreOptions(1.0)
    off_by_one: bool = False
    post_norm: Norm | None = None
    qk_norms: tuple[Norm, Norm] | None = None
    scale: float = 1


class AttentionState(NamedTuple):
    """The inputs of attention of N tokens to the cached tokens of their texts, besides the parameters.

    Attributes:
        rope: the cosines and sines (N, R / 2) that rotate the first R channels of queries and keys, or None.
        keys, values: for each token the memory of its text, (1, S, K, D), in which its place is overwritten.
        n_tokens: for each token how many of its text's tokens it attends to, at most S; it is the last of them.
    """

    rope: tuple[Array, Array] | None
    keys: Sequence[Array]
    values: Sequence[Array]
    n_tokens: Sequence[int]


class Sublayers(tuple[Sublayer, ...]):
    """Consecutive sublayers. In `prepared` a provider keeps what it derives from them at the first step."""

    prepared: dict[str, Any]

    def __new__(cls, sublayers: Iterable[Sublayer]) -> Sublayers:
        """Create from sublayers, in order."""
        made = super().__new__(cls, sublayers)
        made.prepared = {}
        return made

    # Cache: valid for the life of the object, which does not change.
    @cached_property
    def each(self) -> list[Sublayers]:
        """Each sublayer alone."""
        return [Sublayers([sublayer]) for sublayer in self]


@Kernel
def run_sublayers(x: Array, sublayers: Sublayers, states: Sequence[AttentionState | None]) -> Array:
    """Return tokens x (N, C) after sublayers, each with its state, None for an MLP; write their keys and values."""
    if len(sublayers) > 1:  # of which a provider may accept some
        for alone, state in zip(sublayers.each, states, strict=True):
            x = run_sublayers(x, alone, [state])
        return x
    (sublayer,), (state,) = sublayers, states
    hidden = sublayer.first(x if sublayer.norm is None else sublayer.norm(x))
    hidden = _activate(hidden, sublayer.activation) if state is None else _attend(hidden, sublayer, state)
    branch = sublayer.last(hidden)
    branch = branch if sublayer.post_norm is None else sublayer.post_norm(branch)
    return x + (branch if sublayer.scale == 1 else branch * sublayer.scale)


def _activate(hidden: Array, activation: str) -> Array:
    """Apply the activation of an MLP to its hidden layer."""
    if activation == "geglu":
        half = hidden.shape[1] // 2
        return hidden[:, :half] * kernels.gelu(hidden[:, half:])
    return kernels.swiglu(hidden) if activation == "swiglu" else kernels.gelu(hidden)


def _attend(qkv: Array, sublayer: Sublayer, state: AttentionState) -> Array:
    """Return attention (N, H D) of tokens' queries, keys and values (N, (H + 2 K) D), and cache the last two."""
    rope, *memory, counts = state
    n_key_heads, head_size = memory[0][0].shape[2:]
    heads = qkv.reshape(1, len(qkv), -1, head_size)
    queries_and_keys = heads[:, :, : -2 * n_key_heads], heads[:, :, -2 * n_key_heads : -n_key_heads]
    for norm, part in zip(sublayer.qk_norms or (), queries_and_keys):
        part[...] = norm(part.reshape(-1, len(norm.gain))).reshape(part.shape)
    if rope is not None:
        n_channels, rotated = 2 * rope[0].shape[1], heads[:, :, :-n_key_heads, :]
        rotated[..., :n_channels] = kernels.apply_rope(rotated[..., :n_channels], *rope)
    q, k = queries_and_keys
    for new, arrays in zip((k, heads[:, :, -n_key_heads:]), memory):
        for n, (array, count) in enumerate(zip(arrays, counts)):
            array[:, count - 1] = new[:, n]
    keys, values = ([array[:, :count] for array, count in zip(arrays, counts)] for arrays in memory)
    attended: Array = ragged_attention(q[0], keys, values, sublayer.score_options, sublayer.off_by_one)
    return attended.reshape(len(qkv), -1)
