"""Tables in Markdown and a plot of the study of attention sinks."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.shared.figures import drawing
from experiments.shared.tables import markdown
from tricycle_lab.plot import COLOURS

PARTS = {"mlp": "MLP", "attention": "attention layer", "patched": "stream of the middle of a text"}
N_SHOWN = 3  # layers of each change in the table


def mean_sink(measured: dict[str, Any]) -> float:
    """Return the mean over layers of the attention weight on the first token."""
    return float(np.mean(measured["sink"]))


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Return the Markdown table of the changes with the smallest remaining sinks, by title."""
    named = [("none", results["intact"])]
    for part in ("mlp", "attention"):
        order = sorted(range(len(results["layers"])), key=lambda i: mean_sink(results[part][i]))
        named += [(f"{PARTS[part]} {results['layers'][i]} ablated", results[part][i]) for i in order[:N_SHOWN]]
    chosen = range(0, len(results["layers"]), max(1, len(results["layers"]) // 6))
    named += [(f"{PARTS['patched']} after layer {results['layers'][i]}", results["patched"][i]) for i in chosen]
    named += [(name, results[name]) for name in ("values removed", "first token hidden")]
    rows = [
        [name, f"{100 * mean_sink(each):.1f}", f"{max(each['norms']):,.1f}", f"{each['loss']:.3f}"]
        for name, each in named
    ]
    return {"Changes at the first token": markdown(["change", "sink, %", "largest norm", "loss"], rows)}


def plot(results: dict[str, Any], path: Path) -> None:
    """Write an image of the intact model's sink and norm by layer, and of sink and loss for changes of each layer."""
    with drawing(path, (11, 3.4)) as figure:
        first, second, third = figure.subplots(1, 3)
        layers = range(len(results["intact"]["sink"]))
        first.plot(layers, 100 * np.array(results["intact"]["sink"]), color=COLOURS[0], label="attention weight, %")
        first.plot(layers, results["intact"]["norms"], color=COLOURS[1], linestyle="--", label="norm / median norm")
        first.set(yscale="log", title="first token, intact model", xlabel="layer")
        first.legend(frameon=False, fontsize=8)
        for axes, title, value in (
            (second, "mean attention weight, %", lambda each: 100 * mean_sink(each)),
            (third, "loss, nats per token", lambda each: each["loss"]),
        ):
            axes.axhline(value(results["intact"]), color="#999999", linewidth=1, label="intact")
            for i, (part, name) in enumerate(PARTS.items()):
                style = {"color": COLOURS[i], "linestyle": ("-", "--", ":")[i], "label": name}
                axes.plot(results["layers"], [value(each) for each in results[part]], **style)
            axes.set(title=title, xlabel="changed layer")
        figure.legend(
            *second.get_legend_handles_labels(), loc="outside lower right", ncols=4, frameon=False, fontsize=8
        )
        for axes in (first, second, third):
            axes.grid(alpha=0.25)
