"""The thread that runs the model: a request queue, continuous batching, chunked prefill and a prefix cache."""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tricycle.attention.cache import MIN_CAPACITY
from tricycle.decoding.batch import GenerationBatch
from tricycle.decoding.speculative import SpeculativeState
from tricycle.generate import common_prefix_length
from tricycle.models import GPT
from tricycle_serve.completion_requests import SequenceRequest
from tricycle_serve.engine_request import EngineRequest
from tricycle_serve.errors import ApiError
from tricycle_serve.metrics import Metrics
from tricycle_serve.output_processor import OutputProcessor

PREFILL_CHUNK_TOKENS = 256  # prompt tokens that are processed between two decoding steps
MIN_SHARED_PREFIX = 16  # tokens: a shorter common prefix of two prompts is processed again
MAX_RETRY_AFTER_SECONDS = 30
LEAST_RESERVED = MIN_CAPACITY // 2  # tokens: a cache allocates MIN_CAPACITY, and the limit assumes twice its tokens


class Engine(ABC):
    """A queue of requests and the thread that processes them.

    Args:
        max_queue: maximum number of waiting items; an item is one sequence or one embedding request.

    Attributes:
        metrics: counts tokens and times, if it is not None.
    """

    def __init__(self, max_queue: int) -> None:
        self.metrics: Metrics | None = None
        self._max_queue = max_queue
        self._queue: deque[Any] = deque()
        self._condition = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)

    def start(self) -> None:
        """Start the engine thread, a daemon; call it only once."""
        self._thread.start()

    def close(self) -> None:
        """Reject new requests, and end the engine thread after its current step; do not wait for it."""
        with self._condition:
            self._closing = True
            self._condition.notify()

    def join(self, timeout_seconds: float) -> None:
        """Wait for the end of the engine thread, at most `timeout_seconds`; return at once if it is not running."""
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)

    def _enqueue(self, items: Sequence[Any]) -> None:
        """Append items to the queue, and wake the engine thread; ApiError if closing or over a non-empty queue's limit.

        Raises:
            ApiError: the queue is full, or the server is shutting down.
        """
        with self._condition:
            if self._closing:
                raise ApiError("the server is shutting down", status=503, code="shutting_down")
            n_waiting = len(self._queue)
            if n_waiting + len(items) > self._max_queue and n_waiting:
                message = f"too many requests: {n_waiting} texts are waiting; try again later"
                retry_after_seconds = min(MAX_RETRY_AFTER_SECONDS, 1 + n_waiting // 4)
                raise ApiError(message, 429, code="queue_full", retry_after_seconds=retry_after_seconds)
            self._queue += items
            self._condition.notify()

    @property
    def is_alive(self) -> bool:
        """Return whether the engine's thread has not been started yet, or still runs."""
        return self._thread.ident is None or self._thread.is_alive()

    def gauges(self) -> dict[str, tuple[str, float]]:
        """Return {"waiting_texts": (description, number)}; subclasses add more. May be called in any thread."""
        return {"waiting_texts": ("Texts or embedding requests in the queue.", len(self._queue))}

    def _run(self) -> None:
        """Do steps until the engine closes; fail all requests if a step raises, and at the end."""
        try:
            while self._wait_for_work():
                try:
                    self._step()
                except BaseException as error:  # panics of Rust extensions are not of type Exception
                    self._print_traceback(error)
                    self._fail_all(error)
        finally:
            self.close()
            self._fail_all(ApiError("the server is shutting down", status=503, code="shutting_down"))

    def _wait_for_work(self) -> bool:
        """Wait for work or the closing of the engine; return True for work, False if it is closing."""
        with self._condition:
            while not self._closing and not self._has_work():
                self._condition.wait()
            return not self._closing

    def _print_traceback(self, error: BaseException) -> None:
        """Print an error's traceback to stderr for the server's operator; clients receive a general message."""
        print("".join(traceback.format_exception(error)), file=sys.stderr, flush=True)

    def _has_work(self) -> bool:
        """Return whether the next step has anything to do."""
        return bool(self._queue)

    @abstractmethod
    def _step(self) -> None:
        """Advance the active requests by a small amount of work."""

    @abstractmethod
    def _fail_all(self, error: BaseException) -> None:
        """End all requests with an error."""


@dataclass(eq=False)
class _Sequence:
    """A sequence from its submission to its end.

    Attributes:
        n_reserved: number of tokens for which memory is reserved, at least those of the prompt and all new ones.
        is_first_of_prompt: whether it is the first sequence of its prompt in the request.
        state: decoding state with the processed part of the prompt.
        has_started: whether the prefill has begun, with the state of a known prefix if there is one.
        batch_number: number in the generation batch; None until the last chunk of the prompt.
        last_time: monotonic time of the submission, then of the last token, in seconds.
    """

    engine_request: EngineRequest
    output: OutputProcessor
    n_reserved: float
    is_first_of_prompt: bool
    state: SpeculativeState
    has_started: bool = False
    batch_number: int | None = None
    last_time: float = field(default_factory=time.monotonic)

    @property
    def request(self) -> SequenceRequest:
        """Return the sequence's request, which `output` holds."""
        return self.output.request

    @property
    def n_unprocessed(self) -> int:
        """Return the number of prompt tokens that are not processed yet."""
        return len(self.request.prompt) - len(self.state.tokens)

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Return whether log-probabilities of further prompt tokens must be computed; only if the prompt is echoed."""
        return self.request.echoed_text is not None and self.n_unprocessed > 1

    def fits(self, n_tokens: int) -> bool:
        """Return whether the rest of the prompt can be processed with the first new token: at most `n_tokens`."""
        return self.n_unprocessed <= n_tokens and not self.needs_prompt_logprobs

    def prefill(self, n_tokens: int) -> None:
        """Process up to `n_tokens` more prompt tokens, but not the last; ValueError or MemoryError if it fails."""
        prompt, start, config = self.request.prompt, len(self.state.tokens), self.state.model.config
        end = min(start + n_tokens, len(prompt) - 1)
        if self.needs_prompt_logprobs:
            if config.rotary_scaling == "longrope" and len(prompt) > config.rotary_original_window:
                end = max(end, config.rotary_original_window + 1)  # else: frequencies of a short text
            logits = self.state.all_logits(prompt[:end])
            self.output.record_prompt_logprobs(prompt[start + 1 : end + 1], logits)
        else:
            self.state.logits(prompt[:end])


@dataclass
class EngineLimits:
    """Limits of an engine's batch, queue and caches.

    Attributes:
        max_batch_size: maximum number of active sequences.
        max_queue: maximum number of waiting sequences.
        n_cached_sequences: number of inactive sequences whose keys and values stay in the prefix cache.
        max_cache_tokens: maximum number of tokens in the KV caches of all sequences.
    """

    max_batch_size: int = 64
    max_queue: int = 64
    n_cached_sequences: int = 8
    max_cache_tokens: float = math.inf


class GenerationEngine(Engine):
    """Generates text with continuous batching.

    Sequences are admitted from the queue in order, within the limits. Long prompts are processed in chunks, one chunk
    per step, so that they hardly delay the sequences that are being decoded.

    Args:
        tokeniser: of the model.
        cache_dtype: data type of the KV caches, as for `SpeculativeState`.
    """

    def __init__(self, model: GPT, tokeniser: Any, limits: EngineLimits, cache_dtype: str | None = None) -> None:
        super().__init__(limits.max_queue)
        self.model = model
        self.tokeniser = tokeniser
        self._limits = limits
        self._cache_dtype = cache_dtype
        self._prefilling: deque[_Sequence] = deque()
        self._decoding: dict[int, _Sequence] = {}
        self._batch = GenerationBatch(model)
        # decoding states that no active sequence uses, the most recent last
        self._prefix_cache: deque[SpeculativeState] = deque(maxlen=limits.n_cached_sequences)

    def submit(self, requests: list[SequenceRequest], timeout_seconds: float) -> EngineRequest:
        """Queue sequences, or ApiError over a queue or memory limit; return the request, with `TextDelta` outputs.

        Raises:
            ApiError: the queue is full, or a sequence needs more memory than the KV caches may use.
        """
        engine_request = EngineRequest(len(requests), timeout_seconds)
        sequences = []
        for i, request in enumerate(requests):
            is_first = i == 0 or requests[i - 1].prompt is not request.prompt
            max_length = len(request.prompt) + request.max_tokens
            if max_length > self._limits.max_cache_tokens:
                limit = int(self._limits.max_cache_tokens)
                message = f"expected at most {limit} tokens of prompt and completion together, got {max_length}"
                raise ApiError(f"{message}: not enough memory for the KV cache")
            state = SpeculativeState(self.model, self._cache_dtype)
            output = OutputProcessor(request, self.tokeniser, i)
            n_reserved = min(self._limits.max_cache_tokens, max(max_length, LEAST_RESERVED))
            sequences.append(_Sequence(engine_request, output, n_reserved, is_first, state))
        self._enqueue(sequences)
        return engine_request

    def gauges(self) -> dict[str, tuple[str, float]]:
        """Return description and value of the queue's length, active texts and KV-cache tokens by name."""
        active = self._active()
        n_tokens = sum(len(sequence.state.tokens) for sequence in active)
        n_tokens += sum(len(state.tokens) for state in list(self._prefix_cache))
        capacity = self._limits.max_cache_tokens
        return {
            **super().gauges(),
            "running_texts": ("Texts whose prompts are processed or that are generated.", len(active)),
            "kv_cache_tokens": ("Tokens in KV caches, those of the prefix cache included.", n_tokens),
            "kv_cache_capacity_tokens": ("Maximum number of tokens in KV caches.", capacity),
        }

    # ---------------------------------------------------------------- one step
    def _has_work(self) -> bool:
        """Return whether a request is queued, or a sequence is prefilling or decoding."""
        return bool(self._queue or self._prefilling or self._decoding)

    def _active(self) -> list[_Sequence]:
        """Return a new list of all sequences: prefilling ones first, then decoding ones."""
        return [*self._prefilling, *self._decoding.values()]

    def _step(self) -> None:
        """Remove finished sequences, admit queued ones, process a chunk of a prompt, generate a token of each."""
        self._remove_finished()
        self._admit()
        self._prefill()
        self._decode()

    def _remove_finished(self) -> None:
        """Remove finished requests' sequences and timed-out ones, which fail, or while decoding end with "length"."""
        is_over = lambda sequence: sequence.engine_request.is_finished or sequence.engine_request.has_timed_out
        with self._condition:
            removed = list(filter(is_over, self._queue))
            for sequence in removed:
                self._queue.remove(sequence)
        for sequence in filter(is_over, self._active()):
            self._release(sequence)
            removed.append(sequence)
        for sequence in removed:
            if sequence.engine_request.is_finished:
                continue
            if sequence.batch_number is None:
                sequence.engine_request.fail(timeout_error())
            else:
                sequence.engine_request.put(sequence.output.finish("length"), is_last=True)

    def _release(self, sequence: _Sequence) -> None:
        """Remove an active sequence, and move its decoding state to the prefix cache if it holds tokens."""
        if sequence.batch_number is None:
            self._prefilling.remove(sequence)
        else:
            self._batch.remove(sequence.batch_number)
            del self._decoding[sequence.batch_number]
        if sequence.state.tokens:
            self._prefix_cache.append(sequence.state)

    def _admit(self) -> None:
        """Take sequences from the queue within batch and cache limits; cached prefixes may be evicted."""
        with self._condition:
            queued = list(self._queue)
        for sequence in queued:
            if len(self._prefilling) + len(self._decoding) >= self._limits.max_batch_size:
                return
            if any(other.request.prompt is sequence.request.prompt for other in self._prefilling):
                continue  # it can reuse that prompt's keys and values after the prefill
            limit = self._limits.max_cache_tokens
            n_reserved = sequence.n_reserved + sum(other.n_reserved for other in self._active())
            while self._prefix_cache and n_reserved + sum(len(state.tokens) for state in self._prefix_cache) > limit:
                self._prefix_cache.popleft()  # the oldest
            if n_reserved > limit:
                return
            with self._condition:
                self._queue.remove(sequence)
            self._prefilling.append(sequence)

    def _start_prefill(self, sequence: _Sequence) -> None:
        """Give a sequence the state of the longest prefix that is known by now; count cached and prompt tokens."""
        sequence.has_started = True
        prompt = sequence.request.prompt
        if sequence.request.echoed_text is None:  # else the logits after each token of the prompt are needed
            sequence.state = self._new_state(prompt)
        if sequence.is_first_of_prompt:
            n_cached = min(len(sequence.state.tokens), len(prompt) - 1)
            sequence.engine_request.n_cached_tokens += n_cached
            if self.metrics is not None:
                self.metrics.count_prompt(len(prompt), n_cached)

    def _new_state(self, prompt: list[int]) -> SpeculativeState:
        """Return a decoding state with the prompt's longest prefix in a sequence or the cache, empty if it is short."""
        active = [sequence.state for sequence in (*self._decoding.values(), *self._prefilling)]
        candidates = [(common_prefix_length(state.tokens, prompt), state) for state in (*active, *self._prefix_cache)]
        n_shared, best = max(candidates, key=lambda pair: pair[0], default=(0, None))
        if best is None or n_shared < min(MIN_SHARED_PREFIX, len(prompt)):
            return SpeculativeState(self.model, self._cache_dtype)
        if best in self._prefix_cache and 2 * n_shared >= len(best.tokens):
            self._prefix_cache.remove(best)
            # The fork drops the tokens after the prefix, so that the state's length is the number of cached tokens.
            return best.fork(n_shared) if n_shared < len(best.tokens) else best
        return best.fork(n_shared)

    def _prefill(self) -> None:
        """Process at most one chunk of prompt tokens, round-robin; a sequence with few tokens left starts decoding."""
        n_left = PREFILL_CHUNK_TOKENS
        while self._prefilling and n_left > 0:
            sequence = self._prefilling[0]
            if n_left < PREFILL_CHUNK_TOKENS and not sequence.fits(n_left):
                return  # in the next step it is the first, and may share a prefix with a prompt of this step
            if not sequence.has_started:
                self._start_prefill(sequence)
            if sequence.fits(n_left):
                n_left -= max(1, sequence.n_unprocessed)
                self._start_decoding(sequence)
                continue
            try:
                sequence.prefill(n_left)
            except (ValueError, MemoryError) as error:
                self._fail_sequence(sequence, error)
            else:
                self._prefilling.rotate(-1)
            return

    def _fail_sequence(self, sequence: _Sequence, error: BaseException) -> None:
        """End the request of one sequence with an error; other requests continue."""
        self._print_traceback(error)
        self._release(sequence)
        sequence.engine_request.fail(error)

    def _start_decoding(self, sequence: _Sequence) -> None:
        """Add a sequence to the batch, which processes the remaining tokens of its prompt; or end it without tokens."""
        request = sequence.request
        if request.echoed_text is not None:
            try:
                delta = sequence.output.prompt_delta(self.tokeniser.stream())
            except ValueError as error:  # raised by the tokenizer
                self._fail_sequence(sequence, error)
                return
            sequence.engine_request.put(delta, is_last=False)
        if request.max_tokens == 0:
            self._release(sequence)
            sequence.engine_request.put(sequence.output.finish("length"), is_last=True)
            return
        self._prefilling.remove(sequence)
        sequence.batch_number = self._batch.add(
            request.prompt,
            request.max_tokens,
            request.sampling,
            state=sequence.state,
            overflow="error",
            listener=None if request.n_top_logprobs is None else sequence.output.record_logprobs,
        )
        self._decoding[sequence.batch_number] = sequence

    def _decode(self) -> None:
        """Generate one token of each sequence in the batch; send new text, and release those that end or fail."""
        if not len(self._batch):
            return
        for batch_number, token in self._batch.step():
            sequence = self._decoding[batch_number]
            if self.metrics is not None:
                now = time.monotonic()
                self.metrics.count_token(now - sequence.last_time, is_first=sequence.output.n_tokens == 0)
                sequence.last_time = now
            try:
                delta = sequence.output.push(token)
            except ValueError as error:  # raised by the tokenizer
                self._fail_sequence(sequence, error)
                continue
            constraint = sequence.request.sampling.constraint
            if constraint is not None and constraint.error:
                message = f"the grammar became too complex for this text: {constraint.error}"
                self._fail_sequence(sequence, ApiError(message, status=500, code="grammar_failed"))
                continue
            if delta is None:
                continue
            if is_last := delta.finish_reason is not None:
                self._release(sequence)
            sequence.engine_request.put(delta, is_last)

    def _fail_all(self, error: BaseException) -> None:
        """Fail all sequences; clear the queue, the batch and the prefix cache."""
        with self._condition:
            sequences = [*self._queue, *self._active()]
            self._queue.clear()
        self._prefilling.clear()
        self._decoding.clear()
        self._batch = GenerationBatch(self.model)
        self._prefix_cache.clear()
        for sequence in sequences:
            sequence.engine_request.fail(error)


def timeout_error() -> ApiError:
    """Return (not raise) the ApiError of status 503 for a request that timed out before its first output."""
    message = "the request timed out"
    return ApiError(message, status=503, code="timeout", retry_after_seconds=MAX_RETRY_AFTER_SECONDS)
