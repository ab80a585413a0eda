"""How well a model predicts texts: its loss in nats a token, and in bits a byte, which compare across models."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tyro

from tricycle.evaluation import HeldOut, evaluate
from tricycle.system.files import read_file
from tricycle.tokeniser import Tokeniser
from tricycle_cli.flags import parse
from tricycle_cli.models import ModelFlags, load_model

MOST_LOGITS = 2**26  # numbers at once, for the size of a batch
LONGEST_WINDOW = 1024  # unless a longer one is asked for


@dataclass(frozen=True)
class Arguments:
    """What to evaluate, and on what."""

    source: tyro.conf.Positional[str]
    """a model, as `tricycle generate` takes it"""
    files: tyro.conf.Positional[tuple[Path, ...]]
    """texts"""
    window: int = 0
    """how many tokens the model sees at once; 0 for its context window, but at most 1024"""
    stride: int = 0
    """how far windows move on: the smaller, the more tokens each token has before it, and the longer it takes; 0 for
    half of the window"""
    batch_size: int = 0
    """windows at once; 0 for as many as fit into a few hundred megabytes"""
    tokeniser: Path | None = None
    """a tokeniser file, for a model that carries none"""
    json: bool = False
    """print the numbers as JSON, with all their digits"""
    model: ModelFlags = field(default_factory=ModelFlags)


@dataclass(frozen=True)
class Score:
    """How well one text is predicted.

    Attributes:
        tokens, bytes: how many were predicted; the rest of the text is only read.
        loss: nats a token.
    """

    file: str
    tokens: int
    bytes: int
    loss: float
    perplexity: float
    bits_per_byte: float


def main(args: Sequence[str] | None = None) -> None:
    arguments = parse(Arguments, args=args, description=__doc__ or "")
    if not arguments.files:
        raise ValueError("expected at least one file, got none")
    texts = {str(path): read_file(path) for path in arguments.files}
    loaded = load_model(arguments.source, arguments.tokeniser, **vars(arguments.model))
    longest = loaded.model.config.context_window
    if not 0 <= arguments.window <= longest:
        raise ValueError(f"expected --window from 1 to {longest}, the model's context window, got {arguments.window}")
    window = arguments.window or min(longest, LONGEST_WINDOW)
    batch_size = arguments.batch_size or max(1, MOST_LOGITS // (window * loaded.model.config.vocab_size))
    stride = arguments.stride or max(1, window // 2)
    scores = []
    for name, text in texts.items():
        held_out = tokenize_text(loaded.tokeniser, text, name)
        loss, n_tokens = evaluate(loaded.model, held_out.tokens, batch_size, stride=stride, window=window)
        scores.append(_score(name, n_tokens, held_out.n_bytes, loss))
        if not arguments.json and len(texts) > 1:
            print(f"{name}: {_said(scores[-1])}", flush=True)
    total = _total(scores)
    if arguments.json:
        settings = {"model": arguments.source, "window": window, "stride": stride, "softmax": arguments.model.softmax}
        json.dump({**settings, "files": [vars(score) for score in scores], "total": vars(total)}, sys.stdout, indent=2)
        print()
    else:
        print(f"{total.file}: {_said(total)} (windows of {window:,} tokens, {stride:,} apart)")


def tokenize_text(tokeniser: Tokeniser, text: bytes, name: str = "evaluate") -> HeldOut:
    """A text as tokens, of which the first is only read.

    That is the one which begins every text, where the tokeniser knows such a one; else the first of the text, whose
    bytes then do not count.

    Raises:
        ValueError: a text too short.
    """
    ids = tokeniser.encode_plain(text)
    start = tokeniser.start_of_text
    if len(ids) + (start is not None) < 2:
        raise ValueError(f"{name}: expected a text of at least two tokens, got {len(text)} bytes")
    if start is not None:
        return HeldOut(np.concatenate([[start], ids]).astype(np.int64), len(text))
    return HeldOut(ids.astype(np.int64), len(text) - len(tokeniser.decode(ids[:1]).encode("utf-8")))


def _score(name: str, n_tokens: int, n_bytes: int, loss: float) -> Score:
    bits = loss * n_tokens / math.log(2) / max(1, n_bytes)
    return Score(name, n_tokens, n_bytes, loss, math.exp(min(loss, 700.0)), bits)


def _total(scores: list[Score]) -> Score:
    """All texts together: each token counts as much as any other."""
    n_tokens = sum(score.tokens for score in scores)
    loss = sum(score.loss * score.tokens for score in scores) / n_tokens
    name = scores[0].file if len(scores) == 1 else "all"
    return _score(name, n_tokens, sum(score.bytes for score in scores), loss)


def _said(score: Score) -> str:
    losses = f"{score.loss:.4f} nats a token, perplexity {score.perplexity:.3f}, {score.bits_per_byte:.4f} bits a byte"
    return f"{losses}; {score.tokens:,} tokens, {score.bytes:,} bytes"
