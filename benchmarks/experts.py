"""Mixtures of experts compared with a dense MLP and with transformers (`python -m benchmarks.experts`).

Forward and backward pass over a batch of tokens, and the forward pass of one token, as in decoding, all in float32. The
dense gated MLP has the active parameters of the mixture. The block of transformers is Mixtral's, with equal weights.

All sides run in one process, step by step in turn, and the minimum of each side is printed, which other load of the
machine affects least.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.heading import date_and_processor
from tricycle.blocks import MLPBlock
from tricycle.configs.model import ModelConfig
from tricycle.experts import MixtureOfExperts
from tricycle.layers import Layer
from tricycle.tensor import to_tensor
from tricycle.weights import set_memory_order
from tricycle_accelerators import threads

FIELDS: dict[str, Any] = {"n_heads": 1, "gated": True, "activation": "swish", "bias": False}
Step = Callable[[], np.ndarray]  # returns the output


def new_mixture(width: int, hidden: int, n_experts: int, n_active: int) -> MixtureOfExperts:
    """Return a mixture of gated MLPs with random weights."""
    numbers: dict[str, Any] = {"n_experts": n_experts, "n_active_experts": n_active}
    return MixtureOfExperts(ModelConfig(embedding_dim=width, hidden_size=hidden, **numbers, **FIELDS), generator=0)


def tricycle_step(layer: Layer, inputs: np.ndarray, trains: bool) -> Step:
    """Return a step that returns the output (N, C); with `trains`, it runs backward; else eval mode, order F."""
    x = to_tensor(inputs, requires_grad=trains)
    if not trains:  # as `tricycle.pretrained.load` does for decoding
        set_memory_order(layer.eval(), "F")

    def step() -> np.ndarray:
        if not trains:
            with layer.evaluating():
                return layer(x).array
        y = layer(x)
        y.backward()
        x.zero_grad()
        layer.zero_grad()
        return y.array

    return step


def transformers_step(mixture: MixtureOfExperts, inputs: np.ndarray, trains: bool) -> Step:
    """Return a function that returns the output (N, C) of transformers' Mixtral block with a mixture's weights."""
    import torch
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    torch.set_num_threads(threads.n_threads())
    experts: list[Any] = mixture.experts
    hidden, width = experts[0].projection.weights.shape
    sizes = {"num_local_experts": len(experts), "num_experts_per_tok": mixture.routing.n_active}
    block = MixtralSparseMoeBlock(MixtralConfig(hidden_size=width, intermediate_size=hidden, **sizes))
    up = [np.roll(expert.up.weights.array.T, hidden, axis=0) for expert in experts]  # with the gate in front
    down = [expert.projection.weights.array.T for expert in experts]
    with torch.no_grad():
        block.gate.weight.copy_(torch.from_numpy(mixture.router.weights.array.T.copy()))
        block.experts.gate_up_proj.copy_(torch.from_numpy(np.stack(up)))
        block.experts.down_proj.copy_(torch.from_numpy(np.stack(down)))
    x = torch.from_numpy(inputs)[None].requires_grad_(trains)

    def step() -> np.ndarray:
        if not trains:
            with torch.no_grad():
                return _output(block(x))
        y = block(x)
        y = y[0] if isinstance(y, tuple) else y
        y.sum().backward()
        x.grad = None
        block.zero_grad()
        return _output(y)

    return step


def _output(y: Any) -> np.ndarray:
    """Return a block's output, a tensor or the first item of a tuple, as an array (N, C)."""
    array: np.ndarray = (y[0] if isinstance(y, tuple) else y).detach().numpy().reshape(-1, y[0].shape[-1])
    return array


def new_sides(arguments: argparse.Namespace, n_tokens: int, trains: bool) -> dict[str, Step]:
    """Return steps "mixture", "dense" and, if it is --peer, "transformers"; ValueError if its output differs."""
    sizes = arguments.width, arguments.hidden, arguments.experts, arguments.active
    inputs = np.random.default_rng(1).standard_normal((n_tokens, arguments.width), dtype=np.float32)
    mixture = new_mixture(*sizes)
    sides = {"transformers": transformers_step(mixture, inputs, trains)} if arguments.peer == "transformers" else {}
    dense = MLPBlock(arguments.width, hidden_size=arguments.active * arguments.hidden, generator=0, **FIELDS)
    sides |= {"mixture": tricycle_step(mixture, inputs, trains), "dense": tricycle_step(dense, inputs, trains)}
    if arguments.peer == "transformers":
        ours, theirs = sides["mixture"](), sides["transformers"]()
        if not np.allclose(ours, theirs, atol=1e-4 * float(np.abs(ours).max())):
            raise ValueError("expected equal outputs of both mixtures, got different ones")
    return sides


def minima(sides: dict[str, Step], rounds: int, repetitions: int) -> dict[str, float]:
    """Return the minimum seconds of a step of each side over interleaved rounds of some repetitions."""
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(rounds):
        for name, step in sides.items():
            for _ in range(repetitions):
                started = time.perf_counter()
                step()
                best[name] = min(best[name], time.perf_counter() - started)
    return best


def main() -> None:
    """Parse sys.argv, and print the milliseconds of each side, and the mixture's speed relative to the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1536, help="tokens of a training step")
    parser.add_argument("--width", type=int, default=192, help="channels of the input")
    parser.add_argument("--hidden", type=int, default=256, help="width of each expert")
    parser.add_argument("--experts", type=int, default=8, help="experts")
    parser.add_argument("--active", type=int, default=2, help="experts that process each token")
    parser.add_argument("--rounds", type=int, default=40, help="interleaved rounds")
    parser.add_argument("--peer", choices=["transformers", "none"], default="transformers", help="library to compare")
    arguments = parser.parse_args()
    print(f"{date_and_processor()}, {threads.n_threads()} threads, minima of {arguments.rounds} rounds")
    print(f"width {arguments.width}, {arguments.active} of {arguments.experts} experts of {arguments.hidden} channels")
    for title, n_tokens, trains, repetitions in (
        (f"training, {arguments.tokens} tokens", arguments.tokens, True, 2),
        ("decoding, 1 token", 1, False, 100),
    ):
        best = minima(new_sides(arguments, n_tokens, trains), arguments.rounds, repetitions)
        texts = [f"{name} {seconds * 1e3:.3f} ms" for name, seconds in best.items()]
        speeds = [f"{best[name] / best['mixture']:.2f} x {name}" for name in best if name != "mixture"]
        print(f"{title}: {', '.join(texts)}; speed of the mixture: {', '.join(speeds)}")


if __name__ == "__main__":
    main()
