"""Activation patching compared with PyTorch hooks (`python -m benchmarks.patching --threads 2`).

The effect of each head at each position between two prompts of 32 tokens, with SmolLM2 in float32 and equal weights:
Tricycle's `patch_activations`, a loop of transformers with a forward hook and a forward pass for each patch, and the
same loop with several patches in a forward pass. Tricycle computes the whole grid in a step; the loops compute a sample
of cells, whose time is scaled to the whole grid. Positions before the first token that differs have no effect, and are
left out on all sides. The sides run in separate processes and are interleaved. The effects of the sample must be equal.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import numpy as np

from benchmarks.finetuning import export_model
from benchmarks.heading import date_and_processor
from benchmarks.interleave import Schedule, positive_int
from benchmarks.patching_workers import all_cells, make_prompts
from benchmarks.transforms import replace_block
from benchmarks.workers import Worker, time_steps
from tricycle.pretrained.tokenisers import tokeniser_from_folder

MAX_DIFFERENCE = 1e-4  # of the effect of a cell


def measure(folder: Path, options: argparse.Namespace) -> tuple[list[float], list[np.ndarray]]:
    """Return the median seconds of a step, and the effects of the sample: Tricycle, plain loop, batched loop."""
    sides = ("tricycle", options.batch), ("torch", 1), ("torch", options.batch)
    sizes = str(options.layers), str(options.cells)
    workers = [
        Worker(side, options.threads, "benchmarks.patching_workers", side, str(folder), *sizes, str(batch_size))
        for side, batch_size in sides
    ]
    seconds = time_steps(workers, Schedule.from_arguments(options))
    values = [np.array(worker.request("values")) for worker in workers]
    for worker in workers:
        worker.close()
    return seconds, values


def largest_difference(values: Sequence[np.ndarray]) -> float:
    """Return the largest difference of an effect from the first side's; ValueError if it is above MAX_DIFFERENCE.

    Raises:
        ValueError: it is larger than MAX_DIFFERENCE.
    """
    difference = float(max(abs(other - values[0]).max() for other in values[1:]))
    if not difference <= MAX_DIFFERENCE:
        raise ValueError(f"expected effects that differ by at most {MAX_DIFFERENCE:g}, got {difference:g}")
    return difference


def table(seconds: Sequence[float], scale: float, batch_size: int) -> str:
    """Return a Markdown table of seconds, the loops' multiplied by `scale`, and their ratio to Tricycle's.

    Args:
        seconds: of a step of each side.
        scale: the number of cells of the grid divided by that of the sample.
    """
    titles = "Tricycle", "PyTorch hooks, one patch per pass", f"PyTorch hooks, {batch_size} patches per pass"
    whole = [seconds[0], *(scale * each for each in seconds[1:])]
    rows = [f"| {title} | {each:,.1f} | {each / whole[0]:.2f} |" for title, each in zip(titles, whole)]
    return "\n".join(["| | seconds | relative to Tricycle |", "|:---|---:|---:|", *rows])


def report(folder: Path, options: argparse.Namespace) -> str:
    """Measure all sides with a folder's model; return conditions and table as text; ValueError if effects differ."""
    from transformers import AutoConfig

    import tricycle

    config, prompts = AutoConfig.from_pretrained(folder), make_prompts(tokeniser_from_folder(folder))
    n_cells = len(all_cells(prompts, config.num_hidden_layers, config.num_attention_heads))
    seconds, values = measure(folder, options)
    difference, n_sampled = largest_difference(values), len(values[0])
    versions = [f"Tricycle {tricycle.__version__}"]
    versions += [f"{name} {metadata.version(name)}" for name in ("torch", "transformers")]
    return (
        f"{date_and_processor()}, {options.threads} threads, {options.note}; {', '.join(versions)}.\n"
        f"{n_cells:,} cells, {len(prompts.clean)} tokens; medians of interleaved rounds ({options.rounds}). The loops "
        f"computed {n_sampled:,} cells, and their\ntime is scaled. The effects of these cells differ by at most "
        f"{difference:.1e}.\n\n{table(seconds, n_cells / n_sampled, options.batch)}"
    )


def main() -> None:
    """Parse sys.argv, measure all sides, check that their effects are equal, and print or write a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="name for `pretrained.load`")
    parser.add_argument("--folder", type=Path, help="the same model in Hugging Face format; by default it is exported")
    parser.add_argument("--layers", type=int, default=4, help="layers of the sample of cells")
    parser.add_argument("--cells", type=int, default=64, help="cells of each layer of the sample")
    parser.add_argument("--batch", type=int, default=64, help="patches in a forward pass, except for the plain loop")
    parser.add_argument("--threads", type=positive_int, default=os.cpu_count() or 1, help="threads of each side")
    parser.add_argument("--note", default="no other work", help="what else the machine did, for the line of the table")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="replace the table of a page of results")
    Schedule.add_flags(parser)
    parser.set_defaults(rounds=1, seconds=0.0, warmup=0.0)  # a round takes about 5 minutes with two threads
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = options.folder or Path(place) / "hf"
        if options.folder is None:
            export_model(options.model, folder)
        text = report(folder, options)
    if options.write is None:
        print(text)
    else:
        replace_block(options.write, "grid", text)


if __name__ == "__main__":
    main()
