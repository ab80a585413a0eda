"""Pages for any browser: one HTML file that needs nothing else."""

import json
from pathlib import Path
from typing import Any

from tricycle.system.files import atomic_write


def write_page(template: Path, path: Path, data: Any) -> None:
    """Write an HTML template with its __DATA__ replaced by JSON, atomically."""
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")  # no text ends the script that holds it
    with atomic_write(path, text=True) as file:
        file.write(template.read_text(encoding="utf-8").replace("__DATA__", text))
