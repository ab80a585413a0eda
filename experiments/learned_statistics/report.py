"""Tables in Markdown, plots and a page of block softmax in a small GPT."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.learned_statistics.blocks import block_starts
from experiments.learned_statistics.study import VARIANTS
from experiments.shared.results import Runs, of, select
from experiments.shared.tables import cell, grid, markdown
from tricycle_lab.plot import plot_attention, plot_curves, write_attention_page

Maps = Mapping[str, np.ndarray]

# Perplexity on Wikitext-2 in seed document 002: of the model as it is, and of 2 blocks with learned scales.
SEED_TABLE: dict[str, tuple[float, Any]] = {
    "OPT-125M": (26, 22.36),
    "OPT-350M": (16.84, 17.81),
    "OPT-1.3B": (11.78, 12.63),
    "OPT-2.7B": (11, 12.56),
}
# Names in tables and plots of the kinds whose keys in results.json are shorter.
LABELS = {"whole": "full softmax", "none": "no correction"}
# The kinds whose attention is compared with the full softmax, with their names in tables, and those drawn as maps.
SHOWN = {kind: LABELS.get(kind, kind) for kind in ("none", "measured", "learned", "learned per head")}
DRAWN = ("none", "learned")
PAGE_BYTES = 1_400_000  # of weights on the page; as many layers as fit


def find(rows: Runs, kind: str, blocks: int, model: int) -> np.ndarray:
    """Return the perplexities (seeds,) for a kind of scales, a number of blocks and a model; empty if none."""
    return np.array(of(select(rows, kind=kind, blocks=blocks, model=model), "perplexity"))


def recovered_loss(rows: Runs, kind: str, blocks: int, model: int) -> np.ndarray:
    """Return (seeds,): the percentage of the uncorrected blocks' added perplexity that scales remove."""
    (full,), (uncorrected,) = find(rows, "whole", 1, model), find(rows, "none", blocks, model)
    return 100 * (uncorrected - find(rows, kind, blocks, model)) / (uncorrected - full)


# -------------------------------------------------------------------- tables
def tables(rows: Runs, attention: Mapping[str, Mapping[str, list[float]]]) -> dict[str, str]:
    """Return the study's Markdown tables by title; `attention` is {variant: {statistic: value by layer}}."""
    titled = {
        "Perplexity on held-out text": perplexity_table(rows),
        "Recovered perplexity, % of the increase due to blocks": recovered_loss_table(rows),
        "Comparison with seed document 002 (on Wikitext-2)": seed_table(rows),
    }
    for statistic, title in {
        "spikiness": "Spikiness of the attention maps",
        "distance": "Distance from the attention maps of the full softmax",
    }.items():
        layers = {f"layer {i}": i for i in range(len(attention["whole"][statistic]) if attention else 0)}
        variants = {LABELS.get(name, name): found[statistic] for name, found in attention.items()}
        titled[title] = grid(variants, layers, lambda values, i: values[i], 3, 1, "softmax")
    return titled


def cases(rows: Runs) -> list[tuple[int, int]]:
    """Return the sorted pairs of a model and a number of blocks that have results."""
    return sorted({(row["model"], row["blocks"]) for row in rows if row["kind"] != "whole"})


def perplexity_table(rows: Runs) -> str:
    """Return the Markdown table of perplexities by model and number of blocks, one column for each variant."""
    lines = []
    for model, blocks in cases(rows):
        values = [find(rows, "whole", 1, model), *(find(rows, kind, blocks, model) for kind in VARIANTS)]
        lines.append([str(model), str(blocks), *(cell(value, 3) for value in values)])
    return markdown(["model", "blocks", *(LABELS.get(kind, kind) for kind in ("whole", *VARIANTS))], lines)


def recovered_loss_table(rows: Runs) -> str:
    """Return a Markdown table of recovered perplexity: 0% as without correction, 100% as with full softmax."""
    kinds = list(VARIANTS)[1:]
    lines = [
        [str(model), str(blocks), *(cell(recovered_loss(rows, kind, blocks, model), 1) for kind in kinds)]
        for model, blocks in cases(rows)
    ]
    return markdown(["model", "blocks", *kinds], lines)


def seed_table(rows: Runs) -> str:
    """Return the Markdown table of the seed document's figures and these (two blocks, one scale per position)."""
    measured = {
        f"this study, {model}": (find(rows, "whole", 1, model)[0], find(rows, "learned", 2, model))
        for model, blocks in cases(rows)
        if blocks == 2
    }
    return rows_with_seed_figures(measured, 3)


def rows_with_seed_figures(measured: Mapping[str, tuple[float, np.ndarray]], digits: int) -> str:
    """Return a Markdown table of SEED_TABLE and `measured`: {name: (full perplexity, those of 2 blocks by seed)}."""
    lines = []
    for name, (full, learned) in {**SEED_TABLE, **measured}.items():
        n = 2 if name in SEED_TABLE else digits
        lines.append([name, f"{full:.{n}f}", cell(learned, n), f"{100 * (np.mean(learned) / full - 1):+.1f}%"])
    return markdown(["model", "perplexity, full softmax", "2 blocks, learned scales", "change"], lines)


# -------------------------------------------------------------------- pictures
def plot_spikiness(attention: Mapping[str, Mapping[str, list[float]]], blocks: Sequence[int], path: Path) -> None:
    """Write an image of the spikiness of attention (1 - normalized entropy) by layer, a panel per block count."""
    panels = {}
    for n in blocks:
        lines = {LABELS["whole"]: attention["whole"]}
        lines |= {name.split(", ")[1]: found for name, found in attention.items() if name.startswith(f"{n} blocks, ")}
        layers = [str(i) for i in range(len(attention["whole"]["spikiness"]))]
        panels[f"{n} blocks"] = {name: (layers, found["spikiness"]) for name, found in lines.items()}
    plot_curves(panels, path, "layer", "spikiness, 0 to 1", "Spikiness of attention")


def plot_scales(learned: Sequence[list[np.ndarray]], measured: list[np.ndarray], path: Path) -> None:
    """Write an image of the scales of all seeds and the mean exact shares by query position, one panel a layer."""
    panels: dict[str, dict[str, tuple[Any, Any]]] = {}
    for layer, mean in enumerate(measured):
        n_blocks, window = mean.shape
        lines = panels[f"layer {layer}"] = {}
        for i, start in enumerate(block_starts(n_blocks, window)):
            positions = np.arange(start, window)  # earlier positions cannot attend to this block
            lines[f"block {i}, learned"] = positions, np.stack([scales[layer][i, positions] for scales in learned])
            lines[f"block {i}, measured"] = positions, mean[i, positions]
    title = "Learned scales, and the mean of the exact statistics on training text"
    plot_curves(panels, path, "position of the query", "scale", title, n_columns=2)


def draw_maps(maps: Mapping[str, Maps], distances: Sequence[float], tokens: Sequence[str], folder: Path) -> list[str]:
    """Write attention maps of one text as two PNG files and an HTML page to a folder; return the file names.

    Args:
        maps: by variant and layer, (H, T, T).
        distances: of each layer, the L1 distance of its weights with learned scales from those of the full softmax.
    """
    layers = list(next(iter(maps.values())))
    order = np.argsort(distances)
    for name, i in (("best", order[0]), ("worst", order[-1])):
        variants = {variant: found[layers[i]] for variant, found in maps.items()}
        title = f"{layers[i]}, the layer whose weights learned scales restore {name}"
        plot_attention(variants, folder / f"attention-{name}.png", title)
    size = sum(4 * found[layers[0]].size // 3 for found in maps.values())
    fitting = [layers[i] for i in [order[-1], *order[:-1]]][: max(1, PAGE_BYTES // size)]
    shown = {variant: {layer: found[layer] for layer in layers if layer in fitting} for variant, found in maps.items()}
    write_attention_page(
        folder / "attention.html", shown, tokens, "Attention: full softmax, uncorrected blocks, learned scales"
    )
    return ["attention-best.png", "attention-worst.png", "attention.html"]
