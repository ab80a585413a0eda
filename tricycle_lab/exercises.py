"""Gradient exercises: `python -m tricycle_lab.exercises mine.py --write` writes the tasks; without --write, it grades.

Two independent checks grade each function: finite differences (`tricycle.gradcheck`), and the gradient of Tricycle's
own op.
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
from tricycle_lab.look.graph_functions import load_module

CORRECT, INCORRECT, NOT_IMPLEMENTED = "correct", "incorrect", "not implemented"
FILE_HEADER = '''"""Exercises: write the gradients.

Each function receives `grad`, the gradient of its result y, then the inputs, then y: NumPy arrays in float64. It
returns the requested gradients, each in the shape of its input. Replace `raise NotImplementedError` by your code, and
grade it:

    python -m tricycle_lab.exercises {file}
"""

import numpy as np
'''


class Grade(NamedTuple):
    """The result of an exercise.

    Attributes:
        name: of the exercise.
        verdict: "correct", "incorrect" or "not implemented".
        message: one line: the mistake, or the location of Tricycle's own implementation.
    """

    name: str
    verdict: str
    message: str


class WrongAnswerError(ValueError):
    """An incorrect answer; the message describes the mistake to the student."""


def find_exercise(name: str) -> Exercise:
    """Return the exercise with this name; raise ValueError if there is none."""
    by_name = {exercise.name: exercise for exercise in EXERCISES}
    if name not in by_name:
        raise ValueError(f"expected one of {', '.join(by_name)}, got {name!r}")
    return by_name[name]


def grade(exercise: Exercise | str, function: Callable[..., Any] | None) -> Grade:
    """Check a gradient function; return a `Grade`: correct, incorrect (also if it raises), or not implemented.

    Args:
        exercise: an exercise or its name.
        function: maps `grad`, the inputs and the result, all arrays, to a gradient or a tuple of gradients; None if the
            student's file does not contain it.
    """
    if isinstance(exercise, str):
        exercise = find_exercise(exercise)
    if function is None:
        return Grade(exercise.name, NOT_IMPLEMENTED, "the file does not contain this function")
    try:
        for inputs in exercise.inputs(np.random.default_rng(0)):
            _check(exercise, function, inputs)
    except NotImplementedError:
        return Grade(exercise.name, NOT_IMPLEMENTED, "")
    except WrongAnswerError as error:
        return Grade(exercise.name, INCORRECT, str(error))
    return Grade(exercise.name, CORRECT, f"Tricycle's implementation: {exercise.location}")


def _check(exercise: Exercise, function: Callable[..., Any], inputs: list[np.ndarray]) -> None:
    """Raise WrongAnswerError if the function's gradients for some inputs are not correct."""
    tensors = [_tensor(array) for array in inputs]
    y = exercise.op(*tensors)
    grad = np.random.default_rng(1).standard_normal(y.shape)
    (y * grad).sum().backward()
    expected = tuple(tensor.grad.array for tensor in tensors if tensor.grad is not None)
    result = y.array.copy()
    answers = _call_function(exercise, function, grad, inputs, result)
    if all(_close(answer, right) for answer, right in zip(answers, expected)):
        _check_finite_differences(exercise, function, inputs)
        return
    for mistaken, message in exercise.mistakes:
        gradients = mistaken(grad, *inputs, result)
        gradients = gradients if isinstance(gradients, tuple) or gradients is None else (gradients,)
        if gradients and all(_close(answer, mistake) for answer, mistake in zip(answers, gradients)):
            raise WrongAnswerError(message)
    doubled = _call_function(exercise, function, 2 * grad, inputs, result)
    names = _differentiable_inputs(exercise, inputs)
    for name, answer, twice, right in zip(names, answers, doubled, expected):
        if not _close(answer, right):
            raise WrongAnswerError(f"the gradient of {name}: {_describe_error(answer, twice, right)}")


def _tensor(array: np.ndarray) -> Tensor:
    """Return a copy of an array as a Tensor of its dtype; floats require a gradient."""
    return to_tensor(array.copy(), dtype=array.dtype, requires_grad=array.dtype.kind == "f")


def _differentiable_inputs(exercise: Exercise, inputs: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Return the inputs that have a gradient, by name."""
    names = exercise.arguments.split(", ")
    return {name: array for name, array in zip(names, inputs) if array.dtype.kind == "f"}


def _close(answer: np.ndarray, right: np.ndarray) -> bool:
    """Return whether shapes are equal, and values almost (NaN never)."""
    return answer.shape == right.shape and bool(np.allclose(answer, right, rtol=1e-7, atol=1e-10))


def _call_function(
    exercise: Exercise, function: Callable[..., Any], grad: np.ndarray, inputs: list[np.ndarray], y: np.ndarray
) -> Gradients:
    """Call the student's function; return its gradients as float64 arrays; raise WrongAnswerError for a wrong form."""
    copies = [grad.copy(), *(array.copy() for array in inputs), y.copy()]
    try:
        with np.errstate(all="ignore"):
            answer = function(*copies)
    except NotImplementedError:
        raise
    except (Exception, SystemExit) as error:
        raise WrongAnswerError(f"it raises {type(error).__name__}: {' '.join(str(error).split())}") from error
    for name, copy, array in zip(["grad", *exercise.arguments.split(", ")], copies, [grad, *inputs, y]):
        if not np.array_equal(copy, array):
            raise WrongAnswerError(f"it changes {name} in place; compute a new array instead")
    names = _differentiable_inputs(exercise, inputs)
    gradients = answer if isinstance(answer, (tuple, list)) else (answer,)
    if len(gradients) != len(names):
        raise WrongAnswerError(
            f"expected the gradients of {', '.join(names)}, in this order, got {len(gradients)} of {len(names)}"
        )
    return tuple(_check_gradient(one, name, array.shape) for one, (name, array) in zip(gradients, names.items()))


def _check_gradient(answer: Any, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a gradient as a float64 array; raise WrongAnswerError if it is None, not finite or not of `shape`."""
    if answer is None:
        raise WrongAnswerError(f"the gradient of {name}: it returns None")
    try:
        array = np.asarray(answer, dtype=np.float64)
    except (TypeError, ValueError):
        raise WrongAnswerError(f"the gradient of {name}: expected an array, got a {type(answer).__name__}") from None
    if array.shape != shape:
        transposed = "; it is transposed" if array.T.shape == shape else ""
        summed = "; sum over the axes along which the input was broadcast" if array.size > np.prod(shape) else ""
        raise WrongAnswerError(
            f"the gradient of {name}: expected the shape {shape} of {name}, got {array.shape}{transposed or summed}"
        )
    if not np.isfinite(array).all():
        raise WrongAnswerError(f"the gradient of {name}: it contains values that are not finite")
    return array


def _describe_error(answer: np.ndarray, twice: np.ndarray, right: np.ndarray) -> str:
    """Say how a wrong answer differs from `right`: 0, independent of grad (as `twice`), scaled, or its worst value."""
    if not answer.any():
        return "it is 0 everywhere"
    if _close(answer, twice):
        return "it does not depend on grad; the chain rule multiplies by grad"
    if answer.ndim == 2 and _close(answer.T, right):
        return "it is transposed"
    if _close(-answer, right):
        return "it has the wrong sign"
    ratio = float((answer * right).sum() / (right * right).sum())
    if _close(answer, ratio * right):
        return f"it is {ratio:.6g} times the correct one"
    n_wrong = int((~np.isclose(answer, right, rtol=1e-7, atol=1e-10)).sum())
    index = np.unravel_index(int(np.abs(answer - right).argmax()), right.shape)
    where = "" if not right.ndim else f" at {', '.join(str(int(i)) for i in index)}"
    values = f"{answer[index]:.6g} instead of {right[index]:.6g}"
    return f"{n_wrong} of {right.size} values are wrong; the largest error{where}: {values}"


def _check_finite_differences(exercise: Exercise, function: Callable[..., Any], inputs: list[np.ndarray]) -> None:
    """Compare the student's gradient with finite differences of the op; raise WrongAnswerError if they differ."""

    def op_with_answer(*tensors: Tensor) -> Tensor:
        with no_grad():
            y = exercise.op(*tensors).array
        arrays = [tensor.array for tensor in tensors]

        def backward(grad: Any, needs_grad: Any) -> tuple[Any, ...]:
            answers = iter(_call_function(exercise, function, np.asarray(grad), arrays, y))
            return tuple(next(answers) if array.dtype.kind == "f" else None for array in arrays)

        return record(y, tensors, backward, exercise.name)

    try:
        gradcheck(op_with_answer, *(_tensor(array) for array in inputs))
    except ValueError as error:
        raise WrongAnswerError(str(error)) from error


# -------------------------------------------------------------------- the command
def main(args: list[str] | None = None) -> int:
    """Execute a file, print its exercises' grades, or write tasks to a new file; return 0 if all correct, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m tricycle_lab.exercises", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("file", type=Path, help="the Python file with your answers, which is executed")
    parser.add_argument("--write", action="store_true", help="write the tasks to a new file")
    names = " ".join(one.name for one in EXERCISES)
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"grade only these exercises: {names}")
    arguments = parser.parse_args(args)
    try:
        if arguments.write:
            head = FILE_HEADER.replace("{file}", arguments.file.name)
            with open(arguments.file, "x", encoding="utf-8") as file:  # does not overwrite answers
                file.write("\n\n".join([head, *(exercise.code() for exercise in EXERCISES)]))
            print(f"{arguments.file}: {len(EXERCISES)} exercises")
            return 0
        selected = [find_exercise(name) for name in arguments.only] if arguments.only else EXERCISES
        answers = load_module(arguments.file)
    except (OSError, ValueError) as error:
        exists = isinstance(error, FileExistsError)
        message = f"{arguments.file}: expected a new file, got an existing one" if exists else error
        print(f"{parser.prog}: {message}", file=sys.stderr)
        return 1
    grades = [grade(exercise, getattr(answers, exercise.name, None)) for exercise in selected]
    width = max(len(one.name) for one in grades)
    for one in grades:
        print(f"{one.name:<{width}}  {one.verdict:<15}  {one.message}".rstrip())
    n_correct = sum(one.verdict == CORRECT for one in grades)
    print(f"{n_correct} of {len(grades)} correct")
    return 0 if n_correct == len(grades) else 1


if __name__ == "__main__":
    sys.exit(main())
