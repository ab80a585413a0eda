"""Ranks that train together are killed at random moments, and in every phase, and go on as if nothing had happened.

    python -m tests.chaos.ranks --n 2 --phases 1 --failures 6 --seed 0

Each signal is sent to rank 0, to another rank, and to mpiexec. All of them must end within 10 s. Then the run goes on
in as many ranks, and must end equal, bit for bit, to one that was left alone; or in a single process, and end equal
within rounding. A second table is of ranks that fail by themselves: how soon all end, and which message is printed.
"""

from __future__ import annotations

import os
import random
import re
import signal
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from benchmarks.ranks import MPI_VARIABLES, mpiexec
from tricycle_cli.run import read_metrics

from .kills import MARKS, SIGNALS, Profile, Trial, Watched, random_moment, table
from .runs import PHASES, Case, Outcome, differences, finish, parser_of, temporary_bench

LIMIT = 10.0  # seconds in which all are to end
ROUNDING = 1e-3  # of weights and moments, after a few updates in another order of sums
STANDSTILL = 1.0  # seconds in which a process that only looks around did not go on
TARGETS = ("rank 0", "rank 1", "mpiexec")
# What Open MPI and MPICH say of a rank that a signal has ended, or that left by itself.
KILLED = r"process rank {rank} with PID .*signal 9|Killed \(signal 9\)"
LEFT = r",{rank}\] +Exit code: +3|EXIT CODE: 3"
PRELUDE = """
from tricycle_mpi.launch import launch_info
rank = launch_info().rank
handle = os.open({marks!r}, os.O_WRONLY)
os.write(handle, f"rank {{rank}} is {{os.getpid()}}\\n".encode())
"""


def with_ranks(case: Case, n: int) -> Case:
    """The same run in so many ranks; in a process of its own for 1."""
    program = mpiexec()
    return replace(case, launcher=(program or "mpiexec", "-n", str(n)) if n > 1 else ())


class WatchedRanks(Watched):
    """Ranks whose phases are seen from outside; a phase of rank 1 is called "1:update"."""

    def __init__(self, case: Case, words: Sequence[str], prelude: str = "", **settings: str) -> None:
        case.folder.mkdir(parents=True, exist_ok=True)
        marks = case.folder / "marks"
        marks.unlink(missing_ok=True)
        os.mkfifo(marks)
        reading = os.open(marks, os.O_RDONLY | os.O_NONBLOCK)
        self._writing = os.open(marks, os.O_WRONLY)  # until the end there is somebody who may write
        os.set_blocking(reading, True)
        lines = [f"mark(handle, f'{{rank}}:{name}', {place!r})\n" for name, place in case.phases.items()]
        whole = PRELUDE.format(marks=str(marks)) + MARKS + "".join(lines) + prelude
        self.process = case.start(words, whole, env={**case.environment(), **MPI_VARIABLES, **settings})
        self.started = time.monotonic()
        self.watch(reading)

    @property
    def pids(self) -> dict[str, int]:
        """Of mpiexec, and of all ranks that have begun."""
        matches = [re.fullmatch(r"(rank \d+) is (\d+)", name) for name in list(self._begun)]
        return {"mpiexec": self.process.pid} | {match[1]: int(match[2]) for match in matches if match}

    def wait_for(self, phase: str, number: int) -> bool:
        """Wait until a phase begins for the so manieth time; False where mpiexec ends before."""
        threading.Thread(target=self._say_when_over, daemon=True).start()
        return super().wait_for(phase, number)

    def _say_when_over(self) -> None:
        self.process.wait()
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def begun(self, phase: str) -> float:
        """When a phase has begun for the first time."""
        return self._begun[phase][0]

    def finish_within(self, seconds: float) -> tuple[Outcome, float]:
        """How mpiexec ended, and when the last of all processes had ended; those that had not then are killed.

        They are the `late` ones. A standstill of the whole machine, in which this process did not go on either, counts
        for nothing.
        """
        reader = threading.Thread(target=lambda: outcomes.append(finish(self.process, seconds + 30)))
        outcomes: list[Outcome] = []
        reader.start()
        asked = time.monotonic()
        until = asked + seconds
        ended: dict[str, float] = {}
        now = asked
        standstill = 0.0
        while len(ended) < len(self.pids) and now < until + standstill:
            for name, pid in self.pids.items():
                if name not in ended and not is_there(pid):
                    ended[name] = now - standstill
            time.sleep(0.005)
            before, now = now, time.monotonic()
            standstill += now - before if now - before > STANDSTILL else 0.0
        for name, pid in self.pids.items():
            if name not in ended and is_there(pid):
                os.kill(pid, signal.SIGKILL)
                ended[name] = time.monotonic()
        self.late = [name for name, moment in ended.items() if moment > asked + LIMIT]
        reader.join()
        os.close(self._writing)
        self._reader.join(5)
        return outcomes[0], max(ended.values())


def is_there(pid: int) -> bool:
    """Whether a process has not ended; a zombie has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# -------------------------------------------------------------------- signals from outside
@dataclass
class RankTrial(Trial):
    """A run of ranks in which one, or mpiexec, gets a signal, and which goes on.

    Attributes:
        target: who gets it.
        n_after: how many ranks go on.
    """

    target: str = "rank 0"
    n_after: int = 2


def perform(trial: RankTrial, case: Case, whole: Path, n: int = 2) -> RankTrial:
    """Send signals, go on, compare."""
    for moment in trial.moments:
        send(trial, with_ranks(case, n), moment)
    after = with_ranks(case, trial.n_after)
    done = finish(after.start(going_on(after, n, trial.n_after), env={**after.environment(), **MPI_VARIABLES}))
    if done.status != 0 or "Traceback" in done.err:
        trial.trouble.append(f"what went on ended with status {done.status}: {' '.join(done.error_lines)[-400:]}")
    elif trial.n_after == n:
        trial.trouble += differences(case.run, whole)
    else:
        trial.trouble += rough_differences(case.run, whole)
    if not trial.trouble:
        case.forget()
    answered = ", ".join(f"{answer:.2f} s" for answer in trial.answers)
    ended = "; ".join(trial.trouble)[:1500] or "equal"
    print(f"{trial.name}, on in {trial.n_after}: {ended}; ended after {answered}", file=sys.stderr, flush=True)
    return trial


def going_on(case: Case, n: int, n_after: int) -> list[str]:
    """The flags that go on with a run of n ranks; where nothing was left of it, those of one with as many batches."""
    words = list(case.resuming)
    if "--accumulation-steps" in words:
        place = words.index("--accumulation-steps") + 1
        words[place] = str(int(words[place]) * n // n_after)
    return words


def send(trial: RankTrial, case: Case, moment: tuple[str, int, float]) -> None:
    """Start the run, or go on with it, and send the signal at its moment."""
    phase, number, delay = moment
    program = WatchedRanks(case, case.resuming)
    if program.wait_for(phase, number):
        time.sleep(delay)
    pid = program.pids.get(trial.target)
    hit = pid is not None and is_there(pid)
    sent = time.monotonic()
    if pid is not None and hit:
        os.kill(pid, trial.number)
    outcome, ended = program.finish_within(60)
    if hit:
        trial.answers.append(max(0.0, ended - sent))
    if program.late:
        trial.trouble.append(f"{program.late} had not ended after {LIMIT:.0f} s")
    check_end(trial, outcome)


def check_end(trial: RankTrial, outcome: Outcome) -> None:
    """All have ended soon, and nothing more is printed than what happened."""
    if "Traceback" in outcome.err:
        trial.trouble.append(f"a trace: {outcome.err[-600:]}")
    messages = [line for line in outcome.error_lines if line.startswith("train_smol_gpt.py: ")]
    if len(messages) > 1:
        trial.trouble.append(f"more than one message: {messages}")
    if outcome.status == 0 or trial.target == "mpiexec" or trial.number != signal.SIGKILL:
        return
    words = " ".join([*outcome.error_lines, *outcome.out.split()])
    if not re.search(KILLED.format(rank=trial.target[-1]), words):
        trial.trouble.append(f"the killed rank is not named: {words[-400:]}")


def rough_differences(run: Path, other: Path) -> list[str]:
    """In what two finished run folders differ, but for rounding and timings."""
    names, others = (sorted(path.name for path in folder.iterdir()) for folder in (run, other))
    if names != others:
        return [f"files {names} and {others}"]
    metrics = [read_metrics(folder / "metrics.jsonl") for folder in (run, other)]
    if [line["step"] for line in metrics[0]] != [line["step"] for line in metrics[1]]:
        return ["metrics.jsonl: other lines"]
    names = ("loss", "held_out_loss", "final_loss")
    pairs = [(one[name], two[name]) for one, two in zip(*metrics) for name in names if name in one]
    differing = [f"metrics.jsonl: {a} and {b}" for a, b in pairs if abs(a - b) > ROUNDING]
    tensors, other_tensors = (load_file(folder / "last.safetensors") for folder in (run, other))
    if tensors.keys() != other_tensors.keys():
        return [*differing, "last.safetensors: other tensors"]
    far = [name for name in tensors if not np.allclose(tensors[name], other_tensors[name], rtol=0.01, atol=ROUNDING)]
    return differing + [f"last.safetensors: {name}" for name in far]


def trials_of(
    generator: random.Random, profile: Profile, n: int, n_phases: int, numbers: Sequence[int]
) -> list[RankTrial]:
    """Each signal for each target, n times at random moments of the whole run, and so often in each phase.

    In every second trial what goes on is killed too; every third goes on in one process.
    """
    trials = []
    for number in numbers:
        for target in TARGETS:
            rank = "1" if target == "rank 1" else "0"
            phases = [f"{rank}:run"] * n
            phases += [name for name in map(f"{rank}:{{}}".format, PHASES) if profile.seconds[name]] * n_phases
            for i, phase in enumerate(phases):
                moments = [random_moment(generator, profile, phase) for _ in range(1 + i % 2)]
                name = f"{signal.Signals(number).name} to {target}"
                trials.append(RankTrial(name, number, moments, target=target, n_after=1 if i % 3 == 2 else 2))
    return trials


def profile_of(case: Case, n: int = 2) -> Profile:
    """Let a run alone, and look at its phases.

    Raises:
        RuntimeError: it does not even run then.
    """
    program = WatchedRanks(with_ranks(case, n), case.words)
    outcome, _ = program.finish_within(120)
    if outcome.status != 0:
        raise RuntimeError(f"the run that was left alone ended with status {outcome.status}: {outcome.err[-400:]}")
    return program.profile


# -------------------------------------------------------------------- ranks that fail by themselves
# Before an update, or instead of a number that it computes.
FAILING = """
from tricycle import training
from tricycle_cli import updates
usual_batches, usual_supervised_loss = updates.RunSession.batches, training.supervised_loss
is_bad = [False]
def batches(session, source):
    is_bad[0] = session.step + 1 == {step} and rank == {rank}
    if is_bad[0]:
        import time
        os.write(handle, b"failing\\n")
        {act}
    return usual_batches(session, source)
def supervised_loss(model, loss_fn):
    batch_loss = usual_supervised_loss(model, loss_fn)
    return lambda batch, factor: batch_loss(batch, factor * float("nan") if {is_nan} and is_bad[0] else factor)
updates.RunSession.batches, training.supervised_loss = batches, supervised_loss
"""
SILENT_SECONDS = 2.0  # after which others ask, in what follows
# By what happens: what is done, and a pattern of the one line that says so; {rank} and {other} are numbers.
FAILURES = {
    "raises an error": ("raise ValueError('odd')", r"^train_smol_gpt.py: rank {rank} of 2 on \S+: odd$"),
    "runs out of memory": ("raise MemoryError('no room')", r"^train_smol_gpt.py: rank {rank} of 2 on \S+: no room: "),
    "is killed (kill -9)": ("os.kill(os.getpid(), signal.SIGKILL)", KILLED),
    "leaves (os._exit)": ("os._exit(3)", LEFT),
    "meets NaN (--on-nan stop)": ("pass", r"^train_smol_gpt.py: step {step}: rank {rank}: the loss is nan; "),
    "is stopped (kill -STOP), timeout 2 s": (
        "os.kill(os.getpid(), signal.SIGSTOP)",
        r"^train_smol_gpt.py: rank {other} of 2 on \S+: no answer from rank {rank}: rank {other} waited 2 seconds",
    ),
    "hangs, timeout 2 s": (
        "time.sleep(100)",
        r"^train_smol_gpt.py: rank {other} of 2 on \S+: no answer from rank {rank}: rank {other} waited 2 seconds",
    ),
}


@dataclass
class Failure:
    """How ranks ended of which one failed.

    Attributes:
        seconds: from that on until the last process had ended.
        trouble: what was not as it should be.
    """

    name: str
    seconds: float
    trouble: list[str]


def fail(name: str, case: Case, whole: Path | None, rank: int, step: int) -> Failure:
    """Let a rank fail before or in an update, look at the end, and go on; `whole` None leaves that out."""
    act, pattern = FAILURES[name]
    prelude = FAILING.format(act=act, rank=rank, step=step, is_nan="NaN" in name)
    case = with_ranks(case, 2)
    words = [*case.words, "--on-nan", "stop"]
    program = WatchedRanks(case, words, prelude, TRICYCLE_MPI_TIMEOUT=str(SILENT_SECONDS))
    if not program.wait_for("failing", 1):
        return Failure(name, float("nan"), [f"it never failed: {program.finish().error_lines}"])
    outcome, ended = program.finish_within(60)
    failure = Failure(name, ended - program.begun("failing"), [])
    pattern = pattern.format(rank=rank, other=1 - rank, step=step)
    by_program = pattern.startswith("^")  # in a line of its own; else the launcher says it, in several
    output = "\n".join(outcome.error_lines) if by_program else " ".join([*outcome.error_lines, *outcome.out.split()])
    if outcome.status == 0 or not re.search(pattern, output, re.M):
        failure.trouble.append(f"status {outcome.status}, expected {pattern}: {output[-600:]}")
    n_messages = sum(line.startswith("train_smol_gpt.py: ") for line in outcome.error_lines)
    if n_messages != by_program or "Traceback" in output:
        failure.trouble.append(f"{n_messages} messages: {output[-600:]}")
    if failure.seconds > LIMIT:
        failure.trouble.append(f"{program.late} had not ended after {LIMIT:.0f} s")
    if whole is not None:
        done = finish(case.start(case.resuming, env={**case.environment(), **MPI_VARIABLES}))
        failure.trouble += [each for each in differences(case.run, whole) if not each.startswith("data.json")]
        failure.trouble += [f"what went on ended with {done.status}: {done.error_lines}"] if done.status else []
    if not failure.trouble:
        case.forget()
    print(f"{name}: {'; '.join(failure.trouble) or 'equal'}; {failure.seconds:.2f} s", file=sys.stderr, flush=True)
    return failure


def failure_table(failures: Sequence[Failure]) -> str:
    """Lines of Markdown."""
    rows = ["| a rank | trials | went wrong | all had ended after, median and most |", "|:---|---:|---:|:---|"]
    by_name: dict[str, list[Failure]] = defaultdict(list)
    for failure in failures:
        by_name[failure.name].append(failure)
    for name, group in by_name.items():
        seconds = [failure.seconds for failure in group]
        wrong = sum(bool(failure.trouble) for failure in group)
        rows.append(f"| {name} | {len(group)} | {wrong} | {statistics.median(seconds):.1f} s, {max(seconds):.1f} s |")
    return "\n".join(rows)


def main() -> int:
    parser = parser_of(__doc__, jobs=1)
    parser.add_argument("--n", type=int, default=2, help="times that each signal comes to each at a random moment")
    parser.add_argument("--phases", type=int, default=1, help="times that it comes in each phase")
    parser.add_argument("--failures", type=int, default=6, help="times that a rank fails in each way")
    arguments = parser.parse_args()
    generator = random.Random(arguments.seed)
    started = time.monotonic()
    with temporary_bench(arguments.folder) as bench:
        whole = bench.case("whole")
        profile = profile_of(whole)
        trials = trials_of(generator, profile, arguments.n, arguments.phases, [signal.SIGKILL, *SIGNALS])
        ways = [(kind, i % 2, generator.randint(1, 12)) for kind in FAILURES for i in range(arguments.failures)]
        with ThreadPoolExecutor(arguments.jobs) as pool:
            jobs = [pool.submit(perform, each, bench.case(f"trial-{i}"), whole.run) for i, each in enumerate(trials)]
            tried = [job.result() for job in jobs]
            ends = [
                pool.submit(fail, kind, bench.case(f"failure-{i}"), whole.run, rank, step)
                for i, (kind, rank, step) in enumerate(ways)
            ]
            failures = [end.result() for end in ends]
    print(table(tried))
    print(failure_table(failures))
    wrong = [f"{trial.name} at {trial.moments}: {'; '.join(trial.trouble)}" for trial in tried if trial.trouble]
    wrong += [f"{failure.name}: {'; '.join(failure.trouble)}" for failure in failures if failure.trouble]
    for line in wrong:
        print(f"WRONG: {line[:1500]}")
    summary = f"{len(tried)} trials with {sum(trial.hits for trial in tried)} signals, {len(failures)} failures"
    print(f"{summary}, {len(wrong)} went wrong; {(time.monotonic() - started) / 60:.1f} minutes")
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.platform != "linux":
        raise SystemExit("expected Linux, whose /proc tells who has ended")
    raise SystemExit(main())
