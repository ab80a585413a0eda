"""A page for any browser: what a model with its softmax in blocks writes, and the scales that it has."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.learned_statistics.real_report import name_of
from experiments.learned_statistics.real_study import Job
from tricycle.system.files import atomic_write

PAGE = Path(__file__).with_name("real_page.html")
LEAST, MOST = -0.25, 1.25  # scales that are shown; others count as these


def write(results: Mapping[str, Any], scales: Mapping[str, Sequence[np.ndarray]], path: Path) -> None:
    """One HTML file that needs nothing else.

    Args:
        results: of which "prompts" and "written" are shown.
        scales: by the way's name, those of each layer, (n, W).
    """
    written = []
    for way in results["written"]:
        job = Job(**{name: way[name] for name in Job._fields})
        written.append({"name": name_of(job), "texts": way["texts"], "same": way["same"], "repeated": way["repeated"]})
    n, window = next(iter(scales.values()))[0].shape
    data = {
        "model": results["settings"]["model"],
        "prompts": results["prompts"],
        "written": written,
        "blocks": n,
        "window": window,
        "least": LEAST,
        "most": MOST,
        "scales": [{"name": name, "values": _packed(np.stack(list(arrays)))} for name, arrays in scales.items()],
    }
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")  # no text ends the script that it stands in
    with atomic_write(path, text=True) as file:
        file.write(PAGE.read_text(encoding="utf-8").replace("__DATA__", text))


def _packed(values: np.ndarray) -> str:
    """(L, n, W) as bytes from 0 (LEAST) to 255 (MOST)."""
    codes = np.rint(255 * (values.clip(LEAST, MOST) - LEAST) / (MOST - LEAST)).astype(np.uint8)
    return base64.b64encode(codes.tobytes()).decode()
