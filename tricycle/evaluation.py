"""Evaluation of a model's loss on held-out text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tricycle.distributed.processes import SINGLE_PROCESS, ProcessGroup
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.ops import check_range
from tricycle.tensor import Tensor

IGNORED = -1  # the label of tokens that an earlier window has predicted


def evaluate(
    model: GPT,
    tokens: Any,
    batch_size: int,
    n_batches: int = 0,
    stride: int = 0,
    window: int = 0,
    n_context: int = 1,
    processes: ProcessGroup = SINGLE_PROCESS,
) -> tuple[float, int]:
    """Return (mean loss in nats, count) of all tokens after `n_context`, each once, or in `n_batches` spaced batches.

    Args:
        tokens: at least two ids; the first `n_context` are not predicted, each other once.
        n_batches: the number of batches to evaluate, evenly spaced; 0 for all.
        stride: the step between windows; smaller than the window, it gives tokens more context at a higher cost. 0 for
            the window size.
        window: the number of tokens per window; 0 for the model's context window.
        processes: the processes among which the batches are divided; all return the same result as a single process.

    Raises:
        ValueError: no token to predict.
    """
    if len(tokens) <= n_context:
        raise ValueError(f"evaluate: expected at least {n_context + 1} tokens, got {len(tokens)}")
    length = min(window or model.config.context_window, len(tokens) - 1)
    windows = list(_windows(len(tokens) - 1, length, min(stride or length, length), n_context - 1))
    if n_batches and n_batches * batch_size < len(windows):
        chosen = np.linspace(0, len(windows) - 1, n_batches * batch_size).astype(int)
        windows = [windows[i] for i in chosen]
    loss_fn = CrossEntropy(ignore_index=IGNORED)
    losses: list[tuple[Tensor, int]] = []  # read at the end, so that a GPU is not synchronized
    firsts = range(0, len(windows), batch_size)
    with model.evaluating():
        for first in firsts[processes.rank :: processes.size]:
            processes.answer_pings()
            batch = windows[first : first + batch_size]
            rows = np.stack([np.asarray(tokens[start : start + length + 1], np.int64) for start, _ in batch])
            check_range("evaluate: tokens", rows, model.config.vocab_size)  # ids on a GPU are not checked
            labels = rows[:, 1:].copy()
            for row, (_, n_new) in zip(labels, batch):
                row[: length - n_new] = IGNORED
            n_labels = sum(n_new for _, n_new in batch)
            losses.append((model.loss(model.place(rows[:, :-1]), model.place(labels), loss_fn), n_labels))
    parts = processes.all_gather([(float(loss), n_labels) for loss, n_labels in losses])
    in_order = [parts[i % processes.size][i // processes.size] for i in range(len(firsts))]
    count = sum(n_labels for _, n_labels in in_order)
    return sum(loss * n_labels for loss, n_labels in in_order) / count, count


def _windows(n_pairs: int, length: int, stride: int, n_skipped: int) -> Iterator[tuple[int, int]]:
    """Yield (start, number of new labels) of windows: labels are new if not skipped and in no earlier window."""
    covered = n_skipped
    while covered < n_pairs:
        end = min(n_pairs, length if covered < length else covered + stride)
        yield end - length, end - covered
        covered = end


@dataclass
class HeldOut:
    """Held-out text: its tokens, and its size in bytes for losses in bits per byte.

    Attributes:
        tokens: the token ids; the first `n_context` are not predicted, so they should be ends of text.
        n_bytes: the number of bytes that the tokens encode.
        n_context: see `evaluate`.
    """

    tokens: Any
    n_bytes: int
    n_context: int = 1

    def bits_per_byte(self, nats_per_token: float) -> float:
        """Convert a loss in nats per token to bits per byte, which is independent of the vocabulary."""
        return nats_per_token * (len(self.tokens) - self.n_context) / math.log(2) / max(1, self.n_bytes)
