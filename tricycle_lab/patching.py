"""Activation patching: the effect on the answer if activations of a clean prompt replace those of a corrupted prompt.

Exact patching computes a corrupted run for each activation, from the patched block on, with several runs in a batch.
Attribution patching estimates all effects to first order, with two forward passes and one backward pass.

Sources: Meng et al. 2022, "Locating and Editing Factual Associations in GPT" (causal tracing); Wang et al. 2022,
"Interpretability in the Wild" (logit differences).

Shapes: B batch, T tokens, C channels, L layers, H heads, E channels of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tricycle.devices import Array, array_module, to_cpu
from tricycle.models import GPT
from tricycle.ops import check_positive
from tricycle.tensor import Tensor
from tricycle_lab.attribution import check_decoder, check_tokens, frozen, gradient_of
from tricycle_lab.hooks import add_hook
from tricycle_lab.recorded_run import record_run, reuses_keys, run_block, run_blocks

KINDS = ("stream", "attention", "mlp", "heads", "heads_by_position")  # of activations, see `patch_activations`
ESTIMATED = ("stream", "heads")
Site = tuple[str, int]  # a kind and a layer


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


class PromptRuns:
    """The recorded runs of two prompts, and the scale of effects between them.

    Attributes:
        clean, corrupted: the activations of both prompts.
        first: the first position at which the prompts differ.
        reuses_keys: whether a token depends on earlier ones by their keys and values alone.
        start: the first position that changed runs compute.
        metric, difference: the metric of the corrupted prompt, and what the clean one adds to it.

    Raises:
        ValueError: prompts of different lengths, ids out of range, or prompts with the same metric.
    """

    def __init__(self, caller: str, model: GPT, prompts: Prompts) -> None:
        _check(caller, model, prompts)
        self.model, self.answers = model, prompts.answers
        self.clean, self.corrupted = record_run(model, prompts.clean), record_run(model, prompts.corrupted)
        pairs = zip(prompts.clean, prompts.corrupted)
        self.first = next((i for i, (token, other) in enumerate(pairs) if token != other), 0)
        self.reuses_keys = all(map(reuses_keys, model.blocks))
        self.start = self.first if self.reuses_keys else 0
        self.metric, end = (self.metrics(run.stream[-1]).item() for run in (self.corrupted, self.clean))
        self.difference = end - self.metric
        if not np.isfinite(self.difference) or self.difference == 0:
            expected = "expected prompts after which the logits of the answers differ"
            got = f"the logit difference {self.metric:g} for the corrupted and {end:g}"
            raise ValueError(f"{caller}: {expected}, got {got}")

    def metrics(self, x: Array) -> np.ndarray:
        """Return the logit difference of the answers after residual streams x (B, n, C) of the last block, (B,)."""
        with self.model.evaluating():
            logits = self.model.logits(Tensor(x[:, -1], requires_grad=False)).array
        return to_cpu(logits[:, self.answers[0]] - logits[:, self.answers[1]]).astype(np.float64)

    def effects(self, x: Array) -> np.ndarray:
        """Return the metrics of residual streams, scaled to 0 for the corrupted and 1 for the clean prompt, (B,)."""
        return (self.metrics(x) - self.metric) / self.difference


def patch_activations(model: GPT, prompts: Prompts, kind: str = "stream", batch_size: int = 64) -> np.ndarray:
    """Return the effect of each clean activation in the corrupted run: (L, T), (L, H) or (L, H, T) by `kind`.

    An effect is the metric of the patched run, scaled so that it is 0 for the corrupted and 1 for the clean prompt.
    Patched runs share the blocks before the patched one, and the keys and values of earlier tokens. The effect at
    positions before the first token that differs is 0, without a run.

    Args:
        model: any `GPT`.
        prompts: both prompts, and the answers.
        kind: one of KINDS. "stream", "attention" and "mlp" replace the residual stream after a block, or the result of
            its attention layer or MLP, at one position, (L, T). "heads" replaces the result of one attention head at
            all positions, (L, H), and "heads_by_position" at one position, (L, H, T).
        batch_size: the number of patched runs in one forward pass.

    Raises:
        ValueError: an unknown kind, prompts of different lengths, ids out of range, or prompts with the same metric.
    """
    return np.stack(list(iterate_patches(model, prompts, kind, batch_size)))


def iterate_patches(model: GPT, prompts: Prompts, kind: str = "stream", batch_size: int = 64) -> Iterator[np.ndarray]:
    """Yield a layer's effects of `patch_activations`, (T,), (H,) or (H, T), one by one; ValueError for an unknown kind.

    Raises:
        ValueError: as of `patch_activations`, at the first layer.
    """
    check_positive("patch_activations", batch_size=batch_size)
    if kind not in KINDS:
        raise ValueError(f"patch_activations: expected a kind, one of {', '.join(KINDS)}, got {kind!r}")
    runs = PromptRuns("patch_activations", model, prompts)
    heads = range(model.config.n_heads) if kind in ("heads", "heads_by_position") else range(1)
    positions = range(1) if kind == "heads" else range(runs.first, len(prompts.clean))
    cells = [(head, position) for position in positions for head in heads]
    for layer in range(len(model.blocks)):
        effects = np.zeros((len(heads), 1 if kind == "heads" else len(prompts.clean)))
        with model.evaluating():  # not while the caller uses the model between two layers
            for first in range(0, len(cells), batch_size):
                batch = cells[first : first + batch_size]
                effects[tuple(np.transpose(batch))] = runs.effects(_run_patched(runs, kind, layer, batch))
        yield effects if kind == "heads_by_position" else effects[:, 0] if kind == "heads" else effects[0]


def _run_patched(runs: PromptRuns, kind: str, layer: int, batch: Sequence[tuple[int, int]]) -> Array:
    """Return the last residual stream (B, n, C) of corrupted runs with clean activations, for the last n tokens.

    Args:
        batch: the (head, position) of the clean activation in each run; one of the two is 0 if `kind` has no such axis.
    """
    start = min(position for _, position in batch) if kind != "heads" and runs.reuses_keys else runs.start
    name = "heads" if kind == "heads_by_position" else kind
    index = layer + 1 if kind == "stream" else layer
    clean = getattr(runs.clean, name)[index][:, start:]
    mask = np.zeros((len(batch), *clean.shape[1:-1], 1), bool)
    for run, (head, position) in enumerate(batch):
        mask[run, slice(None) if kind == "heads" else position - start, head if name == "heads" else 0] = True
    selected = array_module(clean).asarray(mask)
    patch = lambda x: array_module(x).where(selected, clean, x)
    if kind == "stream":
        x = patch(runs.corrupted.stream[index][:, start:])
    else:
        attention = runs.model.blocks[layer].attention
        target = {"heads": attention.attention, "attention": attention, "mlp": runs.model.blocks[layer].mlp}[name]
        change = lambda out: Tensor(patch(out.array), requires_grad=False)
        x = runs.corrupted.stream[layer][:, start:].repeat(len(batch), axis=0)
        x = run_block(runs.model, layer, x, runs.corrupted, [(target, change)])
    return run_blocks(runs.model, layer + 1, x, runs.corrupted)


def estimate_patches(model: GPT, prompts: Prompts) -> dict[str, np.ndarray]:
    """Estimate the effects of `patch_activations` by gradients: "stream" (L, T) and "heads" (L, H).

    The estimate is (clean activation - corrupted activation) times the gradient of the metric in the corrupted run. It
    is exact for small differences of the activations. Two forward passes and a backward pass compute all effects.

    Raises:
        ValueError: as of `patch_activations`.

    Source: Nanda 2023, "Attribution Patching".
    """
    runs = PromptRuns("estimate_patches", model, prompts)
    gradients = _gradients(runs)
    effects: dict[str, list[np.ndarray]] = {kind: [] for kind in ESTIMATED}
    for (kind, layer), gradient in gradients.items():
        clean, corrupted = (getattr(run, kind)[layer + (kind == "stream")] for run in (runs.clean, runs.corrupted))
        effect = ((clean - corrupted) * gradient)[0].sum(axis=-1)  # (T,) or (T, H)
        effects[kind].append(to_cpu(effect if kind == "stream" else effect.sum(axis=0)))
    return {kind: np.stack(rows).astype(np.float64) / runs.difference for kind, rows in effects.items()}


def _gradients(runs: PromptRuns) -> dict[Site, Array]:
    """Return {(kind, layer): gradient of the corrupted run's metric by that activation} for the ESTIMATED kinds."""
    model, offsets = runs.model, dict[Site, Tensor]()

    def add_offset(site: Site, out: Tensor, *args: Any) -> Tensor:
        """Add a leaf of zeros, which gets the gradient of the activation."""
        offsets[site] = Tensor(out.xp.zeros_like(out.array))
        return out + offsets[site]

    with frozen(model), ExitStack() as hooks:
        for kind in ESTIMATED:
            for layer, block in enumerate(model.blocks):
                target = block if kind == "stream" else block.attention.attention
                hooks.callback(add_hook(target, "changes", partial(add_offset, (kind, layer))))
        x = Tensor(runs.corrupted.stream[0], requires_grad=False)
        for block in model.blocks:
            x = block(x)
        logits = model.logits(x[:, -1])
        (logits[0, runs.answers[0]] - logits[0, runs.answers[1]]).backward()
    return {
        (kind, layer): gradient_of(offsets[kind, layer]) for kind in ESTIMATED for layer in range(len(model.blocks))
    }


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
