"""Kernels of recurrent layers (RNN, GRU, LSTM) over whole sequences.

T steps, B items, H state width, n H gate columns. The arguments of the forward kernels::

    gates: (T, B, n H), the input part of the gates; overwritten with the gate values.
    states: (S, T + 1, B, H); the initial states at index 0 are given, the others are written.
    weights, bias: (H, n H) and (n H,) or None: the recurrent part of the gates, from states[0], the output.
    active: (T, B, 1) booleans, or None: inactive items keep their states in a step.

The arguments of the backward kernels::

    grad: (S, T + 1, B, H), the gradients of the states.
    d_gates: receives the gradients of the gate inputs, (1, T, B, n H), or (2, T, B, n H) if those of the input part and
        the recurrent part differ.
    d_states: (S, B, H), the complete gradients of the last states; overwritten with those of the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tricycle.devices import Array, array_module
from tricycle.kernels import matmul
from tricycle.kernels.dispatch import kernel
from tricycle.kernels.in_place import upcasting_in_place


@kernel
def prepare_matrix(matrix: Array) -> Array:
    """Return a matrix for many products `x @ matrix`: itself, or a copy in a provider's layout."""
    return matrix


Piece = tuple[slice, slice]  # a range of steps and a range of batch items


@kernel
def run_batch_parallel(
    gates: Array, pieces: list[Piece], first: Callable[[Piece], None], then: Callable[[Piece], None]
) -> None:
    """Call first(piece), then(piece) for each piece (steps, items) in order; providers may run item ranges in parallel.

    Args:
        pieces: ranges of steps of all items. `then` may depend on `first` for the same and earlier pieces; items are
            independent of each other.
    """
    for piece in pieces:
        first(piece)
        then(piece)


@kernel
def project(x: Array, matrix: Array, bias: Array | None, out: Array) -> None:
    """Write x @ matrix + bias into `out` (T, B, N), for x (T, B, K) and a matrix (K, N) from `prepare_matrix`."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if out.flags.c_contiguous:
        matmul(rows, matrix, bias, out.reshape(len(rows), out.shape[-1]))
    else:
        out[...] = matmul(rows, matrix, bias).reshape(out.shape)


# -------------------------------------------------------------------- through time
# step(gates[t], recurrent part of the gates, states before, states after)
Step = Callable[[Array, Array, Array, Array], None]
# step(gates[t], states before, states after, their gradients, d) writes d, the gradients of the gate inputs, and turns
# the gradients of the states into those of the previous states, without the part through the weights
StepBack = Callable[[Array, Array, Array, Array, Array], None]


def forward_through_time(
    step: Step, gates: Array, states: Array, weights: Array, bias: Array | None, active: Array | None
) -> None:
    """At each t, call `step` with states[0, t] W + b, to overwrite gates[t] and write states[:, t + 1] where active."""
    xp = array_module(gates)
    for t in range(gates.shape[0]):
        before, after = states[:, t], states[:, t + 1]
        recurrent = before[0] @ weights
        if bias is not None:
            recurrent += bias
        step(gates[t], recurrent, before, after)
        if active is not None:
            after[...] = xp.where(active[t], after, before)


def backward_through_time(
    step: StepBack,
    grad: Array,
    gates: Array,
    states: Array,
    weights: Array,
    active: Array | None,
    d_gates: Array,
    d_states: Array,
) -> None:
    """At each step in reverse, call `step` for d_gates; add d_gates W^T, then the step's grad, to d_states."""
    xp = array_module(grad)
    across = weights.T
    d_output = d_states[0]
    for t in reversed(range(gates.shape[0])):
        d = d_gates[:, t]
        d_after = None if active is None else d_states.copy()
        step(gates[t], states[:, t], states[:, t + 1], d_states, d)
        if active is not None:
            d[...] = xp.where(active[t], d, 0)
            d_states[...] = xp.where(active[t], d_states, d_after)
        d_output += d[-1] @ across
        d_states += grad[:, t]


def _columns(x: Array, n: int) -> list[Array]:
    """Return a list of views of n equal parts of the last axis."""
    size = x.shape[-1] // n
    return [x[..., i * size : (i + 1) * size] for i in range(n)]


def _to_sigmoid(x: Array) -> None:
    """Apply the sigmoid in place, as tanh(x / 2) / 2 + 1 / 2."""
    x *= 0.5
    array_module(x).tanh(x, out=x)
    x *= 0.5
    x += 0.5


# -------------------------------------------------------------------- Elman's
@kernel
@upcasting_in_place(0, 1)
def rnn(gates: Array, states: Array, weights: Array, bias: Array | None, active: Array | None, relu: bool) -> None:
    """Run h' = tanh(gate + h W + b), or relu, over all steps (Elman 1990); overwrite gates, write states[:, 1:]."""
    xp = array_module(gates)

    def step(gate: Array, recurrent: Array, before: Array, after: Array) -> None:
        gate += recurrent
        after[0] = xp.maximum(gate, 0) if relu else xp.tanh(gate)

    forward_through_time(step, gates, states, weights, bias, active)


@kernel
@upcasting_in_place(5, 6)
def rnn_backward(
    grad: Array,
    gates: Array,
    states: Array,
    weights: Array,
    active: Array | None,
    d_gates: Array,
    d_states: Array,
    relu: bool,
) -> None:
    """Backpropagate an RNN in time: write d_gates; replace d_states, the last states' gradients, by the first's."""

    def step(gate: Array, before: Array, after: Array, d_states: Array, d: Array) -> None:
        h = after[0]
        d[0] = d_states[0] * ((h > 0) if relu else 1 - h * h)
        d_states[...] = 0

    backward_through_time(step, grad, gates, states, weights, active, d_gates, d_states)


# -------------------------------------------------------------------- GRU
@kernel
@upcasting_in_place(0, 1)
def gru(gates: Array, states: Array, weights: Array, bias: Array | None, active: Array | None) -> None:
    """Run a GRU over all steps (Cho et al. 2014); overwrite gates by the values of (r, z, n), write states[:, 1:].

    h' = (1 - z) n + z h with n = tanh(input + r * recurrent part). The recurrent part is written into states[1] for the
    backward kernel.
    """
    forward_through_time(_gru_step, gates, states, weights, bias, active)


def _gru_step(gate: Array, recurrent: Array, before: Array, after: Array) -> None:
    """Compute one step in place: r, z, n into `gate`, the new state into after[0], n's recurrent part into after[1]."""
    r, z, n = _columns(gate, 3)
    n_r_z = 2 * gate.shape[-1] // 3
    r_z = gate[:, :n_r_z]
    r_z += recurrent[:, :n_r_z]
    _to_sigmoid(r_z)
    after[1] = recurrent[:, n_r_z:]
    n += r * recurrent[:, n_r_z:]
    array_module(n).tanh(n, out=n)
    after[0] = n + z * (before[0] - n)


@kernel
@upcasting_in_place(5, 6)
def gru_backward(
    grad: Array, gates: Array, states: Array, weights: Array, active: Array | None, d_gates: Array, d_states: Array
) -> None:
    """Backpropagate a GRU in time: write d_gates; replace d_states, the last states' gradients, by the first's."""
    backward_through_time(_gru_step_back, grad, gates, states, weights, active, d_gates, d_states)


def _gru_step_back(gate: Array, before: Array, after: Array, d_states: Array, d: Array) -> None:
    """Write gate gradients to d[0], their recurrent parts' to d[1]; multiply the state's gradient by z in place."""
    r, z, n = _columns(gate, 3)
    dr, dz, dn = _columns(d[0], 3)
    dh = d_states[0]
    rest = 1 - z
    dz[...] = dh * (before[0] - n) * z * rest
    dn[...] = dh * rest * (1 - n * n)
    dr[...] = dn * after[1] * r * (1 - r)
    d[1] = d[0]
    d[1, :, -n.shape[-1] :] *= r
    dh *= z


# -------------------------------------------------------------------- LSTM
@kernel
@upcasting_in_place(0, 1)
def lstm(gates: Array, states: Array, weights: Array, bias: Array | None, active: Array | None) -> None:
    """Run an LSTM over all steps; overwrite gates by the values of (i, f, g, o), write states[:, 1:] (h, c, tanh(c)).

    c' = f c + i g and h' = o tanh(c'). Source: Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al.
    2000.
    """
    forward_through_time(_lstm_step, gates, states, weights, bias, active)


def _lstm_step(gate: Array, recurrent: Array, before: Array, after: Array) -> None:
    """Compute one step in place: i, f, g, o into `gate`, the new state, cell and tanh of the cell into `after`."""
    xp = array_module(gate)
    i, f, g, o = _columns(gate, 4)
    new = after[1]
    gate += recurrent
    candidate = xp.tanh(g)
    _to_sigmoid(gate)  # faster over whole rows than over three parts
    g[...] = candidate
    xp.multiply(f, before[1], out=new)
    new += i * g
    xp.multiply(o, xp.tanh(new, out=after[2]), out=after[0])


@kernel
@upcasting_in_place(5, 6)
def lstm_backward(
    grad: Array, gates: Array, states: Array, weights: Array, active: Array | None, d_gates: Array, d_states: Array
) -> None:
    """Backpropagate an LSTM in time: write d_gates; replace d_states, the last states' gradients, by the first's."""
    backward_through_time(_lstm_step_back, grad, gates, states, weights, active, d_gates, d_states)


def _lstm_step_back(gate: Array, before: Array, after: Array, d_states: Array, d: Array) -> None:
    """Write the gradients of the gates to d[0]; replace d_states by 0 and the gradient of the cell before."""
    xp = array_module(gate)
    i, f, g, o = _columns(gate, 4)
    di, df, dg, do = _columns(d[0], 4)
    dh, dc, tanh_c = d_states[0], d_states[1], after[2]
    d_gate = d[0]
    slope = 1 - gate
    slope *= gate
    _columns(slope, 4)[2][...] = 1 - g * g
    xp.multiply(dh, tanh_c, out=do)
    dh *= o
    dc += dh * (1 - tanh_c * tanh_c)
    for out, factor in ((di, g), (df, before[1]), (dg, i)):
        xp.multiply(dc, factor, out=out)
    d_gate *= slope
    dc *= f
    dh[...] = 0
