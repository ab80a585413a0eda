"""Tables, a plot and a page of the study of a pretrained model."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.quiet_attention.int8_simulation import MORE_WAYS, WAYS
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
    """Write all tables, plots and pages, and print the tables."""
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
    """Return all tables by title."""
    before = results["before"]
    untaught = {title: some for title, some in groups.items() if not some[0]["variant"]["method"]}
    return {
        "Where attention goes, as it is": sink_table(before),
        "What begins a text": beginning_table(before),
        "Outliers of the weights": weight_table(before),
        "Perplexity a token": perplexity_table(groups),
        "Inside": inside_table(groups),
        "8 bits: perplexity is multiplied by": eight_bits_table(groups, list(WAYS)),
        "8 bits, models as they are": eight_bits_table(untaught, [*MORE_WAYS]),
        "8 bits, one kind of input alone, a scale a tensor": place_table(results["places"]),
        "Nats a token that softmax1 adds, untrained": position_table(results["positions"]),
        "8 bits: perplexity itself, weights and activations, a scale a tensor": rounded_perplexities(groups),
        "What the sinks learned": learned_sinks(groups),
        "Seconds": time_table(groups),
    }


def grouped(variants: Mapping[str, Result]) -> Groups:
    """Return the variants grouped by title, in order."""
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
    """Return the table of attention sinks."""
    rows = []
    for name, found in before["texts"].items():
        share = np.array(found["first_share"])
        massive = np.array(found["massive_share"])
        i, h = np.unravel_index(share.argmax(), share.shape)
        others = sorted({repr(token) for _, token in found["others"]})
        row = [
            name,
            f"{100 * share.mean():.0f}",
            f"{100 * massive.mean():.0f}",
            f"{100 * share.mean(axis=1).max():.0f}",
        ]
        row += [f"{100 * share.max():.0f} (layer {i}, head {h})", f"{(share > 0.5).sum()} of {share.size}"]
        row += [f"{100 * found['first_is_massive']:.0f}", " ".join(others) or "none"]
        rows.append(row)
    titles = [
        "% of weight",
        "to the first token",
        "to massive tokens",
        "highest layer",
        "highest head",
        "heads above 50%",
    ]
    return markdown([*titles, "first token is massive, % of texts", "others that are"], rows)


def beginning_table(before: Result) -> str:
    """Return the table of first tokens."""
    rows = [
        [f"`{token!r}`", f"{size:,.0f}", f"{100 * share:.0f}"] for token, (size, share) in before["beginnings"].items()
    ]
    return markdown(["first token", "largest value of the stream there", "% of weight that it gets"], rows)


def weight_table(before: Result) -> str:
    """Return the table of weight outliers."""
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
    return [f"{np.median(values):.2f}", f"{values.max():.1f}"]


def perplexity_table(groups: Groups) -> str:
    """Return the table of perplexities."""
    rows = []
    for title, some in groups.items():
        cells = [cell(of(some, "texts", name, "all", 0)) for name in TEXTS]
        bits = np.mean([of(some, "texts", name, "all", 1) for name in TEXTS], axis=0)
        rows.append([title, *cells, cell(bits, 4)])
    return markdown(["", *TEXTS, "bits a byte, mean of texts"], rows)


INSIDE: dict[str, tuple[Callable[[Result], float], int]] = {
    "% to the first token": (lambda inside: 100 * float(np.mean(inside["first"])), 1),
    "% to nothing": (lambda inside: 100 * float(np.mean(inside["nothing"])), 1),
    "largest value, first token": (lambda inside: max(inside["largest_first"]), 0),
    "largest value, other tokens": (lambda inside: max(inside["largest_later"]), 0),
    "kurtosis of the stream": (lambda inside: float(np.median(inside["kurtosis"])), 0),
    "the same without massive tokens": (lambda inside: float(np.median(inside["later_kurtosis"])), 0),
}


def inside_table(groups: Groups) -> str:
    """Return the table of sinks and outliers: fractions are means of heads, values the largest of layers."""
    rows = []
    for title, some in groups.items():
        cells = [cell([figure(one["inside"]) for one in some], digits) for figure, digits in INSIDE.values()]
        rows.append([title, *cells])
    return markdown(["", *INSIDE], rows)


def perplexity_ratio(result: Result, way: str) -> float:
    """Return the ratio of perplexities with and without rounding, the geometric mean of the texts."""
    logs = [math.log(found[way][0] / found["same pieces"][0]) for found in result["texts"].values()]
    return math.exp(float(np.mean(logs)))


def eight_bits_table(groups: Groups, ways: Sequence[str]) -> str:
    """Return the table of the 8-bit perplexity ratios."""
    return grid(groups, ways, lambda some, way: [perplexity_ratio(one, way) for one in some], 3)


def rounded_perplexities(groups: Groups) -> str:
    """Return the table of 8-bit perplexities by text."""
    way = list(WAYS)[1]
    return grid(groups, TEXTS, lambda some, name: of(some, "texts", name, way, 0))


def place_table(places: Result) -> str:
    """Return the table of the most sensitive matrix inputs."""
    titles = ["input of", "perplexity times", "largest", "times the median token's", "in layer"]
    rows = [
        [name, f"{ratio:.3f}", f"{largest:,.0f}", f"{token_ratio:,.0f}", str(layer)]
        for name, (ratio, largest, token_ratio, layer) in places.items()
    ]
    return markdown(titles, rows)


def position_table(positions: list[list[float]]) -> str:
    """Return the table of losses by position."""
    titles = [f"{first:.0f} to {last:.0f}" if last > first else f"{first:.0f}" for first, last, _ in positions]
    return markdown(["tokens", *titles], [["nats", *(f"{nats:.3f}" for *_, nats in positions)]])


def learned_sinks(groups: Groups) -> str:
    """Return the table of learned sink logits."""
    rows = []
    for title, some in groups.items():
        if "sinks" in some[0] and some[0]["variant"]["method"]:
            sinks = np.array([one["sinks"] for one in some])
            figures = (sinks.min(axis=(1, 2)), np.median(sinks, axis=(1, 2)), sinks.max(axis=(1, 2)))
            rows.append([title, *(cell(figure) for figure in figures), cell((sinks > 0).mean(axis=(1, 2)), 0, 100)])
    return markdown(["b of all heads", "lowest", "median", "highest", "% above 0"], rows)


def time_table(groups: Groups) -> str:
    """Return the table of durations."""
    rows = []
    for title, some in groups.items():
        times = [[one["seconds"][what] for one in some] for what in ("teaching", "looking")]
        rows.append([title, *(cell(values, 0) for values in times)])
    total = sum(sum(one["seconds"].values()) for some in groups.values() for one in some)
    return markdown(["", "teaching", "looking"], [*rows, ["all together", f"{total:,.0f}", ""]])


# -------------------------------------------------------------------- the picture
STYLES = {"": ":", "sinks": "-.", "lora": "--", "all": "-"}
SOFTMAX_COLOURS = dict(zip(("softmax", "softmax1", "sink"), COLOURS))


def draw(path: Path, groups: Groups, before: Result) -> None:
    """Plot the attention sinks and the outliers."""
    with drawing(path, (13, 9.5), dpi=90) as figure:
        (heads, stream), (share, bars) = figure.subplots(2, 2)
        _draw_heads(figure, heads, before)
        for title, some in groups.items():
            variant = some[0]["variant"]
            style = {"color": SOFTMAX_COLOURS[variant["softmax"]], "linestyle": STYLES[variant["method"]]}
            largest = np.mean(
                [np.maximum(one["inside"]["largest_first"], one["inside"]["largest_later"]) for one in some], 0
            )
            stream.plot(largest, label=title, **style)
            share.plot(100 * np.mean([np.mean(one["inside"]["first"], axis=1) for one in some], axis=0), **style)
        stream.set(yscale="log", xlabel="layer", title="Largest value of the residual stream behind each block")
        stream.yaxis.set_major_formatter("{x:,.0f}")
        stream.legend(frameon=False, fontsize=8)
        share.set(xlabel="layer", ylim=(0, None), title="Weight that goes to the first token, %, mean of heads")
        _draw_bars(bars, groups)
        for axes in (stream, share):
            axes.grid(alpha=0.25)


def _draw_heads(figure: Any, axes: Any, before: Result) -> None:
    shares = np.mean([found["first_share"] for found in before["texts"].values()], axis=0)
    image = axes.imshow(100 * shares.T, aspect="auto", cmap="viridis", vmin=0)
    axes.set(xlabel="layer", ylabel="head", title="Weight that goes to the first token, %, model as it is")
    figure.colorbar(image, ax=axes)


def _draw_bars(axes: Any, groups: Groups) -> None:
    ways = list(WAYS)[:3]
    height = 0.8 / len(ways)
    for i, way in enumerate(ways):
        values = [[perplexity_ratio(one, way) for one in some] for some in groups.values()]
        places = np.arange(len(groups)) + i * height
        axes.barh(places, [np.mean(value) - 1 for value in values], height, left=1, color=COLOURS[3 + i], label=way)
        for place, value in zip(places, values):
            axes.plot(value, [place] * len(value), ".", color="black", markersize=4)
    axes.set_yticks(np.arange(len(groups)) + height, list(groups))
    axes.invert_yaxis()
    axes.set(xlabel="times", title="8 bits: what perplexity is multiplied by")
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    axes.grid(alpha=0.25, axis="x")
