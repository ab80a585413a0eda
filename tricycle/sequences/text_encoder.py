"""Bidirectional text encoders (BERT), and pooling of their outputs into sentence embeddings.

`tricycle.pretrained.sentence_encoder` loads pretrained ones.

Shapes: B batch, T tokens, C channels.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tricycle.attention.rotary import POSITIONS
from tricycle.blocks import TransformerBlock, new_norm
from tricycle.configs.encoder import EncoderConfig
from tricycle.devices import Array
from tricycle.functions import to_compute_dtype
from tricycle.initialisers import zeros
from tricycle.layers import Dropout, Embedding, Layer, Sequential
from tricycle.models import BlockStack, initialize_weights
from tricycle.ops import as_tensor
from tricycle.tensor import Operand, Tensor

POOLINGS = ("mean", "first")
SMALLEST = 1e-24  # added to squared norms against division by zero


class TextEncoder(BlockStack):
    """A bidirectional transformer encoder without a head, such as BERT (Devlin et al. 2019).

    Args:
        config: the architecture; `seed` determines the initial weights.
        draw_weights: False leaves all weights at 0 (gains at 1), if they are loaded afterwards.
    """

    def __init__(self, config: EncoderConfig, draw_weights: bool = True) -> None:
        if not isinstance(config, EncoderConfig):
            raise TypeError(f"TextEncoder: expected an EncoderConfig, got {config!r}")
        self.config: EncoderConfig = config
        self.generator = np.random.default_rng(config.seed)
        width = config.embedding_dim
        self.token_embedding = Embedding(config.vocab_size, width, zeros)
        self.position_embedding = POSITIONS[config.positions].new_embedding(config)
        self.type_embedding = Embedding(config.token_types, width, zeros) if config.token_types else None
        self.embedding_norm = new_norm(config) if config.embedding_norm else None
        self.dropout = Dropout(config.dropout, self.generator)
        self.blocks = [
            TransformerBlock(config, layer, causal=False, initialiser=zeros, generator=self.generator)
            for layer in range(config.n_layers)
        ]
        if not config.first_norm:
            self.blocks[0].attention_norm = Sequential()
        self.norm = new_norm(config) if config.norm_placement != "after" else None
        if draw_weights:
            initialize_weights(self)
        self.use_precision(config.precision)

    def forward(self, tokens: Operand, mask: Any = None, token_type_ids: Operand | None = None) -> Tensor:
        """Return hidden states (B, T, C) of tokens (B, T); mask is False for padding, whose states are undefined.

        Args:
            tokens: integers (B, T), T at most the context window.
            mask: booleans (B, T), False for padding; no padding if not given.
            token_type_ids: integers (B, T), the segment of each token; 0 if not given.

        Raises:
            ValueError: too many tokens or none, ids out of range, or a wrong shape.
        """
        tokens = as_tensor(tokens)
        window = self.config.context_window
        if tokens.ndim != 2 or not 0 < tokens.shape[1] <= window or tokens.size == 0:
            wanted = f"(batch, tokens) with 1 to {window} tokens"
            raise ValueError(f"TextEncoder(context_window={window}): expected shape {wanted}, got {tokens.shape}")
        mask = _checked(mask, tokens)
        x = self.dropout(to_compute_dtype(self._embed(tokens, token_type_ids), self.precision))
        local = _local_mask(mask, tokens, self.config.window // 2) if self.config.window else None
        run = self.run_block
        for layer, block in enumerate(self.blocks):
            x = run(block, x, None, mask if self.config.window_size(layer) is None else local)
        return x if self.norm is None else self.norm(x)

    def _embed(self, tokens: Tensor, token_type_ids: Operand | None) -> Tensor:
        """Return the (normalized) sum of token, position and type embeddings (B, T, C); types are 0 if None."""
        x = self.token_embedding(tokens)
        if self.config.embedding_scale != 1:
            x = x * self.config.embedding_scale
        if self.position_embedding is not None:
            first = self.config.position_offset
            x = x + self.position_embedding.weights[first : first + tokens.shape[1]]
        if self.type_embedding is not None:
            types = None if token_type_ids is None else as_tensor(token_type_ids)
            if types is not None and types.shape != tokens.shape:
                raise ValueError(f"TextEncoder: expected token_type_ids of shape {tokens.shape}, got {types.shape}")
            x = x + (self.type_embedding.weights[0] if types is None else self.type_embedding(types))
        elif token_type_ids is not None:
            raise ValueError("TextEncoder(token_types=0): expected no token_type_ids, got some")
        return x if self.embedding_norm is None else self.embedding_norm(x)


def _checked(mask: Any, tokens: Tensor) -> Array | None:
    """Return the mask on the tokens' device, None for None; ValueError unless booleans of the tokens' shape.

    Raises:
        ValueError: the mask has another dtype than bool, or another shape than the tokens.
    """
    if mask is None:
        return None
    array = mask.array if isinstance(mask, Tensor) else np.asarray(mask) if isinstance(mask, list) else mask
    if array.dtype != bool or array.shape != tokens.shape:
        got = f"{array.dtype} of {array.shape}"
        raise ValueError(f"TextEncoder: expected a mask of booleans of shape {tokens.shape}, got {got}")
    return tokens.xp.asarray(array)


def _local_mask(mask: Array | None, tokens: Tensor, distance: int) -> Array:
    """Return the mask (1 or B, T, T), True for keys at most `distance` tokens away, of a mask (B, T) or None."""
    places = tokens.xp.arange(tokens.shape[1])
    near = (abs(places[:, None] - places) <= distance)[None]
    return near if mask is None else near & mask[:, None]


class SentencePooling(Layer):
    """Pooling of token vectors into one sentence embedding (Reimers and Gurevych 2019, section 3).

    Args:
        mode: "mean" of all tokens without padding, or "first" for the first token, BERT's [CLS].
        normalize: scale embeddings to norm 1, so that their dot products are cosine similarities.
    """

    def __init__(self, mode: str = "mean", normalize: bool = True) -> None:
        if mode not in POOLINGS:
            raise ValueError(f"SentencePooling: expected mode to be one of {', '.join(POOLINGS)}, got {mode!r}")
        self.mode = mode
        self.normalize = normalize

    def forward(self, hidden: Tensor, mask: Any = None) -> Tensor:
        """Pool vectors (B, T, C) to (B, C): mean or first, with L2 norm 1 if `normalize`; mask is False for padding.

        Args:
            mask: booleans (B, T), False for padding; the mean of a text with only padding is zero.
        """
        x = hidden[:, 0] if self.mode == "first" else self._mean(hidden, mask)
        if not self.normalize:
            return x
        return x * ((x * x).sum(axis=-1, keepdims=True) + SMALLEST) ** -0.5

    def _mean(self, hidden: Tensor, mask: Any) -> Tensor:
        """Return the means (B, C) over tokens where the mask is True (None: all); 0 where it is never True."""
        if mask is None:
            return hidden.mean(axis=1)
        array = mask.array if isinstance(mask, Tensor) else mask
        real = hidden.xp.asarray(array, hidden.dtype)[..., None]  # (B, T, 1)
        return (hidden * real).sum(axis=1) * (1 / hidden.xp.maximum(real.sum(axis=1), 1))
