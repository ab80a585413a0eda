"""The thread in which the model computes: all texts are written together, a token of each in turn."""

from __future__ import annotations

import math
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from tricycle.decoding.batch import GenerationBatch
from tricycle.decoding.speculative import SpeculativeState
from tricycle.generate import common_prefix_length
from tricycle.models import GPT
from tricycle_serve.errors import ApiError
from tricycle_serve.orders import Order
from tricycle_serve.work import Work
from tricycle_serve.writing import Writing

# Tokens of prompts that are read between two tokens of those who are being answered.
READ_AT_ONCE = 256
LEAST_SHARED = 16  # tokens: a shorter prefix that two prompts share is processed again
MOST_WAIT = 30  # seconds that a client is told to wait


class Engine(ABC):
    """A queue and a thread that works it off.

    Args:
        n_queue: how many parts of requests may wait.
    """

    def __init__(self, n_queue: int) -> None:
        self._n_queue = n_queue
        self._queue: deque[Any] = deque()
        self._condition = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Begin nothing more, and end what is at work."""
        with self._condition:
            self._closing = True
            self._condition.notify()

    def join(self, seconds: float) -> None:
        """Wait for the thread's end."""
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _expect_room(self, n: int) -> None:
        """With the condition held.

        Raises:
            ApiError: the queue is full, or the server is about to end.
        """
        if self._closing:
            raise ApiError("the server is shutting down", status=503, code="shutting_down")
        n_waiting = self._n_waiting()
        if n_waiting + n > self._n_queue and n_waiting:
            message = f"too many requests: {n_waiting} texts are waiting; try again later"
            raise ApiError(message, 429, code="queue_full", wait=min(MOST_WAIT, 1 + n_waiting // 4))

    @property
    def is_alive(self) -> bool:
        """Whether requests are still answered: the thread has not ended since it was started."""
        return self._thread.ident is None or self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._wait():
                try:
                    self._turn()
                except BaseException as error:  # a panic in Rust is no Exception
                    self._explain(error)
                    self._fail_all(error)
        finally:
            self.close()
            self._fail_all(ApiError("the server is shutting down", status=503, code="shutting_down"))

    def _wait(self) -> bool:
        """Wait for work; returns whether there is any before the server ends."""
        with self._condition:
            while not self._closing and not self._has_work():
                self._condition.wait()
            return not self._closing

    def _explain(self, error: BaseException) -> None:
        """Print an error for who runs the server; clients are told little."""
        print("".join(traceback.format_exception(error)), file=sys.stderr, flush=True)

    def _n_waiting(self) -> int:
        """How many are in the queue."""
        return len(self._queue)

    def _has_work(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._queue)

    @abstractmethod
    def _turn(self) -> None:
        """Do a little for everybody."""

    @abstractmethod
    def _fail_all(self, error: BaseException) -> None:
        """Let all requests come to nothing."""


@dataclass(eq=False)
class _Text:
    """A text from the queue to its end.

    Attributes:
        room: tokens that it may come to.
        is_first: of those with its prompt.
        state: has processed the prompt so far; another one once the text is at work.
        number: in the batch, once its prompt is short enough to be read there.
    """

    work: Work
    writing: Writing
    room: int
    is_first: bool
    state: SpeculativeState
    number: int | None = None

    @property
    def order(self) -> Order:
        return self.writing.order

    @property
    def n_unread(self) -> int:
        return len(self.order.prompt) - len(self.state.tokens)


@dataclass
class Limits:
    """What a model is to be troubled with at most.

    Attributes:
        n_texts: written at once.
        n_queue: texts that wait.
        n_kept: conversations whose keys and values are remembered when nobody writes them.
        n_tokens: that may be remembered of all texts together; None where memory does not matter.
    """

    n_texts: int = 8
    n_queue: int = 64
    n_kept: int = 8
    n_tokens: float = math.inf


@dataclass
class _Memory:
    """The decoding states that no text uses, the latest last (prefix cache)."""

    most: int
    states: list[SpeculativeState] = field(default_factory=list)

    def n_tokens(self) -> int:
        return sum(len(state.tokens) for state in self.states)

    def keep(self, state: SpeculativeState) -> None:
        if state.tokens:
            self.states.append(state)
        del self.states[: max(0, len(self.states) - self.most)]


class TextEngine(Engine):
    """Writes texts.

    Texts are taken from the queue in the order of their coming, as many as the limits allow. Of long prompts a part is
    read in each turn, so that those who are being answered hardly notice.

    Args:
        tokeniser: of the model.
        dtype: of keys and values, as of `SpeculativeState`.
    """

    def __init__(self, model: GPT, tokeniser: Any, limits: Limits, dtype: str | None = None) -> None:
        super().__init__(limits.n_queue)
        self.model = model
        self.tokeniser = tokeniser
        self._limits = limits
        self._dtype = dtype
        self._reading: deque[_Text] = deque()
        self._writing: dict[int, _Text] = {}
        self._batch = GenerationBatch(model)
        self._memory = _Memory(limits.n_kept)

    def submit(self, orders: list[Order], seconds: float) -> Work:
        """Ask for some texts; the result tells of them as they come.

        Raises:
            ApiError: there is no room for them.
        """
        work = Work(len(orders), seconds)
        texts = []
        for i, order in enumerate(orders):
            is_first = i == 0 or orders[i - 1].prompt is not order.prompt
            room = len(order.prompt) + order.n_tokens
            if room > self._limits.n_tokens:
                most = int(self._limits.n_tokens)
                raise ApiError(f"expected at most {most} tokens with the answer, for memory is short, got {room}")
            state = SpeculativeState(self.model, self._dtype)
            texts.append(_Text(work, Writing(order, self.tokeniser, i), room, is_first, state))
        with self._condition:
            self._expect_room(len(texts))
            self._queue += texts
            self._condition.notify()
        return work

    # ---------------------------------------------------------------- a turn
    def _has_work(self) -> bool:
        return bool(self._queue or self._reading or self._writing)

    def _turn(self) -> None:
        self._drop()
        self._admit()
        self._read()
        self._write()

    def _drop(self) -> None:
        """End what nobody waits for, or has waited for long enough."""
        with self._condition:
            over = [text for text in self._queue if text.work.is_over or text.work.is_late]
            for text in over:
                self._queue.remove(text)
        for text in [*self._reading, *self._writing.values()]:
            if text.work.is_over or text.work.is_late:
                self._release(text)
                over.append(text)
        for text in over:
            if not text.work.is_over and text.number is None:
                text.work.fail(no_time())
            elif not text.work.is_over:
                text.work.put(text.writing.end("length"), last=True)

    def _release(self, text: _Text) -> None:
        """It is at work no longer; what it has read may be of use."""
        if text.number is None:
            self._reading.remove(text)
        else:
            self._batch.remove(text.number)
            del self._writing[text.number]
        self._memory.keep(text.state)

    def _admit(self) -> None:
        """Begin with texts of the queue."""
        with self._condition:
            waiting = list(self._queue)
        for text in waiting:
            if len(self._reading) + len(self._writing) >= self._limits.n_texts:
                return
            if any(other.order.prompt is text.order.prompt for other in self._reading):
                continue  # until that prompt has been read
            most = self._limits.n_tokens
            used = text.room + sum(other.room for other in (*self._reading, *self._writing.values()))
            while self._memory.states and used + self._memory.n_tokens() > most:
                del self._memory.states[0]  # a conversation is forgotten
            if used > most:
                return
            text.state = self._state_for(text.order.prompt)
            if text.is_first:
                text.work.n_cached += min(len(text.state.tokens), len(text.order.prompt) - 1)
            with self._condition:
                self._queue.remove(text)
            self._reading.append(text)

    def _state_for(self, prompt: list[int]) -> SpeculativeState:
        """Return a state, used by no other text, that has processed as much of the prompt as any."""
        idle = self._memory.states
        busy = [text.state for text in (*self._writing.values(), *self._reading)]
        shared = [(common_prefix_length(state.tokens, prompt), state) for state in (*busy, *idle)]
        n, best = max(shared, key=lambda pair: pair[0], default=(0, None))
        if best is None or n < min(LEAST_SHARED, len(prompt)):
            return SpeculativeState(self.model, self._dtype)
        if any(best is state for state in idle) and 2 * n >= len(best.tokens):
            idle[:] = [state for state in idle if state is not best]
            if n < len(best.tokens):
                best = best.fork(n)  # without what it must forget, so that its length says what it knows
            return best
        return best.fork(n)

    def _read(self) -> None:
        """Some tokens of the prompts, in turn."""
        left = READ_AT_ONCE
        for _ in range(len(self._reading)):
            text = self._reading[0]
            if text.n_unread <= left:
                left -= max(1, text.n_unread)
                self._reading.popleft()
                self._join(text)
            elif left == READ_AT_ONCE:
                try:
                    text.state.logits(text.order.prompt[: len(text.state.tokens) + left])
                except (ValueError, MemoryError) as error:
                    self._fail_one(text, error)
                else:
                    self._reading.rotate(-1)
                return
            self._reading.rotate(-1)

    def _fail_one(self, text: _Text, error: BaseException) -> None:
        """End one text; the others go on."""
        self._explain(error)
        self._release(text)
        text.work.fail(error)

    def _join(self, text: _Text) -> None:
        """Let it be written with the others from now on."""
        order = text.order
        listener = None if order.n_rivals is None else text.writing.listen
        how: dict[str, Any] = {"state": text.state, "overflow": "error", "listener": listener}
        text.number = self._batch.add(order.prompt, order.n_tokens, order.sampling, **how)
        self._writing[text.number] = text

    def _write(self) -> None:
        """A token of each text."""
        if not len(self._batch):
            return
        for number, token in self._batch.step():
            text = self._writing.get(number)
            if text is None:  # its last tokens could not be decoded
                continue
            try:
                piece = text.writing.take(token)
            except ValueError as error:  # of its tokeniser
                self._fail_one(text, error)
                continue
            if piece is None:
                continue
            if piece.finish is not None:
                self._release(text)
            text.work.put(piece, last=piece.finish is not None)

    def _fail_all(self, error: BaseException) -> None:
        with self._condition:
            texts = [*self._queue, *self._reading, *self._writing.values()]
            self._queue.clear()
        self._reading.clear()
        self._writing.clear()
        self._batch = GenerationBatch(self.model)
        self._memory.states.clear()
        for text in texts:
            text.work.fail(error)


def no_time() -> ApiError:
    """For requests that had to wait too long."""
    return ApiError("there was no time to answer", status=503, code="timeout", wait=MOST_WAIT)
