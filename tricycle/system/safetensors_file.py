"""Headers of safetensors files: a JSON object before the values of all tensors.

Source: https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from tricycle.system.files import check_n_json_values

MAX_HEADER_BYTES = 100_000_000  # as in the readers of the format's authors
MAX_NON_ASCII_HEADER_BYTES = 2**24  # smaller, because each character may need four bytes in memory
MAX_JSON_VALUES = 2_200_000  # a header may contain the vocabulary of a model, as text
MAX_DIMENSIONS = 32
_NAMES = {8: "F64 I64 U64", 4: "F32 I32 U32", 2: "F16 BF16 I16 U16", 1: "F8_E4M3 F8_E5M2 I8 U8 BOOL"}
ITEM_SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}


class TensorInfo(NamedTuple):
    """Data type, shape and position of a tensor in a file.

    Attributes:
        dtype_name: the data type of its values, a key of `ITEM_SIZES`.
        start: the offset of its first byte in the file.
    """

    dtype_name: str
    shape: tuple[int, ...]
    start: int

    @property
    def n_bytes(self) -> int:
        """The number of bytes of the values."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype_name]


# -------------------------------------------------------------------- reading
def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, Any], int]:
    """Return a checked safetensors header: (tensor infos by name, metadata, offset of the values); else ValueError.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a truncated, damaged or malicious file.
    """
    header, start, size = _read_json(path)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise ValueError(f"{path}: expected an object as metadata, got {type(metadata).__name__}")
    ranges = []
    infos = {}
    for name, entry in header.items():
        first, end = _check_entry(path, name, entry, size - start)
        ranges.append((first, end, name))
        infos[name] = TensorInfo(entry["dtype"], tuple(entry["shape"]), start + first)
    _check_ranges(path, ranges, size - start)
    return infos, metadata, start


def _read_json(path: Path) -> tuple[dict[str, Any], int, int]:
    """Return the header's object, the offset of the first value and the file's size; ValueError if it is damaged."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    size = path.stat().st_size
    with path.open("rb") as file:
        n_bytes = int.from_bytes(file.read(8), "little")
        if size < 8 or n_bytes > min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(f"{path}: expected a safetensors file, got one of {size} bytes whose header is cut off")
        text = file.read(n_bytes)
    try:
        check_n_json_values(text, MAX_JSON_VALUES)
        if len(text) > MAX_NON_ASCII_HEADER_BYTES and not text.isascii():
            raise ValueError(f"more than {MAX_NON_ASCII_HEADER_BYTES:,} bytes that are not all ASCII")
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        reason = str(error) or type(error).__name__
        raise ValueError(f"{path}: expected a safetensors file, its header is not JSON: {reason}") from None
    if not isinstance(header, dict):
        raise ValueError(f"{path}: expected a safetensors file, its header is not an object")
    return header, 8 + n_bytes, size


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dict; ValueError if a key occurs twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a name occurs twice")
    return values


def _check_entry(path: Path, name: str, entry: Any, n_bytes: int) -> tuple[int, int]:
    """Return a tensor's first and last offset, relative to the first value; ValueError if its entry is invalid.

    Raises:
        ValueError: data type, shape and offsets contradict each other, or exceed the `n_bytes` bytes of values.
    """
    if not isinstance(entry, dict):
        raise ValueError(f"{path}: {name}: expected an object, got {type(entry).__name__}")
    dtype_name: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(dtype_name, str) or dtype_name not in ITEM_SIZES:
        raise ValueError(f"{path}: {name}: expected one of the types {', '.join(ITEM_SIZES)}, got {dtype_name!r:.40}")
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"{path}: {name}: expected a shape of whole numbers, got {shape!r:.60}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{path}: {name}: expected the offsets of a first and a last byte, got {offsets!r:.60}")
    start, end = offsets
    if not start <= end <= n_bytes:
        raise ValueError(f"{path}: {name}: its values end at byte {end} of {n_bytes}: the file is cut off or damaged")
    if end - start != math.prod(shape) * ITEM_SIZES[dtype_name]:
        raise ValueError(f"{path}: {name}: {end - start} bytes do not fit the shape {tuple(shape)} in {dtype_name}")
    return start, end


def _are_sizes(values: Any) -> bool:
    """Return whether a value is a list of integers from 0 to below 2^63; True and False are none."""
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**63 for v in values)


def _check_ranges(path: Path, ranges: list[tuple[int, int, str]], n_bytes: int) -> None:
    """Raise a ValueError if the (start, end, tensor name) ranges overlap, or leave out some of the `n_bytes` bytes."""
    end, previous = 0, ""
    for start, last, name in [*sorted(ranges), (n_bytes, n_bytes, "")]:
        if start < end:
            raise ValueError(f"{path}: the values of {previous} and {name} overlap")
        if start > end:
            raise ValueError(f"{path}: bytes {end} to {start - 1} of {n_bytes} belong to no tensor")
        end, previous = last, name


# -------------------------------------------------------------------- writing
def write_header(
    file: IO[bytes], layout: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> None:
    """Write a safetensors header for `layout`, {name: (dtype name, shape)}; write the values next, in this order.

    Args:
        layout: by name the data type, a key of `ITEM_SIZES`, and the shape.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, (dtype_name, shape) in layout.items():
        start, end = end, end + math.prod(shape) * ITEM_SIZES[dtype_name]
        header[name] = {"dtype": dtype_name, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode("utf-8")
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
