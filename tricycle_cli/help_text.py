"""Format the help of commands in groups and two columns; `--help-all` of `tricycle train` shows rare flags, too."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterator

WIDE = 10_000  # columns, so that tyro does not wrap lines
LEFT, MAX_COLUMNS = 28, 120
# The flags of each group. Flags of a config that are in no group are shown by --help-all only.
GROUPS = {
    "model": """vocab-size context-window embedding-dim n-heads n-layers activation
        norm positions window softmax bias tied dropout""",
    "training": """batch-size accumulation-steps steps minutes optimiser schedule max-learning-rate min-learning-rate
        warmup-steps weight-decay max-gradient-norm precision recompute seed""",
    "evaluation": "eval-interval eval-batches sample-interval",
}
NAME = re.compile(r"--([\w-]+)")
NO_DEFAULT = re.compile(r" \(default: (|''|None|False|0|0\.0)\)$")
DASHES = re.compile(r"^ +-{9,}$", re.MULTILINE)


def format_help(text: str, show_all: bool, description: str = "") -> str:
    """Return tyro's help with its flags in groups, wrapped for the terminal, without rare ones unless `show_all`.

    Args:
        description: replaces the one in `text`, in which the lines of examples have been joined.
    """
    head, *boxes = re.split(r"\n (?=\S[^\n]*\n -{9})", text)
    sections: dict[str, list[tuple[str, str]]] = {}
    n_hidden = 0
    for box in boxes:
        title, _, rest = box.partition("\n")
        for name, words in _entries(DASHES.split(rest)[-1]):
            found = NAME.search(name)
            group = next((key for key, names in GROUPS.items() if found and found[1] in names.split()), "")
            if title.strip() != "config options":
                sections.setdefault(title.strip(), []).append((name, words))
            elif group or show_all:
                sections.setdefault(group or "rare", []).append((name, words))
            else:
                n_hidden += 1
    columns = min(MAX_COLUMNS, shutil.get_terminal_size((MAX_COLUMNS, 50)).columns)
    usage, *paragraphs = head.strip().split("\n\n")
    paragraphs = description.strip().split("\n\n") if description else paragraphs
    lines = ["\n\n".join(p if p.startswith(" ") else textwrap.fill(p, columns) for p in (usage, *paragraphs))]
    for title, entries in sections.items():
        lines.append(f"\n{title}:")
        for name, words in entries:
            lines += _columns(name, words if show_all else NO_DEFAULT.sub("", words), columns)
    if n_hidden:
        rare = "architectures of pretrained models, and rare training settings"
        lines.append(f"\n--help-all shows {n_hidden} more flags: {rare}.")
    return "\n".join(lines) + "\n"


def _entries(box: str) -> Iterator[tuple[str, str]]:
    """Yield each flag or positional argument of a box with its metavariable, and its help text."""
    name, words = "", list[str]()
    for line in box.splitlines():
        if re.match(r"  \S", line):
            if name:
                yield name, " ".join(words)
            name, *words = re.split(r"\s{2,}", line.strip().replace("{None}|", "").replace("{None,", "{"), maxsplit=1)
        elif name and line.strip():
            words.append(line.strip())
    if name:
        yield name, " ".join(words)


def _columns(name: str, words: str, columns: int) -> list[str]:
    """Return the lines of an entry: its name, and words wrapped in the second column."""
    wrapped = textwrap.wrap(words, max(30, columns - LEFT - 2)) or [""]
    first = [f"  {name}"] if len(name) >= LEFT else [f"  {name:{LEFT}}{wrapped.pop(0)}"]
    return first + [f"  {'':{LEFT}}{line}" for line in wrapped]
