"""Data of the page that compares training runs: loss curves, configuration differences, summary and samples."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tricycle_lab.head_scores import HeadScores

MAX_POINTS = 1500  # of a curve; a screen has fewer pixels
MAX_SAMPLE_LENGTH = 3000  # characters
SCORES = tuple(f"{name}_score" for name in HeadScores._fields)  # of metrics.jsonl, with --score-heads
N_SAMPLES = 4  # the latest samples of a run
MAX_VALUE = 1e100  # of a number in metrics.jsonl; sums and ratios of larger ones could be infinite

Record = Mapping[str, Any]


@dataclass
class RunData:
    """The readable content of a run folder.

    Attributes:
        name: the name on the page.
        config: the settings of the run, by name.
        metrics: the undamaged records of metrics.jsonl.
        n_damaged: the number of damaged lines in metrics.jsonl.
        n_parameters: the number of trainable parameters; 0 if unknown.
        tokeniser_hash: a hash of the tokenizer; "" without a tokenizer.
        text_hash: a hash of the training text; "" if unknown.
        tokens_per_step: the number of tokens per update; 0 if it varies or is unknown.
        samples: title and text of each sample.
    """

    name: str
    config: dict[str, Any]
    metrics: Sequence[Record]
    n_damaged: int = 0
    n_parameters: int = 0
    tokeniser_hash: str = ""
    text_hash: str = ""
    tokens_per_step: int = 0
    samples: list[tuple[str, str]] = field(default_factory=list)


def compare_runs(runs: Sequence[RunData]) -> dict[str, Any]:
    """Return JSON data of runs (losses in nats, "bitsPerNat"), config "differences", "notes" and initial "unit".

    "scores" are the names of the head scores that a run has.
    """
    shown = [_describe_run(run) for run in runs]
    return {
        "runs": shown,
        "differences": config_differences([run.config for run in runs]),
        "notes": _notes(runs, shown),
        "scores": [name for name in SCORES if any(name in run["heldOut"]["scores"] for run in shown)],
        "unit": "bits" if all(run["bitsPerNat"] for run in shown) else "nats",
    }


def config_differences(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a dict of "field" and "values" (texts, one per config) for each field that differs; "" if missing."""
    fields = list(dict.fromkeys(name for config in configs for name in config))
    rows = []
    for name in fields:
        values = [config.get(name, "") for config in configs]
        texts = [f"{value:.6g}" if isinstance(value, float) else str(value) for value in values]
        if len(set(texts)) > 1:
            rows.append({"field": name, "values": texts})
    return rows


def _notes(runs: Sequence[RunData], shown: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return warnings about runs that are not comparable, and about missing data."""
    notes = []
    if len({run.tokeniser_hash for run in runs}) > 1:
        notes.append("The runs have different tokenizers: compare losses in bits/byte, not in nats/token.")
    if len({run.text_hash for run in runs}) > 1:
        notes.append("The runs have different training and held-out texts.")
    for run, shown_run in zip(runs, shown):
        if run.n_damaged:
            lines = "line was" if run.n_damaged == 1 else "lines were"
            notes.append(f"{run.name}: {run.n_damaged:,} damaged {lines} skipped in metrics.jsonl.")
        if not shown_run["training"]["step"]:
            notes.append(f"{run.name}: no training loss is recorded.")
        if not run.tokens_per_step:
            notes.append(f"{run.name}: the number of tokens per step varies, so only the x-axis steps shows this run.")
    return notes


def _describe_run(run: RunData) -> dict[str, Any]:
    """Return JSON data of a run's curves: training (downsampled) and held-out losses by step and seconds."""
    training = [record for record in run.metrics if _is_finite(record.get("loss"))]
    steps = np.array([record["step"] for record in training], np.int64)
    seconds = _elapsed_seconds(training, run.tokens_per_step)
    held_out = [record for record in run.metrics if _is_finite(record.get("held_out_loss"))]
    ratios = [
        record["bits_per_byte"] / record["held_out_loss"]
        for record in held_out
        if _is_finite(record.get("bits_per_byte")) and record["held_out_loss"] > 1 / MAX_VALUE
    ]
    held_out_seconds = np.interp([record["step"] for record in held_out], [0, *steps], [0, *seconds]) if seconds else []
    return {
        "name": run.name,
        "tokensPerStep": run.tokens_per_step,
        "bitsPerNat": _round_significant(float(np.median(ratios))) if ratios else None,
        "training": _downsample(
            steps, np.array([record["loss"] for record in training], np.float64), np.array(seconds)
        ),
        "heldOut": {
            "step": [record["step"] for record in held_out],
            "loss": [_round_significant(record["held_out_loss"]) for record in held_out],
            "seconds": [round(float(second), 2) for second in held_out_seconds],
            "scores": {
                name: [_finite_or_none(record.get(name)) for record in held_out]
                for name in SCORES
                if any(_is_finite(record.get(name)) for record in held_out)
            },
        },
        "summary": _summarize(run, training, held_out, seconds),
        "samples": [{"title": title, "text": text[:MAX_SAMPLE_LENGTH]} for title, text in run.samples[-N_SAMPLES:]],
    }


def _is_finite(value: Any) -> bool:
    """Return whether a value is an int or float below MAX_VALUE; True, False, NaN and infinity are none."""
    return type(value) in (int, float) and abs(value) < MAX_VALUE


def _finite_or_none(value: Any) -> Any:
    """Return a number if `_is_finite`, else None."""
    return value if _is_finite(value) else None


def _round_significant(value: float) -> float:
    """Return a number rounded to 5 significant digits."""
    return float(f"{value:.5g}")


def _elapsed_seconds(records: Sequence[Record], tokens_per_step: int) -> list[float]:
    """Return the seconds from the start to each record, from the recorded speeds; [] if speeds are missing."""
    if not tokens_per_step or not all(_is_finite(record.get("tokens_per_second")) for record in records):
        return []
    total, step, seconds = 0.0, 0, []
    for record in records:
        total += (record["step"] - step) * tokens_per_step / max(record["tokens_per_second"], 1e-9)
        step = record["step"]
        seconds.append(total)
    return seconds


def _downsample(steps: np.ndarray, losses: np.ndarray, seconds: np.ndarray) -> dict[str, Any]:
    """Reduce a curve to at most `MAX_POINTS` points: means of consecutive losses, at the last step of each mean."""
    size = max(1, math.ceil(len(steps) / MAX_POINTS))
    firsts = np.arange(0, len(steps), size)
    lasts = np.minimum(firsts + size, len(steps)) - 1
    means = np.add.reduceat(losses, firsts) / (lasts - firsts + 1) if len(steps) else losses
    return {
        "step": steps[lasts].tolist(),
        "loss": [_round_significant(loss) for loss in means.tolist()],
        "seconds": np.round(seconds[lasts], 2).tolist() if len(seconds) else [],
    }


def _summarize(
    run: RunData, training: Sequence[Record], held_out: Sequence[Record], seconds: Sequence[float]
) -> dict[str, Any]:
    """Return a run's summary row as a dict: state, sizes, time, speed, best and final losses (None if missing)."""
    final = next((record for record in reversed(run.metrics) if _is_finite(record.get("final_loss"))), None)
    best = min(held_out, key=lambda record: record["held_out_loss"], default=None)
    step = max((record["step"] for record in run.metrics), default=0)
    n_steps = run.config.get("steps") or 0
    speeds = [record["tokens_per_second"] for record in training if _is_finite(record.get("tokens_per_second"))]
    return {
        "state": "finished" if final else f"step {step:,} of {n_steps:,}" if n_steps else f"step {step:,}",
        "nParameters": run.n_parameters or None,
        "tokens": run.tokens_per_step * step,
        "seconds": round(seconds[-1], 1) if seconds else None,
        "tokensPerSecond": round(float(np.median(speeds))) if speeds else None,
        "bestStep": best["step"] if best else None,
        "bestLoss": best["held_out_loss"] if best else None,
        "bestBitsPerByte": _finite_or_none((best or {}).get("bits_per_byte")),
        "finalLoss": final["final_loss"] if final else None,
        "finalBitsPerByte": _finite_or_none((final or {}).get("final_bits_per_byte")),
    }


def short_hash(content: bytes) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 hash of a file's content."""
    return hashlib.sha256(content).hexdigest()[:16]
