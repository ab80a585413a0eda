"""Validated configurations: of model architectures, of training, and of both; with presets."""

from tricycle.configs.encoder import EncoderConfig
from tricycle.configs.model import ModelConfig
from tricycle.configs.presets import (
    PRESETS,
    ContinuationConfig,
    DebugConfig,
    GPT2Config,
    GPTConfig,
    HybridConfig,
    LaptopConfig,
    MixtureConfig,
    PortableConfig,
    ShakespeareConfig,
    SmolGPTConfig,
)
from tricycle.configs.training import TrainingConfig

__all__ = [
    "PRESETS",
    "ContinuationConfig",
    "DebugConfig",
    "EncoderConfig",
    "GPT2Config",
    "GPTConfig",
    "HybridConfig",
    "LaptopConfig",
    "MixtureConfig",
    "ModelConfig",
    "PortableConfig",
    "ShakespeareConfig",
    "SmolGPTConfig",
    "TrainingConfig",
]
