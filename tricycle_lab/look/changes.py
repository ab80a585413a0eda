"""What a page may ask to be changed in a model, checked before it is done."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tricycle.softmaxes import SOFTMAXES
from tricycle_lab.probe import Probe

MOST_HEADS = 10_000  # switched off at once


@dataclass(frozen=True)
class Changes:
    """Parts of a model that are switched off, and another way to weigh keys.

    Attributes:
        off: names of layers that add nothing.
        heads: pairs of a layer with attention and one of its heads.
        softmax: a name in `softmaxes.SOFTMAXES`; None for the model's own.
        temperature: scores are divided by it; 1 leaves them.
    """

    off: tuple[str, ...] = ()
    heads: tuple[tuple[str, int], ...] = ()
    softmax: str | None = None
    temperature: float = 1.0

    @classmethod
    def of(cls, fields: Any, parts: Sequence[str], n_heads: Mapping[str, int]) -> Changes:
        """From what JSON holds.

        Args:
            parts: names of what may be switched off. n_heads: by the names of layers with attention.

        Raises:
            ValueError: anything that is not as it should be.
        """
        fields = {} if fields is None else fields
        if not isinstance(fields, dict) or set(fields) - {"off", "heads", "softmax", "temperature"}:
            raise ValueError("changes: expected off, heads, softmax and temperature")
        softmax = fields.get("softmax")
        if softmax is not None and (not isinstance(softmax, str) or softmax not in SOFTMAXES):
            raise ValueError(f"changes: expected softmax to be one of {', '.join(SOFTMAXES)}")
        temperature = fields.get("temperature", 1.0)
        is_number = isinstance(temperature, (int, float)) and not isinstance(temperature, bool)
        if not is_number or not 1e-3 <= temperature <= 1e3:
            raise ValueError("changes: expected a temperature from 0.001 to 1000")
        off = fields.get("off", [])
        if not isinstance(off, list) or not all(isinstance(name, str) and name in parts for name in off):
            raise ValueError("changes: expected off to be a list of parts of the model")
        heads = _heads(fields.get("heads", []), n_heads)
        return cls(tuple(dict.fromkeys(off)), heads, softmax, float(temperature))

    def make(self, probe: Probe) -> None:
        """Make them, until the probe ends."""
        for name in self.off:
            probe.ablate(name)
        for name in dict.fromkeys(name for name, _ in self.heads):
            probe.ablate(name, heads=[head for other, head in self.heads if other == name])
        if self.weighs:
            temperature = None if math.isclose(self.temperature, 1.0) else self.temperature
            probe.change_softmax(softmax=self.softmax, temperature=temperature)

    @property
    def weighs(self) -> bool:
        """Whether all attention is changed."""
        return self.softmax is not None or not math.isclose(self.temperature, 1.0)

    def first_block(self, names: Sequence[str], other: Changes) -> int:
        """The first of some blocks that computes otherwise than with other changes; their number where none does."""
        if (self.softmax, self.temperature) != (other.softmax, other.temperature):
            return 0
        changed = [*{*self.off} ^ {*other.off}, *(name for name, _ in {*self.heads} ^ {*other.heads})]
        hit = [i for i, name in enumerate(names) if any((part + ".").startswith(name + ".") for part in changed)]
        return min(hit, default=len(names))


def _heads(value: Any, n_heads: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    if not isinstance(value, list) or len(value) > MOST_HEADS:
        raise ValueError("changes: expected heads to be a list of pairs")
    pairs = []
    for pair in value:
        fits = isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) and type(pair[1]) is int
        if not fits or not 0 <= pair[1] < n_heads.get(pair[0], 0):
            raise ValueError("changes: expected heads to be pairs of a layer with attention and one of its heads")
        pairs.append((pair[0], pair[1]))
    return tuple(dict.fromkeys(pairs))
