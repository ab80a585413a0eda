"""The size of a model, computed from its config."""

from __future__ import annotations

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
    per_layer = getattr(config, "min_layer_weights", attention + mlp)  # a Mamba's, at most those of its other layers
    positions = (config.context_window + config.position_offset) * width if config.positions == "learned" else 0
    types = getattr(config, "token_types", 0) * width  # an encoder's
    tokens = config.vocab_size * (config.embedding_size or width)
    decoder = getattr(config, "n_decoder_layers", 0) * (2 * attention + mlp)  # an encoder-decoder's
    return tokens + positions + types + config.n_layers * per_layer + decoder
