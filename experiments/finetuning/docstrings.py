"""Functions of the standard library with the first sentence of their docstrings.

Whole modules are held out, with all files of their folder, so that training contains no helper of a held-out function.
Held-out functions whose signature or code also occurs in a module of another part are removed.
"""

import ast
import hashlib
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from experiments.shared.texts import python_files, python_root

CODE = 60, 700  # characters of a function, at least and at most
LINE = 12, 100  # characters of its first docstring sentence
PARTS = {0: "test", 1: "validation"}  # by the hash of a module's name modulo 10; the others are for training
ASK = "What does this Python function do? Answer in one line.\n\n"


class Function(NamedTuple):
    """A function with the first sentence of its docstring.

    Attributes:
        module: the file or folder of the library that it is from, without underscores in front.
        code: without its docstring. line: the docstring's first sentence.
    """

    module: str
    name: str
    code: str
    line: str

    @property
    def question(self) -> str:
        """Return the question: the instruction and the code."""
        return f"{ASK}{self.code}"


@cache
def functions() -> dict[str, list[Function]]:
    """Return {"train", "validation", "test": functions}, disjoint by module, shuffled, cached; ValueError if empty.

    Raises:
        ValueError: this Python has no source files.
    """
    parts: dict[str, list[Function]] = {"train": [], "validation": [], "test": []}
    for one in sorted(documented_functions(), key=lambda one: hashlib.sha256("\n".join(one).encode()).digest()):
        number = int(hashlib.sha256(one.module.encode()).hexdigest(), 16)
        parts[PARTS.get(number % 10, "train")].append(one)
    if not all(parts.values()):
        raise ValueError("functions: expected the standard library's .py files, found too few of them")
    seen: set[str] = set()
    for name in ("train", "validation", "test"):
        kept = []
        for one in parts[name]:
            if one.line.lower() not in seen and one.code not in seen:
                kept.append(one)
        seen |= {text for one in kept for text in (one.line.lower(), one.code)}
        parts[name] = kept
    return parts


def documented_functions() -> Iterator[Function]:
    """Yield the standard library's functions whose docstring and code have lengths within LINE and CODE."""
    for name in python_files():
        module = name.split("/")[0].removesuffix(".py").strip("_").removeprefix("py")  # _pydecimal is decimal
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about escapes in strings
                text = (python_root() / name).read_text(encoding="utf-8")
                tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        yield from functions_in(tree, text.split("\n"), module)


def functions_in(tree: ast.AST, lines: list[str], module: str) -> Iterator[Function]:
    """Yield the functions of a syntax tree with a docstring within LINE and code within CODE characters."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or len(node.body) < 2:
            continue
        sentence = summary(ast.get_docstring(node) or "")
        doc = node.body[0]
        if not LINE[0] <= len(sentence) <= LINE[1] or " " not in sentence or not isinstance(doc, ast.Expr):
            continue
        if node.body[1].lineno <= (doc.end_lineno or 0):
            continue
        first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
        kept = lines[first - 1 : doc.lineno - 1] + lines[doc.end_lineno : node.end_lineno]
        code = dedent_lines(kept)
        if CODE[0] <= len(code) <= CODE[1] and sentence not in code:
            yield Function(module, node.name, code, sentence)


def summary(docstring: str) -> str:
    """Return the first sentence of a docstring's first paragraph, on one line."""
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) (?=[A-Z])", paragraph)[0]


def dedent_lines(lines: list[str]) -> str:
    """Return the non-empty lines joined by newlines, without their common indentation."""
    filled = [line.expandtabs(4) for line in lines if line.strip()]
    least = min(len(line) - len(line.lstrip()) for line in filled)
    return "\n".join(line[least:].rstrip() for line in filled)


# -------------------------------------------------------------------- how good an answer is
def first_line(text: str) -> str:
    """Return the first non-empty line of an answer, without quotation marks; "" if there is none."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    return lines[0].strip("\"'`# ") if lines else ""


def words_of(line: str) -> Counter[str]:
    """Return the counts of the lower-case words, of letters and digits, in a line."""
    return Counter(re.findall(r"[a-z0-9]+", line.lower()))


def rouge1_f1(answer: str, reference: str) -> float:
    """Return the F1 score, 0 to 1, of the common words of two lines (ROUGE-1, Lin 2004)."""
    answer_words, reference_words = words_of(answer), words_of(reference)
    n_all = answer_words.total() + reference_words.total()
    return 2 * (answer_words & reference_words).total() / n_all if n_all else 0.0


def same(answer: str, reference: str) -> bool:
    """Return whether two lines have the same words in the same order, ignoring case and punctuation."""
    return re.findall(r"[a-z0-9]+", answer.lower()) == re.findall(r"[a-z0-9]+", reference.lower())
