"""Retrieval tasks as prompts: the largest of n numbers, a name n lines back, a key in a table.

The first questions of a text come with their answers, as examples of the task. All questions of a text are asked in one
go, each after the right answers to those before it, so a text is read once whatever the answers are.

Shapes: N texts, T tokens.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

NAMES = (
    "Anna Peter Maria Paul Laura Simon Helen Martin Julia Oscar Sarah Daniel Alice Thomas Emma Robert Clara Henry Rose "
    "David Nora Frank Ruth Jack Grace Adam Lucy Mark Kate Victor Jane Luke Eva Max Ella Leo Amy Ben Mary Sam"
).split()
ROLES = "captain doctor baker teacher painter driver farmer lawyer singer judge nurse cook".split()
DEEDS = (
    "walked to the market|opened the window|read a long letter|waited for the train|bought some bread|lost the key|"
    "sat by the river|painted the door|called a friend|closed the shop|drank some coffee|fed the horses|"
    "found an old coin|slept until noon|fixed the roof|wrote a short note"
).split("|")
KEYS = (
    "apple river stone cloud garden silver window candle forest mirror bridge paper orange winter summer castle "
    "mountain island desert flower shadow feather copper marble basket hammer ladder anchor pencil bottle button "
    "carpet curtain dragon engine falcon guitar harbor helmet jacket jungle kitchen lantern lemon magnet meadow needle "
    "ocean palace parrot pepper pillow planet pocket ribbon rocket saddle salmon spider temple thunder ticket tiger "
    "tower tunnel valley velvet village violin wagon wallet whale wheel willow zebra blanket"
).split()
N_EXAMPLES = 4  # questions with answers that do not count
N_QUESTIONS = 8  # that count, or fewer if the text has fewer


class Prompt(NamedTuple):
    """Token ids, and the slices of the answers."""

    ids: np.ndarray  # integers (T,)
    answers: Sequence[slice]  # the positions of each scored answer in ids


class Text(NamedTuple):
    """A prompt as text: the context, the questions with answers, and the number of examples."""

    context: str  # the beginning of the text
    questions: Sequence[tuple[str, str]]  # the questions, each with its answer
    n_examples: int  # the number of questions that are not scored


def words_of(tokeniser: Any) -> tuple[str, ...]:
    """Return words for keys: tokens of a space and 4 to 8 letters, or, if under 1,000, pairs of KEYS."""
    tokens = [tokeniser.decode([i]) for i in range(min(tokeniser.n_vocab, 12_000))]
    words = tuple(dict.fromkeys(token[1:] for token in tokens if re.fullmatch(" [a-z]{4,8}", token)))
    return words if len(words) >= 1000 else tuple(f"{first} {second}" for first in KEYS for second in KEYS)


def largest_number_task(n: int, words: Sequence[str], generator: np.random.Generator) -> Text:
    """Return a Text: N_EXAMPLES lists of 4 numbers, then a scored question for the largest of n; ignores `words`."""
    lists = [_numbers(4, generator) for _ in range(N_EXAMPLES)] + [_numbers(n, generator)]
    questions = [f"Numbers: {', '.join(map(str, numbers))}\nThe largest number is" for numbers in lists]
    return Text("", [(text, f" {max(numbers)}\n\n") for text, numbers in zip(questions, lists)], N_EXAMPLES)


def _numbers(n: int, generator: np.random.Generator) -> list[int]:
    """Return n different random integers from 0, below a random limit of at most 1,000."""
    below = int(generator.integers(max(100, n), 1000))
    return generator.permutation(below)[:n].tolist()


def name(n: int, words: Sequence[str], generator: np.random.Generator) -> Text:
    """Return a Text: 8 lines that name roles, then n others; 8 questions for names, 2 unscored; ignores `words`."""
    n_examples = 2
    names = generator.permutation(NAMES)
    people = [(f"The {role} is called", f" {who}.\n") for role, who in zip(generator.permutation(ROLES)[:8], names)]
    others = names[len(people) :]
    lines = [f"{generator.choice(others)} {generator.choice(DEEDS)}.\n" for _ in range(n)]
    questions = [people[i] for i in generator.permutation(len(people))]
    return Text("".join(question + answer for question, answer in people) + "".join(lines), questions, n_examples)


def table(n: int, words: Sequence[str], generator: np.random.Generator) -> Text:
    """Return a Text: a table of n words with names, then at most 12 look-ups, the first min(4, n // 2) unscored."""
    rows = [(f"{key}:", f" {generator.choice(NAMES)}\n") for key in generator.choice(words, n, replace=False)]
    questions = [rows[i] for i in generator.permutation(n)[: N_EXAMPLES + N_QUESTIONS]]
    listed = "".join(key + value for key, value in rows)
    return Text(f"{listed}\nLook up:\n", questions, min(N_EXAMPLES, n // 2))


TASKS: dict[str, Callable[[int, Sequence[str], np.random.Generator], Text]] = {
    "largest": largest_number_task,
    "name": name,
    "table": table,
}


def new_prompt(tokeniser: Any, text: Text) -> Prompt:
    """Return the ids of a Text, and slices of its scored answers without their final full stop and line ends."""
    ids = list(tokeniser.encode(text.context)) if text.context else []
    places = []
    for i, (question, answer) in enumerate(text.questions):
        ids += tokeniser.encode(question)
        trimmed = answer.rstrip(".\n")
        tokens = list(tokeniser.encode(trimmed))
        if i >= text.n_examples:
            places.append(slice(len(ids), len(ids) + len(tokens)))
        ids += tokens
        ids += tokeniser.encode(answer[len(trimmed) :])
    return Prompt(np.array(ids, np.int64), places)


class Prompter:
    """A generator of tokenized prompts of the tasks, for one tokeniser."""

    def __init__(self, tokeniser: Any) -> None:
        self.tokeniser = tokeniser
        self.words = words_of(tokeniser)

    def prompts(self, task: str, n: int, n_texts: int, key: Sequence[int]) -> list[Prompt]:
        """Return `n_texts` prompts of a task in TASKS with size n; the same key gives the same prompts."""
        generator = np.random.default_rng((*key, list(TASKS).index(task), n))
        return [new_prompt(self.tokeniser, TASKS[task](n, self.words, generator)) for _ in range(n_texts)]
