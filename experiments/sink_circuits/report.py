"""Tables in Markdown and a plot of the study of circuits with attention sinks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from experiments.shared.figures import drawing
from experiments.shared.results import Runs, select
from experiments.shared.tables import cell, markdown
from experiments.sink_circuits.study import VARIANTS
from tricycle_lab.plot import COLOURS

FAITHFUL = 0.9  # the fraction of the effect that a circuit must have
LEARNED = 1.0  # nats per repeated token, below which a model has an induction circuit
Measure = Callable[[dict[str, Any]], float]


def loss(text: int, change: str = "none") -> Measure:
    """Return a function of a run: the loss on code (0) or on repetitions (1), or its increase by a change."""
    return lambda run: run["losses"][change][text] - (run["losses"]["none"][text] if change != "none" else 0)


def mean(name: str) -> Measure:
    """Return a function of a run: the mean over heads of the outlier measure `name` (attention weight) in percent."""
    return lambda run: 100 * float(np.mean(run["outliers"][name]))


def of_induction_head(name: str, scale: float = 100) -> Measure:
    """Return a function of a run: a measure of the head with the largest induction score, by default in percent."""
    return lambda run: scale * float(np.ravel(run["heads"][name])[np.argmax(run["heads"]["induction"])])


def has_circuit(run: dict[str, Any]) -> bool:
    """Return whether a run's model predicts repeated tokens: its loss on repetitions is below LEARNED."""
    return run["losses"]["none"][1] < LEARNED


def circuit_size(run: dict[str, Any]) -> int:
    """Return the fewest heads, by rank, with at least FAITHFUL of the effect; 0 if no number of heads has it."""
    return int(np.argmax(np.array(run["faithfulness"]) >= FAITHFUL))


def steps_to_learn(run: dict[str, Any]) -> float:
    """Return the first measured step after which the loss on repeated tokens is below LEARNED, else the last one."""
    return float(next((step for step, value in run["curve"] if value < LEARNED), run["curve"][-1][0]))


ROWS: dict[str, tuple[Measure, int]] = {
    "loss on code": (loss(0), 3),
    "weight on the first token, %": (mean("first"), 1),
    "weight on the first token, largest of a head, %": (lambda run: 100 * float(np.max(run["outliers"]["first"])), 1),
    "weight on no token, %": (mean("nothing"), 1),
    "weight on no token, largest of a head, %": (lambda run: 100 * float(np.max(run["outliers"]["nothing"])), 1),
    "kurtosis of the stream": (lambda run: float(np.max(run["outliers"]["kurtosis"])), 1),
    "kurtosis without the first token": (lambda run: float(np.max(run["outliers"]["later_kurtosis"])), 1),
    "largest activation, first token": (lambda run: float(np.max(run["outliers"]["largest_first"])), 1),
    "largest activation, other tokens": (lambda run: float(np.max(run["outliers"]["largest_later"])), 1),
    "kurtosis of weights": (lambda run: run["weight_kurtosis"], 2),
}
CIRCUIT_ROWS: dict[str, tuple[Measure, int]] = {
    "models": (lambda run: 1, 0),
    "steps until the circuit exists": (steps_to_learn, 0),
    "loss on repeated tokens": (loss(1), 3),
    "largest induction score": (of_induction_head("induction", 1), 2),
    "largest previous-token score": (lambda run: float(np.max(run["heads"]["previous_token"])), 2),
    "heads for 90% of the effect": (circuit_size, 1),
    "before the repetition: first token, %": (of_induction_head("first_before"), 1),
    "before the repetition: no token, %": (of_induction_head("nothing_before"), 1),
    "in the repetition: first token, %": (of_induction_head("first_after"), 1),
    "in the repetition: no token, %": (of_induction_head("nothing_after"), 1),
}
CHANGED = {
    "values of the first token removed": "values of the first token removed",
    "first token hidden": "first token hidden",
    "standard softmax": "standard softmax in its place",
}


def table(runs: Runs, rows: dict[str, tuple[Measure, int]]) -> str:
    """Return a Markdown table of measures, mean ± SD of the runs of each variant; the row "models" counts them."""
    lines = []
    for title, (measure, digits) in rows.items():
        found = [[measure(run) for run in select(runs, variant=variant)] for variant in VARIANTS]
        lines.append([title, *(str(len(each)) if title == "models" else cell(each, digits) for each in found)])
    return markdown(["", *VARIANTS], lines)


def tables(runs: Runs) -> dict[str, str]:
    """Return Markdown tables of all models, of those with an induction circuit, and of losses that changes add."""
    learned = [run for run in runs if has_circuit(run)]
    added = {f"{title}, code": (loss(0, name), 3) for name, title in CHANGED.items()}
    repeated = {f"{title}, repeated": (loss(1, name), 3) for name, title in CHANGED.items()}
    return {
        "All models": table(runs, ROWS | added),
        "Models with an induction circuit": table(learned, CIRCUIT_ROWS | repeated),
    }


def plot(runs: Runs, path: Path) -> None:
    """Write an image of each head's weight on the first and on no token, the learned sinks, and faithfulness curves."""
    with drawing(path, (11, 3.6)) as figure:
        first, second, third = figure.subplots(1, 3)
        for i, variant in enumerate(VARIANTS):
            chosen, style = select(runs, variant=variant), {"color": COLOURS[i], "label": variant}
            shares = [100 * np.ravel([run["outliers"][name] for run in chosen]) for name in ("first", "nothing")]
            first.plot(*shares, "osd"[i], markersize=4, alpha=0.7, **style)
            for run in filter(has_circuit, chosen):
                third.plot(run["faithfulness"], color=COLOURS[i], marker="osd"[i], markersize=4)
        first.set(title="each head", xlabel="weight on the first token, %", ylabel="weight on no token, %")
        sinks = select(runs, variant="sink")
        b, nothing = np.ravel([run["sinks"] for run in sinks]), np.ravel([run["outliers"]["nothing"] for run in sinks])
        layers = np.ravel([np.arange(len(run["sinks"]))[:, None] + np.zeros_like(run["sinks"]) for run in sinks])
        for layer in np.unique(layers):
            chosen = layers == layer
            second.plot(b[chosen], 100 * nothing[chosen], "o", markersize=4, label=f"layer {layer:.0f}")
        second.set(title="learned sinks", xlabel="b", ylabel="weight on no token, %")
        second.legend(frameon=False, fontsize=8)
        third.axhline(1, color="#999999", linewidth=1)
        third.set(title="faithfulness of the first n heads", xlabel="n")
        figure.legend(*first.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
        for axes in (first, second, third):
            axes.grid(alpha=0.25)
