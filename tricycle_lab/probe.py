"""Probes of a model: recorded activations, attention scores and weights, interventions, and summary statistics.

Shapes: B batch, T tokens, S keys, H heads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tricycle.attention import scores_and_weights
from tricycle.devices import Array, array_module, is_array
from tricycle.evaluation import HeldOut, evaluate
from tricycle.functions import RowSoftmax
from tricycle.layers import Layer
from tricycle.models import GPT
from tricycle.ops import check_positive
from tricycle.tensor import Tensor
from tricycle_lab.hooks import (
    Change,
    Substitution,
    Value,
    add_hook,
    as_indices,
    attention_of,
    make_ablation,
    make_replacement,
    op_with_heads,
    substitute_softmax,
)


class Probe:
    """A context manager that records and changes the results of layers and of the attention in them.

    While a probe is active, the selected layers and attention ops have forward hooks (`hooks.py`), which are removed at
    the end of the block, also after an error. A model without an active probe has no overhead. Probes can be nested.

    `replace`, `ablate` and `change_softmax` change the model until the end of their own block or of the probe's:

        with Probe(model) as probe:
            with probe.ablate("blocks.2.attention", heads=3):
                logits = model(tokens)

    Several changes of one layer are applied in the order in which they were made. Gradients flow through the changed
    model, and into a value that is a Tensor. The probe records results after the changes.

    Args:
        model: any Layer.
        patterns: select layers by their names in `Layer.named_layers`. `*`, `?` and `[...]` as for files, but `*`
            matches dots too: "blocks.*.attention" for all attention layers, "blocks.0*" for a block and all its
            layers. Default: all layers with attention, and all items of lists of layers, such as "blocks.0".

    Attributes:
        activations: by name, the result array of the layer's latest call, not copied.
        scores, weights: by the name of a layer with attention, the values before and after its softmax, (B, H, T, S).
            The score of a masked key is -inf. With a KV cache, T is the number of new tokens.

    Raises:
        ValueError: a pattern that matches no layer.
    """

    def __init__(self, model: Layer, *patterns: str) -> None:
        self._model = model
        for pattern in patterns:
            self._matching_layers("Probe", pattern)
        self._layers = {
            name: layer
            for name, layer in model.named_layers()
            if any(fnmatchcase(name, pattern) for pattern in patterns)
            or (not patterns and (attention_of(layer) is not None or name.rpartition(".")[2].isdigit()))
        }
        if not self._layers:
            raise ValueError("Probe: expected patterns; the model has no attention and no list of layers")
        self.activations: dict[str, Array] = {}
        self.scores: dict[str, Array] = {}
        self.weights: dict[str, Array] = {}
        self._hooks = ExitStack()
        self._is_active = False

    def __enter__(self) -> Probe:
        """Add hooks that record activations and attention of the selected layers; return self."""
        self._is_active = True
        for name, layer in self._layers.items():
            self._hooks.callback(add_hook(layer, "observers", partial(self._record_activation, name)))
            attention = attention_of(layer)
            if attention is not None:
                self._hooks.callback(add_hook(attention, "observers", partial(self._record_attention, name)))
        return self

    def __exit__(self, *error: object) -> None:
        """Stop recording, and remove the hooks."""
        self._is_active = False
        self._hooks.close()

    def _record_activation(self, name: str, layer: Layer, out: Tensor, *args: Any, **kwargs: Any) -> None:
        """Keep the layer's last output array by its name, without a copy."""
        self.activations[name] = out.array

    def _record_attention(self, name: str, attention: Any, out: Tensor, *args: Any, **kwargs: Any) -> None:
        """Store an attention call's scores and weights, computed again from its arguments."""
        self.scores[name], self.weights[name] = scores_and_weights(attention, *args, **kwargs)

    # ---------------------------------------------------------------- changes
    def replace(
        self,
        pattern: str,
        value: Value,
        *,
        heads: int | Sequence[int] | None = None,
        positions: int | Sequence[int] | None = None,
    ) -> ExitStack:
        """Replace matching layers' (heads', positions') results by `value` until the context exits; ValueError if none.

        Args:
            pattern: matches names of layers, as the probe's own patterns.
            value: a Tensor, an array or a number that broadcasts to the result; or a function from the result to one.
            heads: replace the results of these attention heads, before the output projection. The value must then
                broadcast to (B, T, H, E); the results of other heads are kept.
            positions: replace only the results of these tokens; negative positions count from the end.

        Returns:
            A context manager that undoes the replacement, also by `close()`. The end of the probe undoes it, too.

        Raises:
            ValueError: no layer matches, or heads of a layer without attention. In the forward pass: a value of a wrong
                shape, or heads or positions out of range.
            RuntimeError: the probe is not active.
        """
        caller = "Probe.replace"
        if not (isinstance(value, (Tensor, int, float)) or is_array(value) or callable(value)):
            raise ValueError(f"{caller}: expected a Tensor, an array, a number or a function, got {value!r}")
        make_change = lambda layer, *selection: make_replacement(caller, value, *selection)
        return self._add_changes(caller, pattern, heads, positions, make_change)

    def ablate(
        self,
        pattern: str,
        *,
        heads: int | Sequence[int] | None = None,
        positions: int | Sequence[int] | None = None,
    ) -> ExitStack:
        """Set results of matching layers or heads to 0 (blocks: to input) until the context exits; ValueError if none.

        Args, returns and raises: as of `replace`.
        """
        caller = "Probe.ablate"
        make_change = lambda layer, *selection: make_ablation(layer, caller, *selection)
        return self._add_changes(caller, pattern, heads, positions, make_change)

    def change_softmax(
        self, pattern: str = "*", softmax: str | RowSoftmax | None = None, temperature: float | None = None
    ) -> ExitStack:
        """Use another softmax, or scores / temperature, in matching layers until the context exits; ValueError if none.

        Args:
            pattern: matches names of layers; those without attention are ignored.
            softmax: a name in `softmaxes.SOFTMAXES`, or an object. Learned scales have their initial values.
            temperature: above 0; below 1 makes attention sharper, above 1 flatter.

        Returns, raises: as of `replace`.
        """
        caller = "Probe.change_softmax"
        if temperature is not None and not 0 < temperature < float("inf"):
            raise ValueError(f"{caller}: expected a temperature above 0, got {temperature!r}")
        layers = [
            layer
            for layer in self._matching_layers(caller, pattern)
            if hasattr(layer, "use_softmax") and attention_of(layer)
        ]
        if not layers:
            raise ValueError(f"{caller}: expected layers with attention, none matches {pattern!r}")
        substitutions = [(attention_of(layer), substitute_softmax(layer, softmax, temperature)) for layer in layers]
        return self._add_hooks(caller, "substitutions", substitutions)

    def _matching_layers(self, caller: str, pattern: str) -> list[Layer]:
        """Return the layers whose names match; raise ValueError if there are none."""
        named = dict(self._model.named_layers())
        layers = [layer for name, layer in named.items() if fnmatchcase(name, pattern)]
        if not layers:
            kinds = dict.fromkeys(re.sub(r"\d+", "*", name) for name in named if name)  # of all blocks at once
            raise ValueError(f"{caller}: no layer matches {pattern!r}; the layers are {', '.join(kinds)}")
        return layers

    def _add_changes(
        self, caller: str, pattern: str, heads: Any, positions: Any, make_change: Callable[..., Change]
    ) -> ExitStack:
        """Add the changes that `make_change` returns for the layers that match; return what removes them."""
        selection = as_indices(caller, "heads", heads), as_indices(caller, "positions", positions)
        targets = []
        for layer in self._matching_layers(caller, pattern):
            target = layer if heads is None else op_with_heads(layer)
            if target is None:
                got = type(layer).__name__
                raise ValueError(f"{caller}: expected a layer with attention for `heads`, got {got}")
            targets.append((target, make_change(layer, *selection)))
        return self._add_hooks(caller, "changes", targets)

    def _add_hooks(self, caller: str, kind: str, targets: Sequence[tuple[Any, Change | Substitution]]) -> ExitStack:
        """Add hooks to layers until the probe ends; return an ExitStack to remove them; RuntimeError if not active."""
        if not self._is_active:
            raise RuntimeError(f"{caller}: expected an active probe; call it within the probe's `with` block")
        if any(getattr(layer, "recompute", False) for layer in self._model.layers()):
            # The repeated forward pass in `backward` may run after the change has been undone.
            raise ValueError(f"{caller}: expected a model without activation checkpointing, got one with recompute set")
        undo = ExitStack()
        # With a hook on the model, `GPT.loss` calls `forward` and the changed layers instead of computing in chunks.
        undo.callback(add_hook(self._model, "observers", lambda *args, **kwargs: None))
        for target, function in targets:
            undo.callback(add_hook(target, kind, function))
        self._hooks.callback(undo.close)
        return undo


# -------------------------------------------------------------------- statistics, in float64
def excess_kurtosis(x: Array) -> float:
    """Compute E[z^4] - 3 of all elements, standardized to z; nan if equal or not finite; ValueError if empty.

    Fisher's definition with population moments, without a correction for small samples. The result is nan if all
    elements are equal or one is not finite; of attention scores, select those of visible keys: `scores[scores > -inf]`.

    Raises:
        ValueError: an empty array.
    """
    xp = array_module(x)
    if x.size == 0:
        raise ValueError(f"excess_kurtosis: expected at least one element, got shape {x.shape}")
    x = x.astype(np.float64)
    if not xp.isfinite(x).all().item() or x.max().item() == x.min().item():
        return float("nan")
    z = x - x.mean()
    z /= abs(z).max()  # avoids overflow and underflow of the powers
    z *= z
    return (z * z).mean().item() / z.mean().item() ** 2 - 3


def entropy(weights: Array) -> Array:
    """Compute the entropy -sum_s w_s ln w_s of rows, not normalized, w_s > 0 only, in nats: (..., S) to (...) float64.

    Rows are not normalized: with softmax1 their sum is below 1. Weights of 0 and below, which learned scales can
    produce, are ignored.
    """
    w = _rows("entropy", weights)
    xp = array_module(w)
    return 0 - (w * xp.log(xp.where(w > 0, w, 1))).sum(axis=-1)


def top_k_weight(weights: Array, k: int = 1) -> Array:
    """Return the sum of the k largest weights (all if fewer) of each row: (..., S) to (...) float64."""
    check_positive("top_k_weight", k=k)
    w = _rows("top_k_weight", weights)
    return array_module(w).sort(w, axis=-1)[..., -k:].sum(axis=-1)


def unassigned_weight(weights: Array) -> Array:
    """Return 1 - sum_s w_s of each row, (..., S) to (...) float64: 0 except with softmax1, sink and block softmax."""
    return 1 - _rows("unassigned_weight", weights).sum(axis=-1)


def spikiness(weights: Array, n_visible: Array | int | None = None) -> Array:
    """Compute 1 - entropy / ln(visible keys) of rows, (..., S) to (...), from 0 to 1; ValueError if not causal.

    Zhang et al. 2024, "The Hedgehog & the Porcupine" (arXiv 2402.04347), call attention with low entropy spiky. The
    division by the highest possible entropy is an addition that makes rows of different lengths comparable. Rows are
    normalized to a sum of 1. The result is nan for rows with one visible key or only zero weights.

    Args:
        weights: (..., T, S), or (S,).
        n_visible: the number of visible keys of each row, in any shape that broadcasts to (...). Default: causal
            attention, in which row t of T sees the first S - T + t + 1 keys.

    Raises:
        ValueError: without `n_visible`, a row with weight on later keys.
    """
    w = _rows("spikiness", weights)
    xp = array_module(w)
    if n_visible is None:
        n_rows, n_keys = (1, *w.shape)[-2:]
        visible = xp.arange(n_keys - n_rows + 1, n_keys + 1)
        if (w * (xp.arange(n_keys) >= visible[:, None])).any().item():
            raise ValueError("spikiness: expected causal weights; pass n_visible for other masks")
        n_visible = visible if w.ndim > 1 else n_keys
    total = w.sum(axis=-1, keepdims=True)
    highest = xp.log(xp.maximum(xp.asarray(n_visible, dtype=np.float64), 1))
    has_weight, has_several = total > 0, highest > 0
    value = 1 - entropy(w / xp.where(has_weight, total, 1)) / xp.where(has_several, highest, 1)
    return xp.where(has_weight[..., 0] & has_several, value, np.nan)


def _rows(caller: str, weights: Array) -> Array:
    """Return the weights in float64; raise ValueError for a scalar or an empty last axis."""
    if weights.ndim == 0 or weights.shape[-1] == 0:
        raise ValueError(f"{caller}: expected weights (..., keys) with at least one key, got shape {weights.shape}")
    return weights.astype(np.float64)


# -------------------------------------------------------------------- statistics of a model
def weight_kurtosis(model: Layer) -> dict[str, float]:
    """Return the excess kurtosis of each parameter with at least two axes, by name."""
    return {name: excess_kurtosis(p.array) for name, p in model.named_parameters() if p.ndim >= 2}


class Perplexity(NamedTuple):
    """The loss of a model on a text in three units.

    Attributes:
        loss: the mean in nats per token.
        perplexity: exp(loss).
        bits_per_byte: comparable between tokenizers.
    """

    loss: float
    perplexity: float
    bits_per_byte: float


def perplexity(
    model: GPT, tokens: Any, n_bytes: int, batch_size: int = 8, n_batches: int = 0, stride: int = 0
) -> Perplexity:
    """Compute loss (nats per token), exp(loss) and bits per byte on all tokens but the first, or raise ValueError.

    Args:
        tokens: at least two ids; the first one is not predicted.
        n_bytes: the number of bytes of the text of all tokens except the first.
        batch_size, n_batches, stride: as of `evaluation.evaluate`.

    Raises:
        ValueError: fewer than two tokens, ids outside the vocabulary, or sizes below 1.
    """
    check_positive("perplexity", n_bytes=n_bytes, batch_size=batch_size)
    loss, _ = evaluate(model, tokens, batch_size, n_batches, stride)
    with np.errstate(over="ignore"):
        return Perplexity(loss, float(np.exp(loss)), HeldOut(tokens, n_bytes).bits_per_byte(loss))
