"""Kill ranks of distributed training at random moments and in every phase, resume the run, and compare it.

    python -m tests.chaos.ranks --n 2 --phases 1 --failures 6 --seed 0

Each signal is sent to rank 0, to another rank, and to mpiexec. All processes must exit within 10 s. Then the run is
resumed with as many ranks, and must be equal, bit for bit, to an uninterrupted run; or in a single process, and be
equal within rounding. A second table shows internal failures of a rank: the time until all exit, and wrong messages.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.ranks import MPI_VARIABLES, mpiexec
from tricycle.checkpoint import load_checkpoint
from tricycle_cli.run import read_metrics

from .kills import PHASE_HOOKS, SIGNALS, MonitoredProcess, PhaseTimes, Trial, finish_trial, random_moment, table
from .runs import PHASES, Outcome, TrainingRun, differences, finish, new_parser, temporary_workspace

N_RANKS = 2  # of each run before it is resumed
MAX_SECONDS = 10.0  # until all processes have exited
ROUNDING = 1e-3  # of weights and moments, after a few updates with another order of summation
STANDSTILL = 1.0  # seconds without progress of the monitoring process: the whole machine stalled
TARGETS = ("rank 0", "rank 1", "mpiexec")
# Messages of Open MPI and MPICH about a rank that was killed by a signal, or that exited.
KILLED = r"process rank {rank} with PID .*signal 9|Killed \(signal 9\)"
EXITED = r",{rank}\] +Exit code: +3|EXIT CODE: 3"
PRELUDE = """
from tricycle_mpi.launch import launch_info
rank = launch_info().rank
handle = os.open({marks!r}, os.O_WRONLY)
os.write(handle, f"rank {{rank}} is {{os.getpid()}}\\n".encode())
"""


def with_ranks(case: TrainingRun, n: int = N_RANKS) -> TrainingRun:
    """Return the same run with n ranks; a single process for 1."""
    return replace(case, launcher=(mpiexec() or "mpiexec", "-n", str(n)) if n > 1 else ())


def resume(case: TrainingRun, words: Sequence[str]) -> Outcome:
    return finish(case.start(words, env={**case.environment(), **MPI_VARIABLES}))


class MonitoredRanks(MonitoredProcess):
    """Ranks that report their phases on a pipe; a phase of rank 1 is called "1:update"."""

    def __init__(self, case: TrainingRun, words: Sequence[str], prelude: str = "", **settings: str) -> None:
        case.folder.mkdir(parents=True, exist_ok=True)
        marks = case.folder / "marks"
        marks.unlink(missing_ok=True)
        os.mkfifo(marks)
        reading = os.open(marks, os.O_RDONLY | os.O_NONBLOCK)
        self._writing = os.open(marks, os.O_WRONLY)  # keeps the pipe open until the end
        os.set_blocking(reading, True)
        lines = [f"hook_phase(handle, f'{{rank}}:{name}', {place!r})\n" for name, place in case.phases.items()]
        hooks = PRELUDE.format(marks=str(marks)) + PHASE_HOOKS + "".join(lines) + prelude
        self.process = case.start(words, hooks, env={**case.environment(), **MPI_VARIABLES, **settings})
        self.started = time.monotonic()
        self.start_reader(reading)

    @property
    def pids(self) -> dict[str, int]:
        """The process ids of mpiexec and of all started ranks."""
        matches = [re.fullmatch(r"(rank \d+) is (\d+)", name) for name in list(self._begun)]
        return {"mpiexec": self.process.pid} | {match[1]: int(match[2]) for match in matches if match}

    def wait_for_phase(self, phase: str, number: int) -> bool:
        """Wait for the `number`-th start of a phase; return False if mpiexec exits before."""
        threading.Thread(target=self._notify_at_exit, daemon=True).start()
        return super().wait_for_phase(phase, number)

    def _notify_at_exit(self) -> None:
        self.process.wait()
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def finish_within(self, seconds: float) -> tuple[Outcome, float]:
        """Wait for all processes, kill those that do not exit in time, and return the outcome and the last exit's time.

        `late` names the processes that exceeded MAX_SECONDS. Stalls of the whole machine, in which this process made no
        progress either, do not count.
        """
        reader = threading.Thread(target=lambda: outcomes.append(finish(self.process, seconds + 30)))
        outcomes: list[Outcome] = []
        reader.start()
        start = now = time.monotonic()
        ended: dict[str, float] = {}
        standstill = 0.0
        while len(ended) < len(self.pids) and now < start + seconds + standstill:
            for name, pid in self.pids.items():
                if name not in ended and not is_running(pid):
                    ended[name] = now - standstill
            time.sleep(0.005)
            before, now = now, time.monotonic()
            standstill += now - before if now - before > STANDSTILL else 0.0
        for name, pid in self.pids.items():
            if name not in ended and is_running(pid):
                os.kill(pid, signal.SIGKILL)
                ended[name] = time.monotonic()
        self.late = [name for name, moment in ended.items() if moment > start + MAX_SECONDS]
        reader.join()
        os.close(self._writing)
        self._reader.join(5)
        return outcomes[0], max(ended.values())


def is_running(pid: int) -> bool:
    """Return whether a process is running; a zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# -------------------------------------------------------------------- signals from outside
@dataclass
class RankTrial(Trial):
    """A distributed run of which a rank or mpiexec gets a signal, and which is resumed.

    Attributes:
        target: the process that gets the signal, one of TARGETS.
        n_after: the number of ranks of the resumed run.
    """

    target: str = "rank 0"
    n_after: int = N_RANKS


def run_trial(trial: RankTrial, case: TrainingRun, reference: Path) -> RankTrial:
    """Send the signals of a trial, resume the run, and compare it with the reference run folder."""
    for moment in trial.moments:
        send_signal_at(trial, with_ranks(case), moment)
    after = with_ranks(case, trial.n_after)
    compare = differences if trial.n_after == N_RANKS else approximate_differences
    done = resume(after, adjusted_resume_args(after, trial.n_after))
    finish_trial(trial, case, done, lambda: compare(case.run_folder, reference))
    return trial


def adjusted_resume_args(case: TrainingRun, n_after: int) -> list[str]:
    """Return the flags that resume a run with `n_after` ranks; or start it, with the same number of batches."""
    words = list(case.resume_args)
    if "--accumulation-steps" in words:
        place = words.index("--accumulation-steps") + 1
        words[place] = str(int(words[place]) * N_RANKS // n_after)
    return words


def send_signal_at(trial: RankTrial, case: TrainingRun, moment: tuple[str, int, float]) -> None:
    """Start or resume the run, and send the signal at a moment."""
    phase, number, delay = moment
    program = MonitoredRanks(case, case.resume_args)
    if program.wait_for_phase(phase, number):
        time.sleep(delay)
    pid = program.pids.get(trial.target)
    hit = pid is not None and is_running(pid)
    sent = time.monotonic()
    if pid is not None and hit:
        os.kill(pid, trial.number)
    outcome, ended = program.finish_within(60)
    if hit:
        trial.response_seconds.append(max(0.0, ended - sent))
    if program.late:
        trial.problems.append(f"{program.late} had not ended after {MAX_SECONDS:.0f} s")
    check_exit(trial, outcome)


def check_exit(trial: RankTrial, outcome: Outcome) -> None:
    """Check that the output has no traceback, at most one message, and the name of a killed rank."""
    if "Traceback" in outcome.err:
        trial.problems.append(f"a trace: {outcome.err[-600:]}")
    messages = [line for line in outcome.error_lines if line.startswith("train_smol_gpt.py: ")]
    if len(messages) > 1:
        trial.problems.append(f"more than one message: {messages}")
    if outcome.status == 0 or trial.target == "mpiexec" or trial.number != signal.SIGKILL:
        return
    words = " ".join([*outcome.error_lines, *outcome.out.split()])
    if not re.search(KILLED.format(rank=trial.target[-1]), words):
        trial.problems.append(f"the killed rank is not named: {words[-400:]}")


def approximate_differences(run: Path, other: Path) -> list[str]:
    """Return the differences of two finished run folders that exceed rounding, without timings."""
    names, others = (sorted(path.name for path in folder.iterdir()) for folder in (run, other))
    if names != others:
        return [f"files {names} and {others}"]
    metrics = [read_metrics(folder / "metrics.jsonl") for folder in (run, other)]
    if [line["step"] for line in metrics[0]] != [line["step"] for line in metrics[1]]:
        return ["metrics.jsonl: other lines"]
    names = ("loss", "held_out_loss", "final_loss")
    pairs = [(one[name], two[name]) for one, two in zip(*metrics) for name in names if name in one]
    differing = [f"metrics.jsonl: {a} and {b}" for a, b in pairs if abs(a - b) > ROUNDING]
    tensors, other_tensors = (load_checkpoint(folder / "last.safetensors").tensors for folder in (run, other))
    if tensors.keys() != other_tensors.keys():
        return [*differing, "last.safetensors: other tensors"]
    far = [name for name in tensors if not np.allclose(tensors[name], other_tensors[name], rtol=0.01, atol=ROUNDING)]
    return differing + [f"last.safetensors: {name}" for name in far]


def new_trials(
    generator: random.Random, phase_times: PhaseTimes, n: int, n_phases: int, numbers: Sequence[int]
) -> list[RankTrial]:
    """Return trials of each signal for each target: n at random moments of the run, and `n_phases` in each phase.

    Every second trial kills the resumed run, too; every third is resumed in one process.
    """
    trials = []
    for number in numbers:
        for target in TARGETS:
            rank = "1" if target == "rank 1" else "0"
            phases = [f"{rank}:run"] * n
            phases += [name for name in map(f"{rank}:{{}}".format, PHASES) if phase_times[name]] * n_phases
            for i, phase in enumerate(phases):
                moments = [random_moment(generator, phase_times, phase) for _ in range(1 + i % 2)]
                name = f"{signal.Signals(number).name} to {target}"
                trials.append(RankTrial(name, number, moments, target=target, n_after=1 if i % 3 == 2 else N_RANKS))
    return trials


def measure_phases(case: TrainingRun) -> PhaseTimes:
    """Measure the phases of an uninterrupted run.

    Raises:
        RuntimeError: the run fails.
    """
    program = MonitoredRanks(with_ranks(case), case.start_args)
    outcome, _ = program.finish_within(120)
    if outcome.status != 0:
        raise RuntimeError(f"the uninterrupted run: {outcome.failure}")
    return program.phase_times


# -------------------------------------------------------------------- internal failures of a rank
# Fails before an update, or replaces its loss by NaN.
FAILURE_PRELUDE = """
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
SILENT_SECONDS = 2.0  # TRICYCLE_MPI_TIMEOUT of the runs below
SILENT = r"^train_smol_gpt.py: rank {other} of 2 on \S+: no answer from rank {rank}: rank {other} waited 2 seconds"
# By name: the code that fails, and a pattern of the error message; {rank} and {other} are rank numbers.
FAILURES = {
    "raises an error": ("raise ValueError('odd')", r"^train_smol_gpt.py: rank {rank} of 2 on \S+: odd$"),
    "runs out of memory": ("raise MemoryError('no room')", r"^train_smol_gpt.py: rank {rank} of 2 on \S+: no room: "),
    "is killed (kill -9)": ("os.kill(os.getpid(), signal.SIGKILL)", KILLED),
    "leaves (os._exit)": ("os._exit(3)", EXITED),
    "meets NaN (--on-nan stop)": ("pass", r"^train_smol_gpt.py: step {step}: rank {rank}: the loss is nan; "),
    "is stopped (kill -STOP), timeout 2 s": ("os.kill(os.getpid(), signal.SIGSTOP)", SILENT),
    "hangs, timeout 2 s": ("time.sleep(100)", SILENT),
}


def run_failure(name: str, case: TrainingRun, reference: Path, rank: int, step: int) -> Trial:
    """Make a rank fail at an update, check the outcome, and resume the run."""
    act, pattern = FAILURES[name]
    prelude = FAILURE_PRELUDE.format(act=act, rank=rank, step=step, is_nan="NaN" in name)
    case = with_ranks(case)
    words = [*case.start_args, "--on-nan", "stop"]
    program = MonitoredRanks(case, words, prelude, TRICYCLE_MPI_TIMEOUT=str(SILENT_SECONDS))
    if not program.wait_for_phase("failing", 1):
        return Trial(name, 0, [], problems=[f"the rank did not fail: {program.finish().error_lines}"])
    outcome, ended = program.finish_within(60)
    seconds = ended - program._begun["failing"][0]
    failure = Trial(name, 0, [], response_seconds=[seconds])
    pattern = pattern.format(rank=rank, other=1 - rank, step=step)
    by_program = pattern.startswith("^")  # in one line; otherwise the launcher prints several lines
    output = "\n".join(outcome.error_lines) if by_program else " ".join([*outcome.error_lines, *outcome.out.split()])
    if outcome.status == 0 or not re.search(pattern, output, re.M):
        failure.problems.append(f"status {outcome.status}, expected {pattern}: {output[-600:]}")
    n_messages = sum(line.startswith("train_smol_gpt.py: ") for line in outcome.error_lines)
    if n_messages != by_program or "Traceback" in output:
        failure.problems.append(f"{n_messages} messages: {output[-600:]}")
    if seconds > MAX_SECONDS:
        failure.problems.append(f"{program.late} had not ended after {MAX_SECONDS:.0f} s")
    # data.json has the policy of the flag --on-nan
    compare = lambda: [each for each in differences(case.run_folder, reference) if not each.startswith("data.json")]
    finish_trial(failure, case, resume(case, case.resume_args), compare)
    return failure


def main() -> int:
    parser = new_parser(__doc__, jobs=1)
    parser.add_argument("--n", type=int, default=2, help="trials of each signal and target at random moments")
    parser.add_argument("--phases", type=int, default=1, help="trials of each signal and target in each phase")
    parser.add_argument("--failures", type=int, default=6, help="trials of each internal failure")
    arguments = parser.parse_args()
    generator = random.Random(arguments.seed)
    started = time.monotonic()
    with temporary_workspace(arguments.folder) as workspace:
        run = workspace.new_run
        reference = run("reference")
        phase_times, folder = measure_phases(reference), reference.run_folder
        trials = new_trials(generator, phase_times, arguments.n, arguments.phases, [signal.SIGKILL, *SIGNALS])
        cases = [(kind, i % 2, generator.randint(1, 12)) for kind in FAILURES for i in range(arguments.failures)]
        with ThreadPoolExecutor(arguments.jobs) as pool:
            tried = list(pool.map(lambda i: run_trial(trials[i], run(f"trial-{i}"), folder), range(len(trials))))
            fail = lambda i: run_failure(cases[i][0], run(f"failure-{i}"), folder, *cases[i][1:])
            failures = list(pool.map(fail, range(len(cases))))
    print(table(tried))
    print(table(failures, "a rank"))
    everything = [*tried, *failures]
    wrong = [f"{trial.name} at {trial.moments}: {'; '.join(trial.problems)}" for trial in everything if trial.problems]
    for line in wrong:
        print(f"FAILED: {line[:1500]}")
    summary = f"{len(tried)} trials with {sum(trial.n_delivered for trial in tried)} signals, {len(failures)} failures"
    print(f"{summary}, {len(wrong)} failed; {(time.monotonic() - started) / 60:.1f} minutes")
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.platform != "linux":
        raise SystemExit("expected Linux with /proc")
    raise SystemExit(main())
