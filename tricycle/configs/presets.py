"""`GPTConfig`, a model and its training in one config, and the presets of the command line."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Self

from tricycle.activation import ACTIVATIONS
from tricycle.attention.rotary import POSITIONS
from tricycle.configs.encoder_decoder import EncoderDecoderConfig
from tricycle.configs.mamba import MambaConfig
from tricycle.configs.model import ModelConfig, Norm
from tricycle.configs.training import TrainingConfig
from tricycle.configs.validated import OneOf
from tricycle.optimiser_rules import OPTIMISERS
from tricycle.optimiser_rules.schedules import SCHEDULES

# Modules with further subclasses of `GPTConfig`; they import layers, so they are imported only for their fields.
MODULES = ("tricycle.state_spaces.delta_net", "tricycle.latent_attention")


@dataclass(frozen=True)
class GPTConfig(TrainingConfig, ModelConfig):
    """The architecture and the training of a GPT. The defaults are GPT-2's (124M parameters)."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Make a config from the dict of `to_dict`, of this class or the first subclass that has all its fields.

        Raises:
            ValueError: a field that is unknown, or has an invalid value.
        """
        if not cls._kinds_with(values):
            for module in MODULES:
                import_module(module)
        kinds = cls._kinds_with(values)
        return super().from_dict(values) if cls in kinds or not kinds else kinds[0].from_dict(values)

    @classmethod
    def _kinds_with(cls, values: dict[str, Any]) -> list[type[Self]]:
        """Return this class and its known subclasses that have all fields of a dict."""
        return [kind for kind in (cls, *cls.__subclasses__()) if values.keys() <= kind.__dataclass_fields__.keys()]


@dataclass(frozen=True)
class MambaTrainingConfig(GPTConfig, MambaConfig):
    """The architecture and the training of a Mamba-2 model, or of a hybrid with attention in some layers."""


@dataclass(frozen=True)
class EncoderDecoderTrainingConfig(GPTConfig, EncoderDecoderConfig):
    """The architecture and the training of an encoder-decoder, which continues texts: see `source_tokens`."""

    def __post_init__(self) -> None:
        """Check the fields of model and training, `recompute` to be False; raise a ValueError for an invalid one."""
        super().__post_init__()
        self._require("recompute", not self.recompute, "False in an encoder-decoder")

    def new_model(self, draw_weights: bool = True) -> Any:
        """Make the `EncoderDecoderTransformer`; draw its weights as a `GPT`'s, or leave matrices at 0."""
        from tricycle.models import initialize_weights  # imported here, because both modules import this package
        from tricycle.sequences.seq2seq import EncoderDecoderTransformer

        model: Any = EncoderDecoderTransformer(self, draw_weights=False)
        if draw_weights:
            initialize_weights(model)
        return model


@dataclass(frozen=True)
class DebugConfig(GPTConfig):
    """A tiny model that trains in a few seconds on any machine, to test that everything runs."""

    vocab_size: int = 300
    context_window: int = 32
    embedding_dim: int = 32
    n_heads: int = 2
    n_layers: int = 2
    batch_size: int = 4
    steps: int = 40
    max_learning_rate: float = 3e-3
    min_learning_rate: float = 3e-4
    warmup_steps: int = 5
    eval_interval: int = 20
    eval_batches: int = 4
    sample_interval: int = 20


@dataclass(frozen=True)
class LaptopConfig(GPTConfig):
    """A model of 2.9M parameters for about ten minutes on two CPU cores; ablations: experiments/ten_minutes."""

    vocab_size: int = 8192
    context_window: int = 512
    embedding_dim: int = 192
    n_heads: int = 3
    n_layers: int = 3
    activation: OneOf[str, ACTIVATIONS] = "relu_squared"
    norm: Norm = "rms_norm"
    positions: OneOf[str, POSITIONS] = "rotary"
    rotary_fraction: float = 0.5
    qk_norm: bool = True
    score_scale: float = 0.25
    token_shift: bool = True
    key_shift: bool = True
    bias: bool = False
    zero_projections: bool = True
    batch_size: int = 6
    optimiser: OneOf[str, OPTIMISERS] = "muon"
    matrix_rate: float = 2.5
    schedule: OneOf[str, SCHEDULES] = "linear"
    steps: int = 0
    minutes: float = 10.0
    max_learning_rate: float = 8e-3
    min_learning_rate: float = 0.0
    warmup_steps: int = 40
    beta2: float = 0.99
    max_gradient_norm: float = 0.0
    eval_interval: int = 500
    eval_batches: int = 8
    sample_interval: int = 1000


@dataclass(frozen=True)
class PortableConfig(LaptopConfig):
    """A variant of "laptop" with Llama's architecture, for export to other programs (docs/pretrained.md)."""

    vocab_size: int = 1024
    context_window: int = 256
    n_layers: int = 4
    activation: OneOf[str, ACTIVATIONS] = "swish"
    gated: bool = True
    rotary_fraction: float = 1.0
    qk_norm: bool = False
    score_scale: float = 0.0
    token_shift: bool = False
    key_shift: bool = False
    matrix_rate: float = 1.25
    max_learning_rate: float = 8e-3
    eval_interval: int = 1000
    sample_interval: int = 2000


@dataclass(frozen=True)
class MixtureConfig(PortableConfig):
    """A variant of "portable" with Mixtral's architecture: of 8 experts per block, each half as wide, 2 are active."""

    n_experts: int = 8
    hidden_size: int = 256


@dataclass(frozen=True)
class HybridConfig(PortableConfig, MambaTrainingConfig):
    """A variant of "portable" with Mamba-2 layers and attention in two of six; of nearly as many parameters."""

    n_layers: int = 6
    n_heads: int = 6
    head_size: int = 64
    n_key_heads: int = 2
    hidden_size: int = 416
    state_size: int = 32
    attention_layers: tuple[int, ...] = (2, 5)


@dataclass(frozen=True)
class ContinuationConfig(PortableConfig, EncoderDecoderTrainingConfig):
    """A variant of "portable" with an encoder and a decoder of two blocks each; of nearly as many parameters."""

    n_layers: int = 2
    hidden_size: int = 416


@dataclass(frozen=True)
class ShakespeareConfig(GPTConfig):
    """A model of 12M parameters for tiny Shakespeare on a GPU."""

    vocab_size: int = 1024
    context_window: int = 256
    embedding_dim: int = 384
    n_heads: int = 6
    n_layers: int = 6
    tied: bool = False
    dropout: float = 0.2
    batch_size: int = 64
    steps: int = 5000
    max_learning_rate: float = 1e-3
    min_learning_rate: float = 1e-4
    warmup_steps: int = 100
    beta2: float = 0.99
    eval_interval: int = 250
    sample_interval: int = 1000


@dataclass(frozen=True)
class SmolGPTConfig(GPTConfig):
    """A model of 49M parameters with GPT-2's vocabulary, for a GPU."""

    context_window: int = 256
    embedding_dim: int = 384
    n_heads: int = 6
    n_layers: int = 6
    tied: bool = False
    dropout: float = 0.2
    batch_size: int = 64
    steps: int = 75_000


@dataclass(frozen=True)
class GPT2Config(GPTConfig):
    """GPT-2 with 124M parameters (Radford et al. 2019)."""


PRESETS: dict[str, type[GPTConfig]] = {
    "debug": DebugConfig,
    "laptop": LaptopConfig,
    "portable": PortableConfig,
    "mixture": MixtureConfig,
    "mamba": HybridConfig,
    "encoder_decoder": ContinuationConfig,
    "shakespeare": ShakespeareConfig,
    "smol": SmolGPTConfig,
    "gpt2": GPT2Config,
}


def model_fields(values: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a dict that are fields of `ModelConfig`."""
    return {name: value for name, value in values.items() if name in ModelConfig.__dataclass_fields__}


def trainable_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of a decoder's config but those of training, for `GPTConfig.from_dict`; else ValueError."""
    if not config.is_decoder:
        raise ValueError(f"expected a model without an encoder, got one with the config {type(config).__name__}")
    return {name: value for name, value in config.to_dict().items() if name not in TrainingConfig.__dataclass_fields__}
