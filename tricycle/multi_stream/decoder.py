"""The config and the block of a decoder with several residual streams.

Between its blocks, a transformer passes on one vector of C channels for each token, the residual stream. Here the
vector is longer. Everything that later blocks need is in it, so that a block remains a function of one Tensor, as
gradient checkpointing and the KV caches require:

- S streams of C channels, see `altup.AltUp`
- the keys and values of each earlier layer that later ones share, see `shared_keys.SharedKeyAttention`
- the per-layer inputs of this block and the later ones, see `per_layer.PerLayerInputs`; each block removes its own

Shapes: B batch, T tokens, S streams, C channels of a stream, P channels of a per-layer input, W of the whole vector.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tricycle.activation import new_activation
from tricycle.attention.attend import Mask
from tricycle.attention.cache import KeyValueCache, takes_ragged
from tricycle.attention.rotary import POSITIONS
from tricycle.blocks import TransformerBlock
from tricycle.configs.model import ModelConfig, Norm, NormPlacement
from tricycle.configs.validated import OneOf
from tricycle.extra_ops import concatenate, split_sizes
from tricycle.layers import Layer
from tricycle.multi_stream.altup import AltUp, StreamProjections
from tricycle.multi_stream.laurel import LowRankResidual
from tricycle.multi_stream.per_layer import PerLayerGate, PerLayerInputs
from tricycle.multi_stream.shared_keys import SharedKeyAttention
from tricycle.multi_stream.sparsity import GaussianTopK
from tricycle.ops import as_tensor, reshape
from tricycle.tensor import Operand, Tensor

UNSUPPORTED = ("n_experts", "token_shift", "key_shift", "unrotated_layers", "embedding_size", "norm_unit_offset")


@dataclass(frozen=True)
class MultiStreamConfig(ModelConfig):
    """The architecture of a decoder with several residual streams. The defaults are those of Gemma 3n E4B.

    Blocks have gated MLPs, norms before and after attention and MLP, and norms of queries, keys and values. Layers may
    have MLPs of different widths: in a MatFormer (Devvrit et al. 2023), the first hidden channels of each MLP form a
    smaller MLP that is trained, too, so that smaller models can be cut out of a large one.
    """

    vocab_size: int = 262_400
    context_window: int = 32_768
    embedding_dim: int = 2048
    n_heads: int = 8
    n_key_heads: int = 2
    head_size: int = 256
    n_layers: int = 35
    hidden_size: int = 16_384
    gated: bool = True
    norm: Norm = "rms_norm"
    norm_eps: float = 1e-6
    norm_placement: NormPlacement = "both"
    positions: OneOf[str, POSITIONS] = "rotary"
    rotary_base: float = 1_000_000.0
    rotary_local_base: float = 10_000.0
    qk_norm: bool = True
    qk_norm_gain: bool = True
    window: int = 512
    full_layers: tuple[int, ...] = (4, 9, 14, 19, 24, 29, 34)
    score_scale: float = 1.0
    bias: bool = False
    embedding_scale: float = 2048**0.5
    logit_cap: float = 30.0
    # ---- fields of several streams only
    n_streams: int = 4  # residual streams, of which attention and MLP compute the first (AltUp)
    residual_rank: int = 64  # rank of the learned part of the residual connection (LAuReL)
    per_layer_size: int = 256  # channels of the input that each layer has for each token
    per_layer_rows: int = 262_144  # rows of the embedding table of per-layer inputs; other tokens have row 0
    n_shared_layers: int = 15  # last layers, with the keys and values of earlier ones
    sparsity: tuple[float, ...] = (0.95,) * 10 + (0.0,) * 25  # fraction of MLP gates set to 0, by layer; () for 0
    hidden_sizes: tuple[int, ...] = ()  # width of the MLP's hidden layer, by layer (MatFormer); () for hidden_size

    def __post_init__(self) -> None:
        super().__post_init__()
        n_layers, lengths = self.n_layers, (0, self.n_layers)
        for name in ("n_streams", "residual_rank", "per_layer_size", "per_layer_rows"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        is_plain = self.activation not in ("swiglu", "clamped_swiglu")
        for name, holds, rule in (
            ("n_shared_layers", 0 <= self.n_shared_layers < n_layers, f"from 0 to {n_layers - 1}"),
            ("n_shared_layers", None not in self.sources, "fewer, as a shared layer's window has no earlier layer"),
            ("sparsity", len(self.sparsity) in lengths, f"empty or {n_layers} numbers"),
            ("sparsity", all(0 <= value < 1 for value in self.sparsity), "numbers from 0 to below 1"),
            ("hidden_sizes", len(self.hidden_sizes) in lengths, f"empty or {n_layers} whole numbers"),
            ("hidden_sizes", all(size >= 1 for size in self.hidden_sizes), "whole numbers of at least 1"),
            ("gated", self.gated, "True with several streams"),
            ("activation", is_plain, "one without a gate"),
            ("norm", self.norm == "rms_norm", "rms_norm with several streams"),
            ("norm_placement", self.norm_placement == "both", "both with several streams"),
            ("positions", self.positions == "rotary", "rotary with several streams"),
            *((name, getattr(self, name), "True with several streams") for name in ("qk_norm", "qk_norm_gain")),
            ("qk_norm_per_head", self.qk_norm_per_head, "True with several streams"),
            ("residual_scale", self.residual_scale == 1, "1 with several streams"),
            *((name, not getattr(self, name), "unset with several streams") for name in UNSUPPORTED),
        ):
            self._require(name, bool(holds), rule)

    def source(self, layer: int) -> int | None:
        """Return the layer that computes the keys and values of a layer: itself, or an earlier one, None if missing."""
        first, window = self.n_layers - self.n_shared_layers, self.window_size(layer)
        earlier = (i for i in reversed(range(first)) if self.window_size(i) == window)
        return layer if layer < first else next(earlier, None)

    @property
    def sources(self) -> list[int | None]:
        """The layers, in order, whose keys and values are shared by later ones."""
        shared = range(max(0, self.n_layers - self.n_shared_layers), self.n_layers)
        layers = {self.window_size(layer): layer for layer in shared}  # one for each window, at most two
        return sorted({self.source(layer) for layer in layers.values()}, key=lambda i: -1 if i is None else i)

    def state_sizes(self, layer: int) -> list[int]:
        """Return the channels of the parts of a layer's input: streams, shared keys and values, per-layer inputs."""
        n_shared = len([source for source in self.sources if source is not None and source < layer])
        kv_size = 2 * self.key_heads * self.channels_per_head
        later = (self.n_layers - layer) * self.per_layer_size
        return [self.n_streams * self.embedding_dim, *[kv_size] * n_shared, later]

    @property
    def min_layer_weights(self) -> int:
        """A lower bound of the mean number of weights of a layer, with its share of those outside the layers."""
        width, n_streams = self.embedding_dim, self.n_streams
        own = 2 * self.n_heads * self.channels_per_head + 3 * min(self.hidden_sizes, default=self.mlp_width)
        own += 2 * self.residual_rank + 3 * self.per_layer_size + n_streams
        projections = 2 * (n_streams - 1) * width**2 // self.n_layers
        return width * own + n_streams**3 + self.per_layer_rows * self.per_layer_size + projections

    def new_block(self, layer: int, **options: Any) -> TransformerBlock:
        """Make the block of a layer."""
        width = self.hidden_sizes[layer] if self.hidden_sizes else self.mlp_width
        return MultiStreamBlock(replace(self, hidden_size=width), layer, **options)

    def new_streams(self, **options: Any) -> Layer:
        """Make the layer that converts token embeddings to the input of the first block, and the last result back."""
        return Streams(self, **options)


class MultiStreamBlock(TransformerBlock):
    """A block of attention and MLP for the first of several streams, with AltUp, LAuReL and a per-layer input.

    Args:
        config: of the model, with the `hidden_size` of the layer. layer: the index of the block.
        options: `initialiser` and `generator`, of the initial weights.
    """

    def __init__(self, config: MultiStreamConfig, layer: int, **options: Any) -> None:
        width, eps = config.embedding_dim, config.norm_eps
        source = config.source(layer)
        attention = SharedKeyAttention(config, layer, source == layer, **options)
        super().__init__(config, layer, attention=attention, **options)
        if config.sparsity and config.sparsity[layer]:
            self.mlp.activation = GaussianTopK(config.sparsity[layer], new_activation(config.activation))
        self.altup = AltUp(width, config.n_streams, eps, **options)
        self.laurel = LowRankResidual(width, config.residual_rank, eps, **options)
        self.per_layer = PerLayerGate(width, config.per_layer_size, config.activation, eps, **options)
        sizes = config.state_sizes(layer)
        self.sizes = [*sizes[:-1], config.per_layer_size, sizes[-1] - config.per_layer_size]
        self.source = None if source == layer else config.sources.index(source)  # among the shared keys and values
        self.is_source = layer in config.sources

    @takes_ragged
    def forward(self, x: Operand, cache: KeyValueCache | None = None, mask: Mask = None) -> Tensor:
        """Return the input (B, T, W) of the next block for x (B, T, W) or (T, W); extend the cache; see the module.

        Raises:
            ValueError: x has another number of channels.
        """
        x = as_tensor(x)
        if x.shape[-1] != sum(self.sizes):
            rule = f"{sum(self.sizes)} channels of all streams and inputs of later layers"
            raise ValueError(f"MultiStreamBlock: expected {rule}, got shape {x.shape}")
        rows = x if x.ndim == 3 else reshape(x, 1, *x.shape)
        joined, *shared, own, later = split_sizes(rows, self.sizes)
        width = self.altup.router_norm.size
        streams = reshape(joined, *rows.shape[:2], joined.shape[-1] // width, width)
        predicted = self.altup.predict(streams)
        normal = self.attention_norm(predicted[:, :, 0])
        kv = self.attention.project_kv(normal, cache) if self.source is None else shared[self.source]
        computed = self._run_sublayers(predicted[:, :, 0], normal, kv, cache, mask)
        corrected = self.altup.correct(predicted, computed)
        added = self.per_layer(corrected[:, :, 0], own)
        others = corrected[:, :, 1:] + reshape(added, *added.shape[:2], 1, width)
        parts = [reshape(concatenate([corrected[:, :, :1], others], axis=2), joined.shape), *shared]
        result = concatenate([*parts, *([kv] if self.is_source else []), later], axis=-1)
        return result if x.ndim == 3 else result[0]

    def _run_sublayers(self, x: Tensor, normal: Tensor, kv: Tensor, cache: KeyValueCache | None, mask: Mask) -> Tensor:
        """Return the result (B, T, C) of attention and MLP for the active stream x (B, T, C) and its norm."""
        attended = self.attention_post_norm(self.attention(normal, kv, cache, mask))
        x = (x + attended + self.laurel(normal)) * 0.5**0.5
        return self.add_sublayer(x, self.mlp, self.mlp_norm, self.mlp_post_norm)


class Streams(Layer):
    """The input of the first block, from tokens and their embeddings, and the result of the last block.

    Args:
        config: of the model. options: `initialiser` and `generator`, of the initial weights.
    """

    def __init__(self, config: MultiStreamConfig, **options: Any) -> None:
        width, size = config.embedding_dim, config.per_layer_size
        self.n_streams, self.width = config.n_streams, width
        self.projections = StreamProjections(width, config.n_streams, **options)
        self.per_layer = PerLayerInputs(config.per_layer_rows, width, config.n_layers, size, config.norm_eps, **options)

    def open(self, tokens: Tensor, x: Tensor) -> Tensor:
        """Return the first block's input (..., W) for tokens (...) and their embeddings x (..., C)."""
        return concatenate([self.projections.expand(x), self.per_layer(tokens, x)], axis=-1)

    def close(self, x: Tensor) -> Tensor:
        """Return what the last norm receives, (..., C), for the result (..., W) of the last or another block."""
        streams = x[..., : self.n_streams * self.width]
        return self.projections.merge(reshape(streams, *x.shape[:-1], self.n_streams, self.width))
