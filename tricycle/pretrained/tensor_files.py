"""Files in the format "safetensors": a header in JSON, then the values of all tensors; read where they lie.

Source: https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from tricycle.pretrained.source import StoredTensor

LONGEST_HEADER = 100_000_000  # bytes, as the format's own readers have it
MOST_AXES = 32
ITEM_SIZES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}
READABLE = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


# -------------------------------------------------------------------- reading
def read_tensors(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors of a file, by name, and its metadata. Only the header is read.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a file that is cut off, damaged or made to harm; says how.
    """
    header, start, size = _read_header(path)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise ValueError(f"{path}: expected an object as metadata, got {type(metadata).__name__}")
    places = []
    tensors = {}
    for name, entry in header.items():
        first, last = _checked_place(path, name, entry, size - start)
        places.append((first, last, name))
        tensors[name] = _stored(path, name, entry, start + first)
    _check_overlaps(path, places)
    return tensors, metadata


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """The header, where the values begin, and how long the file is."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    size = path.stat().st_size
    with path.open("rb") as file:
        n_bytes = int.from_bytes(file.read(8), "little")
        if size < 8 or n_bytes > min(size - 8, LONGEST_HEADER):
            raise ValueError(f"{path}: expected a safetensors file, got one of {size} bytes whose header is cut off")
        text = file.read(n_bytes)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_without_twins)
    except (ValueError, RecursionError) as error:
        reason = str(error) or type(error).__name__
        raise ValueError(f"{path}: expected a safetensors file, its header is no JSON: {reason}") from None
    if not isinstance(header, dict):
        raise ValueError(f"{path}: expected a safetensors file, its header is no object")
    return header, 8 + n_bytes, size


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a name stands there twice")
    return values


def _checked_place(path: Path, name: str, entry: Any, n_bytes: int) -> tuple[int, int]:
    """Where a tensor's values begin and end, counted from the first value.

    Raises:
        ValueError: its type, shape and place do not belong together, or it lies beyond the file.
    """
    if not isinstance(entry, dict):
        raise ValueError(f"{path}: {name}: expected an object, got {type(entry).__name__}")
    kind: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    place: Any = entry.get("data_offsets")
    if not isinstance(kind, str) or kind not in ITEM_SIZES:
        raise ValueError(f"{path}: {name}: expected one of the types {', '.join(ITEM_SIZES)}, got {kind!r:.40}")
    if not _are_wholes(shape) or len(shape) > MOST_AXES:
        raise ValueError(f"{path}: {name}: expected a shape of whole numbers, got {shape!r:.60}")
    if not _are_wholes(place) or len(place) != 2:
        raise ValueError(f"{path}: {name}: expected a first and a last byte, got {place!r:.60}")
    first, last = place
    if not first <= last <= n_bytes:
        raise ValueError(f"{path}: {name}: its values end at byte {last} of {n_bytes}: the file is cut off or damaged")
    if last - first != math.prod(shape) * ITEM_SIZES[kind]:
        raise ValueError(f"{path}: {name}: {last - first} bytes are not those of shape {tuple(shape)} in {kind}")
    return first, last


def _are_wholes(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**63 for v in values)


def _check_overlaps(path: Path, places: list[tuple[int, int, str]]) -> None:
    end, before = 0, ""
    for first, last, name in sorted(places):
        if first < end:
            raise ValueError(f"{path}: the values of {before} and {name} overlap")
        end, before = max(end, last), name


def _stored(path: Path, name: str, entry: dict[str, Any], offset: int) -> StoredTensor:
    shape, kind = tuple(entry["shape"]), entry["dtype"]

    def read() -> np.ndarray:
        if kind not in READABLE:
            raise ValueError(f"{path}: {name}: expected floating-point numbers, got {kind}")
        return _view(path, np.dtype(READABLE[kind]), shape, offset, kind)

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
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in layout.items():
        start, end = end, end + math.prod(shape) * ITEM_SIZES[kind]
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode("utf-8")
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
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
