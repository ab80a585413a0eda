"""Model shapes that the training benchmarks share."""

from __future__ import annotations

from tricycle.configs import GPTConfig

SHAPES = {
    "tiny": GPTConfig(vocab_size=256, context_window=32, embedding_dim=32, n_heads=2, n_layers=2, batch_size=2),
    "XS": GPTConfig(
        vocab_size=1024, context_window=64, embedding_dim=256, n_heads=4, n_layers=4, batch_size=4, tied=False
    ),
    "S": GPTConfig(
        vocab_size=1024, context_window=256, embedding_dim=384, n_heads=6, n_layers=6, batch_size=16, tied=False
    ),
    "M": GPTConfig(
        vocab_size=16_384, context_window=512, embedding_dim=512, n_heads=8, n_layers=8, batch_size=4, tied=False
    ),
    "L": GPTConfig(vocab_size=50_304, context_window=256, batch_size=2),
}
