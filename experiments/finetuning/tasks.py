"""The three fine-tuning tasks: their records, their questions, and how answers are scored."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from experiments.finetuning import docstrings, shakespeare, sums
from tricycle.system.files import atomic_write

N_STORIES = 1000  # to learn from, about as many as a training reads
N_TESTED_TEXTS = 60  # records of a task's test of which the loss is taken
TRAINING, VALIDATION, TEST, OTHERWISE = range(1, 5)  # streams of random numbers
KNOWN, NEW, OTHER = "known steps", "new steps", "other wording"  # groups of sums
ORDER = {"train": TRAINING, "validation": VALIDATION, "test": TEST}


@dataclass(frozen=True)
class Question:
    """A test question, with the reference for scoring the answer."""

    text: str  # the question
    is_chat: bool  # whether the text is a chat message or a text to continue
    reference: Any  # the right answer, or the reference for scoring
    group: str = ""  # the group for scores


@dataclass(frozen=True)
class Task:
    """A fine-tuning task: its records, test questions, scoring and training settings.

    Attributes:
        suffix: of its files: .jsonl, or .txt for plain text.
        records: of "train", "validation" or "test": an object for each line, or texts.
        questions: the test questions before and after fine-tuning.
        judge: shares by name, of the questions and the answers.
        n_tokens: the most of an answer.
        temperature: of answers.
        updates: of a training. rates: of learning, by method.
    """

    name: str
    title: str
    suffix: str
    records: Callable[[str], list[Any]]
    questions: Callable[[], list[Question]]
    judge: Callable[[Sequence[Question], Sequence[str]], dict[str, float]]
    n_tokens: int
    temperature: float = 0.0
    updates: int = 80
    rates: dict[str, float] = field(default_factory=lambda: {"lora": 5e-4, "qlora": 5e-4, "all": 5e-5})


# -------------------------------------------------------------------- sums
def story_records(part: str) -> list[Any]:
    """Return {"messages": [user, assistant]} for each sum of "train", "validation" or "test"."""
    generator = np.random.default_rng((ORDER[part], 0))
    return [
        {"messages": [message("user", sums.story(one, generator)), message("assistant", one.answer())]}
        for one in sums.sums(N_STORIES)[part]
    ]


def message(role: str, content: str) -> dict[str, str]:
    """Return the chat message {"role": role, "content": content}."""
    return {"role": role, "content": content}


def story_questions() -> list[Question]:
    """Return a question per test story, NEW if no step of it is in training, else KNOWN; then half reworded: OTHER."""
    parts = sums.sums(N_STORIES)
    stories = [record["messages"] for record in story_records("test")]
    unseen = sums.unseen_steps(parts["test"], parts["train"])
    questions = [
        Question(user["content"], True, assistant["content"], NEW if new else KNOWN)
        for (user, assistant), new in zip(stories, unseen)
    ]
    generator = np.random.default_rng((OTHERWISE, 0))
    others = parts["test"][: sums.N_TEST // 2]
    return questions + [Question(sums.bus_story(one, generator), True, one.answer(), OTHER) for one in others]


def score_sums(questions: Sequence[Question], answers: Sequence[str]) -> dict[str, float]:
    """Return fractions: "right" (the last number is) and "to the letter" without OTHER; right ones of NEW, OTHER."""
    right = np.array([sums.last_number(a) == sums.last_number(q.reference) for q, a in zip(questions, answers)])
    exact = np.array([answer.strip() == question.reference for question, answer in zip(questions, answers)])
    groups = np.array([question.group for question in questions])
    usual = groups != OTHER
    scores = {"right": fraction_true(right[usual]), "to the letter": fraction_true(exact[usual])}
    for group in (NEW, OTHER):
        scores[group] = fraction_true(right[groups == group])
    return scores


def fraction_true(flags: np.ndarray) -> float:
    """Return the fraction of True values; NaN if there are none."""
    return float(flags.mean()) if len(flags) else float("nan")


# -------------------------------------------------------------------- docstrings
def function_records(part: str) -> list[Any]:
    """Return {"messages": [user, assistant]} for each function of "train", "validation" or "test"."""
    return [
        {"messages": [message("user", one.question), message("assistant", one.line)]}
        for one in docstrings.functions()[part]
    ]


def score_lines(questions: Sequence[Question], answers: Sequence[str]) -> dict[str, float]:
    """Return {"overlap": mean ROUGE-1 F1 with the author's line, "the same": fraction of equal lines}."""
    lines = [docstrings.first_line(answer) for answer in answers]
    overlaps = [docstrings.rouge1_f1(line, question.reference) for question, line in zip(questions, lines)]
    same = [docstrings.same(line, question.reference) for question, line in zip(questions, lines)]
    return {"overlap": float(np.mean(overlaps)), "the same": fraction_true(np.array(same))}


# -------------------------------------------------------------------- the voice
def score_continuations(questions: Sequence[Question], answers: Sequence[str]) -> dict[str, float]:
    """Return the copied fractions {"copied": of answers, "copied by Shakespeare": of the references}."""
    references = [question.reference for question in questions]
    return {
        "copied": shakespeare.copied_fraction(list(answers)),
        "copied by Shakespeare": shakespeare.copied_fraction(references),
    }


SUMS_RATES = {"lora": 2e-3, "qlora": 2e-3, "all": 2e-4}
SUMS = Task("sums", "sums in words", ".jsonl", story_records, story_questions, score_sums, 96, rates=SUMS_RATES)
DOCSTRINGS = Task(
    "docstrings",
    "docstrings",
    ".jsonl",
    function_records,
    lambda: [Question(one.question, True, one.line) for one in docstrings.functions()["test"]],
    score_lines,
    32,
)
VOICE = Task(
    "voice",
    "Shakespeare",
    ".txt",
    lambda part: [shakespeare.part(part)[: shakespeare.TESTED if part == "test" else None]],
    lambda: [Question(opening, False, rest) for opening, rest in shakespeare.openings()],
    score_continuations,
    48,
    temperature=0.8,
)
TASKS = {task.name: task for task in (SUMS, DOCSTRINGS, VOICE)}


# -------------------------------------------------------------------- files
def write_records(task: Task, part: str, folder: Path) -> Path:
    """Write the records of a part to folder/TASK-PART.SUFFIX, replacing the file, and return its path."""
    path = folder / f"{task.name}-{part}{task.suffix}"
    with atomic_write(path, text=True) as file:
        for line in lines_of(task, part):
            file.write(line)
    return path


def lines_of(task: Task, part: str) -> Iterator[str]:
    """Yield all texts of a .txt task; else JSON lines with newlines, of "test" only the first N_TESTED_TEXTS."""
    records = task.records(part)
    if task.suffix == ".txt":
        yield from records
        return
    if part == "test":
        records = records[:N_TESTED_TEXTS]
    for record in records:
        yield f"{json.dumps(record, ensure_ascii=False)}\n"
