"""Sphinx extension: the theme's navigation tree, computed once for all pages without a source file.

Pages of source code and indexes are not in the tree, so that it is the same on all of them, up to the relative links of
their folder's depth. Sphinx otherwise copies the whole tree for each of several hundred pages.
"""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

BEFORE_THEME = 400  # the theme's listener has Sphinx's default priority, 500


def share_tree(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Replace the function `toctree` of a page without a source file by one that caches its results."""
    if doctree is not None or "toctree" not in context:
        return
    trees, resolve = vars(app.builder).setdefault("shared_trees", {}), context["toctree"]

    def toctree(**options: Any) -> Any:
        key = pagename.count("/"), tuple(sorted(options.items()))
        if key not in trees:
            trees[key] = resolve(**options)
        return trees[key]

    context["toctree"] = toctree


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the listener; it changes no state that parallel builds share."""
    app.connect("html-page-context", share_tree, priority=BEFORE_THEME)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
