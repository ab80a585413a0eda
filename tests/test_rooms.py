"""The rooms of the house: who may import whom, and how large a function may be."""

import ast
import re
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import imports
import pytest
from imports import PACKAGES, ROOT, SHIPPED, STUDIES, file_of, imported, imports_of, name_of, tree_of

sys.path.insert(0, str(ROOT / "tools"))
import family_table
from reading_list import MAX_TOTAL_LINES, PAGE, READING_LIST, n_lines, page_with_table, path_of

LIBRARY = [path for path in SHIPPED if name_of(path).startswith("tricycle/")]
EVERY_FILE = [*SHIPPED, *STUDIES]
OUTSIDE = (*(name for name in PACKAGES if name != "tricycle"), "experiments", "benchmarks")


# -------------------------------------------------------------------- who imports whom
def test_imports_are_absolute():
    """So that a reader sees where a name comes from, and the tests below do."""
    relative = [
        f"{name_of(path)}:{node.lineno}"
        for path in EVERY_FILE
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert relative == []


def test_no_circular_imports():
    """Imports within functions, for type checkers alone and by strings count."""
    graph = {}
    for path in EVERY_FILE:
        files = {file_of(module) for module in imported(path)}
        graph[path] = files - {None, path}
    assert sum(map(len, graph.values())) > 500
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(map(name_of, error.args[1]))}")


@pytest.mark.parametrize("name", READING_LIST)
def test_reading_list_files_import_only_earlier_files(name):
    """A file imports files of the list above it, and no other file of the library."""
    before = READING_LIST[: READING_LIST.index(name)]
    wrong = [
        f"{name}.py:{line} imports {module}"
        for module, line in imports_of(path_of(name))
        if module.split(".")[0] == "tricycle" and name_in_list(file_of(module)) not in before
    ]
    assert wrong == []


def name_in_list(path: Path | None) -> str:
    return "" if path is None else name_of(path).removeprefix("tricycle/").removesuffix(".py")


def test_reading_list_length_is_limited():
    assert sum(n_lines(path_of(name)) for name in READING_LIST) <= MAX_TOTAL_LINES


def test_reading_list_table_is_up_to_date():
    page = PAGE.read_text(encoding="utf-8")
    assert page_with_table(page) == page, "run python tools/reading_list.py"


def test_family_table_is_up_to_date():
    page = family_table.PAGE.read_text(encoding="utf-8")
    assert family_table.page_with_table(page) == page, "run python tools/family_table.py"


@pytest.mark.parametrize("path", LIBRARY, ids=name_of)
def test_library_does_not_mention_other_packages(path):
    """Neither in code nor in words, but for the last room, which opens the command line."""
    if path.name != "__main__.py":
        named = re.findall(rf"\b({'|'.join(OUTSIDE)})\b", without_docstrings(path))
        assert named == []
    assert not {module.split(".")[0] for module in imported(path)} & set(OUTSIDE) or path.name == "__main__.py"


def without_docstrings(path: Path) -> str:
    """The code of a file, without comments and docstrings: they may point a reader anywhere."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            node.body[0] = ast.Pass()
    return ast.unparse(tree)


def test_accelerators_import_only_kernels_and_their_dependencies():
    """They could be written by someone else, for another device."""
    allowed = ("tricycle_accelerators", "tricycle.kernels", "tricycle.devices", "tricycle.system.cgroups")
    for path in SHIPPED:
        if name_of(path).startswith("tricycle_accelerators/"):
            tricycle_imports = {module for module in imported(path) if module.startswith("tricycle")}
            assert {module for module in tricycle_imports if not module.startswith(allowed)} == set(), name_of(path)


# -------------------------------------------------------------------- the reader of imports
SOURCE = '''
import lib.first
from lib import thing, module
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import lib.types

def late():
    """lib.words are no import."""
    from lib.late import inner
    importlib.import_module("lib.string")
    __import__(f"lib.{name}")
    return "lib.entry:register", "lib.nowhere:register", "lib.entry"
'''


def test_imports_are_detected(tmp_path, monkeypatch):
    monkeypatch.setattr(imports, "ROOT", tmp_path)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "__init__.py").write_text("from lib.hidden import it as thing\n")
    for name in ("first", "module", "types", "late", "string", "entry", "hidden"):
        (tmp_path / "lib" / f"{name}.py").write_text("")
    (tmp_path / "program.py").write_text(SOURCE)
    found = imported(tmp_path / "program.py")
    names = "first hidden module types late string entry"
    assert found - {"typing"} == {"lib", *(f"lib.{name}" for name in names.split())}
    assert ("lib.late", 10) in set(imports_of(tmp_path / "program.py"))


# -------------------------------------------------------------------- a function fits on a screen
MOST_LINES = 60
LONG = re.compile(r"(^|[.:]\s|\n)\s*Long: \S")  # a sentence that gives the reason


def functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def too_long(tree: ast.Module) -> list[str]:
    problems = []
    for function in functions(tree):
        n_lines = function.end_lineno - function.lineno + 1
        if n_lines > MOST_LINES and not LONG.search(ast.get_docstring(function) or ""):
            problems.append(f"{function.name}, line {function.lineno}: {n_lines} lines")
    return problems


@pytest.mark.parametrize("path", EVERY_FILE, ids=name_of)
def test_functions_have_at_most_60_lines(path):
    """From `def` to the end, docstring included, unless the docstring has a sentence that begins with "Long:"."""
    assert too_long(tree_of(path)) == []


def test_too_long_functions_are_detected():
    body = "    x = 1\n" * MOST_LINES
    assert too_long(ast.parse(f"def f():\n{body}")) == [f"f, line 1: {MOST_LINES + 1} lines"]
    assert too_long(ast.parse(f"def f():\n{body[:-10]}")) == []
    assert too_long(ast.parse(f'def f():\n    """Do. Long: a table of cases."""\n{body}')) == []
    assert len(too_long(ast.parse(f'def f():\n    """Long:"""\n{body}'))) == 1
    assert len(too_long(ast.parse(f"class A:\n  def f():\n{body}"))) == 1


# -------------------------------------------------------------------- one formatter
def test_formatter_has_no_exceptions():
    """Neither by a comment nor by a setting; and every change goes through it."""
    pattern = re.compile(r"#\s*(fmt|yapf)\s*:")
    paths = [*EVERY_FILE, *sorted((ROOT / "tests").rglob("*.py"))]
    excepted = [name_of(path) for path in paths if pattern.search(path.read_text(encoding="utf-8"))]
    assert excepted == []
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert not re.search(r"^(extend-)?exclude =|\[tool\.ruff\.format\]", settings, re.MULTILINE)
    assert "entry: ruff format --check .\n" in (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert "\npre-commit run --all-files\n" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
