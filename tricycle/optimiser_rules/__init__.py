"""The optimizers Muon, Lion and Adafactor, and the table of optimizers that `TrainingConfig.optimiser` can name."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tricycle.optimiser_rules.adafactor import Adafactor
from tricycle.optimiser_rules.lion import Lion, LionRule
from tricycle.optimiser_rules.muon import Muon, MuonRule, any_parameter, is_hidden_matrix
from tricycle.optimisers import AdamW, Optimiser

__all__ = ["OPTIMISERS", "Adafactor", "Lion", "LionRule", "Muon", "MuonRule", "any_parameter", "is_hidden_matrix"]


class OptimiserEntry(NamedTuple):
    """An optimizer that a config can name.

    Attributes:
        kind: the class, called with the learning rate and the fields by name.
        n_state_arrays: the least number of state arrays of a matrix's size (for the estimate of memory).
        fields: the fields of `TrainingConfig` and `ModelConfig` that are passed to the class.
    """

    kind: Callable[..., Optimiser]
    n_state_arrays: int
    fields: tuple[str, ...]


OPTIMISERS = {
    "adamw": OptimiserEntry(AdamW, 2, ("betas", "weight_decay")),
    "muon": OptimiserEntry(Muon, 1, ("betas", "weight_decay", "matrix_rate", "precision")),
    "lion": OptimiserEntry(Lion, 1, ("betas", "weight_decay")),
    "adafactor": OptimiserEntry(Adafactor, 0, ("weight_decay",)),
}
