"""Embeddings: what is asked for, and the thread in which an encoder computes them."""

from __future__ import annotations

import base64
from typing import Any, NamedTuple

import numpy as np

from tricycle.pretrained.sentences import SentenceEncoder
from tricycle_serve.engine import Engine, no_time
from tricycle_serve.errors import ApiError
from tricycle_serve.fields import Fields, clean
from tricycle_serve.work import Work

MOST_INPUTS = 2048
AT_ONCE = 16  # texts that are computed before it is another request's turn


class VectorWish(NamedTuple):
    """The fields of a request for embeddings; texts that are too long are truncated, or refused."""

    texts: list[str]
    cuts: bool
    as_base64: bool


def vector_wish_of(fields: Fields, width: int) -> VectorWish:
    """Return what the fields of a request ask for; raise ApiError, which names the field that is wrong."""
    texts = fields.take("input")
    texts = [texts] if isinstance(texts, str) else texts
    sound = isinstance(texts, list) and 0 < len(texts) <= MOST_INPUTS and all(isinstance(text, str) for text in texts)
    if not sound:
        fields.refuse("input", f"a text, or a list of 1 to {MOST_INPUTS} texts")
    kind = fields.take("encoding_format", "float")
    if kind not in ("float", "base64"):
        fields.refuse("encoding_format", "float or base64")
    dimensions = fields.whole("dimensions", width, 1)
    if dimensions != width:
        raise ApiError(f"expected dimensions to be {width}, as the model has, got {dimensions}", param="dimensions")
    cuts = fields.flag("truncate")
    fields.ignore("user")
    fields.expect_no_more()
    return VectorWish([clean(text) for text in texts], cuts, kind == "base64")


def written(vector: np.ndarray, as_base64: bool) -> Any:
    """A vector as JSON has it; as base64 its float32 numbers, the lowest byte first."""
    if as_base64:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    return vector.tolist()


class VectorEngine(Engine):
    """Computes vectors, a few for each request in turn.

    Args:
        n_queue: requests that wait.
    """

    def __init__(self, encoder: SentenceEncoder, n_queue: int) -> None:
        super().__init__(n_queue)
        self.encoder = encoder

    def submit(self, texts: list[str], seconds: float) -> Work:
        """Ask for vectors; the result gives them as arrays (N, C), in the order of the texts.

        Raises:
            ApiError: there is no room for them.
        """
        parts = [texts[i : i + AT_ONCE] for i in range(0, len(texts), AT_ONCE)]
        work = Work(len(parts), seconds)
        with self._condition:
            self._expect_room(1)
            self._queue.append((work, texts))
            self._condition.notify()
        return work

    def _turn(self) -> None:
        with self._condition:
            work, texts = self._queue.popleft()
        if work.is_over:
            return
        if work.is_late:
            work.fail(no_time())
            return
        try:
            work.put(self.encoder.encode(texts[:AT_ONCE]), last=True)
        except BaseException as error:  # whatever it is, also a panic in Rust: others need not suffer from it
            self._explain(error)
            work.fail(error)
            return
        if texts[AT_ONCE:]:
            with self._condition:
                self._queue.append((work, texts[AT_ONCE:]))

    def _fail_all(self, error: BaseException) -> None:
        with self._condition:
            works = [work for work, _ in self._queue]
            self._queue.clear()
        for work in works:
            work.fail(error)
