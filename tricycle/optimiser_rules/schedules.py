"""Learning-rate schedules besides `tricycle.scheduler.WarmupCosine`, and the table of their names."""

from __future__ import annotations

from tricycle.scheduler import WarmupCosine


class WarmupLinear(WarmupCosine):
    """A linear rise from 0, then a straight line down."""

    def decay(self, progress: float) -> float:
        return 1 - progress


SCHEDULES: dict[str, type[WarmupCosine]] = {"cosine": WarmupCosine, "linear": WarmupLinear}
