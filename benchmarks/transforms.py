"""Gradient transforms compared with HIPS autograd, PyTorch and JAX (`python -m benchmarks.transforms`).

Time of a node of a chain of elementwise operations, of the gradient of two MLPs, and of a Hessian-vector product of a
GPT; each side runs in a separate process, and the sides are interleaved. A step that takes more than 5 seconds is made
once. A second table shows what each library differentiates, found by differentiating (`benchmarks.transforms_probes`).
`--write` replaces both tables of a page.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata, util
from pathlib import Path

from benchmarks.heading import date_and_processor
from benchmarks.interleave import Schedule, positive_int
from benchmarks.transforms_workers import CHAIN_LENGTH, MLPS, TASKS
from benchmarks.workers import Worker, time_steps
from tricycle.system.files import atomic_write

SIDES = {  # name of a column: side, and the package that it needs
    "Tricycle": ("tricycle", "tricycle"),
    "HIPS autograd": ("autograd", "autograd"),
    "PyTorch": ("torch", "torch"),
    "JAX": ("jax", "jax"),
    "JAX, jitted": ("jax-jit", "jax"),
}
Times = dict[str, dict[str, float]]  # seconds by task and side
SLOW_SECONDS = 5.0  # a longer step is not repeated, so that all tables take less than five minutes


def title_of(task: str, batch_size: int) -> str:
    """Return the title of a task's row, with the unit."""
    if task == "chain":
        return "node of a chain `x * b + c`, µs"
    if task.startswith("mlp"):
        n_rows, sizes = MLPS[task.removeprefix("mlp-")]
        return f"gradient of an MLP {'-'.join(map(str, sizes))}, {n_rows} rows, ms"
    return f"Hessian-vector product of GPT {task.removeprefix('hvp-')}, batch {batch_size or 'of the shape'}, ms"


def cell(task: str, seconds: float, own: float) -> str:
    """Return `seconds` as text in the task's unit, with the ratio to Tricycle's (`own`) if they differ."""
    value = 1e6 * seconds / (2 * CHAIN_LENGTH) if task == "chain" else 1e3 * seconds
    digits = 2 if value < 100 else 0
    return f"{value:,.{digits}f}" + (f" ({seconds / own:,.2f})" if seconds != own else "")


def measure(tasks: Sequence[str], sides: Sequence[str], batch_size: int, threads: int, schedule: Schedule) -> Times:
    """Return the median seconds of a step of each side for each task; NaN where a side's process fails.

    A step that takes longer than SLOW_SECONDS is made once.
    """
    times: Times = {task: dict.fromkeys(sides, float("nan")) for task in tasks}
    workers: dict[str, Worker] = {}
    for task in tasks:
        usable = {}
        for side in sides:
            if side not in workers:
                workers[side] = Worker(side, threads, "benchmarks.transforms_workers", side, str(batch_size))
            try:
                seconds = first_step(workers[side], task)
            except RuntimeError as error:
                print(f"{task}: {error}", file=sys.stderr)
                del workers[side]
                continue
            times[task][side] = seconds
            if seconds <= SLOW_SECONDS:
                usable[side] = workers[side]
        times[task].update(zip(usable, time_steps(list(usable.values()), schedule)))
    for worker in workers.values():
        worker.close()
    return times


def first_step(worker: Worker, task: str) -> float:
    """Let a worker select a task and make a step; return its seconds, for JAX those of the next, as it compiles.

    Raises:
        RuntimeError: the process has ended, for example because the step needs more memory than there is.
    """
    worker.request(task)
    seconds: float = worker.request("step")
    if worker.side.startswith("jax"):
        seconds = worker.request("step")
    return seconds


def speed_table(times: Times, columns: Mapping[str, str], batch_size: int) -> str:
    """Return the times as a Markdown table, with the ratio to Tricycle's in parentheses; "-" if not measured."""
    lines = [f"| | {' | '.join(columns)} |", f"|:---|{'---:|' * len(columns)}"]
    for task, row in times.items():
        cells = [cell(task, row[side], row["tricycle"]) if row[side] == row[side] else "-" for side in columns.values()]
        lines.append(f"| {title_of(task, batch_size)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def probe_table(libraries: Mapping[str, str]) -> str:
    """Probe each library in a new process, and return a Markdown table of what it differentiates."""
    results: dict[str, dict[str, str]] = {}
    for title, library in libraries.items():
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.transforms_probes", library]
        done = subprocess.run(command, check=True, capture_output=True, text=True, encoding="utf-8")
        results[title] = json.loads(done.stdout.splitlines()[-1])
    lines = [f"| | {' | '.join(results)} |", f"|:---|{':---|' * len(results)}"]
    for probe in next(iter(results.values())):
        lines.append(f"| {probe} | {' | '.join(result[probe] for result in results.values())} |")
    return "\n".join(lines)


def replace_block(page: Path, name: str, text: str) -> None:
    """Replace the text between `<!-- NAME -->` and `<!-- end of NAME -->` of a page; ValueError if one is missing.

    Raises:
        ValueError: the page does not contain both comments.
    """
    start, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
    before, found, rest = page.read_text(encoding="utf-8").partition(start)
    _, found_end, after = rest.partition(end)
    if not (found and found_end):
        raise ValueError(
            f"{page}: expected the comments {start.strip()!r} and {end.strip()!r}, at least one is missing"
        )
    with atomic_write(page, text=True) as file:
        file.write(f"{before}{start}{text}{end}{after}")


def main() -> None:
    """Parse sys.argv, measure all installed sides, and print both tables, or write them to a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = [task for task in TASKS if task != "hvp-tiny"]
    parser.add_argument("--tasks", choices=TASKS, nargs="*", default=usual, help="what is measured")
    parser.add_argument("--sides", choices=list(SIDES), nargs="+", default=list(SIDES), help="columns of the table")
    parser.add_argument("--batch", type=int, default=4, help="sequences in the GPT's batch; 0: as in training")
    parser.add_argument("--threads", type=positive_int, default=os.cpu_count() or 1, help="threads of each side")
    parser.add_argument("--no-probes", action="store_true", help="omit the table of what each library differentiates")
    parser.add_argument("--note", default="no other work", help="what else the machine did, for the line of the table")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="replace the tables of a page of results")
    Schedule.add_flags(parser)
    parser.set_defaults(seconds=1.5, warmup=0.3)
    arguments = parser.parse_args()
    wanted = ["Tricycle", *(name for name in arguments.sides if name != "Tricycle")]
    columns = {name: SIDES[name][0] for name in wanted if util.find_spec(SIDES[name][1]) is not None}
    schedule = Schedule.from_arguments(arguments)
    times = measure(arguments.tasks, list(columns.values()), arguments.batch, arguments.threads, schedule)
    import tricycle

    packages = dict.fromkeys(SIDES[name][1] for name in columns if name != "Tricycle")
    versions = [f"Tricycle {tricycle.__version__}", *(f"{name} {metadata.version(name)}" for name in packages)]
    about = f"{date_and_processor()}, {arguments.threads} threads, {arguments.note}; {', '.join(versions)}"
    medians = f"Medians of {schedule}; one step if it takes more than {SLOW_SECONDS:g} s."
    speed = f"{about}.\n{medians}\n\n{speed_table(times, columns, arguments.batch)}"
    blocks = {"speed": speed} if arguments.tasks else {}
    if not arguments.no_probes:
        libraries = {name: side for name, side in columns.items() if side != "jax-jit"}
        blocks["probes"] = probe_table(libraries)
    for name, text in blocks.items():
        print(f"\n{text}" if arguments.write is None else f"{arguments.write}: {name} written")
        if arguments.write is not None:
            replace_block(arguments.write, name, text)


if __name__ == "__main__":
    main()
