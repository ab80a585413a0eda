"""Seeded mutations of files: of any bytes, and of the structure of each file format."""

from __future__ import annotations

import copy
import gzip
import json
import os
import pickletools
import random
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

Mutation = Callable[[bytes, random.Random], bytes]

_SIZES_OF_TYPES = [2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**64 - 1]
EXTREME_INTEGERS = [0, 1, 2, 3, 7, 127, 128, 255, 256, 65_535, *_SIZES_OF_TYPES]
_PATHS = ["../../../../etc/passwd", "/dev/zero", "..", "a\0b"]
_TEXTS = ["", "x", "x" * 100_000, *_PATHS, "\ud800", "{{ 7 * 7 }}", "%s%n", "1", "NaN"]
_INTEGERS = [-1, 0, 1, 3, 2**31, 2**63, 2**64, -(2**63), 10**400]
_FLOATS = [0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"), -float("inf")]
_CONTAINERS: list[Any] = [[], {}, [1, 2, 3], [[]], {"a": 1}, [None] * 10_000, [0] * 1000]
UNUSUAL_VALUES: list[Any] = [None, True, False, *_TEXTS, *_INTEGERS, *_FLOATS, *_CONTAINERS]


# -------------------------------------------------------------------- any bytes
def flip_bits(content: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(content or b"\0")
    for _ in range(rng.choice([1, 1, 2, 8, 64])):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


_BYTES = [b"\0", b"\xff", b"\x7f", b"\x80", b"\n", b'"', b"]"]


def set_bytes(content: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(content or b"\0")
    for _ in range(rng.choice([1, 2, 4])):
        start = rng.randrange(min(len(damaged), rng.choice([64, 4096, len(damaged)])))
        damaged[start : start + rng.choice([1, 4, 8])] = rng.choice(_BYTES)
    return bytes(damaged)


def extreme_integer(content: bytes, rng: random.Random) -> bytes:
    """Overwrite 4 or 8 bytes near the beginning, where sizes are stored."""
    start = rng.randrange(min(len(content), rng.choice([16, 64, 1024, 8192])) or 1)
    length = rng.choice([4, 8])
    number = rng.choice(EXTREME_INTEGERS) % 2 ** (8 * length)
    return content[:start] + number.to_bytes(length, "little") + content[start + length :]


def truncate(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(min(len(content), rng.choice([16, 256, 8192, len(content) + 1])) + 1)]


def append_bytes(content: bytes, rng: random.Random) -> bytes:
    return content + rng.choice([b"\0", b"more", content, bytes(4096), b"\xff\xfe", b"\n"])


def repeat_range(content: bytes, rng: random.Random) -> bytes:
    """Repeat, remove or replace a range."""
    first, last = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    last = min(last, first + rng.choice([1, 16, 1024]))
    place = rng.randrange(len(content) + 1)
    repeated = content[first:last] * rng.choice([1, 1, 30])
    return content[:place] + repeated + content[place + rng.choice([0, last - first]) :]


def zero_range(content: bytes, rng: random.Random) -> bytes:
    """Overwrite a range with zeros, as after a disk error."""
    start = rng.randrange(len(content) + 1) // 512 * 512
    length = min(rng.choice([16, 512, 4096]), len(content) - start)
    return content[:start] + bytes(length) + content[start + length :]


_INVALID_TEXTS = [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\0", b"\x1b[2J", b"\r", b"\xe2\x80\xa8"]


def invalid_text(content: bytes, rng: random.Random) -> bytes:
    """Insert invalid UTF-8 or control characters, or change the encoding."""
    text = content.decode("utf-8", "replace")
    odd = rng.choice(_INVALID_TEXTS)
    place = rng.randrange(len(content) + 1)
    encoded = [text.encode("utf-16"), text.encode("utf-32"), text.encode("utf-7", "replace")]
    changed = [content[:place] + odd + content[place:], b"\xef\xbb\xbf" + content, content.replace(b"\n", b"\r\n")]
    return rng.choice([*changed, *encoded])


_EMPTY = [b"", b"\n", b"null", b"0", b"[]", b"{}", b'""']
_GIT_LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
_OTHER_FORMATS = [b"<html><body>404</body></html>", _GIT_LFS, b"PK\x03\x04" + bytes(100), b"GGUF", b"\x80\x04N."]
_OTHER_FORMATS += [b"\x93NUMPY\x01\x00", b"#!/bin/sh\necho > marker\n"]


def replace_content(content: bytes, rng: random.Random) -> bytes:
    return rng.choice([*_EMPTY, *_OTHER_FORMATS, rng.randbytes(rng.choice([1, 8, 100, 5000]))])


GENERIC_MUTATIONS: list[Mutation] = [flip_bits, set_bytes, extreme_integer, truncate, append_bytes, repeat_range]
GENERIC_MUTATIONS += [zero_range, invalid_text, replace_content]


# -------------------------------------------------------------------- JSON
def _container_keys(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Return all containers in a JSON value, each with all its keys or indices."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in list(pairs)[:200]:
        found.append((value, key))
        _container_keys(part, found)
    return found


def mutate_value(value: Any, rng: random.Random) -> Any:
    """Replace, remove, rename or copy one to three parts of a JSON value."""
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        places = _container_keys(value, [])
        if not places:
            return copy.deepcopy(rng.choice(UNUSUAL_VALUES))
        holder, key = rng.choice(places)
        choice = rng.randrange(8)
        if choice < 5:
            holder[key] = copy.deepcopy(rng.choice(UNUSUAL_VALUES))
        elif choice == 5:
            del holder[key]
        elif choice == 6 and isinstance(holder, dict):
            names = ["__class__", "", "x" * 5000, f"{key} ", str(key).upper(), "\ud800", "__metadata__"]
            holder[rng.choice(names)] = holder.pop(key)
        else:
            other_holder, other_key = rng.choice(places)
            holder[key] = copy.deepcopy(other_holder.get(other_key)) if isinstance(other_holder, dict) else None
    return value


def mutate_json(content: bytes, rng: random.Random) -> bytes:
    try:
        value = json.loads(content)
    except ValueError:
        return flip_bits(content, rng)
    return encode_json(mutate_value(value, rng))


def encode_json(value: Any) -> bytes:
    try:
        return json.dumps(value).encode("utf-8", "surrogatepass")
    except ValueError:  # a value that now contains itself
        return b'{"itself": NaN}'


def write_invalid_json(content: bytes, rng: random.Random) -> bytes:
    """Write invalid, deeply nested or very large JSON."""
    text = content.decode("utf-8", "replace")
    deep = rng.choice([500, 5000, 100_000])
    key = rng.choice(re.findall(r'"\w+": ', text) or ['"a": '])
    number = rng.choice(re.findall(r"(?<=[ \[])\d+(?=[,\]}\n])", text) or ["1"])
    absurd = rng.choice([*"1e99999 0x10 01 NaN -Infinity 1.5 +1 1_000".split(), "9" * 5000, "-" + "9" * 400])
    return rng.choice(
        [
            "[" * deep + "]" * deep,
            '{"a":' * deep + "1" + "}" * deep,
            "[" * deep,
            text.replace("{", '{"a": ' + "[" * deep + "]" * deep + ",", 1),
            text.replace(key, f"{key} 1, {key}", 1),
            text.replace("{", f"{{ {key} null,", 1),
            text.replace("{", "{" + ",".join(f'"k{i}": {i}' for i in range(20_000)) + ",", 1),
            re.sub(rf"(?<=[ \[]){number}(?=[,\]}}\n])", absurd, text, count=1),
            re.sub(rf"(?<=[ \[]){number}(?=[,\]}}\n])", absurd, text),
            text.replace('"', "'"),
            text.replace(",", ",,", 1),
            "// a comment\n" + text,
            text.replace(": ", ": /* */ ", 1),
            '"' + "\\ud800" * 1000 + '"',
            text.replace('"', '"\\u0000', 1),
            '"' * 9999,
            "[" + "[]," * 2_000_000 + "[]]",
            '{"a": "' + "x" * 4_000_000 + '\U0001f6b2"}',
            "[" + "{}," * 3_000_000 + "{}]",
            "0," * 2_000_000,
        ]
    ).encode("utf-8", "replace")


def mutate_json_line(content: bytes, rng: random.Random) -> bytes:
    """Mutate one line of a JSON-lines file."""
    lines = content.split(b"\n")
    i = rng.randrange(len(lines))
    lines[i] = rng.choice([mutate_json, write_invalid_json, mutate_json, flip_bits, truncate])(lines[i], rng)
    return b"\n".join(lines)


# -------------------------------------------------------------------- safetensors
def mutate_safetensors_header(content: bytes, rng: random.Random) -> bytes:
    """Mutate the header, and adjust its length so that it is parsed."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    inner = header.get("__metadata__", {})
    choice = rng.randrange(10)
    if "tricycle" in inner and choice < 5:
        text = inner["tricycle"].encode()
        if rng.random() < 0.7:  # older files have no checksum, so the rest is parsed
            inner.pop("crc32", None)
        inner["tricycle"] = rng.choice([mutate_json, mutate_json, mutate_json, write_invalid_json])(text, rng).decode(
            "utf-8", "surrogatepass"
        )
    elif choice < 8:
        header = mutate_value(header, rng)
    else:
        return _framed(write_invalid_json(content[8 : 8 + length], rng), content[8 + length :])
    return _framed(encode_json(header), content[8 + length :])


def _framed(header: bytes, rest: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + rest


def truncate_safetensors(content: bytes, rng: random.Random) -> bytes:
    """Truncate at the boundary of a structure, or one byte next to it."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    edges = [0, 8, 8 + length // 2, 8 + length, *[8 + length + end for end in ends]]
    return content[: max(0, rng.choice(edges) + rng.choice([-1, 0, 1]))]


def insert_nonfinite_values(content: bytes, rng: random.Random) -> bytes:
    """Overwrite values with NaN, infinity and extreme numbers."""
    length = int.from_bytes(content[:8], "little") + 8
    damaged = bytearray(content)
    for _ in range(rng.choice([1, 50])):
        start = length + rng.randrange(max(1, (len(content) - length) // 4)) * 4
        damaged[start : start + 4] = struct.pack("<f", rng.choice([float("nan"), float("inf"), 3e38, -3e38, 1e-45]))
    return bytes(damaged[: len(content)])


# -------------------------------------------------------------------- GGUF
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def gguf_fields(content: bytes) -> list[tuple[int, int]]:
    """Return the start and the length in bytes of each field of the header."""
    places = [(0, 4), (4, 4), (8, 8), (16, 8)]
    _, _, n_tensors, n_pairs = struct.unpack_from("<4sIQQ", content)
    at = 24

    def take(n: int) -> int:
        nonlocal at
        places.append((at, n))
        at += n
        return int.from_bytes(content[at - n : at], "little")

    def value(kind: int) -> None:
        if kind == 8:
            take(take(8))
        elif kind == 9:
            inner = take(4)
            for _ in range(take(8)):
                value(inner)
        else:
            take(_SIZES[kind])

    for _ in range(n_pairs):
        take(take(8))
        value(take(4))
    for _ in range(n_tensors):
        take(take(8))
        for _ in range(take(4)):
            take(8)
        take(4)
        take(8)
    return places


def overwrite_gguf_field(content: bytes, rng: random.Random) -> bytes:
    places = gguf_fields(content)
    damaged = bytearray(content)
    for _ in range(rng.choice([1, 1, 2])):
        # most fields are tokens, so the first and last fields are chosen more often
        start, length = rng.choice(rng.choice([places, places[:60], places[-40:]]))
        number = rng.choice([*EXTREME_INTEGERS, *range(40)])
        damaged[start : start + length] = (
            (number % 2 ** (8 * length)).to_bytes(length, "little") if length in (4, 8) else rng.randbytes(length)
        )
    return bytes(damaged)


def truncate_gguf(content: bytes, rng: random.Random) -> bytes:
    start, length = rng.choice(gguf_fields(content))
    return content[: start + rng.choice([0, 1, length])]


def drop_or_repeat_gguf_field(content: bytes, rng: random.Random) -> bytes:
    """Remove or repeat a field."""
    start, length = rng.choice(gguf_fields(content)[4:60])
    return content[: start + rng.choice([0, length])] + content[start + rng.choice([0, length]) :]


# -------------------------------------------------------------------- pickles
def mutate_pickle_opcode(content: bytes, rng: random.Random) -> bytes:
    """Remove, repeat, truncate or replace an instruction."""
    places = [place for _, _, place in pickletools.genops(content)] + [len(content)]
    i = rng.randrange(len(places) - 1)
    first, last = places[i], places[i + 1]
    j = rng.randrange(len(places) - 1)
    other = content[places[j] : places[j + 1]]
    code = rng.choice(pickletools.opcodes).code.encode("latin-1")
    return rng.choice(
        [
            content[:first],
            content[:first] + content[last:],
            content[:last] + content[first:],
            content[:first] + other + content[last:],
            content[:first] + code + content[first + 1 :],
            content[:first] + code + content[last:],
            content[: first + 1] + rng.choice(EXTREME_INTEGERS).to_bytes(8, "little") + content[last:],
        ]
    )


def replace_pickle_string(content: bytes, rng: random.Random) -> bytes:
    """Replace a string by another one."""
    texts = [(place, arg) for code, arg, place in pickletools.genops(content) if code.name == "SHORT_BINUNICODE"]
    place, text = rng.choice(texts)
    raw = str(text).encode()
    others = [str(other) for _, other in texts]
    other = rng.choice([*others, "os", "system", "builtins", "eval", "__class__", "..", "array"])
    replaced = bytes([len(other.encode()[:255])]) + other.encode()[:255]
    return content[: place + 1] + replaced + content[place + 2 + len(raw) :]


# -------------------------------------------------------------------- HTTP responses
_HTTP_STATUSES = [b"206 Partial", b"301 Moved", b"302 Found", b"404 Not", b"416 Range", b"500 Error", b"999 X", b"x"]
_HTTP_HEADERS = b"""Location: file:///etc/passwd
Location: /input.txt
Location: http://[::1
Location: //
Content-Encoding: gzip
Content-Encoding: deflate
Transfer-Encoding: chunked
Content-Range: bytes 0-1/99999999999
Content-Type: text/plain; charset=nothing""".split(b"\n")
_HTTP_HEADERS += [b"X: " + b"y" * 70_000, b"\r\n".join(b"X-%d: y" % i for i in range(300)), b"\xff\xfe: \xff"]


def mutate_http_response(content: bytes, rng: random.Random) -> bytes:
    """Change the status, the headers or the body of a response."""
    head, _, body = content.partition(b"\r\n\r\n")
    status, header = rng.choice(_HTTP_STATUSES), rng.choice(_HTTP_HEADERS)
    length = b"Content-Length: " + rng.choice([b"0", b"-1", b"9999999999", b"x"])
    packed = gzip.compress(bytes(5 * 10**7), mtime=0) if rng.random() < 0.3 else body
    return rng.choice(
        [
            head.replace(b"200 OK", status) + b"\r\n" + header + b"\r\n\r\n" + body,
            head + b"\r\n" + header + b"\r\n\r\n" + body,
            re.sub(rb"Content-Length: \d+", length, head) + b"\r\n\r\n" + body,
            b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n" + packed,
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffff\r\n" + body,
            b"HTTP/1.1 200 Fine\r\n\r\n",  # the server adds endless zeros
            b"HTTP/1.1 200 OK\r\n\r\n" + body + b"more",
            head,
        ]
    )


MUTATIONS_BY_FORMAT: dict[str, list[Mutation]] = {
    "json": [*[mutate_json] * 4, *[write_invalid_json] * 2],
    "jsonl": [*[mutate_json_line] * 3, write_invalid_json],
    "safetensors": [*[mutate_safetensors_header] * 3, truncate_safetensors, insert_nonfinite_values],
    "gguf": [*[overwrite_gguf_field] * 3, truncate_gguf, drop_or_repeat_gguf_field],
    "pickle": [mutate_pickle_opcode, replace_pickle_string],
    "http": [mutate_http_response],
    "bytes": [],
}
_SUFFIXES = {
    **{f".{name}": name for name in ("json", "jsonl", "safetensors", "gguf", "http")},
    ".pkl": "pickle",
}


def mutate(content: bytes, name: str, rng: random.Random) -> tuple[str, bytes]:
    """Apply a random mutation for the format of a file; return its name and the mutated content."""
    mutations = MUTATIONS_BY_FORMAT[_SUFFIXES.get(Path(name).suffix, "bytes")]
    damage = rng.choice(mutations) if mutations and rng.random() < 0.65 else rng.choice(GENERIC_MUTATIONS)
    return damage.__name__, damage(content, rng)


# -------------------------------------------------------------------- replacement of files
def replace_file(path: Path, rng: random.Random) -> str:
    """Replace a file by a folder, pipe, link, device, sparse file or nothing, and return which."""
    kinds: dict[str, Callable[[], Any]] = {
        "nothing": lambda: None,
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "link to itself": lambda: path.symlink_to(path.name),
        "link to nothing": lambda: path.symlink_to("nowhere"),
        "link to zeros": lambda: path.symlink_to("/dev/zero"),
        "link to a full device": lambda: path.symlink_to("/dev/full"),
        "link to random bytes": lambda: path.symlink_to("/dev/urandom"),
        "link to its folder": lambda: path.symlink_to("."),
        "link to another file": lambda: path.symlink_to("/etc/passwd"),
        "terabyte of nothing": lambda: _make_sparse_file(path),
    }
    name = rng.choice([*kinds])
    path.unlink()
    kinds[name]()
    return name


def _make_sparse_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)
