"""Detect anomalies in a time series: a recurrent autoencoder trained on normal windows, and simpler methods.

    python -m experiments.anomalies            three series, three trainings of each autoencoder
    python -m experiments.anomalies --quick    within three minutes: one series, a shorter training

Learning rates and steps were settled on normal validation windows alone; see the README.
"""

from tqdm import tqdm

from experiments.anomalies import report
from experiments.anomalies.study import QUICK, Settings, check, fit_methods, measure, new_windows
from experiments.shared.program import Outcome, run_study
from experiments.shared.results import Runs, rounded, save
from tricycle_cli.flags import run_main


def study(settings: Settings) -> Outcome:
    """Fit and measure each series, write results.json and two plots; return (Markdown tables by title, file names)."""
    runs: Runs = []
    for seed in tqdm(range(settings.seeds), desc="series", unit="series"):
        windows = new_windows(settings, seed)
        expectations, seconds = fit_methods(windows, settings, seed)
        measured = {name: measure(predict, windows, settings.quantile) for name, predict in expectations.items()}
        results = {name: {**values, "seconds": seconds[name]} for name, values in measured.items()}
        runs.append({"seed": seed, "windows": len(windows.labels), "methods": rounded(results, 4)})
        if seed == 0:
            name = "recurrent autoencoder"
            report.plot_series(windows, expectations[name], measured[name]["threshold"], settings.output / "series.png")
        save(settings.output / "results.json", settings, runs=runs)
    report.plot_roc(runs, settings.output / "roc.png")
    return report.tables(runs), ["results.json", "series.png", "roc.png"]


def main() -> int:
    """Parse sys.argv, run the study, print its tables, and return 0; ValueError for invalid settings."""
    return run_study(Settings, study, __doc__, QUICK, check)


if __name__ == "__main__":
    run_main(main)
