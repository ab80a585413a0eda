"""Fine-tuning compared with `transformers` and `peft` (`python -m benchmarks.finetuning --model smollm2 --threads 2`).

    --learn lora                    only LoRA
    --recompute                     activation checkpointing of each block, on both sides
    --weights bfloat16              Tricycle's frozen matrices for LoRA in bfloat16 (PyTorch's are float32)

A step is forward pass, loss, backward pass and AdamW on random tokens, from the same weights: LoRA of rank 16 on all
linear layers, and training of all weights, in float32 and bfloat16 (autocast, eager). The sides run in separate
processes and are interleaved. Memory is the peak of a process, with its libraries and the model's file. The columns
"over best" compare with the better of PyTorch's two precisions: the faster one for speed, the smaller one for memory.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.generation import load_model
from benchmarks.heading import date_and_processor
from benchmarks.interleave import Schedule, add_comparison_flags
from benchmarks.workers import Worker, time_steps

MODULE = "benchmarks.finetuning_workers"
PRECISIONS = ("float32", "bfloat16")


class SideResult(NamedTuple):
    """Measurements of one side.

    Attributes:
        speed: tokens per second.
        memory: peak, in MB.
        loss: of the last step.
    """

    speed: float
    memory: float
    loss: float


def measure_sides(
    folder: Path, method: str, precision: str, sides: list[str], options: argparse.Namespace
) -> list[SideResult]:
    """Start a worker per side, and return its tokens/s, peak MB and last loss, in the order of `sides`."""
    shape = str(options.batch), str(options.tokens)
    flags = ["recompute"] * options.recompute
    weights = options.weights if method == "lora" and precision == "bfloat16" else "float32"
    arguments = str(folder), method, precision, *shape, weights, *flags
    workers = [Worker(side, options.threads, MODULE, side, *arguments) for side in sides]
    times = time_steps(workers, Schedule.from_arguments(options))
    results = []
    for worker, seconds in zip(workers, times):
        speed = options.batch * options.tokens / seconds
        results.append(SideResult(speed, worker.request("memory"), worker.request("losses")[-1]))
        worker.close()
    return results


def print_table(method: str, results: dict[tuple[str, str], SideResult]) -> None:
    """Print a row by (side, precision): tokens/s, MB, Tricycle's over these and over PyTorch's best; last loss.

    Tricycle's speed and memory are divided by the row's of the same precision, and by the better ones of PyTorch's two
    precisions.
    """
    print(f"trained: {method}")
    names = ("tokens/s", "speed-up", "MB", "memory ratio", "over best", "MB / best", "last loss")
    print(f"{'':<20}" + "".join(f"{name:>14}" for name in names))
    torch_results = [result for (side, _), result in results.items() if side == "torch"]
    fastest = max((result.speed for result in torch_results), default=0.0)
    smallest = min((result.memory for result in torch_results), default=0.0)
    for (side, precision), result in results.items():
        tricycle = results["tricycle", precision]
        cells = [f"{result.speed:,.0f}", f"{tricycle.speed / result.speed:.2f}"]
        cells += [f"{result.memory:,.0f}", f"{tricycle.memory / max(1, result.memory):.0%}"]
        compared = side == "tricycle" and torch_results
        cells += [f"{result.speed / fastest:.2f}", f"{result.memory / max(1, smallest):.0%}"] if compared else ["", ""]
        cells.append(f"{result.loss:.4f}")
        print(f"{side + ' ' + precision:<20}" + "".join(f"{cell:>14}" for cell in cells))


def installed_sides(peer: str) -> list[str]:
    """Return ["tricycle"], and "torch" if `peer` is "torch" and torch, transformers and peft are installed."""
    installed = all(importlib.util.find_spec(name) for name in ("torch", "transformers", "peft"))
    return ["tricycle", "torch"] if peer == "torch" and installed else ["tricycle"]


def export_model(name: str, folder: Path) -> str:
    """Load a model by name, write it to a folder in Hugging Face format, and return its description as text."""
    from tricycle.pretrained.export import export_folder

    model, tokeniser = load_model(name)
    export_folder(model, tokeniser, folder)
    return f"model {name}, {model.n_parameters / 1e6:.1f}M parameters"


def main() -> None:
    """Parse sys.argv, measure all sides, and print a table of tokens/s, peak MB and loss for each method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="name for `pretrained.load`, gpt2 or a shape (random)")
    parser.add_argument(
        "--learn", nargs="+", choices=["lora", "all"], default=["lora", "all"], help="train LoRA or all"
    )
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=list(PRECISIONS), help="of both sides")
    parser.add_argument("--recompute", action="store_true", help="use activation checkpointing on both sides")
    parser.add_argument("--weights", default="float32", help="dtype of Tricycle's frozen weights (bfloat16 LoRA)")
    parser.add_argument("--batch", type=int, default=4, help="sequences in a step")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a sequence")
    add_comparison_flags(parser)
    arguments = parser.parse_args()
    sides = installed_sides(arguments.peer)
    tables: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "hf"
        model = export_model(arguments.model, folder)
        for method in arguments.learn:
            tables[method] = {}
            for precision in arguments.precision:
                results = measure_sides(folder, method, precision, sides, arguments)
                tables[method] |= {(side, precision): result for side, result in zip(sides, results)}
    print(f"{date_and_processor()}, {arguments.threads} threads")
    options = ", activation checkpointing" if arguments.recompute else ""
    options += f", frozen weights {arguments.weights}" if arguments.weights != "float32" else ""
    schedule = Schedule.from_arguments(arguments)
    print(f"{model}, batch {arguments.batch} x {arguments.tokens}, medians of {schedule}{options}")
    for method, table in tables.items():
        print_table(method, table)


if __name__ == "__main__":
    main()
