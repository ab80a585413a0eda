"""The shape of a decoder: by these fields one model is GPT-2, Llama, Gemma, OPT and others. And that of an encoder.

Every field is a flag of `train_smol_gpt.py`; the comment behind a field is the flag's help.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from tricycle.configs.checked import Checked, Rule
from tricycle.functions import SOFTMAXES

Activation = Literal["gelu", "gelu_exact", "relu", "relu_squared", "swish", "sigmoid", "tanh", "swiglu"]
Norm = Literal["layer_norm", "rms_norm"]
NormPlacement = Literal["before", "after", "both", "output"]
Positions = Literal["learned", "rotary", "none"]
RotaryScaling = Literal["none", "linear", "llama3"]
Precision = Literal["float32", "tf32", "bfloat16", "float16"]

RULES: list[Rule] = [
    ("vocab_size context_window embedding_dim n_heads n_layers softmax_blocks", lambda v: v >= 1, "at least 1"),
    ("n_key_heads head_size hidden_size embedding_size position_offset", lambda v: v >= 0, "0 or more"),
    ("window score_scale score_cap logit_cap rotary_local_base", lambda v: v >= 0, "0 or more"),
    ("rotary_base rotary_factor rotary_original_window norm_eps qk_norm_eps", lambda v: v > 0, "above 0"),
    ("rotary_low_frequency rotary_high_frequency expansion_ratio embedding_scale", lambda v: v > 0, "above 0"),
    ("rotary_fraction", lambda v: 0 < v <= 1, "above 0 and at most 1"),
    ("dropout", lambda v: 0 <= v < 1, "from 0 to below 1"),
    ("softmax", lambda v: isinstance(v, str) and v in SOFTMAXES, f"one of {', '.join(SOFTMAXES)}"),
]


@dataclass(frozen=True)
class ModelConfig(Checked):
    """A decoder-only transformer. The defaults are GPT-2's (124M parameters)."""

    # ---- sizes
    vocab_size: int = 50_257  # how many tokens there are
    context_window: int = 1024  # the most tokens the model sees at once
    embedding_dim: int = 768  # width of the model
    n_heads: int = 12  # attention heads a layer
    n_layers: int = 12  # transformer blocks
    n_key_heads: int = 0  # heads of keys and values, each for several heads of queries; 0 for n_heads
    head_size: int = 0  # channels of a head; 0 for embedding_dim / n_heads
    # ---- the MLP
    expansion_ratio: float = 4.0  # width of an MLP's hidden layer over the model's
    hidden_size: int = 0  # width of an MLP's hidden layer; 0 leaves it to expansion_ratio
    activation: Activation = "gelu"  # activation of the MLPs
    gated: bool = False  # whether half of an MLP's hidden layer, through the activation, multiplies the other half
    # ---- norms
    norm: Norm = "layer_norm"  # normalisation in each block and at the end
    norm_eps: float = 1e-5  # added to the variance, or the mean square
    norm_unit_offset: bool = False  # whether norms multiply by 1 + their gain
    norm_placement: NormPlacement = (
        "before"  # before each part of a block, after the sum with it, around the part, or on its output
    )
    parallel: bool = False  # whether attention and MLP of a block stand side by side, and not one after the other
    shared_norm: bool = False  # whether attention and MLP side by side share one norm
    # ---- positions
    positions: Positions = "learned"  # how the model knows the order of tokens
    position_offset: int = 0  # rows of the table of learned positions that stand before the first position
    rotary_base: float = 10_000.0  # the slowest pair of channels turns by about 1 / base a token
    rotary_local_base: float = 0.0  # the same in layers with a window; 0 for rotary_base
    rotary_fraction: float = 1.0  # the part of a head's channels that turns
    rotary_scaling: RotaryScaling = "none"  # how angles are made smaller for longer texts (not in layers with a window)
    rotary_factor: float = 1.0  # of the scaling: how many times longer
    rotary_low_frequency: float = 1.0  # of llama3: pairs that turn fewer times than this in the window are scaled fully
    rotary_high_frequency: float = 4.0  # of llama3: pairs that turn more often than this are not scaled
    rotary_original_window: int = 8192  # of llama3: the window before the scaling
    # ---- attention
    qk_norm: bool = False  # whether queries and keys of a head are scaled to one length (RMS norm)
    qk_norm_gain: bool = False  # whether these norms have a learned gain
    qk_norm_eps: float = 1e-6  # of these norms
    qk_norm_per_head: bool = True  # whether each head is scaled by itself, and not all heads together
    window: int = 0  # so many of the latest tokens are seen, the token itself included; 0 for all
    full_layers: tuple[int, ...] = ()  # layers, counted from 0, that see all tokens even so
    score_scale: float = 0.0  # what products of queries and keys are multiplied by; 0 for 1 / sqrt(head size)
    score_cap: float = 0.0  # scores are bent to stay below this: cap tanh(score / cap); 0 leaves them
    token_shift: bool = False  # whether attention takes each token mixed with the one before it
    key_shift: bool = False  # whether keys are mixed with those of the token before, and begin like the queries
    softmax: str = "softmax"  # how attention weighs keys: softmax, softmax1, adaptive, blocks or sink
    softmax_blocks: int = 2  # into how many blocks "blocks" cuts the keys
    # ---- biases
    bias: bool = True  # whether linear layers and norms have biases
    qkv_bias: bool | None = None  # of queries, keys and values; as bias unless given
    output_bias: bool | None = None  # of attention's last matrix; as bias unless given
    mlp_bias: bool | None = None  # of the MLPs; as bias unless given
    # ---- the two ends
    tied: bool = True  # whether the output layer shares its weights with the token embedding
    head_bias: bool = False  # whether the output layer has a bias (untied only)
    embedding_size: int = 0  # width of the token embedding, brought to the model's by a matrix; 0 for the model's
    embedding_scale: float = 1.0  # what token embeddings are multiplied by
    logit_cap: float = 0.0  # logits are bent to stay below this: cap tanh(logit / cap); 0 leaves them
    # ---- numbers
    precision: Precision = "float32"  # of matrix products; weights stay float32
    zero_projections: bool = False  # whether the last matrix of attention and of each MLP starts at zero
    dropout: float = 0.0  # probability of dropping an element of the embedding and of each block's result
    seed: int = 0  # decides the first weights, the order of the data, dropout and the samples

    def __post_init__(self) -> None:
        self._check(RULES)
        self._check_heads()
        self._check_positions()
        self._check_norms()
        width = self.embedding_dim
        self._require("seed", self.seed >= 0, "0 or more")
        self._require("expansion_ratio", width * self.expansion_ratio >= 1, f"at least 1 / {width}")
        self._require("head_bias", not (self.tied and self.head_bias), "False with tied weights")
        known = all(0 <= layer < self.n_layers for layer in self.full_layers)
        self._require("full_layers", known, f"layers from 0 to {self.n_layers - 1}")

    def _check_norms(self) -> None:
        fits = not self.parallel or self.norm_placement == "before"
        self._require("parallel", fits, "False where norms do not come before a part")
        self._require("shared_norm", self.parallel or not self.shared_norm, "False where parts follow one another")
        fits = self.norm == "rms_norm" or not self.norm_unit_offset
        self._require("norm_unit_offset", fits, "False with layer_norm")

    def _check_heads(self) -> None:
        width = self.embedding_dim
        if not self.head_size:
            self._require("n_heads", width % self.n_heads == 0, f"a divisor of embedding_dim {width}")
        self._require("n_key_heads", self.n_heads % self.key_heads == 0, f"a divisor of n_heads {self.n_heads}")
        self._require("qk_norm_gain", self.qk_norm or not self.qk_norm_gain, "False without qk_norm")
        self._require("qk_norm_per_head", self.qk_norm or self.qk_norm_per_head, "True without qk_norm")

    def _check_positions(self) -> None:
        self._require("qk_norm", not self.qk_norm or self.positions == "rotary", "False without rotary positions")
        if self.positions != "rotary":
            return
        field = "rotary_fraction" if self.rotary_fraction < 1 else "head_size" if self.head_size else "embedding_dim"
        turned = int(self.channels_per_head * self.rotary_fraction)
        self._require(field, turned > 0 and turned % 2 == 0, "even in each head for rotary positions")
        ordered = self.rotary_low_frequency < self.rotary_high_frequency
        self._require("rotary_high_frequency", ordered, f"above rotary_low_frequency {self.rotary_low_frequency}")

    # ---------------------------------------------------------------- what follows from the fields
    @property
    def key_heads(self) -> int:
        """How many heads of keys and values a layer has."""
        return self.n_key_heads or self.n_heads

    @property
    def channels_per_head(self) -> int:
        """D, of queries, keys and values."""
        return self.head_size or self.embedding_dim // self.n_heads

    @property
    def mlp_width(self) -> int:
        """Of the hidden layer.

        A gated MLP has three matrices instead of two, so by the ratio it is 2/3 as wide, rounded up to a multiple of 8
        (Shazeer 2020).
        """
        return self.hidden_size or hidden_width(self.embedding_dim, self.expansion_ratio, self.is_gated)

    @property
    def is_gated(self) -> bool:
        return self.gated or self.activation == "swiglu"

    def window_of(self, layer: int) -> int | None:
        """How many tokens a layer sees; None for all."""
        return None if not self.window or layer in self.full_layers else self.window


@dataclass(frozen=True)
class EncoderConfig(ModelConfig):
    """A transformer whose tokens all see each other, without a head. The defaults are BERT's (109M parameters)."""

    vocab_size: int = 30_522
    context_window: int = 512
    activation: Activation = "gelu_exact"
    norm_eps: float = 1e-12
    norm_placement: NormPlacement = "after"
    # ---- an encoder's own
    token_types: int = 2  # kinds of tokens, each with a vector, such as those of a first and a second text; 0 for none
    embedding_norm: bool = True  # whether embeddings are normed before the first block

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("token_types", self.token_types >= 0, "0 or more")
        for name in OF_DECODERS:
            usual = ModelConfig.__dataclass_fields__[name].default
            self._require(name, getattr(self, name) == usual, f"{usual!r} in an encoder")


# What belongs to a head, or to tokens that see those before them.
OF_DECODERS = "window full_layers token_shift key_shift tied head_bias embedding_size logit_cap".split()


def hidden_width(embedding_dim: int, expansion_ratio: float, gated: bool) -> int:
    """Of an MLP's hidden layer, by its ratio."""
    hidden = round(embedding_dim * expansion_ratio)
    return math.ceil(2 * hidden / 3 / 8) * 8 if gated else hidden


def model_fields(values: dict[str, Any]) -> dict[str, Any]:
    """Those of a config's values that shape the model."""
    return {name: value for name, value in values.items() if name in ModelConfig.__dataclass_fields__}
