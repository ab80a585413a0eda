"""`GPT`: a decoder-only transformer language model, and its weight initialization.

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
from tricycle.blocks import FUSED, TransformerBlock, accepts_argument, activation_dtype, call_with_dtype, new_norm
from tricycle.configs.model import ModelConfig
from tricycle.devices import Array
from tricycle.functions import RowSoftmax, linear, new_softmax, softcap, to_compute_dtype
from tricycle.initialisers import normal, zeros
from tricycle.layers import Dense, Dropout, Embedding, Layer
from tricycle.loss import CrossEntropy
from tricycle.ops import as_tensor
from tricycle.parameter import Parameter
from tricycle.tensor import Operand, Tensor

RANDOM_ROLES = ("matrix", "embedding", "position", "head", "router")  # roles of parameters with random initial values


class BlockStack(Layer):
    """The base of models that consist of a stack of transformer blocks, with their current config."""

    config: ModelConfig
    generator: np.random.Generator
    blocks: list[TransformerBlock]
    streams: Any = None  # models pickled before the option existed have none
    recompute: Callable[..., Tensor] | None = None  # `activation_checkpointing.checkpoint_activations`, or None

    @property
    def run_block(self) -> Callable[..., Tensor]:
        """The function that calls each block: the `recompute` attribute, else an active mode's, else a plain call."""
        return self.recompute or next((mode.run_block for mode in current_modes.get() if mode.run_block), operator.call)

    def use_precision(self, precision: str) -> Self:
        """Set the precision of matrix products, one of PRECISIONS, also in the config; return self."""
        super().use_precision(precision)
        self.config = self.config if self.config.precision == precision else replace(self.config, precision=precision)
        return self

    def use_softmax(self, softmax: str | RowSoftmax, n_blocks: int = 2) -> None:
        """Switch all blocks to a softmax variant: an object, or a name in `functions.SOFTMAXES`, set in the config.

        `n_blocks` is for "blocks". `softmaxes.config_with_softmax` returns a config with the name of an object.
        """
        if isinstance(softmax, str):
            self.config = replace(self.config, softmax=softmax, softmax_blocks=n_blocks)
        for block in self.blocks:
            block.attention.use_softmax(new_softmax(softmax, self.config))


class GPT(BlockStack):
    """A decoder-only transformer that predicts the next token at every position (Radford et al. 2019).

    The fields of its config select GPT-2, Llama, Gemma, OPT, Pythia and other architectures.

    Args:
        config: the architecture; `seed` determines the initial weights.
        draw_weights: False leaves all weights at 0 (gains at 1), for weights that are loaded afterwards.
    """

    def __init__(self, config: ModelConfig, draw_weights: bool = True) -> None:
        if not isinstance(config, ModelConfig):
            raise TypeError(f"GPT: expected a ModelConfig, got {config!r}")
        if not config.is_decoder:
            raise TypeError("GPT: expected the config of a decoder, got an EncoderConfig: use TextEncoder")
        self.config = config
        self.generator = np.random.default_rng(config.seed)  # for weights and dropout masks; saved in checkpoints
        width, narrow = config.embedding_dim, config.embedding_size or config.embedding_dim
        self.token_embedding = Embedding(config.vocab_size, narrow, zeros)
        self.embedding_projection = Dense(narrow, width, False, zeros) if narrow != width else None
        self.position_embedding = POSITIONS[config.positions].new_embedding(config)
        self.dropout = Dropout(config.dropout, self.generator)
        options: Any = {"initialiser": zeros, "generator": self.generator}
        new_block: Any = getattr(config, "new_block", partial(TransformerBlock, config))  # configs may have their own
        self.blocks = [new_block(layer, **options) for layer in range(config.n_layers)]
        self.streams = getattr(config, "new_streams", lambda **_: None)(**options)  # if blocks have more channels
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
        output_fn: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Return logits (B, T, V) or (T, V), of token t + 1 at t, extending caches; `output_fn` replaces norm and head.

        Args:
            tokens: integers (B, T), or (T,) for one sequence, T at most the context window.
            caches: from `new_caches`, for generation.
            last: return only the logits after the last token (of each text), as if T were 1.
            mask: a further boolean attention mask, see `attend.additive_mask`.
            positions: integers (B, T), for learned positions; by default counted from 0.
            output_fn: applied to the hidden states (B, T, C) in place of `logits`.

        Raises:
            ValueError: no tokens or too many, ids outside the vocabulary, or a wrong number of caches.
        """
        x = self.hidden_states(tokens, caches, mask, positions)
        if last:
            ends = [rows.stop - 1 for rows, _ in caches[0].texts(x.shape[-2])] if caches else [-1]
            x = x[..., -1:, :] if len(ends) == 1 else x[..., ends, :]
        return (output_fn or self.logits)(x)

    def hidden_states(
        self, tokens: Operand, caches: Sequence[KeyValueCache] | None = None, mask: Mask = None, positions: Any = None
    ) -> Tensor:
        """Return the last block's output (B, T, C) or (T, C), before the last norm; extend caches; see `forward`."""
        tokens = as_tensor(tokens)
        if caches is not None and len(caches) != len(self.blocks):
            raise ValueError(f"GPT: expected a cache for each of {len(self.blocks)} blocks, got {len(caches)}")
        if tokens.ndim not in (1, 2):
            raise ValueError(f"GPT: expected tokens of shape (batch, tokens), got {tokens.shape}")
        n_tokens, window, xp = tokens.shape[-1] if tokens.size else 0, self.config.context_window, tokens.xp
        segments = caches[0].segments(n_tokens) if caches else ((0, n_tokens),)
        for seen, new in segments:
            if not 0 < new <= window - seen:
                raise ValueError(f"GPT(context_window={window}): expected 1 to {window} tokens, got {new} after {seen}")
        positions = xp.concatenate([xp.arange(i, i + n) for i, n in segments]) if positions is None else positions
        x = self.dropout(to_compute_dtype(self._embed(tokens, positions), self.precision))
        fused = FUSED.get(type(self.blocks[0])) if caches else None
        if fused and (y := fused(x, self.blocks, caches, mask)) is not None:
            return y
        for i, block in enumerate(self.blocks):
            x = caches[i].call(block, x, mask) if caches else self.run_block(block, x, None, mask)
        return x

    def _embed(self, tokens: Tensor, positions: Array) -> Tensor:
        """Return scaled token embeddings (..., T, C), projected if they are narrower, plus any learned positions."""
        x = self.token_embedding(tokens)
        x = x if self.config.embedding_scale == 1 else x * self.config.embedding_scale
        x = x if self.embedding_projection is None else self.embedding_projection(x)
        if self.position_embedding is not None:
            x = x + self.position_embedding(self.place(positions + self.config.position_offset))
        return x if self.streams is None else self.streams.open(tokens, x)

    def logits(self, x: Tensor, dtype: Any = None) -> Tensor:
        """Apply the last norm and head (or tied embedding) to x (..., C); return scaled and capped logits (..., V)."""
        x = x if self.streams is None else self.streams.close(x)
        x = x if self.norm is None else self.norm(x)
        x = x if self.config.logit_scale == 1 else x * self.config.logit_scale
        x = x if self.head_projection is None else self.head_projection(x)
        if self.head is None:
            logits = linear(x, self.token_embedding.weights, precision=self.precision, dtype=dtype, transposed=True)
        else:
            logits = call_with_dtype(self.head, x, dtype)
        return softcap(logits, self.config.logit_cap) if self.config.logit_cap else logits

    def loss(self, tokens: Operand, labels: Operand, loss_fn: Any = None, scale: Any = 1.0, **options: Any) -> Tensor:
        """Return `loss_fn(labels, self(tokens, **options), scale)` (default: CrossEntropy), plus any router loss."""
        loss_fn = loss_fn or CrossEntropy()
        if accepts_argument(self, "output_fn"):
            output_fn = lambda hidden: self.loss_from_hidden(labels, hidden, loss_fn, scale)
            compute_loss: Any = partial(self, tokens, output_fn=output_fn, **options)
        else:  # a custom `forward`, or that of a probe, must compute the logits
            compute_loss = lambda: loss_fn(labels, self(tokens, **options), scale)
        add_loss = getattr(self.blocks[-1].mlp, "add_loss", None)  # of a mixture: the load-balancing loss of its router
        return compute_loss() if add_loss is None else add_loss(compute_loss, scale)

    def loss_from_hidden(self, labels: Operand, hidden: Tensor, loss_fn: Any, scale: Any = 1.0) -> Tensor:
        """Return `loss_fn(labels, logits(hidden), scale)`; many logits of a CrossEntropy in chunks of rows on a CPU."""
        if type(loss_fn) is not CrossEntropy or not accepts_argument(self.logits, "dtype"):
            return loss_fn(labels, self.logits(hidden), scale)
        dtype = None
        if grad_enabled_for(hidden) and not self.config.logit_cap:  # 16 bits suffice if the products have 16 bits
            dtype = activation_dtype(hidden, self.precision, *filter(None, (self.head, self.head_projection)))
        logits = partial(self.logits, dtype=dtype)
        n_rows = n_logit_rows(self.config.vocab_size, hasattr(self.token_embedding.weights.array, "dequantize_rows"))
        if hidden.on_gpu or math.prod(hidden.shape[:-1]) <= n_rows:
            return loss_fn(labels, logits(hidden), scale)
        return loss_fn.from_hidden(labels, hidden, logits, self.parameters(), n_rows, scale)

    def new_caches(self, dtype: DTypeLike | None = None) -> list[KeyValueCache]:
        """Return a list with an empty KV cache for each block; `dtype` defaults to that of the first keys."""
        ops = [getattr(getattr(block, "attention", None), "attention", None) for block in self.blocks]
        windows = [op.window if isinstance(op, Attention) and op.softmax.fused else None for op in ops]
        return [KeyValueCache(self.config.context_window, dtype, window) for window in windows]


def n_logit_rows(vocab_size: int, is_quantized: bool = False) -> int:
    """Return how many rows of logits a loss on a CPU stores at a time: 112 MB, 28 MB if quantized, but 256 at least."""
    return max(256, 7 * 2 ** (20 if is_quantized else 22) // vocab_size)  # products of fewer rows wait for the weights


def initialize_weights(model: BlockStack) -> None:
    """Draw matrices and embeddings in place as in GPT-2: std 0.02, or 0.02 / sqrt(2 n_layers) for output projections.

    That preserves the scale of the residual stream; with `zero_projections` they are 0 (Zhang et al. 2019, "Fixup").
    """
    config = model.config
    last = 0 if config.zero_projections else 0.02 / math.sqrt(2 * config.n_layers)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, Parameter) and parameter.role in RANDOM_ROLES:
            std = last if name.endswith(".projection.weights") else 0.02
            parameter.array[...] = normal(std)(parameter.shape, model.generator)
    for block in model.blocks if config.key_shift else ():
        block.attention.key_shift.correlate_keys(block.attention)
