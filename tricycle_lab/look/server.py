"""Serves a page about models to the browser of this machine, and answers what it asks.

Python's own `http.server` is enough: one person looks, from this machine alone, so there is nothing that a framework
would add but a dependency. Every address begins with a token that nobody else knows; who does not name it, or comes
under another host's name (as a page elsewhere could make a browser do), gets nothing.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from tricycle.softmaxes import SOFTMAXES
from tricycle_lab.look.changes import Changes
from tricycle_lab.look.page import page
from tricycle_lab.look.reading import Reading
from tricycle_lab.look.subjects import Subject

HOST = "127.0.0.1"
MOST_BYTES = 2**20  # of a question
PATIENCE = 30.0  # seconds that a browser may keep its connection waiting
KEPT = 6  # readings of each model that can still be asked about

Fields = dict[str, Any]


# Questions about a reading, which are methods of it, and the fields that are their arguments.
OF_READINGS: dict[str, dict[str, type]] = {
    "attention": {"site": str, "head": int},
    "overview": {"start": int, "stop": int},
    "states": {},
    "token": {"place": int},
    "lens": {},
}


class NoSuchQuestion(LookupError):
    """What was asked has no answer here."""


class Desk:
    """Answers questions about models; one at a time, for they all want the whole processor.

    Args:
        subjects: one model, or two side by side.
    """

    def __init__(self, subjects: Sequence[Subject], text: str) -> None:
        self.subjects = subjects
        self.text = text
        self._readings: list[OrderedDict[int, Reading]] = [OrderedDict() for _ in subjects]
        self._count = 0
        self._lock = threading.Lock()

    def page(self) -> str:
        """What a browser gets first."""
        about = [{"about": subject.about()} for subject in self.subjects]
        title = " and ".join(subject.title for subject in self.subjects)
        data = {"served": True, "text": self.text, "sides": about, "softmaxes": list(SOFTMAXES)}
        return page("look", title, data, served=True)

    def prepare(self) -> None:
        """Read the text already, while the browser is being opened."""
        for side in range(len(self.subjects)):
            with contextlib.suppress(ValueError):  # the page will ask, too, and be told
                self.answer("view", {"side": side, "text": self.text})

    def answer(self, question: str, fields: Any) -> Any:
        """What JSON can hold.

        Raises:
            NoSuchQuestion: nobody can ask that.
            ValueError: one line about what is wrong with the fields.
        """
        if question not in ("view", *OF_READINGS):
            raise NoSuchQuestion(question)
        if not isinstance(fields, dict):
            raise ValueError("expected a JSON object")
        side = fields.get("side", 0)
        if type(side) is not int or not 0 <= side < len(self.subjects):
            raise ValueError(f"expected a side from 0 to {len(self.subjects) - 1}")
        with self._lock, np.errstate(all="ignore"):  # broken weights show in what comes out
            return self._view(side, fields) if question == "view" else self._of_reading(question, side, fields)

    def _view(self, side: int, fields: Fields) -> Fields:
        """A text, or the ids of one with a token changed or without; and what is changed in the model."""
        subject = self.subjects[side]
        ids = self._ids(subject, fields)
        changes = Changes.of(fields.get("changes"), subject.parts, subject.n_heads)
        kept = self._readings[side]
        for number, reading in kept.items():
            if reading.changes == changes and reading.same(ids, subject.source):
                kept.move_to_end(number)
                return self._shown(number, reading, fields)
        most = max(kept.values(), key=lambda before: subject.spared(ids, changes, before), default=None)
        reading = subject.read(ids, changes, most)
        self._count += 1
        kept[self._count] = reading
        while len(kept) > KEPT:  # the oldest goes that is changed, so that the text as it was stays; else the oldest
            changed = [number for number, reading in kept.items() if reading.changes != Changes()]
            del kept[changed[0] if len(changed) > 1 else next(iter(kept))]
        return self._shown(self._count, reading, fields)

    @staticmethod
    def _shown(number: int, reading: Reading, fields: Fields) -> Fields:
        """What a page shows first, with the map of one head if it says which: its layer with attention, and its own."""
        shown = {"reading": number, **reading.view()}
        match fields.get("map"):
            case [int(layer), int(head)] if (
                bool not in (type(layer), type(head))  # True would be layer 1
                and 0 <= layer < len(reading.sites)
                and 0 <= head < reading.sites[layer].n_heads
            ):
                shown["map"] = reading.attention(reading.sites[layer].name, head)
        return shown

    def _ids(self, subject: Subject, fields: Fields) -> list[int]:
        if "ids" not in fields:
            text = fields.get("text")
            if not isinstance(text, str):
                raise ValueError("expected a text, or the ids of one")
            return subject.ids_of(text)
        ids = fields["ids"]
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise ValueError("expected ids to be a list of whole numbers")
        subject.check(ids)
        edit = fields.get("edit")
        if edit is None:
            return ids
        fits = isinstance(edit, dict) and type(edit.get("place")) is int and type(edit.get("by")) in (int, str)
        if not fits:
            raise ValueError("expected an edit with a place and a text or an id")
        return subject.edited(ids, edit["place"], edit["by"])

    def _of_reading(self, question: str, side: int, fields: Fields) -> Any:
        number = fields.get("reading")
        kept = self._readings[side]
        if type(number) is not int or number not in kept:
            raise ValueError("this reading is no longer kept: read the text again")
        for name, kind in OF_READINGS[question].items():
            if type(fields.get(name)) is not kind:
                raise ValueError(f"expected {name} to be {'a text' if kind is str else 'a whole number'}")
        return getattr(kept[number], question)(*(fields[name] for name in OF_READINGS[question]))


class Picture:
    """A page that has nothing to ask."""

    def __init__(self, content: str) -> None:
        self.content = content

    def page(self) -> str:
        """What a browser gets."""
        return self.content

    def prepare(self) -> None:
        """It is there already."""

    def answer(self, question: str, fields: Any) -> Any:
        """There is none."""
        raise NoSuchQuestion(question)


class LookServer(ThreadingHTTPServer):
    """Serves the page of a desk under an address that holds a secret token.

    Args:
        desk: has the methods `page` and `answer`, as `Desk` has.
        port: 0 for any that is free.

    Raises:
        ValueError: the port is in use, or may not be taken.
    """

    daemon_threads = True
    request_queue_size = 64  # connections that may wait to be taken; of 5 some are lost on a busy machine
    allow_reuse_address = False  # two that share a port would be worse than one that says so

    def __init__(self, desk: Any, port: int = 0) -> None:
        self.desk = desk
        self.token = secrets.token_urlsafe(16)
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ValueError(f"port {port} is in use: name another with --port, or 0 for any") from None
            raise ValueError(f"port {port} cannot be used: {error.strerror}; --port 0 takes any") from None
        except OverflowError:
            raise ValueError(f"expected --port from 0 to 65535, got {port}") from None

    @property
    def address(self) -> str:
        """What to open."""
        return f"http://{HOST}:{self.server_address[1]}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: LookServer
    timeout = PATIENCE
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "tricycle", ""

    def do_GET(self) -> None:
        if self._path() == "":
            self._send(200, self.server.desk.page().encode("utf-8"), "text/html; charset=utf-8")
        else:
            self._refuse(404, "there is nothing here: open the address that `tricycle look` printed")

    def do_POST(self) -> None:
        question = self._path()
        if question is None:
            self._refuse(404, "there is nothing here: open the address that `tricycle look` printed")
            return
        if self.headers.get_content_type() != "application/json":
            self._refuse(415, "expected JSON")
            return
        body = self._body()
        if body is None:
            return
        try:
            answer = self.server.desk.answer(question, json.loads(body))
            text = json.dumps(answer, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
            content = text.encode("utf-8", errors="replace")
        except NoSuchQuestion:
            self._refuse(404, "there is no such question")
        except RecursionError:
            self._refuse(400, "expected JSON that is not so deep")
        except ValueError as error:  # of JSON and of text, too
            self._refuse(400, " ".join(str(error).split())[:500])
        except MemoryError:
            self._refuse(507, "there is too little memory for that")
        except BaseException as error:  # a mistake of ours, or a panic in Rust: the next question is answered
            self._refuse(500, f"{type(error).__name__}: {' '.join(str(error).split())}"[:500])
        else:
            self._send(200, content, "application/json")

    def _path(self) -> str | None:
        """What is asked for behind the token; None for who does not know it."""
        port = self.server.server_address[1]
        hosts = (f"{HOST}:{port}", f"localhost:{port}")
        parts = urlsplit(self.path).path.split("/", 2)
        known = len(parts) == 3 and hmac.compare_digest(parts[1].encode(), self.server.token.encode())
        return parts[2] if known and self.headers.get("Host") in hosts else None

    def _body(self) -> bytes | None:
        """What came, if it is of a size that can be; else it is refused."""
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit():
            self._refuse(411, "expected a question with its length")
        elif len(length) > 9 or int(length) > MOST_BYTES:
            self._refuse(413, f"expected a question of at most {MOST_BYTES:,} bytes")
        else:
            return self.rfile.read(int(length))
        return None

    def _refuse(self, status: int, message: str) -> None:
        self.close_connection = True  # what else came is not read
        self._send(status, json.dumps({"error": message}).encode("utf-8"), "application/json")

    def _send(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
        }
        if self.close_connection:
            headers["Connection"] = "close"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        """Nothing: the terminal belongs to who started this."""
