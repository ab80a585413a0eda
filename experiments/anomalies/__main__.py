"""Anomalies in a time series: a recurrent autoencoder that saw only normal windows, beside simpler methods.

    python -m experiments.anomalies            three series, three trainings of each autoencoder
    python -m experiments.anomalies --quick    within three minutes: one series, a shorter training

Learning rates and steps were settled on normal validation windows alone; see the README.
"""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

from experiments.anomalies import report
from experiments.anomalies.data import SLOT
from experiments.anomalies.study import Settings, fitted, measure, new_windows
from experiments.settings import at_least, save
from tricycle_cli.flags import parse, run_main

QUICK: dict[str, Any] = {"seeds": 1, "each": 10, "steps": 600, "dense_steps": 2000}


def main() -> int:
    default = Settings(**QUICK) if "--quick" in sys.argv[1:] else Settings()  # other flags start from its values
    settings = parse(Settings, default, description=__doc__ or "")
    check(settings)
    runs: report.Runs = []
    for seed in tqdm(range(settings.seeds), desc="series", unit="series"):
        windows = new_windows(settings, seed)
        expectations, seconds = fitted(windows, settings, seed)
        measured = {name: measure(expect, windows, settings.quantile) for name, expect in expectations.items()}
        told = {name: {**values, "seconds": seconds[name]} for name, values in measured.items()}
        runs.append({"seed": seed, "windows": len(windows.labels), "methods": rounded(told)})
        if seed == 0:
            name = "recurrent autoencoder"
            report.plot_series(windows, expectations[name], measured[name]["threshold"], settings.output / "series.png")
        save(settings.output / "results.json", settings, runs=runs)
    report.plot_roc(runs, settings.output / "roc.png")
    for title, table in report.tables(runs).items():
        print(f"\n{title}\n\n{table}")
    print(f"\n{settings.output}: results.json, series.png, roc.png")
    return 0


def check(settings: Settings) -> None:
    """
    Raises:
        ValueError: settings with which nothing could be measured.
    """
    at_least(settings, seeds=1, each=1, window=20, code_size=1, hidden_size=1, steps=1, dense_steps=1, batch_size=1)
    at_least(settings, train_samples=10 * settings.window, validation_samples=10 * settings.window)
    if settings.window > SLOT // 4:  # or too few windows between two events were normal
        raise ValueError(f"expected --window to be at most {SLOT // 4}, got {settings.window}")
    if 2 * settings.code_size >= settings.window:
        raise ValueError(f"expected --code-size below half of --window, got {settings.code_size}")
    for name in ("rate", "dense_rate", "quantile"):
        if not 0 < getattr(settings, name) < 1:
            got = getattr(settings, name)
            raise ValueError(f"expected --{name.replace('_', '-')} above 0 and below 1, got {got}")


def rounded(value: Any) -> Any:
    """Four digits are enough for any reader."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    run_main(main)
