"""Result tables as Markdown, the form in which they stand in a README."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def cell(values: Any, digits: int = 2, scale: float = 1) -> str:
    """The mean over seeds and, where there are several, their standard deviation."""
    values = scale * np.asarray(values, float)
    mean = f"{round(float(values.mean()), digits) + 0.0:,.{digits}f}"  # + 0, for a rounded -0.001 is no -0.00
    return mean if values.size == 1 else f"{mean} ± {values.std(ddof=1):,.{digits}f}"


def markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are numbers."""
    ruler = [":---", *["---:"] * (len(titles) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [titles, ruler, *rows])
