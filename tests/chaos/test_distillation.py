"""Kill and interrupt `tricycle distill` in its phases, resume it, and compare it with an uninterrupted run."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import ClassVar

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from tiny_models import write_folder

from .kills import Trial, check_trial, measure_phases
from .runs import PHASES, TINY, TrainingRun, write_text

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(os.name != "posix", reason="POSIX signals")]


class Distillation(TrainingRun):
    """A run of `tricycle distill`. `text` is a folder with the teacher and the text."""

    name: ClassVar[str] = "tricycle distill"
    module: ClassVar[str] = "distill"
    phases: ClassVar[dict[str, str]] = {
        **PHASES,
        "run": "tricycle_cli.distill:main",
        "teacher": "tricycle_cli.distill:load_model",
    }

    @property
    def start_args(self) -> list[str]:
        tiny = ["--student-preset" if word == "--preset" else word for word in TINY]
        files = ["--files", str(self.text / "text.txt"), "--run-folder", str(self.run_folder)]
        return [str(self.text / "model"), *tiny, *files, *self.flags]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("distillation")
    write_folder(folder / "model", context_window=100)
    write_text(folder / "text.txt")
    return folder


@pytest.fixture(scope="module")
def reference(place) -> Distillation:
    """Return a finished, uninterrupted run."""
    case = Distillation(place / "reference", place)
    assert {"teacher", "update", "evaluation", "checkpoint"} <= {
        phase for phase, times in measure_phases(case).items() if times
    }
    return case


@pytest.mark.parametrize(
    ("number", "moments"),
    [
        (signal.SIGKILL, [("update", 3, 0.0), ("update", 3, 0.002)]),
        (signal.SIGKILL, [("checkpoint", 2, 0.0)]),
        (signal.SIGTERM, [("teacher", 1, 0.0)]),
        (signal.SIGINT, [("evaluation", 1, 0.0)]),
    ],
)
def test_resumed_run_is_equal_bit_for_bit(number, moments, place, reference):
    trial = Trial(f"{number} in {moments[0][0]} {len(moments)}", number, moments)
    check_trial(trial, Distillation(place / trial.name.replace(" ", "-"), place), reference)
