"""The gated delta rule in float64: the plain recurrence, gradients, and states."""

from __future__ import annotations

import numpy as np
import pytest
from tables import bad_input

from tricycle.activation_checkpointing import enable_grad
from tricycle.create_graph import gradients
from tricycle.gradcheck import gradcheck
from tricycle.state_spaces.delta_rule import GatedDeltaRule
from tricycle.tensor import Tensor


def recurrence(v, decays, k, q, strengths, s=None) -> tuple[np.ndarray, np.ndarray]:
    """Return the outputs and the last state, one token and one head at a time."""
    n_items, n_tokens, n_heads, size = v.shape
    s = np.zeros((n_items, n_heads, k.shape[3], size)) if s is None else s.copy()
    y = np.zeros(v.shape)
    for b, t, h in np.ndindex(n_items, n_tokens, n_heads):
        key, query = (x[b, t, h // (n_heads // k.shape[2])] for x in (k, q))
        decayed = np.exp(decays[b, t, h]) * s[b, h]
        s[b, h] = decayed + np.outer(key, strengths[b, t, h] * (v[b, t, h] - decayed.T @ key))
        y[b, t, h] = s[b, h].T @ query
    return y, s


def inputs(rng: np.random.Generator, n_tokens: int, n_heads: int = 4, n_groups: int = 2) -> list[np.ndarray]:
    v, decays = rng.standard_normal((2, n_tokens, n_heads, 3)), -rng.exponential(size=(2, n_tokens, n_heads))
    k, q = rng.standard_normal((2, 2, n_tokens, n_groups, 5))
    return [v, decays, k / np.linalg.norm(k, axis=-1, keepdims=True), q, rng.uniform(size=(2, n_tokens, n_heads))]


@pytest.mark.parametrize("n_groups", [1, 2, 4])
@pytest.mark.parametrize(("n_tokens", "chunk_size"), [(1, 4), (8, 4), (11, 4), (11, 1), (11, 64)])
def test_chunks_equal_the_recurrence(n_tokens: int, chunk_size: int, n_groups: int, rng: np.random.Generator) -> None:
    arrays = inputs(rng, n_tokens, n_groups=n_groups)
    rule, (expected, last) = GatedDeltaRule(chunk_size), recurrence(*arrays)
    np.testing.assert_allclose(rule(*map(Tensor, arrays)).array, expected, rtol=1e-12, atol=1e-12)
    first, state = rule.scan(*(x[:, :3] for x in arrays))
    rest, state = rule.scan(*(x[:, 3:] for x in arrays), state=state)
    np.testing.assert_allclose(np.concatenate([first, rest], axis=1), expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(state, last, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("n_tokens", "chunk_size"), [(1, 4), (7, 3), (6, 3), (5, 64)])
def test_gradients_match_finite_differences(n_tokens: int, chunk_size: int, rng: np.random.Generator) -> None:
    gradcheck(GatedDeltaRule(chunk_size), *map(Tensor, inputs(rng, n_tokens)))


def test_repeated_keys_and_strong_decays_stay_exact(rng: np.random.Generator) -> None:
    arrays = inputs(rng, 64)
    arrays[1][:, :32] = 0  # no decay, so that the powers of A would be as large as 2**31
    arrays[1][:, 40:] *= 100
    arrays[2][...], arrays[4][...] = arrays[2][:, :1], 1
    tensors = [Tensor(x.astype(np.float32)) for x in arrays]
    out = GatedDeltaRule(32)(*tensors)
    out.sum().backward()
    np.testing.assert_allclose(out.array, recurrence(*arrays)[0], rtol=1e-5, atol=1e-5)
    assert all(np.isfinite(x.grad.array).all() for x in tensors)


def test_it_can_be_differentiated_twice(rng: np.random.Generator) -> None:
    def first_gradient(*tensors: Tensor) -> Tensor:
        with enable_grad():
            y = (GatedDeltaRule(2)(*tensors) ** 2).sum()
            return gradients([y], [Tensor(np.ones(()), False)], list(tensors))[2]

    gradcheck(first_gradient, *map(Tensor, inputs(rng, 5)), rtol=1e-4, atol=1e-5)


def ones(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    return [np.ones(shape) for shape in shapes]


KEYS = (1, 2, 2, 5)
test_misuse = bad_input(
    {
        "strengths": (lambda: GatedDeltaRule()(*ones((1, 2, 4, 3), (1, 2, 4), KEYS, KEYS, (1, 2, 2))), "strengths"),
        "groups": (
            lambda: GatedDeltaRule()(*ones((1, 2, 3, 3), (1, 2, 3), KEYS, KEYS, (1, 2, 3))),
            "GatedDeltaRule.*multiple of G",
        ),
        "chunk_size": (lambda: GatedDeltaRule(0), "GatedDeltaRule.*chunk_size"),
    }
)
