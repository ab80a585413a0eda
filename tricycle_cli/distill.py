"""Distill a pretrained teacher into a smaller student model.

The student is trained on the same texts as in `tricycle train`, to predict the teacher's probabilities of each next
token (Hinton et al. 2015). The student has the teacher's tokenizer, and any shape. `--resume RUN-FOLDER` resumes a run.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from tricycle.configs import PRESETS, GPTConfig
from tricycle.configs.validated import OneOf
from tricycle.distributed.processes import ProcessGroup
from tricycle.finetuning.distillation import distillation_loss
from tricycle.pretrained import Pretrained
from tricycle.system.files import read_json_object
from tricycle.training import train
from tricycle.training_state import TrainingState
from tricycle_cli.distributed import parse_on_all_ranks
from tricycle_cli.finetune import fingerprint
from tricycle_cli.flags import parse
from tricycle_cli.models import load_model
from tricycle_cli.run import Run
from tricycle_cli.session import open_session
from tricycle_cli.task import read_stored_flags
from tricycle_cli.train import Arguments as TrainArguments
from tricycle_cli.train import ResumeArguments, Tokenisers, TrainTask, parse_resume, read_run, resolve_arguments

DESCRIPTION = __doc__ or ""


@dataclass(frozen=True)
class Arguments(TrainArguments):
    """The flags of `tricycle distill`."""

    teacher: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TEACHER")] = ""
    """the teacher: a model, as in `tricycle generate`"""
    preset: Annotated[OneOf[str, PRESETS], tyro.conf.arg(name="student-preset")] = "laptop"
    """preset of the student's settings"""
    temperature: float = 2.0
    """the logits of both models are divided by it; higher values give small probabilities more weight"""
    hard_weight: float = 0.1
    """weight of the cross-entropy with the text, 0 to 1; the distillation loss has the remaining weight"""
    tokeniser: tyro.conf.Suppress[Tokenisers] = "own"
    init_from: tyro.conf.Suppress[str | None] = None
    find_learning_rate: tyro.conf.Suppress[bool] = False


DISTILL_FLAGS = ("teacher", "temperature", "hard_weight")
N_ARRAYS = 5  # of the logits' size: both models' logits and log-softmaxes, and the teacher's probabilities


def main(args: Sequence[str] | None = None) -> int:
    """Run `tricycle distill`: train a student in a run folder; `args` defaults to sys.argv[1:]; return 0."""
    words = sys.argv[1:] if args is None else list(args)
    with open_session(partial(new_task, words)) as session:
        session.finished = train(**session.state.train_arguments(), session=session)
    return 0


def new_task(words: Sequence[str], processes: ProcessGroup) -> DistillTask:
    """Parse a command line; return the task that resumes a run, or starts one with the loaded teacher's vocab_size.

    Raises:
        ValueError, FileNotFoundError: a wrong command line or run folder, before any file is written.
    """
    resumed = parse_resume(words, processes, read_distillation)
    if resumed is not None:
        return DistillTask(Arguments(), resumed)
    arguments = resolve_arguments(parse_on_all_ranks(processes, lambda: parse_arguments(words)), words, processes)
    check_arguments(arguments)
    teacher = load_model(arguments.teacher, device=arguments.device)
    config, size, longest = arguments.config, teacher.model.config.vocab_size, teacher.model.config.context_window
    if config.vocab_size not in (size, PRESETS[arguments.preset]().vocab_size):
        raise ValueError(f"expected the teacher's --vocab-size, {size}, got {config.vocab_size}")
    if config.context_window > longest:
        raise ValueError(f"expected --context-window of at most {longest}, the teacher's, got {config.context_window}")
    config = replace(config, vocab_size=size)
    return DistillTask(replace(arguments, config=config), None, teacher)


def parse_arguments(words: Sequence[str]) -> Arguments:
    """Parse a command line, with config defaults of --student-preset; print an error and exit (2) if it is wrong."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--student-preset", "--student_preset", nargs="?")
    preset = first.parse_known_args(list(words))[0].student_preset
    preset = preset if preset in PRESETS else Arguments.preset  # `parse` below reports a wrong or missing one
    config = GPTConfig.from_dict(PRESETS[preset]().to_dict())
    return parse(Arguments, Arguments(preset=preset, config=config), words, description=DESCRIPTION)


def check_arguments(arguments: Arguments) -> None:
    """Raise ValueError unless a teacher is given, temperature is above 0, and hard_weight is from 0 to 1."""
    if not arguments.teacher:
        raise ValueError("expected a teacher, or --resume with a run folder")
    if not arguments.config.is_decoder:
        raise ValueError(f"expected --student-preset of a decoder, got {arguments.preset}, an encoder-decoder")
    if not 0 < arguments.temperature < math.inf or not 0 <= arguments.hard_weight <= 1:
        got = f"{arguments.temperature} and {arguments.hard_weight}"
        raise ValueError(f"expected --temperature above 0 and --hard-weight from 0 to 1, got {got}")


def read_distillation(folder: Path) -> tuple[Arguments, str]:
    """Return arguments and text digest of a `tricycle distill` run folder; ValueError, FileNotFoundError if none."""
    stored, digest = read_run(folder, "distill")
    own = read_stored_flags(folder / "data.json", "distill", Arguments(), DISTILL_FLAGS)
    arguments = Arguments(**{field.name: getattr(stored, field.name) for field in fields(stored)}, **own)
    check_arguments(arguments)
    return arguments, digest


class DistillTask(TrainTask):
    """Training of a student on a corpus and the probabilities of a teacher.

    Attributes:
        teacher: the teacher with its tokenizer; None until it is loaded.
        teacher_digest: the digest of the teacher's weights when the run was started.
    """

    command = "distill"

    def __init__(
        self, arguments: Arguments, resumed: ResumeArguments | None, teacher: Pretrained | None = None
    ) -> None:
        super().__init__(arguments, resumed)
        self.teacher, self.teacher_digest = teacher, ""

    @property
    def name(self) -> str:
        """Return the first part of a new run folder's name, the teacher's name and "-distilled"."""
        return f"{Path(self.arguments.teacher).stem}-distilled"

    def read(self, folder: Path) -> tuple[TrainArguments, str]:
        """Return a run folder's arguments and the digest of its text; set `teacher_digest` from its data.json."""
        self.teacher_digest = read_json_object(folder / "data.json").get("base", "")
        return read_distillation(folder)

    def describe(self) -> dict[str, Any]:
        """Return the content of data.json as a dict, without the digest of the text ("corpus")."""
        own = {name: getattr(self.arguments, name) for name in DISTILL_FLAGS}
        if Path(own["teacher"]).exists():
            own["teacher"] = str(Path(own["teacher"]).resolve())
        return {**super().describe(), "command": self.command, "distill": own, "base": self.teacher_digest}

    def prepare(self, run: Run) -> TrainingState:
        """Load teacher, text and student; return the state with distillation loss; ValueError if teacher changed."""
        arguments = self.arguments
        self.teacher = self.teacher or load_model(arguments.teacher, device=arguments.device)
        print(f"teacher: {arguments.teacher}, {self.teacher.model.n_parameters:,} parameters")
        digest = fingerprint(self.teacher.model)
        if self.teacher_digest not in ("", digest):
            got = f"a changed {arguments.teacher}"
            raise ValueError(f"{run.folder}: expected the teacher that the run was started with, got {got}")
        self.teacher_digest = digest
        state = super().prepare(run)
        teacher, temperature, hard_weight = self.teacher.model, arguments.temperature, arguments.hard_weight
        state.batch_loss = distillation_loss(state.model, teacher, temperature, hard_weight)
        return state

    def needed_memory(self, config: GPTConfig) -> int:
        """Return the minimum number of bytes that training needs, with the logits and softmaxes of both models."""
        n_logits = config.batch_size * config.context_window * config.vocab_size
        return super().needed_memory(config) + N_ARRAYS * 4 * n_logits

    def first_tokeniser(self, run: Run, has_last: bool) -> Any:
        """Return the tokenizer of the last checkpoint if there is one, else the teacher's."""
        teacher: Any = self.teacher  # `prepare` has loaded it
        return super().first_tokeniser(run, has_last) if has_last else teacher.tokeniser

    def title(self, state: TrainingState) -> str:
        """Return the title of the loss curve, which ends in "training: the distillation loss"."""
        return f"{super().title(state)}; training: the distillation loss"
