"""Sphinx extension: compute the theme's navigation tree from the titles of pages alone.

The tree shows pages, not their sections and functions. Sphinx otherwise copies the sections and functions of all pages
for each of several hundred pages, which takes a third of the time of a build. Pages of source code and indexes are not
in the tree, so that it is the same on all of them, up to the relative links of their folder's depth.
"""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

BEFORE_THEME = 400  # the theme's listener has Sphinx's default priority, 500


def titles_of(contents: nodes.Node) -> nodes.Node:
    """Return the table of contents of a page without its sections and functions: its title and the pages below it."""
    titles = contents.copy()
    for entry in contents.children:
        kept = entry.copy()
        kept += entry.children[0].deepcopy()
        below = [tree.deepcopy() for tree in entry.findall(addnodes.toctree)]
        kept += [nodes.bullet_list("", *below)] if below else []
        titles += kept
    return titles


def share_tree(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Replace the function `toctree` of a page by one that copies titles alone and caches its results."""
    if "toctree" not in context:
        return
    environment, state, resolve = app.env, vars(app.builder), context["toctree"]
    if "titles" not in state:
        state.update(titles={name: titles_of(contents) for name, contents in environment.tocs.items()}, trees={})

    def toctree(**options: Any) -> Any:
        key = pagename.count("/") if doctree is None else pagename, *sorted(options.items())
        if key not in state["trees"]:
            everything, environment.tocs = environment.tocs, state["titles"]
            try:
                state["trees"][key] = resolve(**options)
            finally:
                environment.tocs = everything
        return state["trees"][key]

    context["toctree"] = toctree


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the listener; it changes no state that parallel builds share."""
    app.connect("html-page-context", share_tree, priority=BEFORE_THEME)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
