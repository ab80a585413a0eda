"""Interventions on a model that the model viewer requests: ablations, another softmax, another temperature."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tricycle.softmaxes import SOFTMAXES
from tricycle_lab.probe import Probe

MAX_ABLATED_HEADS = 10_000
FIELDS = ("ablatedLayers", "ablatedHeads", "softmax", "temperature", "steering")


@dataclass(frozen=True)
class Interventions:
    """A set of interventions on one model; by default none.

    Attributes:
        ablated_layers: names of layers whose output is set to zero; an ablated block returns its input.
        ablated_heads: pairs of the name of an attention layer and the index of a head.
        softmax: a name in `softmaxes.SOFTMAXES`; None for the softmax of the model.
        temperature: the divisor of the attention scores; 1 leaves them unchanged.
        steering: the factor of the model's steering vectors; 0 leaves the residual stream unchanged.
    """

    ablated_layers: tuple[str, ...] = ()
    ablated_heads: tuple[tuple[str, int], ...] = ()
    softmax: str | None = None
    temperature: float = 1.0
    steering: float = 0.0

    @classmethod
    def from_json(cls, fields: Any, ablatable: Sequence[str], n_heads: Mapping[str, int]) -> Interventions:
        """Create from a JSON object with the fields in `FIELDS`, or None for none; others raise ValueError.

        Args:
            fields: the JSON object; None for no interventions.
            ablatable: names of the layers that may be ablated.
            n_heads: the number of heads of each attention layer, by name.
        """
        fields = {} if fields is None else fields
        if not isinstance(fields, dict) or set(fields) - {*FIELDS}:
            raise ValueError(f"interventions: expected {', '.join(FIELDS)}")
        softmax = fields.get("softmax")
        if softmax is not None and (not isinstance(softmax, str) or softmax not in SOFTMAXES):
            raise ValueError(f"interventions: expected softmax to be one of {', '.join(SOFTMAXES)}")
        temperature = fields.get("temperature", 1.0)
        if type(temperature) not in (int, float) or not 1e-3 <= temperature <= 1e3:
            raise ValueError("interventions: expected a temperature from 0.001 to 1000")
        steering = fields.get("steering", 0.0)
        if type(steering) not in (int, float) or not abs(steering) <= 1e3:
            raise ValueError("interventions: expected a steering strength from -1000 to 1000")
        layers = fields.get("ablatedLayers", [])
        if not isinstance(layers, list) or not all(isinstance(name, str) and name in ablatable for name in layers):
            raise ValueError("interventions: expected ablatedLayers to be a list of layers of the model")
        heads = _check_heads(fields.get("ablatedHeads", []), n_heads)
        return cls(tuple(dict.fromkeys(layers)), heads, softmax, float(temperature), float(steering))

    def apply(self, probe: Probe) -> None:
        """Ablate layers and heads and change the softmax through a probe, until the context of the probe ends."""
        for name in self.ablated_layers:
            probe.ablate(name)
        for name in dict.fromkeys(name for name, _ in self.ablated_heads):
            probe.ablate(name, heads=[head for other, head in self.ablated_heads if other == name])
        temperature = None if math.isclose(self.temperature, 1.0) else self.temperature
        if self.softmax is not None or temperature is not None:
            probe.change_softmax(softmax=self.softmax, temperature=temperature)

    def first_changed_block(self, block_names: Sequence[str], other: Interventions) -> int:
        """Return the first block index with different ablations; the block count if none, 0 if other fields differ."""
        if replace(self, ablated_layers=(), ablated_heads=()) != replace(other, ablated_layers=(), ablated_heads=()):
            return 0
        layers = {*self.ablated_layers} ^ {*other.ablated_layers}
        changed = [*layers, *(name for name, _ in {*self.ablated_heads} ^ {*other.ablated_heads})]
        indices = [
            i for i, block in enumerate(block_names) if any((name + ".").startswith(block + ".") for name in changed)
        ]
        return min(indices, default=len(block_names))


def _check_heads(value: Any, n_heads: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Return a request's ablated heads without repetitions; raise ValueError for anything but existing heads."""
    if not isinstance(value, list) or len(value) > MAX_ABLATED_HEADS:
        raise ValueError("interventions: expected ablatedHeads to be a list of pairs")
    pairs = []
    for pair in value:
        is_pair = isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) and type(pair[1]) is int
        if not is_pair or not 0 <= pair[1] < n_heads.get(pair[0], 0):
            raise ValueError("interventions: expected ablatedHeads to be pairs of an attention layer and a head of it")
        pairs.append((pair[0], pair[1]))
    return tuple(dict.fromkeys(pairs))
