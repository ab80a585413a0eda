"""Train a GPT on real text, from the first token to samples.

Without arguments it trains for about ten minutes on the source code of Python's standard library, needs no
network, and ends with the command that generates from the result. `--resume RUN-FOLDER` continues a run.
"""

from __future__ import annotations

import argparse
import reprlib
import shlex
import sys
from collections.abc import Callable, Sequence
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
from tricycle_cli.distributed import check_batches, check_same, common_facts, on_rank_zero, parsed, process_group
from tricycle_cli.find_rate import find_rate
from tricycle_cli.flags import parse
from tricycle_cli.full_disk import OnFullDisk, describe_disk_space
from tricycle_cli.init_from import check_shape, default_config, initialize_from, load_base_model
from tricycle_cli.models import use_gpu
from tricycle_cli.run import OnNaN, Run
from tricycle_cli.session import new_folder, open_session
from tricycle_cli.signals import Signals
from tricycle_cli.streams import tolerant_streams
from tricycle_cli.task import claim_new_folder, contains_run, write_run_description
from tricycle_cli.text_task import TextTask
from tricycle_cli.trackers import NAMES, TrackerName, expect_trackers
from tricycle_cli.updates import advise_on_memory, check_training_memory
from tricycle_datasets.corpora import CORPORA, load_corpus
from tricycle_datasets.gpt2 import gpt2_tokeniser

DESCRIPTION = __doc__ or ""
Tokenisers = Literal["own", "portable", "gpt2"]


@dataclass(frozen=True)
class Arguments:
    """What to train, on what, and where to leave it."""

    preset: OneOf[str, PRESETS] = "laptop"
    """initial settings; unless given "smol" on a GPU, else "laptop" """
    data: OneOf[str, CORPORA] = "python"
    """the text: Python's standard library, tiny Shakespeare, your own --files, or a streamed corpus"""
    files: tuple[Path, ...] = ()
    """your own text files or folders of them, for --data text"""
    tokeniser: Tokenisers = "own"
    """learnt from the text; "portable": the same, with GPT-2's way of cutting text, for other programs (the preset
    "portable" has it); "gpt2": GPT-2's own, of 50257 tokens"""
    init_from: str | None = None
    """a model to start from, as `tricycle generate` takes it: gives shape, weights, tokeniser, and gentler defaults"""
    run_folder: Path | None = None
    """where the run leaves its files; without it a new folder in runs/"""
    on_nan: OnNaN = "skip"
    """where a loss or a gradient is NaN or infinite: "stop" ends the run, "skip" leaves that update out, "rollback"
    goes back to the last checkpoint and on from there with other batches"""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """where to compute; "auto" takes a GPU if there is one"""
    on_full_disk: OnFullDisk = "wait"
    """what to do when the disk is full: wait until there is room, or stop; what was saved is whole either way"""
    shard_optimiser: bool = False
    """with mpiexec: what the optimiser remembers of a parameter is kept by one rank alone, which saves memory"""
    track: tuple[TrackerName, ...] = ()
    """trackers of experiments that are told what metrics.jsonl is told, each an extra of this package"""
    find_learning_rate: bool = False
    """make some hundred updates with learning rates that grow, draw the losses, suggest a rate, and train nothing"""
    config: GPTConfig = field(default_factory=GPTConfig)


A = TypeVar("A", bound=Arguments)


@dataclass(frozen=True)
class ResumeArguments:
    """Go on with a run where its last checkpoint stands; all settings are the run's own."""

    resume: Path
    """the run folder"""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """where to compute"""
    on_full_disk: OnFullDisk = "wait"
    """what to do when the disk is full: wait until there is room, or stop; what was saved is whole either way"""
    on_nan: OnNaN | None = None
    """what is done from now on where a loss or a gradient is NaN or infinite: "stop", "skip" or "rollback" """
    shard_optimiser: bool = False
    """with mpiexec: what the optimiser remembers of a parameter is kept by one rank alone, which saves memory"""
    track: tuple[TrackerName, ...] | None = None
    """trackers from now on, which get all that came before, too; --track without a name ends tracking"""


def main(args: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if args is None else list(args)
    if any(word.replace("_", "-") == "--find-learning-rate" for word in words):
        return find(words)
    with open_session(partial(new_task, words)) as session:
        session.finished = train(**session.state.train_arguments(), session=session)
    return 0


def find(words: Sequence[str]) -> int:
    """Run a range test of the learning rate, on the text and with the model of a run that is not begun.

    Raises:
        ValueError: several processes.
    """
    with tolerant_streams(), Signals(), process_group() as processes:
        arguments, start = parsed(processes, lambda: parse_arguments(words))
        if processes.size > 1:
            raise ValueError(f"expected one process with --find-learning-rate, got {processes.size}")
        task = TrainTask(arguments, None, start)
        config, on_gpu = arguments.config, use_gpu(arguments.device)
        folder = arguments.run_folder or new_folder(f"learning-rate-{arguments.preset}-{arguments.data}")
        with advise_on_memory(on_gpu, task.memory_advice(config, on_gpu)):
            check_training_memory(training_bytes(config), on_gpu)
            tokeniser = gpt2_tokeniser() if arguments.tokeniser == "gpt2" else start and start.tokeniser
            corpus = task.load_corpus(tokeniser)
            model = None if start is None else initialize_from(start.model, config)
            find_rate(config, corpus.train, model, on_gpu, folder)
    return 0


def new_task(words: Sequence[str], processes: ProcessGroup) -> TrainTask:
    """Return the run that a command line begins or resumes.

    Raises:
        ValueError, FileNotFoundError: one line about what is wrong, before anything is written.
    """
    resumed = parse_resume(words, processes, read_run)
    if resumed is not None:
        return TrainTask(Arguments(), resumed)
    arguments, start = parsed(processes, lambda: parse_arguments(words))
    return TrainTask(checked(arguments, words, processes), None, start)


def parse_resume(words: Sequence[str], processes: ProcessGroup, read: Callable[[Path], Any]) -> ResumeArguments | None:
    """Return the command line that resumes a run, whose folder `read` accepts; None where it begins a new one."""
    check_same(processes, {"command line": list(words), **common_facts()} if processes.size > 1 else {})
    if not any(word.split("=")[0] == "--resume" for word in words):
        return None
    resumed = parsed(processes, lambda: parse(ResumeArguments, args=words, description="Resume a run."))
    on_rank_zero(processes, lambda: read(resumed.resume))
    return resumed


def checked(arguments: A, words: Sequence[str], processes: ProcessGroup) -> A:
    """Return the arguments of a new run, with the batches of all processes in an update.

    Raises:
        ValueError, RuntimeError: flags that do not go together, or a tracker or a device that cannot be used.
    """
    if not arguments.files and any(word.split("=")[0] == "--files" for word in words):
        raise ValueError("expected files or folders after --files, got none")
    on_rank_zero(processes, lambda: expect_trackers(arguments.track))
    use_gpu(arguments.device)
    description_of(arguments)
    config = replace(arguments.config, accumulation_steps=processes.size * arguments.config.accumulation_steps)
    return replace(arguments, config=config)


def description_of(arguments: Arguments) -> dict[str, Any]:
    """What a run folder says about its text and its beginning.

    Raises:
        ValueError: flags that do not go together.
    """
    if arguments.data == "text" and not arguments.files:
        raise ValueError("expected --files with --data text, got none")
    if arguments.data != "text" and arguments.files:
        raise ValueError(f"expected --files only with --data text, got --data {arguments.data}")
    if arguments.tokeniser != "own" and arguments.init_from:
        raise ValueError(
            f"expected no --tokeniser with --init-from: the model's own is used, got {arguments.tokeniser}"
        )
    if arguments.tokeniser == "gpt2" and arguments.config.vocab_size != 50_257:
        raise ValueError(f"expected --vocab-size 50257 with --tokeniser gpt2, got {arguments.config.vocab_size}")
    description: dict[str, Any] = {"data": arguments.data, "files": [str(path.resolve()) for path in arguments.files]}
    description["tokeniser"] = arguments.tokeniser
    description["on_nan"] = arguments.on_nan
    if arguments.track:
        description["track"] = list(arguments.track)
    if arguments.init_from:
        path = Path(arguments.init_from)
        description["init_from"] = str(path.resolve()) if path.exists() else arguments.init_from
    return description


def parse_arguments(args: Sequence[str]) -> tuple[Arguments, Pretrained | None]:
    """The preset, or the model to start from, is read first, for the other flags start from its values."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--preset")
    first.add_argument("--device", default="auto")
    first.add_argument("--init-from", "--init_from")
    try:
        known = first.parse_known_args(args)[0]
    except argparse.ArgumentError:
        known = argparse.Namespace(preset=None, device="cpu", init_from=None)
    if known.init_from:
        return arguments_from_a_model(known, args)
    preset = known.preset
    if preset not in PRESETS:  # not there; or wrong, which parse below says
        preset = "smol" if known.device != "cpu" and devices.gpu_problem() is None else "laptop"
    config = GPTConfig.from_dict(PRESETS[preset]().to_dict())  # its fields carry the help
    data = "shakespeare" if preset == "shakespeare" else "python"
    tokeniser: Tokenisers = "portable" if preset == "portable" else "own"
    default = Arguments(preset=preset, data=data, tokeniser=tokeniser, config=config)
    return parse(Arguments, default, args, description=DESCRIPTION), None


def arguments_from_a_model(known: argparse.Namespace, args: Sequence[str]) -> tuple[Arguments, Pretrained]:
    """Flags that start from a model's own config.

    Raises:
        ValueError: a flag contradicts the model.
    """
    if known.preset:
        raise ValueError(f"expected no --preset with --init-from, got {known.preset}")
    loaded = load_base_model(known.init_from)
    default = Arguments(init_from=known.init_from, config=default_config(loaded.model))
    arguments = parse(Arguments, default, args, description=DESCRIPTION)
    check_shape(loaded.model, arguments.config)
    return arguments, loaded


# -------------------------------------------------------------------- the task
class TrainTask(TextTask):
    """Training of a GPT on a corpus.

    Attributes:
        resumed: the command line that resumes the run; None for a new one.
        start: the model that a new run starts from.
        digest: of the text that the resumed run was trained on; "" where that is not known.
    """

    command = "train"

    def __init__(self, arguments: Arguments, resumed: ResumeArguments | None, start: Pretrained | None = None) -> None:
        super().__init__(arguments, arguments.run_folder if resumed is None else resumed.resume)
        self.resumed, self.start, self.digest = resumed, start, ""

    @property
    def name(self) -> str:
        arguments = self.arguments
        return f"{Path(arguments.init_from or arguments.preset).stem}-{arguments.data}"

    def claim(self, folder: Path, processes: ProcessGroup) -> None:
        if self.resumed is None:
            on_rank_zero(processes, lambda: claim_new_folder(folder))
            return
        stored, self.digest = on_rank_zero(processes, lambda: self.read(folder))
        check_batches(processes, stored.config.accumulation_steps, stored.config.batch_size)
        given = {name: getattr(self.resumed, name) for name in ("device", "on_full_disk", "shard_optimiser")}
        given |= {name: value for name in ("on_nan", "track") if (value := getattr(self.resumed, name)) is not None}
        self.arguments = replace(stored, **given)
        on_rank_zero(processes, lambda: expect_trackers(self.arguments.track))

    def read(self, folder: Path) -> tuple[Arguments, str]:
        """Return the arguments that a run folder was begun with, and the digest of its text."""
        return read_run(folder)

    def describe(self) -> dict[str, Any]:
        """Return what data.json holds besides the digest of the text."""
        return description_of(self.arguments)

    def prepare(self, run: Run) -> TrainingState:
        arguments, config, processes = self.arguments, self.arguments.config, run.processes
        on_gpu = use_gpu(arguments.device)
        with advise_on_memory(on_gpu, self.memory_advice(config, on_gpu)):
            check_training_memory(self.needed_memory(config), on_gpu)  # before anything is prepared
        has_last = run.has(run.last)
        if arguments.init_from and not has_last and self.start is None:
            self.start = load_base_model(arguments.init_from)
        print(f"data: {arguments.data} (text is tokenised once and cached)")
        corpus = self.load_corpus(self.first_tokeniser(run, has_last))
        run.tokeniser = tokeniser = corpus.tokeniser
        device = "a GPU" if on_gpu else "the CPU"
        check_same(processes, {"text": corpus.digest, "config": config.to_dict(), "device": device})
        if has_last and (self.digest or corpus.digest) != corpus.digest:
            advice = f"--init-from {shlex.quote(run.last.as_posix())} begins a new run with its weights"
            raise ValueError(
                f"{run.folder}: expected the text that it was trained on, which has changed since; {advice}"
            )
        description = {**self.describe(), "corpus": corpus.digest}
        on_rank_zero(processes, lambda: write_run_description(run.folder, config, description, tokeniser))
        self.prompts, self.held_out_bytes = CORPORA[arguments.data].prompts, corpus.validation_bytes
        # the end of some other text stands before the first token, so that it too is predicted
        tokens = np.concatenate([[tokeniser.end_of_text], corpus.validation])
        self.held_out = HeldOut(tokens, len(self.held_out_bytes))
        state = self.new_state(run, corpus.train, on_gpu, has_last)
        if processes.is_rank_zero:
            self._print_summary(state, run, tokeniser, on_gpu)
        return state

    def needed_memory(self, config: GPTConfig) -> int:
        """Return the bytes that training takes at least."""
        return training_bytes(config)

    def load_corpus(self, tokeniser: Any) -> Any:
        """Return the prepared text, with a tokeniser that is given, or one that is learnt from it."""
        arguments = self.arguments
        files = [path.resolve() for path in arguments.files]
        split = "gpt2" if arguments.tokeniser == "portable" else "tricycle"
        return load_corpus(arguments.data, files, arguments.config.vocab_size, tokeniser, split)

    def new_state(self, run: Run, tokens: Any, on_gpu: bool, has_last: bool) -> TrainingState:
        """Return the state of a new run, or that of the last checkpoint."""
        config, shard = self.arguments.config, self.arguments.shard_optimiser
        if has_last:
            return resume_state(run.last, tokens, on_gpu, run.processes, shard)
        model = None if self.start is None else initialize_from(self.start.model, config)
        return new_state(config, tokens, on_gpu, model, run.processes, shard)

    def first_tokeniser(self, run: Run, has_last: bool) -> Any:
        """Return the tokeniser of a run that has one before its text is read; else None.

        Raises:
            ValueError: the last checkpoint contradicts the folder.
        """
        if has_last:
            checkpoint = on_rank_zero(run.processes, lambda: load_checkpoint(run.last))
            tokeniser = checkpoint.tokeniser()
            if tokeniser is None:
                raise ValueError(f"{run.last}: expected a checkpoint with its tokeniser, it has none")
            if checkpoint.config != self.arguments.config:
                path = run.folder / "config.json"
                raise ValueError(f"{path}: expected the config of its checkpoint, got another")
            return tokeniser
        if self.start is not None:
            return self.start.tokeniser
        return gpt2_tokeniser() if self.arguments.tokeniser == "gpt2" else None

    def facts(self, state: TrainingState) -> dict[str, Any]:
        return {"data": self.arguments.data, "n_parameters": state.model.n_parameters, **state.config.to_dict()}

    def _print_summary(self, state: TrainingState, run: Run, tokeniser: Any, on_gpu: bool) -> None:
        """Print what is going to be trained, on what, and where it is left."""
        config, n_held_out = state.config, len(self.held_out.tokens) - 1
        print(
            f"model: {state.model.n_parameters:,} parameters on the {'GPU' if on_gpu else 'CPU'}; "
            f"{len(state.dataset.tokens):,} training tokens, {n_held_out:,} held out ({self.held_out.n_bytes:,} bytes)"
        )
        if run.processes.size > 1:
            n_batches, size = config.accumulation_steps, config.batch_size
            print(f"{run.processes.size} ranks share the {n_batches} batches of {size} sequences of an update")
        print(f"run folder: {run.folder}" + (f" (resuming after step {state.step})" if state.step else ""))
        print(f"disk: the run folder may take {describe_disk_space(state, tokeniser, run.folder)}")
        if not on_gpu and _is_yet_to_compile():
            print("the first step takes some seconds more than the others: Numba compiles its loops, once")


def _is_yet_to_compile() -> bool:
    try:
        from tricycle_accelerators.compiled import is_yet_to_compile
    except ModuleNotFoundError:
        return False
    return is_yet_to_compile()


def read_run(folder: Path, command: str = "train") -> tuple[Arguments, str]:
    """Return the arguments that a run folder was begun with, and the digest of its text ("" where it has none).

    Raises:
        FileNotFoundError, ValueError: it is no folder of a run of that command.
    """
    found = []
    for path in (folder / "config.json", folder / "data.json"):
        if not path.is_file():
            hint = "" if contains_run(folder) else ". Nothing was trained in it: begin again without --resume"
            raise FileNotFoundError(f"{folder}: expected a run folder, it has no {path.name}{hint}")
        found.append(read_json_object(path))
    config, data = found
    files: Any = data.get("files")
    track = data.get("track", [])
    are_paths = isinstance(files, list) and all(isinstance(name, str) for name in files)
    is_known = data.get("data") in CORPORA and data.get("on_nan", "skip") in get_args(OnNaN)
    are_trackers = isinstance(track, list) and all(name in NAMES for name in track)
    if not is_known or not are_paths or not are_trackers:
        got = reprlib.repr(data)
        raise ValueError(f"{folder / 'data.json'}: expected data and files as a run writes them, got {got}")
    if data.get("command", "train") != command:
        raise ValueError(f"{folder}: expected a run of `tricycle {command}`, got one of {data['command']!r}")
    same = {name: data[name] for name in ("data", "tokeniser", "on_nan", "init_from") if name in data}
    arguments = Arguments(**same, files=tuple(map(Path, files)), track=tuple(track), config=GPTConfig.from_dict(config))
    return arguments, data.get("corpus", "")
