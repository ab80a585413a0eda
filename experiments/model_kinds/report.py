"""The table and the plot of the study of kinds of models, and the README that contains them."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.shared.results import distinct, of, select
from experiments.shared.tables import cell, markdown
from tricycle.system.files import atomic_write
from tricycle_lab.plot import plot_curves

README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- table: written by --render -->\n", "<!-- end of the table -->\n"
PICTURE = "![Bits per byte of held-out text over the minutes of training](results/bits.png)"
NAMES = {
    "portable": "dense decoder (`portable`)",
    "mixture": "mixture of experts (`mixture`)",
    "mamba": "Mamba-2 hybrid (`mamba`)",
    "encoder_decoder": "encoder-decoder (`encoder_decoder`)",
}
TITLES = ["model (preset)", "parameters", "active", "updates per second", "updates", "bits per byte"]


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Return the Markdown table of the presets by title; bits per byte are mean ± SD over the seeds."""
    rows = []
    for preset in distinct(results["runs"], "preset"):
        runs = select(results["runs"], preset=preset)
        sizes = [f"{runs[0][name]:,}" for name in ("parameters", "active")]
        speed = f"{results['rates'][preset]:.2f}", f"{runs[0]['steps']:,}"
        rows.append([NAMES.get(preset, preset), *sizes, *speed, cell(of(runs, "bits"), 3)])
    return {f"Held-out text after {results['settings']['minutes']:g} minutes": markdown(TITLES, rows)}


def plot(results: dict[str, Any], path: Path) -> None:
    """Write an image of held-out bits per byte against the minutes of training, with a band over the seeds."""
    lines = {}
    for preset in distinct(results["runs"], "preset"):
        curves = np.array(of(select(results["runs"], preset=preset), "curve"))  # (runs, points, 2)
        lines[preset] = curves[0, :, 0] / results["rates"][preset] / 60, curves[..., 1]
    plot_curves({"held-out text": lines}, path, "minutes of training", "bits per byte")


def write_readme(path: Path, results: dict[str, Any]) -> None:
    """Write table, picture, seeds, date and machine between the markers of a README.md; ValueError without markers.

    Raises:
        ValueError: the file has not both markers once.
    """
    before, rest = path.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    (table,) = tables(results).values()
    n_seeds = len(distinct(results["runs"], "seed"))
    minutes, where = results["settings"]["minutes"], f"{results['machine']}, {results['date']}"
    about = f"{minutes:g} minutes for each run, {n_seeds} seeds; {where}:"
    with atomic_write(path, text=True) as file:
        file.write(f"{before}{BEGIN}{about}\n\n{table}\n\n{PICTURE}\n{END}{after}")
