"""The shape of a decoder. Each field is a flag of `train_smol_gpt.py`, the comment behind it the flag's help."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tricycle.activation import ACTIVATIONS
from tricycle.attention.rotary import POSITIONS, SCALINGS
from tricycle.configs.validated import OneOf, Rule, ValidatedConfig
from tricycle.functions import PRECISIONS, SOFTMAXES

Norm = Literal["layer_norm", "rms_norm"]
NormPlacement = Literal["before", "after", "both", "output"]

RULES: list[Rule] = [
    ("vocab_size context_window embedding_dim n_heads n_layers softmax_blocks", lambda v: v >= 1, "at least 1"),
    ("n_key_heads head_size hidden_size embedding_size position_offset seed", lambda v: v >= 0, "0 or more"),
    ("window score_scale score_cap logit_cap rotary_local_base", lambda v: v >= 0, "0 or more"),
    ("rotary_base rotary_factor rotary_original_window norm_eps qk_norm_eps", lambda v: v > 0, "above 0"),
    ("rotary_low_frequency rotary_high_frequency expansion_ratio embedding_scale", lambda v: v > 0, "above 0"),
    ("rotary_fraction", lambda v: 0 < v <= 1, "above 0 and at most 1"),
    ("dropout", lambda v: 0 <= v < 1, "from 0 to below 1"),
]


@dataclass(frozen=True)
class ModelConfig(ValidatedConfig):
    """A decoder-only transformer. The defaults are GPT-2's (124M parameters)."""

    is_decoder = True  # False for `configs.encoder.EncoderConfig`
    vocab_size: int = 50_257  # number of tokens in the vocabulary
    context_window: int = 1024  # the most tokens that the model sees at once
    embedding_dim: int = 768  # width of the model
    n_heads: int = 12  # attention heads a layer
    n_layers: int = 12  # transformer blocks
    n_key_heads: int = 0  # heads of keys and values, each for several heads of queries; 0 for n_heads
    head_size: int = 0  # channels of a head; 0 for embedding_dim / n_heads
    expansion_ratio: float = 4.0  # width of an MLP's hidden layer over the model's
    hidden_size: int = 0  # width of an MLP's hidden layer; 0 leaves it to expansion_ratio
    activation: OneOf[str, ACTIVATIONS] = "gelu"  # activation of the MLPs
    gated: bool = False  # whether half of an MLP's hidden layer, through the activation, multiplies the other half
    norm: Norm = "layer_norm"  # normalisation in each block and at the end
    norm_eps: float = 1e-5  # added to the variance, or the mean square
    norm_unit_offset: bool = False  # whether norms multiply by 1 + their gain
    norm_placement: NormPlacement = "before"  # before each part of a block, after its sum, around it, or on its output
    parallel: bool = False  # whether attention and MLP of a block are computed side by side, not one after the other
    shared_norm: bool = False  # whether attention and MLP side by side share one norm
    positions: OneOf[str, POSITIONS] = "learned"  # position embeddings
    position_offset: int = 0  # rows of the table of learned positions before the first position
    rotary_base: float = 10_000.0  # the slowest pair of channels turns by about 1 / base a token
    rotary_local_base: float = 0.0  # the same in layers with a sliding window; 0 for rotary_base
    rotary_fraction: float = 1.0  # the part of a head's channels that rotary embeddings turn
    rotary_scaling: OneOf[str, SCALINGS] = (
        "none"  # how angles shrink for longer texts (not in layers with a sliding window)
    )
    rotary_factor: float = 1.0  # of the scaling: how many times longer
    rotary_low_frequency: float = 1.0  # of llama3: pairs that turn fewer times than this in the window are scaled fully
    rotary_high_frequency: float = 4.0  # of llama3: pairs that turn more often than this are not scaled
    rotary_original_window: int = 8192  # of llama3: the context window before the scaling
    qk_norm: bool = False  # whether queries and keys of a head are scaled to one length (RMS norm)
    qk_norm_gain: bool = False  # whether these norms have a learned gain
    qk_norm_eps: float = 1e-6  # of these norms
    qk_norm_per_head: bool = True  # whether each head is normed by itself, and not all heads together
    window: int = 0  # sliding-window size: the latest tokens seen, the token itself included; 0 for all
    full_layers: tuple[int, ...] = ()  # layers, counted from 0, without the sliding window
    score_scale: float = 0.0  # factor of the products of queries and keys; 0 for 1 / sqrt(head size)
    score_cap: float = 0.0  # soft-capping of attention scores: cap tanh(score / cap); 0 for none
    token_shift: bool = False  # whether attention takes each token mixed with the one before it
    key_shift: bool = False  # whether keys are mixed with those of the token before, and begin like the queries
    softmax: OneOf[str, SOFTMAXES] = "softmax"  # how attention normalizes scores
    softmax_blocks: int = 2  # into how many blocks "blocks" cuts the keys
    bias: bool = True  # whether linear layers and norms have biases
    qkv_bias: bool | None = None  # of queries, keys and values; as bias unless given
    output_bias: bool | None = None  # of attention's output projection; as bias unless given
    mlp_bias: bool | None = None  # of the MLPs; as bias unless given
    tied: bool = True  # whether the output layer shares its weights with the token embedding
    head_bias: bool = False  # whether the output layer has a bias (untied only)
    embedding_size: int = 0  # width of the token embedding, brought to the model's by a matrix; 0 for the model's
    embedding_scale: float = 1.0  # factor of the token embeddings
    logit_cap: float = 0.0  # soft-capping of logits: cap tanh(logit / cap); 0 for none
    precision: OneOf[str, PRECISIONS] = "float32"  # of matrix products; weights stay float32
    zero_projections: bool = False  # whether the last matrix of attention and of each MLP starts at zero
    dropout: float = 0.0  # probability of dropping an element of the embedding and of each block's result
    seed: int = 0  # decides the first weights, the order of the data, dropout and the samples

    def __post_init__(self) -> None:
        self._check(RULES)
        width, last, rotary = self.embedding_dim, self.n_layers - 1, self.positions == "rotary"
        turned = "rotary_fraction" if self.rotary_fraction < 1 else "head_size" if self.head_size else "embedding_dim"
        n_turned = int(self.channels_per_head * self.rotary_fraction)
        low, high, before = self.rotary_low_frequency, self.rotary_high_frequency, self.norm_placement == "before"
        for name, holds, rule in (
            ("n_heads", self.head_size > 0 or width % self.n_heads == 0, f"a divisor of embedding_dim {width}"),
            ("n_key_heads", self.n_heads % self.key_heads == 0, f"a divisor of n_heads {self.n_heads}"),
            ("qk_norm_gain", self.qk_norm or not self.qk_norm_gain, "False without qk_norm"),
            ("qk_norm_per_head", self.qk_norm or self.qk_norm_per_head, "True without qk_norm"),
            ("qk_norm", rotary or not self.qk_norm, "False without rotary positions"),
            (turned, not rotary or (n_turned > 0 and n_turned % 2 == 0), "even in each head for rotary positions"),
            ("rotary_high_frequency", not rotary or low < high, f"above rotary_low_frequency {low}"),
            ("parallel", before or not self.parallel, "False where norms do not come before a part"),
            ("shared_norm", self.parallel or not self.shared_norm, "False where parts follow one another"),
            ("norm_unit_offset", self.norm == "rms_norm" or not self.norm_unit_offset, "False with layer_norm"),
            ("expansion_ratio", width * self.expansion_ratio >= 1, f"at least 1 / {width}"),
            ("head_bias", not (self.tied and self.head_bias), "False with tied weights"),
            ("full_layers", all(0 <= layer <= last for layer in self.full_layers), f"layers from 0 to {last}"),
        ):
            self._require(name, holds, rule)

    @property
    def key_heads(self) -> int:
        """The number of heads of keys and values in a layer."""
        return self.n_key_heads or self.n_heads

    @property
    def channels_per_head(self) -> int:
        """D, of queries, keys and values."""
        return self.head_size or self.embedding_dim // self.n_heads

    @property
    def mlp_width(self) -> int:
        """The width of an MLP's hidden layer; a third matrix makes it 2/3 as wide, a multiple of 8 (Shazeer 2020)."""
        width = round(self.embedding_dim * self.expansion_ratio)
        return self.hidden_size or (math.ceil(2 * width / 3 / 8) * 8 if self.is_gated else width)

    @property
    def is_gated(self) -> bool:
        return self.gated or self.activation == "swiglu"

    def window_size(self, layer: int) -> int | None:
        """Return the sliding-window size of a layer; None where it sees all tokens."""
        return None if not self.window or layer in self.full_layers else self.window
