"""The linear learning-rate schedule, and the table of schedules that `TrainingConfig.schedule` can name."""

from __future__ import annotations

from tricycle.scheduler import WarmupCosine


class WarmupLinear(WarmupCosine):
    """A learning-rate schedule with linear warm-up from 0, then linear decay."""

    def decay(self, progress: float) -> float:
        """Return the decay factor, from 1 at progress 0 to 0 at progress 1."""
        return 1 - progress


SCHEDULES: dict[str, type[WarmupCosine]] = {"cosine": WarmupCosine, "linear": WarmupLinear}
