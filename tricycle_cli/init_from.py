"""Initialize training from a pretrained model: its shape, weights and tokenizer (`tricycle train --init-from`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tricycle.configs import GPTConfig, LaptopConfig
from tricycle.configs.presets import trainable_fields
from tricycle.models import GPT

# Fields that may differ from the model's config; the other fields are its shape.
FREE_FIELDS = ("context_window", "dropout", "precision", "softmax", "softmax_blocks", "seed")
# Low learning rates, because high ones destroy what the model has learned.
TRAINING: dict[str, Any] = {
    "batch_size": 4,
    "optimiser": "adamw",
    "max_learning_rate": 5e-5,
    "min_learning_rate": 0.0,
    "warmup_steps": 20,
    "minutes": LaptopConfig.minutes,
    "steps": 0,
}
MAX_DEFAULT_WINDOW = 512  # memory grows with the context window


def default_config(model: GPT) -> GPTConfig:
    """Return a training config with the model's shape, settings for pretrained models, and a capped context window."""
    shape = trainable_fields(model.config)
    window = min(model.config.context_window, MAX_DEFAULT_WINDOW)
    return GPTConfig.from_dict({**shape, **TRAINING, "context_window": window})


def check_shape(model: GPT, config: GPTConfig) -> None:
    """Raise ValueError if the config has another architecture than the model, or a longer context window."""
    own = model.config
    for name in trainable_fields(own):
        expected, given = getattr(own, name), getattr(config, name)
        if name not in FREE_FIELDS and given != expected:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"expected {flag} to be {expected}, like the model of --init-from, got {given}")
    if config.context_window > own.context_window:
        rule = f"at most {own.context_window}, like the model of --init-from"
        raise ValueError(f"expected --context-window to be {rule}, got {config.context_window}")


def initialize_from(model: GPT, config: GPTConfig) -> GPT:
    """Return a new GPT of this config with a model's weights; softmax or shorter window may differ, else ValueError."""
    check_shape(model, config)
    own = model.config
    started = GPT(replace(config, softmax=own.softmax, softmax_blocks=own.softmax_blocks), draw_weights=False)
    weights, positions = model.state_dict(), "position_embedding.weights"
    if positions in weights:  # a smaller context window has the first positions only
        weights[positions] = weights[positions][: len(started.position_embedding.weights.array)]
    started.load_state_dict(weights)
    same_softmax = (config.softmax, config.softmax_blocks) == (own.softmax, own.softmax_blocks)
    if not same_softmax:  # else keep learned parameters
        started.use_softmax(config.softmax, config.softmax_blocks)
    started.config = config
    return started
