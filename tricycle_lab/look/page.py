"""Pages in one file: a frame, its style, its script and its data, with nothing to be fetched from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
from pathlib import Path
from typing import Any

from tricycle.system.files import atomic_write
from tricycle_lab.look.reading import Reading
from tricycle_lab.look.subjects import Subject

HERE = Path(__file__).parent


def page(frame: str, title: str, data: Any, served: bool = False) -> str:
    """The text of a page.

    Args:
        frame: the name of its files: `<frame>.html`, `.css` and `.js`, within and behind what all pages share.
        data: what JSON can hold, for the script to read.
        served: it may ask who served it.
    """
    style = _text("common.css") + _text(f"{frame}.css")
    script = _text("common.js") + _text(f"{frame}.js")
    json_data = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    parts = {
        "__POLICY__": policy(style, script, served),
        "__TITLE__": html.escape(title),
        "__STYLE__": style,
        "__BODY__": _text(f"{frame}.html"),
        "__DATA__": json_data.replace("<", "\\u003c"),  # no text in it can end the script element
        "__SCRIPT__": script,
    }
    return re.sub("|".join(parts), lambda mark: parts[mark[0]], _text("common.html"))


def policy(style: str, script: str, served: bool) -> str:
    """What a browser may do for the page: run this script alone, and ask nobody but who served it."""
    connect = "connect-src 'self'; " if served else ""
    return f"default-src 'none'; {connect}script-src {_hash(script)}; style-src {_hash(style)}; img-src data:"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}'"


def _text(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def whole(subject: Subject, reading: Reading) -> dict[str, Any]:
    """All that a page can show of a reading, for one that has nobody to ask."""
    attention: dict[str, list[dict[str, Any]]] = {}
    for site in reading.sites:
        attention[site.name] = [reading.attention(site.name, head, small=True) for head in range(site.n_heads)]
        site.held = None  # it can be computed again
    return {
        "about": subject.about(),
        "view": reading.view(),
        "attention": attention,
        "heads": reading.overview(0, len(reading.sites))["heads"],
        "states": reading.states(),
        "tokens": [reading.token(place) for place in range(len(reading.ids))],
        "lens": reading.lens(),
    }


def write_page(path: str | os.PathLike[str], text: str) -> None:
    """Write a page whole or not at all."""
    with atomic_write(Path(path), text=True) as file:
        file.write(text)
