"""Fine-tuning beside `transformers` and `peft`: python -m benchmarks.finetuning --model smollm2 --threads 2

    --learn lora                    adapters alone
    --recompute                     both sides compute each block again in the backward pass
    --weights bfloat16              with LoRA in bfloat16 ours keeps the frozen matrices in these 16 bits, as products
                                    take them; PyTorch's stay as they are

Forward, loss, backward and AdamW on random tokens, from the same weights: LoRA of rank 16 on all linear layers, and all
weights, in float32 and bfloat16 (autocast, eager). Each comparison has the two sides in processes of their own, which
take turns, a few steps at a time. Memory is the most that a process has held, with its libraries and the model's file.
`ours / better` compares with the better of PyTorch's two precisions: its faster one, and its smaller one.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import tempfile
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.generation import load_model
from benchmarks.interleave import Schedule
from benchmarks.workers import Worker, time_steps

MODULE = "benchmarks.finetuning_workers"
PRECISIONS = ("float32", "bfloat16")


class SideResult(NamedTuple):
    """One side of a comparison.

    Attributes:
        speed: tokens a second.
        memory: megabytes at most.
        loss: after the steps that all sides have made.
    """

    speed: float
    memory: float
    loss: float


def measure_sides(
    folder: Path, learn: str, precision: str, sides: list[str], words: argparse.Namespace
) -> list[SideResult]:
    """Each side's figures."""
    shape = str(words.batch), str(words.tokens)
    flags = ["recompute"] * words.recompute
    weights = words.weights if learn == "lora" and precision == "bfloat16" else "float32"
    arguments = str(folder), learn, precision, *shape, weights, *flags
    workers = [Worker(side, words.threads, MODULE, side, *arguments) for side in sides]
    times = time_steps(workers, Schedule.of(words))
    results = []
    for worker, seconds in zip(workers, times):
        speed = words.batch * words.tokens / seconds
        results.append(SideResult(speed, worker.ask("memory"), worker.ask("losses")[-1]))
        worker.close()
    return results


def print_table(learn: str, results: dict[tuple[str, str], SideResult]) -> None:
    """A line for each side and precision; ours beside the same precision of the other side, and beside its better."""
    print(f"learning: {learn}")
    names = ("tokens/s", "ours / it", "MB", "ours / it", "ours / better", "MB", "last loss")
    print(f"{'':<20}" + "".join(f"{name:>14}" for name in names))
    theirs = [result for (side, _), result in results.items() if side == "torch"]
    fastest = max((result.speed for result in theirs), default=0.0)
    smallest = min((result.memory for result in theirs), default=0.0)
    for (side, precision), result in results.items():
        ours = results["tricycle", precision]
        cells = [f"{result.speed:,.0f}", f"{ours.speed / result.speed:.2f}"]
        cells += [f"{result.memory:,.0f}", f"{ours.memory / max(1, result.memory):.0%}"]
        beside = side == "tricycle" and theirs
        cells += [f"{result.speed / fastest:.2f}", f"{result.memory / max(1, smallest):.0%}"] if beside else ["", ""]
        cells.append(f"{result.loss:.4f}")
        print(f"{side + ' ' + precision:<20}" + "".join(f"{cell:>14}" for cell in cells))


def installed_sides(peer: str) -> list[str]:
    """Ours, and theirs if it is wanted and installed."""
    here = all(importlib.util.find_spec(name) for name in ("torch", "transformers", "peft"))
    return ["tricycle", "torch"] if peer == "torch" and here else ["tricycle"]


def export_model(name: str, folder: Path) -> str:
    """The model in the form that both sides read; gives its line for the report."""
    from tricycle.pretrained.export import export_folder

    model, tokeniser = load_model(name)
    export_folder(model, tokeniser, folder)
    return f"model {name}, {model.n_parameters / 1e6:.1f}M parameters"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="as `pretrained.load` takes it, gpt2 or a shape (random)")
    parser.add_argument("--learn", nargs="+", choices=["lora", "all"], default=["lora", "all"], help="what learns")
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=list(PRECISIONS), help="of both sides")
    parser.add_argument("--peer", choices=["torch", "none"], default="torch", help="whom to compare with")
    parser.add_argument("--recompute", action="store_true", help="compute blocks again, both sides")
    parser.add_argument("--weights", default="float32", help="of ours that are frozen, in bfloat16")
    parser.add_argument("--batch", type=int, default=4, help="sequences in a step")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads of each side")
    Schedule.add_flags(parser)
    arguments = parser.parse_args()
    sides = installed_sides(arguments.peer)
    tables: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "hf"
        model = export_model(arguments.model, folder)
        for learn in arguments.learn:
            tables[learn] = {}
            for precision in arguments.precision:
                figures = measure_sides(folder, learn, precision, sides, arguments)
                tables[learn] |= {(side, precision): result for side, result in zip(sides, figures)}
    print(f"{date.today()}, {platform.processor() or platform.machine()}, {arguments.threads} threads")
    again = ", blocks computed again" if arguments.recompute else ""
    again += f", frozen weights {arguments.weights}" if arguments.weights != "float32" else ""
    print(f"{model}, batch {arguments.batch} x {arguments.tokens}, medians of {Schedule.of(arguments)}{again}")
    for learn, results in tables.items():
        print_table(learn, results)


if __name__ == "__main__":
    main()
