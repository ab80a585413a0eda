"""A look inside a model that runs: attention weights, scores and activations, and numbers that sum them up.

Shapes: B batch, T tokens, S keys, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from tricycle_lab.taps import (
    Change,
    Exchange,
    Value,
    as_places,
    attention_of,
    nothing_of,
    replacing,
    tap,
    weighing,
)


class Probe:
    """Within this block, layers and the attention in them leave what they computed here; and they can be changed.

    While it is on, each chosen layer and attention op has a `forward` of its own that calls the one of its class and
    tells the probe; at the end, after an error too, it is gone. So a model without a probe pays nothing. Probes nest.

    `replace`, `ablate` and `weigh` change what the model computes, until the end of their own block or of the probe's:

        with Probe(model) as probe:
            with probe.ablate("blocks.2.attention", heads=3):
                logits = model(tokens)

    Several changes of one layer are made in the order in which they came. Gradients flow through what is left, and into
    a value that is a Tensor. What the probe records is what went on, changes included.

    Args:
        model: any Layer.
        patterns: which layers, by names as in `Layer.named_layers`. `*`, `?` and `[...]` as for files, but `*` takes
            dots too: "blocks.*.attention" for all attention, "blocks.0*" for a block and all inside it. None at all
            stands for every layer with attention to look at and everything that stands in a list, such as "blocks.0".

    Attributes:
        activations: by name, the array that the latest call of the layer gave; no copy.
        scores, weights: by name of a layer with attention, before and after its softmax, (B, H, T, S). Hidden keys
            have scores of -inf. With a cache, T counts the new tokens only.

    Raises:
        ValueError: a pattern that fits no layer.
    """

    def __init__(self, model: Layer, *patterns: str) -> None:
        self._model = model
        for pattern in patterns:
            self._named("Probe", pattern)
        self._layers = {
            name: layer
            for name, layer in model.named_layers()
            if any(fnmatchcase(name, pattern) for pattern in patterns)
            or (not patterns and (attention_of(layer) is not None or name.rpartition(".")[2].isdigit()))
        }
        if not self._layers:
            raise ValueError("Probe: expected patterns, for no layer has attention or stands in a list")
        self.activations: dict[str, Array] = {}
        self.scores: dict[str, Array] = {}
        self.weights: dict[str, Array] = {}
        self._on = ExitStack()
        self._is_on = False

    def __enter__(self) -> Probe:
        self._is_on = True
        for name, layer in self._layers.items():
            self._on.callback(tap(layer, "listeners", partial(self._keep, name)))
            attention = attention_of(layer)
            if attention is not None:
                self._on.callback(tap(attention, "listeners", partial(self._look, name)))
        return self

    def __exit__(self, *error: object) -> None:
        self._is_on = False
        self._on.close()

    def _keep(self, name: str, layer: Layer, out: Tensor, *args: Any, **kwargs: Any) -> None:
        self.activations[name] = out.array

    def _look(self, name: str, attention: Any, out: Tensor, *args: Any, **kwargs: Any) -> None:
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
        """Let something else go on than what a layer gave.

        Args:
            pattern: of names of layers, as the probe's own.
            value: a Tensor, an array or a number that broadcasts to what is replaced; or a function that makes one of
                what the layer gave.
            heads: replace what these heads of the layer's attention give, before its last matrix: the value must then
                fit (B, T, H, E), of which the other heads stay.
            positions: replace it for these tokens of a call alone, counted from 0, from the end where negative.

        Returns:
            what undoes it: at the end of a `with` block, or by `close()`. The end of the probe does so, too.

        Raises:
            ValueError: no layer fits, or heads where there is no attention; while the model runs, a value that does not
                fit, and heads or positions that are not there.
            RuntimeError: the probe is not on.
        """
        title = "Probe.replace"
        if not (isinstance(value, (Tensor, int, float)) or is_array(value) or callable(value)):
            raise ValueError(f"{title}: expected a Tensor, an array, a number or a function, got {value!r}")
        chosen_heads, places = as_places(title, "heads", heads), as_places(title, "positions", positions)
        change = replacing(title, value, chosen_heads, places)
        return self._change(title, dict.fromkeys(self._named(title, pattern), change), heads is not None)

    def ablate(
        self,
        pattern: str,
        *,
        heads: int | Sequence[int] | None = None,
        positions: int | Sequence[int] | None = None,
    ) -> ExitStack:
        """Switch layers off. What they give is 0, so that attention or an MLP adds nothing; what comes into a
        `TransformerBlock` goes on as it is; of some heads the part in the last matrix of attention is 0.

        Args, returns and raises: as of `replace`.
        """
        title = "Probe.ablate"
        chosen_heads, places = as_places(title, "heads", heads), as_places(title, "positions", positions)
        changes = {layer: nothing_of(layer, title, chosen_heads, places) for layer in self._named(title, pattern)}
        return self._change(title, changes, heads is not None)

    def weigh(
        self, pattern: str = "*", softmax: str | RowSoftmax | None = None, temperature: float | None = None
    ) -> ExitStack:
        """Let attention turn scores into weights in another way: by another softmax, or from scores over a temperature.

        Args:
            pattern: of names of layers; those without attention are passed over.
            softmax: a name in `softmaxes.SOFTMAXES`, or an object. Learned scales begin as they do in a new model.
            temperature: above 0; below 1 makes attention sharper, above 1 flatter.

        Returns, raises: as of `replace`.
        """
        title = "Probe.weigh"
        if temperature is not None and not 0 < temperature < float("inf"):
            raise ValueError(f"{title}: expected a temperature above 0, got {temperature!r}")
        layers = [
            layer for layer in self._named(title, pattern) if hasattr(layer, "use_softmax") and attention_of(layer)
        ]
        if not layers:
            raise ValueError(f"{title}: expected layers with attention, none fits {pattern!r}")
        exchanges = [(attention_of(layer), weighing(layer, softmax, temperature)) for layer in layers]
        return self._put(title, "exchanges", exchanges)

    def _named(self, title: str, pattern: str) -> list[Layer]:
        """Return the layers whose names fit; raise ValueError where there are none."""
        named = dict(self._model.named_layers())
        layers = [layer for name, layer in named.items() if fnmatchcase(name, pattern)]
        if not layers:
            raise ValueError(f"{title}: no layer fits {pattern!r}; there are {', '.join(filter(None, named))}")
        return layers

    def _change(self, title: str, changes: dict[Layer, Change], in_heads: bool) -> ExitStack:
        for layer in changes:
            if in_heads and attention_of(layer) is None:
                got = type(layer).__name__
                raise ValueError(f"{title}: expected a layer with attention where heads are named, got {got}")
        parts = [(attention_of(layer) if in_heads else layer, change) for layer, change in changes.items()]
        return self._put(title, "changes", parts)

    def _put(self, title: str, kind: str, parts: Sequence[tuple[Any, Change | Exchange]]) -> ExitStack:
        if not self._is_on:
            raise RuntimeError(f"{title}: expected the probe to be on, within its `with` block")
        if any(getattr(layer, "recompute", False) for layer in self._model.layers()):
            # what is computed again for a gradient, maybe when all is undone, would be something else
            raise ValueError(f"{title}: expected a model that computes nothing twice, got one with recompute on")
        undo = ExitStack()
        # a listener to nothing, for a model that is listened to computes its loss in no other way (`GPT.loss`)
        undo.callback(tap(self._model, "listeners", lambda *args, **kwargs: None))
        for part, function in parts:
            undo.callback(tap(part, kind, function))
        self._on.callback(undo.close)
        return undo


# -------------------------------------------------------------------- numbers, in float64
def excess_kurtosis(x: Array) -> float:
    """E[z^4] - 3 over all elements, z = (x - mean) / standard deviation: 0 for normal ones, high with outliers.

    Fisher's definition with the moments of the population: no correction for small samples. nan where all elements
    are equal or one is not finite; of scores, take those of visible keys first: `scores[scores > -inf]`.

    Raises:
        ValueError: no element.
    """
    xp = array_module(x)
    if x.size == 0:
        raise ValueError(f"excess_kurtosis: expected at least one element, got shape {x.shape}")
    x = x.astype(np.float64)
    if not xp.isfinite(x).all().item() or x.max().item() == x.min().item():
        return float("nan")
    z = x - x.mean()
    z /= abs(z).max()  # so that no power of it leaves the range of floats
    z *= z
    return (z * z).mean().item() / z.mean().item() ** 2 - 3


def entropy(weights: Array) -> Array:
    """-sum_s w_s ln w_s of each row, in nats: (..., S) to (...).

    Rows are taken as they are: what is missing to a sum of 1, as with softmax1, adds nothing. Weights of 0 and below
    (which learned scales can give) add nothing either.
    """
    w = _rows("entropy", weights)
    xp = array_module(w)
    return 0 - (w * xp.log(xp.where(w > 0, w, 1))).sum(axis=-1)


def top_weight(weights: Array, k: int = 1) -> Array:
    """The sum of the k largest weights of each row, of all if there are fewer: (..., S) to (...)."""
    check_positive("top_weight", k=k)
    w = _rows("top_weight", weights)
    return array_module(w).sort(w, axis=-1)[..., -k:].sum(axis=-1)


def nothing(weights: Array) -> Array:
    """1 - sum_s w_s: how much of each row goes to no key, which only softmax1 and blocks allow: (..., S) to (...)."""
    return 1 - _rows("nothing", weights).sum(axis=-1)


def spikiness(weights: Array, n_visible: Array | int | None = None) -> Array:
    """1 - entropy / ln(number of keys that the row sees): 1 for a single key, 0 for all alike: (..., S) to (...).

    Zhang et al. 2024, "The Hedgehog & the Porcupine" (arXiv 2402.04347), call attention spiky when the entropy of its
    weights is low; that this is measured against the highest entropy there can be is our reading, so that rows of
    different length compare. Rows are divided by their sum first: how much goes to nothing is `nothing`'s to say. nan
    for rows that see one key, or whose weights are all 0.

    Args:
        weights: (..., T, S), or (S,).
        n_visible: how many keys each row sees, any shape that broadcasts to (...). Unless given, as in causal
            attention: row t of T sees the first S - T + t + 1.

    Raises:
        ValueError: without `n_visible`, a row with weight beyond these keys.
    """
    w = _rows("spikiness", weights)
    xp = array_module(w)
    if n_visible is None:
        n_rows, n_keys = (1, *w.shape)[-2:]
        visible = xp.arange(n_keys - n_rows + 1, n_keys + 1)
        if (w * (xp.arange(n_keys) >= visible[:, None])).any().item():
            raise ValueError("spikiness: expected causal weights; give n_visible for rows that see other keys")
        n_visible = visible if w.ndim > 1 else n_keys
    total = w.sum(axis=-1, keepdims=True)
    highest = xp.log(xp.maximum(xp.asarray(n_visible, dtype=np.float64), 1))
    some, several = total > 0, highest > 0
    value = 1 - entropy(w / xp.where(some, total, 1)) / xp.where(several, highest, 1)
    return xp.where(some[..., 0] & several, value, np.nan)


def _rows(title: str, weights: Array) -> Array:
    """Return the weights in float64; raise ValueError for no axis or no key."""
    if weights.ndim == 0 or weights.shape[-1] == 0:
        raise ValueError(f"{title}: expected weights (..., keys) with at least one key, got shape {weights.shape}")
    return weights.astype(np.float64)


# -------------------------------------------------------------------- numbers of a model
def weight_kurtosis(model: Layer) -> dict[str, float]:
    """The excess kurtosis of every parameter with at least two axes, by name."""
    return {name: excess_kurtosis(p.array) for name, p in model.named_parameters() if p.ndim >= 2}


class Perplexity(NamedTuple):
    """How well a model predicts a text.

    Attributes:
        loss: mean, in nats a token.
        perplexity: exp(loss): as many tokens, all equally likely, would be as hard to choose from.
        bits_per_byte: comparable across vocabularies.
    """

    loss: float
    perplexity: float
    bits_per_byte: float


def perplexity(
    model: GPT, tokens: Any, n_bytes: int, batch_size: int = 8, n_batches: int = 0, stride: int = 0
) -> Perplexity:
    """How well a model predicts a run of tokens.

    Args:
        tokens: at least two ids; the first is only read.
        n_bytes: of the text that all tokens but the first stand for.
        batch_size, n_batches, stride: as of `evaluation.evaluate`.

    Raises:
        ValueError: fewer than two tokens, ids outside the vocabulary, or sizes below 1.
    """
    check_positive("perplexity", n_bytes=n_bytes, batch_size=batch_size)
    loss, _ = evaluate(model, tokens, batch_size, n_batches, stride)
    with np.errstate(over="ignore"):
        return Perplexity(loss, float(np.exp(loss)), HeldOut(tokens, n_bytes).bits_per_byte(loss))
