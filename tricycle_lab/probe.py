"""A look inside a model that runs: attention weights, scores and activations, and numbers that sum them up.

Shapes: B batch, T tokens, S keys, H heads.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tricycle.devices import Array, array_module
from tricycle.evaluation import HeldOut, evaluate
from tricycle.layers import Layer
from tricycle.models import GPT
from tricycle.ops import positive
from tricycle.tensor import Tensor


class Probe:
    """Within this block, layers and the attention in them leave what they computed here.

    While it is on, each chosen layer and attention op has a `forward` of its own that calls the one of its class and
    tells the probe; at the end, after an error too, it is gone. So a model without a probe pays nothing. Probes nest.

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
        named = dict(model.named_layers())
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in named):
                raise ValueError(f"Probe: no layer fits {pattern!r}; there are {', '.join(filter(None, named))}")
        self._layers = {
            name: layer
            for name, layer in named.items()
            if any(fnmatchcase(name, pattern) for pattern in patterns)
            or (not patterns and (_attention_of(layer) is not None or name.rpartition(".")[2].isdigit()))
        }
        if not self._layers:
            raise ValueError("Probe: expected patterns, for no layer has attention or stands in a list")
        self.activations: dict[str, Array] = {}
        self.scores: dict[str, Array] = {}
        self.weights: dict[str, Array] = {}
        self._on = ExitStack()

    def __enter__(self) -> Probe:
        for name, layer in self._layers.items():
            self._on.callback(_listen(layer, partial(self._keep, name)))
            attention = _attention_of(layer)
            if attention is not None:
                self._on.callback(_listen(attention, partial(self._look, name, attention)))
        return self

    def __exit__(self, *error: object) -> None:
        self._on.close()

    def _keep(self, name: str, out: Tensor, *args: Any, **kwargs: Any) -> None:
        self.activations[name] = out.array

    def _look(self, name: str, attention: Any, out: Tensor, *args: Any, **kwargs: Any) -> None:
        self.scores[name], self.weights[name] = attention.look(*args, **kwargs)


class _Tap:
    """Stands in for the `forward` of one layer or op: calls it and tells all listeners."""

    def __init__(self, part: Any) -> None:
        self.before = {"forward": part.forward} if "forward" in vars(part) else {}
        self.forward = part.forward
        self.listeners: list[Callable[..., None]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        out = self.forward(*args, **kwargs)
        for listener in self.listeners:
            listener(out, *args, **kwargs)
        return out


def _listen(part: Any, listener: Callable[..., None]) -> Callable[[], None]:
    """Let a layer or op tell a listener of each call; returns what ends it.

    Listeners share one tap, so that they may leave in any order; the last one takes it away.
    """
    tap = part.forward if isinstance(part.forward, _Tap) else _Tap(part)
    tap.listeners.append(listener)
    part.forward = tap

    def leave() -> None:
        tap.listeners.remove(listener)
        if not tap.listeners:
            del part.forward
            vars(part).update(tap.before)

    return leave


def _attention_of(layer: Layer) -> Any:
    """The op whose weights can be looked at, if the layer has one."""
    attention = getattr(layer, "attention", None)
    return attention if hasattr(attention, "look") else None


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
    positive("top_weight", k=k)
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
    """The weights in float64.

    Raises:
        ValueError: no axis, or no key.
    """
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
    positive("perplexity", n_bytes=n_bytes, batch_size=batch_size)
    loss, _ = evaluate(model, tokens, batch_size, n_batches, stride)
    with np.errstate(over="ignore"):
        return Perplexity(loss, float(np.exp(loss)), HeldOut(tokens, n_bytes).bits_per_byte(loss))
