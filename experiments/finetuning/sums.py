"""Short arithmetic word problems with two or three steps and one right answer.

A sum is where it starts and what is added or taken away, or that it doubles. No held-out sum occurs in
training, in any wording. Stories of another kind, none of whose sentences occur in training, are held out as well.
"""

import re
from typing import NamedTuple

import numpy as np

ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
MOST = 199  # no number of a sum is larger
NAMES = (
    "Anna Ben Clara David Ella Felix Grace Henry Ida Jack Kate Leo Maria Noah Olga Paul Rosa Sam Tina Victor".split()
)
ITEMS = "apples books marbles stamps coins shells pencils cards buttons stickers candles nuts".split()
PLUS = "buys {n} more", "finds {n} more", "gets {n} from a friend", "wins {n} in a game"
MINUS = "gives away {n}", "loses {n}", "sells {n}", "leaves {n} at home"
TWICE = "doubles what there is", "gets as many again"
ASK = "Work it out step by step, and end with the number in words."
START = "{name} has {n} {items}. "
QUESTION = "How many {items} does {name} have now? "
# another kind of story: none of its sentences stand in training
BUS_START = "A bus leaves with {n} people. "
BUS_PLUS = "At the next stop {n} get on. ", "Then {n} board it. "
BUS_MINUS = "At the next stop {n} get off. ", "Then {n} step out. "
BUS_TWICE = ("Then twice as many sit in it. ",)
BUS_QUESTION = "How many people are on the bus? "
N_VALIDATION, N_TEST = 200, 400


class Sum(NamedTuple):
    """A starting number, and steps: a number to add (or subtract, if negative), or 0 for doubling."""

    start: int
    steps: tuple[int, ...]

    def values(self) -> list[int]:
        """Return the number at the start and after each step, len(steps) + 1 numbers."""
        values = [self.start]
        for step in self.steps:
            values.append(values[-1] + step if step else 2 * values[-1])
        return values

    def working(self) -> list[str]:
        """Return each step of the calculation as a sentence, such as "34 + 17 = 51."."""
        values = self.values()
        lines = []
        for before, step, after in zip(values, self.steps, values[1:]):
            done = f"{before} * 2" if not step else f"{before} {'+' if step > 0 else '-'} {abs(step)}"
            lines.append(f"{done} = {after}.")
        return lines

    def answer(self) -> str:
        """Return the answer as text: the steps, then the result in words as a sentence."""
        return " ".join([*self.working(), f"{number_in_words(self.values()[-1]).capitalize()}."])


def number_in_words(number: int) -> str:
    """Return a number from 0 to 999 in English words, such as "one hundred twenty-one"; else ValueError."""
    if not 0 <= number <= 999:
        raise ValueError(f"in_words: expected a number from 0 to 999, got {number}")
    if number < len(ONES):
        return ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return TENS[tens - 2] + (f"-{ONES[ones]}" if ones else "")
    hundreds, rest = divmod(number, 100)
    return f"{ONES[hundreds]} hundred" + (f" {number_in_words(rest)}" if rest else "")


NUMBERS = {number_in_words(number).replace("-", " "): number for number in range(1000)}
_WORD = f"(?:{'|'.join(sorted([*ONES, *TENS], key=len, reverse=True))})"
_PHRASE = re.compile(rf"\b{_WORD}\b(?:[- ](?:hundred|and|{_WORD})\b)*|\d[\d,]*")


def last_number(text: str) -> int | None:
    """Return the last number in a text, in digits or in English words; None if there is none."""
    phrases = _PHRASE.findall(text.lower())
    if not phrases:
        return None
    if phrases[-1][0].isdigit():
        return int(phrases[-1].replace(",", ""))
    words = [word for word in re.split("[- ]", phrases[-1]) if word != "and"]
    longest = (" ".join(words[first:]) for first in range(len(words)))  # of "five six" the latter
    return next(NUMBERS[phrase] for phrase in longest if phrase in NUMBERS)


# -------------------------------------------------------------------- many of them
def new_sum(generator: np.random.Generator) -> Sum:
    """Return a random sum with two or three steps, with values from 0 to MOST."""
    start = int(generator.integers(11, 100))
    value = start
    steps = []
    for _ in range(int(generator.integers(2, 4))):
        kinds = [kind for kind, fits in zip("+-*", (value < MOST - 10, value > 10, 0 < value <= MOST // 2)) if fits]
        kind = kinds[int(generator.integers(len(kinds)))]
        step = 0
        if kind == "+":
            step = int(generator.integers(2, min(99, MOST - value) + 1))
        elif kind == "-":
            step = -int(generator.integers(2, min(99, value) + 1))
        steps.append(step)
        value = value + step if step else 2 * value
    return Sum(start, tuple(steps))


def story(problem: Sum, generator: np.random.Generator) -> str:
    """Return a sum as a story of a person and items, in the form of the training data, with the question."""
    name, items = choose(NAMES, generator), choose(ITEMS, generator)
    text = START.format(name=name, n=number_in_words(problem.start), items=items)
    for step in problem.steps:
        kind = PLUS if step > 0 else MINUS if step < 0 else TWICE
        text += f"{name} {choose(kind, generator).format(n=number_in_words(abs(step)))}. "
    return text + QUESTION.format(name=name, items=items) + ASK


def bus_story(problem: Sum, generator: np.random.Generator) -> str:
    """Return a sum as a story of a bus, a form that is not in the training data, with the question."""
    text = BUS_START.format(n=number_in_words(problem.start))
    for step in problem.steps:
        kind = BUS_PLUS if step > 0 else BUS_MINUS if step < 0 else BUS_TWICE
        text += choose(kind, generator).format(n=number_in_words(abs(step)))
    return text + BUS_QUESTION + ASK


def choose(values: tuple[str, ...] | list[str], generator: np.random.Generator) -> str:
    """Return a random element of a sequence."""
    return values[int(generator.integers(len(values)))]


def sums(n_train: int) -> dict[str, list[Sum]]:
    """Return {"train": n_train, "validation": N_VALIDATION, "test": N_TEST} different sums, the same at each call."""
    generator = np.random.default_rng(20)
    n_sums = N_TEST + N_VALIDATION + n_train
    different: dict[Sum, None] = {}
    while len(different) < n_sums:
        different[new_sum(generator)] = None
    every = list(different)
    first = N_TEST + N_VALIDATION
    return {"test": every[:N_TEST], "validation": every[N_TEST:first], "train": every[first:]}


def unseen_steps(tested: list[Sum], trained: list[Sum]) -> list[bool]:
    """Return for each tested sum whether none of its steps, such as 34 + 17, occurs in training."""
    trained_steps = {line for one in trained for line in one.working()}
    return [not any(line in trained_steps for line in one.working()) for one in tested]
