"""Change the attention temperatures of a pretrained model, without changing its weights.

An inverse temperature beta multiplies a row's scores. Since these are products of a query with keys, it may as well
multiply the query: then the fused kernels do the rest, and its gradient comes with the query's.

Shapes: B batch, T tokens, L layers, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from tricycle import extra_ops
from tricycle.attention import Attention
from tricycle.functions import RowSoftmax
from tricycle.models import GPT
from tricycle.parameter import Parameter
from tricycle.tensor import Tensor
from tricycle_lab.hooks import add_hook

MIDDLE = 256  # visible keys at which what grows with their number counts 0


class Betas:
    """Inverse temperatures exp(level) + growth ln(visible keys / MIDDLE) per head, at least `least`.

    Args:
        levels, growth: (L, H). growth None: it is the same for all lengths.
    """

    def __init__(self, levels: np.ndarray, growth: np.ndarray | None = None, least: float = 0.1) -> None:
        self.levels = [Parameter(np.asarray(row, np.float32), "gain") for row in levels]
        self.growth = None if growth is None else [Parameter(np.asarray(row, np.float32), "gain") for row in growth]
        self.least = least

    @property
    def parameters(self) -> list[Parameter]:
        """Return the trainable Tensors (H,): the levels of all layers, then the growths, if there are any."""
        return self.levels + (self.growth or [])

    def of(self, layer: int, n_queries: int, n_keys: int) -> Tensor:
        """Return the inverse temperatures of a layer: (1, H, 1), or with growth (T, H, 1), at least `least`."""
        beta = extra_ops.exp(self.levels[layer])
        if self.growth is None:
            return beta[None, :, None]
        visible = np.arange(n_keys - n_queries + 1, n_keys + 1)
        log = Tensor(np.log(visible / MIDDLE).astype(np.float32)[:, None], requires_grad=False)
        beta = beta[None] + log * self.growth[layer][None]
        return extra_ops.maximum(beta, self.least)[:, :, None]

    def table(self) -> dict[str, list[list[float]]]:
        """Return "levels" and "growth" as lists (L, H), to 4 decimals, for JSON; [] for no growth."""
        kinds = {"levels": self.levels, "growth": self.growth or []}
        return {kind: [np.round(row.array.astype(float), 4).tolist() for row in rows] for kind, rows in kinds.items()}

    @classmethod
    def from_table(cls, table: dict[str, Any]) -> Betas:
        """Return new Betas with the "levels" and "growth" of a `table`; `least` is the default."""
        return cls(np.array(table["levels"]), np.array(table["growth"]) if table["growth"] else None)


class LogN:
    """The inverse temperature max(1, ln(visible keys) / ln(start)), the same for all heads.

    Sources: Su 2021 (kexue.fm/archives/8823), who scales all rows by ln n; Bai et al. 2023, "Qwen technical report",
    from the length of training on; Nakanishi 2025, "Scalable-Softmax", where the factor of ln n is learned.

    Args:
        start: visible keys up to which nothing changes.
    """

    def __init__(self, start: int) -> None:
        self.start = start

    def of(self, layer: int, n_queries: int, n_keys: int) -> Tensor:
        """Return the float32 inverse temperatures (T, 1, 1) of the last T = n_queries tokens; ignores `layer`."""
        visible = np.arange(n_keys - n_queries + 1, n_keys + 1)
        beta = np.maximum(1, np.log(visible) / np.log(self.start)).astype(np.float32)
        return Tensor(beta[:, None, None], requires_grad=False)


Temperature = Betas | LogN | RowSoftmax | None


@contextmanager
def use_temperature(model: GPT, temperature: Temperature) -> Iterator[None]:
    """Within the block, let the model's attention use a temperature; None changes nothing; then restore it."""
    with ExitStack() as undo:
        if temperature is not None:
            # With a hook on the model, `GPT.loss` calls `forward` and with it the hooks of the layers.
            undo.callback(add_hook(model, "observers", lambda *args, **kwargs: None))
            for layer, block in enumerate(model.blocks):
                undo.callback(add_hook(block.attention.attention, "substitutions", _substitution(layer, temperature)))
        yield


def _substitution(layer: int, temperature: Betas | LogN | RowSoftmax) -> Callable[[Any, tuple], tuple[Any, tuple]]:
    """Return a substitution that gives attention another softmax, or multiplies queries by the temperatures."""

    def substitute(op: Attention, args: tuple[Any, ...]) -> tuple[Attention, tuple[Any, ...]]:
        if isinstance(temperature, RowSoftmax):
            return Attention(temperature, op.causal, op.window, op.scale, op.softcap), args
        query, key, *rest = args
        return op, (query * temperature.of(layer, query.shape[1], key.shape[1]), key, *rest)

    return substitute
