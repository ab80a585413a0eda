"""Kill `tricycle finetune` in every phase, resume it, and compare it with an uninterrupted run.

The kinds of runs are LoRA with dropout, preference optimization with LoRA, and preference optimization of all weights.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
from pathlib import Path
from typing import ClassVar

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from tiny_models import write_folder

from .kills import SIGNALS, Trial, check_trial, measure_phases
from .runs import WORDS, TrainingRun

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(os.name != "posix", reason="POSIX signals")]
QUICK = "--steps 8 --eval-interval 4 --learning-rate 0.01 --sample-tokens 4 --context-window 60"
KINDS = {
    "lora": "--rank 3 --lora-dropout 0.2 --accumulation-steps 2",
    "dpo": "--loss dpo --rank 3 --lora-dropout 0.2",
    "full": "--method full --loss dpo",
}


class Tuning(TrainingRun):
    """A run of `tricycle finetune`. `text` is a folder with the model and the data."""

    name: ClassVar[str] = "tricycle finetune"
    module: ClassVar[str] = "finetune"
    phases: ClassVar[dict[str, str]] = {
        "run": "tricycle_cli.finetune:main",
        "reading": "tricycle_cli.finetune:load_examples",
        "reference": "tricycle_cli.finetune:compute_reference_logprobs",
        "first files": "tricycle_cli.finetune:write_run_description",
        "update": "tricycle.training:compute_gradients",
        "evaluation of rows": "tricycle_cli.tuning:HeldOutRows.measure",
        "evaluation of pairs": "tricycle_cli.tuning:HeldOutPairs.measure",
        "checkpoint": "tricycle.training_state:save_checkpoint",
        "adapter": "tricycle_cli.tuning:save_adapter",
        "samples": "tricycle_cli.finetune:write_samples",
        "report": "tricycle_cli.finetune:FinetuneTask.report",
        "plot": "tricycle_cli.finetune:plot_losses",
    }

    @property
    def start_args(self) -> list[str]:
        data = self.text / ("pairs.jsonl" if "dpo" in self.flags else "chat.jsonl")
        arguments = [str(self.text / "model"), "--data", str(data), "--run-folder", str(self.run_folder)]
        return [*arguments, *shlex.split(QUICK), *self.flags]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tuning")
    write_folder(folder / "model", context_window=100)
    generator = random.Random(0)
    conversations, pairs = [], []
    for _ in range(60):
        first, second, third = generator.sample(WORDS, 3)
        question = {"role": "user", "content": f"{first} {second}"}
        good, bad = (
            {"role": "assistant", "content": " ".join([word] * generator.randint(1, 6))} for word in (first, third)
        )
        conversations.append({"messages": [question, good]})
        pairs.append({"prompt": [question], "chosen": [good], "rejected": [bad]})
    for name, values in (("chat", conversations), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(value) + "\n" for value in values))
    return folder


def case_of(place: Path, kind: str, name: str) -> Tuning:
    return Tuning(place / name.replace(" ", "-"), place, tuple(shlex.split(KINDS[kind])))


@pytest.fixture(scope="module")
def reference(place):
    """Return a function from a kind to its uninterrupted run, started at the first call, and the phases of the run."""
    runs: dict[str, tuple[Tuning, set[str]]] = {}

    def run(kind: str) -> tuple[Tuning, set[str]]:
        if kind not in runs:
            case = case_of(place, kind, f"reference {kind}")
            runs[kind] = case, {phase for phase, times in measure_phases(case).items() if times}
        return runs[kind]

    return run


def check(trial: Trial, place: Path, reference, kind: str) -> None:
    alone, phases = reference(kind)
    assert {phase for phase, *_ in trial.moments} <= phases
    check_trial(trial, case_of(place, kind, f"{trial.name} {kind}"), alone)


@pytest.mark.parametrize("kind", KINDS)
def test_finetuning_resumes_equal_after_two_kills(kind, place, reference):
    check(Trial("twice", signal.SIGKILL, [("update", 3, 0.0), ("update", 3, 0.002)]), place, reference, kind)


@pytest.mark.parametrize(
    ("name", "phase", "kind"),
    [
        ("SIGKILL", "reference", "dpo"),
        ("SIGKILL", "first files", "lora"),
        ("SIGKILL", "checkpoint", "lora"),
        ("SIGKILL", "adapter", "dpo"),
        ("SIGTERM", "reference", "full"),
        ("SIGINT", "evaluation of pairs", "full"),
        ("SIGHUP", "update", "lora"),
        ("SIGTERM", "plot", "dpo"),
    ],
)
def test_finetuning_resumes_equal_after_a_signal(name, phase, kind, place, reference):
    check(Trial(f"{name} in {phase}", getattr(signal, name), [(phase, 1, 0.0)]), place, reference, kind)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("phase", Tuning.phases)
def test_finetuning_resumes_equal_after_every_signal_and_phase(phase, kind, place, reference):
    if phase not in reference(kind)[1]:
        pytest.skip("phase of other kinds of runs")
    for number in (signal.SIGKILL, *SIGNALS):
        for delay in (0.0, 0.003):
            trial = Trial(f"{signal.Signals(number).name} in {phase} after {delay}", number, [(phase, 1, delay)] * 2)
            check(trial, place, reference, kind)
