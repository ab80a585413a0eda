"""Damage, drawn by a seeded generator: of any bytes, and of the structure of each form of file."""

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

Damage = Callable[[bytes, random.Random], bytes]

_SIZES_OF_TYPES = [2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**64 - 1]
ABSURD_NUMBERS = [0, 1, 2, 3, 7, 127, 128, 255, 256, 65_535, *_SIZES_OF_TYPES]
_PATHS = ["../../../../etc/passwd", "/dev/zero", "..", "a\0b"]
_TEXTS = ["", "x", "x" * 100_000, *_PATHS, "\ud800", "{{ 7 * 7 }}", "%s%n", "1", "NaN"]
_INTEGERS = [-1, 0, 1, 3, 2**31, 2**63, 2**64, -(2**63), 10**400]
_FLOATS = [0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"), -float("inf")]
_CONTAINERS: list[Any] = [[], {}, [1, 2, 3], [[]], {"a": 1}, [None] * 10_000, [0] * 1000]
ODD_VALUES: list[Any] = [None, True, False, *_TEXTS, *_INTEGERS, *_FLOATS, *_CONTAINERS]


# -------------------------------------------------------------------- any bytes
def flip_bits(content: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(content or b"\0")
    for _ in range(rng.choice([1, 1, 2, 8, 64])):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def set_bytes(content: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(content or b"\0")
    for _ in range(rng.choice([1, 2, 4])):
        start = rng.randrange(min(len(damaged), rng.choice([64, 4096, len(damaged)])))
        damaged[start : start + rng.choice([1, 4, 8])] = rng.choice(
            [b"\0", b"\xff", b"\x7f", b"\x80", b"\n", b'"', b"]"]
        )
    return bytes(damaged)


def absurd_number(content: bytes, rng: random.Random) -> bytes:
    """Somewhere near the beginning, where sizes stand."""
    start = rng.randrange(min(len(content), rng.choice([16, 64, 1024, 8192])) or 1)
    length = rng.choice([4, 8])
    number = rng.choice(ABSURD_NUMBERS) % 2 ** (8 * length)
    return content[:start] + number.to_bytes(length, "little") + content[start + length :]


def cut(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(min(len(content), rng.choice([16, 256, 8192, len(content) + 1])) + 1)]


def longer(content: bytes, rng: random.Random) -> bytes:
    return content + rng.choice([b"\0", b"more", content, bytes(4096), b"\xff\xfe", b"\n"])


def repeat(content: bytes, rng: random.Random) -> bytes:
    """A part twice, or not at all, or another in its place."""
    first, last = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    last = min(last, first + rng.choice([1, 16, 1024]))
    place = rng.randrange(len(content) + 1)
    return (
        content[:place]
        + content[first:last] * rng.choice([1, 1, 30])
        + content[place + rng.choice([0, last - first]) :]
    )


def zeros(content: bytes, rng: random.Random) -> bytes:
    """A part that a disk lost."""
    start = rng.randrange(len(content) + 1) // 512 * 512
    length = min(rng.choice([16, 512, 4096]), len(content) - start)
    return content[:start] + bytes(length) + content[start + length :]


def no_text(content: bytes, rng: random.Random) -> bytes:
    """Bytes that are no UTF-8, other encodings, and characters that text should not have."""
    text = content.decode("utf-8", "replace")
    odd = rng.choice(
        [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\0", b"\x1b[2J", b"\r", b"\xe2\x80\xa8"]
    )
    place = rng.randrange(len(content) + 1)
    return rng.choice(
        [
            content[:place] + odd + content[place:],
            b"\xef\xbb\xbf" + content,
            text.encode("utf-16"),
            text.encode("utf-32"),
            content.replace(b"\n", b"\r\n"),
            text.encode("utf-7", "replace"),
        ]
    )


def something_else(content: bytes, rng: random.Random) -> bytes:
    return rng.choice(
        [
            b"",
            b"\n",
            b"null",
            b"0",
            b"[]",
            b"{}",
            b'""',
            b"<html><body>404</body></html>",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
            b"PK\x03\x04" + bytes(100),
            b"GGUF",
            b"\x80\x04N.",
            b"\x93NUMPY\x01\x00",
            rng.randbytes(rng.choice([1, 8, 100, 5000])),
            b"#!/bin/sh\necho > marker\n",
        ]
    )


ANY: list[Damage] = [flip_bits, set_bytes, absurd_number, cut, longer, repeat, zeros, no_text, something_else]


# -------------------------------------------------------------------- JSON
def _places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every container in a value with every key or index of it."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in list(pairs)[:200]:
        found.append((value, key))
        _places(part, found)
    return found


def damaged_value(value: Any, rng: random.Random) -> Any:
    """The same with one to three parts that are odd, missing, renamed or doubled."""
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        places = _places(value, [])
        if not places:
            return copy.deepcopy(rng.choice(ODD_VALUES))
        holder, key = rng.choice(places)
        how = rng.randrange(8)
        if how < 5:
            holder[key] = copy.deepcopy(rng.choice(ODD_VALUES))
        elif how == 5:
            del holder[key]
        elif how == 6 and isinstance(holder, dict):
            holder[rng.choice(["__class__", "", "x" * 5000, f"{key} ", str(key).upper(), "\ud800", "__metadata__"])] = (
                holder.pop(key)
            )
        else:
            other_holder, other_key = rng.choice(places)
            holder[key] = copy.deepcopy(other_holder.get(other_key)) if isinstance(other_holder, dict) else None
    return value


def json_value(content: bytes, rng: random.Random) -> bytes:
    try:
        value = json.loads(content)
    except ValueError:
        return flip_bits(content, rng)
    return as_json(damaged_value(value, rng))


def as_json(value: Any) -> bytes:
    try:
        return json.dumps(value).encode("utf-8", "surrogatepass")
    except ValueError:  # a value that now holds itself
        return b'{"itself": NaN}'


def json_text(content: bytes, rng: random.Random) -> bytes:
    """What JSON's writers never write."""
    text = content.decode("utf-8", "replace")
    deep = rng.choice([500, 5000, 100_000])
    key = rng.choice(re.findall(r'"\w+": ', text) or ['"a": '])
    number = rng.choice(re.findall(r"(?<=[ \[])\d+(?=[,\]}\n])", text) or ["1"])
    absurd = rng.choice(
        ["1e99999", "9" * 5000, "-" + "9" * 400, "0x10", "01", "NaN", "-Infinity", "1.5", "+1", "1_000"]
    )
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


def json_line(content: bytes, rng: random.Random) -> bytes:
    """One line of several."""
    lines = content.split(b"\n")
    i = rng.randrange(len(lines))
    lines[i] = rng.choice([json_value, json_text, json_value, flip_bits, cut])(lines[i], rng)
    return b"\n".join(lines)


# -------------------------------------------------------------------- safetensors
def safetensors_header(content: bytes, rng: random.Random) -> bytes:
    """The header with odd parts, but of the right length, so that it is read."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    inner = header.get("__metadata__", {})
    how = rng.randrange(10)
    if "tricycle" in inner and how < 5:
        text = inner["tricycle"].encode()
        if rng.random() < 0.7:  # as older files have none, so that the rest is read
            inner.pop("crc32", None)
        inner["tricycle"] = rng.choice([json_value, json_value, json_value, json_text])(text, rng).decode(
            "utf-8", "surrogatepass"
        )
    elif how < 8:
        header = damaged_value(header, rng)
    else:
        return _framed(json_text(content[8 : 8 + length], rng), content[8 + length :])
    return _framed(as_json(header), content[8 + length :])


def _framed(header: bytes, rest: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + rest


def safetensors_cut(content: bytes, rng: random.Random) -> bytes:
    """At the edges of its structures, or a byte beside."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    edges = [0, 8, 8 + length // 2, 8 + length, *[8 + length + end for end in ends]]
    return content[: max(0, rng.choice(edges) + rng.choice([-1, 0, 1]))]


def odd_numbers(content: bytes, rng: random.Random) -> bytes:
    """Values that are NaN, infinite or huge."""
    length = int.from_bytes(content[:8], "little") + 8
    damaged = bytearray(content)
    for _ in range(rng.choice([1, 50])):
        start = length + rng.randrange(max(1, (len(content) - length) // 4)) * 4
        damaged[start : start + 4] = struct.pack("<f", rng.choice([float("nan"), float("inf"), 3e38, -3e38, 1e-45]))
    return bytes(damaged[: len(content)])


# -------------------------------------------------------------------- GGUF
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def gguf_places(content: bytes) -> list[tuple[int, int]]:
    """Where each field of the header begins, and how many bytes it has."""
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


def gguf_field(content: bytes, rng: random.Random) -> bytes:
    places = gguf_places(content)
    damaged = bytearray(content)
    for _ in range(rng.choice([1, 1, 2])):
        # those of tokens are many and alike
        start, length = rng.choice(rng.choice([places, places[:60], places[-40:]]))
        number = rng.choice([*ABSURD_NUMBERS, *range(40)])
        damaged[start : start + length] = (
            (number % 2 ** (8 * length)).to_bytes(length, "little") if length in (4, 8) else rng.randbytes(length)
        )
    return bytes(damaged)


def gguf_cut(content: bytes, rng: random.Random) -> bytes:
    start, length = rng.choice(gguf_places(content))
    return content[: start + rng.choice([0, 1, length])]


def gguf_moved(content: bytes, rng: random.Random) -> bytes:
    """A field left out, or twice."""
    start, length = rng.choice(gguf_places(content)[4:60])
    return content[: start + rng.choice([0, length])] + content[start + rng.choice([0, length]) :]


# -------------------------------------------------------------------- pickles
def pickle_instruction(content: bytes, rng: random.Random) -> bytes:
    """An instruction left out, twice, cut off, or another in its place."""
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
            content[: first + 1] + rng.choice(ABSURD_NUMBERS).to_bytes(8, "little") + content[last:],
        ]
    )


def pickle_text(content: bytes, rng: random.Random) -> bytes:
    """A name or a text that is another of the same length."""
    texts = [(place, arg) for code, arg, place in pickletools.genops(content) if code.name == "SHORT_BINUNICODE"]
    place, text = rng.choice(texts)
    raw = str(text).encode()
    other = rng.choice(
        [str(other) for _, other in texts] + ["os", "system", "builtins", "eval", "__class__", "..", "array"]
    )
    replaced = bytes([len(other.encode()[:255])]) + other.encode()[:255]
    return content[: place + 1] + replaced + content[place + 2 + len(raw) :]


# -------------------------------------------------------------------- answers of a server
def answer(content: bytes, rng: random.Random) -> bytes:
    """Another status, other headers, or none of HTTP's."""
    head, _, body = content.partition(b"\r\n\r\n")
    status = rng.choice(
        [b"206 Partial", b"301 Moved", b"302 Found", b"404 Not", b"416 Range", b"500 Error", b"999 X", b"x"]
    )
    header = rng.choice(
        [
            b"Location: file:///etc/passwd",
            b"Location: /input.txt",
            b"Location: http://[::1",
            b"Location: //",
            b"Content-Encoding: gzip",
            b"Content-Encoding: deflate",
            b"Transfer-Encoding: chunked",
            b"Content-Range: bytes 0-1/99999999999",
            b"Content-Type: text/plain; charset=nothing",
            b"X: " + b"y" * 70_000,
            b"\r\n".join(b"X-%d: y" % i for i in range(300)),
            b"\xff\xfe: \xff",
        ]
    )
    length = rng.choice(
        [b"Content-Length: 0", b"Content-Length: -1", b"Content-Length: 9999999999", b"Content-Length: x"]
    )
    packed = gzip.compress(bytes(5 * 10**7), mtime=0) if rng.random() < 0.3 else body
    return rng.choice(
        [
            head.replace(b"200 OK", status) + b"\r\n" + header + b"\r\n\r\n" + body,
            head + b"\r\n" + header + b"\r\n\r\n" + body,
            re.sub(rb"Content-Length: \d+", length, head) + b"\r\n\r\n" + body,
            b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n" + packed,
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffff\r\n" + body,
            b"HTTP/1.1 200 Fine\r\n\r\n",  # and zeros without end
            b"HTTP/1.1 200 OK\r\n\r\n" + body + b"more",
            head,
        ]
    )


FORMS: dict[str, list[Damage]] = {
    "json": [json_value, json_value, json_value, json_value, json_text, json_text],
    "jsonl": [json_line, json_line, json_line, json_text],
    "safetensors": [safetensors_header, safetensors_header, safetensors_header, safetensors_cut, odd_numbers],
    "gguf": [gguf_field, gguf_field, gguf_field, gguf_cut, gguf_moved],
    "pickle": [pickle_instruction, pickle_instruction, pickle_text, pickle_text],
    "http": [answer],
    "bytes": [],
}
_SUFFIXES = {
    ".json": "json",
    ".jsonl": "jsonl",
    ".safetensors": "safetensors",
    ".gguf": "gguf",
    ".pkl": "pickle",
    ".http": "http",
}


def damaged(content: bytes, name: str, rng: random.Random) -> tuple[str, bytes]:
    """A file's bytes damaged in a way that suits its name; what was done, and the result."""
    own = FORMS[_SUFFIXES.get(Path(name).suffix, "bytes")]
    damage = rng.choice(own) if own and rng.random() < 0.65 else rng.choice(ANY)
    return damage.__name__, damage(content, rng)


# -------------------------------------------------------------------- what stands in a file's place
def another_thing(path: Path, rng: random.Random) -> str:
    """Put something else in the place of a file: a folder, a pipe, a link, a device, a huge hole, nothing."""
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
        "terabyte of nothing": lambda: _hole(path),
    }
    name = rng.choice([*kinds])
    path.unlink()
    kinds[name]()
    return name


def _hole(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)
