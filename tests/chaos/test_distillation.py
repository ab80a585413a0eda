"""`tricycle distill` is killed and interrupted in every phase, and goes on as if nothing had happened."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import ClassVar

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from tiny_models import write_folder

from .kills import Trial, perform, profile_of
from .runs import PHASES, TINY, Case, write_text

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(os.name != "posix", reason="POSIX signals")]
PATIENT = 30.0  # seconds: machines that test many things at once are slow


class Distillation(Case):
    """A run of `tricycle distill`. `text` is a folder with the teacher and the text."""

    name: ClassVar[str] = "tricycle distill"
    module: ClassVar[str] = "distill"
    phases: ClassVar[dict[str, str]] = {
        **PHASES,
        "run": "tricycle_cli.distill:main",
        "teacher": "tricycle_cli.distill:load_model",
    }

    @property
    def words(self) -> list[str]:
        tiny = ["--student-preset" if word == "--preset" else word for word in TINY]
        files = ["--files", str(self.text / "text.txt"), "--run-folder", str(self.run)]
        return [str(self.text / "model"), *tiny, *files, *self.flags]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("distillation")
    write_folder(folder / "model", context_window=100)
    write_text(folder / "text.txt")
    return folder


@pytest.fixture(scope="module")
def whole(place) -> Distillation:
    """A run that is left alone."""
    case = Distillation(place / "whole", place)
    assert {"teacher", "update", "evaluation", "checkpoint"} <= {
        phase for phase, times in profile_of(case).seconds.items() if times
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
def test_a_run_that_is_ended_goes_on_bit_for_bit(number, moments, place, whole):
    trial = Trial(f"{number} in {moments[0][0]} {len(moments)}", number, moments, limit=PATIENT)
    name = trial.name.replace(" ", "-")
    assert perform(trial, Distillation(place / name, place), whole.run).trouble == []
    assert trial.hits  # else nothing was tried
