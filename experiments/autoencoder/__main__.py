"""Autoencoders of handwritten digits beside PCA: what is lost, noise removed, codes as features, new digits.

    python -m experiments.autoencoder                 scikit-learn's digits, every model, three times each
    python -m experiments.autoencoder --quick         within three minutes: fewer models, one short training each
    python -m experiments.autoencoder --data mnist    the same of MNIST

The learning rate and the steps were settled on validation images; see the README.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import Any

from tqdm import tqdm

from experiments.autoencoder import report
from experiments.autoencoder.data import load
from experiments.autoencoder.study import Settings, Study
from experiments.settings import at_least, save
from tricycle_cli.flags import parse, run_main

QUICK: dict[str, Any] = {
    "code_sizes": (2, 8, 32),
    "noises": (0.5,),
    "deviations": (0.1, 0.2),
    "variational_size": 8,
    "seeds": 1,
    "steps": 500,
}


def main() -> int:
    default = Settings(**QUICK) if "--quick" in sys.argv[1:] else Settings()  # other flags start from its values
    settings = parse(Settings, default, description=__doc__ or "")
    check(settings)
    data, folder = load(settings.data), settings.output
    runs, files = [], ["results.json", "errors.png"]
    for seed in tqdm(range(settings.seeds), desc=settings.data, unit="seed"):
        started, study = time.perf_counter(), Study(data, settings, seed)
        measures = study.everything()
        runs.append(rounded({**measures, "seconds": time.perf_counter() - started}))
        if seed == 0:
            files += report.plot_grids(study, folder)
            report.plot_latent(study, folder / "codes.png")
            report.plot_plane(study, folder / "plane.png")
            files += ["codes.png", "plane.png"]
        save(settings.output / "results.json", settings, runs=runs)
    plain = dataclasses.asdict(settings)
    report.plot_errors(runs, plain, folder / "errors.png")
    for title, table in report.tables(runs, plain).items():
        print(f"\n{title}\n\n{table}")
    print(f"\n{folder}: {', '.join(files)}")
    return 0


def check(settings: Settings) -> None:
    """
    Raises:
        ValueError: settings with which nothing could be measured.
    """
    if settings.data not in ("digits", "mnist"):
        raise ValueError(f"expected --data to be digits or mnist, got {settings.data}")
    at_least(settings, seeds=1, steps=1, batch_size=1, few_labels=10, denoising_size=1)
    most = 63  # of the 64 pixels of a small digit
    for name in ("code_sizes", "noises", "deviations"):
        values = getattr(settings, name)
        if not values or min(values) <= 0 or (name == "code_sizes" and max(values) > most):
            wanted = f"numbers from 1 to {most}" if name == "code_sizes" else "numbers above 0"
            got = " ".join(map(str, values)) or "none"
            raise ValueError(f"expected --{name.replace('_', '-')} to be {wanted}, got {got}")
    for name in ("variational_size", "denoising_size"):
        if getattr(settings, name) > most:
            raise ValueError(f"expected --{name.replace('_', '-')} to be at most {most}, got {getattr(settings, name)}")
    at_least(settings, variational_size=2)
    if not 0 < settings.learning_rate < 1:
        raise ValueError(f"expected --learning-rate above 0 and below 1, got {settings.learning_rate}")


def rounded(value: Any) -> Any:
    """Five digits are enough for any reader."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(inner) for inner in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


if __name__ == "__main__":
    run_main(main)
