"""Compare convolution, recurrence and self-attention: cost against sequence length, and memory over distance.

    python -m experiments.comparison             all costs up to 4,096 tokens, all distances up to 128, three seeds
    python -m experiments.comparison --quick     within three minutes

The table is the lecture's, which is table 1 of Vaswani et al. 2017.
"""

from typing import Any

from experiments.comparison import costs, report
from experiments.comparison import study as recalling
from experiments.comparison.settings import QUICK, Settings, check
from experiments.shared.program import Outcome, run_study
from experiments.shared.results import save
from tricycle_cli.flags import run_main


def study(settings: Settings) -> Outcome:
    """Measure costs and recall, write results.json and three plots; return (Markdown tables by title, file names)."""
    folder, sizes, distances = settings.output, settings.sizes, settings.distances
    results: dict[str, Any] = {"sizes": sizes, "distances": distances, "paths": costs.paths(distances)}
    results["costs"] = costs.measure(settings)
    report.plot_costs(sizes, results["costs"], folder / "costs.png")
    results["runs"] = recalling.measure(settings)
    results = save(folder / "results.json", settings, **results)
    report.plot_recall(distances, results["runs"], folder / "recall.png")
    report.plot_gradients(distances, results["runs"], folder / "gradients.png")
    return report.tables(results), ["results.json", "costs.png", "recall.png", "gradients.png"]


def main() -> int:
    """Parse sys.argv, run the study, print its tables, and return 0; ValueError for invalid settings."""
    return run_study(Settings, study, __doc__, QUICK, check)


if __name__ == "__main__":
    run_main(main)
