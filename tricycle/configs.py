"""Configurations: everything that decides a model and its training, checked when it is made.

Every field is a flag of `train_smol_gpt.py`; the comment behind a field is the flag's help.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tricycle.functions import SOFTMAXES

Activation = Literal["gelu", "relu", "relu_squared", "swish", "swiglu"]
Norm = Literal["layer_norm", "rms_norm"]
Positions = Literal["learned", "rotary"]
OptimiserName = Literal["adamw", "muon"]
Schedule = Literal["cosine", "linear"]
Precision = Literal["float32", "tf32", "bfloat16", "float16"]

# What values fields may have: names, rule, the rule in words.
RULES: list[tuple[str, Callable[[Any], bool], str]] = [
    ("vocab_size context_window embedding_dim n_heads n_layers softmax_blocks", lambda v: v >= 1, "at least 1"),
    ("batch_size accumulation_steps eval_interval eval_batches", lambda v: v >= 1, "at least 1"),
    ("steps minutes warmup_steps sample_interval seed", lambda v: v >= 0, "0 or more"),
    ("weight_decay max_gradient_norm min_learning_rate", lambda v: v >= 0, "0 or more"),
    ("softmax", lambda v: isinstance(v, str) and v in SOFTMAXES, f"one of {', '.join(SOFTMAXES)}"),
    ("dropout beta1 beta2", lambda v: 0 <= v < 1, "from 0 to below 1"),
    ("expansion_ratio max_learning_rate matrix_rate", lambda v: v > 0, "above 0"),
]


@dataclass(frozen=True)
class GPTConfig:
    """A GPT and how to train it. The defaults are GPT-2's (124M parameters)."""

    # ---- the model
    vocab_size: int = 50_257  # how many tokens there are
    context_window: int = 1024  # the most tokens the model sees at once
    embedding_dim: int = 768  # width of the model, a multiple of n_heads
    n_heads: int = 12  # attention heads a layer
    n_layers: int = 12  # transformer blocks
    expansion_ratio: float = 4.0  # width of an MLP's hidden layer over the model's
    activation: Activation = "gelu"  # activation of the MLPs
    norm: Norm = "layer_norm"  # normalisation before each block and at the end
    positions: Positions = "learned"  # how the model knows the order of tokens
    qk_norm: bool = False  # whether queries and keys of a head are scaled to one length (rotary positions only)
    token_shift: bool = False  # whether attention takes each token mixed with the one before it
    bias: bool = True  # whether linear layers and norms have biases
    tied: bool = True  # whether the output layer shares its weights with the token embedding
    softmax: str = "softmax"  # how attention weighs keys: softmax, softmax1, adaptive or blocks
    softmax_blocks: int = 2  # into how many blocks "blocks" cuts the keys
    precision: Precision = "float32"  # of matrix products; weights stay float32
    zero_projections: bool = False  # whether the last matrix of attention and of each MLP starts at zero
    dropout: float = 0.0  # probability of dropping an element of the embedding and of each block's result

    # ---- training
    batch_size: int = 12  # sequences in one forward and backward pass
    accumulation_steps: int = 1  # passes whose gradients are averaged for one update
    steps: int = 600_000  # the most updates to make; 0 leaves it to `minutes`
    minutes: float = 0.0  # the most minutes to take, as the first updates are timed; 0 leaves it to `steps`
    optimiser: OptimiserName = "adamw"  # "muon" is for matrices between hidden layers, AdamW for the rest
    matrix_rate: float = 5.0  # learning rate of Muon's matrices over that of the rest
    schedule: Schedule = "cosine"  # how the learning rate falls after the warm-up
    max_learning_rate: float = 6e-4  # learning rate after the warm-up
    min_learning_rate: float = 6e-5  # learning rate at the end
    warmup_steps: int = 2000  # updates over which the learning rate rises from 0; at most a tenth of all
    weight_decay: float = 0.1  # decoupled decay of the matrices (AdamW)
    beta1: float = 0.9  # how much of the mean gradient AdamW keeps a step
    beta2: float = 0.95  # how much of the mean squared gradient AdamW keeps a step
    max_gradient_norm: float = 1.0  # gradients are scaled down to this common norm; 0 leaves them
    eval_interval: int = 500  # updates between estimates of the held-out loss, with a checkpoint before each
    eval_batches: int = 20  # batches of held-out text in such an estimate; the one at the end reads all of it
    sample_interval: int = 2000  # updates between samples of generated text; 0 for none
    seed: int = 0  # decides the first weights, the order of the data, dropout and the samples

    def __post_init__(self) -> None:
        self._check_types()
        for names, holds, rule in RULES:
            for name in names.split():
                self._require(name, holds(getattr(self, name)), rule)
        width, most = self.embedding_dim, self.max_learning_rate
        self._require("n_heads", width % self.n_heads == 0, f"a divisor of embedding_dim {width}")
        self._require("min_learning_rate", self.min_learning_rate <= most, f"at most max_learning_rate {most}")
        self._require("steps", self.steps > 0 or self.minutes > 0, "above 0 where minutes is 0")
        self._require("expansion_ratio", width * self.expansion_ratio >= 1, f"at least 1 / {width}")
        self._require("qk_norm", not self.qk_norm or self.positions == "rotary", "False without rotary positions")
        even = self.positions != "rotary" or width // self.n_heads % 2 == 0
        self._require("embedding_dim", even, "even in each head for rotary positions")

    def _require(self, field: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ValueError(f"{type(self).__name__}: expected {field} to be {rule}, got {getattr(self, field)!r}")

    def _check_types(self) -> None:
        hints = get_type_hints(type(self))
        for field in fields(self):
            value, wanted = getattr(self, field.name), hints[field.name]
            if get_origin(wanted) is Literal:
                choices = get_args(wanted)
                self._require(field.name, isinstance(value, str) and value in choices, f"one of {', '.join(choices)}")
            elif wanted is bool:
                self._require(field.name, isinstance(value, bool), "True or False")
            elif wanted is not str:  # names have rules of their own
                kinds = int if wanted is int else (int, float)
                holds = isinstance(value, kinds) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
                self._require(field.name, holds, f"a {'whole' if wanted is int else 'finite'} number")

    def to_dict(self) -> dict[str, Any]:
        """All fields, as JSON can hold them."""
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> GPTConfig:
        """The config that `to_dict` described.

        Raises:
            ValueError: unknown fields, named, or values that no config may have.
        """
        known = {field.name for field in fields(GPTConfig)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"GPTConfig: expected only known fields, got {', '.join(unknown)}")
        return GPTConfig(**values)


@dataclass(frozen=True)
class DebugConfig(GPTConfig):
    """Tiny: a few seconds on any machine, to see that everything runs."""

    vocab_size: int = 300
    context_window: int = 32
    embedding_dim: int = 32
    n_heads: int = 2
    n_layers: int = 2
    batch_size: int = 4
    steps: int = 40
    max_learning_rate: float = 3e-3
    min_learning_rate: float = 3e-4
    warmup_steps: int = 5
    eval_interval: int = 20
    eval_batches: int = 4
    sample_interval: int = 20


@dataclass(frozen=True)
class LaptopConfig(GPTConfig):
    """2.0M parameters: about ten minutes on two CPU cores. What each choice is worth: experiments/ten_minutes."""

    vocab_size: int = 1024
    context_window: int = 256
    embedding_dim: int = 192
    n_heads: int = 3
    n_layers: int = 4
    activation: Activation = "relu_squared"
    norm: Norm = "rms_norm"
    positions: Positions = "rotary"
    qk_norm: bool = True
    token_shift: bool = True
    bias: bool = False
    zero_projections: bool = True
    batch_size: int = 6
    optimiser: OptimiserName = "muon"
    schedule: Schedule = "linear"
    steps: int = 0
    minutes: float = 10.0
    max_learning_rate: float = 4e-3
    min_learning_rate: float = 0.0
    warmup_steps: int = 40
    beta2: float = 0.99
    max_gradient_norm: float = 0.0
    eval_interval: int = 1000
    eval_batches: int = 8
    sample_interval: int = 2000


@dataclass(frozen=True)
class ShakespeareConfig(GPTConfig):
    """12M parameters, for tiny Shakespeare on a GPU."""

    vocab_size: int = 1024
    context_window: int = 256
    embedding_dim: int = 384
    n_heads: int = 6
    n_layers: int = 6
    tied: bool = False
    dropout: float = 0.2
    batch_size: int = 64
    steps: int = 5000
    max_learning_rate: float = 1e-3
    min_learning_rate: float = 1e-4
    warmup_steps: int = 100
    beta2: float = 0.99
    eval_interval: int = 250
    sample_interval: int = 1000


@dataclass(frozen=True)
class SmolGPTConfig(GPTConfig):
    """49M parameters with GPT-2's vocabulary, for a GPU."""

    context_window: int = 256
    embedding_dim: int = 384
    n_heads: int = 6
    n_layers: int = 6
    tied: bool = False
    dropout: float = 0.2
    batch_size: int = 64
    steps: int = 75_000


@dataclass(frozen=True)
class GPT2Config(GPTConfig):
    """GPT-2 with 124M parameters (Radford et al. 2019)."""


PRESETS: dict[str, type[GPTConfig]] = {
    "debug": DebugConfig, "laptop": LaptopConfig, "shakespeare": ShakespeareConfig, "smol": SmolGPTConfig,
    "gpt2": GPT2Config,
}  # fmt: skip
