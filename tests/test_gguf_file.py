"""The reader of GGUF headers: all types of values, and truncated, damaged and malicious files."""

from __future__ import annotations

import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tricycle.pretrained.gguf import read_gguf
from tricycle.pretrained.gguf_file import read_gguf_header

STRING, ARRAY = 8, 9
U8, I8, U16, I16, U32, I32, F32, BOOL, U64, I64, F64 = 0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return u64(len(raw)) + raw


def start(n_tensors: int, n_pairs: int, version: int = 3) -> bytes:
    return b"GGUF" + u32(version) + u64(n_tensors) + u64(n_pairs)


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + u32(kind) + value


def entry(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + u32(len(shape)) + b"".join(map(u64, shape)) + u32(kind) + u64(offset)


def padded(header: bytes, alignment: int = 32) -> bytes:
    return header + bytes(-len(header) % alignment)


# keys, types, stored bytes and values
METADATA: list[tuple[str, int, bytes, Any]] = [
    ("general.architecture", STRING, text("llama"), "llama"),
    ("a.u8", U8, struct.pack("<B", 200), 200),
    ("a.i8", I8, struct.pack("<b", -100), -100),
    ("a.u16", U16, struct.pack("<H", 60_000), 60_000),
    ("a.i16", I16, struct.pack("<h", -30_000), -30_000),
    ("a.u32", U32, u32(4_000_000_000), 4_000_000_000),
    ("a.i32", I32, struct.pack("<i", -2_000_000_000), -2_000_000_000),
    ("a.f32", F32, struct.pack("<f", 0.5), 0.5),
    ("a.bool", BOOL, b"\x01", True),
    ("a.u64", U64, u64(2**63 + 1), 2**63 + 1),
    ("a.i64", I64, struct.pack("<q", -(2**62)), -(2**62)),
    ("a.f64", F64, struct.pack("<d", 0.1), 0.1),
    ("a.text", STRING, text("Grüße ▁"), "Grüße ▁"),
    ("a.texts", ARRAY, u32(STRING) + u64(3) + text("a") + text("") + text("Ġ"), ["a", "", "Ġ"]),
    ("a.numbers", ARRAY, u32(I32) + u64(2) + struct.pack("<ii", 1, -1), [1, -1]),
    ("a.flags", ARRAY, u32(BOOL) + u64(2) + b"\x00\x01", [False, True]),
    ("a.none", ARRAY, u32(F32) + u64(0), []),
]
VALUES = {key: value for key, _, _, value in METADATA}


def whole_file() -> bytes:
    """Return a file with metadata of every type and two tensors."""
    pairs = [pair(key, kind, stored) for key, kind, stored, _ in METADATA]
    tensors = [entry("first", (3, 2)), entry("second", (32,), 8, 32)]
    header = padded(start(len(tensors), len(pairs)) + b"".join(pairs + tensors))
    first = np.arange(6, dtype="<f4").tobytes()
    second = np.float16(0.5).tobytes() + np.arange(-16, 16, dtype=np.int8).tobytes()
    return header + padded(first) + second


def written(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    return path


def refused(path: Path, pattern: str) -> None:
    """Check that the error is one line that begins with the path."""
    with pytest.raises(ValueError, match=pattern) as caught:
        read_gguf_header(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message and len(message) < 300 + len(str(path))


# -------------------------------------------------------------------- valid files
@pytest.mark.parametrize("version", [2, 3])
def test_metadata_and_tensors_of_every_type_are_read(tmp_path, version):
    content = whole_file()
    path = written(tmp_path, content[:4] + u32(version) + content[8:])
    metadata = read_gguf_header(path).metadata
    assert metadata == VALUES and list(map(type, metadata.values())) == list(map(type, VALUES.values()))
    file = read_gguf_header(path)
    first, second = file.tensors.values()
    assert (first.name, first.shape, first.dtype_name) == ("first", (2, 3), "F32")
    assert (second.shape, second.dtype_name) == ((32,), "Q8_0")
    np.testing.assert_array_equal(file.read(first), np.arange(6).reshape(2, 3))
    np.testing.assert_array_equal(file.read(first, slice(1, 2)), [[3, 4, 5]])
    pytest.importorskip("gguf")
    np.testing.assert_array_equal(file.read(second), np.arange(-16, 16) / 2)
    np.testing.assert_array_equal(file.read(second, slice(2, 4)), [-7, -6.5])


def test_gguf_package_reads_equal_metadata(tmp_path):
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(written(tmp_path, whole_file()))
    expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert expected == VALUES


def test_float_tensors_are_memory_mapped(tmp_path):
    file = read_gguf_header(written(tmp_path, whole_file()))
    values = file.read(file.tensors["first"])
    assert not values.flags.owndata and not values.flags.writeable


def test_tensors_with_other_alignments_are_read(tmp_path):
    for alignment in (1, 2, 8, 64):
        header = start(1, 1) + pair("general.alignment", U32, u32(alignment)) + entry("x", (3,))
        path = written(tmp_path, padded(header, alignment) + np.arange(3, dtype="<f4").tobytes())
        values = read_gguf_header(path).read(read_gguf_header(path).tensors["x"])
        assert values.tolist() == [0, 1, 2] and values.flags.aligned


def test_file_truncated_after_opening_raises(tmp_path):
    path = written(tmp_path, whole_file())
    file = read_gguf_header(path)
    path.write_bytes(whole_file()[:-60])
    with pytest.raises(ValueError, match=r"cut off.*second"):
        file.read(file.tensors["second"])


# -------------------------------------------------------------------- rejected files
def test_files_that_are_not_gguf_are_rejected(tmp_path):
    for content in (b"", b"GGUF", b"PK\x03\x04" + bytes(100), b"FUGG" + bytes(100)):
        refused(written(tmp_path, content), "begins with GGUF")
    with pytest.raises(FileNotFoundError):
        read_gguf_header(tmp_path / "nowhere.gguf")
    with pytest.raises(OSError):
        read_gguf_header(tmp_path)


def test_truncation_at_every_byte_is_rejected(tmp_path):
    content = whole_file()
    for length in range(len(content)):
        refused(written(tmp_path, content[:length]), "GGUF file|cut off")


HUGE = 2**60
CRAFTED = {
    "version 1": (start(0, 0, 1), "version 2 or 3"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + bytes(16), "version 2 or 3.*little-endian"),
    "more tensors than bytes": (start(HUGE, 0) + bytes(64), f"cut off.*{HUGE} tensors"),
    "too many keys": (start(0, HUGE) + bytes(64), f"{HUGE} keys at byte 24"),
    "most tensors": (start(2**64 - 1, 0) + bytes(64), "cut off or damaged"),
    "a long key": (start(0, 1) + u64(HUGE) + bytes(64), f"{HUGE} bytes of a key"),
    "a long text": (start(0, 1) + text("k") + u32(STRING) + u64(2**64 - 1) + bytes(64), "bytes of 'k'"),
    "a long array": (start(0, 1) + text("k") + u32(ARRAY) + u32(U8) + u64(HUGE), "at most 4194304 values"),
    "a longer array than the file": (
        start(0, 1) + text("k") + u32(ARRAY) + u32(F64) + u64(99) + bytes(64),
        "99 values of 'k'",
    ),
    "texts longer than the file": (
        start(0, 1) + text("k") + u32(ARRAY) + u32(STRING) + u64(4) + text("a") + u64(HUGE) + bytes(64),
        "string of 'k'",
    ),
    "arrays of arrays": (
        start(0, 1) + text("k") + u32(ARRAY) + u32(ARRAY) + u64(1) + u32(ARRAY) + u64(1) + bytes(64),
        "'k'.*array of arrays",
    ),
    "an unknown type of value": (start(0, 1) + text("k") + u32(77) + bytes(64), "'k'.*unknown type 77"),
    "no UTF-8": (start(0, 1) + text(b"\xff\xfe") + u32(U8) + bytes(64), "byte 32.*UTF-8"),
    "a key twice": (start(0, 2) + 2 * pair("k", U8, b"\x00"), "'k'.*twice"),
    "alignment 0": (start(0, 1) + pair("general.alignment", U32, u32(0)), "power of two.*got 0"),
    "alignment 48": (start(0, 1) + pair("general.alignment", U32, u32(48)), "power of two.*got 48"),
    "alignment of text": (start(0, 1) + pair("general.alignment", STRING, text("32")), "power of two, got '32'"),
    "alignment too large": (start(0, 1) + pair("general.alignment", U64, u64(2**62)), "power of two"),
    "a product that overflows": (
        padded(start(1, 0) + entry("x", (2**32, 2**32, 2, 1))) + bytes(64),
        r"'x'.*F32.*147573952589676413024",
    ),
    "a product that is 0 in 64 bits": (
        padded(start(1, 0) + entry("x", (2**33, 2**33))) + bytes(64),
        "cut off or damaged",
    ),
    "no values": (padded(start(1, 0) + entry("x", (4, 0))) + bytes(64), "at least one value.*'x'"),
    "five dimensions": (start(1, 0) + entry("x", (1,) * 5) + bytes(64), "at most 4 dimensions.*got 5"),
    "a crowd of dimensions": (start(1, 0) + text("x") + u32(2**32 - 1) + bytes(64), "at most 4 dimensions"),
    "an offset beyond the file": (padded(start(1, 0) + entry("x", (4,), 0, HUGE)) + bytes(64), "cut off or damaged"),
    "an offset in between": (
        padded(start(1, 0) + entry("x", (4,), 0, 4)) + bytes(64),
        "4, not a multiple of",
    ),
    "an unknown type": (padded(start(1, 0) + entry("x", (256,), 10)) + bytes(512), "'x'.*type 10"),
    "a broken block": (padded(start(1, 0) + entry("x", (33,), 8)) + bytes(64), "multiple of 32 values"),
    "a tensor twice": (padded(start(2, 0) + 2 * entry("x", (4,))) + bytes(64), "'x'.*twice"),
    "a crowd of keys": (
        start(0, 70_000) + b"".join(pair(f"{i:05d}", U8, b"\x00") for i in range(70_000)),
        "65536 keys.*70000",
    ),
    "a long name": (start(0, 1) + text("n" * 9_000) + u32(77) + bytes(64), r"'n{30}\.\.\.n{31}'.*type 77"),
    "a name of many lines": (start(0, 1) + text("a\nb") + u32(77) + bytes(64), "unknown type 77"),
    "tensors over each other": (
        padded(start(2, 0) + entry("x", (9,)) + entry("y", (4,), 0, 32)) + bytes(64),
        "'x' and 'y' overlap",
    ),
}


@pytest.mark.parametrize(("content", "pattern"), CRAFTED.values(), ids=CRAFTED)
def test_crafted_headers_are_rejected_with_little_memory_and_time(tmp_path, content, pattern):
    path = written(tmp_path, content)
    tracemalloc.start()
    begin = time.perf_counter()
    refused(path, pattern)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2e5 and time.perf_counter() - begin < 1


# -------------------------------------------------------------------- a model's keys
def test_unknown_architecture_is_rejected(tmp_path):
    path = written(tmp_path, padded(start(0, 1) + pair("general.architecture", STRING, text("mamba"))))
    with pytest.raises(ValueError, match=r"general\.architecture.*llama, .*qwen2, .*'mamba'"):
        read_gguf(path)
    for pairs in (
        [],
        [pair("general.architecture", ARRAY, u32(U8) + u64(0))],
        [pair("general.architecture", U8, b"1")],
    ):
        with pytest.raises(ValueError, match=r"general\.architecture.*one of"):
            read_gguf(written(tmp_path, padded(start(0, len(pairs)) + b"".join(pairs))))
