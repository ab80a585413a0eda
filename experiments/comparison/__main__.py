"""CNN, RNN and self-attention: what a layer costs against the number of tokens, and how far back it remembers.

    python -m experiments.comparison             all costs up to 4,096 tokens, all distances up to 128, three seeds
    python -m experiments.comparison --quick     within three minutes

The table is the lecture's, which is table 1 of Vaswani et al. 2017.
"""

from __future__ import annotations

import sys
from typing import Any

from experiments.comparison import costs, report, study
from experiments.comparison.recall import BODIES, new_model
from experiments.comparison.settings import NEAREST, SHORTEST, Settings, stream
from experiments.settings import at_least, save
from tricycle_cli.flags import parse, run_main

QUICK: dict[str, Any] = {
    "longest": 1024,
    "rounds": 3,
    "farthest": 32,
    "updates": 200,
    "rates": (3e-3,),
    "seeds": 1,
    "tested": 500,
}


def main() -> int:
    default = Settings(**(QUICK if "--quick" in sys.argv[1:] else {}))  # other flags start from its values
    settings = parse(Settings, default, description=__doc__ or "")
    check(settings)
    folder, sizes, distances = settings.output, settings.sizes, settings.distances
    results: dict[str, Any] = {"sizes": sizes, "distances": distances, "paths": costs.paths(distances)}
    results["costs"] = costs.measure(settings)
    report.plot_costs(sizes, results["costs"], folder / "costs.png")
    results["runs"] = study.measure(settings)
    results = save(folder / "results.json", settings, **results)
    report.plot_recall(distances, results["runs"], folder / "recall.png")
    report.plot_gradients(distances, results["runs"], folder / "gradients.png")
    for title, table in report.tables(results).items():
        print(f"\n{title}\n\n{table}")
    print(f"\n{folder}: results.json, costs.png, recall.png, gradients.png")
    return 0


def check(settings: Settings) -> None:
    """
    Raises:
        ValueError: settings with which nothing could be measured.
    """
    at_least(settings, width=1, longest=SHORTEST, rounds=1)
    at_least(settings, farthest=NEAREST, updates=1, batch_size=1, seeds=1, tested=1)
    if not settings.rates or not all(0 < rate < 1 for rate in settings.rates):
        raise ValueError(f"expected --rates between 0 and 1, one or more, got {settings.rates}")
    unknown = [kind for kind in settings.kinds if kind not in BODIES]
    if unknown or not settings.kinds:
        raise ValueError(f"expected --kinds among {'; '.join(BODIES)}; got {'; '.join(unknown) or 'none'}")
    for kind in settings.kinds:
        new_model(kind, settings.parameters, settings.farthest, stream(0))  # refuses a number that none can have


if __name__ == "__main__":
    run_main(main)
