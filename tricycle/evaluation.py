"""The loss on text that a model has not seen."""

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
    processes: ProcessGroup = SINGLE_PROCESS,
) -> tuple[float, int]:
    """The loss on a run of tokens, each predicted once (the first one is only read).

    Args:
        tokens: at least two ids.
        n_batches: look only at so many batches, spread evenly; 0 for all.
        stride: how far windows move on; a smaller one than the context window gives each token more context
            and costs more. 0 for a window.
        window: how many tokens are seen at once; 0 for the model's context window.
        processes: those that share out the batches; all get the whole result, and the same as one alone.

    Returns:
        the mean loss in nats a token, and how many tokens were predicted.

    Raises:
        ValueError: fewer than two tokens.
    """
    if len(tokens) < 2:
        raise ValueError(f"evaluate: expected at least 2 tokens, got {len(tokens)}")
    length = min(window or model.config.context_window, len(tokens) - 1)
    windows = list(_windows(len(tokens) - 1, length, min(stride or length, length)))
    if n_batches and n_batches * batch_size < len(windows):
        chosen = np.linspace(0, len(windows) - 1, n_batches * batch_size).astype(int)
        windows = [windows[i] for i in chosen]
    loss_fn = CrossEntropy(ignore_index=IGNORED)
    losses: list[tuple[Tensor, int]] = []  # read at the end: until then a GPU need not be waited for
    firsts = range(0, len(windows), batch_size)
    with model.evaluating():
        for first in firsts[processes.rank :: processes.size]:
            processes.answer_pings()
            batch = windows[first : first + batch_size]
            rows = np.stack([np.asarray(tokens[start : start + length + 1], np.int64) for start, _ in batch])
            check_range("evaluate: tokens", rows, model.config.vocab_size)  # on a GPU nobody would notice
            labels = rows[:, 1:].copy()
            for row, (_, n_new) in zip(labels, batch):
                row[: length - n_new] = IGNORED
            n_labels = sum(n_new for _, n_new in batch)
            losses.append((model.loss(model.place(rows[:, :-1]), model.place(labels), loss_fn), n_labels))
    parts = processes.all_gather([(float(loss), n_labels) for loss, n_labels in losses])
    in_order = [parts[i % processes.size][i // processes.size] for i in range(len(firsts))]
    count = sum(n_labels for _, n_labels in in_order)
    return sum(loss * n_labels for loss, n_labels in in_order) / count, count


def _windows(n_pairs: int, length: int, stride: int) -> Iterator[tuple[int, int]]:
    """Where windows of a length start, and how many of each one's last labels no earlier window had."""
    covered = 0
    while covered < n_pairs:
        end = min(n_pairs, covered + (length if covered == 0 else stride))
        yield end - length, end - covered
        covered = end


@dataclass
class HeldOut:
    """Held-out text, as tokens and as the bytes that losses in bits a byte refer to.

    Attributes:
        tokens: the first is only read, so it should be the end of some text.
        n_bytes: how many bytes the tokens stand for.
    """

    tokens: Any
    n_bytes: int

    def bits_per_byte(self, nats_per_token: float) -> float:
        """What a loss means for the text itself, whatever the vocabulary."""
        return nats_per_token * (len(self.tokens) - 1) / math.log(2) / max(1, self.n_bytes)
