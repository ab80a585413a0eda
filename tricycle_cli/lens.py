"""Fit a tuned lens to a model on a text, and compare it with the logit lens on the last fifth of the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from tricycle_cli.flags import parse
from tricycle_cli.inspect_flags import InspectFlags
from tricycle_lab.lens import TunedLens, evaluate_lens, fit_lens, lens_log_probabilities
from tricycle_lab.look.inspectable import InspectableStack
from tricycle_lab.plot import plot_curves
from tricycle_lab.recorded_run import record_run

MAX_TEXT_BYTES = 2**26


@dataclass(frozen=True, kw_only=True)
class Arguments(InspectFlags):
    """The flags of `tricycle inspect lens`."""

    text: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TEXT")]
    """a text file to fit and to evaluate the lens on"""
    tokens: int = 8192
    """the number of tokens of the text to use"""
    length: int = 128
    """the number of tokens of a passage, in which the model reads the text"""
    lens: Path | None = None
    """a lens of an earlier call to evaluate, in place of fitting one"""
    save: Path | None = None
    """the safetensors file to write the lens to, for `tricycle look --lens`"""
    prompt: str | None = None
    """a text after which the most probable token of each layer is printed"""


def main(args: Sequence[str] | None = None) -> None:
    """Run `tricycle inspect lens`: fit or load a lens, print (--out: draw) both lenses' losses by layer, --save it."""
    arguments = parse(Arguments, args=args, description=__doc__ or "")
    loaded, inspectable = arguments.load()
    passages = split_passages(inspectable, arguments.text, arguments.tokens, arguments.length)
    n_fitted = len(passages) * 4 // 5
    if arguments.lens is None:
        lens = fit_lens(loaded.model, passages[:n_fitted])
    else:
        lens = TunedLens.load(arguments.lens, loaded.model)
    _print_scores(inspectable, arguments, passages[n_fitted:], lens)
    if arguments.save is not None:
        lens.save(arguments.save)
        print(arguments.save)
    if arguments.prompt is not None:
        _print_predictions(inspectable, inspectable.encode_input(arguments.prompt), lens)


def split_passages(inspectable: InspectableStack, path: Path, n_tokens: int, length: int) -> list[list[int]]:
    """Return 5 or more passages of `length` tokens, of a file's first `n_tokens` tokens; ValueError if there are fewer.

    Raises:
        OSError: the file cannot be read.
        ValueError: a file of more than 64 MiB, a length out of range, or too few tokens.
    """
    if not 2 <= length <= inspectable.max_tokens:
        raise ValueError(f"--length: expected 2 to {inspectable.max_tokens} tokens, got {length}")
    size = path.stat().st_size
    if size > MAX_TEXT_BYTES:
        raise ValueError(f"{path}: expected a text of at most {MAX_TEXT_BYTES} bytes, got {size}")
    # A token has few bytes: the rest of a long text need not be encoded.
    ids = inspectable.encode(path.read_bytes()[: 16 * max(0, n_tokens)].decode("utf-8", errors="ignore"))[:n_tokens]
    passages = [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]
    if len(passages) < 5:
        raise ValueError(f"{path}: expected at least 5 passages of {length} tokens, got {len(passages)}")
    return passages


def _print_scores(
    inspectable: InspectableStack, arguments: Arguments, passages: Sequence[Sequence[int]], lens: TunedLens
) -> None:
    """Print, and draw if --out is given, the KL divergence and cross-entropy of both lenses for each layer."""
    lenses = {"logit lens": None, "tuned lens": lens}
    scores = {name: evaluate_lens(inspectable.model, passages, each) for name, each in lenses.items()}
    print("KL divergence from the model's prediction, and cross-entropy, in nats per token\n")
    print("layer  logit lens: KL  cross-entropy  tuned lens: KL  cross-entropy")
    for layer, row in enumerate(zip(*(values for each in scores.values() for values in each))):
        print(f"{layer:5}  " + "  ".join(f"{value:{width}.4f}" for value, width in zip(row, (14, 13, 14, 13))))
    if arguments.out is None:
        return
    curves = {
        title: {name: (np.arange(len(each.kl)), getattr(each, key)) for name, each in scores.items()}
        for title, key in (("KL divergence", "kl"), ("cross-entropy", "cross_entropy"))
    }
    plot_curves(curves, arguments.out, "layer", "nats per token", title=inspectable.title, share_y=False)
    print(arguments.out)


def _print_predictions(inspectable: InspectableStack, ids: Sequence[int], lens: TunedLens) -> None:
    """Print the most probable token after each layer, with its probability, of both lenses."""
    print("\nlayer  logit lens            tuned lens")
    for layer, stream in enumerate(record_run(inspectable.model, ids).stream[1:]):
        cells = []
        for each in (None, lens):
            row = lens_log_probabilities(inspectable.model, stream[0, -1:], layer, each)[0]
            token = int(row.argmax())
            cells.append(f"{np.exp(row[token]):5.3f} {inspectable.token_text(token)!r}")
        print(f"{layer:5}  {cells[0]:20}  {cells[1]}")
