"""Reader of the GGUF container: metadata, then tensors (specification: ggml's docs/gguf.md).

Files are untrusted: every length and count is checked against the remaining size of the file before anything is read or
allocated. The reader of the `gguf` package does not check them, so an invented count fills the memory; it also needs
two seconds for a vocabulary of 50,000 tokens, and this reader 0.03.
"""

from __future__ import annotations

import mmap
import os
import reprlib
import struct
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tricycle.kernels.quantized_blocks import BLOCK_FORMATS, BlockRows, dequantize_blocks, never_changed
from tricycle.pretrained.safetensors_weights import READABLE_DTYPES, view_bfloat16
from tricycle.pretrained.stored_model import release_pages

MAGIC = b"GGUF"
_COUNT = struct.Struct("<Q")
_TYPE = struct.Struct("<I")
_START = struct.Struct("<4sIQQ")  # magic, version, number of tensors, number of keys
_SCALARS = dict(enumerate("<u1 <i1 <u2 <i2 <u4 <i4 <f4 ? - - <u8 <i8 <f8".split()))  # dtypes by GGUF's numbers
_STRING, _ARRAY = 8, 9
_MAX_VALUES = 2**22  # in all arrays together: the largest vocabularies have 2**18 tokens and twice as many merges
_MAX_NAMES = 2**16  # keys, or tensors: the largest models have a few thousand
_MAX_DIMENSIONS = 4
# Values and bytes of a block.
_SIZES = {"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2)} | {name: block[:2] for name, block in BLOCK_FORMATS.items()}
_DTYPE_NAMES = dict(zip((0, 1, 30, 8, 2, 3, 6, 7, 12, 13, 14, 39), _SIZES))  # by ggml's numbers
_SECONDS_BETWEEN_CHECKS = 0.01


@dataclass(frozen=True)
class GGUFTensorInfo:
    """Name, data type, shape and position of a tensor in a file.

    Attributes:
        name: its name in the file.
        dtype_name: the data type of its values, such as F16 or Q4_K.
        shape: slowest dimension first, as in NumPy.
        start: the offset of its first byte in the file.
        row_bytes: the number of bytes of a row, that is along the last dimension.
    """

    name: str
    dtype_name: str
    shape: tuple[int, ...]
    start: int
    row_bytes: int

    @property
    def n_rows(self) -> int:
        """The product of all dimensions but the last, as an int that cannot overflow."""
        return int(np.prod(self.shape[:-1], dtype=object))

    @property
    def end(self) -> int:
        """The offset of the first byte after the tensor."""
        return self.start + self.n_rows * self.row_bytes


@dataclass(frozen=True)
class GGUFFile:
    """The header of a GGUF file, and methods that read its tensors.

    Attributes:
        path: of the file.
        metadata: keys and values, arrays as lists.
        tensors: by name, in the order of the file.
        check: raises OSError if the file was changed after its header was read.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensorInfo]
    check: Callable[[], None] = never_changed

    # Cache: valid for the life of the object: a mapping of the file, which `check` watches.
    @cached_property
    def content(self) -> np.ndarray:
        """All bytes of the file, mapped in one piece, so that adjacent tensors are adjacent in memory."""
        return np.asarray(np.memmap(self.path, np.uint8, "r"))

    def read(self, info: GGUFTensorInfo, rows: slice = slice(None)) -> np.ndarray:
        """Return a tensor, or rows of its first axis, as float32 or as stored 16 bits; maybe a view of the file.

        Returns:
            float16 or bfloat16 (if ml_dtypes is installed) if it is stored so, else float32; it may be a view of the
            file.

        Raises:
            ValueError: the file was truncated after its header was read.
        """
        packed = self._read_bytes(info)
        if len(info.shape) == 1:
            return _to_values(packed, info.dtype_name)[rows]
        return _to_values(packed[rows], info.dtype_name)

    def read_blocks(self, info: GGUFTensorInfo, rows: slice = slice(None)) -> BlockRows:
        """Return rows of a quantized matrix as a view of the file; ValueError if scales are not finite.

        Raises:
            ValueError: see `read`; or a scale is not finite.
        """
        if info.end > len(self.content):
            raise ValueError(f"{self.path}: cut off since it was opened, in tensor {info.name}")
        packed = self.content[info.start : info.end].reshape(*info.shape[:-1], info.row_bytes)[rows]
        blocks = BlockRows(packed, info.dtype_name, self.check)
        if not blocks.has_finite_scales():
            raise ValueError(f"{self.path}: expected finite scales of tensor {info.name!r}, got infinity or NaN")
        release_pages(packed)  # so that the file takes no memory while the rest of the model is built
        return blocks

    def _read_bytes(self, info: GGUFTensorInfo) -> np.ndarray:
        """Return a tensor's bytes, (..., bytes per row), as a view of the file; ValueError if it was cut off."""
        try:
            # Each tensor is mapped separately, so that its pages can be released after the conversion of its values.
            mapped = np.memmap(self.path, np.uint8, "r", info.start, (info.n_rows, info.row_bytes))
        except ValueError:
            raise ValueError(f"{self.path}: cut off since it was opened, in tensor {info.name}") from None
        return np.asarray(mapped).reshape(*info.shape[:-1], info.row_bytes)


def read_gguf_header(path: str | os.PathLike[str]) -> GGUFFile:
    """Read the metadata and tensor infos of a GGUF file, but no values; raise ValueError if it is damaged.

    Raises:
        OSError: the file does not exist or cannot be read.
        ValueError: not a GGUF file, a truncated or damaged file, or unsupported types of values or tensors.
    """
    path = Path(path)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < _START.size or file.read(len(MAGIC)) != MAGIC:
            raise ValueError(f"{path}: expected a GGUF file, which begins with {MAGIC.decode()}")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            header = _HeaderReader(path, content).read()
    return replace(header, check=_ChangeCheck(path))


class _ChangeCheck:
    """Raises OSError when called after a file was truncated or written to, at most every 10 ms.

    To read a mapping beyond the end of its file ends the process (SIGBUS). A file that another one replaced under the
    same name stays as it was, for it stays open here.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path.open("rb")
        weakref.finalize(self, self.file.close)
        self.state = self._read_state()
        self.next_time = 0.0

    def _read_state(self) -> tuple[int, int]:
        """Return the open file's size and time of change in nanoseconds."""
        found = os.fstat(self.file.fileno())
        return found.st_size, found.st_mtime_ns

    def __call__(self) -> None:
        """Raise OSError if the file has changed, by size and time; look at most once per _SECONDS_BETWEEN_CHECKS."""
        now = time.monotonic()
        if now >= self.next_time:
            if self._read_state() != self.state:
                raise OSError(f"{self.path}: was changed while it was in use: load the model again")
            self.next_time = now + _SECONDS_BETWEEN_CHECKS


def _to_values(packed: np.ndarray, dtype_name: str) -> np.ndarray:
    """Convert stored bytes to numbers: quantized blocks to float32, floats as a view if aligned and contiguous."""
    if dtype_name in BLOCK_FORMATS:
        return dequantize_blocks(packed, dtype_name)
    packed = np.require(packed, requirements="C")
    values = np.require(packed.view(READABLE_DTYPES[dtype_name]), requirements="A")
    return view_bfloat16(values) if dtype_name == "BF16" else values


class _HeaderReader:
    """Reads the header of a file from its first byte on.

    Attributes:
        position: the offset of the next byte.
        n_values_left: how many values the remaining arrays may have.
    """

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.path = path
        self.content = content
        self.size = len(content)
        self.position = 0
        self.n_values_left = _MAX_VALUES

    def read(self) -> GGUFFile:
        """Read the header's version, metadata and tensor infos; raise ValueError if damaged or not version 2 or 3."""
        _, version, n_tensors, n_keys = self._unpack(_START, "the start")
        if version not in (2, 3):
            raise self._error(f"expected version 2 or 3 of GGUF in little-endian order, got {version}")
        metadata: dict[str, Any] = {}
        self._check_n_names(n_keys, _COUNT.size + _TYPE.size + 1, "keys")
        for _ in range(n_keys):
            key = self._read_string("a key")
            if key in metadata:
                raise self._error(f"key {short_repr(key)} comes twice")
            metadata[key] = self._read_value(short_repr(key))
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment < 2**32 or alignment & (alignment - 1):
            raise self._error(f"expected general.alignment to be a power of two, got {short_repr(alignment)}")
        return GGUFFile(self.path, metadata, self._read_tensor_infos(n_tensors, alignment))

    # ---------------------------------------------------------------- values
    def _error(self, why: str) -> ValueError:
        """Return (not raise) a ValueError whose message begins with the path."""
        return ValueError(f"{self.path}: {why}")

    def _check_n_names(self, n: int, min_bytes: int, what: str) -> None:
        """Raise ValueError if n keys or tensors of `min_bytes` bytes exceed the rest of the file, or n _MAX_NAMES."""
        self._check_room(n, min_bytes, what)
        if n > _MAX_NAMES:
            raise self._error(f"expected at most {_MAX_NAMES} {what}, got {n}")

    def _check_room(self, n: int, min_bytes: int, what: str) -> None:
        """Raise ValueError unless n items of at least `min_bytes` bytes each fit into the rest of the file."""
        if n > (self.size - self.position) // min_bytes:
            raise self._error(f"cut off or damaged: {n} {what} at byte {self.position} of {self.size}")

    def _unpack(self, layout: struct.Struct, what: str) -> tuple[Any, ...]:
        """Return the values of a struct, and advance the position; ValueError if the file ends."""
        self._check_room(1, layout.size, f"value for {what}")
        values = layout.unpack_from(self.content, self.position)
        self.position += layout.size
        return values

    def _read_string(self, what: str) -> str:
        """Return a string stored after its length, and advance; ValueError if it is damaged."""
        (length,) = self._unpack(_COUNT, what)
        self._check_room(length, 1, f"bytes of {what}")
        raw = self.content[self.position : self.position + length]
        self.position += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self._error(f"damaged: {what} at byte {self.position - length} is not UTF-8") from None

    def _read_value(self, key: str) -> Any:
        """Return a string, list, number or Boolean, by the type stored before it, and advance; else ValueError."""
        (type_number,) = self._unpack(_TYPE, key)
        if type_number == _STRING:
            return self._read_string(key)
        if type_number == _ARRAY:
            return self._read_array(key)
        return self._read_scalars(key, type_number, 1)[0]

    def _read_array(self, key: str) -> list[Any]:
        """Return an array's strings or numbers, and advance; ValueError if nested or too large."""
        (type_number,) = self._unpack(_TYPE, key)
        (n,) = self._unpack(_COUNT, key)
        if type_number == _ARRAY:
            raise self._error(f"{key} is an array of arrays, which is not supported")
        self.n_values_left -= n
        if self.n_values_left < 0:
            raise self._error(f"expected at most {_MAX_VALUES} values in arrays, got {n} in {key}")
        return self._read_strings(key, n) if type_number == _STRING else self._read_scalars(key, type_number, n)

    def _read_scalars(self, key: str, type_number: int, n: int) -> list[Any]:
        """Return n numbers or Booleans of a GGUF type, and advance; ValueError for an unknown type or a cut file."""
        code = _SCALARS.get(type_number, "-")
        if code == "-":
            raise self._error(f"{key} is of the unknown type {type_number}")
        dtype = np.dtype(code)
        self._check_room(n, dtype.itemsize, f"values of {key}")
        raw = self.content[self.position : self.position + n * dtype.itemsize]
        self.position += len(raw)
        if code == "?":
            return [byte != 0 for byte in raw]
        return np.frombuffer(raw, dtype).tolist()

    def _read_strings(self, key: str, n: int) -> list[str]:
        """Return n strings, each stored after its length, and advance; ValueError if damaged."""
        self._check_room(n, _COUNT.size, f"strings of {key}")
        content, size, length_at = self.content, self.size, _COUNT.unpack_from
        end = self.position
        strings = []
        for _ in range(n):
            start = end + 8
            if start > size or (end := start + length_at(content, start - 8)[0]) > size:
                raise self._error(f"cut off or damaged: a string of {key} near byte {start} of {size}")
            strings.append(content[start:end])
        self.position = end
        try:
            return [string.decode("utf-8") for string in strings]
        except UnicodeDecodeError:
            raise self._error(f"damaged: a string of {key} is not UTF-8") from None

    # ---------------------------------------------------------------- tensors
    def _read_tensor_infos(self, n_tensors: int, alignment: int) -> dict[str, GGUFTensorInfo]:
        """Return infos by name, starts from the file's beginning; ValueError if twice, cut off or overlapping."""
        self._check_n_names(n_tensors, 2 * _COUNT.size + 2 * _TYPE.size, "tensors")
        infos = [self._read_tensor_info(alignment) for _ in range(n_tensors)]
        data_start = -(-self.position // alignment) * alignment
        tensors: dict[str, GGUFTensorInfo] = {}
        for info in infos:
            if info.name in tensors:
                raise self._error(f"tensor {short_repr(info.name)} comes twice")
            info = replace(info, start=data_start + info.start)
            if info.end > self.size:
                raise self._error(
                    f"cut off or damaged: tensor {short_repr(info.name)} {info.shape} ({info.dtype_name}) "
                    f"ends at byte {info.end} of {self.size}"
                )
            tensors[info.name] = info
        in_order = sorted(tensors.values(), key=lambda info: info.start)
        for first, second in pairwise(in_order):
            if first.end > second.start:
                raise self._error(f"damaged: tensors {short_repr(first.name)} and {short_repr(second.name)} overlap")
        return tensors

    def _read_tensor_info(self, alignment: int) -> GGUFTensorInfo:
        """Read the next tensor info, `start` relative to the tensor data; ValueError if damaged or of unknown type."""
        name = self._read_string("a tensor's name")
        shown_name = short_repr(name)
        (n_dimensions,) = self._unpack(_TYPE, shown_name)
        if n_dimensions > _MAX_DIMENSIONS:
            raise self._error(
                f"expected at most {_MAX_DIMENSIONS} dimensions of tensor {shown_name}, got {n_dimensions}"
            )
        shape = tuple(self._unpack(_COUNT, shown_name)[0] for _ in range(n_dimensions))[::-1] or (1,)
        (type_number,) = self._unpack(_TYPE, shown_name)
        (start,) = self._unpack(_COUNT, shown_name)
        dtype_name = _DTYPE_NAMES.get(type_number)
        if dtype_name is None:
            known = ", ".join(_DTYPE_NAMES.values())
            raise self._error(f"tensor {shown_name} is of type {type_number}; expected one of {known}")
        n_values, n_bytes = _SIZES[dtype_name]
        if min(shape) < 1 or shape[-1] % n_values:
            expected = f"rows of a multiple of {n_values} values" if n_values > 1 else "at least one value"
            raise self._error(f"expected {expected} in tensor {shown_name} ({dtype_name}), got shape {shape}")
        if start % alignment:
            raise self._error(f"damaged: tensor {shown_name} begins at {start}, not a multiple of {alignment}")
        return GGUFTensorInfo(name, dtype_name, shape, start, shape[-1] // n_values * n_bytes)


def short_repr(value: Any) -> str:
    """Return a one-line repr of a name or value of a file, cut to 66 characters, lists to 2 items, for messages."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 66
    short.maxlist = 2
    return short.repr(value)
