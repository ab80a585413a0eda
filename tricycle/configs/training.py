"""How a model is trained. Each field is a flag of `train_smol_gpt.py`, the comment behind it the flag's help."""

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
    """Batches, optimiser, schedule, and how often a run looks at itself. The defaults suit GPT-2's size."""

    batch_size: int = 12  # sequences in one forward and backward pass
    accumulation_steps: int = 1  # passes whose gradients are averaged for one update
    steps: int = 600_000  # the most updates to make; 0 leaves it to `minutes`
    minutes: float = 0.0  # the most minutes to take, as the first updates are timed; 0 leaves it to `steps`
    optimiser: OneOf[str, OPTIMISERS] = "adamw"  # "muon" is for matrices between hidden layers, AdamW for the rest
    matrix_rate: float = 5.0  # learning rate of Muon's matrices over that of the rest
    schedule: OneOf[str, SCHEDULES] = "cosine"  # how the learning rate falls after the warm-up
    max_learning_rate: float = 6e-4  # learning rate after the warm-up
    min_learning_rate: float = 6e-5  # learning rate at the end
    warmup_steps: int = 2000  # updates over which the learning rate rises from 0; at most a tenth of all
    weight_decay: float = 0.1  # decoupled decay of the matrices (AdamW)
    beta1: float = 0.9  # how much of the mean gradient AdamW and Lion keep a step (Lion: in the sign)
    beta2: float = 0.95  # how much of the mean squared gradient AdamW keeps a step; of the mean gradient Lion
    max_gradient_norm: float = 1.0  # gradients are scaled down to this common norm; 0 leaves them
    recompute: bool = False  # compute each block again in the backward pass: less memory, more time, the same gradients
    eval_interval: int = 500  # updates between estimates of the held-out loss, with a checkpoint before each
    eval_batches: int = 20  # batches of held-out text in such an estimate; the one at the end reads all of it
    sample_interval: int = 2000  # updates between samples of generated text; 0 for none

    @property
    def betas(self) -> tuple[float, float]:
        return self.beta1, self.beta2

    def __post_init__(self) -> None:
        self._check(RULES)
        most = self.max_learning_rate
        self._require("min_learning_rate", self.min_learning_rate <= most, f"at most max_learning_rate {most}")
        self._require("steps", self.steps > 0 or self.minutes > 0, "above 0 where minutes is 0")
