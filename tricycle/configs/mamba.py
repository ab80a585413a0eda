"""`MambaConfig`: the architecture of a Mamba-2 model, or of a hybrid with attention in some layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tricycle.attention.rotary import POSITIONS
from tricycle.configs.model import ModelConfig, Norm
from tricycle.configs.validated import OneOf

BLOCKS: dict[str, Callable[..., Any]] = {}  # constructors of blocks; `tricycle.state_spaces.mamba` adds its own

# Layers with attention are the usual transformer blocks, so all fields of `ModelConfig` are about them.


@dataclass(frozen=True)
class MambaConfig(ModelConfig):
    """The architecture of a Mamba-2 model: n_heads heads of head_size channels, with a state of head_size x state_size.

    The defaults are those of the model with 130M parameters (Dao and Gu 2024).
    """

    vocab_size: int = 50_288
    context_window: int = 2**20
    n_heads: int = 24
    head_size: int = 64
    n_layers: int = 24
    norm: Norm = "rms_norm"
    positions: OneOf[str, POSITIONS] = "none"
    bias: bool = False
    # ---- fields of Mamba only
    state_size: int = 128  # channels of keys and queries (B and C)
    n_groups: int = 1  # groups of heads that share keys and queries
    conv_width: int = 4  # tokens that the convolution before the scan sees
    conv_bias: bool = True  # whether the convolution has a bias
    chunk_size: int = 32  # tokens that the scan computes as attention
    attention_layers: tuple[int, ...] = ()  # layers, counted from 0, that are transformer blocks
    n_mamba_heads: int = 0  # heads of a Mamba layer; 0 for n_heads
    mamba_head_size: int = 0  # channels per head of a Mamba layer; 0 for those of attention
    mamba_mlp: bool = False  # whether Mamba layers, too, have an MLP (or experts)
    shared_size: int = 0  # hidden width of an MLP that processes all tokens beside the experts; 0 for none

    def __post_init__(self) -> None:
        """Check the fields as `ModelConfig`, and those of Mamba layers; ValueError for the first invalid one."""
        super().__post_init__()
        for name in ("state_size", "n_groups", "conv_width", "chunk_size"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("n_mamba_heads", "mamba_head_size", "shared_size"):
            self._require(name, getattr(self, name) >= 0, "0 or more")
        n_heads = self.mamba_heads
        self._require("n_groups", n_heads % self.n_groups == 0, f"a divisor of the {n_heads} heads of a Mamba layer")
        self._require("shared_size", self.n_experts > 0 or self.shared_size == 0, "0 without n_experts")
        self._require("key_shift", not self.key_shift, "False")
        self._require("norm_placement", self.norm_placement == "before", "before")
        self._require("parallel", not (self.parallel and self.mamba_mlp), "False with mamba_mlp")
        last = self.n_layers - 1
        self._require(
            "attention_layers", all(0 <= layer <= last for layer in self.attention_layers), f"layers from 0 to {last}"
        )

    @property
    def mamba_heads(self) -> int:
        """The number of heads of a Mamba layer: `n_mamba_heads`, or `n_heads` if it is 0."""
        return self.n_mamba_heads or self.n_heads

    @property
    def channels_per_mamba_head(self) -> int:
        """The number of channels of a head of a Mamba layer; if `mamba_head_size` is 0, those of an attention head."""
        return self.mamba_head_size or self.channels_per_head

    @property
    def inner_size(self) -> int:
        """The number of channels of all heads of a Mamba layer."""
        return self.mamba_heads * self.channels_per_mamba_head

    @property
    def conv_size(self) -> int:
        """The number of channels of the convolution: values, and each group's keys and queries."""
        return self.inner_size + 2 * self.n_groups * self.state_size

    @property
    def mixer_weights(self) -> int:
        """A lower bound of the number of weights of a Mamba mixer."""
        kernels = self.conv_width * self.conv_size
        return kernels + self.embedding_dim * (2 * self.inner_size + self.conv_size + self.mamba_heads)

    def new_block(self, layer: int, **options: Any) -> Any:
        """Make the block of a layer: a `TransformerBlock` if it has attention, else a `MambaBlock`."""
        return BLOCKS["mamba"](self, layer, **options)
