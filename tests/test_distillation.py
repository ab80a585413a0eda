"""Distillation: the loss and its gradient; kills are in tests/chaos."""

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
from tiny_models import write_folder

from tricycle.configs import DebugConfig
from tricycle.finetuning.distillation import _soft_loss, distillation_loss
from tricycle.gradcheck import gradcheck
from tricycle.models import GPT
from tricycle.pretrained import load
from tricycle.tensor import Tensor
from tricycle_cli.distill import main as distill
from tricycle_cli.finetune import main as finetune
from tricycle_cli.run import read_metrics
from tricycle_cli.train import main as train

CONFIG = DebugConfig(vocab_size=60, context_window=8, embedding_dim=16, n_layers=1, n_heads=2, dropout=0.0, seed=1)
TEACHER = DebugConfig(vocab_size=60, context_window=12, embedding_dim=24, n_layers=2, n_heads=2, dropout=0.0, seed=2)


def batches(n, seed=0):
    tokens = np.random.default_rng(seed).integers(0, 60, (n, 3, 9))
    return [(some[:, :-1], some[:, 1:]) for some in tokens]


def spread(model, scale=20.0):
    """Make a model's predictions far from uniform."""
    for _, parameter in model.named_parameters():
        if parameter.ndim == 2:
            parameter.array *= scale
    return model


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.mark.parametrize(("temperature", "hard_weight"), [(2.0, 0.0), (1.0, 0.3), (4.0, 1.0)])
def test_loss_mixes_soft_and_hard_targets(temperature, hard_weight):
    student, teacher = GPT(CONFIG), spread(GPT(TEACHER))
    (batch,) = batches(1)
    loss = float(distillation_loss(student, teacher, temperature, hard_weight)(batch, 0.5))
    s, t = (model(Tensor(batch[0], False)).array.astype(np.float64) for model in (student, teacher))
    p, q = log_softmax(t / temperature), log_softmax(s / temperature)
    soft = (np.exp(p) * (p - q)).sum(-1).mean() * temperature**2
    hard = -np.take_along_axis(log_softmax(s), batch[1][..., None], -1).mean()
    assert loss == pytest.approx(0.5 * ((1 - hard_weight) * soft + hard_weight * hard), rel=1e-5)
    assert soft > 0.1


def test_students_with_experts_have_the_router_loss():
    """With the weight of the text alone, loss and gradients are those of training."""
    losses, gradients = [], []
    (batch,) = batches(1)
    for is_distilled in (True, False):
        student = GPT(replace(CONFIG, n_experts=4, router_loss=0.5)).train()
        batch_loss = distillation_loss(student, GPT(TEACHER), hard_weight=1.0)
        loss = batch_loss(batch, 0.5) if is_distilled else student.loss(*batch, scale=0.5)
        loss.backward()
        losses.append(float(loss))
        gradients.append(student.blocks[0].mlp.router.weights.grad.array)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    np.testing.assert_allclose(*gradients, rtol=1e-4, atol=1e-7)


def test_loss_and_gradient_are_zero_for_equal_predictions():
    teacher = spread(GPT(CONFIG))
    student = GPT(CONFIG)
    student.load_state_dict(teacher.state_dict())
    loss = distillation_loss(student, teacher, 3.0, 0.0)(batches(1)[0], 1.0)
    loss.backward()
    assert abs(float(loss)) < 1e-5
    assert max(np.abs(parameter.grad.array).max() for _, parameter in student.named_parameters()) < 1e-5


def test_soft_loss_gradients_match_finite_differences():
    generator = np.random.default_rng(3)
    logits, target = generator.standard_normal((2, 2, 3, 7)) * 3
    gradcheck(lambda x: _soft_loss(x, target, 2.5, 0.7), [logits])


@pytest.mark.parametrize(
    ("student", "numbers"),
    [
        (CONFIG, (0.0, 0.1)),
        (CONFIG, (-1.0, 0.1)),
        (CONFIG, (2.0, 1.5)),
        (CONFIG, (math.nan, 0.1)),
        (DebugConfig(vocab_size=61), (2.0, 0.1)),
        (DebugConfig(vocab_size=60, context_window=13), (2.0, 0.1)),
    ],
)
def test_invalid_loss_arguments_are_rejected(student, numbers):
    with pytest.raises(ValueError, match="distillation_loss"):
        distillation_loss(GPT(student), GPT(TEACHER), *numbers)


# -------------------------------------------------------------------- the command
WORDS = "--student-preset debug --steps 12 --eval-interval 6 --sample-interval 0 --data text".split()


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("teacher"), context_window=100)


@pytest.fixture(scope="module")
def distilled(teacher, tmp_path_factory):
    folder = tmp_path_factory.mktemp("distilled")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog while it rains. " * 200)
    words = [str(teacher), *WORDS, "--files", str(folder / "text.txt"), "--run-folder", str(folder / "run")]
    assert distill(words) == 0
    return folder / "run", words


def test_student_uses_the_teachers_tokeniser_and_its_loss_falls(distilled, teacher):
    folder, _ = distilled
    data = json.loads((folder / "data.json").read_text())
    assert (data["command"], data["distill"]["teacher"]) == ("distill", str(teacher.resolve()))
    student = load(folder)
    assert student.model.config.vocab_size == load(teacher).model.config.vocab_size
    assert student.tokeniser.encode("the fox") == load(teacher).tokeniser.encode("the fox")
    losses = [line["loss"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]
    assert len(losses) == 12 and losses[-1] < losses[0]


def test_only_distill_resumes_a_distillation(distilled, tmp_path, capsys):
    for command, name in ((train, "train"), (finetune, "finetune")):
        with pytest.raises(ValueError, match=rf"tricycle {name}.*'distill'"):
            command(["--resume", str(distilled[0])])
    (tmp_path / "config.json").write_bytes((distilled[0] / "config.json").read_bytes())
    for started_by, data in (("train", {"data": "python", "files": []}), ("finetune", {"arguments": {}})):
        (tmp_path / "data.json").write_text(json.dumps(data))
        with pytest.raises(ValueError, match=rf"tricycle distill.*'{started_by}'"):
            distill(["--resume", str(tmp_path)])
    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        distill(["--resume", str(tmp_path / "nothing")])
    assert distill(["--resume", str(distilled[0])]) == 0
    assert "resuming after step 12" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--temperature", "0"], "--temperature.*above 0"),
        (["--hard-weight", "1.5"], "--hard-weight.*0 to 1"),
        (["--vocab-size", "999"], "teacher.*--vocab-size"),
        (["--context-window", "200"], "--context-window.*at most 100"),
    ],
)
def test_wrong_flags_are_refused(distilled, tmp_path, flags, message):
    words = [*distilled[1][:-1], str(tmp_path / "run"), *flags]
    with pytest.raises(ValueError, match=message):
        distill(words)
    assert not (tmp_path / "run" / "last.safetensors").exists()


def test_preset_without_a_value_is_refused(distilled, capsys):
    with pytest.raises(SystemExit, match="2"):
        distill([*distilled[1], "--student-preset"])
    assert "Missing value for argument '--student-preset'" in capsys.readouterr().err


def test_resuming_with_another_teacher_is_rejected(distilled, tmp_path):
    write_folder(tmp_path / "other", context_window=100, n_layers=1)
    settings = {"teacher": str(tmp_path / "other"), "temperature": 2.0, "hard_weight": 0.1}
    with pytest.raises(ValueError, match=r"expected the teacher.*got a changed"):
        resume_with(settings, distilled[0], tmp_path / "run")


@pytest.mark.parametrize("settings", [None, [], {"teacher": 3, "temperature": 2.0, "hard_weight": 0.1}])
def test_resuming_with_invalid_distill_settings_is_rejected(distilled, tmp_path, settings):
    with pytest.raises(ValueError, match=r"expected (distill|teacher)"):
        resume_with(settings, distilled[0], tmp_path / "run")


def resume_with(settings, finished, folder):
    """Resume a copy of a run with these settings in its data.json."""
    shutil.copytree(finished, folder)
    data = json.loads((folder / "data.json").read_text())
    (folder / "data.json").write_text(json.dumps({**data, "distill": settings}))
    distill(["--resume", str(folder)])
