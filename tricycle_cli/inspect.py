"""Attribute a logit to the parts of a model, patch activations between two prompts, or score all attention heads.

Exactly one of --attribute, --patch and --heads selects what is computed. The strongest entries are printed; --out draws
all of them as a PNG. `tricycle inspect circuit`, `features`, `lens`, `probe`, `scores` and `steer` have
their own flags.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tricycle_cli.flags import check_conditions, parse
from tricycle_cli.inspect_flags import InspectFlags
from tricycle_lab.attribution import attribute_logit
from tricycle_lab.look.inspectable import InspectableStack
from tricycle_lab.measures import (
    Table,
    attribution_tables,
    estimate_tables,
    patch_tables,
    path_tables,
    score_tables,
)
from tricycle_lab.patching import KINDS, Prompts
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


TASKS = ("circuit", "features", "lens", "probe", "scores", "steer")  # subcommands with other flags, by their modules


def main(args: Sequence[str] | None = None) -> None:
    """Run `tricycle inspect`: print the strongest entries of each table, and draw all of them if --out is given."""
    words = sys.argv[1:] if args is None else args
    if words and words[0] in TASKS:
        if args is None:
            sys.argv[0] += f" {words[0]}"  # the program's name in the help and in errors
        importlib.import_module(f"tricycle_cli.{words[0]}").main(words[1:])
        return
    arguments = parse(Arguments, args=words, description=__doc__ or "")
    _check(arguments)
    _, inspectable = arguments.load()
    if arguments.heads:
        computed = score_tables(inspectable)
    elif arguments.patch is not None:
        computed = _patch(inspectable, arguments, *arguments.patch)
    else:
        computed = _attribute(inspectable, arguments)
    tables = list({table.title: table for table in computed}.values())  # without those of incomplete rows
    for table in tables:
        _print_strongest(table, arguments.top)
    if arguments.out is not None:
        labels = {table.title: table.columns for table in tables}
        plot_grids({table.title: table.values for table in tables}, arguments.out, labels, inspectable.title)
        print(arguments.out)


def _check(arguments: Arguments) -> None:
    """Raise ValueError unless one of --attribute, --patch and --heads is given, with --answers and flags that fit."""
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
    is_exact = arguments.patch is not None and not arguments.estimate
    conditions = {"--paths": (arguments.paths, "receiver"), "exact --patch": (is_exact, "batch_size")}
    check_conditions(arguments, conditions)
    if arguments.top < 1:
        raise ValueError(f"--top: expected a number above 0, got {arguments.top}")


# -------------------------------------------------------------------- what is computed
def _attribute(inspectable: InspectableStack, arguments: Arguments) -> Iterator[Table]:
    """Print the logit and the contributions outside of layers; yield those of heads, and of MLPs and biases."""
    ids = inspectable.encode_input(arguments.attribute or "")
    result = attribute_logit(inspectable.model, ids, *(inspectable.encode_answer(x) for x in arguments.answers))
    name = "logit" if len(arguments.answers) == 1 else "logit difference"
    print(f"{name} {result.logit:.4f}, the sum of all parts {result.total:.4f}")
    print(f"embedding {result.embedding:.4f}, biases of the last norm and the head {result.bias:.4f}")
    yield from attribution_tables(result)


def _patch(inspectable: InspectableStack, arguments: Arguments, clean: str, corrupted: str) -> Iterator[Table]:
    """Yield the effects of patching the residual stream and the heads, exact or estimated, or those of paths."""
    first, second = (inspectable.encode_answer(answer) for answer in arguments.answers)
    prompts = Prompts(inspectable.encode_input(clean), inspectable.encode_input(corrupted), (first, second))
    if arguments.paths:
        return path_tables(inspectable, prompts, arguments.receiver, arguments.batch_size)
    if arguments.estimate:
        return estimate_tables(inspectable, prompts)
    kinds = [kind for kind in KINDS if kind != "heads_by_position" or arguments.by_position]
    return patch_tables(inspectable, prompts, kinds, arguments.batch_size)


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
