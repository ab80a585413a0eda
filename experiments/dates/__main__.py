"""Convert written dates in four languages to ISO format with encoder-decoders.

    python -m experiments.dates             every model, three times each
    python -m experiments.dates --quick     within three minutes: fewer models, one short training each
    python -m experiments.dates --several   one to four dates in a text: what a context of fixed size can hold
    python -m experiments.dates --models additive Transformer --seeds 1

Learning rates, steps and the number of parameters were settled on validation dates; see the README.
"""

import sys
from typing import Any

import numpy as np

from experiments.dates import multiple_dates, report, study
from experiments.dates.models import MODELS, new_model
from experiments.dates.study import Settings, rounded
from experiments.shared.program import Outcome, check_choices, check_fractions, check_minimum, run_study
from experiments.shared.results import Runs, save
from tricycle_cli.flags import run_main

QUICK: dict[str, Any] = {
    "models": ("fixed context", "additive", "Luong general", "hard", "Transformer"),
    "seeds": 1,
    "steps": 500,
    "examples": 20_000,
    "validated": 100,
    "tested": 100,
}
SEVERAL: dict[str, Any] = {"models": ("Luong general", "fixed context"), "steps": 1000, "max_tokens": 4096}
POINTS = 60  # of a loss curve


def main() -> int:
    """Parse sys.argv, run the study of one date (of several with --several), print its tables, and return 0."""
    quick = QUICK
    default = Settings()
    if "--several" in sys.argv[1:]:
        quick = SEVERAL | QUICK | {"models": SEVERAL["models"]}
        default = Settings(**SEVERAL)
    return run_study(
        Settings,
        lambda s: (study_multiple_dates if s.several else study_single_dates)(s),
        __doc__,
        quick,
        check,
        default,
    )


def study_single_dates(settings: Settings) -> Outcome:
    """Train and measure every model on texts with one date; write files, return (tables by title, file names)."""
    examples, folder = study.plotted_examples(), settings.output
    runs: Runs = []
    maps: dict[str, list[np.ndarray]] = {}
    for name in settings.models:
        for seed in range(settings.seeds):
            validation = study.held_out("validation", settings.validated, (0, study.TRAINED))
            model, history = study.train(
                name, settings, seed, study.training_texts(settings.examples, seed), validation
            )
            runs.append({"model": name, "seed": seed, "parameters": model.n_parameters, **thin_history(history)})
            runs[-1] |= study.measure(model, settings)
            if seed == 0 and "share" in runs[-1]:
                best = runs[-1].get("of_best", {"head": 0})["head"]
                maps[name] = study.alignments(model, examples, best)
            save(settings.output / "results.json", settings, runs=runs, lengths=study.LENGTHS)
    report.plot_training(runs, folder / "training.png")
    report.plot_lengths(runs, folder / "lengths.png")
    files = ["results.json", "training.png", "lengths.png"]
    for name, values in maps.items():
        files.append(f"alignment-{name.lower().replace(' ', '-')}.png")
        report.plot_alignments(examples, {name: values}, folder / files[-1])
    if maps:
        files.append("models.png")
        one = {name: values[:1] for name, values in maps.items()}
        report.plot_alignments(examples[:1], one, folder / files[-1], n_columns=2)
    return report.tables(runs), files


def study_multiple_dates(settings: Settings) -> Outcome:
    """Train and measure models on texts of several dates; write files, return (tables by title, file names)."""
    runs: Runs = []
    for name in settings.models:
        for seed in range(settings.seeds):
            model, history, measured = multiple_dates.run(name, settings, seed)
            runs.append(
                {"model": name, "seed": seed, "parameters": model.n_parameters, **thin_history(history), **measured}
            )
            save(settings.output / "several.json", settings, runs=runs, counts=multiple_dates.COUNTS)
    report.plot_multiple_dates(runs, settings.output / "several.png")
    title = "Answers right to the last character, and dates right in their place, in %, by dates of the text"
    return {title: report.multiple_dates_table(runs)}, ["several.json", "several.png"]


def check(settings: Settings) -> None:
    """Raise ValueError for a small count, bad rate, unknown model, "hard" with --several, or impossible size."""
    check_minimum(settings, seeds=1, steps=study.CHECKS, examples=1, validated=1, tested=1, max_tokens=128)
    check_choices(settings, models=MODELS)
    if settings.several and "hard" in settings.models:
        raise ValueError("expected --models without hard beside --several: its rewards are for answers of one length")
    check_fractions(settings, "learning_rate", "transformer_rate")
    for name in settings.models:
        new_model(name, settings.parameters, np.random.default_rng(0))  # refuses a number that none can have


def thin_history(history: dict[str, Any]) -> dict[str, Any]:
    """Return a history of `train` with "losses" as means of at most POINTS parts, which end at "loss_steps"."""
    parts = np.array_split(np.array(history["losses"]), min(POINTS, len(history["losses"])))
    steps = np.cumsum([len(part) for part in parts])
    return {
        "seconds": round(history["seconds"], 1),
        "steps": len(history["losses"]),
        "loss_steps": steps.tolist(),
        "losses": [float(f"{part.mean():.4g}") for part in parts],
        "checks": [(step, rounded(value)) for step, value in history["checks"]],
    }


if __name__ == "__main__":
    run_main(main)
