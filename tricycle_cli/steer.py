"""Compute a steering vector, the difference of the mean activations of two groups of prompts, and write it as GGUF.

`tricycle generate --steer FILE` and llama.cpp's `--control-vector` add it to the residual stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tricycle.pretrained.gguf_adapters import find_architecture
from tricycle.pretrained.gguf_control_vectors import write_control_vectors
from tricycle_cli.flags import check_conditions, parse
from tricycle_cli.inspect_flags import InspectFlags
from tricycle_lab.look.inspectable import InspectableStack
from tricycle_lab.plot import plot_curves
from tricycle_lab.steering import contrast_prompts, score_steering


@dataclass(frozen=True, kw_only=True)
class Arguments(InspectFlags):
    """The flags of `tricycle inspect steer`."""

    positive: tuple[str, ...]
    """prompts to steer towards"""
    negative: tuple[str, ...]
    """prompts to steer away from"""
    layers: tuple[int, ...] = ()
    """the layers after which the vector is added, from 1; by default the one in the middle"""
    score: tuple[str, ...] = ()
    """prompts after which the logit difference of the answers is printed for each strength"""
    answers: tuple[str, ...] = ()
    """with --score: two answers of one token each, usually with a space in front"""
    strengths: tuple[float, ...] = (-2.0, -1.0, 0.0, 1.0, 2.0)
    """the strengths to score"""
    vector: Path | None = None
    """the GGUF file to write (needs the package gguf)"""


def main(args: Sequence[str] | None = None) -> None:
    """Run `tricycle inspect steer`: print the norm of the vector and the scores, and write the files."""
    arguments = parse(Arguments, args=args, description=__doc__ or "")
    if len(arguments.answers) != (2 if arguments.score else 0):
        got = f"{len(arguments.score)} prompts and {len(arguments.answers)} answers"
        raise ValueError(f"expected --score with two --answers, or neither, got {got}")
    check_conditions(arguments, {"--score": (arguments.score, "out strengths")})
    loaded, inspectable = arguments.load()
    groups = ([inspectable.encode_input(text) for text in texts] for texts in (arguments.positive, arguments.negative))
    directions = contrast_prompts(loaded.model, *groups)
    layers = arguments.layers or (max(1, len(directions) // 2),)
    if not all(1 <= layer < len(directions) for layer in layers):
        raise ValueError(f"--layers: expected layers from 1 to {len(directions) - 1}, got {layers}")
    vectors = {layer: directions[layer] for layer in layers}
    for layer, vector in vectors.items():
        print(f"layer {layer}: a vector of norm {np.linalg.norm(vector):.4g}")
    if arguments.score:
        _print_scores(inspectable, arguments, vectors)
    if arguments.vector is not None:
        try:
            hint, note = find_architecture(loaded.source, loaded.model.config), ""
        except ValueError as error:  # `tricycle generate` and `look` read the file nevertheless
            hint, note = "tricycle", f" ({error})"
        write_control_vectors(arguments.vector, vectors, hint)
        print(f"{arguments.vector}{note}")


def _print_scores(inspectable: InspectableStack, arguments: Arguments, vectors: dict[int, np.ndarray]) -> None:
    """Print, and draw if --out is given, the mean logit difference of the answers for each strength."""
    first, second = (inspectable.encode_answer(answer) for answer in arguments.answers)
    prompts = [inspectable.encode_input(text) for text in arguments.score]
    scores = score_steering(inspectable.model, vectors, prompts, (first, second), arguments.strengths)
    print("\n strength  logit difference")
    for strength, score in zip(arguments.strengths, scores):
        print(f"{strength:9g}  {score:16.4f}")
    if arguments.out is not None:
        name = f"{arguments.answers[0]!r} - {arguments.answers[1]!r}"
        curves = {"steering": {name: (arguments.strengths, scores)}}
        plot_curves(curves, arguments.out, "strength", "logit difference", title=inspectable.title)
        print(arguments.out)
