"""Result tables as Markdown, the form in which a README shows them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np


def cell(values: Any, digits: int = 2, scale: float = 1) -> str:
    """Return the text "mean ± SD" of `scale` times values; the mean alone for one value, "" for none."""
    values = scale * np.asarray(values, float)
    if not values.size:
        return ""
    mean = f"{round(float(values.mean()), digits) + 0.0:,.{digits}f}"  # + 0, for a rounded -0.001 is no -0.00
    return mean if values.size == 1 else f"{mean} ± {values.std(ddof=1):,.{digits}f}"


def markdown(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table with a left-aligned first column and right-aligned others."""
    ruler = [":---", *["---:"] * (len(titles) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [titles, ruler, *rows])


def grid(
    rows: Iterable[Any] | Mapping[str, Any],
    columns: Iterable[Any] | Mapping[str, Any],
    values: Callable[[Any, Any], Any],
    digits: int = 2,
    scale: float = 1,
    corner: str = "",
) -> str:
    """Return a Markdown table of `values(row, column)`, text or all seeds' numbers; mappings give {title: argument}.

    Args:
        rows, columns: what `values` is called with, or a mapping from titles to that.
        values: returns numbers of all seeds, an empty list for an empty cell, or a text.
    """
    of_rows, of_columns = (
        each if isinstance(each, Mapping) else {str(one): one for one in each} for each in (rows, columns)
    )

    def text(value: Any) -> str:
        return value if isinstance(value, str) else cell(value, digits, scale)

    lines = [[title, *(text(values(row, column)) for column in of_columns.values())] for title, row in of_rows.items()]
    return markdown([corner, *of_columns], lines)
