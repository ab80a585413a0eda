"""Classify the sentiment of film reviews: convolution, recurrence and transformer, with ten-fold cross-validation.

    python -m experiments.sentiment             ten folds, three models
    python -m experiments.sentiment --quick     within three minutes: two of the ten folds, three epochs
    python -m experiments.sentiment --models convolution --tested 1

The models' sizes and how they are trained were settled on validation sentences; see the README.
"""

import dataclasses

from experiments.sentiment import report
from experiments.sentiment.study import QUICK, RECIPES, Settings, load, run
from experiments.shared.classification import check_folds, top_weighted_tokens
from experiments.shared.program import Outcome, run_study
from experiments.shared.results import save
from tricycle_cli.flags import run_main

LEAST, KEPT = 20, 40  # the least count of a listed word; the number of words of each model in results.json


def study(settings: Settings) -> Outcome:
    """Cross-validate the models, write results, plots and a page; return (Markdown tables by title, file names)."""
    texts, problem = load(settings.sentences)
    runs, outcome = run(problem, settings)
    words = {name: top_weighted_tokens(problem, outcome, name, LEAST)[:KEPT] for name in settings.models}
    files = report.draw(texts, problem, outcome, runs, settings)
    recipes = {name: dataclasses.asdict(RECIPES[name]) for name in settings.models}
    save(settings.output / "results.json", settings, recipes=recipes, runs=runs, words=words)
    return report.tables(runs, words), ["results.json", *files]


def main() -> int:
    """Parse `sys.argv`, run the study and print its tables; return 0, or raise ValueError for invalid settings."""
    check = lambda settings: check_folds(settings, sentences=settings.folds)
    return run_study(Settings, study, __doc__, QUICK, check)


if __name__ == "__main__":
    run_main(main)
