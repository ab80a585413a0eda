"""Convert docstrings for autodoc: they are plain text with names in backticks, and not reStructuredText."""

from __future__ import annotations

import importlib
import pkgutil
import re
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
    from tricycle import kernels
    from tricycle.kernels.dispatch import Kernel

    found = pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}.")
    for module in (kernels, *(importlib.import_module(info.name) for info in found)):
        for name, value in list(vars(module).items()):
            if isinstance(value, Kernel) and value.reference.__module__ == module.__name__:
                setattr(module, name, value.reference)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", escape_docstring, priority=100)  # before napoleon
    app.connect("builder-inited", document_reference_kernels)
    app.connect("autodoc-skip-member", skip_member)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
