"""Train each preset for equal time by `tricycle train`, and collect the bits per byte of held-out text.

The time of a preset is a number of updates: its updates per second are measured once, alone, and stored. So an
interrupted study resumes, and later load of the machine has no effect on the results.
"""

import importlib.util
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.shared.program import check_choices, check_minimum
from experiments.shared.results import Record, rounded
from tricycle.configs import PRESETS, GPTConfig
from tricycle.models import GPT
from tricycle.training_state import new_state, train_step
from tricycle_cli import train
from tricycle_cli.run import read_metrics
from tricycle_cli.task import contains_run

N_UNTIMED = 2  # updates before the timing
N_ESTIMATES = 10  # of the held-out loss during a run


@dataclass(frozen=True)
class Settings:
    """The command-line settings of the study of kinds of models."""

    minutes: float = 2.0  # of training for each preset and seed, as a number of updates
    seeds: int = 3  # runs of each preset
    presets: tuple[str, ...] = ("portable", "mixture", "mamba", "encoder_decoder")
    modules: tuple[str, ...] = ()  # modules of the standard library to train on; all by default
    flags: str = ""  # further flags of `tricycle train` for all presets
    timed_updates: int = 20  # updates that are timed, for the number of updates of a run
    render: bool = False  # only write the table of README.md and bits.png from results.json of the output folder
    quick: bool = False  # a smaller study of at most three minutes
    output: Path = Path("runs/model_kinds")  # the folder of results.json, bits.png and the run folders


QUICK: dict[str, Any] = {
    "minutes": 0.1,
    "seeds": 1,
    "modules": ("argparse", "typing", "inspect"),
    "timed_updates": 3,
    "output": Path("runs/model_kinds_quick"),
}


def check(settings: Settings) -> None:
    """Raise ValueError for fewer than 1 seed or timed update, an unknown preset or module, or minutes out of range."""
    check_minimum(settings, seeds=1, timed_updates=1)
    check_choices(settings, presets=PRESETS)
    if not 0 < settings.minutes < float("inf"):
        raise ValueError(f"expected --minutes above 0, got {settings.minutes}")
    train_words(settings, "")  # refuses modules without files


def run(settings: Settings) -> dict[str, Any]:
    """Measure rates and train, for equal minutes, runs that results.json lacks; return its "rates" and "runs"."""
    results = Record(settings, ("render", "quick", "timed_updates", "seeds", "presets"), rates={}, runs=[])
    for preset in settings.presets:  # before any run, so that all are measured in the same minutes
        if preset not in results["rates"]:
            results["rates"][preset] = rounded(updates_per_second(config_of(settings, preset), settings.timed_updates))
            results.save()
    done = {(each["preset"], each["seed"]) for each in results["runs"]}
    for seed in range(settings.seeds):
        for preset in settings.presets:
            if (preset, seed) not in done:
                steps = max(1, round(60 * settings.minutes * results["rates"][preset]))
                results.append("runs", {"preset": preset, "seed": seed, **train_run(settings, preset, seed, steps)})
    return results


def train_words(settings: Settings, preset: str) -> list[str]:
    """Return the command line of `tricycle train` for a preset, without number of updates, seed and folder.

    Raises:
        ValueError: a module without a file, such as a built-in one, or that does not exist.
    """
    words = ["--preset", preset, "--minutes", "0", "--sample-interval", "0", "--device", "cpu"]
    files = []
    for name in settings.modules:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.has_location:
            raise ValueError(f"expected --modules that have source files, got {name}")
        files.append(str(spec.origin))
    return [*words, *(["--data", "text", "--files", *files] if files else []), *shlex.split(settings.flags)]


def config_of(settings: Settings, preset: str) -> GPTConfig:
    """Return the config of a preset's runs."""
    return train.parse_arguments([*train_words(settings, preset), "--steps", "1"])[0].config


def updates_per_second(config: GPTConfig, n_updates: int) -> float:
    """Return the number of updates per second of a config, from the median time of `n_updates` on random tokens."""
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, 64 * config.context_window)
    state, seconds = new_state(config, tokens), []
    for _ in range(N_UNTIMED + n_updates):
        started = time.perf_counter()
        train_step(state)
        seconds.append(time.perf_counter() - started)
    return float(1 / np.median(seconds[N_UNTIMED:]))


def train_run(settings: Settings, preset: str, seed: int, steps: int) -> dict[str, Any]:
    """Train or resume a run in its folder; return "bits", "curve", "steps" and sizes; KeyboardInterrupt if stopped.

    Returns:
        "bits" (per byte of all held-out text), "curve" (pairs of step and bits per byte of a part of that text),
        "steps", "parameters", and "active" (parameters that process a token).

    Raises:
        KeyboardInterrupt: the run was stopped; the next call resumes it.
    """
    folder = settings.output / "runs" / f"{preset}-{seed}"
    words = ["--steps", str(steps), "--seed", str(seed), "--eval-interval", str(max(1, steps // N_ESTIMATES))]
    new = [*train_words(settings, preset), *words, "--run-folder", str(folder)]
    train.main(["--resume", str(folder)] if contains_run(folder) else new)
    metrics = read_metrics(folder / "metrics.jsonl")
    final = [line["final_bits_per_byte"] for line in metrics if "final_bits_per_byte" in line]
    if not final:
        raise KeyboardInterrupt
    curve = [[line["step"], line["bits_per_byte"]] for line in metrics if "bits_per_byte" in line]
    sizes = parameter_counts(config_of(settings, preset))
    return rounded({"bits": final[-1], "curve": curve, "steps": steps, **sizes})


def parameter_counts(config: GPTConfig) -> dict[str, int]:
    """Return "parameters", and "active": those that process a token, without the experts that are not selected."""
    model: GPT = new_state(config, np.zeros(config.context_window + 2, int)).model
    sizes = {name: parameter.size for name, parameter in model.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    total = sum(sizes.values())
    unused = experts * (1 - config.n_active_experts / config.n_experts) if config.n_experts else 0
    return {"parameters": total, "active": total - round(unused)}
