"""Import the modules of compiled loops at first use: the import compiles the loops or loads cached machine code."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from tricycle_accelerators import libraries

# Modules with loops that are loaded on their own, each after those whose loops it calls.
MODULES = (
    "vector_loops",
    "recurrent_loops",
    "decode_loops",
    "sublayer_loops",
    "training_loops",
    "activation_loops",
    "matrix_loops",
    "low_rank_loops",
    "block_loops",
    "packed_matmul",
    "expert_loops",
    "attention_loops",
    "loops",
)
AMX_MODULES = "amx_loops", "amx_packed"
# Loops that a model with blocks needs for a token. They are loaded with those of its prompt, before its file is read,
# because LLVM takes up to 60 MB of memory meanwhile.
LOADED_BEFORE = {"block_loops": ("vector_loops", "sublayer_loops", "decode_loops")}


# Cache: valid for the life of the process: modules.
@cache
def load_loops(name: str) -> Any:
    """Import (or compile) and return this folder's module `name`; RuntimeError if Numba's libraries cannot be loaded.

    Raises:
        RuntimeError: Numba's libraries cannot be loaded, for example under a low memory limit.
    """
    discard_stale_code(Path(__file__).parent)
    for other in LOADED_BEFORE.get(name, ()):
        load_loops(other)
    if name in MODULES + AMX_MODULES and not _has_machine_code(Path(__file__).parent, name):
        _announce_compilation()
    try:
        loops = import_module(f"{__package__}.{name}")
    except OSError as error:
        problem = str(error).partition(". ")[0]
        raise RuntimeError(f"Numba failed ({problem}): free some memory, or set TRICYCLE_KERNELS=-numba") from error
    libraries.release_memory()
    return loops


def _has_machine_code(folder: Path, name: str) -> bool:
    """Return whether a folder has machine code of a module's loops, or is read-only: Numba keeps it elsewhere then."""
    return any(folder.glob(f"__pycache__/{name}.*.nbi")) or not os.access(folder, os.W_OK)


# Cache: done once in a process.
@cache
def _announce_compilation() -> None:
    """Print to a terminal that the caller waits for the compiler."""
    if sys.stderr is not None and sys.stderr.isatty():
        print("note: Numba compiles kernels for this processor, once, which takes up to a minute", file=sys.stderr)


# Cache: done once in a process.
@cache
def discard_stale_code(folder: Path) -> None:
    """Delete a folder's Numba cache unless its record says that it was compiled from the current sources.

    Numba looks at the source of a function alone, and not at the other files whose functions it inlines: after an
    update the code of functions that have not changed would be that of before. In a folder that is read-only, whose
    code Numba keeps elsewhere, nothing is done.
    """
    files = [(path.name, path.stat()) for place in (folder, folder.parent) for path in sorted(place.glob("*.py"))]
    sources = "\n".join(f"{name} {facts.st_size} {facts.st_mtime_ns}" for name, facts in files)
    kept = folder / "__pycache__"
    with suppress(OSError):
        kept.mkdir(exist_ok=True)
        record = kept / "compiled_from.txt"
        if record.exists() and record.read_text(encoding="utf-8") == sources:
            return
        for path in kept.glob("*.nb[ci]"):
            path.unlink(missing_ok=True)
        record.write_text(sources, encoding="utf-8")
