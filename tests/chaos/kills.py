"""Training is killed at random moments, and in every phase, and goes on as if nothing had happened.

    python -m tests.chaos.kills --n 200 --seed 0

A program says on a pipe which phase it enters and leaves. A trial waits for the beginning of one, and for a random part
of the time that the phase takes; then it sends its signal, and measures how long the program takes to end. In every
second trial the run that goes on is killed too. What goes on after that must end equal, bit for bit, to a run that was
left alone.
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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from .runs import PHASES, Bench, Case, Outcome, differences, finish, parser_of, temporary_bench, write_text

MARKS = """
import importlib
def mark(handle, name, place):
    module, _, path = place.partition(":")
    owner = importlib.import_module(module)
    *parents, last = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    usual = getattr(owner, last)
    def marked(*args, **options):
        os.write(handle, f"{name}\\n".encode())
        try:
            return usual(*args, **options)
        finally:
            os.write(handle, f"end of {name}\\n".encode())
    setattr(owner, last, marked)
"""
SIGNALS = [signal.SIGTERM, signal.SIGINT] + ([signal.SIGHUP] if os.name == "posix" else [])
LIMIT = 2.0  # seconds in which a signal is to be answered


@dataclass
class Profile:
    """How often a phase comes in a run that is left alone, and how long it takes."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def longest(self, phase: str) -> float:
        return max(self.seconds[phase], default=0.0)


class Watched:
    """A program whose phases are seen from outside."""

    def __init__(self, case: Case, words: Sequence[str], prelude: str = "") -> None:
        reading, writing = os.pipe()
        marks = "".join(f"mark({writing}, {name!r}, {place!r})\n" for name, place in case.phases.items())
        self.process = case.start(words, prelude + MARKS + marks, pass_fds=(writing,))
        os.close(writing)
        self.watch(reading)

    def watch(self, reading: int) -> None:
        """Note what the program says of its phases."""
        self.profile = Profile()
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
                        self.profile.seconds[name].append(time.monotonic() - self._begun[name][-1])
                    else:
                        self._begun[name].append(time.monotonic())
                    self._changed.notify_all()
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def wait_for(self, phase: str, number: int) -> bool:
        """Wait until a phase begins for the so manieth time; False where the program ends before."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or len(self._begun[phase]) >= number, timeout=300)
            return len(self._begun[phase]) >= number

    def finish(self) -> Outcome:
        outcome = finish(self.process)
        self._reader.join()
        return outcome


@dataclass
class Trial:
    """One run that is killed, once or twice, and goes on.

    Attributes:
        moments: (phase, which time it comes, seconds after its beginning) for each kill.
        twice: the signal comes a second time, so many seconds later; 0 for once.
        limit: seconds in which it is to be answered.
        answers: seconds from each signal to the end of the program, where the program was still there; but for the time
            in which it waited for a processor, as on a machine with nothing else to do.
        trouble: what was not as it should be.
    """

    name: str
    number: int
    moments: list[tuple[str, int, float]]
    twice: float = 0.0
    limit: float = LIMIT
    answers: list[float] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)

    @property
    def hits(self) -> int:
        return len(self.answers)


def perform(trial: Trial, case: Case, whole: Path) -> Trial:
    """Kill, go on, compare."""
    for moment in trial.moments:
        kill(trial, case, moment)
    done = case.resume()
    if done.status != 0 or "Traceback" in done.err:
        trial.trouble.append(f"what went on ended with status {done.status}: {' '.join(done.error_lines)[-400:]}")
    else:
        trial.trouble += differences(case.run, whole)
        # what a killed process held until its work was done is nobody's, and is taken over
        left = [path.name for path in (case.folder / "cache").rglob(".*") if path.name != ".lock"]
        trial.trouble += [f"left in the cache: {left}"] if left else []
    if not trial.trouble:
        case.forget()
    answered = ", ".join(f"{answer:.2f} s" for answer in trial.answers)
    print(
        f"{trial.name}: {'; '.join(trial.trouble)[:1500] or 'equal'}; ended after {answered}",
        file=sys.stderr,
        flush=True,
    )
    return trial


def kill(trial: Trial, case: Case, moment: tuple[str, int, float]) -> None:
    """Start the run, or go on with it, and send the signal at its moment."""
    phase, number, delay = moment
    program = Watched(case, case.resuming)
    if not program.wait_for(phase, number):
        outcome = program.finish()
        if outcome.status != 0:
            trial.trouble.append(
                f"ended by itself with status {outcome.status}: {' '.join(outcome.error_lines)[-400:]}"
            )
        return
    time.sleep(delay)
    sent = time.monotonic()
    hit = program.process.poll() is None
    program.process.send_signal(trial.number)
    if trial.twice:
        time.sleep(trial.twice)
        program.process.send_signal(trial.number)
    waited = waiting_for_a_processor(program.process)
    outcome = program.finish()
    if hit:
        trial.answers.append(max(0.0, time.monotonic() - sent - waited))
    check_end(trial, outcome)


def waiting_for_a_processor(process: subprocess.Popen[str]) -> float:
    """Wait for the end of a program; of that time, the seconds in which others had the processors (0 where unknown)."""
    delays = []
    while process.poll() is None:
        try:
            fields = Path(f"/proc/{process.pid}/schedstat").read_text(encoding="ascii").split()
            delays.append(int(fields[1]) * 1e-9)
        except (OSError, IndexError, ValueError):
            pass
        time.sleep(0.005)
    return delays[-1] - delays[0] if delays else 0.0


def check_end(trial: Trial, outcome: Outcome) -> None:
    """What a program may do that gets a signal: end by it, or save and end well."""
    allowed = {0, -trial.number}
    if trial.number == signal.SIGINT:  # the second may come when Python is about to end
        allowed.add(130)
    if trial.number == signal.SIGKILL:
        allowed = {0, -signal.SIGKILL}
    if outcome.status not in allowed:
        trial.trouble.append(f"status {outcome.status} after {trial.name}: {' '.join(outcome.error_lines)[-400:]}")
    if "Traceback" in outcome.err:
        trial.trouble.append(f"a trace: {outcome.err[-600:]}")
    if trial.number != signal.SIGKILL and trial.answers and trial.answers[-1] > trial.limit:
        trial.trouble.append(f"answered after {trial.answers[-1]:.2f} s")


# -------------------------------------------------------------------- what is tried
def random_moment(generator: random.Random, profile: Profile, phase: str) -> tuple[str, int, float]:
    """Somewhere in a phase, in any of the times it comes."""
    number = generator.randint(1, len(profile.seconds[phase]))
    return phase, number, generator.uniform(0, statistics.median(profile.seconds[phase]))


def random_kills(generator: random.Random, profile: Profile, n: int, number: int) -> list[Trial]:
    """One signal at n random moments of the whole run; in every second trial what goes on is killed too."""
    trials = []
    for i in range(n):
        moments = [random_moment(generator, profile, "run") for _ in range(1 + i % 2)]
        twice = generator.uniform(0.001, 0.1) if i % 4 == 3 and number != signal.SIGKILL else 0.0
        trials.append(Trial(signal.Signals(number).name, number, moments, twice))
    return trials


def kills_by_phase(generator: random.Random, profile: Profile, n: int, numbers: Sequence[int]) -> list[Trial]:
    """Each signal in each phase, n times; in every second trial what goes on gets it in the same phase, if it comes."""
    trials = []
    for phase in PHASES:
        for number in numbers:
            for i in range(n):
                moments = [random_moment(generator, profile, phase) for _ in range(1 + i % 2)]
                trials.append(Trial(f"{signal.Signals(number).name} in {phase}", number, moments))
    return trials


def profile_of(case: Case) -> Profile:
    """Let a run alone, and look at its phases.

    Raises:
        RuntimeError: it does not even run then.
    """
    program = Watched(case, case.words)
    outcome = program.finish()
    if outcome.status != 0:
        raise RuntimeError(f"the run that was left alone ended with status {outcome.status}: {outcome.err[-400:]}")
    return program.profile


def try_all(bench: Bench, whole: Path, trials: Sequence[Trial], n_jobs: int) -> list[Trial]:
    """Perform trials, so many at once."""
    with ThreadPoolExecutor(n_jobs) as pool:
        cases = [bench.case(f"trial-{i}") for i in range(len(trials))]
        return list(pool.map(lambda pair: perform(pair[0], pair[1], whole), zip(trials, cases)))


def table(trials: Sequence[Trial]) -> str:
    """Lines of Markdown: by what was tried, how often, how many went wrong, and how soon signals were answered."""
    rows = ["| signal | trials | signals that met the run | went wrong | answered within, median and most |"]
    rows.append("|:---|---:|---:|---:|:---|")
    by_name: dict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        by_name[trial.name].append(trial)
    for name, group in by_name.items():
        answers = [answer for trial in group for answer in trial.answers]
        answered = f"{statistics.median(answers):.2f} s, {max(answers):.2f} s" if answers else ""
        wrong = sum(bool(trial.trouble) for trial in group)
        rows.append(f"| {name} | {len(group)} | {len(answers)} | {wrong} | {answered} |")
    return "\n".join(rows)


def large_text(folder: Path, generator: random.Random, n: int, n_jobs: int) -> list[Trial]:
    """How soon signals are answered while a text of 24 MB is learnt from and tokenised; nothing is compared."""
    bench = Bench(folder / "large")
    case = bench.case("whole", "--vocab-size", "2000")
    write_text(case.text, n_lines=530_000)
    program = Watched(case, case.words)
    program.wait_for("update", 1)
    program.process.kill()
    program.finish()
    trials = []
    for phase in ("tokeniser training", "dataset building"):
        for number in SIGNALS:
            name = f"{signal.Signals(number).name} in {phase} (24 MB of text)"
            trials += [Trial(name, number, [random_moment(generator, program.profile, phase)]) for _ in range(n)]

    def one(pair: tuple[int, Trial]) -> Trial:
        i, trial = pair
        own = Case(folder / "large" / f"trial-{i}", case.text, case.flags)
        kill(trial, own, trial.moments[0])
        own.forget()
        return trial

    with ThreadPoolExecutor(n_jobs) as pool:
        return list(pool.map(one, enumerate(trials)))


def main() -> int:
    parser = parser_of(__doc__, jobs=2)
    parser.add_argument("--n", type=int, default=200, help="SIGKILLs at random moments")
    parser.add_argument("--signals", type=int, default=30, help="others at random moments, each")
    parser.add_argument("--phases", type=int, default=2, help="times that each comes in each phase")
    parser.add_argument("--large", type=int, default=2, help="times that each comes in the phases of a large text")
    arguments = parser.parse_args()
    generator = random.Random(arguments.seed)
    started = time.monotonic()
    with temporary_bench(arguments.folder) as bench:
        whole = bench.case("whole")
        profile = profile_of(whole)
        trials = random_kills(generator, profile, arguments.n, signal.SIGKILL)
        for number in SIGNALS:
            trials += random_kills(generator, profile, arguments.signals, number)
        trials += kills_by_phase(generator, profile, arguments.phases, [signal.SIGKILL, *SIGNALS])
        tried = try_all(bench, whole.run, trials, arguments.jobs)
        if arguments.large:
            print(table(tried), flush=True)
            tried += large_text(bench.folder, generator, arguments.large, arguments.jobs)
    print(table(tried))
    wrong = [trial for trial in tried if trial.trouble]
    for trial in wrong:
        print(f"WRONG: {trial.name} at {trial.moments}, twice {trial.twice:.3f}: {'; '.join(trial.trouble)[:1500]}")
    n_signals = sum(trial.hits for trial in tried)
    summary = f"{len(tried)} trials, {n_signals} signals, {len(wrong)} went wrong"
    print(f"{summary}; {(time.monotonic() - started) / 60:.1f} minutes; Python {sys.version.split()[0]}")
    return 1 if wrong else 0


if __name__ == "__main__":
    if os.name != "posix":
        raise SystemExit("expected a POSIX system, whose signals these are")
    raise SystemExit(main())
