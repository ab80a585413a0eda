"""Control vectors (steering vectors) as GGUF files, in the format that llama.cpp reads.

The tensor `direction.N` is added to the residual stream after block N, counted from 0. The format has no vector for the
first block. (Sources: llama.cpp's `common_control_vector_load` and `src/llama-adapter.cpp`.)
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

from tricycle.pretrained.gguf_file import read_gguf_header, short_repr
from tricycle.pretrained.gguf_writer import write_arrays

ARCHITECTURE = "controlvector"
PREFIX = "direction."


def write_control_vectors(path: str | os.PathLike[str], vectors: Mapping[int, np.ndarray], model_hint: str) -> None:
    """Write or replace a GGUF file of control vectors by block number, atomically; ValueError for none or a block < 1.

    Args:
        path: of the file.
        vectors: (C,), by the index of the block after which they are added, from 1.
        model_hint: the architecture of the model, such as "llama".

    Raises:
        ImportError: the package gguf is not installed.
        ValueError: no vectors, or one for the first block.
    """
    if not vectors or min(vectors) < 1:
        raise ValueError(f"write_control_vectors: expected blocks from 1, got {sorted(vectors) or 'none'}")
    arrays = {f"{PREFIX}{layer}": np.asarray(vector, np.float32) for layer, vector in sorted(vectors.items())}
    metadata = {f"{ARCHITECTURE}.model_hint": model_hint, f"{ARCHITECTURE}.layer_count": len(arrays)}
    write_arrays(path, ARCHITECTURE, metadata, arrays)


def read_control_vectors(path: str | os.PathLike[str], n_layers: int, width: int) -> dict[int, np.ndarray]:
    """Read a GGUF file's control vectors, float32 (C,), by block number from 1; ValueError if not for the model.

    Args:
        n_layers: the number of blocks of the model. width: C of the model.

    Raises:
        OSError: the file does not exist or cannot be read.
        ValueError: not a GGUF file of control vectors, a damaged file, or vectors that do not fit the model.
    """
    file = read_gguf_header(path)
    got = file.metadata.get("general.architecture")
    if got != ARCHITECTURE:
        raise ValueError(f"{path}: expected general.architecture to be {ARCHITECTURE!r}, got {short_repr(got)}")
    names = {f"{PREFIX}{layer}": layer for layer in range(1, n_layers)}
    vectors = {}
    for name, info in file.tensors.items():
        if name not in names or info.shape != (width,) or info.dtype_name != "F32":
            expected = f"tensors {PREFIX}1 to {PREFIX}{n_layers - 1} of {width} F32 values, for this model"
            raise ValueError(f"{path}: expected {expected}, got {short_repr(name)} {info.shape} {info.dtype_name}")
        vectors[names[name]] = np.array(file.read(info), np.float32)
        if not np.isfinite(vectors[names[name]]).all():
            raise ValueError(f"{path}: expected finite values of tensor {name}, got infinity or NaN")
    if not vectors:
        raise ValueError(f"{path}: expected at least one tensor {PREFIX}N, got none")
    return vectors
