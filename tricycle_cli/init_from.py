"""Training on from a model that somebody has trained: its shape, its weights and its tokeniser."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tricycle.configs import GPTConfig, LaptopConfig
from tricycle.configs.model import ModelConfig
from tricycle.configs.presets import model_fields
from tricycle.models import GPT
from tricycle.pretrained import Pretrained
from tricycle_cli.models import load_model

# What may differ from the model's own config; the rest is its shape.
FREE = ("context_window", "dropout", "precision", "softmax", "softmax_blocks", "seed")
# Gentle steps: what a model knows is soon forgotten.
TRAINING: dict[str, Any] = {
    "batch_size": 4,
    "optimiser": "adamw",
    "max_learning_rate": 5e-5,
    "min_learning_rate": 0.0,
    "warmup_steps": 20,
    "minutes": LaptopConfig.minutes,
    "steps": 0,
}
LONGEST_WINDOW = 512  # unless a longer one is asked for: memory grows with it


def load_base_model(source: str) -> Pretrained:
    """The model to begin with, on the CPU; its weights are float32, for they are to change."""
    return load_model(source, device="cpu")


def default_config(model: GPT) -> GPTConfig:
    """What flags start from: the model's shape, and settings of training that suit a model that is trained already."""
    shape = model_fields(model.config.to_dict())
    window = min(model.config.context_window, LONGEST_WINDOW)
    return GPTConfig.from_dict({**shape, **TRAINING, "context_window": window})


def check_shape(model: GPT, config: GPTConfig) -> None:
    """Raise ValueError, which names the flag, where a field contradicts the model's shape."""
    own = model.config
    for name in ModelConfig.__dataclass_fields__:
        wanted, stated = getattr(own, name), getattr(config, name)
        if name not in FREE and stated != wanted:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"expected {flag} to be {wanted}, as the model of --init-from has it, got {stated}")
    if config.context_window > own.context_window:
        raise ValueError(
            f"expected --context-window to be at most {own.context_window}, as the model of --init-from has it, "
            f"got {config.context_window}"
        )


def initialize_from(model: GPT, config: GPTConfig) -> GPT:
    """Return a model of this config with the weights of another; raise ValueError unless it has the same shape."""
    check_shape(model, config)
    own = model.config
    started = GPT(replace(config, softmax=own.softmax, softmax_blocks=own.softmax_blocks), draw_weights=False)
    weights = model.state_dict()
    for name, parameter in started.named_parameters():
        if name == "position_embedding.weights":  # a smaller window needs the first positions
            weights[name] = weights[name][: len(parameter.array)]
    started.load_state_dict(weights)
    if (config.softmax, config.softmax_blocks) != (own.softmax, own.softmax_blocks):  # else what it has learnt stays
        started.use_softmax(config.softmax, config.softmax_blocks)
    started.config = config
    return started
