"""What is to be measured of a model that others trained, a row at a time, and the file that remembers what has been."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import time
from collections.abc import Iterator
from datetime import date
from typing import Any

import numpy as np

from experiments.learned_statistics.real_study import (
    GRAINS,
    STARTS,
    Job,
    RealSettings,
    RealSubject,
    Shares,
    coarsen,
    cut,
    digest,
    exact_shares,
    explained,
    first_scales,
    in_bins,
    learn,
    new_subject,
    read,
    repeated,
    rows_of,
    same_beginning,
    write,
)
from experiments.real_model import TEXTS
from tricycle.system.files import atomic_write

# Settings that may change when a command is given again: they ask for more rows, not for other ones.
FREE = ("quick", "blocks", "seeds", "other_rates", "output")
DIGITS = 5


# -------------------------------------------------------------------- jobs
def learned(settings: RealSettings, **changes: Any) -> Job:
    """The seed's kind of scale, from a start that knows how many blocks there are; with changes."""
    job = Job("learned", settings.middle, "position", settings.text, "1 / k", settings.rate)
    return job._replace(**changes)


def mean(settings: RealSettings, **changes: Any) -> Job:
    return Job("mean", settings.middle, "position", settings.text)._replace(**changes)


def all_jobs(settings: RealSettings) -> list[Job]:
    """In an order in which the first say most: all kinds at `middle` blocks, then one thing varied at a time."""
    middle = settings.middle
    others = [text for text in TEXTS if text != settings.text]
    jobs = [Job("whole"), *(Job(kind, n) for n in settings.blocks for kind in ("none", "1 / k"))]
    jobs += [Job("exact", middle)]
    jobs += [mean(settings, blocks=n) for n in settings.blocks]
    jobs += [mean(settings, grain=grain) for grain in GRAINS if grain != "position"]
    jobs += [mean(settings, text=text) for text in others]
    jobs += [learned(settings, start=start) for start in STARTS]
    jobs += [learned(settings, blocks=2, start=start) for start in ("1", "1 / k")]
    jobs += [learned(settings, grain=grain) for grain in GRAINS if grain != "position"]
    jobs += [learned(settings, blocks=n) for n in settings.blocks if n not in (2, middle)]
    if not settings.quick:
        jobs += [learned(settings, text=text) for text in others]
        jobs += [learned(settings, blocks=1)]  # nothing is cut: what scales can do beside putting blocks together
        jobs += [learned(settings, rate=rate) for rate in settings.other_rates]
        jobs += [learned(settings, rate=max(settings.other_rates), start="1")]
    jobs += [learned(settings, seed=seed) for seed in range(1, settings.seeds)]
    return list(dict.fromkeys(jobs))


def written_jobs(settings: RealSettings) -> list[Job]:
    """Those whose model goes on with the prompts."""
    middle, most = settings.middle, max(settings.blocks)
    jobs = [Job("whole"), Job("none", middle), Job("1 / k", middle), mean(settings), mean(settings, grain="head")]
    jobs += [learned(settings, start=start) for start in STARTS]
    jobs += [learned(settings, blocks=n) for n in dict.fromkeys((min(settings.blocks), most)) if n != middle]
    return jobs


# -------------------------------------------------------------------- the file
class Record:
    """results.json: written after every row, so that a command that was cut off goes on where it was.

    Raises:
        ValueError: the folder holds results with other settings.
    """

    def __init__(self, settings: RealSettings) -> None:
        self.path = settings.output / "results.json"
        fixed = {name: value for name, value in dataclasses.asdict(settings).items() if name not in FREE}
        self.results: dict[str, Any] = {
            "settings": fixed,
            "date": str(date.today()),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "rows": [],
        }
        if self.path.exists():
            self.results = json.loads(self.path.read_text(encoding="utf-8"))
            if self.results["settings"] != fixed:
                raise ValueError(f"{self.path}: expected these settings, found others; name another --output")

    def save(self) -> None:
        rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in self.results["rows"])
        rest = {name: value for name, value in self.results.items() if name != "rows"}
        with atomic_write(self.path, text=True) as file:
            file.write(json.dumps(rest, ensure_ascii=False, indent=1)[:-2] + f',\n "rows": [\n{rows}\n]}}\n')

    def has(self, job: Job) -> bool:
        return any(job_of(row) == job for row in self.results["rows"])

    def row(self, job: Job) -> dict[str, Any] | None:
        return next((row for row in self.results["rows"] if job_of(row) == job), None)

    def add(self, job: Job, measured: dict[str, Any]) -> None:
        self.results["rows"].append({**job._asdict(), **measured})
        self.save()


def job_of(row: dict[str, Any]) -> Job:
    return Job(**{name: row[name] for name in Job._fields})


# -------------------------------------------------------------------- the bench
class Bench:
    """A model and all that can be done to its softmax. What took long lies in files.

    Attributes:
        digest: of the model's own weights when it was loaded.
    """

    def __init__(self, settings: RealSettings, subject: RealSubject | None = None) -> None:
        self.settings = settings
        self.subject = subject or new_subject(settings)
        self.digest = digest(self.subject.model)
        self._shares: dict[str, Shares] = {}

    def measure(self, job: Job) -> dict[str, Any]:
        """Loss and likeliest tokens on all tests, in windows and along them."""
        started = time.perf_counter()
        losses = self.prepare(job)
        prepared = time.perf_counter()
        seconds = {"seconds_of_learning": prepared - started}
        texts = {}
        for text, rows in self.subject.tests.items():
            found = read(self.subject.model, rows)
            same = float((found.likeliest == self._likeliest(text, job, found.likeliest)).mean())
            each = found.losses.mean(axis=1)
            texts[text] = {
                "perplexity": round(math.exp(each.mean()), DIGITS),
                "same": round(same, DIGITS),
                "windows": [round(float(loss), DIGITS) for loss in each],
                "positions": [round(loss, DIGITS) for loss in in_bins(found.losses)],
            }
        seconds["seconds"] = time.perf_counter() - started
        return {
            **{name: round(value, 1) for name, value in seconds.items()},
            "losses": [round(loss, 4) for loss in losses],
            "texts": texts,
        }

    def prepare(self, job: Job) -> list[float]:
        """Let the model weigh keys as a job asks; returns the losses of its learning, if it learnt just now."""
        arrays, losses = self.scales(job)
        cut(self.subject.model, job, arrays)
        return losses

    def scales(self, job: Job) -> tuple[list[np.ndarray], list[float]]:
        """The scales of each layer, from their file if there is one, and the losses of their learning."""
        if job.kind in ("whole", "none", "exact"):
            return [], []
        if job.kind == "1 / k":
            return self.first(job._replace(start="1 / k")), []
        if job.kind == "mean":
            return list(coarsen(self.shares(job.text).mean[job.blocks], job.grain)), []
        path = self.settings.output / "scales" / f"{job.file_name}.npz"
        if not path.exists():
            arrays, losses = learn(self.subject, job, self.settings, self.first(job))
            with atomic_write(path) as file:
                np.savez(file, np.array(losses), *arrays)
        with np.load(path, allow_pickle=False) as file:
            losses, *arrays = file.values()
        return arrays, losses.tolist()

    def first(self, job: Job) -> list[np.ndarray]:
        """Where the scales of each layer begin."""
        if job.start == "mean":
            return self.scales(Job("mean", job.blocks, job.grain, job.text))[0]
        config = self.subject.model.config
        return first_scales(job, config.n_layers, config.n_heads, self.subject.window)

    def shares(self, text: str) -> Shares:
        """Of a training text."""
        if text not in self._shares:
            blocks = tuple(dict.fromkeys((self.settings.middle, *self.settings.blocks)))
            path = self.settings.output / "scales" / f"shares-{text}-{'-'.join(map(str, blocks))}.npz"
            if not path.exists():
                needed = self.settings.measured_windows
                rows = rows_of(self.subject.tokeniser, text, "train", needed, self.subject.window)
                shares = exact_shares(self.subject, rows, blocks)
                arrays = {f"mean-{n}": array for n, array in shares.mean.items()}
                arrays |= {f"square-{n}": array for n, array in shares.square.items()}
                with atomic_write(path) as file:
                    np.savez(file, **arrays)
            with np.load(path, allow_pickle=False) as file:
                parts = [{n: file[f"{part}-{n}"] for n in blocks} for part in ("mean", "square")]
            self._shares[text] = Shares(*parts)
        return self._shares[text]

    def explained(self) -> dict[str, dict[str, float]]:
        """By the number of blocks and the grain, as `real_study.explained` says."""
        shares = self.shares(self.settings.text)
        return {
            str(n): {grain: round(explained(shares, n, grain), DIGITS) for grain in GRAINS}
            for n in self.settings.blocks
        }

    def write(self, job: Job) -> dict[str, Any]:
        """How the model goes on with the prompts, beside the whole softmax's."""
        self.prepare(job)
        started = time.perf_counter()
        tokens = write(self.subject, self.settings.n_written)
        return {**job._asdict(), "tokens": tokens, "seconds": round(time.perf_counter() - started, 1)}

    def _likeliest(self, text: str, job: Job, found: np.ndarray) -> np.ndarray:
        """The whole softmax's likeliest tokens, which are kept when they are found."""
        path = self.settings.output / "scales" / f"likeliest-{text}.npy"
        if job.kind == "whole":
            with atomic_write(path) as file:
                np.save(file, found)
        kept: np.ndarray = np.load(path, allow_pickle=False)
        return kept


def compare(written: list[dict[str, Any]], tokeniser: Any) -> Iterator[dict[str, Any]]:
    """What is left of the whole softmax's texts, for each way to weigh keys; the first is the whole."""
    whole = written[0]["tokens"]
    for way in written:
        pairs = list(zip(way["tokens"], whole))
        yield {
            **{name: way[name] for name in Job._fields},
            "same": float(np.mean([np.mean([a == b for a, b in zip(*pair)]) for pair in pairs])),
            "until": float(np.mean([same_beginning(*pair) for pair in pairs])),
            "repeated": float(np.mean([repeated(tokens) for tokens in way["tokens"]])),
            "texts": [tokeniser.decode(tokens) for tokens in way["tokens"]],
        }
