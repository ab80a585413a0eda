"""Train every variant with every seed, several at a time; finished trials are stored."""

import json
import os
import queue
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from experiments.shared.program import check_minimum
from experiments.shared.results import Record, check_same_settings, select, settings_without_paths
from experiments.ten_minutes.ablations import all_variants, configs
from tricycle.configs import PRESETS, GPTConfig

ONE_THREAD = dict.fromkeys("TRICYCLE_NUM_THREADS OMP_NUM_THREADS OPENBLAS_NUM_THREADS MKL_NUM_THREADS".split(), "1")
ROOT = Path(__file__).resolve().parents[2]
BAR = "{desc}: {percentage:3.0f}%|{bar}| {n:.1f}/{total:.1f} CPU minutes [{elapsed}<{remaining}]"
# All else in a config is the recipe.
PASSING = {"seed", "minutes", "steps", "eval_interval", "eval_batches", "sample_interval"}


@dataclass(frozen=True)
class Settings:
    """The command-line settings of the ablation study; the recipe's own flags start from its preset."""

    variants: tuple[str, ...] = ()  # which to train beside the recipe; all that change something if none is named
    also: tuple[str, ...] = ()  # further variants, each as "name: field=value, field=value"
    seeds: int = 1  # how often to train each, with other weights and another order of the data
    jobs: int = 1  # how many trainings at a time, each with one thread, and on a core of its own where the system can
    data: Literal["python", "shakespeare", "text"] = "python"
    """the text: python (the standard library), shakespeare, or text with --files"""
    files: tuple[str, ...] = ()  # text files or folders of them, for --data text
    part: Literal["validation", "held-out"] = "validation"
    """the text to score: validation (a part of the training text), or held-out, for the final result only"""
    batches: int = 0
    """score only this many batches, evenly spaced; 0 for all of the text, in windows that overlap by half"""
    report: bool = False  # train nothing: draw and print what is there
    quick: bool = False  # at most three minutes: four variants, each for a quarter of a minute
    output: Path = Path("runs/ten_minutes")
    """the folder of results.json and ablations.png; finished trials there are not repeated"""
    config: GPTConfig = field(default_factory=GPTConfig)


def preset() -> GPTConfig:
    """Return a new GPTConfig of the ten-minute recipe, the preset "laptop"."""
    return GPTConfig.from_dict(PRESETS["laptop"]().to_dict())


def check(settings: Settings) -> None:
    """Raise ValueError for a count below its minimum, or an invalid recipe, variant name or `also`."""
    check_minimum(settings, seeds=1, jobs=1, batches=0)
    check_recipe(settings)
    configs(settings.config, settings.variants, settings.also)


def check_recipe(settings: Any) -> None:
    """Raise ValueError if --minutes is not positive or --files does not fit --data."""
    if settings.config.minutes <= 0:
        raise ValueError(f"expected --minutes above 0, got {settings.config.minutes}")
    if (settings.data == "text") != bool(settings.files):
        raise ValueError(f"expected --files with --data text and only with it, got --data {settings.data}")


class Trials(Record):
    """The finished trials, stored in results.json.

    Raises:
        ValueError: the folder holds results of another recipe or text.
    """

    def __init__(self, settings: Settings) -> None:
        # all settings are free: those of the recipe follow
        super().__init__(settings, settings_without_paths(settings), trials=[])
        if self.path.is_file():
            there, here = self["settings"], settings_without_paths(settings)
            same = "data", "files", "part", "batches"
            check_same_settings(
                self.path,
                comparable_fields(GPTConfig.from_dict(there["config"])) | {name: there[name] for name in same},
                comparable_fields(settings.config) | {name: here[name] for name in same},
            )

    def has(self, name: str, config: GPTConfig) -> bool:
        """Return whether a trial of this variant and config is stored."""
        trials = select(self["trials"], variant=name)
        return any(GPTConfig.from_dict(trial["config"]) == config for trial in trials)


def comparable_fields(config: GPTConfig) -> dict[str, Any]:
    """Return a config as a dict without seed, minutes, steps, and evaluation and sample intervals."""
    return {name: value for name, value in config.to_dict().items() if name not in PASSING}


def unfinished_trials(settings: Settings, record: Trials) -> Iterator[tuple[str, GPTConfig]]:
    """Yield (name, config) of trials that are not in `record`: all variants with one seed, then the next."""
    chosen = configs(settings.config, settings.variants, settings.also)
    for seed in range(settings.config.seed, settings.config.seed + settings.seeds):
        for name, config in chosen.items():
            seeded = replace(config, seed=seed)
            if not record.has(name, seeded):
                yield name, seeded


def measure(settings: Settings) -> list[dict[str, Any]]:
    """Run and save all trials that are not stored, and return all; RuntimeError at the end if some failed."""
    record = Trials(settings)
    trials = list(unfinished_trials(settings, record))
    cores: queue.Queue[int | None] = queue.Queue()
    for core in free_cores(settings.jobs):
        cores.put(core)
    labels = {name: variant.label for name, variant in all_variants(settings.also).items()}
    minutes, failures = settings.config.minutes, []
    with (
        tqdm(
            total=1e-9 + len(trials) * minutes,
            unit="min",
            desc=f"{len(trials)} training(s)",
            dynamic_ncols=True,
            bar_format=BAR,
        ) as bar,
        ThreadPoolExecutor(settings.jobs) as pool,
    ):
        waiting = {pool.submit(run_trial, settings, config, cores, bar): (name, config) for name, config in trials}
        try:
            for done in as_completed(waiting):
                name, config = waiting[done]
                about = {"variant": name, "label": labels[name], "seed": config.seed, "config": config.to_dict()}
                title = f"{labels[name]}, seed {config.seed}"
                try:
                    result = done.result()
                except RuntimeError as error:  # the others need not suffer
                    failures.append(f"{title}: {error}")
                    bar.write(failures[-1])
                    continue
                record.append("trials", about | result)
                bar.write(f"{title}: {result['bits']:.4f} bits per byte")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if failures:
        raise RuntimeError(f"{len(failures)} of {len(trials)} trainings failed, {failures[0]}")
    return record["trials"]


def free_cores(n: int) -> list[int | None]:
    """Return n CPU core numbers; n times None if there are fewer or the system does not tell."""
    known = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return list(known[:n]) if len(known) >= n else [None] * n


def run_trial(settings: Settings, config: GPTConfig, cores: queue.Queue[int | None], bar: tqdm) -> dict[str, Any]:
    """Train in a subprocess on a core taken from `cores` and put back; return results; RuntimeError if it fails."""
    core = cores.get()
    task = {
        "config": config.to_dict(),
        "seconds": 60 * config.minutes,
        "data": settings.data,
        "part": settings.part,
        "files": [str(Path(name).resolve()) for name in settings.files],
        "batches": settings.batches,
        "core": core,
    }
    words = [sys.executable, "-m", "experiments.ten_minutes.trial", json.dumps(task)]
    used, result, other = 0.0, None, ""
    try:
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env={**os.environ, **ONE_THREAD},
            encoding="utf-8",
            errors="replace",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        with process:
            try:
                for line in process.stdout or []:
                    message = parse_json_object(line)
                    result = message.get("result", result)
                    other = other if message else line.strip() or other
                    if "used" in message:
                        now = min(message["used"] / 60, config.minutes)
                        bar.update(now - used)
                        used = now
            except BaseException:
                process.kill()
                raise
    finally:
        cores.put(core)
    if process.returncode or result is None:
        raise RuntimeError(
            f"a training with {changed_fields(settings.config, config)} failed: {other or process.returncode}"
        )
    bar.update(config.minutes - used)
    return result


def parse_json_object(line: str) -> dict[str, Any]:
    """Parse a line as a JSON object; return an empty dict if it is none."""
    with suppress(ValueError):
        value = json.loads(line)
        return value if isinstance(value, dict) else {}
    return {}


def changed_fields(recipe: GPTConfig, config: GPTConfig) -> str:
    """Return "name value, ..." for the fields of `config` that differ from the recipe's, without the seed."""
    before = recipe.to_dict()
    changes = [
        f"{name} {value}" for name, value in config.to_dict().items() if value != before[name] and name != "seed"
    ]
    return ", ".join(changes) or "the recipe's own settings"
