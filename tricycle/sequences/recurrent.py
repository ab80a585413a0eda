"""Recurrent layers: RNN, GRU and LSTM over whole sequences.

One direction of one layer is one node of the graph: the inputs of all steps, and the gradients of the weights, need one
matrix product each. The kernels in `tricycle.kernels.recurrent` compute the recurrence step by step.

Shapes: B batch, T time, C channels, H hidden size, S states (an LSTM has two, h and c), R = n_layers * directions.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from tricycle import devices, kernels
from tricycle.attention import length_mask
from tricycle.autograd import NeedsGrad
from tricycle.create_graph import unfused
from tricycle.devices import Array
from tricycle.einsum import matmul
from tricycle.extra_ops import concatenate, maximum, stack, where
from tricycle.initialisers import Initialiser, xavier
from tricycle.kernels import recurrent as cells
from tricycle.kernels.dispatch import Kernel
from tricycle.layers import Dropout, Layer, new_generator
from tricycle.ops import as_floating, as_tensor, check_device, check_positive, register, sigmoid, tanh
from tricycle.parameter import Parameter
from tricycle.tensor import Operand, Tensor, record


class Cell(NamedTuple):
    """The kernels and sizes of a kind of recurrent cell.

    Attributes:
        name: of the node in the graph.
        step: the forward kernel for some time steps.
        step_back: the backward kernel.
        n_gates: the number of gates, each with H columns.
        n_states: S.
        n_kept: the number of arrays of a state's size that the forward kernel fills, including the states.
        n_grads: 2 if the gates' gradients differ for the input and for the previous output, else 1.
        options: further arguments of both kernels.
    """

    name: str
    step: Kernel[..., Any]
    step_back: Kernel[..., Any]
    n_gates: int
    n_states: int = 1
    n_kept: int = 1
    n_grads: int = 1
    options: tuple[Any, ...] = ()


PIECE_STEPS = 16  # a product of 16 steps is as fast as of all, and can run in another thread beside the recurrence

CELLS = {
    "tanh": Cell("rnn", cells.rnn, cells.rnn_backward, 1, options=(False,)),
    "relu": Cell("rnn", cells.rnn, cells.rnn_backward, 1, options=(True,)),
    "gru": Cell("gru", cells.gru, cells.gru_backward, 3, n_kept=2, n_grads=2),
    "lstm": Cell("lstm", cells.lstm, cells.lstm_backward, 4, n_states=2, n_kept=3),
}


@register
def recurrence(
    x: Tensor,
    initial: Tensor,
    input_weights: Tensor,
    hidden_weights: Tensor,
    *biases: Tensor,
    cell: str,
    active: Array | None = None,
) -> Tensor:
    """Run one direction of a recurrent layer on x (T, B, C); return all states (S, T + 1, B, H), initial ones first.

    The recurrence runs in one thread; the matrix products of the inputs may run in other threads.

    Args:
        x: (T, B, C). initial: (S, B, H).
        input_weights: (C, n_gates * H). hidden_weights: (H, n_gates * H).
        biases: none, or two of (n_gates * H,), for the input and for the previous output.
        cell: a name in CELLS.
        active: booleans (T, B, 1); where False, the states do not change.
    """
    kind = CELLS[cell]
    check_device(kind.name, x.array, initial.array, input_weights.array, hidden_weights.array)
    args = (x, initial, input_weights, hidden_weights, *biases)
    arrays = [as_floating(arg.array) for arg in args]
    dtype = x.xp.result_type(*arrays)  # the states are written in place, so all arrays need one dtype
    rows, first, matrix, hidden, *bias_arrays = (array.astype(dtype, copy=False) for array in arrays)
    run = _Run(kind, rows, first, matrix, hidden, active)
    run.forward(*bias_arrays)

    def backward(grad: Array, needs_grad: NeedsGrad) -> list[Array]:
        return run.backward(grad, bool(biases))

    return record(run.states[: kind.n_states], args, backward, kind.name, False)


@unfused("tricycle.sequences.recurrent.recurrence")
def _step_by_step(node: Tensor, variables: Any) -> Tensor:
    """Recompute a recurrence step by step on Tensors; return all states (S, T + 1, B, H)."""
    (x, initial, matrix, hidden, *biases), run = node.args, variables.run
    gates, states = matmul(x, matrix), [initial]
    for t in range(len(x)):
        gate, recurrent, before = gates[t], matmul(states[-1][0], hidden), states[-1]
        if biases:
            gate, recurrent = gate + biases[0], recurrent + biases[1]
        after = stack(_step(run.kind, gate, recurrent, before))
        states.append(after if run.active is None else where(run.active[t], after, before))
    return stack(states, axis=1)


def _step(kind: Cell, gate: Tensor, recurrent: Tensor, before: Tensor) -> list[Tensor]:
    """Return the list of states (h, for an LSTM also c) after one step on Tensors, as the kernels compute them."""
    if kind.name == "gru":
        (r, z, n), (to_r, to_z, to_n) = gate.split(3), recurrent.split(3)
        new = tanh(n + sigmoid(r + to_r) * to_n)
        return [new + sigmoid(z + to_z) * (before[0] - new)]
    total = gate + recurrent
    if kind.name == "lstm":
        i, f, g, o = total.split(4)
        c = sigmoid(f) * before[1] + sigmoid(i) * tanh(g)
        return [sigmoid(o) * tanh(c), c]
    return [maximum(total, 0) if kind.options[0] else tanh(total)]


class _Run:
    """The forward and backward pass of one direction of one layer, in chunks of time steps.

    Attributes:
        gates: (T, B, n_gates * H), the values of the gates after each step.
        states: (n_kept, T + 1, B, H), the states and other arrays for the backward pass, before the first step and
            after each.
    """

    def __init__(
        self, kind: Cell, rows: Array, initial: Array, matrix: Array, hidden: Array, active: Array | None
    ) -> None:
        n_steps, n_items, _ = rows.shape
        size, n_columns = hidden.shape
        self.kind = kind
        self.rows = rows
        self.matrix = cells.prepare_matrix(matrix)
        self.hidden = cells.prepare_matrix(hidden)
        self.active = active
        self.gates = kernels.empty(rows, (n_steps, n_items, n_columns))
        self.states = kernels.empty(rows, (kind.n_kept, n_steps + 1, n_items, size))
        self.states[:, 0] = 0
        self.states[: kind.n_states, 0] = initial
        starts = range(0, n_steps, PIECE_STEPS)
        self.pieces = [(slice(start, min(start + PIECE_STEPS, n_steps)), slice(0, n_items)) for start in starts]

    def forward(self, input_bias: Array | None = None, hidden_bias: Array | None = None) -> None:
        """Compute the gates and states of all time steps in place, in `gates` and `states`, in chunks of steps.

        Args:
            input_bias, hidden_bias: added to the products of the input and of the previous output.
        """
        if input_bias is not None and self.kind.n_grads == 1:  # the two biases are only ever added
            input_bias = input_bias + hidden_bias
            hidden_bias = None
        step = self.kind.step

        def project(piece: cells.Piece) -> None:
            cells.project(self.rows[piece], self.matrix, input_bias, self.gates[piece])

        def advance(piece: cells.Piece) -> None:
            states = _around(self.states, piece)
            step(self.gates[piece], states, self.hidden, hidden_bias, self._active(piece), *self.kind.options)

        cells.run_batch_parallel(self.gates, self.pieces, project, advance)

    def backward(self, grad: Array, has_biases: bool) -> list[Array]:
        """Return the gradients of the inputs, initial states, both matrices and any biases, from that of the states."""
        d_gates = kernels.empty(self.gates, (self.kind.n_grads, *self.gates.shape))
        d_initial = grad[:, -1].copy()
        dx = kernels.empty(self.gates, self.rows.shape)
        step_back = self.kind.step_back

        def go_back(piece: cells.Piece) -> None:
            steps, items = piece
            known = (self.gates[piece], _around(self.states, piece), self.hidden, self._active(piece))
            d_states = d_initial[:, items]
            step_back(_around(grad, piece), *known, d_gates[:, steps, items], d_states, *self.kind.options)

        def multiply(piece: cells.Piece) -> None:
            cells.project(d_gates[0][piece], self.matrix.T, None, dx[piece])

        cells.run_batch_parallel(self.gates, self.pieces[::-1], go_back, multiply)
        d_matrix = kernels.matmul(_flat(self.rows).T, _flat(d_gates[0]))
        d_hidden = kernels.matmul(_flat(self.states[0, :-1]).T, _flat(d_gates[-1]))
        gradients = [dx, d_initial, d_matrix, d_hidden]
        if has_biases:
            into_gates = kernels.sum_rows(_flat(d_gates[0]))
            # if both gradients are equal, one is a copy, so that changing one in place does not change the other
            recurrent = into_gates.copy() if self.kind.n_grads == 1 else kernels.sum_rows(_flat(d_gates[1]))
            gradients += [into_gates, recurrent]
        return gradients

    def _active(self, piece: cells.Piece) -> Array | None:
        """Return the mask of the active steps and items of a chunk; None if all are active."""
        return None if self.active is None else self.active[piece]


def _around(array: Array, piece: cells.Piece) -> Array:
    """Return a view of the states or their gradients, from before a chunk of steps to after it."""
    steps, items = piece
    return array[:, steps.start : steps.stop + 1, items]


def _flat(array: Array) -> Array:
    """Return an array (..., C) as (N, C), a view where possible."""
    if not array.flags.c_contiguous:
        copy = kernels.empty(array, array.shape)
        copy[...] = array
        array = copy
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


class Direction(Layer):
    """One direction of one recurrent layer, with its weights."""

    def __init__(
        self,
        cell: str,
        reverse: bool,
        input_size: int,
        hidden_size: int,
        bias: bool,
        initialiser: Initialiser,
        generator: np.random.Generator,
    ) -> None:
        def drawn(from_size: int) -> Tensor:
            """Initialize each gate's matrix separately, because initializers depend on the shape."""
            gates = [initialiser((from_size, hidden_size), generator) for _ in range(CELLS[cell].n_gates)]
            return Parameter(np.concatenate(gates, axis=1), "matrix")

        self.cell, self.reverse = cell, reverse
        self.input_weights, self.hidden_weights = drawn(input_size), drawn(hidden_size)
        zeros = np.zeros((2, self.hidden_weights.shape[1]), np.float32)
        self.input_bias, self.hidden_bias = (Parameter(zero.copy(), "bias") if bias else None for zero in zeros)

    def forward(self, x: Tensor, initial: Tensor, active: Array | None = None) -> Any:
        """Run x (B, T, C), active (T, B, 1) or None: all; return outputs (B, T, H) and last states (S, B, H)."""
        weights = self.input_weights, self.hidden_weights, self.input_bias, self.hidden_bias
        given = [w for w in weights if w is not None]
        steps = x.transpose(1, 0, 2)
        if self.reverse:
            steps = steps[::-1]
            active = None if active is None else active[::-1]
        states = recurrence(steps, initial, *given, cell=self.cell, active=active)
        outputs = states[0, 1:]
        if self.reverse:
            outputs = outputs[::-1]
        return outputs.transpose(1, 0, 2), states[:, -1]


class Recurrent(Layer):
    """A stack of recurrent layers: the base class of RNN, GRU and LSTM.

    Args:
        input_size: C.
        hidden_size: H.
        n_layers: the number of layers; each gets the outputs of the previous one.
        bidirectional: each layer also runs from the end to the start; the outputs are concatenated, 2 H wide.
        bias: add two learned vectors in each direction of a layer, initialized to 0.
        dropout: probability of dropping an element between layers.
        initialiser: the initializer of each gate's weights.
        generator: a NumPy generator or a seed.
    """

    _cell = ""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        n_layers: int = 1,
        bidirectional: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        initialiser: Initialiser = xavier,
        generator: np.random.Generator | int | None = None,
    ) -> None:
        check_positive(type(self).__name__, input_size=input_size, hidden_size=hidden_size, n_layers=n_layers)
        generator, directions = new_generator(generator), (False, True) if bidirectional else (False,)
        self.input_size, self.hidden_size = input_size, hidden_size
        self.runs = [
            [Direction(self._cell, reverse, size, hidden_size, bias, initialiser, generator) for reverse in directions]
            for size in [input_size] + [len(directions) * hidden_size] * (n_layers - 1)
        ]
        self.dropout = Dropout(dropout, generator)

    def forward(self, x: Operand, lengths: Operand | None = None, initial: Any = None) -> Any:
        """Run the layers; return outputs (B, T, H or 2 H), 0 in the padding, and final states (R, B, H), LSTM: (h, c).

        Args:
            x: (B, T, input_size).
            lengths: (B,) integers from 1 to T: the number of steps of each sequence before the padding, which is
                ignored; the reverse direction starts at the last step.
            initial: the initial states, zeros if not given: (R, B, H); for an LSTM a pair of them, h and c. They are
                ordered by layer, forward before reverse.

        Returns:
            outputs: (B, T, H), or (B, T, 2 H) with both directions; 0 in the padding.
            final: the states after each sequence's last step (for the reverse direction its first), like `initial`.

        Raises:
            ValueError: no step, a wrong width, lengths out of range, or a wrong shape.
        """
        like, title = self.runs[0][0].hidden_weights, type(self).__name__
        x = as_tensor(x, like)
        if x.ndim != 3 or x.shape[1] == 0 or x.shape[2] != self.input_size:
            wanted = f"(batch, steps, {self.input_size}) with a step or more"
            raise ValueError(f"{title}(input_size={self.input_size}): expected shape {wanted}, got {x.shape}")
        states, real, active = self._initial(title, x, initial, like), None, None
        if lengths is not None:
            mask = length_mask(devices.to_cpu(as_tensor(lengths).array), x.shape[1], len(x), 1, title)
            real = x.xp.asarray(mask[..., None])  # (B, T, 1)
            active = real.transpose(1, 0, 2)
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
        """Return the initial states (S, R, B, H), zeros if `initial` is None; ValueError for other shapes."""
        n_states, shape = CELLS[self._cell].n_states, (sum(map(len, self.runs)), x.shape[0], self.hidden_size)
        if initial is None:
            return Tensor(like.xp.zeros((n_states, *shape), like.dtype), requires_grad=False)
        given = [as_tensor(state, like) for state in ((initial,) if n_states == 1 else initial)]
        if [state.shape for state in given] != [shape] * n_states:
            wanted, got = f"{shape}{' twice, h and c' * (n_states - 1)}", " and ".join(str(s.shape) for s in given)
            raise ValueError(f"{title}: expected initial states of shape {wanted}, got {got}")
        return stack(given)


class RNN(Recurrent):
    """A simple recurrent network, h' = tanh(x W_x + b_x + h W_h + b_h) (Elman 1990).

    Args:
        nonlinearity: "tanh", or "relu" in its place. For the other arguments see `Recurrent`.
    """

    def __init__(self, *arguments: Any, nonlinearity: str = "tanh", **options: Any) -> None:
        if nonlinearity not in ("tanh", "relu"):
            raise ValueError(f"RNN: expected nonlinearity to be tanh or relu, got {nonlinearity!r}")
        self._cell = nonlinearity
        super().__init__(*arguments, **options)


class GRU(Recurrent):
    """A gated recurrent unit (Cho et al. 2014), in the variant of PyTorch and cuDNN.

    r = sigmoid(x W_xr + b_xr + h W_hr + b_hr)
    z = sigmoid(x W_xz + b_xz + h W_hz + b_hz)
    n = tanh(x W_xn + b_xn + r * (h W_hn + b_hn))
    h' = (1 - z) * n + z * h

    The gates are concatenated in this order in the weights and in both biases. For the arguments see `Recurrent`.
    """

    _cell = "gru"


class LSTM(Recurrent):
    """A long short-term memory (Hochreiter and Schmidhuber 1997) with the forget gate of Gers et al. 2000.

    i = sigmoid(x W_xi + b_xi + h W_hi + b_hi), f and o alike
    g = tanh(x W_xg + b_xg + h W_hg + b_hg)
    c' = f * c + i * g
    h' = o * tanh(c')

    The gates are concatenated in the order i, f, g, o in the weights and in both biases. There are two states, h and c.
    For the arguments see `Recurrent`.
    """

    _cell = "lstm"


def new_recurrent(cell: str, *arguments: Any, **options: Any) -> Recurrent:
    """Return a new RNN, GRU or LSTM by its lower-case name, with the other arguments; ValueError for other names."""
    kinds: dict[str, type[Recurrent]] = {"rnn": RNN, "gru": GRU, "lstm": LSTM}
    if cell not in kinds:
        raise ValueError(f"expected cell to be one of {', '.join(kinds)}, got {cell!r}")
    return kinds[cell](*arguments, **options)
