"""Tensors of pretrained models in safetensors files: lazy reading as views of the file, and streamed writing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from tricycle.pretrained.stored_model import StoredTensor
from tricycle.system.safetensors_file import TensorInfo, read_header, write_header

READABLE_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "U8": "u1"}  # bytes: blocks of MXFP4
_CHUNK_SIZE = 2**22  # values that are converted and written at once


# -------------------------------------------------------------------- reading
def read_tensors(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return a safetensors file's tensors by name, memory-mapped when read, and metadata; ValueError if it is damaged.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a truncated, damaged or malicious file.
    """
    infos, metadata, _ = read_header(path)
    return {name: _stored_tensor(path, name, info) for name, info in infos.items()}, metadata


def _stored_tensor(path: Path, name: str, info: TensorInfo) -> StoredTensor:
    """Return a StoredTensor whose values are a view of the memory-mapped file; it raises ValueError for integers."""

    def read() -> np.ndarray:
        if info.dtype_name not in READABLE_DTYPES:
            raise ValueError(f"{path}: {name}: expected floating-point numbers, got {info.dtype_name}")
        if not math.prod(info.shape):
            return np.empty(info.shape, np.float32)
        array = np.asarray(np.memmap(path, READABLE_DTYPES[info.dtype_name], "r", info.start, info.shape))
        return view_bfloat16(array) if info.dtype_name == "BF16" else array

    return StoredTensor(info.shape, info.dtype_name, read)


def view_bfloat16(bits: np.ndarray) -> np.ndarray:
    """Return uint16 bits as a bfloat16 view, or as a float32 copy if ml_dtypes is not installed."""
    try:
        import ml_dtypes
    except ModuleNotFoundError:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(ml_dtypes.bfloat16)


# -------------------------------------------------------------------- writing
def write_tensors(
    file: IO[bytes],
    shapes: dict[str, tuple[int, ...]],
    arrays: Iterable[tuple[str, Any]],
    dtype_name: str,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file with all `arrays` as `dtype_name`; ValueError unless they match `shapes` in order.

    Tensors are converted one by one.

    Args:
        shapes: by name, in the order of `arrays`.
        arrays: names and float32 values.
        dtype_name: data type of all tensors in the file: F32, F16 or BF16.
        metadata: texts by name, stored in the header.
    """
    fields = {"format": "pt", **(metadata or {})}
    write_header(file, {name: (dtype_name, shape) for name, shape in shapes.items()}, fields)
    for (name, array), (expected, shape) in zip(arrays, shapes.items(), strict=True):
        if name != expected or array.shape != shape:
            raise ValueError(f"write_tensors: expected {expected} {shape}, got {name} {array.shape}")
        flat = array.reshape(-1)
        for start in range(0, flat.size, _CHUNK_SIZE):
            file.write(_encode(flat[start : start + _CHUNK_SIZE], dtype_name))


def _encode(values: np.ndarray, dtype_name: str) -> bytes:
    """Return little-endian bytes of the values in "F32", "F16" or "BF16", rounded to nearest even."""
    if dtype_name != "BF16":
        return values.astype({"F32": "<f4", "F16": "<f2"}[dtype_name]).tobytes()
    bits = values.astype("<f4").view("<u4")
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16  # to nearest, ties to even
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype("<u2").tobytes()
