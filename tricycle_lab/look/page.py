"""HTML pages in one file, with style, script and data inline, so that they load no other resource."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tricycle.system.files import atomic_write
from tricycle_lab.look.inspectable import InspectableModel
from tricycle_lab.look.trace import Trace

FOLDER = Path(__file__).parent


def render_page(
    name: str, title: str, data: Any, has_server: bool = False, has_worker: bool = False, scripts: Sequence[str] = ()
) -> str:
    """Return an HTML document of a page's and the common HTML, CSS and JS files, with `data` embedded as JSON.

    Args:
        name: the page's files are `<name>.html`, `.css` and `.js`; those of `common` come first.
        title: the title of the document.
        data: JSON data for the script.
        has_server: the script may send requests to the server of the page.
        has_worker: the script may start workers from Blob URLs.
        scripts: further JS files of the page, before its own one.
    """
    style = _read_text("common.css") + _read_text(f"{name}.css")
    script = "".join(map(_read_text, ("common.js", *scripts, f"{name}.js")))
    json_data = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    values = {
        "__POLICY__": content_security_policy(style, script, has_server, has_worker),
        "__TITLE__": html.escape(title),
        "__STYLE__": style,
        "__BODY__": _read_text(f"{name}.html"),
        "__DATA__": json_data.replace("<", "\\u003c"),  # a text in it cannot close the script element
        "__SCRIPT__": script,
    }
    document = re.sub("|".join(values), lambda match: values[match[0]], _read_text("common.html"))
    return document.encode("utf-8", errors="replace").decode("utf-8")  # names of files need not be UTF-8


def content_security_policy(style: str, script: str, has_server: bool, has_worker: bool = False) -> str:
    """Return a Content-Security-Policy for this style and script, requests if `has_server`, workers if `has_worker`."""
    more = "connect-src 'self'; " * has_server + "worker-src blob:; " * has_worker
    return f"default-src 'none'; {more}script-src {_hash(script)}; style-src {_hash(style)}; img-src data:"


def _hash(text: str) -> str:
    """Return the quoted SHA-256 of a script or style for a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}'"


def _read_text(name: str) -> str:
    """Return the text of a file in FOLDER."""
    return (FOLDER / name).read_text(encoding="utf-8")


def collect_static_data(model: InspectableModel, trace: Trace) -> dict[str, Any]:
    """Return {info, trace, attentionMaps, routerMaps, headStatistics, ...} of the whole page."""
    return {
        "info": model.describe(),
        "trace": trace.summary(),
        "attentionMaps": {
            layer.name: [trace.attention_map(layer.name, head, deflate=True) for head in range(layer.n_heads)]
            for layer in trace.attention_layers
        },
        "routerMaps": {name: trace.router_map(name, deflate=True) for name in trace.routing},
        "headStatistics": trace.head_statistics(0, len(trace.attention_layers))["layers"],
        "streamStatistics": trace.stream_statistics(),
        "topPredictions": [trace.top_predictions(position) for position in range(len(trace.ids))],
        "logitLens": trace.logit_lens(),
    }


def write_page(path: str | os.PathLike[str], text: str) -> None:
    """Write a page to a file atomically, replacing an existing file."""
    with atomic_write(Path(path), text=True) as file:
        file.write(text)
