"""Other people's models in files of the format "safetensors", whose values are read where they lie."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from tricycle.pretrained.source import StoredTensor
from tricycle.system.safetensors_file import Place, read_places, write_header

READABLE = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


# -------------------------------------------------------------------- reading
def read_tensors(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors of a file, by name, and its metadata. Only the header is read.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a file that is cut off, damaged or made to harm; says how.
    """
    places, metadata, _ = read_places(path)
    return {name: _stored(path, name, place) for name, place in places.items()}, metadata


def _stored(path: Path, name: str, place: Place) -> StoredTensor:
    kind, shape, start = place

    def read() -> np.ndarray:
        if kind not in READABLE:
            raise ValueError(f"{path}: {name}: expected floating-point numbers, got {kind}")
        return _view(path, np.dtype(READABLE[kind]), shape, start, kind)

    return StoredTensor(shape, kind, read)


def _view(path: Path, dtype: np.dtype, shape: tuple[int, ...], offset: int, kind: str) -> np.ndarray:
    """The values where they lie in the file, whose pages are read when they are looked at."""
    n_values = math.prod(shape)
    if not n_values:
        return np.empty(shape, np.float32)
    page = offset - offset % mmap.ALLOCATIONGRANULARITY
    with path.open("rb") as file:
        mapped = mmap.mmap(
            file.fileno(), offset - page + n_values * dtype.itemsize, access=mmap.ACCESS_READ, offset=page
        )
    array = np.frombuffer(mapped, dtype, n_values, offset - page).reshape(shape)
    return from_bfloat16(array) if kind == "BF16" else array


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """Bits (uint16) as bfloat16, not copied; as float32 where the package ml_dtypes is not installed."""
    try:
        import ml_dtypes
    except ModuleNotFoundError:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(ml_dtypes.bfloat16)


# -------------------------------------------------------------------- writing
def write_tensors(
    file: IO[bytes], layout: dict[str, tuple[int, ...]], arrays: Iterable[tuple[str, Any]], kind: str
) -> None:
    """Write a safetensors file, one tensor after another, so that no two are in memory at once.

    Args:
        layout: names and shapes, in the order of `arrays`.
        arrays: names and values, float32.
        kind: of all tensors: F32, F16 or BF16.
    """
    write_header(file, {name: (kind, shape) for name, shape in layout.items()}, {"format": "pt"})
    for (name, array), (expected, shape) in zip(arrays, layout.items(), strict=True):
        if name != expected or array.shape != shape:
            raise ValueError(f"write_tensors: expected {expected} {shape}, got {name} {array.shape}")
        for rows in _in_rows(array):
            file.write(_encoded(rows, kind))


def _in_rows(array: np.ndarray) -> Iterator[np.ndarray]:
    flat = array.reshape(-1)
    for start in range(0, flat.size, 2**22):
        yield flat[start : start + 2**22]


def _encoded(values: np.ndarray, kind: str) -> bytes:
    if kind != "BF16":
        return values.astype({"F32": "<f4", "F16": "<f2"}[kind]).tobytes()
    bits = values.astype("<f4").view("<u4")
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16  # to the nearest, ties to even
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype("<u2").tobytes()
