"""Count operations and dependencies: arrays that hold the length of the chain of products in place of numbers.

Tricycle asks an array for the library that computes with it. Here an array type of our own steps in, and the layers
run on it as they are. What it holds for each number is how many products stand one behind the other on the way to it:
a product of two numbers that are not constants, by themselves (a gate) or as part of a product of matrices, adds 1.
All else, such as sums, tanh and softmax's exponential, takes over what goes in.

`longest`: the longest such chain. No machine can do the products of a chain at the same time, so this is what the
table calls sequential operations.

`shortest`: the shortest chain from one token; infinite where nothing leads from it. This is the length of the path that
a signal takes from there, forward or back.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import reduce
from types import ModuleType
from typing import Any

import numpy as np

from tricycle.devices import ARRAY_MODULES
from tricycle.layers import Layer
from tricycle.tensor import Tensor, no_grad

PRODUCTS = {np.multiply, np.divide}
YES_OR_NO = {np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal}


@dataclass
class Rule:
    """How an operation combines the chain lengths of its inputs."""

    join: np.ufunc  # which of two chains counts where both lead to a number
    nothing: float  # what a number holds that comes from nowhere
    multiplications: int = 0  # in all products of matrices so far


_rule: ContextVar[Rule] = ContextVar("rule")


class Chains(np.ndarray):
    """An array that holds, for each number, the length of its chain of products; used within `count_operations`."""

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        """Return the chain lengths of a ufunc's result, or write them to `out`: those joined, plus 1 for a product."""
        rule = _rule.get()
        if ufunc in YES_OR_NO:  # nothing is known of numbers; no layer here asks but to avoid a division by 0
            return np.zeros(np.broadcast_shapes(*map(np.shape, inputs)), bool)
        if method == "reduce":
            options = {name: options[name] for name in ("axis", "keepdims") if name in options}
            result = rule.join.reduce(np.asarray(inputs[0]), **options)
        elif ufunc is np.matmul:
            a, b = (np.asarray(x) for x in inputs)
            behind = rule.join(rule.join.reduce(a, -1, keepdims=True), rule.join.reduce(b, -2, keepdims=True))
            result = 1 + behind
            rule.multiplications += result.size * a.shape[-1]
        else:
            known = [np.asarray(x) for x in inputs if isinstance(x, Chains)]
            result = np.broadcast_to(reduce(rule.join, known), np.broadcast_shapes(*map(np.shape, inputs)))
            result = result + 1 if ufunc in PRODUCTS and len(known) == 2 else result
        if out is None:
            return np.array(result).view(Chains)
        np.asarray(out[0])[...] = result
        return out[0]

    def __setitem__(self, key: Any, value: Any) -> None:
        """Set chain lengths; other values than Chains become the length of nothing."""
        np.asarray(self)[key] = value if isinstance(value, Chains) else _rule.get().nothing


def _library() -> ModuleType:
    """Return a copy of NumPy's module whose functions that create arrays return Chains."""
    library = ModuleType("chains")
    of_nothing = lambda shape, *_: np.full(shape, _rule.get().nothing, np.float32).view(Chains)
    known = lambda x: x if isinstance(x, Chains) else _rule.get().nothing
    own = {
        "__getattr__": lambda name: getattr(np, name),
        "empty": of_nothing,
        "zeros": of_nothing,
        "ones": of_nothing,
        "where": lambda which, a, b: np.where(which, known(a), known(b)).view(Chains),
        "isneginf": lambda x: np.zeros(x.shape, bool),
        "ascontiguousarray": lambda x: np.ascontiguousarray(x).view(Chains),
        "concatenate": lambda parts, **options: np.concatenate(parts, **options).view(Chains),
        "pad": lambda x, widths: np.pad(np.asarray(x), widths, constant_values=_rule.get().nothing).view(Chains),
        "lib": ModuleType("lib"),
    }
    vars(library).update(own)
    library.lib.stride_tricks = ModuleType("stride_tricks")
    library.lib.stride_tricks.as_strided = lambda x, shape, strides: np.lib.stride_tricks.as_strided(
        x, shape, strides, subok=True
    )
    return library


@contextmanager
def count_operations(join: np.ufunc, nothing: float) -> Iterator[Rule]:
    """Enter a context in which Tricycle computes with `Chains`; yield the Rule, which counts multiplications."""
    rule = Rule(join, nothing)
    token = _rule.set(rule)
    ARRAY_MODULES[Chains] = _library()
    try:
        with no_grad():
            yield rule
    finally:
        del ARRAY_MODULES[Chains]
        _rule.reset(token)


def longest_path(layer: Layer, n_tokens: int, width: int) -> tuple[int, int]:
    """Return (longest chain of products, multiplications in matrix products) of a layer; overwrite its weights."""
    with count_operations(np.maximum, 0) as rule:
        lengths = _run(layer, np.zeros((1, n_tokens, width), np.float32), 0)
    return int(lengths.max()), rule.multiplications


def shortest_path(layer: Layer, n_tokens: int, width: int) -> float:
    """Return the shortest chain of products from first token to last output, else infinity; overwrite the weights."""
    start = np.full((1, n_tokens, width), np.inf, np.float32)
    start[:, 0] = 0
    with count_operations(np.minimum, np.inf):
        lengths = _run(layer, start, np.inf)
    return float(lengths[0, -1].min())


def _run(layer: Layer, start: np.ndarray, of_weights: float) -> np.ndarray:
    """Overwrite the weights by chains of one length, and return the chain lengths of the output for `start`."""
    for parameter in layer.parameters():
        parameter.array = np.full(parameter.shape, of_weights, np.float32).view(Chains)
    return np.asarray(layer(Tensor(start.view(Chains))).array)
