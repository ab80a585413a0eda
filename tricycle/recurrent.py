"""Recurrent layers: RNN, GRU and LSTM over whole sequences.

One direction of one layer, all its steps, is one node of the graph: the products with the inputs of all steps are one
matrix product, and so are the gradients of the weights. What is left to do step by step is in kernels/.

Shapes: B batch, T time, C channels, H hidden size, S states (an LSTM has two, h and c), R = n_layers * directions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tricycle import backend, kernels
from tricycle.backend import Array
from tricycle.functions import shared_backward
from tricycle.initialisers import Initialiser, xavier
from tricycle.layers import Dropout, Layer, new_generator
from tricycle.ops import as_tensor, check_device, concatenate, floating, positive, register, stack, where
from tricycle.tensor import BackFn, Operand, Tensor, record, to_tensor


class Cell(NamedTuple):
    """What a kind of recurrence looks like from outside.

    Attributes:
        kernel: its name in kernels/, to which "_backward" is added.
        n_gates: each H columns.
        n_states: S.
        n_kept: arrays like a state that the kernel fills, the states included.
        n_grads: 2 where the input's part of the gates and that of the output before differ in their gradient.
        options: further arguments of the kernel.
    """

    kernel: str
    n_gates: int
    n_states: int = 1
    n_kept: int = 1
    n_grads: int = 1
    options: tuple = ()


CELLS = {
    "tanh": Cell("rnn", 1, options=(False,)),
    "relu": Cell("rnn", 1, options=(True,)),
    "gru": Cell("gru", 3, n_kept=2, n_grads=2),
    "lstm": Cell("lstm", 4, n_states=2, n_kept=2),
}


@register
def recurrence(
    x: Tensor, initial: Tensor, input_weights: Tensor, hidden_weights: Tensor, *biases: Tensor, cell: str,
    reverse: bool = False, active: Array | None = None,
) -> Tensor:
    """All steps of one direction of one layer.

    Args:
        x: (B, T, C). initial: (S, B, H).
        input_weights: (C, n_gates * H). hidden_weights: (H, n_gates * H).
        biases: none, or two of (n_gates * H,), for the input and for the output before.
        cell: a name in CELLS.
        reverse: from the last step to the first.
        active: (T, B, 1) booleans: an item keeps its states over a step where it is False.

    Returns:
        (S, T + 1, B, H): the states before the first step and after each, the other way round if reversed.
    """
    kind, xp, matrix, across = CELLS[cell], x.xp, input_weights.array, hidden_weights.array
    check_device(kind.kernel, x.array, initial.array, matrix, across)
    (n_items, n_steps, from_size), (size, n_columns) = x.shape, across.shape
    n_rows = n_steps * n_items
    rows = xp.ascontiguousarray(floating(x.array).transpose(1, 0, 2)).reshape(n_rows, from_size)
    bias, later_bias = [b.array for b in biases] if biases else (None, None)
    if biases and kind.n_grads == 1:  # where both do the same, one is enough
        bias, later_bias = biases[0].array + biases[1].array, None
    gates = kernels.matmul(rows, matrix, bias).reshape(n_steps, n_items, n_columns)
    states = xp.empty((kind.n_kept, n_steps + 1, n_items, size), gates.dtype)
    time = slice(None, None, -1 if reverse else 1)  # views in the order of steps are what a kernel gets
    run, kept, going = gates[time], states[:, time], active if active is None else active[time]
    kept[:, 0] = 0
    kept[: kind.n_states, 0] = initial.array
    getattr(kernels, kind.kernel)(run, kept, across, later_bias, going, *kind.options)

    def compute(grad: Array) -> tuple[tuple[Array, ...]]:
        d_gates = xp.empty((kind.n_grads, n_steps, n_items, n_columns), gates.dtype)
        d_initial = xp.empty(initial.shape, gates.dtype)
        backward = getattr(kernels, f"{kind.kernel}_backward")
        backward(grad[:, time], run, kept, across, going, d_gates[:, time], d_initial, *kind.options)
        return ((d_gates[0].reshape(n_rows, n_columns), d_gates[-1].reshape(n_rows, n_columns), d_initial),)

    (grads,) = shared_backward(compute, 1)
    before = (states[0, 1:] if reverse else states[0, :-1]).reshape(n_rows, size)
    dx_shape = n_steps, n_items, from_size
    back_fns: tuple[BackFn, ...] = (
        lambda grad: kernels.matmul(grads(grad)[0], matrix.T).reshape(dx_shape).transpose(1, 0, 2),
        lambda grad: grads(grad)[2],
        lambda grad: kernels.matmul(rows.T, grads(grad)[0]),
        lambda grad: kernels.matmul(before.T, grads(grad)[1]),
        lambda grad: kernels.sum_rows(grads(grad)[0]),
        lambda grad: kernels.sum_rows(grads(grad)[1]),
    )
    args = (x, initial, input_weights, hidden_weights, *biases)
    return record(states[: kind.n_states], args, back_fns[: len(args)], kind.kernel, False)


class Direction(Layer):
    """One direction of one layer, with its weights."""

    def __init__(
        self, cell: str, reverse: bool, input_size: int, hidden_size: int, bias: bool, initialiser: Initialiser,
        generator: np.random.Generator,
    ) -> None:
        def drawn(from_size: int) -> Tensor:
            """Each gate's matrix by itself: its size is what an initialiser should see."""
            gates = [initialiser((from_size, hidden_size), generator) for _ in range(CELLS[cell].n_gates)]
            return to_tensor(np.concatenate(gates, axis=1))

        self.cell, self.reverse = cell, reverse
        self.input_weights, self.hidden_weights = drawn(input_size), drawn(hidden_size)
        zeros = np.zeros((2, self.hidden_weights.shape[1]), np.float32)
        self.input_bias, self.hidden_bias = (to_tensor(zero.copy()) if bias else None for zero in zeros)

    def forward(self, x: Tensor, initial: Tensor, active: Array | None = None) -> Any:
        """(B, T, C) and (S, B, H) to the outputs (B, T, H) and the states at the end (S, B, H)."""
        weights = self.input_weights, self.hidden_weights, self.input_bias, self.hidden_bias
        given = [w for w in weights if w is not None]
        states = recurrence(x, initial, *given, cell=self.cell, reverse=self.reverse, active=active)
        outputs, final = (states[0, :-1], states[:, 0]) if self.reverse else (states[0, 1:], states[:, -1])
        return outputs.transpose(1, 0, 2), final


class Recurrent(Layer):
    """Layers of recurrence one on another: the base of RNN, GRU and LSTM.

    Args:
        input_size: C.
        hidden_size: H.
        n_layers: each takes the outputs of the one below.
        bidirectional: each layer also runs from the end to the start, and its outputs stand side by side, 2 H wide.
        bias: two vectors for each direction of a layer, which start at 0.
        dropout: probability of dropping an element between layers.
        initialiser: first values of each gate's weights.
        generator: a NumPy generator or a seed.
    """

    _cell = ""

    def __init__(
        self, input_size: int, hidden_size: int, n_layers: int = 1, bidirectional: bool = False, bias: bool = True,
        dropout: float = 0.0, initialiser: Initialiser = xavier, generator: np.random.Generator | int | None = None,
    ) -> None:
        positive(type(self).__name__, input_size=input_size, hidden_size=hidden_size, n_layers=n_layers)
        generator, directions = new_generator(generator), (False, True) if bidirectional else (False,)
        self.input_size, self.hidden_size = input_size, hidden_size
        self.runs = [
            [Direction(self._cell, reverse, size, hidden_size, bias, initialiser, generator) for reverse in directions]
            for size in [input_size] + [len(directions) * hidden_size] * (n_layers - 1)
        ]
        self.dropout = Dropout(dropout, generator)

    def forward(self, x: Operand, lengths: Operand | None = None, initial: Any = None) -> Any:
        """
        Args:
            x: (B, T, input_size).
            lengths: (B,) whole numbers from 1 to T: how many steps of each item are real. What stands after them does
                not matter; the reverse direction starts at the last of them.
            initial: the states to start from, zeros unless given: (R, B, H); for an LSTM two of them, h and c. Layer by
                layer, forward before reverse.

        Returns:
            outputs: (B, T, H), or (B, T, 2 H) with both directions; 0 after an item's end.
            final: the states after each item's last step (the reverse direction's: its first), as `initial`.

        Raises:
            ValueError: no step, a wrong width, lengths out of range, or anything misshapen.
        """
        like, title = self.runs[0][0].hidden_weights, type(self).__name__
        x = as_tensor(x, like)
        if x.ndim != 3 or x.shape[1] == 0 or x.shape[2] != self.input_size:
            wanted = f"(batch, steps, {self.input_size}) with a step or more"
            raise ValueError(f"{title}(input_size={self.input_size}): expected shape {wanted}, got {x.shape}")
        states, real = self._initial(title, x, initial, like), _real(title, x, lengths)
        active = None if real is None else real.transpose(1, 0, 2)
        y = x if real is None else where(real, x, 0.0)
        finals: list[Tensor] = []
        for number, runs in enumerate(self.runs):
            y = y if number == 0 else self.dropout(y)
            ends = [run(y, states[:, len(finals) + i], active) for i, run in enumerate(runs)]
            finals += [final for _, final in ends]
            y = ends[0][0] if len(ends) == 1 else concatenate([outputs for outputs, _ in ends], axis=-1)
            y = y if real is None else where(real, y, 0.0)
        y.is_batched, final = x.is_batched, stack(finals, axis=1)
        return y, final[0] if len(final) == 1 else (final[0], final[1])

    def _initial(self, title: str, x: Tensor, initial: Any, like: Tensor) -> Tensor:
        """(S, R, B, H)."""
        n_states, shape = CELLS[self._cell].n_states, (sum(map(len, self.runs)), x.shape[0], self.hidden_size)
        if initial is None:
            return Tensor(like.xp.zeros((n_states, *shape), like.dtype), requires_grad=False)
        given = [as_tensor(state, like) for state in ((initial,) if n_states == 1 else initial)]
        if [state.shape for state in given] != [shape] * n_states:
            wanted, got = f"{shape}{' twice, h and c' * (n_states - 1)}", " and ".join(str(s.shape) for s in given)
            raise ValueError(f"{title}: expected initial states of shape {wanted}, got {got}")
        return stack(given)


def _real(title: str, x: Tensor, lengths: Operand | None) -> Array | None:
    """(B, T, 1) booleans: whether a step is no padding. None where all are."""
    if lengths is None:
        return None
    numbers, (n_items, n_steps, _) = backend.to_cpu(as_tensor(lengths).array), x.shape
    if numbers.shape != (n_items,) or numbers.dtype.kind not in "iu":
        got = f"{numbers.dtype} of shape {numbers.shape}"
        raise ValueError(f"{title}: expected lengths as whole numbers of shape ({n_items},), got {got}")
    if numbers.size and not 0 < numbers.min() <= numbers.max() <= n_steps:
        raise ValueError(f"{title}: expected lengths from 1 to {n_steps}, got {numbers.min()} to {numbers.max()}")
    real = np.arange(n_steps) < numbers[:, None]
    return None if real.all() else x.xp.asarray(real[..., None])


class RNN(Recurrent):
    """h' = tanh(x W_x + b_x + h W_h + b_h), or max(., 0) in place of tanh (Elman 1990).

    Args:
        nonlinearity: "tanh" or "relu". All others are those of `Recurrent`.
    """

    def __init__(self, *arguments: Any, nonlinearity: str = "tanh", **options: Any) -> None:
        if nonlinearity not in ("tanh", "relu"):
            raise ValueError(f"RNN: expected nonlinearity to be tanh or relu, got {nonlinearity!r}")
        self._cell = nonlinearity
        super().__init__(*arguments, **options)


class GRU(Recurrent):
    """Gated recurrent units (Cho et al. 2014), in the form that PyTorch and cuDNN compute.

    r = sigmoid(x W_xr + b_xr + h W_hr + b_hr)
    z = sigmoid(x W_xz + b_xz + h W_hz + b_hz)
    n = tanh(x W_xn + b_xn + r * (h W_hn + b_hn))
    h' = (1 - z) * n + z * h

    The gates stand side by side in that order, in the weights and in both biases. The arguments are those of
    `Recurrent`.
    """

    _cell = "gru"


class LSTM(Recurrent):
    """Long short-term memory (Hochreiter and Schmidhuber 1997) with the forget gate of Gers et al. 2000.

    i = sigmoid(x W_xi + b_xi + h W_hi + b_hi), f and o alike
    g = tanh(x W_xg + b_xg + h W_hg + b_hg)
    c' = f * c + i * g
    h' = o * tanh(c')

    The gates stand side by side in the order i, f, g, o, in the weights and in both biases. There are two states, h
    and c. The arguments are those of `Recurrent`.
    """

    _cell = "lstm"


def new_recurrent(cell: str, *arguments: Any, **options: Any) -> Recurrent:
    """An RNN, a GRU or an LSTM, by its name in small letters.

    Raises:
        ValueError: an unknown name.
    """
    kinds: dict[str, type[Recurrent]] = {"rnn": RNN, "gru": GRU, "lstm": LSTM}
    if cell not in kinds:
        raise ValueError(f"expected cell to be one of {', '.join(kinds)}, got {cell!r}")
    return kinds[cell](*arguments, **options)
