"""Recurrent layers over whole sequences.

T steps, B items, H the width of the state, n H columns of gates side by side. What the kernels take::

    gates: (T, B, n H), what the inputs give to them; afterwards their values.
    states: (S, T + 1, B, H), of which those before the first step are given.
    weights, bias: (H, n H) and (n H,), or None: they make the part of the gates that comes from states[0], the output.
    active: (T, B, 1) booleans, or None: an item keeps its states over a step where it is not.

And the kernels that go back in time::

    grad: (S, T + 1, B, H), the gradients of the states.
    d_gates: takes the gradients of what went into the gates, (1, T, B, n H), or (2, T, B, n H) where the part from the
        input and that from the output before differ.
    d_states: (S, B, H), the whole gradients of the last states, afterwards those of the first.
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
    """A matrix by which many others will be multiplied, `x @ matrix`, one after another."""
    return matrix


Piece = tuple[slice, slice]  # some steps of some items


@kernel
def run_batch_parallel(
    gates: Array, pieces: list[Piece], first: Callable[[Piece], None], then: Callable[[Piece], None]
) -> None:
    """Both for each piece, in order; `then` may need what `first` did for its piece and for those before.

    Args:
        pieces: some steps of all items. Those of some items at a time may be done in their place, for items know
            nothing of each other.
    """
    for piece in pieces:
        first(piece)
        then(piece)


@kernel
def project(x: Array, matrix: Array, bias: Array | None, out: Array) -> None:
    """Write x (T, B, K) times a `prepare_matrix` matrix (K, N), plus a bias (N,), into `out` (T, B, N)."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if out.flags.c_contiguous:
        matmul(rows, matrix, bias, out.reshape(len(rows), out.shape[-1]))
    else:
        out[...] = matmul(rows, matrix, bias).reshape(out.shape)


# -------------------------------------------------------------------- through time
# step(gates[t], what the output before adds to them, states before, states after)
Step = Callable[[Array, Array, Array, Array], None]
# step(gates[t], states before, states after, gradients of these, d) writes d, the gradients of what went into the
# gates, and turns the states' gradients into those of the states before, but for what goes through the weights
StepBack = Callable[[Array, Array, Array, Array, Array], None]


def forward_through_time(
    step: Step, gates: Array, states: Array, weights: Array, bias: Array | None, active: Array | None
) -> None:
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
    """Views of n equal parts of the last axis."""
    size = x.shape[-1] // n
    return [x[..., i * size : (i + 1) * size] for i in range(n)]


def _to_sigmoid(x: Array) -> None:
    """In place, as tanh(x / 2) / 2 + 1 / 2."""
    x *= 0.5
    array_module(x).tanh(x, out=x)
    x *= 0.5
    x += 0.5


# -------------------------------------------------------------------- Elman's
@kernel
@upcasting_in_place(0, 1)
def rnn(gates: Array, states: Array, weights: Array, bias: Array | None, active: Array | None, relu: bool) -> None:
    """h' = tanh(gate), or max(gate, 0) (Elman 1990)."""
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
    def step(gate: Array, before: Array, after: Array, d_states: Array, d: Array) -> None:
        h = after[0]
        d[0] = d_states[0] * ((h > 0) if relu else 1 - h * h)
        d_states[...] = 0

    backward_through_time(step, grad, gates, states, weights, active, d_gates, d_states)


# -------------------------------------------------------------------- GRU
@kernel
@upcasting_in_place(0, 1)
def gru(gates: Array, states: Array, weights: Array, bias: Array | None, active: Array | None) -> None:
    """h' = (1 - z) n + z h with gates r, z, n, where n = tanh(its input + r * its recurrent part) (Cho et al. 2014).

    states[1] takes that recurrent part, which the backward needs.
    """
    forward_through_time(_gru_step, gates, states, weights, bias, active)


def _gru_step(gate: Array, recurrent: Array, before: Array, after: Array) -> None:
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
    backward_through_time(_gru_step_back, grad, gates, states, weights, active, d_gates, d_states)


def _gru_step_back(gate: Array, before: Array, after: Array, d_states: Array, d: Array) -> None:
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
    """c' = f c + i g and h' = o tanh(c') with gates i, f, g, o; states h and c, and tanh(c'), which the backward needs.

    Source: Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000.
    """
    forward_through_time(_lstm_step, gates, states, weights, bias, active)


def _lstm_step(gate: Array, recurrent: Array, before: Array, after: Array) -> None:
    xp = array_module(gate)
    i, f, g, o = _columns(gate, 4)
    new = after[1]
    gate += recurrent
    candidate = xp.tanh(g)
    _to_sigmoid(gate)  # of whole rows is faster than of three parts
    g[...] = candidate
    xp.multiply(f, before[1], out=new)
    new += i * g
    xp.multiply(o, xp.tanh(new, out=after[2]), out=after[0])


@kernel
@upcasting_in_place(5, 6)
def lstm_backward(
    grad: Array, gates: Array, states: Array, weights: Array, active: Array | None, d_gates: Array, d_states: Array
) -> None:
    backward_through_time(_lstm_step_back, grad, gates, states, weights, active, d_gates, d_states)


def _lstm_step_back(gate: Array, before: Array, after: Array, d_states: Array, d: Array) -> None:
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
