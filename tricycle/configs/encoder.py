"""The shape of an encoder, such as BERT's."""

from __future__ import annotations

from dataclasses import dataclass

from tricycle.activation import ACTIVATIONS
from tricycle.configs.model import ModelConfig, NormPlacement
from tricycle.configs.validated import OneOf

# Fields of a head, or of attention that is causal.
DECODER_FIELDS = "window full_layers token_shift key_shift tied head_bias embedding_size logit_cap".split()


@dataclass(frozen=True)
class EncoderConfig(ModelConfig):
    """A transformer with bidirectional attention and without a head. The defaults are BERT's (109M parameters)."""

    is_decoder = False

    vocab_size: int = 30_522
    context_window: int = 512
    activation: OneOf[str, ACTIVATIONS] = "gelu_exact"
    norm_eps: float = 1e-12
    norm_placement: NormPlacement = "after"
    # ---- an encoder's own
    token_types: int = 2  # kinds of tokens, each with a vector, such as those of a first and a second text; 0 for none
    embedding_norm: bool = True  # whether embeddings are normed before the first block

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("token_types", self.token_types >= 0, "0 or more")
        for name in DECODER_FIELDS:
            usual = ModelConfig.__dataclass_fields__[name].default
            self._require(name, getattr(self, name) == usual, f"{usual!r} in an encoder")
