"""Operations on large Tensors, and formulas of them, compared with PyTorch (`python -m benchmarks.ops --threads 2`).

Forward and backward pass in float32 of 3.1 million elements (attention: 6.3 million scores), from a gradient of ones.
The formulas are those of a user who writes a new activation, norm or attention. Each side runs in a separate process
for each case; the sides are interleaved.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.interleave import Schedule, add_comparison_flags
from benchmarks.workers import print_speed_ups, serve, time_cases

SHAPE = (4, 512, 1536)  # batch, tokens, channels
N_HEADS, HEAD_SIZE = 6, 64


def layer_norm(f: Any, v: Any) -> Any:
    """Return LayerNorm of x, written with means."""
    deviations = v.x - f.mean(v.x)
    return deviations / f.sqrt(f.mean(deviations * deviations) + 1e-5) * v.gain


def attention(f: Any, v: Any) -> Any:
    """Return causal attention, written with products, exponentials and sums."""
    scores = f.where(v.visible, f.matmul(v.q, f.swap(v.k)) * (1 / math.sqrt(HEAD_SIZE)), -1e9)
    weights = f.exp(scores - f.max(scores))
    return f.matmul(weights / f.sum(weights), v.v)


# by name: a function of a library's functions f and its tensors v
CASES: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda f, v: v.x + v.y,
    "multiply": lambda f, v: v.x * v.y,
    "divide": lambda f, v: v.x / v.y,
    "exp": lambda f, v: f.exp(v.x),
    "tanh": lambda f, v: f.tanh(v.x),
    "sqrt": lambda f, v: f.sqrt(v.x),
    "power": lambda f, v: v.x**2,
    "sigmoid": lambda f, v: f.sigmoid(v.x),
    "relu": lambda f, v: f.relu(v.x),
    "softplus": lambda f, v: f.softplus(v.x),
    "gain": lambda f, v: v.x * v.gain,
    "sum": lambda f, v: f.sum(v.x),
    "max": lambda f, v: f.max(v.x),
    "where": lambda f, v: f.where(v.chosen, v.x, v.y),
    "softmax": lambda f, v: f.softmax(v.x),
    "mish": lambda f, v: v.x * f.tanh(f.softplus(v.x)),
    "layer_norm": layer_norm,
    "attention": attention,
}


def arrays() -> dict[str, np.ndarray]:
    """Return the inputs of all cases: float32, or masks."""
    generator = np.random.default_rng(0)
    heads = SHAPE[0], N_HEADS, SHAPE[1], HEAD_SIZE
    shapes = {"x": SHAPE, "y": SHAPE, "gain": SHAPE[-1:], "q": heads, "k": heads, "v": heads}
    draw = generator.standard_normal
    found: dict[str, Any] = {name: draw(shape, dtype=np.float32) for name, shape in shapes.items()}
    found.update({name: np.abs(found[name]) + 0.1 for name in ("x", "y")})
    return {**found, "chosen": found["x"] > 0.8, "visible": np.tri(SHAPE[1], dtype=bool)}


def tricycle_step(case: str) -> Callable[[], np.ndarray]:
    """Return a function that computes a case and its gradients with Tricycle, and returns the result."""
    from tricycle import extra_ops, ops
    from tricycle.activation import ReLU
    from tricycle.einsum import matmul
    from tricycle.functions import Softmax
    from tricycle.tensor import Tensor

    functions = SimpleNamespace(
        **{name: getattr(extra_ops, name) for name in ("exp", "sqrt", "softplus", "where")},
        **{"tanh": ops.tanh, "sigmoid": ops.sigmoid, "relu": ReLU(), "softmax": Softmax(), "matmul": matmul},
        **{name: partial(getattr(extra_ops, name), axis=-1, keepdims=True) for name in ("sum", "mean", "max")},
        swap=lambda x: x.transpose(0, 1, 3, 2),
    )
    values = {name: Tensor(array, array.dtype != bool) for name, array in arrays().items()}
    tensors = SimpleNamespace(**values)

    def step() -> np.ndarray:
        output = CASES[case](functions, tensors)
        output.backward()
        for tensor in values.values():
            tensor.grad = None
        result: np.ndarray = output.numpy()
        return result

    return step


def torch_step(case: str) -> Callable[[], np.ndarray]:
    """Return a function that computes a case and its gradients with PyTorch, and returns the result."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    functions = SimpleNamespace(
        **{name: getattr(torch, name) for name in ("exp", "sqrt", "where", "tanh", "sigmoid", "relu", "matmul")},
        **{name: partial(getattr(torch, name), dim=-1, keepdim=True) for name in ("sum", "mean")},
        **{"softplus": torch.nn.functional.softplus, "softmax": partial(torch.softmax, dim=-1)},
        max=partial(torch.amax, dim=-1, keepdim=True),
        swap=lambda x: x.transpose(-1, -2),
    )
    values = {name: torch.from_numpy(x).requires_grad_(x.dtype != bool) for name, x in arrays().items()}
    tensors = SimpleNamespace(**values)

    def step() -> np.ndarray:
        output = CASES[case](functions, tensors)
        output.backward(torch.ones_like(output))
        for tensor in values.values():
            tensor.grad = None
        result: np.ndarray = output.detach().numpy()
        return result

    return step


SIDES: dict[str, Callable[[str], Callable[[], np.ndarray]]] = {"tricycle": tricycle_step, "torch": torch_step}


def main() -> None:
    """Parse sys.argv, and print each case's milliseconds by side, and the speed-up; with --serve, run as a worker."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", choices=CASES, nargs="+", default=list(CASES), help="operations to measure")
    add_comparison_flags(parser)
    parser.add_argument("--serve", nargs=2, metavar=("SIDE", "CASE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        side, case = arguments.serve
        serve(side, SIDES[side](case))
        return
    names = ["tricycle"] + ["torch"] * (arguments.peer == "torch")
    schedule = Schedule.from_arguments(arguments)
    cases = [(case,) for case in arguments.cases]
    results = time_cases("benchmarks.ops", names, cases, arguments.threads, schedule)
    print(f"forward and backward, float32: medians of {schedule}")
    print_speed_ups(arguments.cases, [times for times, _ in results], "PyTorch")


if __name__ == "__main__":
    main()
