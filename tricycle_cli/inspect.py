"""Attribute a logit to the parts of a model, patch activations between two prompts, or score all attention heads.

Exactly one of --attribute, --patch and --heads selects what is computed. The strongest entries are printed; --out draws
all of them as a PNG.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import tyro

from tricycle_cli.flags import parse
from tricycle_cli.models import ModelFlags, load_model
from tricycle_lab.attribution import attribute_logit
from tricycle_lab.head_scores import score_heads
from tricycle_lab.look.inspectable import InspectableStack
from tricycle_lab.patching import KINDS, Prompts, estimate_patches, patch_activations
from tricycle_lab.plot import plot_grids, require_matplotlib


@dataclass(frozen=True)
class Arguments:
    """The flags of `tricycle inspect`."""

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """a model, as in `tricycle generate`"""
    attribute: str | None = None
    """direct logit attribution after this prompt: what the embedding, each head and each MLP add to the logit of the
    answer, or to the difference of two answers"""
    patch: tuple[str, str] | None = None
    """activation patching between a clean and a corrupted prompt of equally many tokens: the effect of each clean
    activation in the corrupted run, 0 for no effect and 1 for the logit difference of the clean prompt"""
    heads: bool = False
    """scores of all heads on repeated random tokens: induction, previous token, duplicate token"""
    answers: tuple[str, ...] = ()
    """the answers, of one token each, usually with a space in front: one or two with --attribute, two with --patch"""
    estimate: bool = False
    """with --patch: estimate all effects by gradients (attribution patching), which takes three passes"""
    batch_size: int = 16
    """patched runs in a forward pass"""
    top: int = 10
    """the number of entries of each table"""
    out: Path | None = None
    """a PNG file to draw (needs matplotlib)"""
    tokeniser: Path | None = None
    """a tokenizer file, for a model without a tokenizer"""
    model: ModelFlags = field(default_factory=ModelFlags)


class Table(NamedTuple):
    """Values of layers (rows) and heads or positions (columns), with a text for each column."""

    title: str
    values: np.ndarray  # (layers, columns)
    columns: Sequence[str]
    column_name: str = "head"


def main(args: Sequence[str] | None = None) -> None:
    """Run `tricycle inspect`: print the strongest entries of each table, and draw all of them if --out is given."""
    arguments = parse(Arguments, args=args, description=__doc__ or "")
    _check(arguments)
    if arguments.out is not None:
        require_matplotlib("--out")
    loaded = load_model(arguments.source, arguments.tokeniser, **vars(arguments.model))
    inspectable = InspectableStack(loaded.model, loaded.tokeniser, Path(arguments.source).name)
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
    if arguments.estimate and arguments.patch is None:
        raise ValueError("expected --estimate with --patch only")
    if arguments.top < 1:
        raise ValueError(f"--top: expected a number above 0, got {arguments.top}")


def _answer_token(inspectable: InspectableStack, answer: str) -> int:
    """Return the token of an answer; raise a ValueError unless it is exactly one token."""
    ids = inspectable.encode(answer)
    if len(ids) != 1:
        raise ValueError(f"--answers: expected answers of one token each, got {len(ids)} tokens for {answer!r}")
    return ids[0]


# -------------------------------------------------------------------- what is computed
def _attribution_tables(inspectable: InspectableStack, arguments: Arguments) -> list[Table]:
    """Print the logit and the contributions outside of layers; return those of heads, and of MLPs and biases."""
    ids = inspectable.encode_input(arguments.attribute or "")
    result = attribute_logit(inspectable.model, ids, *(_answer_token(inspectable, x) for x in arguments.answers))
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
    first, second = (_answer_token(inspectable, answer) for answer in arguments.answers)
    ids = inspectable.encode_input(clean)
    prompts = Prompts(ids, inspectable.encode_input(corrupted), (first, second))
    if arguments.estimate:
        effects = estimate_patches(inspectable.model, prompts)
    else:
        effects = {kind: patch_activations(inspectable.model, prompts, kind, arguments.batch_size) for kind in KINDS}
    tokens = [inspectable.token_text(token) for token in ids]
    return [
        Table("residual stream after each layer", effects["stream"], tokens, "position"),
        Table("heads", effects["heads"], _head_texts(effects["heads"])),
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
    n_layers, n_columns = table.values.shape
    print(f"\n{table.title} ({n_layers} layers x {n_columns})")
    print(f"    value  layer  {table.column_name}")
    for index in np.argsort(-np.abs(table.values), axis=None, kind="stable")[:n]:
        layer, column = divmod(int(index), n_columns)
        text = table.columns[column]
        label = text if text == str(column) else f"{column} {text!r}"
        print(f"{table.values[layer, column]:9.4f}  {layer:5}  {label}")
