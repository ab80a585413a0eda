"""Film reviews: does a sentence praise? Convolution, recurrence and Transformer by ten-fold cross validation.

    python -m experiments.sentiment             ten folds, three models
    python -m experiments.sentiment --quick     within three minutes: two of the ten folds, three epochs
    python -m experiments.sentiment --models convolution --tested 1

The models' sizes and how they are trained were settled on validation sentences; see the README.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from experiments.classification import check_models, favourites
from experiments.sentiment import data, report
from experiments.sentiment.study import RECIPES, Settings, run
from experiments.settings import at_least, save
from tricycle_cli.flags import parse, run_main

QUICK: dict[str, Any] = {"tested": 2, "epochs": 3}
LEAST, KEPT = 20, 40  # favourites come at least so often; so many of each model go to results.json


def main() -> int:
    default = Settings(**(QUICK if "--quick" in sys.argv[1:] else {}))  # other flags start from its values
    settings = parse(Settings, default, description=__doc__ or "")
    check(settings)
    texts, problem = data.load(settings.sentences)
    runs, outcome = run(problem, settings)
    words = {name: favourites(problem, outcome, name, LEAST)[:KEPT] for name in settings.models}
    files = report.write(texts, problem, outcome, runs, settings)
    recipes = {name: dataclasses.asdict(RECIPES[name]) for name in settings.models}
    save(settings.output / "results.json", settings, recipes=recipes, runs=runs, words=words)
    for title, table in report.tables(runs, words).items():
        print(f"\n{title}\n\n{table}")
    print(f"\n{settings.output}: {', '.join(['results.json', *files])}")
    return 0


def check(settings: Settings) -> None:
    """
    Raises:
        ValueError: settings with which nothing could be measured.
    """
    at_least(settings, folds=3, tested=1, epochs=0, sentences=settings.folds, shown=1, seed=0)
    check_models(settings)


if __name__ == "__main__":
    run_main(main)
