"""The six parts of the study: each trains networks and returns the results of its runs."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.second_derivatives import heat, influence, maml, newton, penalty, sharpness
from experiments.second_derivatives.vectors import hessian_product
from experiments.shared.results import Runs

CLASSIFIERS = ((0, 0.01), (16, 0.01), (16, 0.03))  # hidden width and weight decay


@dataclass(frozen=True)
class Settings:
    """The command-line settings of the study."""

    parts: tuple[str, ...] = ("heat", "sharpness", "influence", "penalty", "maml", "newton")
    widths: tuple[int, ...] = (16, 32, 48)  # of the two hidden layers of the network for the heat equation
    steps: int = 2000  # updates of that network
    rates: tuple[float, ...] = (0.2, 0.4)  # learning rates of gradient descent
    descent_steps: int = 500  # steps of gradient descent
    train_images: int = 500  # training images of the classifiers whose influences are measured
    removed: int = 60  # training images without which the classifiers are trained again
    strengths: tuple[float, ...] = (0.0, 0.1, 0.3, 1.0)  # factors of the gradient penalty
    epochs: int = 40  # of training with the penalty
    meta_steps: int = 6_000  # updates of MAML
    newton_steps: int = 20  # steps of Newton's method
    gradient_steps: int = 1000  # steps of gradient descent beside it
    seed: int = 0  # of weights and points
    quick: bool = False  # a smaller study
    output: Path = Path("runs/second_derivatives")  # where results.json and the plots are written


def run_heat(settings: Settings) -> Runs:
    """Train networks of all widths on the heat equation; return their losses and errors."""
    runs = []
    for width in settings.widths:
        losses, u = heat.train(settings.steps, width, seed=settings.seed)
        difference = heat.errors(u)[1]
        size = sum(parameter.size for parameter in heat.new_network(width, 0).parameters())
        root_mean_square = np.sqrt(np.mean(difference**2))
        values = {"residual": np.sqrt(losses[-1]), "error": abs(difference).max(), "rms": root_mean_square}
        runs.append({"width": width, "parameters": size, **values, "losses": losses[:: max(1, settings.steps // 200)]})
    return runs


def run_sharpness(settings: Settings) -> Runs:
    """Train a GPT by gradient descent with each learning rate; return the largest eigenvalues during training."""
    runs = []
    for rate in settings.rates:
        loss, vector = sharpness.new_problem(16, settings.seed)
        history = sharpness.descend(loss, vector, rate, settings.descent_steps, max(1, settings.descent_steps // 25))
        runs.append({"rate": rate, "parameters": vector.size, "history": history})
    return runs


def run_influence(settings: Settings) -> Runs:
    """Estimate the influence of training images on the worst test image, and retrain without some; return both."""
    runs = []
    for hidden, decay in CLASSIFIERS[: 1 if settings.quick else None]:
        problem = influence.Problem(hidden, decay, settings.train_images, settings.seed)
        vector = influence.minimize(problem.training_loss, problem.start)
        losses = [problem.image_loss(vector, x, y).item() for x, y in zip(problem.test_x, problem.test_y)]
        image = int(np.argmax(losses))
        times = [time.perf_counter()]
        estimates = influence.influences(problem, vector, image)
        times.append(time.perf_counter())
        changes = influence.changes(problem, vector, image, settings.removed)
        times.append(time.perf_counter())
        product = hessian_product(problem.training_loss, vector)
        lowest = sharpness.lanczos(product, np.random.default_rng(0).standard_normal(vector.size), 150)[0]
        about = {"hidden": hidden, "decay": decay, "image": image, "loss": losses[image], "lowest": lowest}
        seconds = [times[1] - times[0], (times[2] - times[1]) / settings.removed * settings.train_images]
        runs.append({**about, "estimates": estimates, "changes": changes, "seconds": seconds})
    return runs


def run_penalty(settings: Settings) -> Runs:
    """Train with penalties of all strengths and three seeds (one with --quick); return norms and accuracies."""
    seeds = range(settings.seed, settings.seed + (1 if settings.quick else 3))
    runs = []
    for strength in settings.strengths:
        found = [penalty.evaluate(penalty.train(strength, settings.epochs, seed)) for seed in seeds]
        runs.append({"strength": strength, **{key: [run[key] for run in found] for key in ("norm", "accuracies")}})
    return runs


def run_maml(settings: Settings) -> Runs:
    """Train with each method; return "method", "seconds" of an update, "errors" on new tasks after 0 to 10 steps."""
    runs = []
    for method in maml.METHODS:
        start = time.perf_counter()
        weights = maml.train(method, settings.meta_steps, settings.seed)
        seconds = (time.perf_counter() - start) / settings.meta_steps
        runs.append({"method": method, "seconds": seconds, "errors": maml.errors_after(weights, 10, 1000, 1)})
    return runs


def run_newton(settings: Settings) -> Runs:
    """Train the tutorial's network with each method; return the losses of all steps and the time of a step."""
    runs = []
    for method in newton.METHODS:
        loss, vector = newton.new_problem(settings.seed)
        n_steps = settings.gradient_steps if method == "gradient descent" else settings.newton_steps
        start = time.perf_counter()
        losses = newton.descend(loss, vector, method, n_steps)
        runs.append({"method": method, "losses": losses, "seconds": (time.perf_counter() - start) / n_steps})
    return runs


PARTS: dict[str, Callable[[Settings], Runs]] = {
    **{"heat": run_heat, "sharpness": run_sharpness, "influence": run_influence},
    **{"penalty": run_penalty, "maml": run_maml, "newton": run_newton},
}
