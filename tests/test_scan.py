"""The scan of state-space models in float64: the plain recurrence, gradients, and states."""

from __future__ import annotations

import numpy as np
import pytest
from tables import bad_input

from tricycle.activation_checkpointing import enable_grad
from tricycle.create_graph import gradients
from tricycle.gradcheck import gradcheck
from tricycle.state_spaces.scan import StateSpaceScan
from tricycle.tensor import Tensor


def recurrence(v: np.ndarray, decays: np.ndarray, k: np.ndarray, q: np.ndarray, s: np.ndarray | None = None) -> tuple:
    """Return the outputs and the last state, one token and one head at a time."""
    n_items, n_tokens, n_heads, size = v.shape
    s = np.zeros((n_items, n_heads, k.shape[3], size)) if s is None else s.copy()
    y = np.zeros(v.shape)
    for b, t, h in np.ndindex(n_items, n_tokens, n_heads):
        group = h // (n_heads // k.shape[2])
        s[b, h] = np.exp(decays[b, t, h]) * s[b, h] + np.outer(k[b, t, group], v[b, t, h])
        y[b, t, h] = s[b, h].T @ q[b, t, group]
    return y, s


def inputs(rng: np.random.Generator, n_tokens: int, n_heads: int = 4, n_groups: int = 2) -> list[np.ndarray]:
    v, decays = rng.standard_normal((2, n_tokens, n_heads, 3)), -rng.exponential(size=(2, n_tokens, n_heads))
    return [v, decays, *(rng.standard_normal((2, n_tokens, n_groups, 5)) for _ in range(2))]


@pytest.mark.parametrize("n_groups", [1, 2, 4])
@pytest.mark.parametrize(("n_tokens", "chunk_size"), [(1, 4), (8, 4), (11, 4), (11, 1), (11, 64)])
def test_chunks_equal_the_recurrence(n_tokens: int, chunk_size: int, n_groups: int, rng: np.random.Generator) -> None:
    arrays = inputs(rng, n_tokens, n_groups=n_groups)
    scan, (expected, last) = StateSpaceScan(chunk_size), recurrence(*arrays)
    np.testing.assert_allclose(scan(*map(Tensor, arrays)).array, expected, rtol=1e-12, atol=1e-12)
    first, state = scan.scan(*(x[:, :3] for x in arrays))
    rest, state = scan.scan(*(x[:, 3:] for x in arrays), state)
    np.testing.assert_allclose(np.concatenate([first, rest], axis=1), expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(state, last, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("n_tokens", "chunk_size"), [(1, 4), (7, 3), (6, 3), (5, 64)])
def test_gradients_match_finite_differences(n_tokens: int, chunk_size: int, rng: np.random.Generator) -> None:
    gradcheck(StateSpaceScan(chunk_size), *map(Tensor, inputs(rng, n_tokens)))


def test_strong_decays_do_not_overflow(rng: np.random.Generator) -> None:
    v, decays, k, q = (Tensor(x.astype(np.float32)) for x in inputs(rng, 30))
    decays.array[...] *= 100
    out = StateSpaceScan(16)(v, decays, k, q)
    out.sum().backward()
    expected = recurrence(*(x.array.astype(np.float64) for x in (v, decays, k, q)))[0]
    np.testing.assert_allclose(out.array, expected, rtol=1e-5, atol=1e-5)
    assert all(np.isfinite(x.grad.array).all() for x in (v, decays, k, q))


def test_it_can_be_differentiated_twice(rng: np.random.Generator) -> None:
    tensors = [Tensor(x) for x in inputs(rng, 5)]

    def first_gradient(*tensors: Tensor) -> Tensor:
        with enable_grad():
            y = (StateSpaceScan(2)(*tensors) ** 2).sum()
            return gradients([y], [Tensor(np.ones(()), False)], list(tensors))[1]

    gradcheck(first_gradient, *tensors, rtol=1e-4, atol=1e-5)


def ones(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    return [np.ones(shape) for shape in shapes]


test_misuse = bad_input(
    {
        "decays": (lambda: StateSpaceScan()(*ones((1, 2, 4, 3), (1, 2, 3), (1, 2, 2, 5), (1, 2, 2, 5))), "decays"),
        "groups": (
            lambda: StateSpaceScan()(*ones((1, 2, 4, 3), (1, 2, 4), (1, 2, 3, 5), (1, 2, 3, 5))),
            "multiple of G",
        ),
        "keys": (lambda: StateSpaceScan()(*ones((1, 2, 4, 3), (1, 2, 4), (1, 2, 2, 5), (1, 2, 2, 6))), "k and q"),
        "chunk_size": (lambda: StateSpaceScan(0), "chunk_size"),
    }
)
