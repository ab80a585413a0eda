"""The settings of the comparison, and its streams of random numbers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.comparison.recall import BODIES, new_model
from experiments.shared.program import check_choices, check_fractions, check_minimum
from experiments.shared.training import stream

COST, TRAINING, VALIDATION, TEST, WEIGHTS, GRADIENTS = range(1, 7)  # streams that share no number
SHORTEST, NEAREST = 64, 4  # where the sequences to time and the distances to remember over begin


@dataclass(frozen=True)
class Settings:
    """The command-line settings of the comparison: of the cost measurements, then of the recall task."""

    width: int = 128  # channels d of the layers whose costs are measured
    longest: int = 4096  # the most tokens: costs are measured at n = 64, 128, ... up to it
    rounds: int = 5  # timings of every layer at every n
    kinds: tuple[str, ...] = tuple(BODIES)  # the models of the recall task
    farthest: int = 128  # the longest recall distance in tokens: 4, 8, 16, ... up to it
    parameters: int = 20_000  # of each model of the recall task, at most
    updates: int = 400  # of each training
    batch_size: int = 32  # sequences of an update
    rates: tuple[float, ...] = (3e-3, 1e-3, 1e-2)
    """learning rates, tried until one training learns the task; if none does, the lowest validation loss decides"""
    seeds: int = 3  # trainings, each with other initial weights and data
    tested: int = 1000  # test sequences at each distance; as many for validation
    quick: bool = False  # at most three minutes: fewer rounds, shorter sequences and trainings, one rate, one seed
    output: Path = Path("runs/comparison")  # where results.json, costs.png, recall.png and gradients.png are written

    @property
    def sizes(self) -> list[int]:
        """Return the numbers of tokens n at which costs are measured: SHORTEST and its doubles up to `longest`."""
        return powers_of_two(SHORTEST, self.longest)

    @property
    def distances(self) -> list[int]:
        """Return the distances from the question to the token to recall: NEAREST and its doubles up to `farthest`."""
        return powers_of_two(NEAREST, self.farthest)


def powers_of_two(first: int, last: int) -> list[int]:
    """Return `first`, 2 * `first`, 4 * `first` and so on, up to `last`."""
    return [first * 2**i for i in range((last // first).bit_length())]


QUICK: dict[str, Any] = {
    "longest": 1024,
    "rounds": 3,
    "farthest": 32,
    "updates": 200,
    "rates": (3e-3,),
    "seeds": 1,
    "tested": 500,
}


def check(settings: Settings) -> None:
    """Raise ValueError for a count below its minimum, a bad rate, an unknown kind, or an impossible size of a model."""
    check_minimum(settings, width=1, longest=SHORTEST, rounds=1)
    check_minimum(settings, farthest=NEAREST, updates=1, batch_size=1, seeds=1, tested=1)
    check_fractions(settings, "rates")
    check_choices(settings, kinds=BODIES)
    for kind in settings.kinds:
        new_model(kind, settings.parameters, settings.farthest, stream(0))  # refuses a number that none can have
