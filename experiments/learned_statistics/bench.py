"""What is to be measured, one row at a time, and the file that remembers what has been."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import time
from datetime import date
from typing import Any, NamedTuple

import numpy as np

from experiments.learned_statistics.study import (
    Settings,
    Subject,
    cut,
    equal_shares,
    learn,
    loss_of,
    make_whole,
    mean_shares,
    set_scales,
)
from tricycle.system.files import atomic_write

# Settings that may change when a command is given again: they ask for more rows, not for other ones.
FREE = ("quick", "blocks", "seeds", "models", "output", "device")


class Job(NamedTuple):
    """A row: the softmax as it is ("whole"), or in blocks ("none", "exact"), or in blocks with scales of some kind."""

    kind: str
    blocks: int = 1
    seed: int = 0


def all_jobs(settings: Settings) -> list[Job]:
    jobs = [Job("whole")]
    for n in settings.blocks:
        jobs += [Job(kind, n) for kind in ("none", "exact", "1 / k", "measured", "measured per head")]
        jobs += [Job(kind, n, seed) for seed in range(settings.seeds) for kind in ("learned", "learned per head")]
    return jobs


class Bench:
    """A model and all that can be done to its softmax. Scales, once found, lie in files.

    Args:
        number: of the model.
    """

    def __init__(self, subject: Subject, number: int, settings: Settings) -> None:
        self.subject, self.number, self.settings = subject, number, settings

    def measure(self, job: Job) -> dict[str, Any]:
        started = time.perf_counter()
        self.prepare(job)
        prepared = time.perf_counter()
        loss = loss_of(self.subject, self.settings)
        seconds = {"seconds_of_learning": prepared - started, "seconds": time.perf_counter() - started}
        return {"loss": loss, "perplexity": math.exp(loss), **{name: round(s, 1) for name, s in seconds.items()}}

    def prepare(self, job: Job) -> None:
        """Let the model's attention work as a row asks."""
        if job.kind == "whole":
            make_whole(self.subject.model)
        elif job.kind in ("none", "exact"):
            cut(self.subject.model, job.blocks, job.kind)
        else:
            arrays = self.scales(job)
            set_scales(cut(self.subject.model, job.blocks, "learned", job.kind.endswith("per head")), arrays)

    def scales(self, job: Job) -> list[np.ndarray]:
        """The scales of each layer, ([H,] n_blocks, W), from their file if there is one."""
        name = f"{self.number}-{job.blocks}-{job.kind.replace(' ', '-')}-{job.seed}.npz"
        path = self.settings.output / "scales" / name
        if job.kind == "1 / k":
            return [equal_shares(job.blocks, self.subject.window)] * len(self.subject.model.blocks)
        if path.exists():
            with np.load(path, allow_pickle=False) as file:
                return list(file.values())
        per_head = job.kind.endswith("per head")
        if job.kind.startswith("learned"):
            arrays = learn(self.subject, job.blocks, per_head, job.seed, self.settings)
        else:
            arrays = mean_shares(self.subject, job.blocks, per_head)
        with atomic_write(path) as file:
            np.savez(file, *arrays)
        return arrays


class Record:
    """results.json: written after every row, so that a command that was cut off goes on where it was.

    Raises:
        ValueError: the folder holds results with other settings.
    """

    def __init__(self, settings: Settings) -> None:
        self.path = settings.output / "results.json"
        fixed = {name: value for name, value in dataclasses.asdict(settings).items() if name not in FREE}
        fixed |= {"model": settings.model and str(settings.model), "files": list(map(str, settings.files))}
        self.results: dict[str, Any] = {
            "settings": fixed,
            "date": str(date.today()),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "rows": [],
            "attention": {},
        }
        if self.path.exists():
            self.results = json.loads(self.path.read_text(encoding="utf-8"))
            if self.results["settings"] != fixed:
                raise ValueError(f"{self.path}: expected these settings, found others; name another --output")

    def save(self) -> None:
        with atomic_write(self.path, text=True) as file:
            json.dump(self.results, file, indent=1)
            file.write("\n")

    def has(self, model: int, job: Job) -> bool:
        wanted = {"model": model, **job._asdict()}
        return any(wanted.items() <= row.items() for row in self.results["rows"])

    def add(self, model: int, job: Job, measured: dict[str, Any]) -> None:
        self.results["rows"].append({"model": model, **job._asdict(), **measured})
        self.save()

    def rows(self, settings: Settings) -> list[dict[str, Any]]:
        """Those that the settings ask for."""
        jobs = all_jobs(settings)
        return [
            row
            for row in self.results["rows"]
            if row["model"] < settings.models and Job(row["kind"], row["blocks"], row["seed"]) in jobs
        ]
