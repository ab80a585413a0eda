"""Embedding requests and responses, and the engine that computes embeddings in a thread."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tricycle.pretrained.sentence_encoder import SentenceEncoder
from tricycle_serve.engine import Engine, timeout_error
from tricycle_serve.engine_request import EngineRequest
from tricycle_serve.request_fields import RequestFields, replace_surrogates

MAX_TEXTS = 2048
BATCH_SIZE = 16  # texts that are encoded before another request gets its turn


class EmbeddingsRequest(NamedTuple):
    """The validated fields of an embeddings request.

    Attributes:
        truncate: whether texts that are too long are truncated; otherwise they are an error.
        dimensions: number of dimensions of the returned embeddings.
        as_base64: whether the embeddings are returned in base64.
    """

    texts: list[str]
    truncate: bool
    dimensions: int
    as_base64: bool


def parse_embeddings_request(fields: RequestFields, embedding_dim: int) -> EmbeddingsRequest:
    """Parse texts, `truncate` and encoding of an embeddings request; raise ApiError for other or invalid fields."""
    texts = fields.get("input")
    texts = [texts] if isinstance(texts, str) else texts
    is_list = isinstance(texts, list) and 0 < len(texts) <= MAX_TEXTS
    if not is_list or not all(isinstance(text, str) for text in texts):
        fields.reject("input", f"a string, or a list of 1 to {MAX_TEXTS} strings")
    encoding_format = fields.get("encoding_format", "float")
    if encoding_format not in ("float", "base64"):
        fields.reject("encoding_format", "float or base64")
    dimensions = fields.get_int("dimensions", embedding_dim, 1, embedding_dim)
    truncate = fields.get_bool("truncate")
    fields.ignore("user")
    fields.reject_unknown()
    clean = [replace_surrogates(text) for text in texts]
    return EmbeddingsRequest(clean, truncate, dimensions, encoding_format == "base64")


class EmbeddingEngine(Engine):
    """Computes embeddings, a batch of each request in turn."""

    def __init__(self, encoder: SentenceEncoder, max_queue: int) -> None:
        super().__init__(max_queue)
        self.encoder = encoder

    def submit(self, texts: list[str], timeout_seconds: float) -> EngineRequest:
        """Queue texts, or ApiError if full; return the request, whose outputs will be arrays (N, C) in text order.

        Raises:
            ApiError: the queue is full.
        """
        n_batches = len(range(0, len(texts), BATCH_SIZE))
        engine_request = EngineRequest(n_batches, timeout_seconds)
        self._enqueue([(engine_request, texts)])
        return engine_request

    def _step(self) -> None:
        """Encode the first batch of the oldest request; append the rest of its texts to the end of the queue."""
        with self._condition:
            engine_request, texts = self._queue.popleft()
        if engine_request.is_finished:
            return
        if engine_request.has_timed_out:
            engine_request.fail(timeout_error())
            return
        try:
            engine_request.put(self.encoder.encode(texts[:BATCH_SIZE]), is_last=True)
        except BaseException as error:  # includes panics of Rust extensions; other requests continue
            self._print_traceback(error)
            engine_request.fail(error)
            return
        if texts[BATCH_SIZE:]:
            with self._condition:
                self._queue.append((engine_request, texts[BATCH_SIZE:]))

    def _fail_all(self, error: BaseException) -> None:
        """Remove all requests from the queue, and give each the error."""
        with self._condition:
            engine_requests = [engine_request for engine_request, _ in self._queue]
            self._queue.clear()
        for engine_request in engine_requests:
            engine_request.fail(error)


@dataclass
class EmbeddingsResponse:
    """The response to an embeddings request.

    Args:
        model: name of the model.
        n_tokens: number of tokens of all texts.
        dimensions: the first numbers of each embedding are returned, with a norm of 1 if there are more.
    """

    engine_request: EngineRequest
    model: str
    n_tokens: int
    dimensions: int
    as_base64: bool

    async def collect(self) -> dict[str, Any]:
        """Wait for all embeddings; return the body: "object", "data" in the order of the texts, "model" and "usage".

        Raises:
            ApiError, RequestCancelled: as for `EngineRequest.outputs`.
        """
        data: list[dict[str, Any]] = []
        async for batches in self.engine_request.outputs():
            for row in (self._shorten(row) for batch in batches for row in batch):
                # base64 is of the little-endian float32 bytes
                value = base64.b64encode(row.astype("<f4").tobytes()).decode() if self.as_base64 else row.tolist()
                data.append({"object": "embedding", "index": len(data), "embedding": value})
        usage = {"prompt_tokens": self.n_tokens, "total_tokens": self.n_tokens}
        return {"object": "list", "data": data, "model": self.model, "usage": usage}

    def _shorten(self, embedding: np.ndarray) -> np.ndarray:
        """Return the first `dimensions` numbers, scaled to norm 1; the embedding unchanged if that is its length."""
        if self.dimensions == len(embedding):
            return embedding
        first = embedding[: self.dimensions]
        return first / max(float(np.linalg.norm(first)), np.finfo(np.float32).tiny)
