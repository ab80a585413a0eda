"""One text while it is written: tokens become text, which ends where it was asked to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tricycle import kernels
from tricycle_serve.orders import Order

LEAST_LOGPROB = -9999.0  # of what is impossible; JSON has no infinity


class Told(NamedTuple):
    """What is told of a token beside its text.

    Attributes:
        place: where its text begins in the answer.
        rivals: the likeliest tokens and their logarithms of probabilities.
    """

    token: int
    logprob: float
    rivals: list[tuple[int, float]]
    place: int


class Piece(NamedTuple):
    """Some more of a text.

    Attributes:
        number: of the text among those of its request.
        told: of the tokens behind this piece, where that was asked for.
        n_tokens: drawn for it, those without a text too.
        finish: why it ends, "stop" or "length"; None where it goes on.
    """

    number: int
    text: str
    told: list[Told]
    n_tokens: int
    finish: str | None = None


class Stopper:
    """Hands text on, but for what one of some texts may begin with, and ends before the first that comes.

    The first is that which is complete first; so it makes no difference in which parts the text comes.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.stopped = False

    def push(self, part: str) -> str:
        """What can be handed on."""
        text = self._held + part
        ends = [(text.find(stop) + len(stop), -len(stop)) for stop in self._stops if stop in text]
        if ends:
            end, length = min(ends)
            self.stopped = True
            self._held = ""
            return text[: end + length]
        # the longest end of the text that may be the beginning of a stop
        places = range(max(0, len(text) - self._longest + 1), len(text))
        begins = (place for place in places if any(stop.startswith(text[place:]) for stop in self._stops))
        place = next(begins, len(text))
        self._held = text[place:]
        return text[:place]

    def flush(self) -> str:
        """What was held back, where nothing more comes."""
        held, self._held = self._held, ""
        return held


class Writing:
    """One text of a request.

    Args:
        tokeniser: of the model.
        number: among the texts of the request.
    """

    def __init__(self, order: Order, tokeniser: Any, number: int) -> None:
        self.order = order
        self.number = number
        self._stream = tokeniser.stream(order.prompt)
        self._stopper = Stopper(order.stops)
        self._ends = frozenset(order.sampling.stop_tokens)  # type: ignore[arg-type]
        self._n_seen = 0  # characters that came from the tokens
        self._n_out = 0
        self._n_new = 0  # tokens since the last piece
        self.n_drawn = 0
        self._told: list[Told] = []
        self.finish: str | None = None

    def listen(self, token: int, logits: np.ndarray) -> None:
        """As of `Batch.add`: remember how probable tokens are."""
        if token in self._ends:
            return
        logprobs = kernels.log_softmax(logits[: self.order.sampling.n_vocab].astype(np.float64))
        n = min(self.order.n_rivals or 0, len(logprobs))
        likely = np.argpartition(-logprobs, n - 1)[:n] if n else np.array([], int)
        likely = likely[np.argsort(-logprobs[likely], kind="stable")]
        finite = np.maximum(logprobs, LEAST_LOGPROB)
        rivals = [(int(rival), float(finite[rival])) for rival in likely]
        self._told.append(Told(token, float(finite[token]), rivals, -1))

    def take(self, token: int) -> Piece | None:
        """What a token adds; None for nothing yet."""
        self.n_drawn += 1
        self._n_new += 1
        if token in self._ends:
            return self.end("stop")
        if self._told:
            self._told[-1] = self._told[-1]._replace(place=self._n_seen)
        part = self._stream.push([token])
        self._n_seen += len(part)
        text = self._stopper.push(part)
        if self._stopper.stopped:
            return self._piece(text, "stop")
        if self.n_drawn == self.order.n_tokens:
            return self.end("length", text)
        return self._piece(text, None) if text else None

    def end(self, finish: str, text: str = "") -> Piece:
        """The last piece, where no more tokens come."""
        part = self._stream.flush()
        self._n_seen += len(part)
        text += self._stopper.push(part)
        if self._stopper.stopped:
            return self._piece(text, "stop")
        return self._piece(text + self._stopper.flush(), finish)

    def _piece(self, text: str, finish: str | None) -> Piece:
        self._n_out += len(text)
        self.finish = finish
        told = self._told
        if self._stopper.stopped:  # tokens whose text is cut off are not spoken of
            told = [one for one in told if one.place < self._n_out]
        self._told = []
        n_new, self._n_new = self._n_new, 0
        return Piece(self.number, text, told, n_new, finish)


class TokenTexts:
    """The text of single tokens, each looked up once."""

    def __init__(self, tokeniser: Any) -> None:
        self._tokeniser = tokeniser
        # behind another, for some tokenisers drop the space before a first word
        self._before = [int(token) for token in tokeniser.encode_plain("a")]
        self._n_before = len(tokeniser.decode(self._before))
        self._known: dict[int, tuple[str, list[int] | None]] = {}

    def __call__(self, token: int) -> tuple[str, list[int] | None]:
        """Its text, and its bytes; None where it is a part of a character and nobody knows which."""
        if token not in self._known:
            text = self._tokeniser.decode([*self._before, token])[self._n_before :]
            raw: bytes | None = None if "\ufffd" in text else text.encode("utf-8")
            if hasattr(self._tokeniser, "token_bytes"):
                raw = b"" if token >= len(self._tokeniser) else self._tokeniser.token_bytes(token)
            self._known[token] = text, None if raw is None else list(raw)
        return self._known[token]
