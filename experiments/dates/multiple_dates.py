"""Texts with several dates, which test how much a context of fixed size can hold."""

from statistics import mean
from typing import Any

import numpy as np

from experiments.dates import data as dates
from experiments.dates.study import Settings, Texts, greedy_answers, rounded, texts, train
from tricycle.sequences.seq2seq import EncoderDecoder

TRAINED = 4  # the most dates of a text in training
COUNTS = (1, 2, 3, 4, 5, 6, 8)  # in the test
LETTERS = len("1998-03-03")
POOL, VALIDATION, TEST = 11, 12, 13  # streams that share no number with others


def training_texts(n: int, seed: int) -> Texts:
    """Return `n` training texts of 1 to TRAINED dates each, in an order that depends on `seed`."""
    training, _, _ = dates.split()
    generator = np.random.default_rng((POOL, seed))
    days = [training[i] for i in generator.permutation(len(training))]
    return texts(dates.multiple_date_examples(days, n, (1, TRAINED), generator))


def held_out(part: str, n: int, counts: tuple[int, int]) -> Texts:
    """Return n texts of counts[0] to counts[1] unseen dates of "validation" or "test", the same at each call."""
    _, validation, test = dates.split()
    number, days = (VALIDATION, validation) if part == "validation" else (TEST, test)
    return texts(dates.multiple_date_examples(days, n, counts, np.random.default_rng((number, *counts))))


def run(name: str, settings: Settings, seed: int) -> tuple[EncoderDecoder, dict[str, Any], dict[str, Any]]:
    """Train a model and measure it; return (model, its training history, the results of `measure`)."""
    validation = held_out("validation", settings.validated, (1, TRAINED))
    model, history = train(name, settings, seed, training_texts(settings.examples, seed), validation)
    return model, history, measure(model, settings.tested)


def measure(model: EncoderDecoder, n: int) -> dict[str, Any]:
    """Return {"whole": fractions of exact answers, "each": of right dates}, lists over COUNTS, of n texts each."""
    whole, each = [], []
    for count in COUNTS:
        data = held_out("test", n, (count, count))
        pairs = [(text, one.iso) for text, one in zip(greedy_answers(model, data), data.examples)]
        whole.append(rounded(mean([text == iso for text, iso in pairs])))
        each.append(rounded(mean([fraction_of_right_dates(text, iso) for text, iso in pairs])))
    return {"whole": whole, "each": each}


def fraction_of_right_dates(text: str, iso: str) -> float:
    """Return the fraction of the dates in `iso` that `text` has at the same position."""
    starts = range(0, len(iso), LETTERS)
    return sum(text[i : i + LETTERS] == iso[i : i + LETTERS] for i in starts) / len(starts)
