"""What a page needs to compare runs of training: their curves, in what their settings differ, figures and samples."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MOST_POINTS = 1500  # of a curve: more than a screen has
MOST_TEXT = 3000  # characters of a sample
SAMPLES = 4  # the latest of a run

Line = Mapping[str, Any]


@dataclass
class RunRead:
    """A run folder, as far as it can be read.

    Attributes:
        metrics: the sound lines of metrics.jsonl.
        n_damaged: how many others there are.
        tokeniser: something that differs where tokenisers do; "" where there is none.
        text: the same for the text.
        tokens: that an update reads; 0 where nobody knows.
        n_weights: that learn; 0 where nobody knows.
        samples: title and text of each.
    """

    name: str
    config: dict[str, Any]
    metrics: Sequence[Line]
    n_damaged: int = 0
    n_weights: int = 0
    tokeniser: str = ""
    text: str = ""
    tokens: int = 0
    samples: list[tuple[str, str]] = field(default_factory=list)


def comparison(runs: Sequence[RunRead]) -> dict[str, Any]:
    """All that the page shows, as JSON can hold it."""
    curves = [_run(run) for run in runs]
    return {
        "runs": curves,
        "differences": differences([run.config for run in runs]),
        "notes": _notes(runs, curves),
        "unit": "bits" if all(curve["bits"] for curve in curves) else "nats",
    }


def differences(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The fields that are not the same in all configs, in their order; "" for one that a config has not."""
    fields = list(dict.fromkeys(name for config in configs for name in config))
    rows = []
    for name in fields:
        values = [config.get(name, "") for config in configs]
        texts = [f"{value:.6g}" if isinstance(value, float) else str(value) for value in values]
        if len(set(texts)) > 1:
            rows.append({"field": name, "values": texts})
    return rows


def _notes(runs: Sequence[RunRead], curves: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a reader must know before the curves are compared."""
    notes = []
    if len({run.tokeniser for run in runs}) > 1:
        notes.append(
            "These runs have different tokenisers: their losses in nats a token do not compare, bits a byte do."
        )
    if len({run.text for run in runs}) > 1:
        notes.append("These runs were trained on different texts, and measured on different ones.")
    for run, curve in zip(runs, curves):
        if run.n_damaged:
            count = f"{run.n_damaged:,} damaged lines of metrics.jsonl were"
            count = "a damaged line of metrics.jsonl was" if run.n_damaged == 1 else count
            notes.append(f"{run.name}: {count} left out.")
        if not curve["training"]["step"]:
            notes.append(f"{run.name}: no update has been recorded.")
        if not run.tokens:
            notes.append(f"{run.name}: its updates differ in length, so it is shown over steps alone.")
    return notes


def _run(run: RunRead) -> dict[str, Any]:
    lines = [line for line in run.metrics if _finite(line.get("loss"))]
    steps = np.array([line["step"] for line in lines], np.int64)
    seconds = _seconds(lines, run.tokens)
    held = [line for line in run.metrics if _finite(line.get("held_out_loss"))]
    with_bits = [line for line in held if _finite(line.get("bits_per_byte")) and line["held_out_loss"] > 0]
    bits = [line["bits_per_byte"] / line["held_out_loss"] for line in with_bits]
    clock = [float(np.interp(line["step"], [0, *steps], [0, *seconds])) for line in held] if seconds else []
    curves = {
        "training": _thinned(steps, np.array([line["loss"] for line in lines], np.float64), np.array(seconds)),
        "held_out": {
            "step": [line["step"] for line in held],
            "loss": [_figure(line["held_out_loss"]) for line in held],
            "seconds": [round(second, 2) for second in clock],
        },
    }
    return {
        "name": run.name,
        "tokens": run.tokens,
        "bits": _figure(float(np.median(bits))) if bits else None,
        **curves,
        "figures": _figures(run, lines, held, seconds),
        "samples": [{"title": title, "text": text[:MOST_TEXT]} for title, text in run.samples[-SAMPLES:]],
    }


def _finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _figure(value: float) -> float:
    return float(f"{value:.5g}")


def _seconds(lines: Sequence[Line], tokens: int) -> list[float]:
    """When each update was over, from the speeds that were recorded; [] where that cannot be told."""
    if not tokens or not all(_finite(line.get("tokens_per_second")) for line in lines):
        return []
    total, step, seconds = 0.0, 0, []
    for line in lines:
        total += (line["step"] - step) * tokens / max(line["tokens_per_second"], 1e-9)
        step = line["step"]
        seconds.append(total)
    return seconds


def _thinned(steps: np.ndarray, losses: np.ndarray, seconds: np.ndarray) -> dict[str, Any]:
    """At most so many points: each the mean of some neighbours, where the last of them stands."""
    size = max(1, math.ceil(len(steps) / MOST_POINTS))
    firsts = np.arange(0, len(steps), size)
    lasts = np.minimum(firsts + size, len(steps)) - 1
    means = np.add.reduceat(losses, firsts) / (lasts - firsts + 1) if len(steps) else losses
    return {
        "step": steps[lasts].tolist(),
        "loss": [_figure(loss) for loss in means.tolist()],
        "seconds": np.round(seconds[lasts], 2).tolist() if len(seconds) else [],
        "each": size,
    }


def _figures(run: RunRead, lines: Sequence[Line], held: Sequence[Line], seconds: Sequence[float]) -> dict[str, Any]:
    """The rows of the table of figures: words, or numbers where the page may find the best."""
    final = next((line for line in reversed(run.metrics) if _finite(line.get("final_loss"))), None)
    best = min(held, key=lambda line: line["held_out_loss"], default=None)
    step = max((line["step"] for line in run.metrics), default=0)
    planned = run.config.get("steps") or 0
    speeds = [line["tokens_per_second"] for line in lines if _finite(line.get("tokens_per_second"))]
    return {
        "state": "finished" if final else f"step {step:,} of {planned:,}" if planned else f"step {step:,}",
        "weights": run.n_weights or None,
        "tokens": run.tokens * step,
        "seconds": round(seconds[-1], 1) if seconds else None,
        "speed": round(float(np.median(speeds))) if speeds else None,
        "best_step": best["step"] if best else None,
        "best_loss": best["held_out_loss"] if best else None,
        "best_bits": best.get("bits_per_byte") if best else None,
        "final_loss": final["final_loss"] if final else None,
        "final_bits": final.get("final_bits_per_byte") if final else None,
    }


def digest(content: bytes) -> str:
    """A few letters that stand for a file's content."""
    return hashlib.sha256(content).hexdigest()[:16]
