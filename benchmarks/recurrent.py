"""Recurrent layers compared with PyTorch (`python -m benchmarks.recurrent`).

Forward and backward pass of one LSTM, GRU or RNN over a batch of sequences in float32, with the gradients of the input,
the weights and both biases. Each side runs in a separate process for each cell; the sides are interleaved.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import numpy as np

from benchmarks.interleave import Schedule, add_comparison_flags
from benchmarks.workers import print_speed_ups, serve, time_cases

CELLS = ("LSTM", "GRU", "RNN")

Step = Callable[[], list[np.ndarray]]  # returns the outputs, then the gradients of the input and of the parameters


def random_arrays(cell: str, n_items: int, n_steps: int, width: int) -> list[np.ndarray]:
    """Return float32 input (N, T, C), then weights (G C, C) and biases (G C,), both for input and state; G gates."""
    rng, columns = np.random.default_rng(0), {"LSTM": 4, "GRU": 3, "RNN": 1}[cell] * width
    shapes = [(n_items, n_steps, width), (columns, width), (columns, width), (columns,), (columns,)]
    scales = [1.0] + [width**-0.5] * 4
    return [rng.standard_normal(shape, dtype=np.float32) * np.float32(scale) for shape, scale in zip(shapes, scales)]


def tricycle_step(cell: str, *sizes: int) -> Step:
    """Return a function of Tricycle: [outputs, gradients of input and parameters], for (n_items, n_steps, width)."""
    from tricycle.sequences import recurrent
    from tricycle.tensor import to_tensor

    width = sizes[-1]
    layer, (inputs, *arrays) = getattr(recurrent, cell)(width, width), random_arrays(cell, *sizes)
    for p, array in zip(layer.parameters(), arrays):
        p.array[...] = array.T
    x = to_tensor(inputs)

    def step() -> list[np.ndarray]:
        outputs, _ = layer(x)
        outputs.backward()
        gradients = [t.grad.array.T if t.ndim == 2 else t.grad.array for t in (x, *layer.parameters())]
        x.zero_grad()
        layer.zero_grad()
        return [outputs.array, *gradients]

    return step


def torch_step(cell: str, *sizes: int) -> Step:
    """Return a function of PyTorch: [outputs, gradients of input and parameters], for (n_items, n_steps, width)."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    width = sizes[-1]
    layer, (inputs, *arrays) = getattr(torch.nn, cell)(width, width, batch_first=True), random_arrays(cell, *sizes)
    for p, array in zip(layer.parameters(), arrays):
        p.data.copy_(torch.from_numpy(array))
    x = torch.from_numpy(inputs).requires_grad_()

    def step() -> list[np.ndarray]:
        outputs, _ = layer(x)
        outputs.backward(torch.ones_like(outputs))  # Tricycle's `backward` creates them, too
        gradients = [t.grad.numpy() for t in (x, *layer.parameters())]
        x.grad = None
        layer.zero_grad()
        return [outputs.detach().numpy(), *gradients]

    return step


SIDES: dict[str, Callable[..., Step]] = {"tricycle": tricycle_step, "torch": torch_step}


def main() -> None:
    """Parse sys.argv, and print each cell's milliseconds by side, and the speed-up; with --serve, run as a worker."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", choices=CELLS, nargs="+", default=CELLS, help="recurrent cells to measure")
    parser.add_argument("--batch", type=int, default=32, help="sequences in a batch")
    parser.add_argument("--length", type=int, default=128, help="time steps of a sequence")
    parser.add_argument("--width", type=int, default=256, help="channels of the input and of the state")
    add_comparison_flags(parser)
    parser.add_argument("--serve", nargs=5, metavar=("SIDE", "CELL", "B", "T", "C"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        side, cell, *sizes = arguments.serve
        serve(side, SIDES[side](cell, *map(int, sizes)))
        return
    names = ["tricycle"] + ["torch"] * (arguments.peer == "torch")
    sizes, schedule = (arguments.batch, arguments.length, arguments.width), Schedule.from_arguments(arguments)
    cases = [(cell, *map(str, sizes)) for cell in arguments.cells]
    results = time_cases("benchmarks.recurrent", names, cases, arguments.threads, schedule)
    print(f"forward and backward, batch {sizes[0]} x {sizes[1]} steps, width {sizes[2]}: medians of {schedule}")
    print_speed_ups(arguments.cells, [times for times, _ in results], "PyTorch")


if __name__ == "__main__":
    main()
