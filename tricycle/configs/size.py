"""The size of a model, computed from its config."""

from __future__ import annotations

from typing import Any

from tricycle.configs.model import ModelConfig


def min_n_weights(config: ModelConfig) -> int:
    """Return a lower bound of a model's number of weights: its matrices and embedding tables, no biases or norms."""
    width = config.embedding_dim
    heads = config.n_heads * config.channels_per_head
    key_heads = config.key_heads * config.channels_per_head
    attention = width * (2 * heads + 2 * key_heads)
    mlp = width * config.mlp_width * (3 if config.is_gated else 2)
    if config.n_experts:
        mlp = config.n_experts * (mlp + width)  # with the router
    mlp += 2 * width * getattr(config, "shared_size", 0)
    layers = config.n_layers * getattr(config, "min_layer_weights", attention + mlp)
    hybrid: Any = config
    if hasattr(config, "mixer_weights"):  # a Mamba's
        n_mixers = config.n_layers - len({*hybrid.attention_layers})
        layers += n_mixers * (hybrid.mixer_weights - attention - (0 if hybrid.mamba_mlp else mlp))
    positions = (config.context_window + config.position_offset) * width if config.positions == "learned" else 0
    types = getattr(config, "token_types", 0) * width  # an encoder's
    tokens = config.vocab_size * (config.embedding_size or width)
    decoder = getattr(config, "n_decoder_layers", 0) * (2 * attention + mlp)  # an encoder-decoder's
    return tokens + positions + types + layers + decoder
