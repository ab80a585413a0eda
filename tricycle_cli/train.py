"""Train a GPT on real text, from the first token to samples.

Without arguments it trains for about ten minutes on the source code of Python's standard library, needs no
network, and ends with the command that generates from the result. --help lists every setting.
"""

from __future__ import annotations

import argparse
import bz2
import contextlib
import importlib
import json
import lzma
import reprlib
import shlex
import signal
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from tricycle import devices
from tricycle.checkpoint import load_checkpoint
from tricycle.configs import PRESETS, GPTConfig
from tricycle.distributed.processes import Processes
from tricycle.evaluation import HeldOut, evaluate
from tricycle.pretrained import Pretrained
from tricycle.system.files import atomic_write, read_json_object
from tricycle.system.locks import FolderLock
from tricycle.training import NonFiniteError, train
from tricycle.training_state import TrainingState, least_memory, new_state, resume_state
from tricycle_cli import clock
from tricycle_cli.find_rate import find_rate
from tricycle_cli.flags import parse
from tricycle_cli.full_disk import OnFullDisk, room_said
from tricycle_cli.init_from import check_shape, default_config, load_start, started_from
from tricycle_cli.models import use_gpu
from tricycle_cli.run import (
    FINAL_OVERLAP,
    OnNaN,
    Run,
    RunSession,
    check_room,
    contexts,
    estimate,
    naming_what_to_lower,
    read_metrics,
    show_sample,
    updates,
)
from tricycle_cli.signals import Interrupted, Signals, leave_by
from tricycle_cli.streams import patient_streams
from tricycle_cli.together import by_the_first, check_batches, check_same, common_facts, parsed, together
from tricycle_cli.trackers import NAMES, TrackerName, expect_trackers
from tricycle_cli.tracking import Tracking
from tricycle_datasets.gpt2 import gpt2_tokeniser
from tricycle_lab.plot import plot_losses

DESCRIPTION = __doc__ or ""
Tokenisers = Literal["own", "portable", "gpt2"]
Data = Literal["python", "shakespeare", "text", "codeparrot", "fineweb"]
CORPORA = {
    "python": ("python_code", "PythonCode"),
    "shakespeare": ("shakespeare", "Shakespeare"),
    "text": ("text", "TextFiles"),
    "codeparrot": ("codeparrot", "CodeParrot"),
    "fineweb": ("fineweb", "FineWeb"),
}
COMPRESSED_AT_ONCE = 2**18  # bytes
# How the samples at the end begin, besides those of a new text.
PROMPTS = {"python": ("", "def ", "class "), "codeparrot": ("", "def ", "class ")}


@dataclass(frozen=True)
class Arguments:
    """What to train, on what, and where to leave it."""

    preset: Literal["debug", "laptop", "portable", "shakespeare", "smol", "gpt2"] = "laptop"
    """where the settings below start from; without it "smol" on a GPU, else "laptop" """
    data: Data = "python"
    """the text: Python's standard library, tiny Shakespeare, your own --files, or a streamed corpus"""
    files: tuple[Path, ...] = ()
    """your own text files or folders of them, for --data text"""
    tokeniser: Tokenisers = "own"
    """a vocabulary learnt from the text; one that other programs can use too, for it cuts text as GPT-2's does (the
    preset "portable" has it); or GPT-2's published one, of 50257 tokens"""
    init_from: str | None = None
    """a model to start from, as `tricycle generate` takes it: its shape, weights and tokeniser are used, and settings
    of training start from gentler values"""
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
    with open_program(sys.argv[1:] if args is None else args) as program:
        if program is not None:
            with program.updates() as session:
                program.finished = train(**program.state.arguments(), session=session)
            if program.finished:
                program.report()
    return 0


@contextlib.contextmanager
def open_program(args: Sequence[str]) -> Iterator[Program | None]:
    """Do what the command line says, but for the training itself; None where there is nothing to train.

    Raises:
        Interrupted: a signal came before training, or after it; what there was to save is saved.
        ValueError: processes that are not alike.
    """
    with patient_streams(), Signals() as signals, together() as processes:
        signals.says_so = processes.size == 1
        try:
            with open_run(args, Context(signals, processes, clock.awake_seconds())) as run:
                if run is None:
                    yield None
                else:
                    with open_session(run) as program:
                        yield program
        except Interrupted as error:
            if error.number != signal.SIGINT and processes.size == 1:
                sys.stdout.flush()
                leave_by(error.number)
            raise


@contextlib.contextmanager
def open_run(args: Sequence[str], context: Context) -> Iterator[RunFolder | None]:
    """Yield the run folder that the command line begins or resumes, locked; None where it asks for a range test."""
    processes = context.processes
    check_same(processes, {"command line": list(args), **common_facts()} if processes.size > 1 else {})
    if any(word.split("=")[0] == "--resume" for word in args):
        resumed = parsed(processes, lambda: parse(ResumeArguments, args=args, description="Resume a run."))
        by_the_first(processes, lambda: read_run(resumed.resume))  # says what is wrong before anything is written
        with lock_of(resumed.resume, processes):
            yield resume(resumed, context)
        return
    arguments, start = parsed(processes, lambda: parse_arguments(args))
    if not arguments.files and any(word.split("=")[0] == "--files" for word in args):
        raise ValueError("expected files or folders after --files, got none")
    by_the_first(processes, lambda: expect_trackers(arguments.track))
    on_gpu = use_gpu(arguments.device)
    description = description_of(arguments)
    if arguments.find_learning_rate:
        find(arguments, start, on_gpu, processes)
        yield None
        return
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    name = arguments.preset if start is None else Path(arguments.init_from or "").stem
    folder = arguments.run_folder or Path("runs") / f"{name}-{arguments.data}-{stamp}"
    folder = processes.agree(folder)
    # an update has the batches of all processes
    config = replace(arguments.config, accumulation_steps=processes.size * arguments.config.accumulation_steps)
    choices = Choices(on_gpu, arguments.on_full_disk, arguments.shard_optimiser)
    with lock_of(folder, processes):
        by_the_first(processes, lambda: clear_folder(folder))
        yield RunFolder(folder, config, description, choices, context, start)


def resume(resumed: ResumeArguments, context: Context) -> RunFolder:
    """Return the run that is resumed, with what the command line changes."""
    folder, processes = resumed.resume, context.processes
    config, description = by_the_first(processes, lambda: read_run(folder))
    check_batches(processes, config.accumulation_steps, config.batch_size)
    start = None
    has_last = by_the_first(processes, (folder / "last.safetensors").exists)
    if description.get("init_from") and not has_last:
        start = load_start(description["init_from"])
    description["on_nan"] = resumed.on_nan or description.get("on_nan", "skip")
    if resumed.track is not None:
        description["track"] = list(resumed.track)
    by_the_first(processes, lambda: expect_trackers(description.get("track", [])))
    choices = Choices(use_gpu(resumed.device), resumed.on_full_disk, resumed.shard_optimiser)
    return RunFolder(folder, config, description, choices, context, start)


@dataclass(frozen=True)
class Context:
    """What a start of the program has around it.

    Attributes:
        started: when, as `clock.awake_seconds` tells it.
    """

    signals: Signals
    processes: Processes
    started: float


def find(arguments: Arguments, start: Pretrained | None, on_gpu: bool, processes: Processes) -> int:
    """A range test of the learning rate, on the text and with the model of a run that is not begun.

    Raises:
        ValueError: several processes.
    """
    if processes.size > 1:
        raise ValueError(f"expected one process with --find-learning-rate, got {processes.size}")
    config = arguments.config
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = arguments.run_folder or Path("runs") / f"learning-rate-{arguments.preset}-{arguments.data}-{stamp}"
    with naming_what_to_lower(config, on_gpu):
        check_room(least_memory(config), on_gpu)
        tokeniser = gpt2_tokeniser() if arguments.tokeniser == "gpt2" else start and start.tokeniser
        corpus = load_corpus(description_of(arguments), config.vocab_size, tokeniser)
        model = None if start is None else started_from(start.model, config)
        find_rate(config, corpus.train, model, on_gpu, folder)
    return 0


def lock_of(folder: Path, processes: Processes) -> contextlib.AbstractContextManager[Any]:
    """The lock of a run folder, which rank 0 takes for all."""
    return FolderLock(folder) if processes.is_first else contextlib.nullcontext()


def clear_folder(folder: Path) -> None:
    """
    Raises:
        ValueError: the folder holds a run.
    """
    if holds_a_run(folder):
        raise ValueError(f"{folder} holds a run already: continue it with --resume, or name another --run-folder")
    (folder / "config.json").unlink(missing_ok=True)  # of a run that was hardly begun


def holds_a_run(folder: Path) -> bool:
    """Whether there is something to go on with. A folder that has not got so far is begun anew."""
    begun = (folder / "config.json").exists() and (folder / "data.json").exists()
    return begun or (folder / "last.safetensors").exists()


class Choices(NamedTuple):
    """What a start may choose anew, whatever the run."""

    on_gpu: bool
    on_full_disk: OnFullDisk
    shard_optimiser: bool


@dataclass(frozen=True)
class RunFolder:
    """A run that is begun or resumed.

    Attributes:
        folder: the run folder.
        description: what data.json says.
        start: the model that a new run starts from.
    """

    folder: Path
    config: GPTConfig
    description: dict[str, Any]
    choices: Choices
    context: Context
    start: Pretrained | None

    @property
    def last(self) -> Path:
        """The checkpoint to go on from, if it is there."""
        return self.folder / "last.safetensors"

    @property
    def signals(self) -> Signals:
        return self.context.signals

    @property
    def processes(self) -> Processes:
        return self.context.processes

    @property
    def on_gpu(self) -> bool:
        return self.choices.on_gpu


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
    data: Data = "shakespeare" if preset == "shakespeare" else "python"
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
    loaded = load_start(known.init_from)
    default = Arguments(init_from=known.init_from, config=default_config(loaded.model))
    arguments = parse(Arguments, default, args, description=DESCRIPTION)
    check_shape(loaded.model, arguments.config)
    return arguments, loaded


def load_corpus(description: dict[str, Any], vocab_size: int, tokeniser: Any = None) -> Any:
    """The corpus of a run's flags.

    Args:
        tokeniser: a ready one; without, the corpus learns one of so many tokens.

    Raises:
        ValueError: a tokeniser of more tokens than the model knows.
    """
    n_known = vocab_size
    if tokeniser is not None:  # other people's models may have more rows than tokens
        vocab_size = tokeniser.vocab_size
    module, name = CORPORA[description["data"]]
    new_corpus = getattr(importlib.import_module(f"tricycle_datasets.{module}"), name)
    paths = ([Path(name) for name in description["files"]],) if description["data"] == "text" else ()
    split = "gpt2" if description.get("tokeniser") == "portable" else "tricycle"
    corpus = new_corpus(*paths, vocab_size, tokeniser=tokeniser, split=split)
    if corpus.tokeniser.n_vocab > n_known:
        raise ValueError(f"expected a tokeniser of at most {n_known} tokens, got {corpus.tokeniser.n_vocab}")
    return corpus


@dataclass
class Program:
    """A run that is ready to train.

    Attributes:
        finished: whether training came to its end.
    """

    state: TrainingState
    run: Run
    opened: RunFolder
    finished: bool = False

    @contextlib.contextmanager
    def updates(self) -> Iterator[RunSession]:
        """Yield the session of the training loop; an update is finished before a signal is answered."""
        with self.opened.signals.finishing(), updates(self.state, self.run) as session:
            yield session

    def report(self) -> None:
        """Print the final figures."""
        self.opened.signals.check()
        report(self.state, self.run, self.opened.on_gpu, self.opened.description["data"])


@contextlib.contextmanager
def open_session(opened: RunFolder) -> Iterator[Program]:
    """Prepare a run, from its last checkpoint if it has one; print how to go on with one that did not finish.

    Raises:
        Interrupted: a signal came before training, or after it; what there was to save is saved.
    """
    folder = opened.folder
    try:
        with opened.signals.heard():
            state, run = prepare(opened)
            program = Program(state, run, opened)
            with saying_what_is_saved(run), tracked(run):
                yield program
        if not program.finished:
            print(f"stopped after step {state.step}; everything is saved. Continue with\n  {resuming(folder)}")
    except Interrupted:
        if opened.processes.is_first and (folder / "config.json").exists():
            print(f"interrupted. Continue with\n  {resuming(folder)}", flush=True)
        raise


@contextlib.contextmanager
def saying_what_is_saved(run: Run) -> Iterator[None]:
    """Within this block errors say what is saved: all until the last checkpoint, where there is one."""
    going_on = f"continue with {resuming(run.folder)}"
    try:
        yield
    except NonFiniteError as error:
        raise NonFiniteError(f"{error}. Checkpoints are as they were; try a lower --max-learning-rate") from None
    except OSError as error:
        if not run.last.exists():
            raise
        raise OSError(f"{error}. The last checkpoint is whole: {going_on}") from None


def tracked(run: Run) -> contextlib.AbstractContextManager[None]:
    """Return the block at whose end the trackers of a run end."""
    return contextlib.nullcontext() if run.tracking is None else run.tracking.finishing()


def resuming(folder: Path) -> str:
    """The command that goes on with a run."""
    return f"{command('train')} --resume {shlex.quote(folder.as_posix())}"


def prepare(opened: RunFolder) -> tuple[TrainingState, Run]:
    """Everything before the first update: the text in tokens, the model, and the first files of the folder.

    Raises:
        ValueError: the folder's files contradict each other or the text.
    """
    with naming_what_to_lower(opened.config, opened.on_gpu):
        check_room(least_memory(opened.config), opened.on_gpu)  # before anything is prepared
    folder, config, description = opened.folder, opened.config, opened.description
    processes, last = opened.processes, opened.last
    print(f"data: {description['data']} (text is tokenised once and cached)")
    has_last = by_the_first(processes, last.exists)
    corpus = load_corpus(description, config.vocab_size, first_tokeniser(opened, has_last))
    tokeniser = corpus.tokeniser
    device = "a GPU" if opened.on_gpu else "the CPU"
    check_same(processes, {"text": corpus.digest, "config": config.to_dict(), "device": device})
    if has_last and description.get("corpus", corpus.digest) != corpus.digest:
        advice = f"--init-from {shlex.quote(last.as_posix())} begins a new run with its weights"
        raise ValueError(f"{folder}: expected the text that it was trained on, which has changed since; {advice}")
    description["corpus"] = corpus.digest
    by_the_first(processes, lambda: clear_left_overs(folder))
    by_the_first(processes, lambda: begin_folder(folder, config, description, tokeniser))
    held_out_bytes = corpus.validation_bytes
    # the end of some other text stands before the first token, so that it too is predicted
    held_out = HeldOut(np.concatenate([[tokeniser.end_of_text], corpus.validation]), len(held_out_bytes))
    shard = opened.choices.shard_optimiser
    if has_last:
        state = resume_state(last, corpus.train, opened.on_gpu, processes, shard)
    else:
        model = None if opened.start is None else started_from(opened.start.model, config)
        state = new_state(config, corpus.train, opened.on_gpu, model, processes, shard)
    if processes.is_first:
        introduce(state, held_out, opened, tokeniser)
    tracking = tracking_of(opened, state)
    run = Run(
        folder,
        tokeniser,
        held_out,
        say=say,
        stop=opened.signals,
        # several processes leave together, between two updates
        interruptible=opened.signals.interruptible if processes.size == 1 else contextlib.nullcontext,
        on_nan=description["on_nan"],
        spent=clock.awake_seconds() - opened.context.started,
        held_out_bytes=held_out_bytes,
        show_progress=processes.is_first,
        on_full_disk=opened.choices.on_full_disk,
        processes=processes,
        tracking=tracking,
    )
    return state, run


def tracking_of(opened: RunFolder, state: TrainingState) -> Tracking | None:
    """The trackers of a run: rank 0 alone speaks to them."""
    names = opened.description.get("track", ())
    if not names or not opened.processes.is_first:
        return None
    facts = {"data": opened.description["data"], "n_parameters": state.model.n_parameters, **state.config.to_dict()}
    return Tracking(names, opened.folder, facts, say).start()


def first_tokeniser(opened: RunFolder, has_last: bool) -> Any:
    """The tokeniser of a run that has one before its text is read; else None.

    Raises:
        ValueError: the last checkpoint contradicts the folder.
    """
    if has_last:
        checkpoint = by_the_first(opened.processes, lambda: load_checkpoint(opened.last))
        tokeniser = checkpoint.tokeniser()
        if tokeniser is None:
            raise ValueError(f"{opened.last}: expected a checkpoint with its tokeniser, it has none")
        if checkpoint.config != opened.config:
            path = opened.folder / "config.json"
            raise ValueError(f"{path}: expected the config of its checkpoint, got another")
        return tokeniser
    if opened.start is not None:
        return opened.start.tokeniser
    return gpt2_tokeniser() if opened.description.get("tokeniser") == "gpt2" else None


def introduce(state: TrainingState, held_out: HeldOut, opened: RunFolder, tokeniser: Any) -> None:
    """Say what is going to be trained, on what, and where it is left."""
    folder, processes = opened.folder, opened.processes
    print(
        f"model: {state.model.n_parameters:,} parameters on the {'GPU' if opened.on_gpu else 'CPU'}; "
        f"{len(state.dataset.tokens):,} training tokens, {len(held_out.tokens) - 1:,} held out "
        f"({held_out.n_bytes:,} bytes)"
    )
    if processes.size > 1:
        n_batches, size = state.config.accumulation_steps, state.config.batch_size
        print(f"{processes.size} ranks share the {n_batches} batches of {size} sequences of an update")
    print(f"run folder: {folder}" + (f", going on after step {state.step}" if state.step else ""))
    print(f"disk: the run folder may take {room_said(state, tokeniser, folder)}")
    if not opened.on_gpu and _is_yet_to_compile():
        print("the first step takes some seconds more than the others: Numba compiles its loops, once")


def _is_yet_to_compile() -> bool:
    try:
        from tricycle_accelerators.compiled import is_yet_to_compile
    except ModuleNotFoundError:
        return False
    return is_yet_to_compile()


def begin_folder(folder: Path, config: GPTConfig, description: dict[str, Any], tokeniser: Any) -> None:
    """Write what a run folder says of itself."""
    for name, content in {"data": description, "config": config.to_dict()}.items():  # config.json stands for both
        with atomic_write(folder / f"{name}.json", text=True) as file:
            json.dump(content, file, indent=2)
    tokeniser.save(folder / "tokeniser.json")


def clear_left_overs(folder: Path) -> None:
    """Take away what a kill cut off while it was being written."""
    for left_over in folder.rglob(".*.part"):
        left_over.unlink()


def read_run(folder: Path) -> tuple[GPTConfig, dict[str, Any]]:
    """The config and the data that a run folder names."""
    found = []
    for path in (folder / "config.json", folder / "data.json"):
        if not path.is_file():
            hint = "" if holds_a_run(folder) else ". Nothing was trained in it: begin again without --resume"
            raise FileNotFoundError(f"{folder}: expected a run folder, it has no {path.name}{hint}")
        found.append(read_json_object(path))
    config, data = found
    files = data.get("files")
    are_paths = isinstance(files, list) and all(isinstance(name, str) for name in files)
    is_known = data.get("data") in get_args(Data) and data.get("on_nan", "skip") in get_args(OnNaN)
    track = data.get("track", [])
    are_trackers = isinstance(track, list) and all(name in NAMES for name in track)
    if not is_known or not are_paths or not are_trackers:
        got = reprlib.repr(data)
        raise ValueError(f"{folder / 'data.json'}: expected data and files as a run writes them, got {got}")
    return GPTConfig.from_dict(config), data


def say(text: str) -> None:
    from tqdm import tqdm

    tqdm.write(text)


def report(state: TrainingState, run: Run, on_gpu: bool, data: str) -> None:
    """The final figures, the loss curve, samples, and how to go on."""
    config = state.config
    if state.evaluated_step != state.step:
        estimate(state, run)
    checkpoint = by_the_first(run.processes, lambda: load_checkpoint(run.best))
    best_step = checkpoint.about["progress"]["step"]
    model = checkpoint.model()
    if on_gpu:
        model.to_gpu()
    stride = max(1, config.context_window // FINAL_OVERLAP)
    print("measuring the best checkpoint on all held-out text ...")
    tokens = run.held_out.tokens
    loss, n_tokens = evaluate(model, tokens, config.batch_size, stride=stride, processes=run.processes)
    if not run.processes.is_first:
        return
    bits = run.held_out.bits_per_byte(loss)
    run.record(step=state.step, final_loss=loss, final_bits_per_byte=bits, best_step=best_step)
    run.flush()
    others = compressed_bits(run.held_out_bytes)
    bits_per_nat = run.held_out.bits_per_byte(1.0)
    picture = run.folder / "loss.png"
    title = f"{state.model.n_parameters:,} parameters"
    metrics, held_out_contexts = read_metrics(run.metrics), contexts(config.context_window)
    run.write(lambda: plot_losses(metrics, picture, bits_per_nat, others, title, contexts=held_out_contexts))
    state.model, state.step = model, best_step  # the samples are of the model that stays
    for prompt in PROMPTS.get(data, ("",)):
        show_sample(state, run, 250, prompt)
    minutes = f"{state.seconds / 60:.1f} minutes of training"
    print(f"\n{state.total_steps} steps, {minutes}; best checkpoint: step {best_step}")
    sizes = f"{n_tokens:,} tokens, {len(run.held_out_bytes):,} bytes, {held_out_contexts[1]}"
    print(f"held-out loss: {loss:.4f} nats a token = {bits:.3f} bits a byte ({sizes})")
    print("bits a byte for the same held-out bytes:")
    for name, value in sorted({**others, "this model": bits}.items(), key=lambda item: -item[1]):
        print(f"  {name:<12}{value:6.3f}")
    print(f"loss curve: {picture}")
    print(f"generate with\n  {command('generate')} {shlex.quote(run.folder.as_posix())}")


def compressed_bits(content: bytes) -> dict[str, float]:
    """Bits a byte of the usual compressors at their best settings."""
    compressors: dict[str, Any] = {
        "gzip -9": zlib.compressobj(9, wbits=16 + zlib.MAX_WBITS),
        "bz2 -9": bz2.BZ2Compressor(9),
        "xz -9": lzma.LZMACompressor(preset=9),
    }
    sizes = dict.fromkeys(compressors, 0)
    for name, compressor in compressors.items():
        for start in range(0, len(content), COMPRESSED_AT_ONCE):  # a signal is answered between two pieces
            sizes[name] += len(compressor.compress(content[start : start + COMPRESSED_AT_ONCE]))
        sizes[name] += len(compressor.flush())
    return {name: 8 * size / max(1, len(content)) for name, size in sizes.items()}


def command(name: str) -> str:
    """How the other programs are started by somebody who has started this one so."""
    if sys.argv[0].endswith(" train"):
        return f"{sys.argv[0].removesuffix(' train')} {name}"
    return {"train": "python train_smol_gpt.py", "generate": "python inference.py"}[name]
