"""`ModelConfig`: the architecture of a decoder. Each field is a command-line flag, and its comment the flag's help."""

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
    ("window score_scale score_cap logit_cap rotary_local_base n_experts router_loss", lambda v: v >= 0, "0 or more"),
    ("rotary_base rotary_factor rotary_original_window norm_eps qk_norm_eps", lambda v: v > 0, "above 0"),
    ("rotary_low_frequency rotary_high_frequency rotary_attention_factor", lambda v: v > 0, "above 0"),
    ("expansion_ratio embedding_scale residual_scale logit_scale", lambda v: v > 0, "above 0"),
    ("rotary_fraction", lambda v: 0 < v <= 1, "above 0 and at most 1"),
    ("dropout", lambda v: 0 <= v < 1, "from 0 to below 1"),
]


@dataclass(frozen=True)
class ModelConfig(ValidatedConfig):
    """The architecture of a decoder-only transformer. The defaults are GPT-2's (124M parameters)."""

    rules = RULES
    is_decoder = True  # False for `configs.encoder.EncoderConfig`
    is_gated = property(lambda self: self.gated or "swiglu" in self.activation)  # whether the MLP is gated
    vocab_size: int = 50_257  # number of tokens in the vocabulary
    context_window: int = 1024  # the maximum number of tokens of a sequence
    embedding_dim: int = 768  # width of the residual stream
    n_heads: int = 12  # attention heads per layer
    n_layers: int = 12  # transformer blocks
    n_key_heads: int = 0  # key and value heads (grouped-query attention); 0 for n_heads
    head_size: int = 0  # channels per head; 0 for embedding_dim / n_heads
    expansion_ratio: float = 4.0  # width of the MLP's hidden layer divided by embedding_dim
    hidden_size: int = 0  # width of the MLP's hidden layer; 0 to use expansion_ratio
    activation: OneOf[str, ACTIVATIONS] = "gelu"  # activation function of the MLP
    n_experts: int = 0  # MLPs per block, some of which a router selects for each token; 0 for one MLP and no router
    n_active_experts: int = 2  # experts that process each token
    router_bias: bool = False  # whether the router that selects experts has a bias
    normalize_experts: bool = True  # whether the router's weights of a token's experts are divided by their sum
    router_loss: float = 0.01  # weight of the load-balancing loss of the experts in training
    gated: bool = False  # whether one half of the MLP's hidden layer, after the activation, multiplies the other half
    norm: Norm = "layer_norm"  # normalization layer
    norm_eps: float = 1e-5  # added to the variance or mean square
    norm_unit_offset: bool = False  # whether norms multiply by 1 + gain
    norm_placement: NormPlacement = "before"  # before attention and MLP, after the addition, both, or on the output
    parallel: bool = False  # whether attention and MLP of a block take the same input (parallel, not sequential)
    shared_norm: bool = False  # whether parallel attention and MLP share one norm
    positions: OneOf[str, POSITIONS] = "learned"  # position encoding
    position_offset: int = 0  # unused rows of the learned position table before the first position
    rotary_base: float = 10_000.0  # base of the rotary frequencies
    rotary_local_base: float = 0.0  # base in layers with a sliding window; 0 for rotary_base
    rotary_fraction: float = 1.0  # fraction of the channels of a head that is rotated
    unrotated_layers: tuple[int, ...] = ()  # layers, counted from 0, without rotary positions
    rotary_scaling: OneOf[str, SCALINGS] = "none"  # frequency scaling for longer texts (not with a sliding window)
    rotary_factor: float = 1.0  # of the scaling: factor of the context length
    rotary_low_frequency: float = 1.0  # of llama3, yarn: channel pairs with fewer rotations per window are scaled fully
    rotary_high_frequency: float = 4.0  # of llama3, yarn: channel pairs with more rotations per window are not scaled
    rotary_original_window: int = 8192  # of llama3, yarn and longrope: context window before the scaling
    rotary_rounded: bool = True  # of yarn: whether the interpolated range begins and ends at a channel pair
    rotary_attention_factor: float = 1.0  # of the scaling: factor of rotated queries and keys
    rotary_divisors: tuple[float, ...] = ()  # of longrope: for the frequencies of short texts, then of longer ones
    qk_norm: bool = False  # whether queries and keys are normalized (RMS norm)
    qk_norm_gain: bool = False  # whether the query and key norms have a learned gain
    qk_norm_eps: float = 1e-6  # added to the mean square in the query and key norms
    qk_norm_per_head: bool = True  # whether queries and keys are normalized per head, not over all heads
    window: int = 0  # sliding-window size in tokens, including the token itself; 0 for full attention
    full_layers: tuple[int, ...] = ()  # layers, counted from 0, with full attention
    score_scale: float = 0.0  # factor of the dot products of queries and keys; 0 for 1 / sqrt(head size)
    score_cap: float = 0.0  # logit soft-capping of attention scores, cap tanh(score / cap); 0 for none
    token_shift: bool = False  # whether each token is mixed with the previous one before attention
    key_shift: bool = False  # whether keys are mixed with those of the previous token, and initialized like the queries
    softmax: OneOf[str, SOFTMAXES] = "softmax"  # softmax variant of attention
    softmax_blocks: int = 2  # number of key blocks of the softmax variant "blocks"
    bias: bool = True  # whether linear layers and norms have biases
    qkv_bias: bool | None = None  # of query, key and value projections; by default as bias
    output_bias: bool | None = None  # of the attention output projection; by default as bias
    mlp_bias: bool | None = None  # of the MLP; by default as bias
    tied: bool = True  # whether the output layer shares the weights of the token embedding
    head_bias: bool = False  # whether an untied output layer has a bias
    embedding_size: int = 0  # width of the token embedding, if projected to embedding_dim; 0 for embedding_dim
    embedding_scale: float = 1.0  # factor of the token embeddings
    residual_scale: float = 1.0  # factor of the outputs of attention and MLP before they are added
    logit_scale: float = 1.0  # factor of the output
    logit_cap: float = 0.0  # logit soft-capping of the output, cap tanh(logit / cap); 0 for none
    precision: OneOf[str, PRECISIONS] = "float32"  # precision of matrix products; weights stay float32
    zero_projections: bool = False  # whether the output projections of attention and MLP are initialized to zero
    dropout: float = 0.0  # dropout probability for embeddings and for the outputs of attention and MLP
    seed: int = 0  # random seed of initialization, data order, dropout and samples

    def __post_init__(self) -> None:
        super().__post_init__()
        width, last, rotary = self.embedding_dim, self.n_layers - 1, self.positions == "rotary"
        rotated = "rotary_fraction" if self.rotary_fraction < 1 else "head_size" if self.head_size else "embedding_dim"
        n_rotated = int(self.channels_per_head * self.rotary_fraction)
        low, high, before = self.rotary_low_frequency, self.rotary_high_frequency, self.norm_placement == "before"
        for name, holds, rule in (
            ("n_heads", self.head_size > 0 or width % self.n_heads == 0, f"a divisor of embedding_dim {width}"),
            ("n_key_heads", self.n_heads % self.key_heads == 0, f"a divisor of n_heads {self.n_heads}"),
            ("qk_norm_gain", self.qk_norm or not self.qk_norm_gain, "False without qk_norm"),
            ("qk_norm_per_head", self.qk_norm or self.qk_norm_per_head, "True without qk_norm"),
            ("qk_norm", rotary or not self.qk_norm, "False without rotary positions"),
            (rotated, not rotary or (n_rotated > 0 and n_rotated % 2 == 0), "even in each head for rotary positions"),
            ("rotary_high_frequency", not rotary or low < high, f"above rotary_low_frequency {low}"),
            ("parallel", before or not self.parallel, "False unless norm_placement is before"),
            ("shared_norm", self.parallel or not self.shared_norm, "False unless parallel"),
            ("norm_unit_offset", self.norm == "rms_norm" or not self.norm_unit_offset, "False with layer_norm"),
            ("expansion_ratio", width * self.expansion_ratio >= 1, f"at least 1 / {width}"),
            ("head_bias", not (self.tied and self.head_bias), "False with tied weights"),
            ("n_active_experts", 0 < self.n_active_experts <= (self.n_experts or math.inf), "from 1 to n_experts"),
            ("unrotated_layers", all(0 <= i <= last for i in self.unrotated_layers), f"layers from 0 to {last}"),
            ("full_layers", all(0 <= layer <= last for layer in self.full_layers), f"layers from 0 to {last}"),
        ):
            self._require(name, holds, rule)

    @property
    def key_heads(self) -> int:
        """The number of key and value heads per layer: `n_key_heads`, or `n_heads` if it is 0."""
        return self.n_key_heads or self.n_heads

    @property
    def channels_per_head(self) -> int:
        """The head size D of queries, keys and values: `head_size`, or embedding_dim / n_heads if it is 0."""
        return self.head_size or self.embedding_dim // self.n_heads

    @property
    def mlp_width(self) -> int:
        """The MLP's hidden width: `hidden_size`, else by `expansion_ratio`, if gated 2/3, up to a multiple of 8."""
        width = round(self.embedding_dim * self.expansion_ratio)  # gated: 2/3 of it, as in Shazeer 2020
        return self.hidden_size or (math.ceil(2 * width / 3 / 8) * 8 if self.is_gated else width)

    def window_size(self, layer: int) -> int | None:
        """Return the sliding-window size of a layer; None without a window, or for a layer in `full_layers`."""
        return None if not self.window or layer in self.full_layers else self.window
