"""Six uses of gradients of gradients, from the solution of a differential equation to Newton's method.

    python -m experiments.second_derivatives            all six: five minutes
    python -m experiments.second_derivatives --quick    smaller: one minute
    python -m experiments.second_derivatives --parts newton influence    two of them

Each part measures one use; see the README.
"""

from typing import Any

from experiments.second_derivatives import report
from experiments.second_derivatives.study import PARTS, Settings
from experiments.shared.program import Outcome, check_choices, check_minimum, run_study
from experiments.shared.results import Runs, rounded, save
from tricycle_cli.flags import run_main

QUICK: dict[str, Any] = {
    **{"widths": (32,), "steps": 500, "rates": (0.4,), "descent_steps": 200, "train_images": 100, "removed": 20},
    **{"strengths": (0.0, 0.3), "epochs": 20, "meta_steps": 500, "newton_steps": 10, "gradient_steps": 100},
}


def study(settings: Settings) -> Outcome:
    """Run `settings.parts`, write results.json and plots; return (Markdown tables by title, file names)."""
    runs: dict[str, Runs] = {part: rounded(PARTS[part](settings), 8) for part in settings.parts}
    results = save(settings.output / "results.json", settings, **runs)
    return report.tables(results), ["results.json", *report.plot(results, settings.output)]


def main() -> int:
    """Parse sys.argv, run the study, print its tables, and return 0; ValueError for invalid settings."""

    def check(settings: Settings) -> None:
        names = ("steps", "descent_steps", "train_images", "removed", "epochs", "meta_steps", "newton_steps")
        check_minimum(settings, gradient_steps=1, **dict.fromkeys(names, 1))
        check_choices(settings, parts=PARTS)
        if settings.removed > (n := settings.train_images):
            raise ValueError(f"expected --removed to be at most {n}, the training images, got {settings.removed}")

    return run_study(Settings, study, __doc__, QUICK, check)


if __name__ == "__main__":
    run_main(main)
