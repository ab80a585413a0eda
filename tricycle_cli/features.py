"""Train a sparse autoencoder on a model's residual stream, score it on the last fifth of a text, list features."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro

from tricycle.system.files import atomic_write
from tricycle_cli.flags import check_conditions, parse
from tricycle_cli.inspect_flags import InspectFlags
from tricycle_cli.lens import split_passages
from tricycle_lab.look.inspectable import InspectableStack
from tricycle_lab.plot import plot_distributions
from tricycle_lab.sparse_autoencoder import (
    Occurrence,
    TrainingOptions,
    collect_stream,
    score_autoencoder,
    strongest_occurrences,
    train_autoencoder,
)

CONTEXT = 12  # tokens before the strongest one, and a third as many after it
STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}mark{background:#fd8}p{margin:.3em 0}"
)


@dataclass(frozen=True, kw_only=True)
class Arguments(InspectFlags):
    """The flags of `tricycle inspect features`."""

    text: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TEXT")]
    """a text file to train and to score the autoencoder on"""
    layer: int | None = None
    """the layer after which the residual stream is described, by default the one in the middle"""
    n_features: int = 2048
    """the number of features"""
    active: int = 16
    """with --kind topk: the number of active features of a token"""
    kind: Literal["topk", "jumprelu"] = "topk"
    """the activation function: the largest values, or values above learned thresholds"""
    sparsity: float = 0.05
    """with --kind jumprelu: the factor of the number of active features in the loss"""
    steps: int = 1000
    """training steps of 256 tokens"""
    tokens: int = 16384
    """the number of tokens of the text to use"""
    length: int = 128
    """the number of tokens of a passage, in which the model reads the text"""
    top: int = 10
    """the number of features of the table; the page has all that are active"""
    page: Path | None = None
    """an HTML file of the features with their strongest texts"""
    save: Path | None = None
    """the safetensors file to write the autoencoder to, for `tricycle look --autoencoder`"""


def main(args: Sequence[str] | None = None) -> None:
    """Run `tricycle inspect features`: print scores and features, and write the files."""
    arguments = parse(Arguments, args=args, description=__doc__ or "")
    is_topk = arguments.kind == "topk"
    check_conditions(arguments, {"--kind topk": (is_topk, "active"), "--kind jumprelu": (not is_topk, "sparsity")})
    if arguments.top < 1:
        raise ValueError(f"--top: expected a number above 0, got {arguments.top}")
    if not 0 <= arguments.sparsity < math.inf:
        raise ValueError(f"--sparsity: expected a number of 0 or more, got {arguments.sparsity}")
    loaded, inspectable = arguments.load()
    passages = split_passages(inspectable, arguments.text, arguments.tokens, arguments.length)
    n_trained = len(passages) * 4 // 5
    layer = len(loaded.model.blocks) // 2 if arguments.layer is None else arguments.layer
    rows = collect_stream(loaded.model, passages[:n_trained], layer)
    options = TrainingOptions(n_steps=arguments.steps, sparsity=arguments.sparsity)
    autoencoder = train_autoencoder(rows, arguments.n_features, arguments.active, arguments.kind, options)
    scores = score_autoencoder(loaded.model, autoencoder, passages[n_trained:], layer)
    print(f"layer {layer}, {arguments.n_features} features, {scores.n_dead} of them inactive on held-out tokens")
    print(f"{scores.n_active:.1f} active features of a token explain {scores.explained:.1%} of the variance")
    losses = f"{scores.loss:.4f}, with reconstructions {scores.loss_reconstructed:.4f}"
    print(f"loss {losses}, with the mean {scores.loss_ablated:.4f}: {scores.recovered:.1%} recovered")
    frequencies, found = strongest_occurrences(loaded.model, autoencoder, passages, layer)
    order = np.argsort([-occurrences[0].value if occurrences else 0 for occurrences in found], kind="stable")
    print("\nfeature  tokens  largest  strongest text")
    for feature in order[: arguments.top]:
        for occurrence in found[feature][:1]:
            text = "".join(_context(inspectable, passages, occurrence))
            print(f"{feature:7}  {frequencies[feature]:6.2%}  {occurrence.value:7.3f}  {text!r}")
    if arguments.save is not None:
        autoencoder.save(arguments.save, layer)
        print(arguments.save)
    if arguments.page is not None:
        _write_page(arguments.page, inspectable, passages, [(i, frequencies[i], found[i]) for i in order if found[i]])
        print(arguments.page)
    if arguments.out is not None:
        active = [i for i in order if found[i]]
        values = {
            "log10 of the fraction of tokens": np.log10(frequencies[active]),
            "largest activation": np.array([found[i][0].value for i in active]),
        }
        plot_distributions(values, arguments.out, f"{len(active)} features of {inspectable.title}")
        print(arguments.out)


def _context(
    inspectable: InspectableStack, passages: Sequence[Sequence[int]], occurrence: Occurrence
) -> tuple[str, str, str]:
    """Return the text before the token of an occurrence, that of the token, and the text after it."""
    tokens, position = passages[occurrence.text], occurrence.position
    parts = tokens[max(0, position - CONTEXT) : position], tokens[position:][:1], tokens[position + 1 :][: CONTEXT // 3]
    before, token, after = ("".join(map(inspectable.token_text, part)) for part in parts)
    return before, token, after


def _write_page(
    path: Path,
    inspectable: InspectableStack,
    passages: Sequence[Sequence[int]],
    features: Sequence[tuple[int, float, Sequence[Occurrence]]],
) -> None:
    """Write an HTML page with the strongest texts of each feature atomically, without scripts."""
    title = html.escape(f"Features of {inspectable.title}")
    with atomic_write(path, text=True) as file:
        file.write(f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>')
        file.write(f"<h1>{title}</h1>")
        for feature, frequency, occurrences in features:
            file.write(f"\n<h2>{feature}</h2><p>active at {frequency:.2%} of the tokens</p>")
            for occurrence in occurrences:
                before, token, after = map(html.escape, _context(inspectable, passages, occurrence))
                file.write(f"<p>{occurrence.value:.3f} … {before}<mark>{token}</mark>{after}</p>")
        file.write("</html>\n")
