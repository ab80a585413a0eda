"""Pictures of a run, drawn without a screen."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tricycle.files import atomic_write


def plot_losses(
    metrics: Sequence[Mapping[str, Any]], path: Path, bits_per_nat: float, references: Mapping[str, float], title: str
) -> None:
    """Draw the training and the held-out loss against the step as a PNG.

    Args:
        metrics: the lines of metrics.jsonl.
        bits_per_nat: bits a byte for one nat a token.
        references: bits a byte of other compressors, drawn as lines.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    curves = {key: [(line["step"], line[key]) for line in metrics if key in line] for key in ("loss", "held_out_loss")}
    bits = [loss * bits_per_nat for _, loss in curves["loss"]]
    if bits:
        steps = [step for step, _ in curves["loss"]]
        width = max(1, len(bits) // 50)
        smooth = np.convolve(bits, np.ones(width) / width, mode="valid")
        axes.plot(steps, bits, color="#9ecae1", linewidth=0.6)
        axes.plot(steps[width - 1 :], smooth, color="#3182bd", label=f"training (mean of {width} steps)")
    if curves["held_out_loss"]:
        steps, losses = np.array(curves["held_out_loss"]).T
        label = f"held out (last {losses[-1] * bits_per_nat:.2f})"
        axes.plot(steps, losses * bits_per_nat, "o-", color="#e6550d", markersize=4, label=label)
    for (name, value), style in zip(references.items(), (":", "--", "-.")):
        axes.axhline(value, color="#636363", linewidth=1, linestyle=style, label=f"{name} {value:.2f}")
    held_out_bits = [loss * bits_per_nat for _, loss in curves["held_out_loss"]]
    shown = [*references.values(), *held_out_bits, *(np.quantile(bits[len(bits) // 20 :], (0, 0.995)) if bits else [])]
    if shown:  # the first steps, far above all others, may leave the picture
        axes.set_ylim(min(shown) * 0.92, max(shown) * 1.05)
    axes.set(xlabel="step", ylabel="bits a byte", title=title)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    with atomic_write(path) as file:
        file.write(picture.getvalue())
