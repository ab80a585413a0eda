"""Optimisers besides SGD and AdamW, and the table of schedules."""

from tricycle.optimiser_rules.lion import Lion, LionRule
from tricycle.optimiser_rules.muon import Muon, MuonRule, anything, is_hidden_matrix

__all__ = ["Lion", "LionRule", "Muon", "MuonRule", "anything", "is_hidden_matrix"]
