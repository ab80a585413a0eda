"""Tables in Markdown and a plot of the study of features of source code."""

from pathlib import Path
from typing import Any

from experiments.shared.figures import drawing
from experiments.shared.tables import markdown
from tricycle_lab.plot import COLOURS

KINDS = {
    "topk": "TopK",
    "jumprelu": "JumpReLU",
    "untrained": "TopK, untrained",
    "channels": "channels of the stream",
}
SCORES = ["active features", "dead features", "variance explained, %", "loss", "loss recovered, %"]


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Return Markdown tables of the autoencoders, and of the features of all rules, by title."""
    autoencoders = [
        [
            title,
            f"{scores['n_active']:.1f}",
            str(scores["n_dead"]),
            f"{100 * scores['explained']:.1f}",
            f"{scores['loss_reconstructed']:.3f}",
            f"{100 * scores['recovered']:.1f}",
        ]
        for kind, title in KINDS.items()
        if (scores := results[kind].get("scores"))
    ]
    rules = [
        [
            rule["rule"],
            f"{100 * rule['share']:.1f}",
            *(_cell(results[kind]["features"][i]) for kind in KINDS),
            " ".join(map(_context, rule["contexts"][:2])),
        ]
        for i, rule in enumerate(results["topk"]["features"])
    ]
    return {
        "Autoencoders": markdown(["", *SCORES], autoencoders),
        "Features": markdown(["rule", "tokens, %", *KINDS.values(), "strongest tokens of TopK's feature"], rules),
    }


def _cell(feature: dict[str, Any]) -> str:
    """Return precision and recall of a feature in percent, as text such as "90 / 75"."""
    return f"{100 * feature['precision']:.0f} / {100 * feature['recall']:.0f}"


def _context(context: list[str]) -> str:
    """Return (text before, token, text after) as Markdown code for a table cell: last 12 characters, marked token."""
    before, token, _ = (part.replace("\n", "⏎").replace("`", "'").replace("|", "¦") for part in context)
    return f"`{before[-12:]}»{token}«`"


def plot(results: dict[str, Any], path: Path) -> None:
    """Write an image of precision and recall of the feature of each rule, for all kinds of directions."""
    names = [feature["rule"] for feature in results["topk"]["features"]]
    with drawing(path, (9, 0.34 * len(names) + 1.2)) as figure:
        for axes, measure in zip(figure.subplots(1, 2, sharey=True), ("precision", "recall")):
            for i, (kind, title) in enumerate(KINDS.items()):
                values = [100 * feature[measure] for feature in results[kind]["features"]]
                axes.plot(values, range(len(names)), "osd^"[i], color=COLOURS[i], markersize=5, alpha=0.8, label=title)
            axes.set_yticks(range(len(names)), names)
            axes.set(title=f"{measure}, %", xlim=(-3, 103), ylim=(len(names) - 0.5, -0.5))
            axes.grid(alpha=0.25)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
