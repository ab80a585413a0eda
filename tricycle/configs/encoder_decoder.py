"""`EncoderDecoderConfig`: the architecture of an encoder-decoder transformer, such as T5, BART and Marian."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tricycle.configs.model import ModelConfig

# Fields of decoder-only models that the blocks or the embedding of an encoder-decoder do not support.
UNSUPPORTED_FIELDS = """
window full_layers token_shift key_shift parallel embedding_size logit_scale logit_cap n_experts
""".split()
Sinusoids = Literal["none", "interleaved", "halves"]


@dataclass(frozen=True)
class EncoderDecoderConfig(ModelConfig):
    """The architecture of an encoder-decoder transformer; encoder and decoder have equal widths and one vocabulary."""

    is_decoder = False

    # ---- fields of encoder-decoders only
    n_decoder_layers: int = 0  # blocks of the decoder; 0 for n_layers, which are those of the encoder
    relative_buckets: int = 0  # rows of the table of relative position biases; 0 for none
    relative_distance: int = 128  # larger distances share the last bucket
    sinusoids: Sinusoids = "none"  # position encodings: sines and cosines alternate, or sines in the first half
    embedding_norm: bool = False  # whether the embeddings are normalized before the first block
    output_scale: float = 1.0  # factor of the decoder's output before the output layer
    logit_bias: bool = False  # whether a bias is added to the logits of tied weights
    start_token: int = 0  # the decoder's first input

    def __post_init__(self) -> None:
        """Check the fields; raise a ValueError for an invalid one, or an unsupported one that is not at its default."""
        super().__post_init__()
        for name in UNSUPPORTED_FIELDS:
            usual = ModelConfig.__dataclass_fields__[name].default
            self._require(name, getattr(self, name) == usual, f"{usual!r} in an encoder-decoder")
        self._require("n_decoder_layers", self.n_decoder_layers >= 0, "0 or more")
        self._require("relative_buckets", self.relative_buckets in (0, *range(4, 2**16)), "0, or from 4 to 65535")
        exact = self.relative_buckets // 2
        self._require("relative_distance", self.relative_distance > exact, f"above {exact}")
        self._require("sinusoids", self.sinusoids == "none" or self.positions == "none", "none with other positions")
        self._require("output_scale", self.output_scale > 0, "above 0")
        self._require("start_token", 0 <= self.start_token < self.vocab_size, f"from 0 to {self.vocab_size - 1}")

    @property
    def source_tokens(self) -> int:
        """The number of tokens at the start of a window of text that are the source: half the window, at least 1."""
        return max(1, self.context_window // 2)
