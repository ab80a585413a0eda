"""Scans of state-space models and of the gated delta rule in float64: the recurrence, gradients, and states."""

from __future__ import annotations

import numpy as np
import pytest
from tables import bad_input

from tricycle.activation_checkpointing import enable_grad
from tricycle.create_graph import gradients
from tricycle.gradcheck import gradcheck
from tricycle.state_spaces.delta_rule import GatedDeltaRule
from tricycle.state_spaces.scan import ChunkedScan, StateSpaceScan
from tricycle.tensor import Tensor

each_scan = pytest.mark.parametrize("scan", [StateSpaceScan, GatedDeltaRule])
Scan = type[ChunkedScan]


def recurrence(
    v: np.ndarray, decays: np.ndarray, k: np.ndarray, q: np.ndarray, strengths: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the outputs and the last state, one token and one head at a time; by the delta rule with strengths."""
    n_items, n_tokens, n_heads, size = v.shape
    s = np.zeros((n_items, n_heads, k.shape[3], size))
    y = np.zeros(v.shape)
    for b, t, h in np.ndindex(n_items, n_tokens, n_heads):
        key, query = (x[b, t, h // (n_heads // k.shape[2])] for x in (k, q))
        decayed, update = np.exp(decays[b, t, h]) * s[b, h], v[b, t, h]
        if strengths is not None:
            update = strengths[b, t, h] * (update - decayed.T @ key)
        s[b, h] = decayed + np.outer(key, update)
        y[b, t, h] = s[b, h].T @ query
    return y, s


def inputs(scan: Scan, rng: np.random.Generator, n_tokens: int, n_groups: int = 2) -> list[np.ndarray]:
    v, decays = rng.standard_normal((2, n_tokens, 4, 3)), -rng.exponential(size=(2, n_tokens, 4))
    k, q = rng.standard_normal((2, 2, n_tokens, n_groups, 5))
    if scan is StateSpaceScan:
        return [v, decays, k, q]
    return [v, decays, k / np.linalg.norm(k, axis=-1, keepdims=True), q, rng.uniform(size=(2, n_tokens, 4))]


@each_scan
@pytest.mark.parametrize("n_groups", [1, 2, 4])
@pytest.mark.parametrize(("n_tokens", "chunk_size"), [(1, 4), (8, 4), (11, 4), (11, 1), (11, 64)])
def test_chunks_equal_the_recurrence(
    scan: Scan, n_tokens: int, chunk_size: int, n_groups: int, rng: np.random.Generator
) -> None:
    arrays = inputs(scan, rng, n_tokens, n_groups)
    op, (expected, last) = scan(chunk_size), recurrence(*arrays)
    np.testing.assert_allclose(op(*map(Tensor, arrays)).array, expected, rtol=1e-12, atol=1e-12)
    first, state = op.scan(*(x[:, :3] for x in arrays))
    rest, state = op.scan(*(x[:, 3:] for x in arrays), state=state)
    np.testing.assert_allclose(np.concatenate([first, rest], axis=1), expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(state, last, rtol=1e-12, atol=1e-12)


@each_scan
@pytest.mark.parametrize(("n_tokens", "chunk_size"), [(1, 4), (7, 3), (6, 3), (5, 64)])
def test_gradients_match_finite_differences(
    scan: Scan, n_tokens: int, chunk_size: int, rng: np.random.Generator
) -> None:
    gradcheck(scan(chunk_size), *inputs(scan, rng, n_tokens))


def check_in_float32(op: ChunkedScan, arrays: list[np.ndarray]) -> None:
    """Check results in float32 against the recurrence in float64, and that gradients are finite."""
    tensors = [Tensor(x.astype(np.float32)) for x in arrays]
    out = op(*tensors)
    out.sum().backward()
    np.testing.assert_allclose(out.array, recurrence(*arrays)[0], rtol=1e-5, atol=1e-5)
    assert all(np.isfinite(x.grad.array).all() for x in tensors)


def test_strong_decays_do_not_overflow(rng: np.random.Generator) -> None:
    arrays = inputs(StateSpaceScan, rng, 30)
    arrays[1] *= 100
    check_in_float32(StateSpaceScan(16), arrays)


def test_repeated_keys_and_strong_decays_stay_exact(rng: np.random.Generator) -> None:
    arrays = inputs(GatedDeltaRule, rng, 64)
    arrays[1][:, :32] = 0  # no decay, so that the powers of A would be as large as 2**31
    arrays[1][:, 40:] *= 100
    arrays[2][...], arrays[4][...] = arrays[2][:, :1], 1
    check_in_float32(GatedDeltaRule(32), arrays)


@each_scan
@pytest.mark.parametrize("i", [1, 2], ids=["decays", "keys"])
def test_it_can_be_differentiated_twice(scan: Scan, i: int, rng: np.random.Generator) -> None:
    def first_gradient(*tensors: Tensor) -> Tensor:
        with enable_grad():
            y = (scan(2)(*tensors) ** 2).sum()
            return gradients([y], [Tensor(np.ones(()), False)], list(tensors))[i]

    gradcheck(first_gradient, *inputs(scan, rng, 5), rtol=1e-4, atol=1e-5)


def call(scan: Scan, *shapes: tuple[int, ...]) -> Tensor:
    return scan()(*map(np.ones, shapes))


KEYS = (1, 2, 2, 5)
test_misuse = bad_input(
    {
        "decays": (lambda: call(StateSpaceScan, (1, 2, 4, 3), (1, 2, 3), KEYS, KEYS), "decays"),
        "groups": (lambda: call(StateSpaceScan, (1, 2, 3, 3), (1, 2, 3), KEYS, KEYS), "multiple of G"),
        "keys": (lambda: call(StateSpaceScan, (1, 2, 4, 3), (1, 2, 4), KEYS, (1, 2, 2, 6)), "k and q"),
        "chunk_size": (lambda: StateSpaceScan(0), "chunk_size"),
        "strengths": (lambda: call(GatedDeltaRule, (1, 2, 4, 3), (1, 2, 4), KEYS, KEYS, (1, 2, 2)), "strengths"),
        "groups of the rule": (
            lambda: call(GatedDeltaRule, (1, 2, 3, 3), (1, 2, 3), KEYS, KEYS, (1, 2, 3)),
            "GatedDeltaRule.*multiple of G",
        ),
        "chunk_size of the rule": (lambda: GatedDeltaRule(0), "GatedDeltaRule.*chunk_size"),
    }
)
