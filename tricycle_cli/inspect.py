"""Attribute a logit to the parts of a model, patch activations between two prompts, or score all attention heads.

Exactly one of --attribute, --patch and --heads selects what is computed. The strongest entries are printed; --out draws
all of them as a PNG. `tricycle inspect circuit`, `features`, `lens`, `probe` and `steer` have their own flags.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tricycle_cli.flags import parse
from tricycle_cli.inspect_flags import InspectFlags
from tricycle_lab.attribution import attribute_logit
from tricycle_lab.head_scores import score_heads
from tricycle_lab.look.inspectable import InspectableStack
from tricycle_lab.patching import KINDS, Prompts, estimate_patches, patch_activations
from tricycle_lab.path_patching import patch_paths
from tricycle_lab.plot import plot_grids


@dataclass(frozen=True, kw_only=True)
class Arguments(InspectFlags):
    """The flags of `tricycle inspect`."""

    attribute: str | None = None
    """direct logit attribution after this prompt: what the embedding, each head and each MLP add to the logit of the
    answer, or to the difference of two answers"""
    patch: tuple[str, str] | None = None
    """activation patching between a clean and a corrupted prompt of equally many tokens: the effect of each clean
    activation in the corrupted run, 0 for no effect and 1 for the logit difference of the clean prompt"""
    by_position: bool = False
    """with --patch: patch each head at each position, too"""
    paths: bool = False
    """with --patch: path patching, the effect of each head on the logits, or on --receiver, without other heads"""
    receiver: tuple[int, int] | None = None
    """with --paths: the layer and the head that the paths lead to, in place of the logits"""
    heads: bool = False
    """scores of all heads on repeated random tokens: induction, previous token, duplicate token"""
    answers: tuple[str, ...] = ()
    """the answers, of one token each, usually with a space in front: one or two with --attribute, two with --patch"""
    estimate: bool = False
    """with --patch: estimate all effects by gradients (attribution patching), which takes three passes"""
    batch_size: int = 64
    """patched runs in a forward pass"""
    top: int = 10
    """the number of entries of each table"""


TASKS = {
    "circuit": "tricycle_cli.circuit",
    "features": "tricycle_cli.features",
    "lens": "tricycle_cli.lens",
    "probe": "tricycle_cli.probe",
    "steer": "tricycle_cli.steer",
}  # modules with flags of their own, by the first word
TITLES = {
    "stream": "residual stream after each layer",
    "attention": "attention layers",
    "mlp": "MLPs",
    "heads": "heads",
    "heads_by_position": "heads by position",
}


class Table(NamedTuple):
    """Values of layers, or of their heads, and of heads or positions (columns), with a text for each column."""

    title: str
    values: np.ndarray  # (layers, columns) or (layers, heads, columns)
    columns: Sequence[str]
    column_name: str = "head"


def main(args: Sequence[str] | None = None) -> None:
    """Run `tricycle inspect`: print the strongest entries of each table, and draw all of them if --out is given."""
    words = sys.argv[1:] if args is None else args
    if words and words[0] in TASKS:
        importlib.import_module(TASKS[words[0]]).main(words[1:])
        return
    arguments = parse(Arguments, args=words, description=__doc__ or "")
    _check(arguments)
    _, inspectable = arguments.load()
    if arguments.heads:
        tables = _score_tables(inspectable)
    elif arguments.patch is not None:
        tables = _patch_tables(inspectable, arguments, *arguments.patch)
    else:
        tables = _attribution_tables(inspectable, arguments)
    for table in tables:
        _print_strongest(table, arguments.top)
    if arguments.out is not None:
        labels = {table.title: table.columns for table in tables}
        plot_grids({table.title: table.values for table in tables}, arguments.out, labels, inspectable.title)
        print(arguments.out)


def _check(arguments: Arguments) -> None:
    """Raise a ValueError for flags that do not fit together."""
    given = [arguments.attribute is not None, arguments.patch is not None, arguments.heads]
    if sum(given) != 1:
        raise ValueError(f"expected one of --attribute, --patch and --heads, got {sum(given) or 'none'}")
    allowed = (1, 2) if given[0] else (2,) if given[1] else (0,)
    if len(arguments.answers) not in allowed:
        expected = " or ".join(map(str, allowed))
        raise ValueError(f"--answers: expected {expected} answers with these flags, got {len(arguments.answers)}")
    modes = {name: getattr(arguments, name) for name in ("estimate", "by_position", "paths")}
    chosen = [f"--{name.replace('_', '-')}" for name, value in modes.items() if value]
    if chosen and arguments.patch is None:
        raise ValueError(f"expected {chosen[0]} with --patch only")
    if len(chosen) > 1:
        raise ValueError(f"expected one of --estimate, --by-position and --paths, got {' and '.join(chosen)}")
    if arguments.receiver is not None and not arguments.paths:
        raise ValueError("expected --receiver with --paths only")
    if arguments.top < 1:
        raise ValueError(f"--top: expected a number above 0, got {arguments.top}")


# -------------------------------------------------------------------- what is computed
def _attribution_tables(inspectable: InspectableStack, arguments: Arguments) -> list[Table]:
    """Print the logit and the contributions outside of layers; return those of heads, and of MLPs and biases."""
    ids = inspectable.encode_input(arguments.attribute or "")
    result = attribute_logit(inspectable.model, ids, *(inspectable.encode_answer(x) for x in arguments.answers))
    name = "logit" if len(arguments.answers) == 1 else "logit difference"
    print(f"{name} {result.logit:.4f}, the sum of all parts {result.total:.4f}")
    print(f"embedding {result.embedding:.4f}, biases of the last norm and the head {result.bias:.4f}")
    others = np.stack([result.mlps, result.attention_biases], axis=1)
    return [
        Table("heads", result.heads, _head_texts(result.heads)),
        Table("MLPs and attention biases", others, ["MLP", "attention bias"], "part"),
    ]


def _patch_tables(inspectable: InspectableStack, arguments: Arguments, clean: str, corrupted: str) -> list[Table]:
    """Return the effects of patching the residual stream and the heads, exact or estimated."""
    first, second = (inspectable.encode_answer(answer) for answer in arguments.answers)
    ids = inspectable.encode_input(clean)
    prompts = Prompts(ids, inspectable.encode_input(corrupted), (first, second))
    if arguments.paths:
        values = patch_paths(inspectable.model, prompts, arguments.receiver, batch_size=arguments.batch_size)
        return [Table(f"direct paths from heads to {arguments.receiver or 'the logits'}", values, _head_texts(values))]
    if arguments.estimate:
        effects = estimate_patches(inspectable.model, prompts)
    else:
        kinds = [kind for kind in KINDS if kind != "heads_by_position" or arguments.by_position]
        effects = {kind: patch_activations(inspectable.model, prompts, kind, arguments.batch_size) for kind in kinds}
    tokens = [inspectable.token_text(token) for token in ids]
    return [
        Table(TITLES[kind], values, *((_head_texts(values),) if kind == "heads" else (tokens, "position")))
        for kind, values in effects.items()
    ]


def _score_tables(inspectable: InspectableStack) -> list[Table]:
    """Return the scores of all heads."""
    scores = score_heads(inspectable.model, start=inspectable.start_token)
    return [Table(name.replace("_", " "), values, _head_texts(values)) for name, values in scores._asdict().items()]


def _head_texts(values: np.ndarray) -> list[str]:
    """Return the indices of the columns of values (L, H) as texts."""
    return [str(head) for head in range(values.shape[1])]


def _print_strongest(table: Table, n: int) -> None:
    """Print the n entries of a table with the largest absolute values."""
    n_layers, *sizes = table.values.shape
    print(f"\n{table.title} ({n_layers} layers x {' x '.join(map(str, sizes))})")
    print(f"    value  layer  {'head  ' * (len(sizes) - 1)}{table.column_name}")
    for index in np.argsort(-np.abs(table.values), axis=None, kind="stable")[:n]:
        layer, *heads, column = map(int, np.unravel_index(int(index), table.values.shape))
        text = table.columns[column]
        label = text if text == str(column) else f"{column} {text!r}"
        head = "".join(f"{head:4}  " for head in heads)
        print(f"{table.values.flat[index]:9.4f}  {layer:5}  {head}{label}")
