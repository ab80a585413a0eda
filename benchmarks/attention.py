"""Causal self-attention by sequence length, compared with PyTorch (`python -m benchmarks.attention`).

Forward and backward pass of 6 heads of size 64 in float32, from the packed queries, keys and values to the attention
output, for batches of 8,192 tokens. Each side runs in a separate process for each length; the sides are interleaved.
Memory is the increase of the peak memory of a process, inputs and gradients included. All lengths have the same number
of tokens, so it is constant unless it grows with the square of the length.

With --precision bfloat16 both sides make their products in 16 bits, PyTorch by autocast.

python -m benchmarks.attention --train 16384 measures training steps of a 6-layer GPT with that context window instead.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.interleave import Schedule, add_comparison_flags, peak_memory_mb
from benchmarks.workers import SIDES, serve, time_cases
from tricycle.configs import GPTConfig
from tricycle.models import GPT

N_HEADS, WIDTH = 6, 384
N_TOKENS = 8192  # of a batch; a single longer sequence has more
LENGTHS = [256, 512, 1024, 2048, 4096, 8192, 16_384]
WARMUP_LENGTH = 64  # the first step starts threads and loads libraries; their memory is not attention's

Step = Callable[[], Any]  # returns the attention output and the gradient, as arrays


def tricycle_attention(n_items: int, length: int, precision: str = "float32") -> Step:
    """Return a function of Tricycle's attention: output (N, T, WIDTH), gradient of the QKV (N, T, 3 WIDTH)."""
    from tricycle.attention import Attention
    from tricycle.extra_ops import split
    from tricycle.tensor import to_tensor

    qkv = to_tensor(random_qkv(n_items, length))
    attention = Attention()
    heads = (n_items, length, N_HEADS, WIDTH // N_HEADS)

    def step() -> tuple[np.ndarray, np.ndarray]:
        q, k, v = (part.reshape(heads) for part in split(qkv, 3))
        y = attention(q, k, v, precision=precision).reshape(n_items, length, WIDTH)
        y.backward()
        assert qkv.grad is not None
        grad, qkv.grad = qkv.grad, None
        return y.array, grad.array

    return step


def torch_attention(n_items: int, length: int, precision: str = "float32") -> Step:
    """Return a function of PyTorch's attention: output (N, T, WIDTH), gradient of the QKV (N, T, 3 WIDTH)."""
    import torch
    from torch.nn import functional as F

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    packed = torch.from_numpy(random_qkv(n_items, length)).requires_grad_()
    ones = torch.ones(n_items, length, WIDTH)

    def step() -> tuple[np.ndarray, np.ndarray]:
        q, k, v = packed.view(n_items, length, 3, N_HEADS, -1).permute(2, 0, 3, 1, 4)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            head_outputs = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = head_outputs.transpose(1, 2).reshape(ones.shape).float()
        y.backward(ones)
        assert packed.grad is not None
        grad, packed.grad = packed.grad, None
        return y.detach().numpy(), grad.numpy()

    return step


def random_qkv(n_items: int, length: int) -> np.ndarray:
    """Return random float32 packed queries, keys and values (n_items, length, 3 * WIDTH), the same at each call."""
    return np.random.default_rng(0).standard_normal((n_items, length, 3 * WIDTH), dtype=np.float32)


ATTENTION = {"tricycle": tricycle_attention, "torch": torch_attention}


def gpt_config(length: int) -> GPTConfig:
    """Return the configuration of the 6-layer GPT with a context window of `length` tokens."""
    return GPTConfig(
        vocab_size=1024,
        context_window=length,
        embedding_dim=WIDTH,
        n_heads=N_HEADS,
        n_layers=6,
        batch_size=1,
        tied=False,
    )


def serve_side(side: str, task: str, length: int, precision: str) -> None:
    """Answer stdin requests in a side's worker; task "training" times GPT steps, "attention" attention steps."""
    ATTENTION[side](1, WARMUP_LENGTH, precision)()
    before = peak_memory_mb()
    if task == "training":
        step = SIDES[side](gpt_config(length), precision)
    else:
        step = ATTENTION[side](max(1, N_TOKENS // length), length, precision)
    serve(side, step, before, precision)


def main() -> None:
    """Parse sys.argv, measure each length, and print ms, MB and speed-up by side; with --serve, run as a worker."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of a sequence")
    parser.add_argument("--train", type=int, metavar="T", help="measure training steps with a context of T tokens")
    add_comparison_flags(parser)
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32", help="of matrix products")
    parser.add_argument("--serve", nargs=4, metavar=("SIDE", "TASK", "T", "PRECISION"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        side, task, length, precision = arguments.serve
        serve_side(side, task, int(length), precision)
        return
    names = ["tricycle"] + ["torch"] * (arguments.peer == "torch")
    task, lengths = ("training", [arguments.train]) if arguments.train else ("attention", arguments.lengths)
    cases, schedule = (
        [(task, str(length), arguments.precision) for length in lengths],
        Schedule.from_arguments(arguments),
    )
    results = time_cases("benchmarks.attention", names, cases, arguments.threads, schedule)
    title = "forward, loss, backward, AdamW" if arguments.train else "causal self-attention, forward and backward"
    print(f"{title}, {arguments.precision}: medians of {schedule}")
    if arguments.train:
        print_training(arguments.train, names, *results[0])
    else:
        print_attention([(length, *result) for length, result in zip(lengths, results)])


def print_attention(rows: list[tuple[int, list[float], list[float]]]) -> None:
    """Print a row for each length: milliseconds and MB of each side, and the speed-up over PyTorch.

    Args:
        rows: a length, the seconds of each side, the MB of each side.
    """
    both = len(rows[0][1]) == 2
    titles = f"{'T':>6}{'batch':>7}{'ms Tricycle':>13}" + f"{'ms PyTorch':>12}{'speed-up':>10}" * both
    print(titles + f"{'MB Tricycle':>13}" + f"{'MB PyTorch':>12}" * both)
    for length, times, memory in rows:
        line = f"{length:>6,}{max(1, N_TOKENS // length):>7}{times[0] * 1e3:>13.1f}"
        if both:
            line += f"{times[1] * 1e3:>12.1f}{times[1] / times[0]:>10.2f}"
        print(line + f"{memory[0]:>13,.0f}" + (f"{memory[1]:>12,.0f}" if both else ""))


def print_training(length: int, names: list[str], times: list[float], memory: list[float]) -> None:
    """Print the seconds, tokens/s and MB of each side, and the MB without parameters, gradients and AdamW's state."""
    model_mb = 4 * sum(parameter.array.nbytes for parameter in GPT(gpt_config(length)).parameters()) / 1e6
    print(
        f"GPT with 6 layers of width {WIDTH}, batch 1 x {length:,} tokens; parameters, gradients and optimizer state: "
        f"{model_mb:,.0f} MB"
    )
    print(f"{'':<10}{'s/step':>10}{'tokens/s':>10}{'memory MB':>11}{'without model MB':>18}")
    for name, seconds, peak_mb in zip(names, times, memory):
        print(f"{name:<10}{seconds:>10.2f}{length / seconds:>10,.0f}{peak_mb:>11,.0f}{peak_mb - model_mb:>18,.0f}")


if __name__ == "__main__":
    main()
