"""Look for good settings: train with many, one run folder each, and say which were best.

All flags of `tricycle train` are taken besides those below, and say what all runs have in common. What is looked for is
few bits a byte of the held-out text, which compare between vocabularies too. The sweep's folder has sweep.csv,
sweep.png, and a run folder for each trial; a sweep that was cut off goes on with --resume.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib.util
import io
import json
import math
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args

import numpy as np
import tyro

from tricycle.configs import GPTConfig
from tricycle.system.files import atomic_write, read_json_object
from tricycle.system.locks import FolderLock, LockedError
from tricycle_cli.databases import sqlite_url
from tricycle_cli.flags import fail, on_one_line, parse
from tricycle_cli.run import read_metrics
from tricycle_cli.signals import Interrupted, Signals, leave_by
from tricycle_cli.swept import Over, check, config_of, flags_of, grid_of, read_over
from tricycle_cli.together import expect_one_process
from tricycle_cli.train import Arguments as TrainArguments
from tricycle_cli.train import holds_a_run, parse_arguments
from tricycle_lab.sweep_plot import Shown, plot_sweep

Sampler = Literal["tpe", "random", "grid"]
SAMPLERS = get_args(Sampler)
TRIALS = 20
POLL = 0.2  # seconds between two looks at a run
LEAVING = 60.0  # seconds in which a run that was asked to stop saves itself
MOST_FAILURES = 3  # trials in a row: then something is wrong with all of them
SHOWN = 20  # trials in the table on the screen
NOT_OURS = ("--find-learning-rate",)


@dataclass(frozen=True)
class Arguments(TrainArguments):
    """What to look through, and what all runs have in common."""

    over: tuple[str, ...] = ()
    """fields of the config and their values, each as FIELD=LOW..HIGH, FIELD=LOW..HIGH:log, FIELD=LOW..HIGH:5 (so many
    values) or FIELD=A,B,C"""
    trials: int | None = None
    """how many settings are tried; without it 20, and of a grid all"""
    sampler: Sampler = "tpe"
    """how settings are chosen: by what the trials before taught (tpe), at random, or all of a grid"""
    prune: bool = False
    """end trials that are worse than the median of the others at the same step"""
    sampler_seed: int = 0
    """decides which settings are tried"""
    run_folder: Path | None = None
    """where the sweep leaves its files, and a run folder for each trial; without it a new folder in runs/"""
    resume: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """go on with a sweep; nothing else is taken with it but --trials"""


@dataclass(frozen=True)
class Plan:
    """What sweep.json says.

    Attributes:
        train: the words that all runs of `tricycle train` get.
        over: the words of --over.
        where: the folder that relative paths in `train` start from.
    """

    train: list[str]
    over: list[str]
    trials: int
    sampler: str
    prune: bool
    seed: int
    where: str


@dataclass
class Sweep:
    """A sweep at work.

    Attributes:
        base: the config that `plan.train` says.
        study: optuna's.
    """

    folder: Path
    plan: Plan
    base: TrainArguments
    over: Over
    study: Any

    @property
    def said(self) -> list[str]:
        """The fields that the command line sets."""
        return fields_said(self.plan.train)

    def config(self, params: dict[str, Any]) -> GPTConfig:
        return config_of(self.base.config, params, self.said)

    def run_folder(self, number: int) -> Path:
        return self.folder / f"trial-{number:04d}"

    def flags(self, params: dict[str, Any]) -> list[str]:
        """What makes the run of a trial of the common one."""
        return flags_of(self.base.config, self.config(params))


# -------------------------------------------------------------------- the command
def main(args: Sequence[str] | None = None) -> int:
    expect_one_process("sweep")
    words = sys.argv[1:] if args is None else list(args)
    if {"--help", "-h"} & set(words):
        parse(Arguments, args=["--help"], description=__doc__ or "")
    own, train = parser().parse_known_args(words)
    if not all(map(importlib.util.find_spec, ("optuna", "matplotlib"))):
        raise ModuleNotFoundError(
            'tricycle sweep needs a library that is not installed: pip install "tricycle-gpt[sweep]"'
        )
    with Signals() as signals:
        try:
            with signals.heard():
                return resume(own, train) if own.resume is not None else begin(own, train)
        except Interrupted as error:
            if error.number != signal.SIGINT:
                sys.stdout.flush()
                leave_by(error.number)
            raise


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(message, status=2)


def parser() -> argparse.ArgumentParser:
    """Takes the flags of the sweep itself, and leaves the words of `tricycle train` as they are, for the runs."""
    flags = _Parser(add_help=False, allow_abbrev=False)
    flags.add_argument("--over", nargs="+", default=[])
    flags.add_argument("--trials", type=int)
    flags.add_argument("--sampler", choices=SAMPLERS, default="tpe")
    flags.add_argument("--prune", action=argparse.BooleanOptionalAction, default=False)
    flags.add_argument("--sampler-seed", "--sampler_seed", type=int, default=0)
    flags.add_argument("--run-folder", "--run_folder", type=Path)
    flags.add_argument("--resume", type=Path)
    return flags


def fields_said(words: Sequence[str]) -> list[str]:
    """The names of the flags on a command line."""
    flags = [word.split("=")[0] for word in words if word.startswith("--")]
    return [flag.removeprefix("--").removeprefix("no-").replace("-", "_") for flag in flags]


def begin(own: argparse.Namespace, train: list[str]) -> int:
    """Begin a sweep.

    Raises:
        ValueError: one line about what is wrong, before anything is done.
    """
    for word in train:
        if word.split("=")[0] in NOT_OURS:
            raise ValueError(f"expected no {word.split('=')[0]} in a sweep, which trains")
    over = read_over(own.over)
    twice = [name for name in over if name in fields_said(train)]
    if twice:
        raise ValueError(f"expected {twice[0]} in --over or as a flag, got both")
    base, _ = parse_arguments(train)
    check(base.config, over, fields_said(train))
    combinations = len(grid_of(over)) if own.sampler == "grid" else None
    trials = own.trials if own.trials is not None else combinations or TRIALS
    plan = Plan(train, own.over, trials, own.sampler, own.prune, own.sampler_seed, str(Path.cwd()))
    check_plan(plan)
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = own.run_folder or Path("runs") / f"sweep-{base.preset}-{base.data}-{stamp}"
    with FolderLock(folder):
        if (folder / "sweep.json").exists():
            raise ValueError(f"{folder} holds a sweep already: continue it with --resume, or name another --run-folder")
        if holds_a_run(folder):
            raise ValueError(f"{folder} holds a run: name another --run-folder")
        write_plan(folder, plan)
        return sweep(folder, plan, base, over)


def check_plan(plan: Plan) -> None:
    """
    Raises:
        ValueError: a number out of range.
    """
    if plan.trials < 1:
        raise ValueError(f"expected --trials of 1 or more, got {plan.trials}")
    if plan.seed < 0:
        raise ValueError(f"expected --sampler-seed of 0 or more, got {plan.seed}")


def write_plan(folder: Path, plan: Plan) -> None:
    with atomic_write(folder / "sweep.json", text=True) as file:
        json.dump(vars(plan), file, indent=2)


def resume(own: argparse.Namespace, train: list[str]) -> int:
    """Go on with a sweep."""
    if train or own.over:
        raise ValueError(f"expected nothing but --trials with --resume, got {' '.join([*own.over, *train])}")
    folder = own.resume
    plan = read_plan(folder)
    with FolderLock(folder):
        if own.trials is not None:
            plan = Plan(**{**vars(plan), "trials": own.trials})
            check_plan(plan)
            write_plan(folder, plan)
        with contextlib.chdir(plan.where):
            base, _ = parse_arguments(plan.train)
        return sweep(folder, plan, base, read_over(plan.over))


def read_plan(folder: Path) -> Plan:
    """
    Raises:
        FileNotFoundError, ValueError: it is no folder of a sweep.
    """
    path = folder / "sweep.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder}: expected the folder of a sweep, it has no sweep.json")
    said = read_json_object(path)
    kinds = {"train": list, "over": list, "trials": int, "sampler": str, "prune": bool, "seed": int, "where": str}
    fits = said.keys() == kinds.keys() and all(type(said[name]) is kind for name, kind in kinds.items())
    fits = fits and all(isinstance(word, str) for word in [*said["train"], *said["over"]])
    if not fits or said["sampler"] not in SAMPLERS or not Path(said["where"]).is_dir():
        raise ValueError(f"{path}: expected what `tricycle sweep` writes, in a folder that is still there")
    return Plan(**said)


# -------------------------------------------------------------------- trials
def sweep(folder: Path, plan: Plan, base: TrainArguments, over: Over) -> int:
    """Try until there are enough trials, and report."""
    work = Sweep(folder.resolve(), plan, base, over, open_study(folder, plan))
    print(
        f"sweep: {folder}; continue it with\n  {command('sweep')} --resume {shlex.quote(folder.as_posix())}", flush=True
    )
    failures = 0
    while (trial := next_trial(work)) is not None:
        failures = 0 if try_one(work, trial) else failures + 1
        write_report(work)
        if failures == MOST_FAILURES:
            raise RuntimeError(f"{failures} trials in a row failed, the last with: {reason_of(work, trial.number)}")
    report(work)
    return 0


def open_study(folder: Path, plan: Plan) -> Any:
    """Optuna's study in the sweep's folder: a database, in which a kill leaves nothing half done."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    pruner: Any = optuna.pruners.MedianPruner(n_startup_trials=4) if plan.prune else optuna.pruners.NopPruner()
    storage = sqlite_url(folder / "sweep.db").replace("{", "{{").replace("}", "}}")  # Optuna formats it
    return optuna.create_study(study_name="sweep", storage=storage, pruner=pruner, load_if_exists=True)


def next_trial(work: Sweep) -> Any:
    """One that was cut off, or a new one; None where there are enough.

    What a new one tries hangs on its number, the seed and the trials before it alone, so that a sweep that was cut off
    finds what another would have found.
    """
    import optuna

    known = work.study.get_trials(deepcopy=False)
    for trial in known:
        if trial.state == optuna.trial.TrialState.RUNNING:
            return optuna.trial.Trial(work.study, trial._trial_id)
    waiting = [trial for trial in known if trial.state == optuna.trial.TrialState.WAITING]
    number = len(known) - len(waiting)
    seed = int(np.random.SeedSequence([work.plan.seed, number]).generate_state(1)[0])
    samplers = optuna.samplers
    is_learning = work.plan.sampler == "tpe"
    work.study.sampler = samplers.TPESampler(seed=seed) if is_learning else samplers.RandomSampler(seed=seed)
    if work.plan.sampler == "grid":
        grid = grid_of(work.over)
        if number >= len(grid):
            return None
        if not waiting and number < work.plan.trials:
            work.study.enqueue_trial(grid[number])
    return work.study.ask() if number < work.plan.trials else None


def try_one(work: Sweep, trial: Any) -> bool:
    """Train with the settings of a trial, to its end, or until it is pruned.

    Returns:
        False where it failed.
    """
    from optuna.trial import TrialState

    params = {name: field.suggest(trial, name) for name, field in work.over.items()}
    said = ", ".join(f"{name}={value}" for name, value in params.items())
    print(f"trial {trial.number}: {said}", flush=True)
    folder = work.run_folder(trial.number)
    try:
        wait_for_another(folder)
        pruned = train(work, trial, params) if bits_of(folder) is None else False
    except RuntimeError as error:
        trial.set_user_attr("reason", str(error))
        work.study.tell(trial.number, state=TrialState.FAIL)
        print(f"trial {trial.number} failed: {error}", flush=True)
        return False
    bits = bits_of(folder)
    if bits is None and pruned:
        work.study.tell(trial.number, state=TrialState.PRUNED)
        print(f"trial {trial.number}: ended early", flush=True)
    elif bits is None:
        raise RuntimeError(f"{folder}: the run ended without its final figures")
    else:
        work.study.tell(trial.number, bits)
        best = work.study.best_trial
        print(
            f"trial {trial.number}: {bits:.4f} bits a byte; the best: {best.value:.4f} (trial {best.number})",
            flush=True,
        )
    return True


def wait_for_another(folder: Path) -> None:
    """A run outlives a sweep that is killed; then it is waited for, for nobody trains in its folder meanwhile."""
    try:
        with FolderLock(folder):
            return
    except LockedError as error:
        print(f"waiting: {error}", flush=True)
    with FolderLock(folder, wait=True):
        return


def bits_of(folder: Path) -> float | None:
    """Bits a byte of all held-out text, where the run has come to its end."""
    finals = [
        line["final_bits_per_byte"] for line in read_metrics(folder / "metrics.jsonl") if "final_bits_per_byte" in line
    ]
    return finals[-1] if finals else None


def train(work: Sweep, trial: Any, params: dict[str, Any]) -> bool:
    """Run `tricycle train` in a process of its own, and watch its held-out losses.

    Returns:
        whether it was told to end because others were better.

    Raises:
        RuntimeError: it failed; says its last words.
    """
    folder = work.run_folder(trial.number)
    words = [sys.executable, "-m", "tricycle", "train"]
    if holds_a_run(folder):
        choices = ["--device", work.base.device, "--on-full-disk", work.base.on_full_disk]
        words += ["--resume", str(folder), *choices]
    else:
        words += [*work.plan.train, "--run-folder", str(folder), *work.flags(params)]
    pruned = False
    with (work.folder / f"{folder.name}.log").open("ab") as log, running(words, work.plan.where, log) as process:
        for step, bits in estimates(folder, process):
            if step not in trial.storage.get_trial(trial._trial_id).intermediate_values:
                trial.report(bits, step)
            if not pruned and trial.should_prune():
                process.terminate()
                pruned = True
    if process.returncode and bits_of(folder) is None:
        raise RuntimeError(last_words(work.folder / f"{folder.name}.log"))
    return pruned


@contextlib.contextmanager
def running(words: list[str], where: str, log: Any) -> Iterator[subprocess.Popen]:
    """A process that ends with this block: by itself, or asked to, so that it saves what it has."""
    process = subprocess.Popen(words, cwd=where, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield process
        process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(LEAVING)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def estimates(folder: Path, process: subprocess.Popen) -> Iterator[tuple[int, float]]:
    """Steps and bits a byte of held-out estimates, as they come, until the process has ended."""
    path, size, last = folder / "metrics.jsonl", -1, -1
    ended = False
    while not ended:
        ended = process.poll() is not None
        now = path.stat().st_size if path.is_file() else -1
        if now != size:
            size = now
            lines = [line for line in read_metrics(path) if "bits_per_byte" in line and line["step"] > last]
            for line in lines:
                last = line["step"]
                if math.isfinite(line["bits_per_byte"]):
                    yield last, line["bits_per_byte"]
        if not ended:
            time.sleep(POLL)


def last_words(log: Path) -> str:
    """The last line that a run said, behind its progress bar."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4000))
        lines = file.read().decode("utf-8", "replace").replace("\r", "\n").splitlines()
    last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
    return on_one_line(last.partition("tricycle train: ")[2] or last)


# -------------------------------------------------------------------- what came of it
def results(work: Sweep) -> list[dict[str, Any]]:
    """All trials that have ended, one row each."""
    rows = []
    for trial in work.study.get_trials(deepcopy=False):
        if not trial.state.is_finished():
            continue
        bits = trial.value if trial.state.name == "COMPLETE" else None
        last = trial.intermediate_values[max(trial.intermediate_values)] if trial.intermediate_values else None
        seconds = (trial.datetime_complete - trial.datetime_start).total_seconds()
        params = {name: _short(trial.params.get(name)) for name in work.over}
        row = {"trial": trial.number, "state": trial.state.name.lower(), "bits_per_byte": bits, "last_estimate": last}
        rows.append({**row, "seconds": round(seconds, 1), **params, "folder": work.run_folder(trial.number).name})
    return rows


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def reason_of(work: Sweep, number: int) -> str:
    return str(work.study.get_trials(deepcopy=False)[number].user_attrs.get("reason", "nothing"))


def write_report(work: Sweep) -> None:
    """The table and the picture."""
    rows = results(work)
    table = io.StringIO()
    writer = csv.DictWriter(table, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    with atomic_write(work.folder / "sweep.csv", text=True) as file:
        file.write(table.getvalue())
    shown = [
        Shown(row["trial"], row["bits_per_byte"], row["last_estimate"], {k: row[k] for k in work.over}) for row in rows
    ]
    logs = [name for name, field in work.over.items() if field.log]
    plot_sweep(shown, work.folder / "sweep.png", logs, f"{len(rows)} trials")


def report(work: Sweep) -> None:
    """Say what was best, and how to have it."""
    write_report(work)
    rows = results(work)
    done = sorted((row for row in rows if row["bits_per_byte"] is not None), key=lambda row: row["bits_per_byte"])
    others = [row for row in rows if row["bits_per_byte"] is None]
    names = list(work.over)
    print(
        f"\n{'trial':>5}  {'bits a byte':>11}  {'seconds':>7}  "
        + "  ".join(f"{name:>{_width(name)}}" for name in names)
    )
    for row in [*done, *others][:SHOWN]:
        bits = row["state"] if row["bits_per_byte"] is None else f"{row['bits_per_byte']:.4f}"
        values = "  ".join(f"{row[name]!s:>{_width(name)}}" for name in names)
        print(f"{row['trial']:>5}  {bits:>11}  {row['seconds']:>7.1f}  {values}")
    if len(rows) > SHOWN:
        print(f"... and {len(rows) - SHOWN} more in sweep.csv")
    print(f"table: {work.folder / 'sweep.csv'}; picture: {work.folder / 'sweep.png'}")
    if not done:
        raise RuntimeError(f"{work.folder}: no trial came to its end")
    best = work.study.best_trial
    params = {name: _short(best.params[name]) for name in work.over}
    print(f"the best is trial {best.number}, {best.value:.4f} bits a byte. Train so with")
    print(f"  {command('train')} {shlex.join([*work.plan.train, *work.flags(params)])}")
    print(f"generate with it\n  {command('generate')} {shlex.quote(work.run_folder(best.number).as_posix())}")


def _width(name: str) -> int:
    return max(10, len(name))


def command(name: str) -> str:
    """How the other commands are started by somebody who has started this one so."""
    program = sys.argv[0].removesuffix(" sweep")
    return f"{program} {name}" if program != sys.argv[0] else f"tricycle {name}"
