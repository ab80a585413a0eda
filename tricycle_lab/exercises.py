"""Write the gradient yourself: `python -m tricycle_lab.exercises --write mine.py`, fill in, `... mine.py`.

Each function is graded by two judges that know nothing of each other: central differences (`tricycle.gradcheck`), and
Tricycle's own op, which is the answer key.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tricycle.gradcheck import gradcheck
from tricycle.tensor import Tensor, no_grad, record, to_tensor
from tricycle_lab.exercise_sheet import EXERCISES, Exercise, Gradients
from tricycle_lab.look.functions import module_of

RIGHT, WRONG, NOT_YET = "right", "wrong", "not yet"
HEAD = '''"""Exercises: write the gradients.

Every function gets `grad`, the gradient of its result y, then the inputs, then y: NumPy arrays in float64. It returns
the gradient of each input that is asked for, in the shape of that input. Put your lines in the place of
`raise NotImplementedError`, and then:

    python -m tricycle_lab.exercises {file}
"""

import numpy as np
'''


class Grade(NamedTuple):
    """What became of an exercise.

    Attributes:
        name: the exercise's.
        verdict: "right", "wrong" or "not yet".
        said: one line: what is wrong, or where Tricycle's own version is.
    """

    name: str
    verdict: str
    said: str


class Wrong(ValueError):
    """An answer that is not right; the message is for the student."""


def exercise_named(name: str) -> Exercise:
    """Return an exercise; raise ValueError where there is none of that name."""
    for exercise in EXERCISES:
        if exercise.name == name:
            return exercise
    raise ValueError(f"expected one of {', '.join(one.name for one in EXERCISES)}, got {name!r}")


def grade(exercise: Exercise | str, function: Callable[..., Any] | None) -> Grade:
    """Judge a student's function.

    Args:
        exercise: or its name.
        function: takes `grad`, the inputs and the result, as arrays; returns a gradient, or a tuple of several.
    """
    if isinstance(exercise, str):
        exercise = exercise_named(exercise)
    if function is None:
        return Grade(exercise.name, NOT_YET, "there is no such function")
    try:
        for inputs in exercise.inputs(np.random.default_rng(0)):
            _check(exercise, function, inputs)
    except NotImplementedError:
        return Grade(exercise.name, NOT_YET, "")
    except Wrong as error:
        return Grade(exercise.name, WRONG, str(error))
    return Grade(exercise.name, RIGHT, f"Tricycle's own: {exercise.place}")


def _check(exercise: Exercise, function: Callable[..., Any], inputs: list[np.ndarray]) -> None:
    """Raise what is wrong with the gradients for some inputs."""
    key = [_tensor(array) for array in inputs]
    y = exercise.op(*key)
    grad = np.random.default_rng(1).standard_normal(y.shape)
    (y * grad).sum().backward()
    wanted = tuple(tensor.grad.array for tensor in key if tensor.grad is not None)
    result = y.array.copy()
    answers = _answers(exercise, function, grad, inputs, result)
    if all(_same(answer, right) for answer, right in zip(answers, wanted)):
        _differences(exercise, function, inputs)
        return
    for mistaken, said in exercise.mistakes:
        outcome = mistaken(grad, *inputs, result)
        outcome = outcome if isinstance(outcome, tuple) or outcome is None else (outcome,)
        if outcome and all(_same(answer, mistake) for answer, mistake in zip(answers, outcome)):
            raise Wrong(said)
    again = _answers(exercise, function, 2 * grad, inputs, result)
    names = _names(exercise, inputs)
    for name, answer, twice, right in zip(names, answers, again, wanted):
        if not _same(answer, right):
            raise Wrong(f"the gradient of {name}: {_hint(answer, twice, right)}")


def _tensor(array: np.ndarray) -> Tensor:
    whole = array.dtype.kind in "iu"
    return to_tensor(array.copy(), dtype=array.dtype, requires_grad=not whole)


def _names(exercise: Exercise, inputs: list[np.ndarray]) -> list[str]:
    """Of the inputs that have a gradient."""
    names = exercise.arguments.split(", ")
    return [name for name, array in zip(names, inputs) if array.dtype.kind == "f"]


def _same(answer: np.ndarray, right: np.ndarray) -> bool:
    return answer.shape == right.shape and bool(np.allclose(answer, right, rtol=1e-7, atol=1e-10))


def _answers(
    exercise: Exercise, function: Callable[..., Any], grad: np.ndarray, inputs: list[np.ndarray], y: np.ndarray
) -> Gradients:
    """What the student's function gives, once it has the right form."""
    copies = [grad.copy(), *(array.copy() for array in inputs), y.copy()]
    try:
        with np.errstate(all="ignore"):
            answer = function(*copies)
    except NotImplementedError:
        raise
    except Exception as error:
        raise Wrong(f"it raises {type(error).__name__}: {' '.join(str(error).split())}") from error
    for name, copy, array in zip(["grad", *exercise.arguments.split(", ")], copies, [grad, *inputs, y]):
        if not np.array_equal(copy, array):
            raise Wrong(f"it changes {name} in place; others need that array too")
    names = _names(exercise, inputs)
    several = answer if isinstance(answer, (tuple, list)) else (answer,)
    if len(several) != len(names):
        raise Wrong(f"expected the gradients of {', '.join(names)}, in this order, got {len(several)} of {len(names)}")
    shapes = [array.shape for array in inputs if array.dtype.kind == "f"]
    return tuple(_array(one, name, shape) for one, name, shape in zip(several, names, shapes))


def _array(answer: Any, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if answer is None:
        raise Wrong(f"the gradient of {name}: it returns None")
    try:
        array = np.asarray(answer, dtype=np.float64)
    except (TypeError, ValueError):
        raise Wrong(f"the gradient of {name}: expected an array, got a {type(answer).__name__}") from None
    if array.shape != shape:
        turned = "; it is transposed" if array.T.shape == shape else ""
        summed = "; where broadcasting copied values, sum over the copies" if array.size > np.prod(shape) else ""
        raise Wrong(
            f"the gradient of {name}: expected the shape {shape} of {name}, got {array.shape}{turned or summed}"
        )
    if not np.isfinite(array).all():
        raise Wrong(f"the gradient of {name}: it has values that are not finite")
    return array


def _hint(answer: np.ndarray, twice: np.ndarray, right: np.ndarray) -> str:
    """What an answer of the right shape looks like that is none of the exercise's own mistakes."""
    if not answer.any():
        return "it is 0 everywhere"
    if _same(answer, twice):
        return "it stays the same whatever grad is; the chain rule multiplies by grad"
    if answer.ndim == 2 and _same(answer.T, right):
        return "it is transposed"
    if _same(-answer, right):
        return "its sign is turned"
    ratio = float((answer * right).sum() / (right * right).sum())
    if _same(answer, ratio * right):
        return f"it is {ratio:.6g} times the right one"
    n_wrong = int((~np.isclose(answer, right, rtol=1e-7, atol=1e-10)).sum())
    place = np.unravel_index(int(np.abs(answer - right).argmax()), right.shape)
    where = "" if not right.ndim else f" at {', '.join(str(int(i)) for i in place)}"
    values = f"{answer[place]:.6g}, right is {right[place]:.6g}"
    return f"{n_wrong} of {right.size} values are wrong; the farthest off,{where}, is {values}"


def _differences(exercise: Exercise, function: Callable[..., Any], inputs: list[np.ndarray]) -> None:
    """The other judge: the op with the student's gradient, against central differences."""

    def tried(*tensors: Tensor) -> Tensor:
        with no_grad():
            y = exercise.op(*tensors).array
        arrays = [tensor.array for tensor in tensors]

        def backward(grad: Any, needs_grad: Any) -> tuple[Any, ...]:
            answers = iter(_answers(exercise, function, np.asarray(grad), arrays, y))
            return tuple(next(answers) if array.dtype.kind == "f" else None for array in arrays)

        return record(y, tensors, backward, exercise.name)

    try:
        gradcheck(tried, *(_tensor(array) for array in inputs))
    except ValueError as error:
        raise Wrong(str(error)) from error


# -------------------------------------------------------------------- the command
def main(words: list[str] | None = None) -> int:
    """The program; 0 where everything that was graded is right."""
    parser = argparse.ArgumentParser(prog="python -m tricycle_lab.exercises", description=__doc__)
    parser.add_argument("file", type=Path, help="your answers: a file of Python, which is run")
    parser.add_argument(
        "--write", action="store_true", help="write the file with the tasks, which must not be there yet"
    )
    names = " ".join(one.name for one in EXERCISES)
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"grade these: {names}")
    arguments = parser.parse_args(words)
    try:
        if arguments.write:
            head = HEAD.replace("{file}", arguments.file.name)
            with open(arguments.file, "x", encoding="utf-8") as file:  # none that is there already, with answers in it
                file.write("\n\n".join([head, *(exercise.code() for exercise in EXERCISES)]))
            print(f"{arguments.file}: {len(EXERCISES)} exercises")
            return 0
        chosen = [exercise_named(name) for name in arguments.only] if arguments.only else EXERCISES
        answers = module_of(arguments.file)
    except (OSError, ValueError) as error:
        said = f"{arguments.file}: it is there already" if isinstance(error, FileExistsError) else error
        print(f"{parser.prog}: {said}", file=sys.stderr)
        return 1
    grades = [grade(exercise, getattr(answers, exercise.name, None)) for exercise in chosen]
    width = max(len(one.name) for one in grades)
    for one in grades:
        print(f"{one.name:<{width}}  {one.verdict:<7}  {one.said}".rstrip())
    n_right = sum(one.verdict == RIGHT for one in grades)
    print(f"{n_right} of {len(grades)} right")
    return 0 if n_right == len(grades) else 1


if __name__ == "__main__":
    sys.exit(main())
