"""Search hyperparameters: train a run for each trial, and report the best.

The flags of `tricycle train` set the common settings of all trials. The objective is bits per byte of held-out text.
The sweep folder contains sweep.csv, sweep.png, and a run folder for each trial. --resume continues a sweep.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import io
import json
import math
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
import tyro

from tricycle.system.files import atomic_write, read_json_object
from tricycle.system.locks import FolderLock, LockedError
from tricycle_cli.databases import sqlite_url
from tricycle_cli.distributed import require_one_process
from tricycle_cli.flags import ALIASES, check_conditions, on_one_line, parse, parse_known
from tricycle_cli.made_tasks import TaskName
from tricycle_cli.run import read_metrics
from tricycle_cli.search_space import (
    SearchSpace,
    apply_parameters,
    check_search_space,
    flags_of,
    grid_points,
    parse_search_space,
)
from tricycle_cli.session import new_folder
from tricycle_cli.signals import Interrupted, Signals, exit_by_signal
from tricycle_cli.task import command_name, contains_run
from tricycle_cli.train import Arguments as TrainArguments
from tricycle_cli.train import default_arguments, parse_arguments
from tricycle_lab.sweep_plot import TrialResult, plot_sweep

Sampler = Literal["tpe", "random", "grid"]
SAMPLERS = get_args(Sampler)
N_TRIALS = 20
POLL_SECONDS = 0.2  # between two reads of a run's metrics
STOP_SECONDS = 60.0  # in which a terminated run saves its progress
MAX_FAILURES = 3  # failed trials in a row, after which the sweep stops
MAX_ROWS = 20  # of the printed table


@dataclass(frozen=True)
class SweepArguments:
    """The flags of the sweep, without the flags of `tricycle train`."""

    over: tuple[str, ...] = ()
    """search space: config fields as FIELD=LOW..HIGH, FIELD=LOW..HIGH:log, FIELD=LOW..HIGH:5 (5 values) or
    FIELD=A,B,C"""
    trials: int | None = None
    """number of trials; by default 20, or all points of a grid"""
    sampler: Sampler = "tpe"
    """how trials are chosen: by earlier results (tpe), at random, or all points of a grid"""
    prune: bool = False
    """stop trials that are worse than the median of other trials at the same step"""
    sampler_seed: int = 0
    """seed of the sampler"""
    run_folder: Path | None = None
    """the folder of the sweep, with a run folder for each trial; by default a new folder in runs/"""
    resume: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """continue a sweep; only --trials can be combined with it"""


@dataclass(frozen=True)
class Arguments(SweepArguments, TrainArguments):
    """The flags of `tricycle sweep`."""

    find_learning_rate: tyro.conf.Suppress[bool] = False
    evaluate_tasks: tyro.conf.Suppress[tuple[TaskName, ...]] = ()
    score_heads: tyro.conf.Suppress[bool] = False
    shard_optimiser: tyro.conf.Suppress[bool] = False


@dataclass(frozen=True)
class SweepConfig:
    """The content of sweep.json.

    Attributes:
        train: the command line of `tricycle train` that all trials have in common.
        over: the values of --over.
        trials: the number of trials.
        sampler: "tpe", "random" or "grid".
        prune: stop trials that are worse than the median.
        seed: the seed of the sampler.
        where: the working directory, for relative paths in `train`.

    Raises:
        ValueError: a number out of range.
    """

    train: list[str]
    over: list[str]
    trials: int
    sampler: str
    prune: bool
    seed: int
    where: str

    def __post_init__(self) -> None:
        """Raise ValueError for fewer than 1 trial or a negative seed."""
        if self.trials < 1:
            raise ValueError(f"expected --trials of 1 or more, got {self.trials}")
        if self.seed < 0:
            raise ValueError(f"expected --sampler-seed of 0 or more, got {self.seed}")

    def write(self, folder: Path) -> None:
        """Write sweep.json to the folder atomically, replacing an existing one."""
        with atomic_write(folder / "sweep.json", text=True) as file:
            json.dump(asdict(self), file, indent=2)


@dataclass
class Sweep:
    """A sweep in progress.

    Attributes:
        folder: the folder of the sweep.
        plan: the content of sweep.json.
        base: the parsed flags of `plan.train`.
        over: the search space.
        study: the study of Optuna.
    """

    folder: Path
    plan: SweepConfig
    base: TrainArguments
    over: SearchSpace
    study: Any

    def run_folder(self, number: int) -> Path:
        """Return the path of a trial's run folder, trial-NNNN in the folder of the sweep."""
        return self.folder / f"trial-{number:04d}"

    def flags(self, params: dict[str, Any]) -> list[str]:
        """Return the flags of `tricycle train` that set the parameters of a trial."""
        config = apply_parameters(self.base.config, params, fields_on_command_line(self.plan.train))
        return flags_of(self.base.config, config)


# -------------------------------------------------------------------- the command
def main(args: Sequence[str] | None = None) -> int:
    """Run `tricycle sweep`: start or resume a hyperparameter search with Optuna; return the exit status."""
    require_one_process("sweep")
    words = sys.argv[1:] if args is None else list(args)
    if asked := {"--help", "-h", "--help-all"} & set(words):
        default = Arguments(**vars(default_arguments(words)[0]))
        parse(Arguments, default, list(asked), description=__doc__ or "")
    arguments, train_words = parse_known(SweepArguments, words)
    if not all(map(importlib.util.find_spec, ("optuna", "matplotlib"))):
        problem = "tricycle sweep needs a library that is not installed"
        raise ModuleNotFoundError(f'{problem}: pip install "tricycle-gpt[sweep]"')
    with Signals() as signals:
        try:
            with signals.restore_interrupts():
                if arguments.resume is None:
                    return start_sweep(arguments, train_words)
                return resume_sweep(arguments.resume, arguments, train_words)
        except Interrupted as error:
            exit_by_signal(error)
            raise


def fields_on_command_line(words: Sequence[str]) -> list[str]:
    """Return the present names of all --flags in a command line, with underscores and without "no-", as fields have."""
    flags = [word.split("=")[0] for word in words if word.startswith("--")]
    flags = [ALIASES.get(flag, flag) for flag in flags]
    return [flag.removeprefix("--").removeprefix("no-").replace("-", "_") for flag in flags]


def start_sweep(arguments: SweepArguments, train_words: list[str]) -> int:
    """Check flags and that the folder has no run or sweep (ValueError), write sweep.json, run trials; return 0."""
    set_fields = fields_on_command_line(train_words)
    if "find_learning_rate" in set_fields:
        raise ValueError("expected flags of training runs, got --find-learning-rate")
    check_conditions(arguments, {"--sampler tpe or random": (arguments.sampler != "grid", "sampler_seed")})
    base, _ = parse_arguments(train_words)
    over = parse_search_space(arguments.over, type(base.config))
    twice = [name for name in over if name in set_fields]
    if twice:
        raise ValueError(f"expected {twice[0]} in --over or as a flag, got both")
    check_search_space(base.config, over, set_fields)
    combinations = len(grid_points(over)) if arguments.sampler == "grid" else None
    trials = arguments.trials if arguments.trials is not None else combinations or N_TRIALS
    settings = (trials, arguments.sampler, arguments.prune, arguments.sampler_seed)
    plan = SweepConfig(train_words, list(arguments.over), *settings, str(Path.cwd()))
    folder = arguments.run_folder or new_folder(f"sweep-{base.preset}-{base.data}")
    with FolderLock(folder):
        if (folder / "sweep.json").exists():
            advice = "continue it with --resume, or use another --run-folder"
            raise ValueError(f"{folder} contains a sweep already: {advice}")
        if contains_run(folder):
            raise ValueError(f"{folder} contains a run: use another --run-folder")
        plan.write(folder)
        return run_trials(folder, plan, base, over)


def resume_sweep(folder: Path, arguments: SweepArguments, train_words: list[str]) -> int:
    """Resume a folder's sweep, with new --trials if any; return exit status; ValueError for any other flag.

    Raises:
        FileNotFoundError, ValueError: a wrong command line or folder.
    """
    others = replace(arguments, trials=None, resume=None)
    changed = [
        f"--{field.name.replace('_', '-')}" for field in fields(others) if getattr(others, field.name) != field.default
    ]
    if train_words or changed:
        raise ValueError(f"expected only --trials with --resume, got {' '.join([*changed, *train_words])}")
    plan = read_sweep_config(folder)
    with FolderLock(folder):
        if arguments.trials is not None:
            plan = replace(plan, trials=arguments.trials)
            plan.write(folder)
        with contextlib.chdir(plan.where):
            base, _ = parse_arguments(plan.train)
        return run_trials(folder, plan, base, parse_search_space(plan.over, type(base.config)))


def read_sweep_config(folder: Path) -> SweepConfig:
    """Read sweep.json; FileNotFoundError if it is missing, ValueError if fields are wrong or `where` is no folder."""
    path = folder / "sweep.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder}: expected the folder of a sweep, got one without sweep.json")
    values = read_json_object(path)
    kinds = {"train": list, "over": list, "trials": int, "sampler": str, "prune": bool, "seed": int, "where": str}
    fits = values.keys() == kinds.keys() and all(type(values[name]) is kind for name, kind in kinds.items())
    fits = fits and all(isinstance(word, str) for word in [*values["train"], *values["over"]])
    if not fits or values["sampler"] not in SAMPLERS or not Path(values["where"]).is_dir():
        raise ValueError(f"{path}: expected the fields that `tricycle sweep` writes and an existing folder, got others")
    return SweepConfig(**values)


# -------------------------------------------------------------------- trials
def run_trials(folder: Path, plan: SweepConfig, base: TrainArguments, over: SearchSpace) -> int:
    """Run the remaining trials, report after each and at the end, return 0; RuntimeError if several fail in a row."""
    sweep = Sweep(folder.resolve(), plan, base, over, open_study(folder, plan))
    command = f"{command_name('sweep', 'sweep')} --resume {shlex.quote(folder.as_posix())}"
    print(f"sweep folder: {folder}; resume with\n  {command}", flush=True)
    failures = 0
    while (trial := next_trial(sweep)) is not None:
        reason = run_trial(sweep, trial)
        failures = 0 if reason is None else failures + 1
        write_report(sweep)
        if failures == MAX_FAILURES:
            raise RuntimeError(f"{failures} trials in a row failed, the last with: {reason}")
    report(sweep)
    return 0


def open_study(folder: Path, plan: SweepConfig) -> Any:
    """Load or create the Optuna study in the folder's SQLite file sweep.db, with a median pruner if plan.prune."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    pruner: Any = optuna.pruners.MedianPruner(n_startup_trials=4) if plan.prune else optuna.pruners.NopPruner()
    storage = sqlite_url(folder / "sweep.db").replace("{", "{{").replace("}", "}}")  # Optuna formats it
    return optuna.create_study(study_name="sweep", storage=storage, pruner=pruner, load_if_exists=True)


def next_trial(sweep: Sweep) -> Any:
    """Return the interrupted Optuna trial, or a new one from the plan's sampler; None if all ran, failed ones included.

    The parameters of a new trial depend only on its number, the seed and the earlier trials, so that a resumed sweep
    gives the same results as an uninterrupted one.
    """
    import optuna

    known = sweep.study.get_trials(deepcopy=False)
    running = next((trial for trial in known if trial.state == optuna.trial.TrialState.RUNNING), None)
    waiting = [trial for trial in known if trial.state == optuna.trial.TrialState.WAITING]
    number = len(known) - len(waiting) if running is None else running.number
    seed = int(np.random.SeedSequence([sweep.plan.seed, number]).generate_state(1)[0])
    samplers = optuna.samplers
    is_learning = sweep.plan.sampler == "tpe"
    sweep.study.sampler = samplers.TPESampler(seed=seed) if is_learning else samplers.RandomSampler(seed=seed)
    if running is not None:
        for name in sweep.over:  # draw again what a killed sweep has drawn, so that the remaining values are the same
            distribution = running.distributions.get(name)
            if distribution is not None and not distribution.single():
                sweep.study.sampler.sample_independent(sweep.study, running, name, distribution)
        return optuna.trial.Trial(sweep.study, running._trial_id)
    if sweep.plan.sampler == "grid":
        grid = grid_points(sweep.over)
        if number >= len(grid):
            return None
        if not waiting and number < sweep.plan.trials:
            sweep.study.enqueue_trial(grid[number])
    return sweep.study.ask() if number < sweep.plan.trials else None


def run_trial(sweep: Sweep, trial: Any) -> str | None:
    """Train a trial unless its run has ended, tell Optuna the result; return the reason of a failure, else None."""
    from optuna.trial import TrialState

    params = {name: field.suggest(trial, name) for name, field in sweep.over.items()}
    settings = ", ".join(f"{name}={value}" for name, value in params.items())
    print(f"trial {trial.number}: {settings}", flush=True)
    folder = sweep.run_folder(trial.number)
    try:
        wait_for_lock(folder)
        pruned = train_trial(sweep, trial, params) if final_bits_per_byte(folder) is None else False
    except (RuntimeError, ValueError) as error:  # a failed run, or an invalid config, as 3 heads of n_heads=1..4
        trial.set_user_attr("reason", str(error))
        sweep.study.tell(trial.number, state=TrialState.FAIL)
        print(f"trial {trial.number} failed: {error}", flush=True)
        return str(error)
    bits = final_bits_per_byte(folder)
    if bits is None and pruned:
        sweep.study.tell(trial.number, state=TrialState.PRUNED)
        print(f"trial {trial.number}: pruned", flush=True)
    elif bits is None:
        raise RuntimeError(f"{folder}: expected the run's final metrics, got none")
    else:
        sweep.study.tell(trial.number, bits)
        best = sweep.study.best_trial
        result = f"{bits:.4f} bits/byte (best: {best.value:.4f}, trial {best.number})"
        print(f"trial {trial.number}: {result}", flush=True)
    return None


def wait_for_lock(folder: Path) -> None:
    """Wait until no process holds a run folder's lock, as the run of a killed sweep may; print a line while waiting."""
    try:
        with FolderLock(folder):
            return
    except LockedError as error:
        print(f"waiting: {error}", flush=True)
    with FolderLock(folder, wait=True):
        return


def final_bits_per_byte(folder: Path) -> float | None:
    """Return the final bits per byte of a run, from its metrics; None if the run has not ended."""
    finals = [
        line["final_bits_per_byte"] for line in read_metrics(folder / "metrics.jsonl") if "final_bits_per_byte" in line
    ]
    return finals[-1] if finals else None


def train_trial(sweep: Sweep, trial: Any, params: dict[str, Any]) -> bool:
    """Run `tricycle train`, report losses to Optuna, stop it if pruned; return whether it was; RuntimeError on failure.

    Raises:
        RuntimeError: the run failed; the message is the last line of its output.
    """
    folder = sweep.run_folder(trial.number)
    words = [sys.executable, "-m", "tricycle", "train"]
    if contains_run(folder):
        choices = ["--device", sweep.base.device, "--on-full-disk", sweep.base.on_full_disk]
        words += ["--resume", str(folder), *choices]
    else:
        words += [*sweep.plan.train, "--run-folder", str(folder), *sweep.flags(params)]
    pruned = False
    with (
        (sweep.folder / f"{folder.name}.log").open("ab") as log,
        child_process(words, sweep.plan.where, log) as process,
    ):
        for step, bits in held_out_losses(folder, process):
            if step not in trial.storage.get_trial(trial._trial_id).intermediate_values:
                trial.report(bits, step)
            if not pruned and trial.should_prune():
                process.terminate()
                pruned = True
    if process.returncode and final_bits_per_byte(folder) is None:
        raise RuntimeError(last_output_line(sweep.folder / f"{folder.name}.log"))
    return pruned


@contextlib.contextmanager
def child_process(words: list[str], where: str, log: Any) -> Iterator[subprocess.Popen]:
    """Start a process in the folder `where`, output to `log`; wait when the context exits; terminate it on errors."""
    process = subprocess.Popen(words, cwd=where, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield process
        process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def held_out_losses(folder: Path, process: subprocess.Popen) -> Iterator[tuple[int, float]]:
    """Poll metrics.jsonl; yield (step, bits per byte) of a run's finite evaluations until its process has ended."""
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
            time.sleep(POLL_SECONDS)


def last_output_line(log: Path) -> str:
    """Return the last non-empty line of a run's output, without "tricycle train: "; "no output" if there is none."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4000))
        lines = file.read().decode("utf-8", "replace").replace("\r", "\n").splitlines()
    last = next((line for line in reversed(lines) if line.strip()), "no output")
    return on_one_line(last.partition("tricycle train: ")[2] or last)


# -------------------------------------------------------------------- results
def trial_rows(sweep: Sweep) -> list[dict[str, Any]]:
    """Return a dict per finished trial: trial, state, bits_per_byte, last_estimate, seconds, fields by name, folder."""
    rows = []
    for trial in sweep.study.get_trials(deepcopy=False):
        if not trial.state.is_finished():
            continue
        bits = trial.value if trial.state.name == "COMPLETE" else None
        last = trial.intermediate_values[max(trial.intermediate_values)] if trial.intermediate_values else None
        seconds = (trial.datetime_complete - trial.datetime_start).total_seconds()
        params = {name: _six_digits(trial.params.get(name)) for name in sweep.over}
        row = {"trial": trial.number, "state": trial.state.name.lower(), "bits_per_byte": bits, "last_estimate": last}
        rows.append({**row, "seconds": round(seconds, 1), **params, "folder": sweep.run_folder(trial.number).name})
    return rows


def _six_digits(value: Any) -> Any:
    """Round a float to six significant digits; return other values unchanged."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def write_report(sweep: Sweep) -> list[dict[str, Any]]:
    """Write sweep.csv and sweep.png, with a row and a point per finished trial (at least one); return `trial_rows`."""
    rows = trial_rows(sweep)
    table = io.StringIO()
    writer = csv.DictWriter(table, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    with atomic_write(sweep.folder / "sweep.csv", text=True) as file:
        file.write(table.getvalue())
    results = [
        TrialResult(row["trial"], row["bits_per_byte"], row["last_estimate"], {k: row[k] for k in sweep.over})
        for row in rows
    ]
    log_fields = [name for name, field in sweep.over.items() if field.log]
    plot_sweep(results, sweep.folder / "sweep.png", log_fields, f"{len(rows)} trials")
    return rows


def report(sweep: Sweep) -> None:
    """Write sweep.csv and sweep.png, print trials, the best one and next commands; RuntimeError if none is complete."""
    rows = write_report(sweep)
    done = sorted((row for row in rows if row["bits_per_byte"] is not None), key=lambda row: row["bits_per_byte"])
    others = [row for row in rows if row["bits_per_byte"] is None]
    names = list(sweep.over)
    print(
        f"\n{'trial':>5}  {'bits/byte':>11}  {'seconds':>7}  " + "  ".join(f"{name:>{_width(name)}}" for name in names)
    )
    for row in [*done, *others][:MAX_ROWS]:
        bits = row["state"] if row["bits_per_byte"] is None else f"{row['bits_per_byte']:.4f}"
        values = "  ".join(f"{row[name]!s:>{_width(name)}}" for name in names)
        print(f"{row['trial']:>5}  {bits:>11}  {row['seconds']:>7.1f}  {values}")
    if len(rows) > MAX_ROWS:
        print(f"... and {len(rows) - MAX_ROWS} more in sweep.csv")
    print(f"table: {sweep.folder / 'sweep.csv'}; plot: {sweep.folder / 'sweep.png'}")
    if not done:
        raise RuntimeError(f"{sweep.folder}: expected a completed trial, got none")
    best = sweep.study.best_trial
    params = {name: _six_digits(best.params[name]) for name in sweep.over}
    print(f"best trial: {best.number}, {best.value:.4f} bits/byte. Train with these settings:")
    print(f"  {command_name('train', 'sweep')} {shlex.join([*sweep.plan.train, *sweep.flags(params)])}")
    best_folder = shlex.quote(sweep.run_folder(best.number).as_posix())
    print(f"generate text with the best model:\n  {command_name('generate', 'sweep')} {best_folder}")


def _width(name: str) -> int:
    """Return a column's width: the name's length, at least 10."""
    return max(10, len(name))
