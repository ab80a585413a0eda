"""Configurations: the shape of a model, how it is trained, and both together, checked when they are made."""

from tricycle.configs.encoder import EncoderConfig
from tricycle.configs.model import ModelConfig
from tricycle.configs.presets import (
    PRESETS,
    DebugConfig,
    GPT2Config,
    GPTConfig,
    LaptopConfig,
    PortableConfig,
    ShakespeareConfig,
    SmolGPTConfig,
)
from tricycle.configs.training import TrainingConfig

__all__ = [
    "PRESETS",
    "DebugConfig",
    "EncoderConfig",
    "GPT2Config",
    "GPTConfig",
    "LaptopConfig",
    "ModelConfig",
    "PortableConfig",
    "ShakespeareConfig",
    "SmolGPTConfig",
    "TrainingConfig",
]
