"""Compare autoencoders of handwritten digits with PCA: reconstruction, denoising, features, generated digits.

    python -m experiments.autoencoder                 scikit-learn's digits, every model, three times each
    python -m experiments.autoencoder --quick         within three minutes: fewer models, one short training each
    python -m experiments.autoencoder --data mnist    the same of MNIST

The learning rate and the steps were settled on validation images; see the README.
"""

import dataclasses
import time

from tqdm import tqdm

from experiments.autoencoder import report
from experiments.autoencoder.data import load
from experiments.autoencoder.study import QUICK, Settings, Study, check
from experiments.shared.program import Outcome, run_study
from experiments.shared.results import Runs, rounded, save
from tricycle_cli.flags import run_main


def study(settings: Settings) -> Outcome:
    """Measure each seed, write results.json and pictures; return (Markdown tables by title, file names)."""
    data, folder = load(settings.data), settings.output
    files = ["results.json", "errors.png"]
    runs: Runs = []
    for seed in tqdm(range(settings.seeds), desc=settings.data, unit="seed"):
        started, one = time.perf_counter(), Study(data, settings, seed)
        measures = one.measure_all()
        runs.append(rounded({**measures, "seconds": time.perf_counter() - started}))
        if seed == 0:
            files += report.plot_pictures(one, folder)
        save(folder / "results.json", settings, runs=runs)
    plain = dataclasses.asdict(settings)
    report.plot_errors(runs, plain, folder / "errors.png")
    return report.tables(runs, plain), files


def main() -> int:
    """Parse sys.argv, run the study, print its tables, and return 0; ValueError for invalid settings."""
    return run_study(Settings, study, __doc__, QUICK, check)


if __name__ == "__main__":
    run_main(main)
