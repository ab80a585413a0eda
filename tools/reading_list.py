"""Write the table of the reading list, with the line count of each file, into docs/architecture.md.

    python tools/reading_list.py          write the table
    python tools/reading_list.py --check  exit with 1 where the table is out of date

`READING_LIST` has the files in reading order, from `Tensor` to a GPT that trains and generates text. The tests check
that each file imports only files above it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- reading list: written by tools/reading_list.py -->\n", "<!-- end of the reading list -->\n"
MAX_TOTAL_LINES = 4500

READING_LIST = """
devices kernels/dispatch kernels/reference/attention kernels/__init__
autograd tensor parameter ops functions activation loss initialisers layers
attention/attend attention/cache attention/rotary
configs/validated configs/model
blocks models bpe batches optimisers scheduler training sampling generate
""".split()


def path_of(name: str) -> Path:
    """Return the path tricycle/NAME.py of a file in the reading list; `name` has no ending."""
    return ROOT / "tricycle" / f"{name}.py"


def n_lines(path: Path) -> int:
    """Count all lines of a file: code, docstrings, comments and empty lines."""
    return len(path.read_text(encoding="utf-8").splitlines())


def module_summary(path: Path) -> str:
    """Return the first paragraph of a module's docstring in one line without the final period, or ""."""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(doc.split("\n\n")[0].split()).rstrip(".")


def table() -> str:
    """Return a Markdown table of linked file, lines and module summary, in reading order, with a row for the total."""
    rows = ["| file in `tricycle/` | lines | what it provides |", "|:---|---:|:---|"]
    total = 0
    for name in READING_LIST:
        path = path_of(name)
        lines = n_lines(path)
        total += lines
        rows.append(f"| [`{name}.py`](../tricycle/{name}.py) | {lines} | {module_summary(path)} |")
    rows.append(f"| {len(READING_LIST)} files | {total:,} | |")
    return "\n".join(rows) + "\n"


def page_with_table(page: str, begin: str = BEGIN, end: str = END, new_table: Callable[[], str] = table) -> str:
    """Return the text of a page with the current table between its markers; ValueError unless each is there once."""
    before, rest = page.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}{new_table()}{end}{after}"


def main(args: list[str], path: Path = PAGE, update: Callable[[str], str] = page_with_table) -> int:
    """Write the table and return 0; with `--check` only compare it, and return 1 if it is out of date, else 0."""
    page = path.read_text(encoding="utf-8")
    updated = update(page)
    if "--check" in args:
        return int(updated != page)
    path.write_text(updated, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
