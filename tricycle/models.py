"""Whole models, and the first values of all their weights.

Shapes: B batch, T tokens, C channels, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from tricycle.attention import KeyValueCache
from tricycle.blocks import GPT2TransformerBlock, new_norm
from tricycle.configs import GPTConfig
from tricycle.functions import linear, new_softmax, to_activations
from tricycle.initialisers import normal, zeros
from tricycle.layers import Dense, Dropout, Embedding, Layer
from tricycle.ops import as_tensor
from tricycle.tensor import Operand, Tensor


class GPT(Layer):
    """A decoder-only transformer that gives logits for the next token at every position (Radford et al. 2019).

    Args:
        config: its fields under "the model" decide the shape, `seed` the weights.
    """

    def __init__(self, config: GPTConfig) -> None:
        if not isinstance(config, GPTConfig):
            raise TypeError(f"GPT: expected a GPTConfig, got {config!r}")
        self.config = config
        # one generator draws the weights and then every dropout mask, so a checkpoint has one to save
        self.generator = np.random.default_rng(config.seed)
        size, learned = config.embedding_dim, config.positions == "learned"
        self.token_embedding = Embedding(config.vocab_size, size, zeros)
        self.position_embedding = Embedding(config.context_window, size, zeros) if learned else None
        self.dropout = Dropout(config.dropout, self.generator)
        self.blocks = [
            GPT2TransformerBlock(
                size, config.n_heads, config.context_window, config.expansion_ratio, config.activation, config.norm,
                config.bias, config.dropout, rotary=not learned, initialiser=zeros, generator=self.generator,
                softmax=new_softmax(config.softmax, config.softmax_blocks), qk_norm=config.qk_norm,
                token_shift=config.token_shift,
            )
            for _ in range(config.n_layers)
        ]
        self.norm = new_norm(config.norm, size, config.bias)
        self.head = None if config.tied else Dense(size, config.vocab_size, bias=False, initialiser=zeros)
        _initialise(self, config.n_layers, self.generator, config.zero_projections)
        self.use_precision(config.precision)

    def forward(self, tokens: Operand, caches: list[KeyValueCache] | None = None) -> Tensor:
        """
        Args:
            tokens: whole numbers (B, T), or (T,) for one sequence, T at most the context window.
            caches: from `new_caches`, for generation: tokens seen before are remembered there.

        Returns:
            logits (B, T, V), or (T, V).

        Raises:
            ValueError: too many tokens or none, ids outside the vocabulary, not one cache for each block.
        """
        tokens = as_tensor(tokens)
        if caches and len(caches) != len(self.blocks):
            raise ValueError(f"GPT: expected a cache for each of {len(self.blocks)} blocks, got {len(caches)}")
        seen = caches[0].length if caches else 0
        window = self.config.context_window
        if tokens.ndim not in (1, 2) or not 0 < seen + tokens.shape[-1] <= window or tokens.size == 0:
            earlier = f" after {seen} earlier ones" if seen else ""
            raise ValueError(
                f"GPT(context_window={window}): expected shape (batch, tokens) with 1 to {window} tokens, "
                f"got {tokens.shape}{earlier}"
            )
        x = self.token_embedding(tokens)
        if self.position_embedding is not None:
            x = x + self.position_embedding.weights[seen : seen + tokens.shape[-1]]
        x = self.dropout(to_activations(x, self.config.precision))
        for i, block in enumerate(self.blocks):
            x = block(x, caches[i] if caches else None)
        x = self.norm(x)
        if self.head is not None:
            return self.head(x)
        return linear(x, self.token_embedding.weights.transpose(), precision=self.config.precision)

    def use_precision(self, precision: str) -> Layer:
        """As of every layer; it holds for a tied output layer and for activations too, and stands in the config."""
        super().use_precision(precision)
        if precision != self.config.precision:
            changed: Any = {"precision": precision}
            self.config = replace(self.config, **changed)
        return self

    def use_softmax(self, name: str, n_blocks: int = 2) -> None:
        """Let attention weigh keys in another way from now on, in every block and in the config.

        Args:
            name: in `functions.SOFTMAXES`.
            n_blocks: for "blocks", whose scales begin at 1.
        """
        self.config = replace(self.config, softmax=name, softmax_blocks=n_blocks)
        for block in self.blocks:
            block.attention.use_softmax(new_softmax(name, n_blocks))

    def new_caches(self) -> list[KeyValueCache]:
        """An empty cache for each block."""
        return [KeyValueCache(self.config.context_window) for _ in self.blocks]


def _initialise(model: Layer, n_layers: int, generator: np.random.Generator, zero_projections: bool) -> None:
    """GPT-2's first weights: normal(0.02); projections that end in the residual stream, of which there are
    two a block, smaller by 1 / sqrt(2 n_layers), so that the stream keeps its size; biases 0 and gains 1.
    With `zero_projections` a block adds nothing at first (Zhang et al. 2019, "Fixup").
    """
    last = 0 if zero_projections else 0.02 / math.sqrt(2 * n_layers)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 and not name.endswith("softmax_scales"):
            std = last if name.endswith("projection.weights") else 0.02
            parameter.array[...] = normal(std)(parameter.shape, generator)
