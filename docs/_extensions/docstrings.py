"""Convert docstrings for autodoc: they are plain text with names in backticks, and not reStructuredText."""

from __future__ import annotations

import re
import sys
from typing import Any

from sphinx.application import Sphinx

BACKTICKED = re.compile(r"(?<![`:])`([^`\n]+)`(?!`)")
MARKUP = re.compile(r"(``[^`]+``)|([*|\\])|((?<=\w)_(?!\w))")


def escape_docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Convert names in backticks to code, and escape asterisks, bars, backslashes and underscores, in place."""
    literal = False
    for i, line in enumerate(lines):
        literal = line.endswith("::") or (literal and (not line or line.startswith(" ")))
        if literal:
            continue
        code = BACKTICKED.sub(r"``\1``", line)
        lines[i] = MARKUP.sub(lambda match: match[1] or "\\" + match[0], code)


def skip_member(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Skip the fields of named tuples, which the docstrings of the classes describe."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def document_reference_kernels(app: Sphinx) -> None:
    """Replace each kernel in its module by its reference implementation, which autodoc can describe."""
    from tricycle.kernels import (  # noqa: F401  (the imports register the kernels)
        KERNELS,
        activations,
        batched,
        muon,
        quantized,
        quantized_blocks,
        quantized_heads,
        ragged_attention,
        recording,
        recurrent,
        row_attention,
        sublayers,
    )

    others = (
        quantized_blocks.dequantize_blocks,
        quantized_heads.quantized_attention,
        ragged_attention.ragged_attention,
        sublayers.run_sublayers,
    )
    for kernel in (*KERNELS.values(), *others):
        setattr(sys.modules[kernel.reference.__module__], kernel.reference.__name__, kernel.reference)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", escape_docstring, priority=100)  # before napoleon
    app.connect("builder-inited", document_reference_kernels)
    app.connect("autodoc-skip-member", skip_member)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
