"""Two uses of gradients of gradients: a network that solves the heat equation, and the sharpness of a training loss.

python -m experiments.second_derivatives            three widths, three learning rates: one minute
python -m experiments.second_derivatives --quick    one of each, shorter: 10 seconds
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.second_derivatives import heat, report, sharpness
from experiments.shared.program import Outcome, check_minimum, run_study
from experiments.shared.results import Runs, rounded, save
from tricycle_cli.flags import run_main

QUICK: dict[str, Any] = {"widths": (32,), "steps": 500, "rates": (0.2,), "descent_steps": 3200}


@dataclass(frozen=True)
class Settings:
    """The command-line settings of the study."""

    widths: tuple[int, ...] = (16, 32, 48)  # of the two hidden layers of the network for the heat equation
    steps: int = 2000  # updates of that network
    rates: tuple[float, ...] = (0.1, 0.15, 0.2)  # learning rates of gradient descent
    descent_steps: int = 8000  # steps of gradient descent
    seed: int = 0  # of weights and points
    quick: bool = False  # a smaller study
    output: Path = Path("runs/second_derivatives")  # where results.json and the plots are written


def solve(settings: Settings, width: int) -> dict[str, Any]:
    """Train a network of this width on the heat equation; return "losses", "error", "rms" and others."""
    losses, u = heat.train(settings.steps, width, seed=settings.seed)
    difference = heat.errors(u)[1]
    size = sum(parameter.size for parameter in heat.new_network(width, 0).parameters())
    root_mean_square = np.sqrt(np.mean(difference**2))
    values = {"parameters": size, "residual": np.sqrt(losses[-1]), "error": abs(difference).max()}
    return {"width": width, **values, "rms": root_mean_square, "losses": losses[:: max(1, settings.steps // 200)]}


def descend(settings: Settings, rate: float) -> dict[str, Any]:
    """Train by gradient descent with this learning rate; return the sharpness during and after training."""
    loss, parameters = sharpness.new_problem(50, settings.seed)
    history, parameters = sharpness.descend(loss, parameters, rate, settings.descent_steps, 100)
    both = {"lanczos": sharpness.sharpness(loss, parameters), "exact": sharpness.exact_sharpness(loss, parameters)}
    return {"rate": rate, "history": history, **both}


def study(settings: Settings) -> Outcome:
    """Run the study, write files to `settings.output`, and return (Markdown tables by title, file names)."""
    solved: Runs = rounded([solve(settings, width) for width in settings.widths])
    descended: Runs = [rounded(descend(settings, rate), 8) for rate in settings.rates]
    save(settings.output / "results.json", settings, heat=solved, sharpness=descended)
    report.plot(solved, descended, settings.output / "curves.png")
    return report.tables(solved, descended), ["results.json", "curves.png"]


def main() -> int:
    """Parse sys.argv, run the study, print its tables, and return 0; ValueError for invalid settings."""
    check = lambda settings: check_minimum(settings, steps=1, descent_steps=1)
    return run_study(Settings, study, __doc__, QUICK, check)


if __name__ == "__main__":
    run_main(main)
