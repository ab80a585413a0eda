"""Train a GPT on text.

Without arguments, train for about ten minutes on the source code of Python's standard library, without network access,
and print the command that generates text with the result. `--resume RUN-FOLDER` resumes a run.
"""

from __future__ import annotations

import argparse
import reprlib
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import numpy as np

from tricycle import devices
from tricycle.checkpoint import load_checkpoint
from tricycle.configs import PRESETS, GPTConfig
from tricycle.configs.validated import OneOf
from tricycle.distributed.processes import ProcessGroup
from tricycle.evaluation import HeldOut
from tricycle.pretrained import Pretrained
from tricycle.system.files import read_json_object
from tricycle.training import train
from tricycle.training_state import TrainingState, new_state, resume_state, training_bytes
from tricycle_cli.distributed import (
    check_batches,
    check_same,
    common_properties,
    on_rank_zero,
    parse_on_all_ranks,
    process_group,
)
from tricycle_cli.find_rate import find_learning_rate
from tricycle_cli.flags import check_conditions, parse
from tricycle_cli.full_disk import OnFullDisk, describe_disk_space
from tricycle_cli.init_from import check_shape, default_config, initialize_from
from tricycle_cli.likelihoods import Pair
from tricycle_cli.made_tasks import NAMES as TASK_NAMES
from tricycle_cli.made_tasks import TaskName, make_task
from tricycle_cli.models import load_model, use_gpu
from tricycle_cli.multiple_choice import Item, score_items, summarize
from tricycle_cli.run import OnNaN, Run
from tricycle_cli.session import new_folder, open_session
from tricycle_cli.signals import Signals
from tricycle_cli.streams import tolerant_streams
from tricycle_cli.task import check_command, claim_new_folder, contains_run, write_run_description
from tricycle_cli.text_task import TextTask
from tricycle_cli.trackers import NAMES, TrackerName, check_trackers
from tricycle_cli.updates import advise_on_memory, check_training_memory
from tricycle_datasets.corpora import CORPORA, load_corpus
from tricycle_datasets.gpt2 import gpt2_tokeniser
from tricycle_lab.head_scores import score_heads

DESCRIPTION = __doc__ or ""
TASK_ITEMS = 100  # of each of --evaluate-tasks
Tokenisers = Literal["own", "portable", "gpt2"]


@dataclass(frozen=True)
class Arguments:
    """The flags of `tricycle train`."""

    preset: OneOf[str, PRESETS] = "laptop"
    """preset of all settings; by default "smol" on a GPU, else "laptop" """
    data: OneOf[str, CORPORA] = "python"
    """the training text: Python's standard library, tiny Shakespeare, the text of --files, or a streamed corpus"""
    files: tuple[Path, ...] = ()
    """text files, or folders of text files, for --data text"""
    tokeniser: Tokenisers = "own"
    """"own": trained on the text; "portable": the same with GPT-2's splitting rule, for export to other programs (the
    default of the preset "portable"); "gpt2": GPT-2's tokenizer of 50257 tokens"""
    init_from: str | None = None
    """initialize from a model, as in `tricycle generate`: its shape, weights and tokenizer, and lower learning rates"""
    run_folder: Path | None = None
    """the folder for the files of the run; by default a new folder in runs/"""
    on_nan: OnNaN = "skip"
    """when a loss or gradient is NaN or infinite: "stop" the run, "skip" the update, or "rollback" to the last
    checkpoint"""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """where to compute; "auto" uses a GPU if one is available"""
    on_full_disk: OnFullDisk = "wait"
    """when the disk is full: wait for free space, or stop; saved checkpoints stay intact in both cases"""
    shard_optimiser: bool = False
    """with mpiexec: shard the optimizer state over the ranks, which saves memory"""
    track: tuple[TrackerName, ...] = ()
    """experiment trackers that get the content of metrics.jsonl; each needs an extra of this package"""
    evaluate_tasks: tuple[TaskName, ...] = ()
    """tasks whose accuracy is part of each evaluation, as in `tricycle evaluate --task`"""
    score_heads: bool = False
    """record scores of the best heads in each evaluation, for `tricycle inspect scores`"""
    find_learning_rate: bool = False
    """run a learning-rate range test in place of training: plot the losses, and suggest a learning rate"""
    config: GPTConfig = field(default_factory=GPTConfig)


A = TypeVar("A", bound=Arguments)


@dataclass(frozen=True)
class ResumeArguments:
    """The flags of `tricycle train --resume`; all other settings are those of the run."""

    resume: Path
    """the folder of the run, which resumes from its last checkpoint"""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """where to compute"""
    on_full_disk: OnFullDisk = "wait"
    """when the disk is full: wait for free space, or stop; saved checkpoints stay intact in both cases"""
    on_nan: OnNaN | None = None
    """when a loss or gradient is NaN or infinite: "stop", "skip" or "rollback"; by default as before"""
    shard_optimiser: bool = False
    """with mpiexec: shard the optimizer state over the ranks, which saves memory"""
    track: tuple[TrackerName, ...] | None = None
    """experiment trackers from now on, which also get the earlier metrics; --track without a name ends tracking"""


def main(args: Sequence[str] | None = None) -> int:
    """Start or resume a run, or run a --find-learning-rate range test, by `args` (None: sys.argv); return 0."""
    words = sys.argv[1:] if args is None else list(args)
    if any(word.replace("_", "-") == "--find-learning-rate" for word in words):
        return run_range_test(words)
    with open_session(partial(new_task, words)) as session:
        session.finished = train(**session.state.train_arguments(), session=session)
    return 0


def run_range_test(words: Sequence[str]) -> int:
    """Run a learning-rate range test with the command line's model and text; write plot and table; return 0.

    Raises:
        ValueError: several processes.
    """
    with tolerant_streams(), Signals(), process_group() as processes:
        arguments, start = parse_on_all_ranks(processes, lambda: parse_arguments(words))
        if processes.size > 1:
            raise ValueError(f"expected one process with --find-learning-rate, got {processes.size}")
        others = "on_nan on_full_disk shard_optimiser track evaluate_tasks score_heads"
        check_conditions(arguments, {"no --find-learning-rate": (False, others)})
        arguments = resolve_arguments(arguments, words, processes)
        task = TrainTask(arguments, None, start)
        config, on_gpu = arguments.config, use_gpu(arguments.device)
        folder = arguments.run_folder or new_folder(f"learning-rate-{arguments.preset}-{arguments.data}")
        with advise_on_memory(on_gpu, task.memory_advice(config, on_gpu)):
            check_training_memory(training_bytes(config), on_gpu)
            tokeniser = gpt2_tokeniser() if arguments.tokeniser == "gpt2" else start and start.tokeniser
            corpus = task.load_corpus(tokeniser)
            model = None if start is None else initialize_from(start.model, config)
            find_learning_rate(config, corpus.train, model, on_gpu, folder)
    return 0


def new_task(words: Sequence[str], processes: ProcessGroup) -> TrainTask:
    """Parse a command line into the task that starts or resumes a run; load only an --init-from model, no data.

    Raises:
        ValueError, FileNotFoundError: a wrong command line or run folder, before any file is written.
    """
    resumed = parse_resume(words, processes, read_run)
    if resumed is not None:
        return TrainTask(Arguments(), resumed)
    arguments, start = parse_on_all_ranks(processes, lambda: parse_arguments(words))
    return TrainTask(resolve_arguments(arguments, words, processes), None, start)


def parse_resume(words: Sequence[str], processes: ProcessGroup, read: Callable[[Path], Any]) -> ResumeArguments | None:
    """Return a resumed run's flags after `read` checks its folder, or None; ValueError if ranks differ."""
    check_same(processes, {"command line": list(words), **common_properties()} if processes.size > 1 else {})
    if not any(word.split("=")[0] == "--resume" for word in words):
        return None
    resumed = parse_on_all_ranks(processes, lambda: parse(ResumeArguments, args=words, description="Resume a run."))
    on_rank_zero(processes, lambda: read(resumed.resume))
    return resumed


def resolve_arguments(arguments: A, words: Sequence[str], processes: ProcessGroup) -> A:
    """Check flags, trackers and device, or raise; return a copy with accumulation_steps times the number of ranks."""
    if not arguments.files and any(word.split("=")[0] == "--files" for word in words):
        raise ValueError("expected files or folders after --files, got none")
    on_rank_zero(processes, lambda: check_trackers(arguments.track))
    use_gpu(arguments.device)
    run_description(arguments)
    config = replace(arguments.config, accumulation_steps=processes.size * arguments.config.accumulation_steps)
    return replace(arguments, config=config)


def run_description(arguments: Arguments) -> dict[str, Any]:
    """Return the content of data.json (text, tokenizer, initial model, ...); raise ValueError if flags conflict."""
    if arguments.data == "text" and not arguments.files:
        raise ValueError("expected --files with --data text, got none")
    if arguments.data != "text" and arguments.files:
        raise ValueError(f"expected --files only with --data text, got --data {arguments.data}")
    if arguments.tokeniser != "own" and arguments.init_from:
        rule = "no --tokeniser with --init-from (the model has a tokenizer)"
        raise ValueError(f"expected {rule}, got {arguments.tokeniser}")
    if arguments.tokeniser == "gpt2" and arguments.config.vocab_size != 50_257:
        raise ValueError(f"expected --vocab-size 50257 with --tokeniser gpt2, got {arguments.config.vocab_size}")
    if arguments.evaluate_tasks and not arguments.config.is_decoder:
        raise ValueError("expected no --evaluate-tasks with an encoder-decoder, whose continuations they do not score")
    description: dict[str, Any] = {"data": arguments.data, "files": [str(path.resolve()) for path in arguments.files]}
    description |= {"tokeniser": arguments.tokeniser, "on_nan": arguments.on_nan}
    optional = {name: getattr(arguments, name) for name in ("track", "evaluate_tasks", "score_heads")}
    description |= {name: value for name, value in optional.items() if value}
    if arguments.init_from:
        path = Path(arguments.init_from)
        description["init_from"] = str(path.resolve()) if path.exists() else arguments.init_from
    return description


def parse_arguments(args: Sequence[str]) -> tuple[Arguments, Pretrained | None]:
    """Parse a new run's command line, with defaults of preset or --init-from; return it, and that loaded model or None.

    Raises:
        ValueError: a flag contradicts the model of --init-from.
    """
    default, loaded = default_arguments(args)
    arguments = parse(Arguments, default, args, description=DESCRIPTION)
    if loaded is not None:
        check_shape(loaded.model, arguments.config)
    return arguments, loaded


def default_arguments(args: Sequence[str]) -> tuple[Arguments, Pretrained | None]:
    """Return the values of flags that a new run's command line does not set, and the model of --init-from or None.

    They depend on the preset or on the model of --init-from, which are parsed first.

    Raises:
        ValueError: a preset and --init-from.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", nargs="?")  # `parse` reports a missing value
    first.add_argument("--device", nargs="?")
    first.add_argument("--init-from", "--init_from", nargs="?")
    known = first.parse_known_args(args)[0]
    if known.init_from:
        if known.preset:
            raise ValueError(f"expected no --preset with --init-from, got {known.preset}")
        loaded = load_model(known.init_from, device="cpu")
        return Arguments(init_from=known.init_from, config=default_config(loaded.model)), loaded
    preset = known.preset
    if preset not in PRESETS:  # missing or wrong; `parse` reports a wrong one
        preset = "smol" if known.device != "cpu" and devices.gpu_problem() is None else "laptop"
    config = GPTConfig.from_dict(PRESETS[preset]().to_dict())  # the fields of GPTConfig have the help texts
    data = "shakespeare" if preset == "shakespeare" else "python"
    tokeniser: Tokenisers = "portable" if preset == "portable" else "own"
    return Arguments(preset=preset, data=data, tokeniser=tokeniser, config=config), None


# -------------------------------------------------------------------- the task
class TrainTask(TextTask):
    """Training of a GPT on a corpus.

    Attributes:
        resumed: the flags of a resumed run; None for a new run.
        start: the model of --init-from for a new run.
        digest: the digest of the text that a resumed run was trained on; "" if unknown.
        tasks: the items of --evaluate-tasks by the task's name, as of `make_task`.
        first_token: with --score-heads, the token before each text on which heads are scored.
    """

    command = "train"

    def __init__(self, arguments: Arguments, resumed: ResumeArguments | None, start: Pretrained | None = None) -> None:
        super().__init__(arguments, arguments.run_folder if resumed is None else resumed.resume)
        self.resumed, self.start, self.digest = resumed, start, ""
        self.tasks: dict[str, tuple[list[Item], list[list[Pair]]]] = {}
        self.first_token: int | None = None

    @property
    def name(self) -> str:
        """Return the first part of a new run folder's name: preset, or --init-from model, and data, joined by "-"."""
        arguments = self.arguments
        return f"{Path(arguments.init_from or arguments.preset).stem}-{arguments.data}"

    def claim_folder(self, folder: Path, processes: ProcessGroup) -> None:
        """Raise ValueError if a new run's folder has a run; if resumed, check it, set `arguments` and `digest`."""
        if self.resumed is None:
            on_rank_zero(processes, lambda: claim_new_folder(folder))
            return
        stored, self.digest = on_rank_zero(processes, lambda: self.read(folder))
        check_batches(processes, stored.config.accumulation_steps, stored.config.batch_size)
        given = {name: getattr(self.resumed, name) for name in ("device", "on_full_disk", "shard_optimiser")}
        given |= {name: value for name in ("on_nan", "track") if (value := getattr(self.resumed, name)) is not None}
        self.arguments = replace(stored, **given)
        on_rank_zero(processes, lambda: check_trackers(self.arguments.track))

    def read(self, folder: Path) -> tuple[Arguments, str]:
        """Return a run's (arguments, digest of its text or ""); FileNotFoundError or ValueError if it is not one."""
        return read_run(folder)

    def describe(self) -> dict[str, Any]:
        """Return data.json's content as a dict, without the text's digest ("corpus"); ValueError if flags conflict."""
        return run_description(self.arguments)

    def prepare(self, run: Run) -> TrainingState:
        """Load text, write config.json and data.json; return a new or resumed state; ValueError if the text changed."""
        arguments, config, processes = self.arguments, self.arguments.config, run.processes
        on_gpu = use_gpu(arguments.device)
        with advise_on_memory(on_gpu, self.memory_advice(config, on_gpu)):
            check_training_memory(self.needed_memory(config), on_gpu)  # before the text is loaded
        has_last = run.has(run.last)
        if arguments.init_from and not has_last and self.start is None:
            self.start = load_model(arguments.init_from, device="cpu")
        print(f"data: {arguments.data} (tokenized once, then cached)")
        corpus = self.load_corpus(self.first_tokeniser(run, has_last))
        run.tokeniser = tokeniser = corpus.tokeniser
        device = "a GPU" if on_gpu else "the CPU"
        check_same(processes, {"text": corpus.digest, "config": config.to_dict(), "device": device})
        if has_last and (self.digest or corpus.digest) != corpus.digest:
            advice = f"--init-from {shlex.quote(run.last.as_posix())} starts a new run with its weights"
            got = f"a changed text; {advice}"
            raise ValueError(f"{run.folder}: expected the text that the run was started with, got {got}")
        for task in arguments.evaluate_tasks:
            self.tasks[task] = make_task(task, tokeniser, config.context_window, TASK_ITEMS)
        description = {**self.describe(), "corpus": corpus.digest}
        on_rank_zero(processes, lambda: write_run_description(run.folder, config, description, tokeniser))
        self.prompts, self.held_out_bytes = CORPORA[arguments.data].prompts, corpus.validation_bytes
        # end-of-text tokens before the first token let the model predict the first token, too
        n_context = getattr(config, "source_tokens", 1)
        tokens = np.concatenate([[tokeniser.end_of_text] * n_context, corpus.validation])
        self.held_out = HeldOut(tokens, len(self.held_out_bytes), n_context)
        state = self.new_state(run, corpus.train, on_gpu, has_last)
        if arguments.score_heads:
            self.first_token = tokeniser.end_of_text
            score_heads(state.model, start=self.first_token)  # a model that cannot be scored fails before training
        if processes.is_rank_zero:
            self._print_summary(state, run, tokeniser, on_gpu)
        return state

    def measure(self, state: TrainingState) -> dict[str, float]:
        """Return the metrics of held-out text, the accuracy in each of `tasks`, and with --score-heads the best scores.

        "induction_score", for example, is that of the head with the largest score.
        """
        metrics = super().measure(state)
        for name, (items, pairs) in self.tasks.items():
            scores = score_items(state.model, items, pairs, state.config.batch_size)
            metrics[f"{name}_accuracy"] = summarize(scores)["accuracy"]
        if self.arguments.score_heads:
            for name, values in score_heads(state.model, start=self.first_token)._asdict().items():
                metrics[f"{name}_score"] = float(values.max())
        return metrics

    def format_metrics(self, metrics: Mapping[str, float]) -> str:
        """Format the metrics of held-out text, accuracies such as ", induction 25%", and the best induction score."""
        others = [f", {name} {100 * metrics[f'{name}_accuracy']:.0f}%" for name in self.tasks]
        if self.arguments.score_heads:
            others.append(f", best induction head {metrics['induction_score']:.2f}")
        return super().format_metrics(metrics) + "".join(others)

    def needed_memory(self, config: GPTConfig) -> int:
        """Return the minimum number of bytes that training needs."""
        return training_bytes(config)

    def load_corpus(self, tokeniser: Any) -> Any:
        """Return the corpus of the arguments' data as tokens; None as tokenizer trains one on the text."""
        arguments = self.arguments
        files = [path.resolve() for path in arguments.files]
        split = "gpt2" if arguments.tokeniser == "portable" else "tricycle"
        return load_corpus(arguments.data, files, arguments.config.vocab_size, tokeniser, split)

    def new_state(self, run: Run, tokens: Any, on_gpu: bool, has_last: bool) -> TrainingState:
        """Return the training state of a new run, or of the last checkpoint if `has_last`."""
        config, shard = self.arguments.config, self.arguments.shard_optimiser
        if has_last:
            return resume_state(run.last, tokens, on_gpu, run.processes, shard)
        model = None if self.start is None else initialize_from(self.start.model, config)
        return new_state(config, tokens, on_gpu, model, run.processes, shard)

    def first_tokeniser(self, run: Run, has_last: bool) -> Any:
        """Return the tokenizer of the last checkpoint (ValueError if none), --init-from or GPT-2; None to train one."""
        if has_last:
            checkpoint = on_rank_zero(run.processes, lambda: load_checkpoint(run.last))
            tokeniser = checkpoint.tokeniser()
            if tokeniser is None:
                raise ValueError(f"{run.last}: expected a checkpoint with a tokenizer, got one without")
            if checkpoint.config != self.arguments.config:
                path = run.folder / "config.json"
                raise ValueError(f"{path}: expected the config of its checkpoint, got another")
            return tokeniser
        if self.start is not None:
            return self.start.tokeniser
        return gpt2_tokeniser() if self.arguments.tokeniser == "gpt2" else None

    def tracked_settings(self, state: TrainingState) -> dict[str, Any]:
        """Return "data" (its name), "n_parameters" and the config's fields in one dict, which trackers record."""
        return {"data": self.arguments.data, "n_parameters": state.model.n_parameters, **state.config.to_dict()}

    def _print_summary(self, state: TrainingState, run: Run, tokeniser: Any, on_gpu: bool) -> None:
        """Print the sizes of the model and the data, the run folder, and the disk space that it needs."""
        config, n_held_out = state.config, len(self.held_out.tokens) - self.held_out.n_context
        print(
            f"model: {state.model.n_parameters:,} parameters on the {'GPU' if on_gpu else 'CPU'}; "
            f"{len(state.dataset.tokens):,} training tokens, {n_held_out:,} held-out tokens "
            f"({self.held_out.n_bytes:,} bytes)"
        )
        if run.processes.size > 1:
            n_batches, size = config.accumulation_steps, config.batch_size
            print(f"update: {n_batches} batches of {size} sequences, distributed over {run.processes.size} ranks")
        print(f"run folder: {run.folder}" + (f" (resuming after step {state.step})" if state.step else ""))
        print(f"disk space: {describe_disk_space(state, tokeniser, run.folder)} for the run folder")


def read_run(folder: Path, command: str = "train") -> tuple[Arguments, str]:
    """Read the arguments and text digest ("" if unknown) of a run; FileNotFoundError or ValueError if invalid.

    Raises:
        FileNotFoundError, ValueError: the folder is not of a run of this command.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: expected a run folder, there is no such folder")
    found = []
    for path in (folder / "config.json", folder / "data.json"):
        if not path.is_file():
            hint = "" if contains_run(folder) else ". It contains no training progress: start again without --resume"
            raise FileNotFoundError(f"{folder}: expected a run folder, got one without {path.name}{hint}")
        found.append(read_json_object(path))
    config, data = found
    check_command(folder, data, command)
    files: Any = data.get("files")
    track = data.get("track", [])
    are_paths = isinstance(files, list) and all(isinstance(name, str) for name in files)
    # in a list: a value such as [] cannot be looked up in a dict
    is_known = data.get("data") in [*CORPORA] and data.get("on_nan", "skip") in get_args(OnNaN)
    are_trackers = isinstance(track, list) and all(name in NAMES for name in track)
    tasks = data.get("evaluate_tasks", [])
    are_tasks = isinstance(tasks, list) and all(name in TASK_NAMES for name in tasks)
    are_flags = isinstance(data.get("score_heads", False), bool) and isinstance(data.get("init_from", ""), str)
    if not (is_known and are_paths and are_trackers and are_tasks and are_flags):
        got = reprlib.repr(data)
        raise ValueError(f"{folder / 'data.json'}: expected data and files as a run writes them, got {got}")
    same = {name: data[name] for name in ("data", "tokeniser", "on_nan", "init_from", "score_heads") if name in data}
    several: Any = {"files": tuple(map(Path, files)), "track": tuple(track), "evaluate_tasks": tuple(tasks)}
    arguments = Arguments(**same, **several, config=GPTConfig.from_dict(config))
    return arguments, data.get("corpus", "")
