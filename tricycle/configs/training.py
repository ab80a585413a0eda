"""`TrainingConfig`: how a model is trained. Each field is a command-line flag, and its comment the flag's help."""

from __future__ import annotations

from dataclasses import dataclass

from tricycle.configs.validated import OneOf, Rule, ValidatedConfig
from tricycle.optimiser_rules import OPTIMISERS
from tricycle.optimiser_rules.schedules import SCHEDULES

RULES: list[Rule] = [
    ("batch_size accumulation_steps eval_interval eval_batches", lambda v: v >= 1, "at least 1"),
    ("steps minutes warmup_steps sample_interval", lambda v: v >= 0, "0 or more"),
    ("weight_decay max_gradient_norm min_learning_rate", lambda v: v >= 0, "0 or more"),
    ("beta1 beta2", lambda v: 0 <= v < 1, "from 0 to below 1"),
    ("max_learning_rate matrix_rate", lambda v: v > 0, "above 0"),
]


@dataclass(frozen=True)
class TrainingConfig(ValidatedConfig):
    """Batch size, optimizer, learning-rate schedule and evaluation intervals. The defaults suit GPT-2."""

    rules = RULES
    batch_size: int = 12  # sequences in one forward and backward pass
    accumulation_steps: int = 1  # batches whose gradients are averaged in one update
    steps: int = 600_000  # maximum number of updates; 0 for no limit but `minutes`
    minutes: float = 0.0  # duration of training in minutes, at the speed of its first quarter; 0: no limit but `steps`
    optimiser: OneOf[str, OPTIMISERS] = "adamw"  # "muon" is for matrices between hidden layers, AdamW for the rest
    matrix_rate: float = 5.0  # learning rate of Muon's matrices divided by that of other parameters
    schedule: OneOf[str, SCHEDULES] = "cosine"  # decay of the learning rate after the warm-up
    max_learning_rate: float = 6e-4  # learning rate after the warm-up
    min_learning_rate: float = 6e-5  # learning rate at the end
    warmup_steps: int = 2000  # updates of linear learning-rate warm-up; at most a tenth of all updates
    weight_decay: float = 0.1  # decoupled weight decay of matrices (AdamW)
    beta1: float = 0.9  # decay of the first moment (AdamW); interpolation of the update (Lion)
    beta2: float = 0.95  # decay of the second moment (AdamW) or of the momentum (Lion)
    max_gradient_norm: float = 1.0  # maximum global gradient norm for clipping; 0 for no clipping
    recompute: bool = False  # activation checkpointing: recompute each block in the backward pass, to save memory
    eval_interval: int = 500  # updates between estimates of the held-out loss, each after a checkpoint
    eval_batches: int = 20  # batches of held-out text per estimate; the final estimate uses all of it
    sample_interval: int = 2000  # updates between samples of generated text; 0 for none

    @property
    def betas(self) -> tuple[float, float]:
        """The pair (beta1, beta2) of AdamW's and other optimizers' moving averages."""
        return self.beta1, self.beta2

    def __post_init__(self) -> None:
        """Check the fields of training; raise a ValueError for the first invalid one."""
        super().__post_init__()
        most = self.max_learning_rate
        self._require("min_learning_rate", self.min_learning_rate <= most, f"at most max_learning_rate {most}")
        self._require("steps", self.steps > 0 or self.minutes > 0, "above 0 where minutes is 0")
