"""Classify surnames by 18 languages: convolution, recurrence and transformer, with five-fold cross-validation.

    python -m experiments.names                 five folds, three models
    python -m experiments.names --quick         within three minutes: two of the five folds, four epochs
    python -m experiments.names --repeated      with the repeated lines of the files, as tutorials have it
    python -m experiments.names --models recurrent --tested 1

The models' sizes and how they are trained were settled on validation names; see the README.
"""

import dataclasses

from experiments.names import data, report
from experiments.names.study import QUICK, RECIPES, Settings, confusions, run
from experiments.shared.classification import check_folds
from experiments.shared.program import Outcome, run_study
from experiments.shared.results import save
from tricycle_cli.flags import run_main


def study(settings: Settings) -> Outcome:
    """Cross-validate the models, write results, plots and a page; return (Markdown tables by title, file names)."""
    problem = data.load(settings.repeated, settings.names)
    runs, outcome = run(problem, settings)
    matrices = {name: confusions(problem, outcome, name) for name in settings.models}
    files = report.draw(problem, outcome, runs, matrices, settings)
    recipes = {name: dataclasses.asdict(RECIPES[name]) for name in settings.models}
    found_out = {"classes": problem.classes, "runs": runs, "confusion": matrices}
    save(settings.output / "results.json", settings, recipes=recipes, **found_out)
    return report.tables(runs, problem.classes, matrices), ["results.json", *files]


def main() -> int:
    """Parse `sys.argv`, run the study and print its tables; return 0, or raise ValueError for invalid settings."""
    return run_study(Settings, study, __doc__, QUICK, lambda settings: check_folds(settings, names=settings.folds))


if __name__ == "__main__":
    run_main(main)
