"""The gradient exercises: correct answers pass, and common mistakes get a helpful message."""

import re
import sys
from dataclasses import replace

import numpy as np
import pytest
from test_programs import call

from tricycle.tensor import record
from tricycle_lab.exercise_sheet import EPS, EXERCISES
from tricycle_lab.exercises import CORRECT, INCORRECT, NOT_IMPLEMENTED, find_exercise, grade, main


def probabilities(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def cross_entropy(grad, labels, logits, y):
    p = probabilities(logits)
    p[np.arange(len(labels)), labels] -= 1
    return grad * p / len(labels)


def rms_norm(grad, x, gain, y):
    scale = np.sqrt((x**2).mean(-1, keepdims=True) + EPS)
    dhat = grad * gain
    return dhat / scale - x * (dhat * x).mean(-1, keepdims=True) / scale**3, (grad * x / scale).sum(0)


def layer_norm(grad, x, gain, bias, y):
    centred = x - x.mean(-1, keepdims=True)
    scale = np.sqrt((centred**2).mean(-1, keepdims=True) + EPS)
    dhat = grad * gain
    d = dhat / scale - centred * (dhat * centred).mean(-1, keepdims=True) / scale**3
    return d - d.mean(-1, keepdims=True), (grad * centred / scale).sum(0), grad.sum(0)


def attention(grad, q, k, v, y):
    w = probabilities(q @ k.T / np.sqrt(q.shape[1]))
    dw = grad @ v.T
    ds = w * (dw - (dw * w).sum(-1, keepdims=True)) / np.sqrt(q.shape[1])
    return ds @ k, ds.T @ q, w.T @ grad


ANSWERS = {
    "multiply": lambda grad, a, b, y: (grad * b, (grad * a).sum(0)),
    "mean_of_rows": lambda grad, x, y: np.repeat(grad[:, None], x.shape[1], 1) / x.shape[1],
    "matmul": lambda grad, a, b, y: (grad @ b.T, a.T @ grad),
    "relu": lambda grad, x, y: grad * (x > 0),
    "sigmoid": lambda grad, x, y: grad * y * (1 - y),
    "softmax": lambda grad, x, y: y * (grad - (grad * y).sum(-1, keepdims=True)),
    "cross_entropy": cross_entropy,
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "attention": attention,
}


def test_every_exercise_has_an_answer():
    assert {exercise.name for exercise in EXERCISES} == set(ANSWERS)


@pytest.mark.parametrize("name", ANSWERS)
def test_correct_answers_pass(name):
    assert grade(name, ANSWERS[name]) == (name, CORRECT, f"Tricycle's implementation: {find_exercise(name).location}")


MISTAKES = [(one.name, mistaken, message) for one in EXERCISES for mistaken, message in one.mistakes]


@pytest.mark.parametrize(
    ("name", "mistaken", "message"), MISTAKES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_common_mistakes_get_their_own_message(name, mistaken, message):
    if name == "matmul":  # the mistake has the correct shape only for square matrices
        assert "transposed" in grade(name, lambda grad, a, b, y: (grad @ b.T, (a.T @ grad).T)).message
        return
    assert grade(name, mistaken) == (name, INCORRECT, message)


@pytest.mark.parametrize(
    ("name", "function", "message"),
    [
        ("softmax", lambda grad, x, y: -ANSWERS["softmax"](grad, x, y), "wrong sign"),
        ("softmax", lambda grad, x, y: 0 * x, "0 everywhere"),
        ("softmax", lambda grad, x, y: None, "it returns None"),
        ("softmax", lambda grad, x, y: "y", "an array.*str"),
        ("softmax", lambda grad, x, y: x / 0, "not finite"),
        ("softmax", lambda grad, x: x, "it raises TypeError"),
        ("softmax", lambda grad, x, y: sys.exit(), "it raises SystemExit"),
        ("softmax", lambda grad, x, y: grad.__isub__(y), "changes grad"),
        ("softmax", lambda grad, x, y: x.__isub__(y), "changes x"),
        ("softmax", lambda grad, x, y: ANSWERS["softmax"](grad, x, y) + (x == x.max()), "1 of 12 values"),
        ("sigmoid", lambda grad, x, y: y * (1 - y), "chain rule"),
        ("sigmoid", lambda grad, x, y: 3 * grad * y * (1 - y), "3 times"),
        ("multiply", lambda grad, a, b, y: grad * b, "gradients of a, b.*1 of 2"),
        ("multiply", lambda grad, a, b, y: (grad * b, grad * a), r"\(4,\) of b.*got \(3, 4\); sum"),
        ("layer_norm", lambda *all: layer_norm(*all)[::-1], r"gradient of x: .*\(3, 4\)"),
        ("attention", lambda *all: (*attention(*all)[:2], 2 * attention(*all)[2]), "gradient of v: .*2 times"),
    ],
)
def test_messages_for_other_wrong_answers(name, function, message):
    name, verdict, line = grade(name, function)
    assert verdict == INCORRECT
    assert re.search(message, line)
    assert "\n" not in line


def test_answer_equal_to_a_wrong_tricycle_gradient_fails():
    def wrongly(x):
        return record(x.array**2, (x,), lambda grad, needs_grad: (grad * x.array,), "square")

    exercise = replace(find_exercise("relu"), name="square", op=wrongly, mistakes=())
    verdict = grade(exercise, lambda grad, x, y: grad * x)
    assert verdict.verdict == INCORRECT
    assert "finite differences give" in verdict.message


def test_sheet_is_written_and_graded(tmp_path, capsys):
    sheet = tmp_path / "mine.py"
    assert main([str(sheet), "--write"]) == 0
    assert main([str(sheet), "--write"]) == 1  # an existing file is not overwritten
    assert "existing" in capsys.readouterr().err
    assert main([str(sheet)]) == 1
    out = capsys.readouterr().out
    assert out.count(NOT_IMPLEMENTED) == len(EXERCISES)
    assert f"0 of {len(EXERCISES)} correct" in out
    text = sheet.read_text(encoding="utf-8")
    sheet.write_text(text.replace("raise NotImplementedError", "return grad * (x > 0)"), encoding="utf-8")
    assert main([str(sheet), "--only", "relu"]) == 0
    assert main([str(sheet), "--only", "relus"]) == 1
    assert main([str(tmp_path / "nothing.py")]) == 1
    for code, error in (("1 +", "SyntaxError"), ("raise SystemExit(0)", "SystemExit: 0")):
        sheet.write_text(code, encoding="utf-8")
        assert main([str(sheet)]) == 1
        assert error in capsys.readouterr().err


def test_module_runs_as_a_program(tmp_path):
    assert main([str(tmp_path / "mine.py"), "--write"]) == 0
    done = call("-m", "tricycle_lab.exercises", tmp_path / "mine.py")
    assert done.returncode == 1
    assert "softmax        not implemented" in done.stdout
