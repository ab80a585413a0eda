"""The container of llama.cpp's files: keys with values, then tensors (specification: ggml's docs/gguf.md).

A file is somebody else's: each length and count in it is held against what is left of the file before anything is
read or made by it. The `gguf` package's reader does not do that: a count that is made up fills the memory; and it needs
two seconds for a vocabulary of 50,000, where this one needs 0.03.
"""

from __future__ import annotations

import mmap
import os
import reprlib
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tricycle.pretrained.quantised import BLOCKS, dequantise, split_q8_0
from tricycle.pretrained.tensor_files import READABLE, from_bfloat16

MAGIC = b"GGUF"
_COUNT = struct.Struct("<Q")
_KIND = struct.Struct("<I")
_START = struct.Struct("<4sIQQ")  # magic, version, tensors, pairs
_SCALARS = dict(enumerate("<u1 <i1 <u2 <i2 <u4 <i4 <f4 ? - - <u8 <i8 <f8".split()))
_STRING, _ARRAY = 8, 9
_MOST_VALUES = 2**22  # in all arrays together: the largest vocabularies have 2**18 tokens and twice as many merges
_MOST_NAMES = 2**16  # of keys, or of tensors: the largest models have some thousands
_MOST_DIMENSIONS = 4
_SIZES = {"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), **BLOCKS}  # values and bytes of a block
_KINDS = dict(zip((0, 1, 30, 8, 2, 3, 6, 7, 12, 13, 14), _SIZES))  # by the numbers that ggml gives them


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies in a file.

    Attributes:
        name: as the file calls it.
        kind: of its values.
        shape: slowest dimension first, as NumPy has it.
        start: the byte of the file at which it begins.
        row_bytes: of one row, that is along the last dimension.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    row_bytes: int

    @property
    def n_rows(self) -> int:
        """Of all dimensions but the last."""
        return int(np.prod(self.shape[:-1], dtype=object))

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.start + self.n_rows * self.row_bytes


@dataclass(frozen=True)
class GGUFFile:
    """What stands before the values.

    Attributes:
        path: of the file.
        metadata: keys and values, arrays as lists.
        tensors: by name, in the file's order.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Entry]

    def read(self, entry: Entry, rows: slice = slice(None)) -> np.ndarray:
        """The values of a tensor, or of some rows of its first dimension.

        Returns:
            float32, which may be a view of the file; float16 or bfloat16 (where ml_dtypes is installed) if it is
            stored so.

        Raises:
            ValueError: the file has changed since its header was read.
        """
        packed = self._packed(entry)
        if len(entry.shape) == 1:
            return _unpacked(packed, entry.kind)[rows]
        return _unpacked(packed[rows], entry.kind)

    def read_blocks(self, entry: Entry, rows: slice = slice(None)) -> tuple[np.ndarray, np.ndarray]:
        """The int8 (N, K) and the float16 scales (N, K / 32) of a matrix in blocks of Q8_0, or of some of its rows.

        Raises:
            ValueError: as of `read`; or a scale is not finite.
        """
        values, scales = split_q8_0(self._packed(entry)[rows])
        if not np.isfinite(scales).all():
            raise ValueError(f"{self.path}: expected finite scales of tensor {entry.name!r}, got infinity or NaN")
        return values, scales

    def _packed(self, entry: Entry) -> np.ndarray:
        """Bytes (..., of a row), as they lie in the file."""
        try:
            # mapped for this tensor alone, so that what was read and turned into something else leaves the memory
            whole = np.memmap(self.path, np.uint8, "r", entry.start, (entry.n_rows, entry.row_bytes))
        except ValueError:
            raise ValueError(f"{self.path}: cut off since it was opened, in tensor {entry.name}") from None
        return np.asarray(whole).reshape(*entry.shape[:-1], entry.row_bytes)


def read_file(path: str | os.PathLike[str]) -> GGUFFile:
    """Keys, values and places of tensors of a GGUF file.

    Raises:
        OSError: no such file, or none that may be read.
        ValueError: no GGUF file, one that was cut off or damaged, values or tensors of a kind that is not read.
    """
    path = Path(path)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < _START.size or file.read(len(MAGIC)) != MAGIC:
            raise ValueError(f"{path}: expected a GGUF file, which begins with {MAGIC.decode()}")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Header(path, content).parsed()


def _unpacked(packed: np.ndarray, kind: str) -> np.ndarray:
    """Bytes to numbers; those of floats without a copy where they lie as numbers may."""
    if kind in BLOCKS:
        return dequantise(packed, kind)
    packed = np.require(packed, requirements="C")
    values = np.require(packed.view(READABLE[kind]), requirements="A")
    return from_bfloat16(values) if kind == "BF16" else values


class _Header:
    """Reads forward through the bytes of a file.

    Attributes:
        place: the byte to be read next.
        values_left: how many values of arrays may yet come.
    """

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.path = path
        self.content = content
        self.size = len(content)
        self.place = 0
        self.values_left = _MOST_VALUES

    def parsed(self) -> GGUFFile:
        _, version, n_tensors, n_pairs = self._unpack(_START, "the start")
        if version not in (2, 3):
            raise self._error(f"expected version 2 or 3 of GGUF in little-endian order, got {version}")
        metadata: dict[str, Any] = {}
        self._expect_names(n_pairs, _COUNT.size + _KIND.size + 1, "keys")
        for _ in range(n_pairs):
            key = self._text("a key")
            if key in metadata:
                raise self._error(f"key {shown(key)} comes twice")
            metadata[key] = self._value(shown(key))
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment < 2**32 or alignment & (alignment - 1):
            raise self._error(f"expected general.alignment to be a power of two, got {shown(alignment)}")
        return GGUFFile(self.path, metadata, self._tensors(n_tensors, alignment))

    # ---------------------------------------------------------------- pieces
    def _error(self, why: str) -> ValueError:
        return ValueError(f"{self.path}: {why}")

    def _expect_names(self, n: int, at_least: int, what: str) -> None:
        """Room for n keys or tensors of so many bytes each, and not more than any model has."""
        self._expect_room(n, at_least, what)
        if n > _MOST_NAMES:
            raise self._error(f"expected at most {_MOST_NAMES} {what}, got {n}")

    def _expect_room(self, n: int, at_least: int, what: str) -> None:
        """For n things of so many bytes each, before the first of them is read."""
        if n > (self.size - self.place) // at_least:
            raise self._error(f"cut off or damaged: {n} {what} at byte {self.place} of {self.size}")

    def _unpack(self, layout: struct.Struct, what: str) -> tuple[Any, ...]:
        self._expect_room(1, layout.size, f"value for {what}")
        values = layout.unpack_from(self.content, self.place)
        self.place += layout.size
        return values

    def _text(self, what: str) -> str:
        (length,) = self._unpack(_COUNT, what)
        self._expect_room(length, 1, f"bytes of {what}")
        raw = self.content[self.place : self.place + length]
        self.place += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self._error(f"damaged: {what} at byte {self.place - length} is no UTF-8") from None

    def _value(self, key: str) -> Any:
        """Of a key, of which only messages speak."""
        (kind,) = self._unpack(_KIND, key)
        if kind == _STRING:
            return self._text(key)
        if kind == _ARRAY:
            return self._array(key)
        return self._scalars(key, kind, 1)[0]

    def _array(self, key: str) -> list[Any]:
        (kind,) = self._unpack(_KIND, key)
        (n,) = self._unpack(_COUNT, key)
        if kind == _ARRAY:
            raise self._error(f"{key} is an array of arrays, which is not read")
        self.values_left -= n
        if self.values_left < 0:
            raise self._error(f"expected at most {_MOST_VALUES} values in arrays, got {n} in {key}")
        return self._texts(key, n) if kind == _STRING else self._scalars(key, kind, n)

    def _scalars(self, key: str, kind: int, n: int) -> list[Any]:
        code = _SCALARS.get(kind, "-")
        if code == "-":
            raise self._error(f"{key} is of the unknown type {kind}")
        dtype = np.dtype(code)
        self._expect_room(n, dtype.itemsize, f"values of {key}")
        raw = self.content[self.place : self.place + n * dtype.itemsize]
        self.place += len(raw)
        if code == "?":
            return [byte != 0 for byte in raw]
        return np.frombuffer(raw, dtype).tolist()

    def _texts(self, key: str, n: int) -> list[str]:
        """As `_text` n times, and several times as fast: a vocabulary is most of a header."""
        self._expect_room(n, _COUNT.size, f"texts of {key}")
        content, size, length_at = self.content, self.size, _COUNT.unpack_from
        place = self.place
        texts = []
        for _ in range(n):
            start = place + 8
            if start > size or (place := start + length_at(content, start - 8)[0]) > size:
                raise self._error(f"cut off or damaged: a text of {key} near byte {start} of {size}")
            texts.append(content[start:place])
        self.place = place
        try:
            return [text.decode("utf-8") for text in texts]
        except UnicodeDecodeError:
            raise self._error(f"damaged: a text of {key} is no UTF-8") from None

    # ---------------------------------------------------------------- tensors
    def _tensors(self, n_tensors: int, alignment: int) -> dict[str, Entry]:
        self._expect_names(n_tensors, 2 * _COUNT.size + 2 * _KIND.size, "tensors")
        entries = [self._entry(alignment) for _ in range(n_tensors)]
        data = -(-self.place // alignment) * alignment
        tensors: dict[str, Entry] = {}
        for entry in entries:
            if entry.name in tensors:
                raise self._error(f"tensor {shown(entry.name)} comes twice")
            moved = Entry(entry.name, entry.kind, entry.shape, data + entry.start, entry.row_bytes)
            if moved.end > self.size:
                raise self._error(
                    f"cut off or damaged: tensor {shown(entry.name)} {entry.shape} ({entry.kind}) "
                    f"ends at byte {moved.end} of {self.size}"
                )
            tensors[entry.name] = moved
        in_order = sorted(tensors.values(), key=lambda entry: entry.start)
        for first, second in pairwise(in_order):
            if first.end > second.start:
                raise self._error(f"damaged: tensors {shown(first.name)} and {shown(second.name)} lie over each other")
        return tensors

    def _entry(self, alignment: int) -> Entry:
        """A tensor whose start counts from where the values begin."""
        name = self._text("a tensor's name")
        named = shown(name)
        (n_dimensions,) = self._unpack(_KIND, named)
        if n_dimensions > _MOST_DIMENSIONS:
            raise self._error(f"expected at most {_MOST_DIMENSIONS} dimensions of tensor {named}, got {n_dimensions}")
        shape = tuple(self._unpack(_COUNT, named)[0] for _ in range(n_dimensions))[::-1] or (1,)
        (code,) = self._unpack(_KIND, named)
        (start,) = self._unpack(_COUNT, named)
        kind = _KINDS.get(code)
        if kind is None:
            raise self._error(f"tensor {named} is of type {code}; expected one of {', '.join(_KINDS.values())}")
        per_block, n_bytes = _SIZES[kind]
        if min(shape) < 1 or shape[-1] % per_block:
            multiple = f"rows of a multiple of {per_block} values" if per_block > 1 else "a value at least"
            raise self._error(f"expected {multiple} in tensor {named} ({kind}), got shape {shape}")
        if start % alignment:
            raise self._error(f"damaged: tensor {named} begins at {start}, no multiple of {alignment}")
        return Entry(name, kind, shape, start, shape[-1] // per_block * n_bytes)


def shown(value: Any) -> str:
    """A name or a value of the file as a message can have it: on one line, and short."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 66
    short.maxlist = 2
    return short.repr(value)
