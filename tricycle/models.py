"""`GPT`: a decoder-only transformer, and the first values of its weights.

Shapes: B batch, T tokens, C channels, V vocabulary.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike

from tricycle.attention.attend import Attention, Mask
from tricycle.attention.cache import KeyValueCache, takes_ragged
from tricycle.attention.rotary import POSITIONS
from tricycle.autograd import current_modes, grad_enabled_for
from tricycle.blocks import TransformerBlock, accepts_argument, activation_dtype, call_with_dtype, new_norm
from tricycle.configs.model import ModelConfig
from tricycle.devices import Array
from tricycle.functions import linear, new_softmax, softcap, to_compute_dtype
from tricycle.initialisers import normal, zeros
from tricycle.layers import Dense, Dropout, Embedding, Layer
from tricycle.loss import CrossEntropy
from tricycle.ops import as_tensor
from tricycle.parameter import Parameter
from tricycle.tensor import Operand, Tensor

# The most logits that a loss holds at a time in host memory: 112 MB of them, and as much of their gradients.
# Each part converts the head's matrix, and adds to its gradient, anew.
MAX_LOGITS = 7 * 2**22
DRAWN = ("matrix", "embedding", "position", "head")  # roles of parameters that do not start at 0 or 1


class BlockStack(Layer):
    """The base of models that are one stack of blocks, with a config that says what they are now."""

    config: ModelConfig
    generator: np.random.Generator
    blocks: list[TransformerBlock]
    recompute: Callable[..., Tensor] | None = (
        None  # `tricycle.activation_checkpointing.checkpoint_activations`, for gradient checkpointing
    )

    @property
    def run_block(self) -> Callable[..., Tensor]:
        return self.recompute or next((mode.run_block for mode in current_modes.get() if mode.run_block), operator.call)

    def use_precision(self, precision: str) -> Self:
        """Set the precision of matrix products, in the config too."""
        super().use_precision(precision)
        self.config = _changed(self.config, precision=precision)
        return self

    def use_softmax(self, name: str, n_blocks: int = 2) -> None:
        """Use another variant of `functions.SOFTMAXES` from now on, in every block; `n_blocks` is for "blocks"."""
        self.config = _changed(self.config, softmax=name, softmax_blocks=n_blocks)
        for block in self.blocks:
            block.attention.use_softmax(new_softmax(name, self.config))


def _changed(config: ModelConfig, **values: Any) -> ModelConfig:
    same = all(getattr(config, name) == value for name, value in values.items())
    return config if same else replace(config, **values)


class GPT(BlockStack):
    """A decoder-only transformer that gives logits for the next token at every position (Radford et al. 2019).

    Its config decides which: GPT-2, Llama, Gemma, OPT, Pythia and others differ by fields.

    Args:
        config: the shape; `seed` decides the weights.
        draw_weights: False leaves all weights at 0 (gains at 1), in memory that is not touched before it is written.
    """

    def __init__(self, config: ModelConfig, draw_weights: bool = True) -> None:
        if not isinstance(config, ModelConfig):
            raise TypeError(f"GPT: expected a ModelConfig, got {config!r}")
        if not config.is_decoder:
            raise TypeError("GPT: expected the config of a decoder, got an EncoderConfig: that is for TextEncoder")
        self.config = config
        # one generator draws the weights and then every dropout mask, so a checkpoint has one to save
        self.generator = np.random.default_rng(config.seed)
        width = config.embedding_dim
        narrow = config.embedding_size or width
        self.token_embedding = Embedding(config.vocab_size, narrow, zeros)
        self.embedding_projection = Dense(narrow, width, False, zeros) if narrow != width else None
        self.position_embedding = POSITIONS[config.positions].new_embedding(config)
        self.dropout = Dropout(config.dropout, self.generator)
        options: Any = {"initialiser": zeros, "generator": self.generator}
        self.blocks = [TransformerBlock(config, layer, **options) for layer in range(config.n_layers)]
        self.norm = new_norm(config) if config.norm_placement != "after" else None
        self.head_projection = Dense(width, narrow, False, zeros) if narrow != width else None
        self.head = None if config.tied else Dense(narrow, config.vocab_size, config.head_bias, zeros, role="head")
        if draw_weights:
            initialize_weights(self)
        self.use_precision(config.precision)

    @takes_ragged
    def forward(
        self,
        tokens: Operand,
        caches: Sequence[KeyValueCache] | None = None,
        last: bool = False,
        mask: Mask = None,
        positions: Array | None = None,
        head: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Return the logits (B, T, V), or (T, V), for the token after each token.

        Args:
            tokens: whole numbers (B, T), or (T,) for one sequence, T at most the context window.
            caches: from `new_caches`, for generation.
            last: return the logits after the last token alone (of each text), as if T were 1.
            mask: which tokens may be seen besides, as `attend.additive_mask` takes it.
            positions: whole numbers (B, T), for learned positions; from 0 unless given.
            head: applied to the hidden states (B, T, C) in place of `logits`.

        Raises:
            ValueError: too many tokens or none, ids outside the vocabulary, not one cache for each block.
        """
        x = self.hidden_states(tokens, caches, mask, positions)
        if last:
            ends = [rows.stop - 1 for rows, _ in caches[0].texts(x.shape[-2])] if caches else [-1]
            x = x[..., -1:, :] if len(ends) == 1 else x[..., ends, :]
        return (head or self.logits)(x)

    def hidden_states(
        self, tokens: Operand, caches: Sequence[KeyValueCache] | None = None, mask: Mask = None, positions: Any = None
    ) -> Tensor:
        """Return the hidden states (B, T, C), or (T, C), before the last norm. Takes what `forward` takes."""
        tokens = as_tensor(tokens)
        if caches and len(caches) != len(self.blocks):
            raise ValueError(f"GPT: expected a cache for each of {len(self.blocks)} blocks, got {len(caches)}")
        if tokens.ndim not in (1, 2):
            raise ValueError(f"GPT: expected tokens of shape (batch, tokens), got {tokens.shape}")
        n_tokens = tokens.shape[-1] if tokens.size else 0
        segments = caches[0].segments(n_tokens) if caches else ((0, n_tokens),)
        window = self.config.context_window
        for seen, new in segments:
            if not 0 < new <= window - seen:
                got = f"{new} after {seen} earlier ones" if seen else f"{new}"
                raise ValueError(f"GPT(context_window={window}): expected 1 to {window} tokens, got {got}")
        if positions is None:
            positions = np.concatenate([np.arange(first, first + n) for first, n in segments])
        x = self.dropout(to_compute_dtype(self._embed(tokens, positions), self.precision))
        run = self.run_block
        for i, block in enumerate(self.blocks):
            x = caches[i].call(block, x, mask) if caches else run(block, x, None, mask)
        return x

    def _embed(self, tokens: Tensor, positions: Array) -> Tensor:
        x = self.token_embedding(tokens)
        if self.config.embedding_scale != 1:
            x = x * self.config.embedding_scale
        if self.embedding_projection is not None:
            x = self.embedding_projection(x)
        if self.position_embedding is not None:
            x = x + self.position_embedding(self.place(positions + self.config.position_offset))
        return x

    def logits(self, x: Tensor, dtype: Any = None) -> Tensor:
        """Apply the last norm and the head to (..., C); return logits (..., V), in this dtype if one is given."""
        x = x if self.norm is None else self.norm(x)
        if self.head_projection is not None:
            x = self.head_projection(x)
        if self.head is None:
            logits = linear(x, self.token_embedding.weights, precision=self.precision, dtype=dtype, transposed=True)
        else:
            logits = call_with_dtype(self.head, x, dtype)
        return softcap(logits, self.config.logit_cap) if self.config.logit_cap else logits

    def loss(self, tokens: Operand, labels: Operand, loss_fn: Any = None, scale: Any = 1.0, **options: Any) -> Tensor:
        """Return `loss_fn(labels, self(tokens, **options), scale)`, without holding all logits where these are many."""
        loss_fn = loss_fn or CrossEntropy()
        if not accepts_argument(
            self, "head"
        ):  # a `forward` of the user's, or a probe's, whose logits count as they are
            loss: Tensor = loss_fn(labels, self(tokens, **options), scale)
            return loss
        return self(tokens, head=lambda hidden: self.loss_from_hidden(labels, hidden, loss_fn, scale), **options)

    def loss_from_hidden(self, labels: Operand, hidden: Tensor, loss_fn: CrossEntropy, scale: Any = 1.0) -> Tensor:
        """Return the loss from what `hidden` returned; on a CPU some rows at a time (`CrossEntropy.from_hidden`)."""
        if not accepts_argument(self.logits, "dtype"):
            return loss_fn(labels, self.logits(hidden), scale)
        n_rows = math.prod(hidden.shape[:-1])
        n_parts = math.ceil(n_rows / max(1, MAX_LOGITS // self.config.vocab_size))
        dtype = None
        if grad_enabled_for(hidden) and not self.config.logit_cap:  # 16 bits are enough where products take no more
            products = [layer for layer in (self.head, self.head_projection) if layer is not None]
            dtype = activation_dtype(hidden, self.precision, *products)
        logits = partial(self.logits, dtype=dtype)
        if n_parts <= 1 or hidden.on_gpu:
            return loss_fn(labels, logits(hidden), scale)
        return loss_fn.from_hidden(labels, hidden, logits, self.parameters(), math.ceil(n_rows / n_parts), scale)

    def new_caches(self, dtype: DTypeLike | None = None) -> list[KeyValueCache]:
        """Return an empty cache for each block, of float32 unless a dtype is given."""
        windows = [_window_of(getattr(block, "attention", None)) for block in self.blocks]
        return [KeyValueCache(self.config.context_window, dtype, window) for window in windows]


def _window_of(attention: Any) -> int | None:
    """Return the window of a layer, if it makes no difference whether it is given the keys outside of it."""
    inner = getattr(attention, "attention", None)
    return inner.window if isinstance(inner, Attention) and inner.softmax.fused else None


def initialize_weights(model: BlockStack) -> None:
    """Draw GPT-2's first weights: normal(0.02); biases 0 and gains 1.

    Projections that end in the residual stream, two a block, are smaller by 1 / sqrt(2 n_layers), so that the stream
    keeps its size; with `zero_projections` they are 0 (Zhang et al. 2019, "Fixup").
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
            block.attention.key_shift.align_keys(block.attention)
