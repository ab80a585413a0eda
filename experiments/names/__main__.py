"""Surnames: from which of 18 languages? Convolution, recurrence and Transformer by five-fold cross validation.

    python -m experiments.names                 five folds, three models
    python -m experiments.names --quick         within three minutes: two of the five folds, four epochs
    python -m experiments.names --repeated      with the repeated lines of the files, as tutorials have it
    python -m experiments.names --models recurrent --tested 1

The models' sizes and how they are trained were settled on validation names; see the README.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from experiments.classification import check_models
from experiments.names import data, report
from experiments.names.study import RECIPES, Settings, confusions, run
from experiments.settings import at_least, save
from tricycle_cli.flags import parse, run_main

QUICK: dict[str, Any] = {"tested": 2, "epochs": 4}


def main() -> int:
    default = Settings(**(QUICK if "--quick" in sys.argv[1:] else {}))  # other flags start from its values
    settings = parse(Settings, default, description=__doc__ or "")
    check(settings)
    problem = data.load(settings.repeated, settings.names)
    runs, outcome = run(problem, settings)
    matrices = {name: confusions(problem, outcome, name) for name in settings.models}
    files = report.write(problem, outcome, runs, matrices, settings)
    recipes = {name: dataclasses.asdict(RECIPES[name]) for name in settings.models}
    found_out = {"classes": problem.classes, "runs": runs, "confusion": matrices}
    save(settings.output / "results.json", settings, recipes=recipes, **found_out)
    for title, table in report.tables(runs, problem.classes, matrices).items():
        print(f"\n{title}\n\n{table}")
    print(f"\n{settings.output}: {', '.join(['results.json', *files])}")
    return 0


def check(settings: Settings) -> None:
    """
    Raises:
        ValueError: settings with which nothing could be measured.
    """
    at_least(settings, folds=3, tested=1, epochs=0, names=settings.folds, shown=1, seed=0)
    check_models(settings)


if __name__ == "__main__":
    run_main(main)
