"""Analysis of the imports between the modules of this repository, from their source; no module is executed."""

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
    """Return the path of a file relative to the root, with slashes."""
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> str:
    """Return the dotted module name of a file; `__init__.py` has that of its package."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def file_of(module: str) -> Path | None:
    """Return the file of a module of this repository, None for other modules."""
    base = ROOT.joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def imported(path: Path) -> set[str]:
    """Return all modules that a file imports.

    They include imports in functions, imports for type checkers only, strings passed to `import_module` and similar
    functions, and strings in the format of an entry point of this repository.
    """
    return {module for module, _ in imports_of(path)}


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the modules that a file imports, with their line numbers."""
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
    """Yield what `import_module("a.b")` imports; for an f-string, the package at its start."""
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
    """Yield what `from package import name` loads: a module `name`, or the package and the source of the name."""
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
