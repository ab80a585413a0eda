"""Tables, a plot and a page of the study of a pretrained model."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.quiet_attention.int8_simulation import MORE_ROUNDINGS, ROUNDINGS
from experiments.quiet_attention.pretrained import Settings, maps
from experiments.shared.figures import drawing
from experiments.shared.language_models import TEXTS
from experiments.shared.program import print_tables
from experiments.shared.results import of
from experiments.shared.tables import cell, grid, markdown
from tricycle_lab.plot import COLOURS, write_attention_page

Result = dict[str, Any]
Groups = dict[str, list[Result]]  # by title: the result of each seed
SHOWN_LAYERS = 6


def report(settings: Settings, results: dict[str, Any]) -> None:
    """Write model.png and model.html into `settings.output`, and print all tables; loads the model again."""
    groups = grouped(results["variants"])
    before = results["before"]
    n_tokens = settings.steps * settings.rows * settings.tokens
    print(f"\nTraining reads {n_tokens:,} tokens in {settings.steps} updates.")
    print_tables(tables(results, groups))
    draw(settings.output / "model.png", groups, before)
    n_layers = len(before["weights"]["heads"]["queries"])
    layers = np.unique(np.linspace(0, n_layers - 1, min(SHOWN_LAYERS, n_layers)).astype(int)).tolist()  # evenly spread
    tokens, found = maps(settings, layers)
    write_attention_page(
        settings.output / "model.html", found, tokens, f"Attention of {settings.model}, untrained here"
    )
    print(f"\nresults.json, model.png, model.html are in {settings.output}")


def tables(results: dict[str, Any], groups: Groups) -> dict[str, str]:
    """Return all Markdown tables by title."""
    before = results["before"]
    untrained = {title: some for title, some in groups.items() if not some[0]["variant"]["method"]}
    return {
        "Attention sinks of the original model": sink_table(before),
        "First tokens": first_token_table(before),
        "Outliers of the weights": weight_table(before),
        "Perplexity per token": perplexity_table(groups),
        "Inside": outlier_table(groups),
        "8 bits: perplexity is multiplied by": eight_bits_table(groups, list(ROUNDINGS)),
        "8 bits, models without training": eight_bits_table(untrained, [*MORE_ROUNDINGS]),
        "8 bits, one kind of input only, per-tensor scale": input_table(results["places"]),
        "Added loss of softmax1 without training, nats per token": position_table(results["positions"]),
        "8 bits: perplexity, weights and activations, per-tensor scale": (
            grid(groups, TEXTS, lambda some, name: of(some, "texts", name, list(ROUNDINGS)[1], 0))
        ),
        "What the sinks learned": learned_sinks(groups),
        "Seconds": time_table(groups),
    }


def grouped(variants: Mapping[str, Result]) -> Groups:
    """Return {title: results of its seeds}, sorted by training method, then by softmax."""
    groups: Groups = {}
    for result in variants.values():
        groups.setdefault(result["title"], []).append(result)
    order = {"softmax": 0, "softmax1": 1, "sink": 2}
    methods = ["", "sinks", "lora", "all"]

    def place(title: str) -> tuple[int, int]:
        variant = groups[title][0]["variant"]
        return methods.index(variant["method"]), order[variant["softmax"]]

    return {title: groups[title] for title in sorted(groups, key=place)}


# -------------------------------------------------------------------- tables
def sink_table(before: Result) -> str:
    """Return a Markdown table by text: % of weight on first and massive tokens, and which are massive."""
    rows = []
    for name, found in before["texts"].items():
        share = np.array(found["first_share"])
        massive = np.array(found["massive_share"])
        i, h = np.unravel_index(share.argmax(), share.shape)
        others = sorted({repr(token) for _, token in found["others"]})
        row = [name, *(f"{100 * x:.0f}" for x in (share.mean(), massive.mean(), share.mean(axis=1).max()))]
        row += [f"{100 * share.max():.0f} (layer {i}, head {h})", f"{(share > 0.5).sum()} of {share.size}"]
        row += [f"{100 * found['first_is_massive']:.0f}", " ".join(others) or "none"]
        rows.append(row)
    titles = "% of weight;to the first token;to massive tokens;highest layer;highest head;heads above 50%".split(";")
    return markdown([*titles, "first token is massive, % of texts", "other tokens that are massive, %"], rows)


def first_token_table(before: Result) -> str:
    """Return a Markdown table by first token: largest stream value there, and attention weight in %."""
    rows = [
        [f"`{token!r}`", f"{size:,.0f}", f"{100 * share:.0f}"] for token, (size, share) in before["beginnings"].items()
    ]
    return markdown(["first token", "largest residual-stream value there", "attention weight, %"], rows)


def weight_table(before: Result) -> str:
    """Return a Markdown table by matrix and head kind: kurtosis, and largest value in standard deviations."""
    rows = []
    for name, pairs in before["weights"]["matrices"].items():
        kurtosis, largest = np.array(pairs).T
        rows.append([name, *_spread(kurtosis), f"{int(kurtosis.argmax())}", *_spread(largest)[1:]])
    for name, layers in before["weights"]["heads"].items():
        kurtosis = np.array(layers)
        layer, head = np.unravel_index(kurtosis.argmax(), kurtosis.shape)
        rows.append([f"{name} of a head", *_spread(kurtosis), f"{layer}, head {head}", ""])
    return markdown(["", "kurtosis, median", "highest", "in layer", "largest value, standard deviations"], rows)


def _spread(values: np.ndarray) -> list[str]:
    """Return [median, maximum] as text."""
    return [f"{np.median(values):.2f}", f"{values.max():.1f}"]


def perplexity_table(groups: Groups) -> str:
    """Return a Markdown table by variant: perplexity per token of each text, and mean bits per byte."""
    rows = []
    for title, some in groups.items():
        cells = [cell(of(some, "texts", name, "all", 0)) for name in TEXTS]
        bits = np.mean([of(some, "texts", name, "all", 1) for name in TEXTS], axis=0)
        rows.append([title, *cells, cell(bits, 4)])
    return markdown(["", *TEXTS, "bits per byte, mean of texts"], rows)


INSIDE: dict[str, tuple[Callable[[Result], float], int]] = {
    "% to the first token": (lambda inside: 100 * float(np.mean(inside["first"])), 1),
    "unassigned weight, %": (lambda inside: 100 * float(np.mean(inside["nothing"])), 1),
    "largest value, first token": (lambda inside: max(inside["largest_first"]), 0),
    "largest value, other tokens": (lambda inside: max(inside["largest_later"]), 0),
    "kurtosis of the stream": (lambda inside: float(np.median(inside["kurtosis"])), 0),
    "kurtosis without massive tokens": (lambda inside: float(np.median(inside["later_kurtosis"])), 0),
}


def outlier_table(groups: Groups) -> str:
    """Return a Markdown table by variant: weight fractions (means of heads) and largest values of all layers."""
    rows = []
    for title, some in groups.items():
        cells = [cell([figure(one["inside"]) for one in some], digits) for figure, digits in INSIDE.values()]
        rows.append([title, *cells])
    return markdown(["", *INSIDE], rows)


def perplexity_ratio(result: Result, rounding: str) -> float:
    """Return the ratio of perplexities with and without rounding, the geometric mean of the texts."""
    logs = [math.log(found[rounding][0] / found["same pieces"][0]) for found in result["texts"].values()]
    return math.exp(float(np.mean(logs)))


def eight_bits_table(groups: Groups, roundings: Sequence[str]) -> str:
    """Return a Markdown table of `perplexity_ratio`: a row per variant, a column per rounding key."""
    columns = {rounding_label(rounding): rounding for rounding in roundings}
    return grid(groups, columns, lambda some, rounding: [perplexity_ratio(one, rounding) for one in some], 3)


def rounding_label(rounding: str) -> str:
    """Return the column label of a key of ROUNDINGS or MORE_ROUNDINGS."""
    return rounding.replace("a scale a tensor", "per-tensor scale").replace("a scale a row", "per-row scale")


def input_table(places: Result) -> str:
    """Return a Markdown table of the values of `input_effects`, a row for each kind of matrix."""
    titles = ["input of", "perplexity ratio", "largest", "ratio to the median token's", "in layer"]
    rows = [
        [name, f"{ratio:.3f}", f"{largest:,.0f}", f"{token_ratio:,.0f}", str(layer)]
        for name, (ratio, largest, token_ratio, layer) in places.items()
    ]
    return markdown(titles, rows)


def position_table(positions: list[list[float]]) -> str:
    """Return a Markdown table of one row: the nats of `cost_by_position`, a column for each token range."""
    titles = [f"{first:.0f} to {last:.0f}" if last > first else f"{first:.0f}" for first, last, _ in positions]
    return markdown(["tokens", *titles], [["nats", *(f"{nats:.3f}" for *_, nats in positions)]])


def learned_sinks(groups: Groups) -> str:
    """Return a Markdown table by variant with sinks: lowest, median and highest logit, and % above 0."""
    rows = []
    for title, some in groups.items():
        if "sinks" in some[0] and some[0]["variant"]["method"]:
            sinks = np.array([one["sinks"] for one in some])
            figures = (sinks.min(axis=(1, 2)), np.median(sinks, axis=(1, 2)), sinks.max(axis=(1, 2)))
            rows.append([title, *(cell(figure) for figure in figures), cell((sinks > 0).mean(axis=(1, 2)), 0, 100)])
    return markdown(["sink logit b of all heads", "lowest", "median", "highest", "% above 0"], rows)


def time_table(groups: Groups) -> str:
    """Return a Markdown table of the seconds of training and measurement by variant, and their total."""
    rows = []
    for title, some in groups.items():
        times = [[one["seconds"][stage] for one in some] for stage in ("teaching", "looking")]
        rows.append([title, *(cell(values, 0) for values in times)])
    total = sum(sum(one["seconds"].values()) for some in groups.values() for one in some)
    return markdown(["", "training", "measurement"], [*rows, ["total", f"{total:,.0f}", ""]])


# -------------------------------------------------------------------- the picture
STYLES = {"": ":", "sinks": "-.", "lora": "--", "all": "-"}
SOFTMAX_COLORS = dict(zip(("softmax", "softmax1", "sink"), COLOURS))


def draw(path: Path, groups: Groups, before: Result) -> None:
    """Write a PNG of four panels: weight on first tokens by head, stream values, sinks by layer, 8-bit ratios."""
    with drawing(path, (13, 9.5), dpi=90) as figure:
        (heads, stream), (share, bars) = figure.subplots(2, 2)
        _draw_heads(figure, heads, before)
        for title, some in groups.items():
            variant = some[0]["variant"]
            style = {"color": SOFTMAX_COLORS[variant["softmax"]], "linestyle": STYLES[variant["method"]]}
            largest = np.mean(
                [np.maximum(one["inside"]["largest_first"], one["inside"]["largest_later"]) for one in some], 0
            )
            stream.plot(largest, label=title, **style)
            share.plot(100 * np.mean([np.mean(one["inside"]["first"], axis=1) for one in some], axis=0), **style)
        stream.set(yscale="log", xlabel="layer", title="Largest value of the residual stream after each block")
        stream.yaxis.set_major_formatter("{x:,.0f}")
        stream.legend(frameon=False, fontsize=8)
        share.set(xlabel="layer", ylim=(0, None), title="Attention weight on the first token, %, mean of heads")
        _draw_bars(bars, groups)
        for axes in (stream, share):
            axes.grid(alpha=0.25)


def _draw_heads(figure: Any, axes: Any, before: Result) -> None:
    """Draw a heat map, layers by heads, of the untrained model's weight in % on the first token, with a color bar."""
    shares = np.mean([found["first_share"] for found in before["texts"].values()], axis=0)
    image = axes.imshow(100 * shares.T, aspect="auto", cmap="viridis", vmin=0)
    axes.set(xlabel="layer", ylabel="head", title="Attention weight on the first token, %, before training")
    figure.colorbar(image, ax=axes)


def _draw_bars(axes: Any, groups: Groups) -> None:
    """Draw bars of perplexity with 8-bit rounding over that without, by variant and rounding, a point per seed."""
    roundings = list(ROUNDINGS)[:3]
    height = 0.8 / len(roundings)
    for i, rounding in enumerate(roundings):
        values = [[perplexity_ratio(one, rounding) for one in some] for some in groups.values()]
        places = np.arange(len(groups)) + i * height
        axes.barh(
            places,
            [np.mean(value) - 1 for value in values],
            height,
            left=1,
            color=COLOURS[3 + i],
            label=rounding_label(rounding),
        )
        for place, value in zip(places, values):
            axes.plot(value, [place] * len(value), ".", color="black", markersize=4)
    axes.set_yticks(np.arange(len(groups)) + height, list(groups))
    axes.invert_yaxis()
    axes.set(xlabel="ratio", title="Ratio of perplexities with and without 8-bit rounding")
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    axes.grid(alpha=0.25, axis="x")
