"""`EncoderConfig`: the architecture of an encoder, such as BERT."""

from __future__ import annotations

from dataclasses import dataclass

from tricycle.activation import ACTIVATIONS
from tricycle.configs.model import ModelConfig, NormPlacement
from tricycle.configs.validated import OneOf

# Fields that apply only to causal attention or to an output head.
DECODER_FIELDS = "token_shift key_shift tied head_bias embedding_size logit_scale logit_cap".split()


@dataclass(frozen=True)
class EncoderConfig(ModelConfig):
    """The architecture of a bidirectional encoder without a head. The defaults are BERT's (109M parameters).

    With a `window`, a token attends to `window // 2` tokens on each side.
    """

    is_decoder = False

    vocab_size: int = 30_522
    context_window: int = 512
    activation: OneOf[str, ACTIVATIONS] = "gelu_exact"
    norm_eps: float = 1e-12
    norm_placement: NormPlacement = "after"
    # ---- fields of encoders only
    token_types: int = 2  # number of token type embeddings, such as for a first and a second text; 0 for none
    embedding_norm: bool = True  # whether the embeddings are normalized before the first block
    first_norm: bool = True  # whether the first block has a norm before attention

    def __post_init__(self) -> None:
        """Check the fields; raise a ValueError for an invalid one, or a decoder's field that is not at its default."""
        super().__post_init__()
        with_first_norm = self.first_norm or self.norm_placement == "before"
        self._require("first_norm", with_first_norm, "True unless norm_placement is before")
        self._require("token_types", self.token_types >= 0, "0 or more")
        for name in DECODER_FIELDS:
            usual = ModelConfig.__dataclass_fields__[name].default
            self._require(name, getattr(self, name) == usual, f"{usual!r} in an encoder")
