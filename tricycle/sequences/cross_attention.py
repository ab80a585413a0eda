"""Cross-attention, and the decoder block of encoder-decoder transformers.

Shapes: B batch, T tokens, S keys, C channels, H heads, D head size.
"""

from __future__ import annotations

from typing import Any

from tricycle.attention.attend import Attention, Mask, merge_heads
from tricycle.attention.cache import KeyValueCache, takes_ragged
from tricycle.attention.weights import scores_and_weights
from tricycle.blocks import MultiHead, TransformerBlock, new_norm
from tricycle.configs.model import ModelConfig
from tricycle.functions import RowSoftmax
from tricycle.initialisers import Initialiser, xavier
from tricycle.layers import Dense, Dropout, Generator, new_generator
from tricycle.ops import as_tensor, as_tensors, check_positive, reshape
from tricycle.softmaxes import new_softmax
from tricycle.tensor import Operand, Tensor


class MultiHeadAttention(MultiHead):
    """Multi-head attention of one sequence to another, with input and output projections.

    Source: Vaswani et al. 2017, section 3.2.2.

    Args:
        embedding_dim: C, the channels of queries and results, a multiple of n_heads unless `head_size` is given.
        n_heads: H.
        head_size: D; by default C / H.
        scale: the factor of the dot products of queries and keys; by default 1 / sqrt(D).
        key_size, value_size: the channels of keys and values; C if not given.
        bias: whether the projections add a bias.
        softmax: the attention normalizer: a name in `softmaxes.SOFTMAXES`, or an object.
        context_window: the most queries and keys, which the softmax variant "blocks" requires.
        dropout: probability of dropping an element of the result.
    """

    def __init__(
        self,
        embedding_dim: int,
        n_heads: int,
        *,
        head_size: int | None = None,
        scale: float | None = None,
        key_size: int | None = None,
        value_size: int | None = None,
        bias: bool = True,
        initialiser: Initialiser = xavier,
        generator: Generator = None,
        softmax: str | RowSoftmax = "softmax",
        context_window: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        check_positive("MultiHeadAttention", embedding_dim=embedding_dim, n_heads=n_heads)
        if head_size is None and embedding_dim % n_heads:
            got = f"{embedding_dim} and {n_heads}"
            raise ValueError(f"MultiHeadAttention: expected embedding_dim to be a multiple of n_heads, got {got}")
        generator = new_generator(generator)
        self.embedding_dim, self.n_heads, self.context_window = embedding_dim, n_heads, context_window
        self.attention = Attention("softmax", causal=False, scale=scale)
        inner = n_heads * (head_size or embedding_dim // n_heads)
        self.query = Dense(embedding_dim, inner, bias, initialiser, generator)
        self.key = Dense(key_size or embedding_dim, inner, bias, initialiser, generator)
        self.value = Dense(value_size or embedding_dim, inner, bias, initialiser, generator)
        self.projection = Dense(inner, embedding_dim, bias, initialiser, generator)
        self.dropout = Dropout(dropout, generator)
        self.use_softmax(softmax)

    def project_kv(self, key: Operand, value: Operand | None = None) -> tuple[Tensor, Tensor]:
        """Return the projected keys and values, both (B, S, H * D); in decoding they are computed once for all queries.

        Args:
            key: (B, S, key_size). value: (B, S, value_size); the keys if not given.
        """
        return self.key(key), self.value(key if value is None else value)

    def forward(
        self,
        query: Operand,
        key: Operand | None = None,
        value: Operand | None = None,
        mask: Mask = None,
        kv: tuple[Tensor, Tensor] | None = None,
        return_weights: bool = False,
    ) -> Any:
        """Attend to `key` or `kv`, else ValueError; return (B, T, C), with `return_weights` also (B, H, T, S).

        Args:
            query: (B, T, C). key, value: see `project_kv`.
            mask: True where a query may attend to a key, in a form that `attention.additive_mask` accepts.
            kv: the result of `project_kv`, in place of key and value.
        """
        if kv is None:
            if key is None:
                raise ValueError("MultiHeadAttention: expected either keys or the result of `project_kv`, got neither")
            kv = self.project_kv(key, value)
        elif key is not None:
            raise ValueError("MultiHeadAttention: expected either keys or kv, got both")
        q, k, v = (self._heads(part) for part in (self.query(query), *kv))
        arguments = (q, k, v, mask, self.softmax_scales, self.precision)
        out = self.dropout(self.projection(merge_heads(self.attention(*arguments))))
        return (out, scores_and_weights(self.attention, *arguments)[1]) if return_weights else out

    def _heads(self, x: Operand) -> Tensor:
        """Split the channels into heads: (B, T, C) to (B, T, H, D); ValueError unless there are three axes."""
        (x,) = as_tensors(x)
        if x.ndim != 3:
            raise ValueError(f"MultiHeadAttention: expected shape (batch, tokens, channels), got {x.shape}")
        return reshape(x, *x.shape[:2], self.n_heads, x.shape[2] // self.n_heads)


class DecoderBlock(TransformerBlock):
    """A decoder block: self-attention, cross-attention to the encoder, MLP (Vaswani et al. 2017, section 3.1).

    Args:
        config, layer, initialiser, generator: see `TransformerBlock`.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int = 0,
        *,
        initialiser: Initialiser = xavier,
        generator: Generator = None,
    ) -> None:
        generator = new_generator(generator)
        super().__init__(config, layer, initialiser=initialiser, generator=generator)
        self.cross_norm = new_norm(config)
        self.cross: Any = MultiHeadAttention(
            config.embedding_dim,
            config.n_heads,
            head_size=config.channels_per_head,
            scale=config.score_scale or None,
            bias=config.bias,
            softmax=new_softmax(config.softmax, config),
            context_window=config.context_window,
            dropout=config.dropout,
            initialiser=initialiser,
            generator=generator,
        )
        self.cross_post_norm = new_norm(config) if config.norm_placement == "both" else None

    @takes_ragged
    def forward(
        self,
        x: Operand,
        cache: KeyValueCache | None = None,
        mask: Mask = None,
        kv: tuple[Tensor, Tensor] | None = None,
        kv_mask: Mask = None,
    ) -> Tensor:
        """Return x (B, T, C) after self-attention, cross-attention to `kv` (ValueError for None), MLP, with residuals.

        Args:
            cache, mask: see `TransformerBlock`.
            kv: the result of `cross.project_kv` for the encoder's output.
            kv_mask: which positions of the encoder's output may be attended to.

        Raises:
            ValueError: kv is None.
        """
        if kv is None:
            raise ValueError("DecoderBlock: expected the result of `cross.project_kv`, got None")
        x = as_tensor(x)

        def cross(normed: Tensor) -> Tensor:
            return self.cross(normed, mask=kv_mask, kv=kv)

        x = self.add_sublayer(x, self.attention, self.attention_norm, self.attention_post_norm, cache, mask)
        x = self.add_sublayer(x, cross, self.cross_norm, self.cross_post_norm)
        return self.add_sublayer(x, self.mlp, self.mlp_norm, self.mlp_post_norm)
