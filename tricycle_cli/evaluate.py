"""Compute a model's loss on texts, in nats per token and in bits per byte, or its accuracy in a multiple-choice task.

Bits per byte are comparable between models with different tokenizers.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import tyro

from tricycle.evaluation import HeldOut, evaluate
from tricycle.pretrained import Pretrained
from tricycle.system.files import read_file
from tricycle.tokeniser import Tokeniser
from tricycle_cli.flags import parse
from tricycle_cli.likelihoods import MAX_LOGITS
from tricycle_cli.made_tasks import NAMES, TaskName, make_task
from tricycle_cli.models import ModelFlags, load_model
from tricycle_cli.multiple_choice import (
    Item,
    ItemScore,
    compare_accuracy,
    encode_items,
    read_items,
    score_items,
    summarize,
    summarize_groups,
    write_log,
)

MAX_DEFAULT_WINDOW = 1024


@dataclass(frozen=True)
class Arguments:
    """The flags of `tricycle evaluate`."""

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """a model, as in `tricycle generate`"""
    files: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[FILE ...]")] = ()
    """text files"""
    task: str | None = None
    """a multiple-choice task in place of texts: "arithmetic", "induction", "retrieval", or a JSON Lines file of objects
    with `prompt`, `choices` and `answer` (the index of the right choice)"""
    compare_with: str | None = None
    """another model, whose accuracy in the same items is compared by McNemar's test; --adapter does not apply to it"""
    log: Path | None = None
    """a file to which the log-likelihoods of each item of the task are written, as JSON Lines"""
    window: int = 0
    """length of a window in tokens, or of the prompts of "retrieval"; 0 for the model's context window, but at most
    1024. Prompts of a task in a file are cut to it, by default to the context window"""
    stride: int = 0
    """tokens between the starts of two windows, at most the window; a smaller stride gives tokens more context and
    takes longer; 0 for half of the window"""
    batch_size: int = 0
    """windows, or choices of a task, in a batch; 0 for a batch of a few hundred megabytes"""
    tokeniser: Path | None = None
    """a tokenizer file, for a model without a tokenizer"""
    json: bool = False
    """print the results as JSON, with all digits"""
    model: ModelFlags = field(default_factory=ModelFlags)


@dataclass(frozen=True)
class Score:
    """The loss of a model on one text."""

    file: str  # the path of the text; "all" for several texts together
    tokens: int  # the number of predicted tokens; the first token may be context only
    bytes: int
    loss: float  # the mean, in nats per token
    perplexity: float  # exp(loss)
    bits_per_byte: float


def main(args: Sequence[str] | None = None) -> None:
    """Run `tricycle evaluate`: print loss and bits per byte of each file and in total, or with --task the accuracy."""
    arguments = parse(Arguments, args=args, description=__doc__ or "")
    for name in ("stride", "batch_size"):
        if getattr(arguments, name) < 0:
            raise ValueError(f"expected --{name.replace('_', '-')} of 0 or more, got {getattr(arguments, name)}")
    if bool(arguments.files) == (arguments.task is not None):
        raise ValueError("expected at least one file, or --task, got " + ("both" if arguments.files else "none"))
    if arguments.task is not None:
        if arguments.stride:
            raise ValueError("expected --stride without --task, whose prompts are not divided into windows")
        evaluate_task(arguments, arguments.task)
        return
    for name in ("log", "compare_with"):
        if getattr(arguments, name) is not None:
            raise ValueError(f"expected --{name.replace('_', '-')} with --task only")
    texts = {str(path): read_file(path) for path in arguments.files}
    loaded = load_model(arguments.source, arguments.tokeniser, **vars(arguments.model))
    window = resolve_window(arguments, loaded)
    batch_size = arguments.batch_size or max(1, MAX_LOGITS // (window * loaded.model.config.vocab_size))
    stride = min(arguments.stride, window) or max(1, window // 2)
    scores = []
    for name, text in texts.items():
        held_out = tokenize_text(loaded.tokeniser, text, name)
        loss, n_tokens = evaluate(loaded.model, held_out.tokens, batch_size, stride=stride, window=window)
        scores.append(_score(name, n_tokens, held_out.n_bytes, loss))
        if not arguments.json and len(texts) > 1:
            print(f"{name}: {_text(scores[-1])}", flush=True)
    total = _total(scores)
    if arguments.json:
        settings = {"model": arguments.source, "window": window, "stride": stride, "softmax": arguments.model.softmax}
        json.dump({**settings, "files": [vars(score) for score in scores], "total": vars(total)}, sys.stdout, indent=2)
        print()
    else:
        print(f"{total.file}: {_text(total)} (windows of {window:,} tokens, stride {stride:,})")


def resolve_window(arguments: Arguments, loaded: Pretrained) -> int:
    """Return --window, or for 0 the context window up to a maximum; ValueError if negative or above that window."""
    longest = loaded.model.config.context_window
    if not 0 <= arguments.window <= longest:
        raise ValueError(f"expected --window from 1 to {longest}, the model's context window, got {arguments.window}")
    return arguments.window or min(longest, MAX_DEFAULT_WINDOW)


def evaluate_task(arguments: Arguments, task: str) -> None:
    """Print the accuracy of one or two models in a task, write the items' log if asked; ValueError if items differ.

    Raises:
        ValueError: an invalid task, or models whose tokenizers lead to different items.
    """
    items, scores = _score_task(arguments, task, arguments.source, arguments.model)
    others = None
    if arguments.compare_with is not None:
        flags = replace(arguments.model, adapter=None)
        other_items, others = _score_task(arguments, task, arguments.compare_with, flags)
        if other_items != items:
            raise ValueError(f"--task {task}: expected models with the same tokenizer, because its items depend on it")
    if arguments.log is not None:
        write_log(arguments.log, scores, others)
    result: dict[str, Any] = {"model": arguments.source, "task": task, **summarize(scores)}
    if groups := summarize_groups(scores):
        result["groups"] = groups
    if others is not None:
        compared = summarize(others) | compare_accuracy(scores, others)
        result["compare_with"] = {"model": arguments.compare_with, **compared}
    print(json.dumps(result, indent=2) if arguments.json else _task_text(result))


def _score_task(arguments: Arguments, task: str, source: str, flags: ModelFlags) -> tuple[list[Item], list[ItemScore]]:
    """Return (items, a model's scores) of a task: a name in NAMES, or the path of a file with items."""
    items = [] if task in NAMES else read_items(Path(task))
    loaded = load_model(source, arguments.tokeniser, **vars(flags))
    window = resolve_window(arguments, loaded)
    if items:
        pairs = encode_items(loaded.tokeniser, items)
    else:
        items, pairs = make_task(cast(TaskName, task), loaded.tokeniser, window)
    return items, score_items(loaded.model, items, pairs, arguments.batch_size or None, arguments.window or None)


def _task_text(result: dict[str, Any]) -> str:
    """Return the result of a task as lines of text: accuracy, table of groups, comparison."""
    per_character = f"by likelihood per character {_percent(result, 'accuracy_per_character')}"
    lines = [f"{result['task']}: accuracy {_percent(result)}, {per_character}; {result['items']:,} items"]
    for name, summary in result.get("groups", {}).items():
        lines.append(f"  {name:<20}{_percent(summary):>14}{summary['items']:>8,} items")
    if other := result.get("compare_with"):
        counts = f"right alone: {other['only_first']} and {other['only_second']} items"
        lines.append(f"{other['model']}: accuracy {_percent(other)}")
        lines.append(f"difference {_percent(other, 'difference')}; {counts}; p = {other['p_value']:.3g} (McNemar)")
    return "\n".join(lines)


def _percent(summary: dict[str, Any], name: str = "accuracy") -> str:
    """Return a proportion and its standard error in percent."""
    error = summary["difference_error" if name == "difference" else name.replace("accuracy", "standard_error")]
    return f"{100 * summary[name]:.1f}% ± {100 * error:.1f}"


def tokenize_text(tokeniser: Tokeniser, text: bytes, name: str = "evaluate") -> HeldOut:
    """Return a text as `HeldOut` tokens, the first not predicted, and byte count; ValueError for fewer than two tokens.

    The first token is the tokenizer's start-of-text token. Without such a token, it is the first token of the text,
    whose bytes then do not count.
    """
    ids = tokeniser.encode_plain(text)
    start = tokeniser.start_of_text
    if len(ids) + (start is not None) < 2:
        raise ValueError(f"{name}: expected a text of at least two tokens, got {len(text)} bytes")
    if start is not None:
        return HeldOut(np.concatenate([[start], ids]).astype(np.int64), len(text))
    return HeldOut(ids.astype(np.int64), len(text) - len(tokeniser.decode(ids[:1]).encode("utf-8")))


def _score(name: str, n_tokens: int, n_bytes: int, loss: float) -> Score:
    """Return a Score of the mean loss in nats per token, with perplexity and bits per byte."""
    bits = loss * n_tokens / math.log(2) / max(1, n_bytes)
    return Score(name, n_tokens, n_bytes, loss, math.exp(min(loss, 700.0)), bits)


def _total(scores: list[Score]) -> Score:
    """Return the score of all texts together, in which every token has the same weight."""
    n_tokens = sum(score.tokens for score in scores)
    loss = sum(score.loss * score.tokens for score in scores) / n_tokens
    name = scores[0].file if len(scores) == 1 else "all"
    return _score(name, n_tokens, sum(score.bytes for score in scores), loss)


def _text(score: Score) -> str:
    """Return a score as one line: nats per token, perplexity, bits per byte, tokens and bytes."""
    losses = f"{score.loss:.4f} nats/token, perplexity {score.perplexity:.3f}, {score.bits_per_byte:.4f} bits/byte"
    return f"{losses}; {score.tokens:,} tokens, {score.bytes:,} bytes"
