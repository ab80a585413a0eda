"""Pages that lie elsewhere in the repository, and links to its files, in the site as on GitHub.

A page of docs/ that consists of

    ---
    page: ../../benchmarks/RESULTS.md
    ---

shows that file. Links and pictures stay as GitHub wants them, relative to the file that they stand in; here they are
pointed to a page of the site where there is one (a Python module's is its source), and to the repository otherwise.
"""

from __future__ import annotations

import importlib
import os
import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

from docstrings import plain
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.osutil import relative_uri

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
STUB = re.compile(r"---\npage: (\S+)\n---\n\Z")
FENCE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s#]+)(#[\w.-]+)?\)")
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})


def shown_elsewhere() -> dict[str, str]:
    """Files outside docs/ by their place in the repository, with the pages of docs/ that show them."""
    pages = {}
    for path in sorted(DOCS.rglob("*.md")):
        if stub := STUB.match(path.read_text(encoding="utf-8")):
            place = os.path.relpath(path.parent / stub[1], ROOT)
            pages[Path(place).as_posix()] = path.relative_to(ROOT).as_posix()
    return pages


def others(reference: Path = DOCS / "reference") -> dict[str, list[str]]:
    """By package, its modules that no page of the reference names.

    A line `.. others:: PACKAGE` stands for them. So what is new is described, until somebody gives it a better place. A
    module belongs to the innermost of the packages that have such a line.
    """
    pages = "\n".join(path.read_text(encoding="utf-8") for path in sorted(reference.glob("*.rst")))
    named = set(re.findall(r"^\.\. automodule:: (\S+)$", pages, re.MULTILINE))
    packages = re.findall(r"^\.\. others:: (\S+)$", pages, re.MULTILINE)
    modules: dict[str, list[str]] = {package: [] for package in packages}
    for top in sorted({package.split(".")[0] for package in packages}):
        for path in sorted((ROOT / top).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            if module not in named and path.name != "__main__.py":
                around = [one for one in packages if f"{module}.".startswith(f"{one}.")]
                modules[max(around, key=len)].append(module)
    return modules


def named(match: re.Match[str]) -> str:
    """The directives for the modules that a line stands for."""
    parts = [f"{one}\n{'-' * len(one)}\n\n.. automodule:: {one}\n" for one in others()[match[1]]]
    return "\n".join(parts)


def rows(place: str) -> str:
    """Return a definition list of the names in a table of the library, each with the first line of its docstring.

    A line `.. rows:: MODULE.TABLE` stands for it.
    """
    module, _, name = place.rpartition(".")
    table = getattr(importlib.import_module(module), name)
    about = {key: (getattr(row, "kind", row).__doc__ or "").split("\n") for key, row in table.items()}
    plain(None, "", "", None, None, first := [lines[0] for lines in about.values()])
    return "\n".join(f"``{key}``\n    {line}" for key, line in zip(about, first))


def read(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put the file in the stub's place, and turn its links."""
    source[0] = re.sub(r"^\.\. rows:: (\S+)$", lambda match: rows(match[1]), source[0], flags=re.MULTILINE)
    source[0] = re.sub(r"^\.\. others:: (\S+)$", named, source[0], flags=re.MULTILINE)
    page = f"docs/{docname}.md"
    place = page
    if stub := STUB.match(source[0]):
        place = posixpath.normpath(posixpath.join(posixpath.dirname(page), stub[1]))
        source[0] = (ROOT / place).read_text(encoding="utf-8")
    pages = shown_elsewhere()

    def turned(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(place), match[1]))
        return f"]({_target(target, page, pages)}{match[2] or ''})"

    parts = FENCE.split(source[0])
    parts[::2] = [LINK.sub(turned, part) for part in parts[::2]]
    source[0] = "".join(parts)


def _target(target: str, page: str, pages: dict[str, str]) -> str:
    """What a page of docs/ writes for a place in the repository."""
    readme = posixpath.join(target, "README.md")
    inside = pages.get(target) or pages.get(readme)
    if inside is None and (target.startswith("docs/") or target.endswith((".png", ".jpg", ".svg"))):
        inside = target
    if inside is None:
        return f"repo:{target}"
    return posixpath.relpath(inside, posixpath.dirname(page))


def resolve(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """`repo:` becomes the source of a module that the reference has, or an address."""
    for node in doctree.findall(nodes.reference):
        if node.get("refuri", "").startswith("repo:"):
            place, _, anchor = node["refuri"].removeprefix("repo:").partition("#")
            node["refuri"] = _address(app, docname, place) + (f"#{anchor}" if anchor else "")


def _address(app: Sphinx, docname: str, place: str) -> str:
    module = place.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    here = app.builder.get_target_uri(docname)
    objects: dict[str, Any] = app.env.domains["py"].modules
    if place.endswith(".py") and getattr(app.env, "_viewcode_modules", {}).get(module):
        return relative_uri(here, f"_modules/{module.replace('.', '/')}.html")
    if module in objects:
        return relative_uri(here, app.builder.get_target_uri(objects[module].docname)) + f"#module-{module}"
    if repository := URLS.get("Repository") or URLS.get("Source"):
        return f"{repository.rstrip('/')}/{'blob' if (ROOT / place).is_file() else 'tree'}/main/{place}"
    return relative_uri(here, f"../{place}")  # of a site that lies in the repository


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", read)
    app.connect("doctree-resolved", resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
