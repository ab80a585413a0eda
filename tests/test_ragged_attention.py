"""Attention of several texts that are decoded in one batch: the kernel, and the caches that call it."""

import numpy as np
import pytest
from attention_cases import normal

from tricycle import kernels
from tricycle.attention import Attention, KeyValueCache
from tricycle.debug import use_reference
from tricycle.decoding import ragged
from tricycle.decoding.ragged import RaggedCache
from tricycle.kernels import ScoreOptions
from tricycle.kernels.quantized_heads import QuantizedHeads
from tricycle.kernels.ragged_attention import ragged_attention
from tricycle.tensor import Tensor
from tricycle_accelerators import compiled, threads

pytest.importorskip("ml_dtypes")
LENGTHS = (1, 64, 65, 3, 200)
needs_numba = pytest.mark.skipif(compiled.unavailable_reason() is not None, reason="Numba is not available")


def caches(dtype: str, lengths=LENGTHS, n_heads: int = 2, size: int = 32) -> tuple[list, list]:
    """Return keys and values (1, S, K, D) of texts, in caches with room for more tokens."""
    pairs = []
    for n in lengths:
        cache = KeyValueCache(1000, dtype)
        pairs.append(cache.append(*normal(2, 1, n, n_heads, size, seed=n)))
    return [k for k, _ in pairs], [v for _, v in pairs]


def as_float64(x) -> np.ndarray:
    return (x.dequantize() if isinstance(x, QuantizedHeads) else x).astype(np.float64)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize(("window", "off_by_one"), [(None, False), (50, True)])
def test_results_equal_those_of_each_text_alone(dtype, window, off_by_one, monkeypatch):
    q, (keys, values), options = normal(len(LENGTHS), 6, 32), caches(dtype), ScoreOptions(0.3, None, window)
    found = ragged_attention(q, keys, values, options, off_by_one)
    with use_reference():
        reference = ragged_attention(q, keys, values, options, off_by_one)
    for n, (k, v) in enumerate(zip(keys, values)):
        exact = options._replace(offset=k.shape[1] - 1)
        query = q[None, n : n + 1]
        expected = kernels.attention.reference(
            query.astype(np.float64), as_float64(k), as_float64(v), exact, off_by_one
        )
        np.testing.assert_allclose(found[n], expected[0][0, 0], 1e-5, 2e-6)
        np.testing.assert_allclose(reference[n], expected[0][0, 0], 1e-5, 2e-6)
        alone = ragged_attention(q[n : n + 1], [k], [v], options, off_by_one)
        if compiled.unavailable_reason() is None:
            np.testing.assert_array_equal(found[n], alone[0])
    monkeypatch.setattr("tricycle_accelerators.compiled.attention.MIN_SHARED_BYTES", 0)
    for n_threads in (1, 3):
        monkeypatch.setattr(threads, "n_threads", lambda n=n_threads: n)
        np.testing.assert_array_equal(ragged_attention(q, keys, values, options, off_by_one), found)


@needs_numba
def test_queries_may_be_strided_and_equal_the_attention_of_one_text():
    q, (keys, values) = normal(len(LENGTHS), 9, 32)[:, :6], caches("float32")
    found = ragged_attention(q, keys, values, ScoreOptions(0.3), False)
    for n, (k, v) in enumerate(zip(keys, values)):
        alone, _ = kernels.attention(q[None, n : n + 1], k, v, ScoreOptions(0.3, k.shape[1] - 1), False)
        np.testing.assert_array_equal(found[n], alone[0, 0])


@needs_numba
def test_arguments_that_the_loops_cannot_compute_are_declined():
    q, (keys, values), options = normal(len(LENGTHS), 6, 32), caches("float32"), ScoreOptions(0.3)
    narrow = caches("float16")
    transposed = [np.asfortranarray(k) for k in keys]
    decline_reason = compiled.attention.ragged_attention.decline_reason
    assert decline_reason(q, keys, values, options, False) is None
    wrong = [
        (q, keys, values, options._replace(softcap=1.0), "soft-cap"),
        (q.astype(np.float64), keys, values, options, "float64"),
        (q[..., ::-1], keys, values, options, "in one piece"),
        (q, keys, narrow[1], options, "one size and dtype"),
        (q, [*keys[:-1], keys[-1][..., :1, :]], values, options, "one size and dtype"),
        (q, transposed, values, options, "in one piece"),
        (q, [k[:, :1] for k in keys], values, options, "as many keys"),
        (q[..., :31], keys, values, options, "fit the keys"),
        (q[:, :5], keys, values, options, "fit the keys"),
        (q, [as_float64(k) for k in keys], [as_float64(v) for v in values], options, "dtype"),
    ]
    for *arguments, reason in wrong:
        assert reason in decline_reason(*arguments, False)


@pytest.mark.parametrize(
    "settings", [{}, {"softmax": "softmax1", "window": 5}, {"softmax": "adaptive"}, {"softcap": 2.0}]
)
def test_ragged_cache_processes_single_tokens_together(settings, monkeypatch):
    """Texts with one new token are processed together, unless the softmax has no kernel; others after them."""
    shapes = []

    def counted(q, *args):
        shapes.append(q.shape)
        return ragged_attention(q, *args)

    monkeypatch.setattr(ragged, "ragged_attention", counted)
    op, lengths = Attention(**settings), (1, 1, 4, 1)
    texts, alone = ([KeyValueCache(100) for _ in lengths] for _ in range(2))
    for pair in zip(texts, alone):
        for cache in pair:
            cache.append(*normal(2, 1, 9, 2, 8))
    q, k, v = (Tensor(normal(1, sum(lengths), n, 8, seed=n), False) for n in (4, 2, 2))
    found = RaggedCache(texts, lengths).attend(op, q, k, v, None, None)
    start = 0
    for n, cache in zip(lengths, alone):
        parts = (Tensor(x.array[:, start : start + n], False) for x in (q, k, v))
        np.testing.assert_allclose(found.array[:, start : start + n], cache.attend(op, *parts, None, None).array, 1e-5)
        start += n
    assert [cache.length for cache in texts] == [9 + n for n in lengths]
    assert shapes == ([] if settings.get("softmax") == "adaptive" else [(2, 4, 8)])
    shapes.clear()
    mask = np.ones((1, 10), bool)
    single = (Tensor(x.array[:, :1], False) for x in (q, k, v))
    RaggedCache([KeyValueCache(9)], [1]).attend(op, *single, mask[:, :1], None)
    assert shapes == []


@pytest.mark.parametrize(("n_queries", "precision"), [(16, "float32"), (17, "bfloat16")])
def test_cached_attention_of_many_queries_has_the_precision_of_the_layer(n_queries, precision):
    op, qkv = Attention(), [Tensor(normal(1, n_queries, n, 8, seed=n), False) for n in (4, 2, 2)]
    found = KeyValueCache(32).attend(op, *qkv, None, None, precision="bfloat16")
    np.testing.assert_array_equal(found.array, op(*qkv, None, None, precision).array)
