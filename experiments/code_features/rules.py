"""Simple rules that name what a token of Python source code is, from `tokenize` and the text around it."""

import io
import keyword
import tokenize
from collections.abc import Sequence

import numpy as np

RULES = (
    "docstring",
    "other string",
    "comment",
    "docstring or comment",
    "number",
    "keyword",
    "import statement",
    "name after def or class",
    "self",
    "attribute of self",
    "indentation after a colon",
    "line break",
    "inside brackets",
)
SKIPPED = (tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)


def label_characters(text: str) -> np.ndarray:
    """Return which RULES hold per character of Python code, booleans (len(text), len(RULES)); SyntaxError, TokenError.

    Raises:
        SyntaxError, tokenize.TokenError: the text is no Python source code.
    """
    labels = np.zeros((len(text), len(RULES)), bool)
    starts = np.cumsum([0, *map(len, io.StringIO(text).readlines()), 0])
    depth, statement, previous = 0, "", ["", ""]
    for kind, string, start, end, _ in tokenize.generate_tokens(io.StringIO(text).readline):
        span = slice(
            starts[min(start[0] - 1, len(starts) - 1)] + start[1], starts[min(end[0], len(starts)) - 1] + end[1]
        )
        if kind == tokenize.COMMENT:
            labels[span, RULES.index("comment")] = True
        if kind in SKIPPED:
            continue
        if kind == tokenize.NEWLINE:
            statement, previous = "", ["", ""]
            continue
        depth -= string in (")", "]", "}")
        names = _token_rules(kind, string, statement, previous)
        labels[span, [RULES.index(name) for name in names]] = True
        labels[span, RULES.index("inside brackets")] = depth > 0
        depth += string in ("(", "[", "{")
        statement, previous = statement or string, [previous[1], string]
    return labels


def _token_rules(kind: int, string: str, statement: str, previous: list[str]) -> list[str]:
    """Return the RULES that hold for a token, given the first token of its statement and the two tokens before it."""
    names = ["import statement"] if (statement or string) in ("import", "from") else []
    if kind == tokenize.STRING:
        names.append("other string" if statement else "docstring")
    elif kind == tokenize.NUMBER:
        names.append("number")
    elif kind == tokenize.NAME:
        rules = {
            "keyword": keyword.iskeyword(string),
            "self": string == "self",
            "name after def or class": previous[1] in ("def", "class"),
            "attribute of self": previous == ["self", "."],
        }
        names += [name for name, holds in rules.items() if holds]
    return names


def label_tokens(text: str, pieces: Sequence[str]) -> np.ndarray:
    """Return which RULES hold for any character of each piece of Python; ValueError, SyntaxError or TokenError.

    A token has the labels of all of its characters. Tokens with a line break are also "line break", or "indentation
    after a colon" if a colon ends the line.

    Args:
        pieces: the texts of the tokens, which are `text` when joined.

    Raises:
        ValueError: the pieces are not the text. SyntaxError, tokenize.TokenError: it is no Python source code.
    """
    if "".join(pieces) != text:
        raise ValueError(f"label_tokens: expected pieces of a text of {len(text)} characters, got other ones")
    characters, labels = label_characters(text), np.zeros((len(pieces), len(RULES)), bool)
    start = 0
    for row, piece in zip(labels, pieces):
        row[:] = characters[start : start + len(piece)].any(axis=0)
        row[RULES.index("docstring or comment")] = row[RULES.index("docstring")] | row[RULES.index("comment")]
        line, found, _ = piece.partition("\n")
        if found and not row[RULES.index("docstring")]:
            after_colon = (text[:start] + line).rstrip(" ").endswith(":")
            row[RULES.index("indentation after a colon" if after_colon else "line break")] = True
        start += len(piece)
    return labels
