"""Multiple-choice tasks: the most probable of the choices after a prompt is the answer."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tricycle.models import GPT
from tricycle.system.files import atomic_write, read_file
from tricycle.tokeniser import Tokeniser
from tricycle_cli.likelihoods import Pair, iter_likelihoods

MAX_CHOICES = 100


@dataclass(frozen=True)
class Item:
    """A question.

    Attributes:
        answer: the index of the right choice.
        group: the name of a part of the task whose accuracy is reported separately, or "".
    """

    prompt: str
    choices: list[str]
    answer: int
    group: str = ""


@dataclass(frozen=True, kw_only=True)
class ItemScore(Item):
    """An item and its result.

    Attributes:
        logprobs: the log-likelihood of each choice after the prompt, in nats.
        chosen: index of the most probable choice.
        chosen_per_character: index of the choice with the largest log-likelihood per character.
    """

    logprobs: list[float]
    chosen: int
    chosen_per_character: int


def read_items(path: Path) -> list[Item]:
    """Read JSON Lines objects with `prompt`, `choices`, `answer`, maybe `group`; ValueError with the line number.

    Raises:
        ValueError: a line is not such an object; the message has its number.
    """
    items = []
    for number, line in enumerate(read_file(path).decode("utf-8-sig", "replace").split("\n"), 1):
        if line.strip():
            try:
                items.append(_parse_item(json.loads(line)))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    if not items:
        raise ValueError(f"{path}: expected at least one item, got none")
    return items


def _parse_item(value: Any) -> Item:
    """Return an Item of a JSON value, with the answer as an index; ValueError if invalid."""
    fields = value if isinstance(value, dict) else {}
    prompt, choices, answer = (fields.get(name) for name in ("prompt", "choices", "answer"))
    are_texts = isinstance(choices, list) and all(isinstance(choice, str) and choice for choice in choices)
    if not isinstance(prompt, str) or not isinstance(choices, list) or not are_texts:
        raise ValueError(
            "expected an object with a text `prompt` and a list of texts `choices`, none of which is empty"
        )
    if not 2 <= len(choices) <= MAX_CHOICES:
        raise ValueError(f"expected 2 to {MAX_CHOICES} choices, got {len(choices)}")
    answer = choices.index(answer) if isinstance(answer, str) and answer in choices else answer
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise ValueError(
            f"expected answer to be an index from 0 to {len(choices) - 1}, or a choice, got {answer!r:.40}"
        )
    group = fields.get("group", "")
    if not isinstance(group, str):
        raise ValueError(f"expected group to be a text, got {group!r:.40}")
    return Item(prompt, choices, answer, group)


def score_items(
    model: GPT, items: list[Item], pairs: list[list[Pair]], batch_size: int | None = None, window: int | None = None
) -> list[ItemScore]:
    """Return each item's log-likelihoods of choices and two answers; ValueError if a choice exceeds the window.

    Args:
        pairs: for each item the ids of its prompt with each of its choices, as of `encode_items`.
        batch_size, window: see `iter_likelihoods`.

    Raises:
        ValueError: a choice that is longer than the window.
    """
    flat = [pair for own in pairs for pair in own]
    logprobs = [0.0] * len(flat)
    for i, likelihood in iter_likelihoods(model, flat, batch_size, window):
        logprobs[i] = likelihood.logprob
    scores = []
    for item in items:
        own, logprobs = logprobs[: len(item.choices)], logprobs[len(item.choices) :]
        per_character = [logprob / len(choice) for logprob, choice in zip(own, item.choices)]
        chosen = (own.index(max(own)), per_character.index(max(per_character)))
        scores.append(ItemScore(**asdict(item), logprobs=own, chosen=chosen[0], chosen_per_character=chosen[1]))
    return scores


def encode_items(tokeniser: Tokeniser, items: list[Item]) -> list[list[Pair]]:
    """Return for each item the ids of its prompt with each of its choices; see `encode_pair`."""
    return [[encode_pair(tokeniser, item.prompt, choice) for choice in item.choices] for item in items]


def encode_pair(tokeniser: Tokeniser, prompt: str, choice: str) -> Pair:
    """Return ids of prompt (`new_text` if blank) and choice, split after encoding both, joined by white space.

    White space at the end of the prompt is encoded with the choice, as in the LM Evaluation Harness. A choice that the
    tokenizer joins with the end of the prompt, so that it adds no token, is encoded alone.
    """
    stripped = prompt.rstrip()
    continuation = (prompt[len(stripped) :] or " ") + choice
    if not stripped:
        return Pair([tokeniser.new_text], [int(token) for token in tokeniser.encode_plain(choice)])
    context = [int(token) for token in tokeniser.encode(stripped)]
    whole = [int(token) for token in tokeniser.encode(stripped + continuation)]
    return Pair(context, whole[len(context) :] or [int(token) for token in tokeniser.encode_plain(continuation)])


def summarize(scores: list[ItemScore]) -> dict[str, float]:
    """Return "items" (their number), "accuracy" and "standard_error", and both with "_per_character"."""
    n = len(scores)
    summary: dict[str, float] = {"items": n}
    for name, suffix in (("chosen", ""), ("chosen_per_character", "_per_character")):
        accuracy = sum(getattr(score, name) == score.answer for score in scores) / n
        summary[f"accuracy{suffix}"] = accuracy
        summary[f"standard_error{suffix}"] = math.sqrt(accuracy * (1 - accuracy) / max(1, n - 1))
    return summary


def summarize_groups(scores: list[ItemScore]) -> dict[str, dict[str, float]]:
    """Return the summary of each group of items by its name, in the order of first items; empty without groups."""
    names = dict.fromkeys(score.group for score in scores)
    groups = {name: summarize([score for score in scores if score.group == name]) for name in names}
    return {} if list(groups) == [""] else groups


def compare_accuracy(scores: list[ItemScore], others: list[ItemScore]) -> dict[str, float]:
    """Compare two models' accuracies: difference, its standard error, items only one answers right, exact p-value.

    Returns:
        The difference of the accuracies and the standard error of the paired difference, the numbers of items that
        only the first or only the second model answers correctly, and the two-sided p-value: the probability of a
        difference of this size if each such item were equally probable for either model.

    Source: McNemar 1947, "Note on the sampling error of the difference between correlated proportions".
    """
    n = len(scores)
    right = [score.chosen == score.answer for score in scores]
    other_right = [score.chosen == score.answer for score in others]
    only_first = sum(a and not b for a, b in zip(right, other_right))
    only_second = sum(b and not a for a, b in zip(right, other_right))
    difference, n_discordant = (only_first - only_second) / n, only_first + only_second
    variance = (n_discordant / n - difference**2) / max(1, n - 1)
    n_tail = sum(math.comb(n_discordant, k) for k in range(min(only_first, only_second) + 1))
    return {
        "difference": difference,
        "difference_error": math.sqrt(max(0.0, variance)),
        "only_first": only_first,
        "only_second": only_second,
        "p_value": min(1.0, 2 * n_tail / 2**n_discordant),
    }


def write_log(path: Path, scores: list[ItemScore], others: list[ItemScore] | None = None) -> None:
    """Write the scores to a JSON Lines file, one item in each line, with those of the `other` model, if any."""
    rows = [asdict(score) for score in scores]
    for row, other in zip(rows, others or []):
        row["other"] = {name: getattr(other, name) for name in ("logprobs", "chosen", "chosen_per_character")}
    with atomic_write(path, text=True) as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
