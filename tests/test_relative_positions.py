"""Relative position biases: buckets, gradients, padding, and attention to the keys of a cache."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tricycle.attention.attend import Attention
from tricycle.gradcheck import gradcheck
from tricycle.sequences.relative_positions import RelativePositionSoftmax, position_buckets
from tricycle.softmaxes import SOFTMAXES
from tricycle.tensor import Tensor

each_direction = pytest.mark.parametrize("bidirectional", [True, False])


def expected_bucket(distance: int, n_buckets: int, max_distance: int, bidirectional: bool) -> int:
    """The rule of Raffel et al. 2020 for one distance of a key from a query."""
    first = 0
    if bidirectional:
        n_buckets //= 2
        first = n_buckets if distance > 0 else 0
    far, exact = abs(distance) if bidirectional else max(0, -distance), n_buckets // 2
    if far < exact:
        return first + far
    grown = exact + int(math.log(far / exact) / math.log(max_distance / exact) * (n_buckets - exact) + 1e-6)
    return first + min(grown, n_buckets - 1)


@each_direction
def test_buckets_follow_the_rule(bidirectional: bool) -> None:
    softmax = RelativePositionSoftmax(32, 128, bidirectional)
    buckets = position_buckets(softmax, 300, 300)
    expected = [[expected_bucket(k - q, 32, 128, bidirectional) for k in range(300)] for q in (0, 150, 299)]
    np.testing.assert_array_equal(buckets[[0, 150, 299]], expected)


@each_direction
def test_buckets_are_those_of_transformers(bidirectional: bool) -> None:
    torch = pytest.importorskip("torch")
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    for n_buckets, max_distance in ((32, 128), (8, 20), (320, 800)):
        distances = torch.arange(-1500, 1501)
        expected = t5.T5Attention._relative_position_bucket(distances, bidirectional, n_buckets, max_distance)
        softmax = RelativePositionSoftmax(n_buckets, max_distance, bidirectional)
        rows = position_buckets(softmax, 1501, 1501)
        np.testing.assert_array_equal(np.concatenate([rows[-1], rows[0, 1:]]), expected.numpy())


@each_direction
def test_gradients_of_attention(bidirectional: bool, rng: np.random.Generator) -> None:
    attention = Attention(RelativePositionSoftmax(8, 5, bidirectional), causal=not bidirectional)
    shapes = [(2, 5, 3, 4), (2, 5, 3, 4), (2, 5, 3, 4), (8, 3)]
    tensors = [Tensor(rng.standard_normal(shape)) for shape in shapes]
    mask = np.arange(5) < np.array([[5], [3]])
    gradcheck(lambda q, k, v, table: attention(q, k, v, mask, table), *tensors)
    none = [Tensor(x.array[:0]) for x in tensors[:3]]
    attention(*none, scales=tensors[3]).backward()
    assert tensors[3].grad is not None and not tensors[3].grad.array.any()


def test_attention_equals_softmax_of_scores_and_biases(rng: np.random.Generator) -> None:
    softmax = RelativePositionSoftmax(8, 5, bidirectional=False)
    q, k, v = (rng.standard_normal((1, n, 2, 4)) for n in (2, 6, 6))  # two queries after four cached keys
    table = rng.standard_normal((8, 2))
    out = Attention(softmax, causal=True)(*map(Tensor, (q, k, v)), None, Tensor(table)).array
    scores = np.einsum("bthd,bshd->bhts", q, k) / 2
    scores = np.where(np.arange(6) > np.array([[4], [5]]), -np.inf, scores)
    biased = scores + np.moveaxis(table[position_buckets(softmax, 2, 6)], 2, 0)
    weights = np.exp(biased) / np.exp(biased).sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(out, np.einsum("bhts,bshd->bthd", weights, v), atol=1e-12)
    np.testing.assert_allclose(softmax.row_softmax(scores, table), weights)


def test_a_table_of_zeros_is_softmax(rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 3, 4, 4))
    softmax = RelativePositionSoftmax()
    chosen, table = softmax.for_layer(3, None)
    np.testing.assert_allclose(chosen(x, table).array, SOFTMAXES["softmax"]()(x).array)
    np.testing.assert_allclose(softmax(x).array, SOFTMAXES["softmax"]()(x).array)


def test_wrong_arguments_are_refused(rng: np.random.Generator) -> None:
    with pytest.raises(ValueError, match="at least 4 buckets"):
        RelativePositionSoftmax(2)
    with pytest.raises(ValueError, match="max_distance above 8"):
        RelativePositionSoftmax(32, 8)
    q = rng.standard_normal((1, 2, 3, 4))
    with pytest.raises(ValueError, match=r"\(32, heads\), got \(8, 3\)"):
        Attention(RelativePositionSoftmax(), causal=False)(q, q, q, None, Tensor(np.zeros((8, 3))))
