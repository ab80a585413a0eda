"""Activation patching: the effect on the answer if activations of a clean prompt replace those of a corrupted prompt.

Exact patching runs the model on the corrupted prompt once for each activation, with several of them in a batch.
Attribution patching estimates all effects to first order, with two forward passes and one backward pass.

Sources: Meng et al. 2022, "Locating and Editing Factual Associations in GPT" (causal tracing); Wang et al. 2022,
"Interpretability in the Wild" (logit differences); Nanda 2023, "Attribution Patching".

Shapes: B batch, T tokens, C channels, L layers, H heads, E channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tricycle.devices import Array, to_cpu
from tricycle.models import GPT
from tricycle.ops import check_positive
from tricycle.tensor import Tensor
from tricycle_lab.attribution import check_decoder, check_tokens, frozen, gradient_of
from tricycle_lab.probe import Probe

KINDS = ("stream", "heads")  # of activations: the residual stream after a block (B, T, C), or head results (B, T, H, E)
Site = tuple[str, int]  # a kind and a layer
Change = Callable[[Tensor], Any]


class Prompts(NamedTuple):
    """Two prompts with different answers.

    Attributes:
        clean: the ids of the prompt that `answers[0]` follows, (T,).
        corrupted: the ids of a prompt of the same length.
        answers: two ids, the right one after the clean prompt and another one. The metric is the difference of their
            logits after the last token.
    """

    clean: Sequence[int]
    corrupted: Sequence[int]
    answers: tuple[int, int]


def patch_activations(model: GPT, prompts: Prompts, kind: str = "stream", batch_size: int = 16) -> np.ndarray:
    """Return the effect of each clean activation in the corrupted run, (L, T) of the stream or (L, H) of the heads.

    An effect is the metric of the patched run, scaled so that it is 0 for the corrupted and 1 for the clean prompt.

    Args:
        model: any `GPT`.
        prompts: both prompts, and the answers.
        kind: "stream" replaces the residual stream after a block at one position; "heads" replaces the result of one
            attention head at all positions.
        batch_size: the number of patched runs in one forward pass.

    Raises:
        ValueError: an unknown kind, prompts of different lengths, ids out of range, or prompts with the same metric.
    """
    _check("patch_activations", model, prompts)
    check_positive("patch_activations", batch_size=batch_size)
    if kind not in KINDS:
        raise ValueError(f"patch_activations: expected a kind, one of {', '.join(KINDS)}, got {kind!r}")
    sites = [(kind, layer) for layer in range(len(model.blocks))]
    activations: dict[Site, Array] = {}
    n_columns = len(prompts.clean) if kind == "stream" else model.config.n_heads
    cells = [(site, column) for site in sites for column in range(n_columns)]
    metrics: list[float] = []
    with model.evaluating():
        record = {site: partial(_record, activations, site) for site in sites}
        clean = _metric(model, [prompts.clean], prompts.answers, record)
        corrupted = _metric(model, [prompts.corrupted], prompts.answers, {})
        start, end = float(corrupted.array[0]), float(clean.array[0])
        difference = _difference("patch_activations", start, end)
        for first in range(0, len(cells), batch_size):
            batch = cells[first : first + batch_size]
            changes = {site: partial(_patch, activations[site], site, batch) for site, _ in batch}
            metrics += to_cpu(_metric(model, [prompts.corrupted] * len(batch), prompts.answers, changes).array).tolist()
    return (np.reshape(metrics, (len(sites), n_columns)) - start) / difference


def estimate_patches(model: GPT, prompts: Prompts) -> dict[str, np.ndarray]:
    """Estimate the effects of `patch_activations` of all kinds by gradients: "stream" (L, T) and "heads" (L, H).

    The estimate is (clean activation - corrupted activation) times the gradient of the metric in the corrupted run. It
    is exact for small differences of the activations. Two forward passes and one backward pass compute all effects.

    Raises:
        ValueError: as of `patch_activations`.
    """
    _check("estimate_patches", model, prompts)
    sites = [(kind, layer) for kind in KINDS for layer in range(len(model.blocks))]
    clean: dict[Site, Array] = {}
    corrupted: dict[Site, Array] = {}
    offsets: dict[Site, Tensor] = {}
    with model.evaluating():
        record = {site: partial(_record, clean, site) for site in sites}
        end = float(_metric(model, [prompts.clean], prompts.answers, record).array[0])
    with frozen(model):
        record = {site: partial(_record_with_gradient, corrupted, offsets, site) for site in sites}
        metric = _metric(model, [prompts.corrupted], prompts.answers, record)
        start = float(metric.array[0])
        metric.backward()
    difference = _difference("estimate_patches", start, end)
    effects: dict[str, list[np.ndarray]] = {kind: [] for kind in KINDS}
    for site in sites:
        effect = ((clean[site] - corrupted[site]) * gradient_of(offsets[site]))[0].sum(axis=-1)  # (T,) or (T, H)
        effects[site[0]].append(to_cpu(effect if site[0] == "stream" else effect.sum(axis=0)))
    return {kind: np.stack(rows).astype(np.float64) / difference for kind, rows in effects.items()}


def _check(caller: str, model: Any, prompts: Prompts) -> None:
    """Raise a ValueError unless the model is a decoder, and prompts and answers are tokens of it, of equal length."""
    check_decoder(caller, model)
    for tokens in prompts:
        check_tokens(caller, tokens, model.config.vocab_size)
    sizes = len(prompts.clean), len(prompts.corrupted)
    if sizes[0] != sizes[1]:
        raise ValueError(f"{caller}: expected two prompts of the same number of tokens, got {sizes[0]} and {sizes[1]}")
    if len(prompts.answers) != 2:
        raise ValueError(f"{caller}: expected two answers, got {len(prompts.answers)}")


def _difference(caller: str, start: float, end: float) -> float:
    """Return the difference of the metrics of both prompts; raise a ValueError if it is 0 or not finite."""
    difference = end - start
    if not np.isfinite(difference) or difference == 0:
        expected = "expected prompts after which the logits of the answers differ"
        raise ValueError(f"{caller}: {expected}, got the logit difference {start:g} for the corrupted and {end:g}")
    return difference


# -------------------------------------------------------------------- forward passes
def _metric(
    model: GPT, prompts: Sequence[Sequence[int]], answers: Sequence[int], changes: Mapping[Site, Change]
) -> Tensor:
    """Return the logit difference of the answers after each prompt, (B,), of a model with changed activations."""
    with Probe(model, "") as probe:
        for (kind, layer), change in changes.items():
            if kind == "stream":
                probe.replace(f"blocks.{layer}", change)
            else:
                probe.replace(f"blocks.{layer}.attention", change, heads=range(model.config.n_heads))
        logits = model(model.place(np.array(prompts)), last=True)
    return logits[:, 0, answers[0]] - logits[:, 0, answers[1]]


def _record(activations: dict[Site, Array], site: Site, out: Tensor) -> Tensor:
    """Store an activation, and return it unchanged."""
    activations[site] = out.array
    return out


def _record_with_gradient(
    activations: dict[Site, Array], offsets: dict[Site, Tensor], site: Site, out: Tensor
) -> Tensor:
    """Store an activation and a leaf of zeros that is added to it; the leaf gets the gradient of the activation."""
    offsets[site] = Tensor(out.xp.zeros_like(out.array))
    return _record(activations, site, out) + offsets[site]


def _patch(clean: Array, site: Site, batch: Sequence[tuple[Site, int]], out: Tensor) -> Array:
    """Return an activation (B, T, ...), with the clean one (1, T, ...) in the cell of each run that patches it."""
    columns = out.shape[1:2] if site[0] == "stream" else (1, out.shape[2])
    mask = np.zeros((len(batch), *columns, 1), bool)
    for run, (other, column) in enumerate(batch):
        if other == site:
            mask[run, ..., column, 0] = True
    return out.xp.where(out.xp.asarray(mask), clean, out.array)
