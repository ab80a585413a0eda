"""Which modules of this repository import which, read from their text: nothing is run."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("tricycle", *(f"tricycle_{name}" for name in "accelerators cli datasets lab mpi serve".split()))
PROGRAMS = ("train_smol_gpt", "inference")
SHIPPED = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
SHIPPED += [ROOT / f"{name}.py" for name in PROGRAMS]
STUDIES = sorted(path for name in ("experiments", "benchmarks") for path in (ROOT / name).rglob("*.py"))

ENTRY_POINT = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_][\w.]*$")  # "tricycle_accelerators.cpu:register"
IMPORTERS = ("import_module", "__import__", "find_spec", "resolve_name")


def name_of(path: Path) -> str:
    """Its place below the root, as Git writes it."""
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> str:
    """The dotted name of a file's module; a package's own file has that of the package."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def file_of(module: str) -> Path | None:
    """The file of a module of this repository; None for anything else."""
    place = ROOT.joinpath(*module.split("."))
    for path in (place.with_suffix(".py"), place / "__init__.py"):
        if path.is_file():
            return path
    return None


def imported(path: Path) -> set[str]:
    """Every module that a file imports, wherever in the file it says so.

    Imports within functions and those for type checkers alone count as any other, and so do strings that are given to
    `import_module` and its kin, and strings that look like entry points of this repository.
    """
    return {module for module, _ in imports_of(path)}


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    """The modules that a file imports, with the number of the line."""
    for node in ast.walk(tree_of(path)):
        for module in _imports_in(node):
            yield module, node.lineno


def _imports_in(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            yield from _sources(node.module or "", alias.name)
    elif isinstance(node, ast.Call):
        yield from _imports_by_string(node)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        entry_point = ENTRY_POINT.match(node.value)
        if entry_point and file_of(entry_point[1]):
            yield entry_point[1]


def _imports_by_string(call: ast.Call) -> Iterator[str]:
    """What `import_module("a.b")` imports; of an f-string the package that it begins with."""
    function = call.func
    called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
    if called not in IMPORTERS or not call.args:
        return
    name = call.args[0]
    if isinstance(name, ast.JoinedStr):
        name = name.values[0]
    if isinstance(name, ast.Constant):
        yield name.value.rstrip(".")


def _sources(package: str, name: str) -> Iterator[str]:
    """Where `from package import name` leads: to a module of that name, or the package and where it has it from."""
    if file_of(f"{package}.{name}"):
        yield f"{package}.{name}"
        return
    yield package
    path = file_of(package)
    if path is None or path.name != "__init__.py":
        return
    for node in tree_of(path).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == package.split(".")[0]:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    yield from _sources(node.module, alias.name)
