"""Whole models, and the first values of all their weights.

Shapes: B batch, T tokens, C channels, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike

from tricycle.attention import Attention, Cache, KeyValueCache, RaggedCache, call_with_cache, takes_ragged
from tricycle.attention.cache import Segments
from tricycle.autograd import grad_enabled_for
from tricycle.blocks import MultiHeadSelfAttention, TransformerBlock, call, dtype_between, new_norm, takes
from tricycle.configs.model import EncoderConfig, ModelConfig
from tricycle.devices import Array, array_module
from tricycle.functions import linear, new_softmax, soft_cap, to_compute_dtype
from tricycle.initialisers import normal, zeros
from tricycle.layers import Dense, Dropout, Embedding, Layer
from tricycle.loss import CrossEntropy
from tricycle.ops import as_tensor
from tricycle.parameter import Parameter
from tricycle.recompute import recompute, run_and_free
from tricycle.tensor import Operand, Tensor

# The most logits that a loss holds at a time in host memory: 112 MB of them, and as much of their gradients.
# Each part converts the head's matrix, and adds to its gradient, anew.
LOGITS_AT_ONCE = 7 * 2**22

# The correlation of keys with queries at first, where keys are shifted.
KEYS_LIKE_QUERIES = 0.7

DRAWN = ("matrix", "embedding", "position", "head")  # roles of what does not start at 0 or 1


class BlockStack(Layer):
    """What all models have that are one stack of blocks: a config that says what they are now.

    Attributes:
        recompute: blocks forget what they computed until the backward pass computes it again, which takes less memory
            and more time; the gradients are the same.
    """

    config: ModelConfig
    generator: np.random.Generator
    blocks: list[TransformerBlock]
    recompute: bool = False

    def use_precision(self, precision: str) -> Self:
        """As of every layer; it stands in the config, too."""
        super().use_precision(precision)
        self.config = _changed(self.config, precision=precision)
        return self

    def use_softmax(self, name: str, n_blocks: int = 2) -> None:
        """Let attention weigh keys in another way from now on, in every block and in the config.

        Args:
            name: in `functions.SOFTMAXES`.
            n_blocks: for "blocks", whose scales begin at 1.
        """
        self.config = _changed(self.config, softmax=name, softmax_blocks=n_blocks)
        for block in self.blocks:
            block.attention.use_softmax(new_softmax(name, n_blocks))


class GPT(BlockStack):
    """A decoder-only transformer that gives logits for the next token at every position (Radford et al. 2019).

    Its config decides which: GPT-2, Llama, Gemma, OPT, Pythia and others differ by fields.

    Args:
        config: the shape; `seed` decides the weights.
        draw_weights: False leaves all weights at 0 (gains at 1), for a model that gets others: their memory is not
            touched before they are written.
    """

    def __init__(self, config: ModelConfig, draw_weights: bool = True) -> None:
        if not isinstance(config, ModelConfig):
            raise TypeError(f"GPT: expected a ModelConfig, got {config!r}")
        if isinstance(config, EncoderConfig):
            raise TypeError("GPT: expected the config of a decoder, got an EncoderConfig: that is for TextEncoder")
        self.config = config
        # one generator draws the weights and then every dropout mask, so a checkpoint has one to save
        self.generator = np.random.default_rng(config.seed)
        width = config.embedding_dim
        narrow = config.embedding_size or width
        self.token_embedding = Embedding(config.vocab_size, narrow, zeros)
        self.embedding_projection = Dense(narrow, width, False, zeros) if narrow != width else None
        self.position_embedding = None
        if config.positions == "learned":
            rows = config.context_window + config.position_offset
            self.position_embedding = Embedding(rows, width, zeros, role="position")
        self.dropout = Dropout(config.dropout, self.generator)
        self.blocks = [
            TransformerBlock(config, layer, initialiser=zeros, generator=self.generator)
            for layer in range(config.n_layers)
        ]
        self.norm = new_norm(config) if config.norm_placement != "after" else None
        self.head_projection = Dense(width, narrow, False, zeros) if narrow != width else None
        self.head = None
        if not config.tied:
            self.head = Dense(narrow, config.vocab_size, config.head_bias, zeros, role="head")
        if draw_weights:
            initialise(self)
        self.use_precision(config.precision)

    @takes_ragged
    def forward(
        self,
        tokens: Operand,
        caches: Sequence[Cache] | None = None,
        last: bool = False,
        documents: Array | None = None,
        head: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Return the logits for the token after each token.

        Args:
            tokens: whole numbers (B, T), or (T,) for one sequence, T at most the context window.
            caches: from `new_caches`, for generation: the keys and values of tokens are kept there. With a
                `RaggedCache` for each block the tokens (1, T) are those of several texts, one after another.
            last: the logits after the last token alone (of each text), as if T were 1: they are a large part of
                reading a prompt.
            documents: whole numbers (B, T) that say which of several texts side by side a token belongs to: it sees no
                other, and its position is that in its own.
            head: applied to the hidden states (B, T, C) in place of `logits`.

        Returns:
            logits (B, T, V), or (T, V); or what `head` returns.

        Raises:
            ValueError: too many tokens or none, ids outside the vocabulary, not one cache for each block; several texts
                in a model that cannot keep them apart (`packs`).
        """
        x = self.hidden(tokens, caches, documents)
        if last:
            ends = [rows.stop - 1 for rows, _ in caches[0].texts(x.shape[-2])] if caches else [-1]
            x = x[..., -1:, :] if len(ends) == 1 else x[..., ends, :]
        return (head or self.logits)(x)

    def hidden(self, tokens: Operand, caches: Sequence[Cache] | None = None, documents: Array | None = None) -> Tensor:
        """What the head makes logits of, but for the last norm: (B, T, C), or (T, C). Takes what `forward` takes."""
        tokens = as_tensor(tokens)
        if caches and len(caches) != len(self.blocks):
            raise ValueError(f"GPT: expected a cache for each of {len(self.blocks)} blocks, got {len(caches)}")
        if tokens.ndim not in (1, 2):
            raise ValueError(f"GPT: expected tokens of shape (batch, tokens), got {tokens.shape}")
        n_tokens = tokens.shape[-1] if tokens.size else 0
        segments = caches[0].segments(n_tokens) if caches else ((0, n_tokens),)
        self._check(segments)
        mask = None if documents is None else self._same_document(tokens, documents)
        x = self.dropout(to_compute_dtype(self._embed(tokens, segments, documents), self.precision))
        for i, block in enumerate(self.blocks):
            if caches:
                x = call_with_cache(block, x, caches[i], mask)
            else:
                x = (recompute if self.recompute else run_and_free)(block, x, None, mask)
        return x

    def loss(
        self,
        tokens: Operand,
        labels: Operand,
        loss_fn: CrossEntropy | None = None,
        scale: Array | float = 1.0,
        documents: Array | None = None,
    ) -> Tensor:
        """`loss_fn(labels, self(tokens), scale)`, but in host memory without ever holding all logits where these are
        many: their gradients are made in the forward pass, some rows at a time (`CrossEntropy.of_head`).

        Args:
            tokens, documents: as of `forward`. labels: as many. loss_fn: `CrossEntropy()` unless given.
        """
        loss_fn = loss_fn or CrossEntropy()
        options = {} if documents is None else {"documents": documents}
        if not takes(self.forward, "head"):  # a `forward` of the user's, or a probe's, whose logits count as they are
            return loss_fn(labels, self(tokens, **options), scale)
        head = lambda hidden: self.loss_of_hidden(labels, hidden, loss_fn, scale)
        loss: Tensor = self(tokens, head=head, **options)
        return loss

    def loss_of_hidden(
        self, labels: Operand, hidden: Tensor, loss_fn: CrossEntropy, scale: Array | float = 1.0
    ) -> Tensor:
        """The same from what `hidden` gave. Logits of some rows at a time need a `logits` that takes a dtype."""
        if not takes(self.logits, "dtype"):
            return loss_fn(labels, self.logits(hidden), scale)
        n_rows = math.prod(hidden.shape[:-1])
        n_parts = math.ceil(n_rows / max(1, LOGITS_AT_ONCE // self.config.vocab_size))
        logits = partial(self.logits, dtype=self._dtype_of_logits(hidden))
        if n_parts <= 1 or hidden.on_gpu:
            return loss_fn(labels, logits(hidden), scale)
        return loss_fn.of_head(labels, hidden, logits, self.parameters(), math.ceil(n_rows / n_parts), scale)

    def _dtype_of_logits(self, hidden: Tensor) -> Any:
        """Of those that a loss is made of: in training 16 bits are enough where products take no more, as on a GPU."""
        if not grad_enabled_for(hidden) or self.config.logit_cap:
            return None
        products = [layer for layer in (self.head, self.head_projection) if layer is not None]
        return dtype_between(hidden, self.precision, *products)

    def _check(self, segments: Segments) -> None:
        window = self.config.context_window
        for seen, n_tokens in segments:
            if not 0 < n_tokens <= window - seen:
                earlier = f" after {seen} earlier ones" if seen else ""
                raise ValueError(
                    f"GPT(context_window={window}): expected 1 to {window} tokens, got {n_tokens}{earlier}"
                )

    @property
    def packs(self) -> bool:
        """Whether several texts side by side can be kept apart: not where tokens mix with the one before, or where keys
        are weighed by their places."""
        return all(_keeps_apart(getattr(block, "attention", None)) for block in self.blocks)

    def _same_document(self, tokens: Tensor, documents: Array) -> Array:
        """Which tokens may see which, (B, T, T)."""
        if documents.shape != tokens.shape or documents.dtype.kind not in "iu":
            got = f"{documents.dtype} of {documents.shape}"
            raise ValueError(f"GPT: expected documents as whole numbers of shape {tokens.shape}, got {got}")
        if not self.packs:
            raise ValueError("GPT: expected one text a row, for in this model tokens reach across their ends")
        rows = documents.reshape(-1, documents.shape[-1])
        return rows[:, :, None] == rows[:, None, :]

    def _embed(self, tokens: Tensor, segments: Segments, documents: Array | None = None) -> Tensor:
        """(B, T) to (B, T, C)."""
        x = self.token_embedding(tokens)
        if self.config.embedding_scale != 1:
            x = x * self.config.embedding_scale
        if self.embedding_projection is not None:
            x = self.embedding_projection(x)
        if self.position_embedding is not None:
            if documents is None:
                positions = np.concatenate([np.arange(first, first + n) for first, n in segments])
            else:
                positions = places_in(documents)
            x = x + self.position_embedding(self.place(positions + self.config.position_offset))
        return x

    def logits(self, x: Tensor, dtype: Any = None) -> Tensor:
        """Of hidden states (..., C) those of the next token, (..., V): the last norm, and the head.

        Args:
            dtype: of the logits; what the product gives unless given, or where the head cannot choose it.
        """
        x = x if self.norm is None else self.norm(x)
        if self.head_projection is not None:
            x = self.head_projection(x)
        if self.head is None:
            logits = linear(x, self.token_embedding.weights, precision=self.precision, dtype=dtype, turned=True)
        else:
            logits = call(self.head, x, dtype)
        return soft_cap(logits, self.config.logit_cap) if self.config.logit_cap else logits

    def new_caches(self, dtype: DTypeLike | None = None) -> list[KeyValueCache]:
        """An empty cache for each block, of float32 unless a dtype is given.

        A layer with a window keeps what its tokens can still see, unless it weighs keys by their places.
        """
        windows = [_seen_by(getattr(block, "attention", None)) for block in self.blocks]
        return [KeyValueCache(self.config.context_window, dtype, window) for window in windows]


@np.errstate(all="ignore")  # broken weights are an error of `generate.sample`
def next_logits(
    model: GPT,
    tokens: Sequence[Sequence[int]],
    caches: Sequence[list[KeyValueCache]],
    every: bool = False,
) -> np.ndarray:
    """Return the logits after some more tokens of each text, in host memory; dropout is off.

    Args:
        tokens: one or more of each text.
        caches: of each text what `model.new_caches` gave, with what was read before; texts have caches of their own.
        every: the logits after each new token, and not only after the last of each text.

    Returns:
        (N, V) for N texts; with `every` (R, V) for R new tokens.

    Raises:
        ValueError: ids outside the vocabulary, no token, or more than the context window.
    """
    with model.evaluating():
        if len(tokens) > 1 and not getattr(model.forward, "takes_ragged", False):
            return np.concatenate([next_logits(model, [t], [c], every) for t, c in zip(tokens, caches, strict=True)])
        known: Sequence[Cache]
        if len(tokens) == 1:
            (known,) = caches
        else:
            lengths = [len(new) for new, _ in zip(tokens, caches, strict=True)]
            known = [RaggedCache(of_block, lengths) for of_block in zip(*caches)]
        ids = np.array([[token for new in tokens for token in new]], int)
        logits: np.ndarray = model(model.place(ids), known, not every).numpy()[0]
        return logits


def places_in(documents: Array) -> Array:
    """The place of each token in its own text, from 0: (B, T) of the texts' numbers, each of which stands together."""
    xp = array_module(documents)
    places = xp.arange(documents.shape[-1]) + xp.zeros_like(documents)
    begins = xp.ones(documents.shape, bool)
    begins[..., 1:] = documents[..., 1:] != documents[..., :-1]
    starts = xp.where(begins, places, 0)
    return places - xp.maximum.accumulate(starts, axis=-1)


def _keeps_apart(attention: Any) -> bool:
    """Whether a mask is all that a layer needs so that texts side by side do not meet."""
    inner = getattr(attention, "attention", None)
    return isinstance(inner, Attention) and inner.softmax.fused and not attention.mixes


def _seen_by(attention: Any) -> int | None:
    """The window of a layer, where it makes no difference whether it is given what it does not see."""
    inner = getattr(attention, "attention", None)
    return inner.window if isinstance(inner, Attention) and inner.softmax.fused else None


def _changed(config: ModelConfig, **values: Any) -> ModelConfig:
    """The config with other values; the same object where they are its own already."""
    same = all(getattr(config, name) == value for name, value in values.items())
    return config if same else replace(config, **values)


def initialise(model: BlockStack) -> None:
    """GPT-2's first weights: normal(0.02); projections that end in the residual stream, of which there are
    two a block, smaller by 1 / sqrt(2 n_layers), so that the stream keeps its size; biases 0 and gains 1.
    With `zero_projections` a block adds nothing at first (Zhang et al. 2019, "Fixup"). With `key_shift` keys are like
    queries at first, so that a token's query meets its like in the keys of earlier tokens.
    """
    config = model.config
    last = 0 if config.zero_projections else 0.02 / math.sqrt(2 * config.n_layers)
    into_stream = {id(part.projection.weights) for block in model.blocks for part in (block.attention, block.mlp)}
    for parameter in model.parameters():
        if isinstance(parameter, Parameter) and parameter.role in DRAWN:
            std = last if id(parameter) in into_stream else 0.02
            parameter.array[...] = normal(std)(parameter.shape, model.generator)
    if config.key_shift:
        for block in model.blocks:
            _let_keys_be_like_queries(block.attention)


def _let_keys_be_like_queries(attention: MultiHeadSelfAttention) -> None:
    """Keys' weights of the same size as before, which correlate with those of the first queries that they are for."""
    weights = attention.qkv.weights.array
    n_heads, n_key_heads = attention.n_heads, attention.n_key_heads
    heads = weights.reshape(len(weights), n_heads + 2 * n_key_heads, attention.head_size)
    queries = heads[:, 0 : n_heads : n_heads // n_key_heads]
    keys = heads[:, n_heads : n_heads + n_key_heads]
    keys[...] = KEYS_LIKE_QUERIES * queries + math.sqrt(1 - KEYS_LIKE_QUERIES**2) * keys


def least_numbers(config: ModelConfig) -> int:
    """How many numbers the matrices and tables of a model have, without making it."""
    width = config.embedding_dim
    heads = config.n_heads * config.channels_per_head
    key_heads = config.key_heads * config.channels_per_head
    attention = width * (2 * heads + 2 * key_heads)
    mlp = width * config.mlp_width * (3 if config.is_gated else 2)
    positions = (config.context_window + config.position_offset) * width if config.positions == "learned" else 0
    types = config.token_types * width if isinstance(config, EncoderConfig) else 0
    tokens = config.vocab_size * (config.embedding_size or width)
    return tokens + positions + types + config.n_layers * (attention + mlp)
