"""Include pages from outside docs/ in the site, convert links to files, and expand the directives of the reference.

A page of docs/ that consists of

    ---
    page: ../../benchmarks/RESULTS.md
    ---

shows that file. Links in Markdown files are relative to the file, as on GitHub. On the site they lead to the page of
the target (for a Python module, to its source), or to the repository if the site has no such page.
"""

from __future__ import annotations

import importlib
import os
import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

from docstrings import escape_docstring
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.osutil import relative_uri

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
STUB = re.compile(r"---\npage: (\S+)\n---\n\Z")
FENCE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s#]+)(#[\w.-]+)?\)")
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})


def included_files() -> dict[str, str]:
    """Return the paths of included files outside docs/, each with the path of the page that shows it."""
    pages = {}
    for path in sorted(DOCS.rglob("*.md")):
        if stub := STUB.match(path.read_text(encoding="utf-8")):
            file = os.path.relpath(path.parent / stub[1], ROOT)
            pages[Path(file).as_posix()] = path.relative_to(ROOT).as_posix()
    return pages


def remaining_modules(reference: Path = DOCS / "reference") -> dict[str, list[str]]:
    """Return the modules without an entry in the reference, by package.

    The directive `.. remaining-modules:: PACKAGE` describes them, so that new modules are in the reference without an
    explicit entry. A module belongs to the innermost package with such a directive.
    """
    pages = "\n".join(path.read_text(encoding="utf-8") for path in sorted(reference.glob("*.rst")))
    explicit = set(re.findall(r"^\.\. automodule:: (\S+)$", pages, re.MULTILINE))
    packages = re.findall(r"^\.\. remaining-modules:: (\S+)$", pages, re.MULTILINE)
    modules: dict[str, list[str]] = {package: [] for package in packages}
    for top in sorted({package.split(".")[0] for package in packages}):
        for path in sorted((ROOT / top).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            if module not in explicit and path.name != "__main__.py":
                containing = [package for package in packages if f"{module}.".startswith(f"{package}.")]
                modules[max(containing, key=len)].append(module)
    return modules


def automodule_directives(package: str) -> str:
    """Return the directives that describe the remaining modules of a package."""
    modules = remaining_modules()[package]
    return "\n".join(f"{module}\n{'-' * len(module)}\n\n.. automodule:: {module}\n" for module in modules)


def table_entries(path: str) -> str:
    """Return a definition list of the names in a table of the library, each with the first line of its docstring.

    The directive `.. table-entries:: MODULE.TABLE` is replaced by it.
    """
    module, _, name = path.rpartition(".")
    table = getattr(importlib.import_module(module), name)
    summaries = [(getattr(entry, "kind", entry).__doc__ or "").split("\n")[0] for entry in table.values()]
    escape_docstring(None, "", "", None, None, summaries)
    return "\n".join(f"``{key}``\n    {summary}" for key, summary in zip(table, summaries))


def read_source(app: Sphinx, docname: str, source: list[str]) -> None:
    """Expand the directives of a page, replace a stub by its file, and convert the links outside code blocks."""
    for directive, expand in (("table-entries", table_entries), ("remaining-modules", automodule_directives)):
        pattern = rf"^\.\. {directive}:: (\S+)$"
        source[0] = re.sub(pattern, lambda match, expand=expand: expand(match[1]), source[0], flags=re.MULTILINE)
    page = f"docs/{docname}.md"
    file = page
    if stub := STUB.match(source[0]):
        file = posixpath.normpath(posixpath.join(posixpath.dirname(page), stub[1]))
        source[0] = (ROOT / file).read_text(encoding="utf-8")
    pages = included_files()

    def convert_link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(file), match[1]))
        return f"]({_link_target(target, page, pages)}{match[2] or ''})"

    parts = FENCE.split(source[0])
    parts[::2] = [LINK.sub(convert_link, part) for part in parts[::2]]
    source[0] = "".join(parts)


def _link_target(target: str, page: str, pages: dict[str, str]) -> str:
    """Return the link of a page to a path in the repository: a relative path in docs/, or `repo:PATH`."""
    readme = posixpath.join(target, "README.md")
    inside = pages.get(target) or pages.get(readme)
    if inside is None and (target.startswith("docs/") or target.endswith((".png", ".jpg", ".svg"))):
        inside = target
    if inside is None:
        return f"repo:{target}"
    return posixpath.relpath(inside, posixpath.dirname(page))


def resolve_links(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Replace `repo:PATH` by the URL of the module's source on the site, or of the file in the repository."""
    for node in doctree.findall(nodes.reference):
        if node.get("refuri", "").startswith("repo:"):
            path, _, anchor = node["refuri"].removeprefix("repo:").partition("#")
            node["refuri"] = _url(app, docname, path) + (f"#{anchor}" if anchor else "")


def _url(app: Sphinx, docname: str, path: str) -> str:
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    here = app.builder.get_target_uri(docname)
    objects: dict[str, Any] = app.env.domains["py"].modules
    if path.endswith(".py") and getattr(app.env, "_viewcode_modules", {}).get(module):
        return relative_uri(here, f"_modules/{module.replace('.', '/')}.html")
    if module in objects:
        return relative_uri(here, app.builder.get_target_uri(objects[module].docname)) + f"#module-{module}"
    if repository := URLS.get("Repository") or URLS.get("Source"):
        return f"{repository.rstrip('/')}/{'blob' if (ROOT / path).is_file() else 'tree'}/main/{path}"
    return relative_uri(here, f"../{path}")  # for a site that is built inside the repository


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", read_source)
    app.connect("doctree-resolved", resolve_links)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
