"""Docstrings for autodoc: they are plain text with names in ticks, which reStructuredText would misread."""

from __future__ import annotations

import re
import sys
from typing import Any

from sphinx.application import Sphinx

TICKED = re.compile(r"(?<![`:])`([^`\n]+)`(?!`)")
MARKS = re.compile(r"(``[^`]+``)|([*|\\])|((?<=\w)_(?!\w))")


def plain(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Names in ticks become code; stars, bars, backslashes and trailing underscores are themselves."""
    literal = False
    for i, line in enumerate(lines):
        literal = line.endswith("::") or (literal and (not line or line.startswith(" ")))
        if literal:
            continue
        code = TICKED.sub(r"``\1``", line)
        lines[i] = MARKS.sub(lambda mark: mark[1] or "\\" + mark[0], code)


def skipped(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """The fields of a named tuple are described in its docstring."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def plain_kernels(app: Sphinx) -> None:
    """A kernel is described by its plain version, where that stands."""
    from tricycle.kernels import (  # noqa: F401  (they define kernels)
        KERNELS,
        activations,
        batched,
        muon,
        quantized,
        recurrent,
        row_attention,
    )

    for name, kernel in KERNELS.items():
        setattr(sys.modules[kernel.reference.__module__], name, kernel.reference)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", plain, priority=100)  # before napoleon
    app.connect("builder-inited", plain_kernels)
    app.connect("autodoc-skip-member", skipped)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
