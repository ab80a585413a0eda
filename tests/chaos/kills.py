"""Kill training at random moments and in every phase, resume it, and compare it with an uninterrupted run.

    python -m tests.chaos.kills --n 200 --seed 0

A program reports on a pipe the start and the end of each phase. A trial waits for the start of one and for a random
fraction of the duration of the phase; then it sends a signal, and measures how long the program takes to exit. In every
second trial the resumed run is killed, too. The last resumed run must be equal, bit for bit, to an uninterrupted run.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from .runs import (
    PHASES,
    Outcome,
    TrainingRun,
    Workspace,
    differences,
    finish,
    new_parser,
    temporary_workspace,
    write_text,
)

PHASE_HOOKS = """
import importlib
def hook_phase(handle, name, place):
    module, _, path = place.partition(":")
    owner = importlib.import_module(module)
    *parents, last = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original = getattr(owner, last)
    def wrapped(*args, **options):
        os.write(handle, f"{name}\\n".encode())
        try:
            return original(*args, **options)
        finally:
            os.write(handle, f"end of {name}\\n".encode())
    setattr(owner, last, wrapped)
"""
SIGNALS = [signal.SIGTERM, signal.SIGINT] + ([signal.SIGHUP] if os.name == "posix" else [])
MAX_SECONDS = 2.0  # from a signal to the exit of the program
PATIENT = 30.0  # seconds: for slow machines; `python -m tests.chaos.kills` has the documented limit
PhaseTimes = defaultdict[str, list[float]]  # the durations in seconds of each occurrence of each phase of a run


class MonitoredProcess:
    """A process that reports its phases on a pipe."""

    def __init__(self, case: TrainingRun, words: Sequence[str], prelude: str = "") -> None:
        reading, writing = os.pipe()
        marks = "".join(f"hook_phase({writing}, {name!r}, {place!r})\n" for name, place in case.phases.items())
        self.process = case.start(words, prelude + PHASE_HOOKS + marks, pass_fds=(writing,))
        os.close(writing)
        self.start_reader(reading)

    def start_reader(self, reading: int) -> None:
        """Start the thread that reads the reported phases."""
        self.phase_times: PhaseTimes = defaultdict(list)
        self._begun: dict[str, list[float]] = defaultdict(list)
        self._changed = threading.Condition()
        self._over = False
        self._reader = threading.Thread(target=self._read, args=(reading,), daemon=True)
        self._reader.start()

    def _read(self, reading: int) -> None:
        with os.fdopen(reading, encoding="utf-8") as lines:
            for line in lines:
                name = line.strip().removeprefix("end of ")
                with self._changed:
                    if line.startswith("end of "):
                        self.phase_times[name].append(time.monotonic() - self._begun[name][-1])
                    else:
                        self._begun[name].append(time.monotonic())
                    self._changed.notify_all()
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def wait_for_phase(self, phase: str, number: int) -> bool:
        """Wait for the `number`-th start of a phase; return False if the program exits before."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or len(self._begun[phase]) >= number, timeout=300)
            return len(self._begun[phase]) >= number

    def finish(self) -> Outcome:
        outcome = finish(self.process)
        self._reader.join()
        return outcome


@dataclass
class Trial:
    """A run that gets signals, and is resumed.

    Attributes:
        number: of the signal; 0 for a failure inside the program.
        moments: (phase, number of its occurrence, seconds after its start) for each signal.
        second_signal_delay: seconds after which the signal is repeated; 0 for no repetition.
        limit: the most seconds from a signal to the exit.
        response_seconds: from each delivered signal to the exit, without the time in which the program waited for a
            CPU.
        problems: descriptions of all failed checks.
    """

    name: str
    number: int
    moments: list[tuple[str, int, float]]
    second_signal_delay: float = 0.0
    limit: float = MAX_SECONDS
    response_seconds: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def n_delivered(self) -> int:
        return len(self.response_seconds)


def run_trial(trial: Trial, case: TrainingRun, reference: Path) -> Trial:
    """Send the signals of a trial, resume the run, and compare it with the reference run folder."""
    for moment in trial.moments:
        interrupt(trial, case, moment)
    finish_trial(trial, case, case.resume(), lambda: differences(case.run_folder, reference))
    return trial


def finish_trial(trial: Trial, case: TrainingRun, resumed: Outcome, compare: Callable[[], list[str]]) -> None:
    """Check the resumed run, and its folder by `compare`; remove a run without problems, and print the result."""
    if resumed.status != 0 or "Traceback" in resumed.err:
        trial.problems.append(f"the resumed run: {resumed.failure}")
    else:
        trial.problems += compare()
        # locks and unfinished files of killed processes are removed by the next run
        left = [path.name for path in (case.folder / "cache").rglob(".*") if path.name != ".lock"]
        trial.problems += [f"left in the cache: {left}"] if left else []
    if not trial.problems:
        case.remove()
    response = ", ".join(f"{seconds:.2f} s" for seconds in trial.response_seconds)
    result = "; ".join(trial.problems)[:1500] or "equal"
    print(f"{trial.name}: {result}; ended after {response}", file=sys.stderr, flush=True)


def check_trial(trial: Trial, case: TrainingRun, reference: TrainingRun) -> None:
    """Run a trial on a machine that may be slow; assert that a signal was delivered, and that nothing is wrong."""
    trial.limit = PATIENT
    assert run_trial(trial, case, reference.run_folder).problems == []
    assert trial.n_delivered


def interrupt(trial: Trial, case: TrainingRun, moment: tuple[str, int, float]) -> None:
    """Start or resume the run, and send the signal at a moment."""
    phase, number, delay = moment
    program = MonitoredProcess(case, case.resume_args)
    if not program.wait_for_phase(phase, number):
        outcome = program.finish()
        if outcome.status != 0:
            trial.problems.append(f"ended by itself: {outcome.failure}")
        return
    time.sleep(delay)
    sent = time.monotonic()
    hit = program.process.poll() is None
    program.process.send_signal(trial.number)
    if trial.second_signal_delay:
        time.sleep(trial.second_signal_delay)
        program.process.send_signal(trial.number)
    waited = measure_cpu_wait(program.process)
    outcome = program.finish()
    if hit:
        trial.response_seconds.append(max(0.0, time.monotonic() - sent - waited))
    check_exit(trial, outcome)


def measure_cpu_wait(process: subprocess.Popen[str]) -> float:
    """Wait for the exit of a process; return the seconds for which it waited for a CPU (0 if unknown)."""
    delays = []
    while process.poll() is None:
        try:
            fields = Path(f"/proc/{process.pid}/schedstat").read_text(encoding="ascii").split()
            delays.append(int(fields[1]) * 1e-9)
        except (OSError, IndexError, ValueError):
            pass
        time.sleep(0.005)
    return delays[-1] - delays[0] if delays else 0.0


def check_exit(trial: Trial, outcome: Outcome) -> None:
    """Check that a program was terminated by the signal, or saved its state and exited with status 0."""
    allowed = {0, -trial.number}
    if trial.number == signal.SIGINT:  # the second signal may arrive while Python exits
        allowed.add(130)
    if outcome.status not in allowed:
        trial.problems.append(f"after {trial.name}: {outcome.failure}")
    if "Traceback" in outcome.err:
        trial.problems.append(f"a trace: {outcome.err[-600:]}")
    if trial.number != signal.SIGKILL and trial.response_seconds and trial.response_seconds[-1] > trial.limit:
        trial.problems.append(f"exited after {trial.response_seconds[-1]:.2f} s")


# -------------------------------------------------------------------- trials
def random_moment(generator: random.Random, phase_times: PhaseTimes, phase: str) -> tuple[str, int, float]:
    """Return a random moment in a random occurrence of a phase."""
    number = generator.randint(1, len(phase_times[phase]))
    return phase, number, generator.uniform(0, statistics.median(phase_times[phase]))


def random_kills(generator: random.Random, phase_times: PhaseTimes, n: int, number: int) -> list[Trial]:
    """Return n trials with a signal at random moments of the run; every second one kills the resumed run, too."""
    trials = []
    for i in range(n):
        moments = [random_moment(generator, phase_times, "run") for _ in range(1 + i % 2)]
        twice = generator.uniform(0.001, 0.1) if i % 4 == 3 and number != signal.SIGKILL else 0.0
        trials.append(Trial(signal.Signals(number).name, number, moments, twice))
    return trials


def kills_by_phase(generator: random.Random, phase_times: PhaseTimes, n: int, numbers: Sequence[int]) -> list[Trial]:
    """Return n trials for each signal and phase; every second one sends the signal to the resumed run, too."""
    trials = []
    for phase in PHASES:
        for number in numbers:
            for i in range(n):
                moments = [random_moment(generator, phase_times, phase) for _ in range(1 + i % 2)]
                trials.append(Trial(f"{signal.Signals(number).name} in {phase}", number, moments))
    return trials


def measure_phases(case: TrainingRun) -> PhaseTimes:
    """Measure the phases of an uninterrupted run.

    Raises:
        RuntimeError: the run fails.
    """
    program = MonitoredProcess(case, case.start_args)
    if (outcome := program.finish()).status != 0:
        raise RuntimeError(f"the uninterrupted run: {outcome.failure}")
    return program.phase_times


def run_trials(workspace: Workspace, reference: Path, trials: Sequence[Trial], n_jobs: int) -> list[Trial]:
    """Run trials, at most `n_jobs` at a time."""
    with ThreadPoolExecutor(n_jobs) as pool:
        cases = [workspace.new_run(f"trial-{i}") for i in range(len(trials))]
        return list(pool.map(lambda pair: run_trial(pair[0], pair[1], reference), zip(trials, cases)))


def table(trials: Sequence[Trial], title: str = "signal") -> str:
    """Return a Markdown table of trials: counts, failures and response times by name."""
    rows = [f"| {title} | trials | delivered | failed | seconds until all had exited, median and maximum |"]
    rows.append("|:---|---:|---:|---:|:---|")
    by_name: dict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        by_name[trial.name].append(trial)
    for name, group in by_name.items():
        seconds = [each for trial in group for each in trial.response_seconds]
        response = f"{statistics.median(seconds):.2f} s, {max(seconds):.2f} s" if seconds else ""
        wrong = sum(bool(trial.problems) for trial in group)
        rows.append(f"| {name} | {len(group)} | {len(seconds)} | {wrong} | {response} |")
    return "\n".join(rows)


def large_text_trials(folder: Path, generator: random.Random, n: int, n_jobs: int) -> list[Trial]:
    """Measure response times while a tokenizer is trained on, and applied to, 24 MB of text."""
    workspace = Workspace(folder / "large")
    case = workspace.new_run("reference", "--vocab-size", "2000")
    write_text(case.text, n_lines=530_000)
    program = MonitoredProcess(case, case.start_args)
    program.wait_for_phase("update", 1)
    program.process.kill()
    program.finish()
    trials = []
    for phase in ("tokeniser training", "dataset building"):
        for number in SIGNALS:
            name = f"{signal.Signals(number).name} in {phase} (24 MB of text)"
            trials += [Trial(name, number, [random_moment(generator, program.phase_times, phase)]) for _ in range(n)]

    def run_one(pair: tuple[int, Trial]) -> Trial:
        i, trial = pair
        trial_run = TrainingRun(folder / "large" / f"trial-{i}", case.text, case.flags)
        interrupt(trial, trial_run, trial.moments[0])
        trial_run.remove()
        return trial

    with ThreadPoolExecutor(n_jobs) as pool:
        return list(pool.map(run_one, enumerate(trials)))


def main() -> int:
    parser = new_parser(__doc__, jobs=2)
    parser.add_argument("--n", type=int, default=200, help="SIGKILLs at random moments")
    parser.add_argument("--signals", type=int, default=30, help="other signals at random moments, each")
    parser.add_argument("--phases", type=int, default=2, help="trials of each signal in each phase")
    parser.add_argument("--large", type=int, default=2, help="trials of each signal in the phases of a large text")
    arguments = parser.parse_args()
    generator = random.Random(arguments.seed)
    started = time.monotonic()
    with temporary_workspace(arguments.folder) as workspace:
        reference = workspace.new_run("reference")
        phase_times = measure_phases(reference)
        trials = random_kills(generator, phase_times, arguments.n, signal.SIGKILL)
        for number in SIGNALS:
            trials += random_kills(generator, phase_times, arguments.signals, number)
        trials += kills_by_phase(generator, phase_times, arguments.phases, [signal.SIGKILL, *SIGNALS])
        tried = run_trials(workspace, reference.run_folder, trials, arguments.jobs)
        if arguments.large:
            print(table(tried), flush=True)
            tried += large_text_trials(workspace.folder, generator, arguments.large, arguments.jobs)
    print(table(tried))
    wrong = [trial for trial in tried if trial.problems]
    for trial in wrong:
        moments = f"{trial.moments}, second signal after {trial.second_signal_delay:.3f} s"
        print(f"FAILED: {trial.name} at {moments}: {'; '.join(trial.problems)[:1500]}")
    n_signals = sum(trial.n_delivered for trial in tried)
    summary = f"{len(tried)} trials, {n_signals} signals, {len(wrong)} failed"
    print(f"{summary}; {(time.monotonic() - started) / 60:.1f} minutes; Python {sys.version.split()[0]}")
    return 1 if wrong else 0


if __name__ == "__main__":
    if os.name != "posix":
        raise SystemExit("expected a POSIX system")
    raise SystemExit(main())
