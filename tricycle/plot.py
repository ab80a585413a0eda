"""Pictures of a run, drawn without a screen."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tricycle.files import atomic_write


def plot_losses(
    metrics: Sequence[Mapping[str, Any]], path: Path, bits_per_nat: float, references: Mapping[str, float], title: str = ""
) -> None:
    """Draw the training and the held-out loss against the step as a PNG.

    Args:
        metrics: the lines of metrics.jsonl.
        bits_per_nat: bits a byte for one nat a token.
        references: bits a byte of other compressors, drawn as lines.
    """
    from matplotlib.figure import Figure

    training = [(line["step"], line["loss"]) for line in metrics if "loss" in line]
    held_out = [(line["step"], line["held_out_loss"]) for line in metrics if "held_out_loss" in line]
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    if training:
        steps, losses = np.array(training).T
        axes.plot(steps, losses * bits_per_nat, color="#9ecae1", linewidth=0.6)
        axes.plot(steps, _smooth(losses) * bits_per_nat, color="#3182bd", linewidth=1.6, label="training (running mean)")
    if held_out:
        steps, losses = np.array(held_out).T
        axes.plot(steps, losses * bits_per_nat, "o-", color="#e6550d", markersize=4, linewidth=1.6, label="held out")
        axes.annotate(f"{losses[-1] * bits_per_nat:.2f}", (steps[-1], losses[-1] * bits_per_nat), (-4, 8),
                      textcoords="offset points", color="#e6550d", ha="right")
    for (name, bits), style in zip(references.items(), (":", "--", "-.")):
        axes.axhline(bits, color="#636363", linewidth=1, linestyle=style, label=f"{name} {bits:.2f}")
    shown = [bits for bits in references.values()] + [loss * bits_per_nat for _, loss in training[len(training) // 20 :]]
    if shown:
        axes.set_ylim(max(0, min(shown) * 0.92), float(np.quantile(shown, 0.995)) * 1.05)
    axes.set(xlabel="step", ylabel="bits a byte", title=title)
    right = axes.secondary_yaxis("right", functions=(_times(1 / bits_per_nat), _times(bits_per_nat)))
    right.set_ylabel("nats a token")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    with atomic_write(path) as file:
        file.write(picture.getvalue())


def _times(factor: float) -> Callable[[Any], Any]:
    return lambda value: value * factor


def _smooth(values: np.ndarray) -> np.ndarray:
    """The mean of the last fiftieth of the run at each step."""
    width = max(1, len(values) // 50)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - width)
    return (sums[ends] - sums[starts]) / (ends - starts)
