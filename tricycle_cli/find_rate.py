"""Run the learning-rate range test of `tricycle train --find-learning-rate`, and write its plot and table."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from tricycle.configs import GPTConfig
from tricycle.models import GPT
from tricycle.system.files import atomic_write
from tricycle_lab.plot import require_matplotlib
from tricycle_lab.range_test import N_STEPS, plot_range_test, range_test

PICTURE, TABLE = "learning_rate.png", "learning_rate.csv"


def find_learning_rate(config: GPTConfig, tokens: Any, model: GPT | None, on_gpu: bool, folder: Path) -> None:
    """Run a learning-rate range test; write learning_rate.png and .csv to a folder, and print a suggestion.

    Args:
        config: the config of the model and of training.
        tokens: the training tokens.
        model: the initial model; None for a new one.
        on_gpu: compute on a GPU.
        folder: the folder of both files, which is created. In the table, values that are not finite are empty.
    """
    from tqdm import tqdm

    require_matplotlib("--find-learning-rate")
    folder.mkdir(parents=True, exist_ok=True)
    with tqdm(total=N_STEPS, unit="step") as bar:
        test = range_test(config, tokens, model, on_gpu, progress=lambda step: bar.update())
    with atomic_write(folder / TABLE, text=True) as file:
        file.write("learning_rate,loss,smoothed\n")
        for rate, *losses in zip(test.rates.tolist(), test.losses.tolist(), test.smoothed.tolist()):
            numbers = [f"{loss:.6g}" if math.isfinite(loss) else "" for loss in losses]
            file.write(f"{rate:.6g},{','.join(numbers)}\n")
    plot_range_test(test, folder / PICTURE, "learning-rate range test")
    print(f"{len(test.rates)} updates with learning rates from {test.rates[0]:.0e} to {test.rates[-1]:.0e}")
    print(f"plot: {folder / PICTURE}; table: {folder / TABLE}")
    if test.suggestion is None:
        print("no suggestion: the loss did not fall clearly (try larger batches)")
        return
    print(f"the loss falls fastest at {test.steepest_rate:.1e}", end="")
    print(f" and diverges from {test.divergence_rate:.1e}" if test.divergence_rate else " and does not diverge")
    lowest = float(f"{config.min_learning_rate / config.max_learning_rate * test.suggestion:.1e}")
    print(f"suggestion: --max-learning-rate {test.suggestion:.1e} --min-learning-rate {lowest:.1e}")
