"""The frame of files in the format "safetensors": a header in JSON, then the values of all tensors.

Source: https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from tricycle.system.files import expect_few_values

LONGEST_HEADER = 100_000_000  # bytes, as the format's own readers have it
LONGEST_WIDE_HEADER = 2**24  # where some characters are not ASCII's: each may then take four bytes
MOST_VALUES = 2_200_000  # a header may hold the vocabulary of a model, as text
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


class Place(NamedTuple):
    """Where a tensor lies in its file.

    Attributes:
        kind: the type of its numbers, one of `ITEM_SIZES`.
        start: its first byte, counted from the beginning of the file.
    """

    kind: str
    shape: tuple[int, ...]
    start: int

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_SIZES[self.kind]


# -------------------------------------------------------------------- reading
def read_places(path: Path) -> tuple[dict[str, Place], dict[str, Any], int]:
    """Where each tensor lies, the metadata, and where the values begin. Only the header is read.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a file that is cut off, damaged or made to harm; says how.
    """
    header, start, size = _read_header(path)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise ValueError(f"{path}: expected an object as metadata, got {type(metadata).__name__}")
    ends = []
    places = {}
    for name, entry in header.items():
        first, last = _checked_place(path, name, entry, size - start)
        ends.append((first, last, name))
        places[name] = Place(entry["dtype"], tuple(entry["shape"]), start + first)
    _check_overlaps(path, ends)
    return places, metadata, start


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
        expect_few_values(text, MOST_VALUES)
        if len(text) > LONGEST_WIDE_HEADER and not text.isascii():
            raise ValueError(f"more than {LONGEST_WIDE_HEADER:,} bytes that are not all ASCII")
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


# -------------------------------------------------------------------- writing
def write_header(
    file: IO[bytes], layout: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> None:
    """Write what stands before the values, which follow one tensor after another, in the order of `layout`.

    Args:
        layout: by name the type of the numbers, one of `ITEM_SIZES`, and the shape.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, (kind, shape) in layout.items():
        start, end = end, end + math.prod(shape) * ITEM_SIZES[kind]
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode("utf-8")
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
