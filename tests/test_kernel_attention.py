"""Attention kernels: the reference against loops, the providers against the reference; memory use and skipped keys."""

import tracemalloc
from itertools import product

import numpy as np
import pytest
from attention_cases import (
    SHARED,
    Sizes,
    cubes,
    cubes_backward,
    loop_attention,
    loop_scores,
    poisoned,
    qkv,
    reference,
    scorings,
)

from tricycle import kernels
from tricycle.kernels import ScoreOptions
from tricycle.kernels import row_attention as row_kernels
from tricycle.kernels.quantized_heads import QuantizedHeads, quantized_attention
from tricycle.kernels.ranges import block_score_options, queries_with_keys, visible_keys
from tricycle_accelerators import attention_blocks, chunks, threads
from tricycle_accelerators.cpu import attention as cpu_attention

MASKS = [None, (1, 0, 0, 1), (0, 0, 1, 1), (1, 1, 1, 1)]  # 1 for each axis along which the mask varies


def new_mask(rng, sizes: Sizes, axes) -> np.ndarray | None:
    if axes is None:
        return None
    full = sizes.items, sizes.heads, sizes.queries, sizes.keys
    return np.where(rng.random([n if axis else 1 for n, axis in zip(full, axes)]) < 0.3, -np.inf, 0.0)


def gradients_of(module, grad, q, k, v, found, score_options, mask=None) -> list[np.ndarray]:
    written = poisoned(q, k, v)
    assert module.attention_backward(grad, q, k, v, *found, score_options, *written, mask) is None
    return written


def row_gradients_of(module, grad, q, k, v, score_options, mask) -> list[np.ndarray]:
    written = poisoned(q, k, v)
    functions = cubes, cubes_backward
    module.row_attention_backward(grad, q, k, v, score_options, *functions, *written, mask)
    return written


def assert_all_close(actual, expected, rtol=1e-9, atol=1e-11) -> None:
    for value, expected_value in zip(actual, expected, strict=True):
        np.testing.assert_allclose(value, expected_value, rtol, atol)


@pytest.fixture
def three_threads(monkeypatch):
    """Use three threads and blocks so small that every thread gets some."""
    monkeypatch.setattr(threads, "n_threads", lambda: 3)
    monkeypatch.setattr(cpu_attention, "MAX_BATCHED_SCORES", 0)
    monkeypatch.setattr(chunks, "CHUNK_SIZE", 64)
    monkeypatch.setattr(attention_blocks, "KEY_BLOCK", 40)
    monkeypatch.setattr(attention_blocks, "QUERY_BLOCK", 32)


# -------------------------------------------------------------------- reference kernels
def assert_gradients_match_finite_differences(function, slopes, arrays, directions) -> None:
    """Compare the directional derivative of function(*arrays) with central differences."""
    step = 1e-6
    ahead, behind = (function(*(a + s * d for a, d in zip(arrays, directions))) for s in (step, -step))
    actual = sum((slope * direction).sum() for slope, direction in zip(slopes, directions))
    np.testing.assert_allclose(actual, (ahead - behind) / (2 * step), 1e-6, 1e-7)


@pytest.mark.parametrize("sizes", [Sizes(1, 3, 7, 6, 2, 4), Sizes(2, 6, 4, 2, 2, 3), Sizes(1, 4, 4, 3, 1, 2)], ids=str)
@pytest.mark.parametrize("axes", MASKS[:1] + MASKS[3:])
def test_reference_matches_an_explicit_loop_and_finite_differences(sizes, axes, rng):
    """Values have another size than keys."""
    q, k, _ = qkv(rng, sizes)
    arrays, mask = [q, k, rng.standard_normal((*k.shape[:3], 5))], new_mask(rng, sizes, axes)
    grad = rng.standard_normal((*q.shape[:3], 5))
    directions = [rng.standard_normal(array.shape) for array in arrays]
    for options in scorings(sizes):
        scores = reference.attention_scores(q, k, options, mask)
        np.testing.assert_allclose(scores, loop_scores(q, k, options, mask), 1e-12, 1e-14)
        for off_by_one in (False, True):
            found = reference.attention(*arrays, options, off_by_one, mask)
            assert_all_close(found, loop_attention(*arrays, options, off_by_one, mask), 1e-12, 1e-14)
        loss = lambda *qkv, options=options: (reference.attention(*qkv, options, True, mask)[0] * grad).sum()
        slopes = gradients_of(reference, grad, *arrays, found, options, mask)
        assert_gradients_match_finite_differences(loss, slopes, arrays, directions)
        loss = lambda *qkv, options=options: (reference.row_attention(*qkv, options, cubes, mask) * grad).sum()
        slopes = row_gradients_of(reference, grad, *arrays, options, mask)
        assert_gradients_match_finite_differences(loss, slopes, arrays, directions)


def hidden(n_queries: int, n_keys: int, score_options: ScoreOptions) -> np.ndarray:
    """Return (T, S) booleans: True where a key is hidden from a query."""
    q, k = np.zeros((1, n_queries, 1, 1)), np.zeros((1, n_keys, 1, 1))
    return np.isneginf(reference.attention_scores(q, k, score_options)[0, 0])


def test_causal_and_window_masks_hide_the_expected_keys():
    assert hidden(2, 3, ScoreOptions(1.0, 1)).tolist() == [[False, False, True], [False, False, False]]
    assert hidden(2, 3, ScoreOptions(1.0, 1, 1)).tolist() == [[True, False, True], [True, True, False]]
    assert not hidden(2, 3, ScoreOptions(1.0)).any()


def test_visible_ranges_agree_with_the_mask():
    """Ranges of visible keys agree with the mask that the score options imply."""
    for n_queries, n_keys, offset, window in product((0, 1, 3, 5), (0, 1, 4, 6), (None, -7, -2, 0, 3, 9), (None, 1, 3)):
        score_options = ScoreOptions(1.0, offset, None if offset is None else window)
        is_visible = ~hidden(n_queries, n_keys, score_options)
        queries = queries_with_keys(score_options, n_queries, n_keys)
        assert list(range(n_queries)[queries]) == np.flatnonzero(is_visible.any(axis=1)).tolist()
        if queries.start < queries.stop:
            keys = visible_keys(score_options, queries, n_keys)
            assert list(range(n_keys)[keys]) == np.flatnonzero(is_visible.any(axis=0)).tolist()
            block_options = block_score_options(score_options, queries.start, keys.start)
            part = hidden(n_queries - queries.start, n_keys - keys.start, block_options)
            assert (part != is_visible[queries.start :, keys.start :]).all()


# -------------------------------------------------------------------- CPU kernels
@pytest.mark.nightly_except(4)
@pytest.mark.parametrize("axes", MASKS, ids=str)
@pytest.mark.parametrize("sizes", [*SHARED, Sizes(2, 37, 37, 2, 2, 3), Sizes(1, 70, 45, 3, 3, 2)], ids=str)
def test_multithreaded_attention_matches_the_reference(sizes, axes, three_threads, rng):
    """Test every offset, window and softcap, with blocks so small that mask edges fall anywhere in them."""
    q, k, v = qkv(rng, sizes)
    grad, mask = rng.standard_normal(q.shape), new_mask(rng, sizes, axes)
    for i, score_options in enumerate(scorings(sizes)):
        expected = reference.attention(q, k, v, score_options, i % 3 == 0, mask)
        assert_all_close(kernels.attention(q, k, v, score_options, i % 3 == 0, mask), expected)
        actual = gradients_of(kernels, grad, q, k, v, expected, score_options, mask)
        assert_all_close(actual, gradients_of(reference, grad, q, k, v, expected, score_options, mask))
        actual = row_kernels.row_attention(q, k, v, score_options, cubes, mask)
        np.testing.assert_allclose(actual, reference.row_attention(q, k, v, score_options, cubes, mask), 1e-9, 1e-11)
        actual = row_gradients_of(row_kernels, grad, q, k, v, score_options, mask)
        assert_all_close(actual, row_gradients_of(reference, grad, q, k, v, score_options, mask))


def test_queries_without_visible_keys_give_zeros(rng):
    """The first queries have negative positions; the windows of the last ones start after the last key."""
    q, k, v = qkv(rng, Sizes(2, 40, 20, 2, 1, 3))
    score_options = ScoreOptions(1.0, -3, 5)
    for module, off_by_one in product((reference, kernels), (True, False)):
        out, logsumexp = module.attention(q, k, v, score_options, off_by_one)
        empty = [*range(3), *range(27, 40)]
        assert not out[:, empty].any() and out[:, 3:27].all()
        assert (logsumexp[:, :, empty] == (0 if off_by_one else -np.inf)).all()
        dq, *_ = gradients_of(module, rng.standard_normal(q.shape), q, k, v, (out, logsumexp), score_options)
        assert not dq[:, empty].any() and dq[:, 5:20].all()


@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("window", [None, 1])
def test_more_queries_than_keys_of_a_cache(is_quantized, window, rng):
    q = rng.standard_normal((1, 5, 2, 16), np.float32)
    k, v = rng.standard_normal((2, 1, 3, 1, 16), np.float32)
    score_options = ScoreOptions(0.7, -2, window)
    keys, values = k, v
    if is_quantized:
        keys, values = QuantizedHeads.allocate(k, 3), QuantizedHeads.allocate(v, 3)
        keys[:], values[:] = k, v
        k, v = keys.dequantize(), values.dequantize()
    for off_by_one in (False, True):
        found = (quantized_attention if is_quantized else kernels.attention)(q, keys, values, score_options, off_by_one)
        expected = reference.attention(q, k, v, score_options, off_by_one)
        assert_all_close(*(((found,), expected[:1]) if is_quantized else (found, expected)), 1e-5, 1e-6)


@pytest.mark.parametrize("n_queries", [1, 40])
def test_keys_outside_all_windows_are_not_read(n_queries, rng):
    """A KV cache holds many more keys than a window; the keys outside are NaN here."""
    q, k, v = qkv(rng, Sizes(1, n_queries, 700, 4, 2, 3))
    score_options, first = ScoreOptions(0.5, 600, 16), 600 - 16 + 1
    stop = 600 + n_queries
    expected = reference.attention(q, k, v, score_options, False)
    expected_gradients = gradients_of(reference, q, q, k, v, expected, score_options)
    for array in (k, v):
        array[:, :first] = np.nan
        array[:, stop:] = np.nan
    actual = kernels.attention(q, k, v, score_options, False)
    assert_all_close(actual, expected)
    assert_all_close(gradients_of(kernels, q, q, k, v, actual, score_options), expected_gradients)
    rows = row_kernels.row_attention(q, k, v, score_options, kernels.softmax)
    np.testing.assert_allclose(rows, expected[0], 1e-9)


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("offset, window, place", [(0, None, 399), (0, 30, 100)])
def test_keys_that_are_not_finite_change_only_queries_that_attend_to_them(value, offset, window, place, rng):
    q, k, v = qkv(rng, Sizes(1, 400, 400, 2, 2, 8))
    score_options = ScoreOptions(0.5, offset, window)
    expected = cpu_attention.attention(q, k, v, score_options, False)[0]
    k[:, place] = value
    changed = np.arange(place, 400 if window is None else place + window)
    with np.errstate(invalid="ignore"):
        found = cpu_attention.attention(q, k, v, score_options, False)[0]
    assert_all_close([np.delete(found, changed, axis=1)], [np.delete(expected, changed, axis=1)])


def peak_memory(n_tokens: int, score_options: ScoreOptions, rng) -> int:
    """Return the peak memory of forward and backward, in bytes."""
    q, k, v = (array.astype(np.float32) for array in qkv(rng, Sizes(1, n_tokens, n_tokens, 2, 1, 8)))
    tracemalloc.start()
    found = kernels.attention(q, k, v, score_options, False)
    gradients_of(kernels, q, q, k, v, found, score_options)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize("window, cap", [(50, None), (None, 20.0), (50, 20.0)])
def test_attention_memory_grows_linearly_with_tokens(window, cap, monkeypatch, rng):
    """Four times the tokens take at most about four times the memory: a matrix of scores would take sixteen times.

    Uses one thread: the number of blocks held at once depends on the load of the machine.
    """
    monkeypatch.setattr(threads, "n_threads", lambda: 1)
    few, many = (peak_memory(n_tokens, ScoreOptions(0.5, 0, window, cap), rng) for n_tokens in (1500, 6000))
    assert many < 4.5 * few
    assert many < 6000 * 6000


def test_sliding_window_computes_fewer_scores(monkeypatch, rng):
    """With 2,048 tokens, causal attention computes 1,088 scores per token; with a window of 64, 128 + 63 suffice."""
    score_counts = []
    original = cpu_attention._Heads.softcapped_scores

    def counted(heads, block, is_visible):
        scores = original(heads, block, is_visible)
        score_counts.append(scores.size)
        return scores

    monkeypatch.setattr(cpu_attention._Heads, "softcapped_scores", counted)
    q, k, v = qkv(rng, Sizes(1, 2048, 2048, 2, 2, 2))
    numbers = []
    for window in (None, 64):
        score_counts.clear()
        found = kernels.attention(q, k, v, ScoreOptions(1.0, 0, window), False)
        gradients_of(kernels, q, q, k, v, found, ScoreOptions(1.0, 0, window), None)
        numbers.append(sum(score_counts))
    assert numbers[1] * 5 < numbers[0]


# -------------------------------------------------------------------- against PyTorch, and extreme values
def test_softcap_and_sliding_window_match_gemma2(rng):
    """Compare with Gemma 2's eager attention with a sliding window, a softcap and shared key heads."""
    torch = pytest.importorskip("torch")
    gemma = pytest.importorskip("transformers.models.gemma2.modeling_gemma2")
    q, k, v = qkv(rng, Sizes(2, 30, 30, 4, 2, 8))
    module = torch.nn.Module()
    module.num_key_value_groups, module.layer_idx = 2, 0
    positions = np.arange(30)
    is_visible = (positions <= positions[:, None]) & (positions > positions[:, None] - 7)
    mask = torch.tensor(np.where(is_visible, 0, -np.inf))[None, None]
    tensors = [torch.tensor(a.transpose(0, 2, 1, 3)) for a in (q, k, v)]
    expected, _ = gemma.eager_attention_forward(module.eval(), *tensors, mask, scaling=0.3, softcap=2.0)
    for kernel in (kernels.attention, reference.attention):
        actual, _ = kernel(q, k, v, ScoreOptions(0.3, 0, 7, 2.0), False)
        np.testing.assert_allclose(actual, expected.numpy(), 1e-6, 1e-7)  # their softmax computes in float32


@pytest.mark.parametrize("n_queries", [5, 40])
def test_gradients_are_written_into_slices_of_a_packed_array(n_queries, rng):
    """Pass dq, dk and dv as slices of one NaN array, as SelfAttention does; the rest of it is unchanged."""
    q, k, v = qkv(rng, Sizes(2, n_queries, n_queries, 6, 2, 4))
    score_options = ScoreOptions(0.5, 0, 9)
    found = kernels.attention(q, k, v, score_options, False)
    expected = gradients_of(reference, q, q, k, v, found, score_options)
    packed = np.full((2, n_queries, 11, 4), np.nan)
    kernels.attention_backward(q, q, k, v, *found, score_options, packed[:, :, :6], packed[:, :, 6:8], packed[:, :, 9:])
    assert_all_close([packed[:, :, :6], packed[:, :, 6:8], packed[:, :, 9:]], expected)
    assert np.isnan(packed[:, :, 8]).all()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("n_tokens", [4, 40])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("off_by_one", [True, False])
@pytest.mark.parametrize("cap", [None, 30.0, 1000.0])
def test_attention_is_finite_for_very_large_scores(n_tokens, dtype, off_by_one, cap, rng):
    q, k, v = (array.astype(dtype) for array in qkv(rng, Sizes(1, n_tokens, n_tokens, 1, 1, 2)))
    score_options = ScoreOptions(0.7, 0, 3, cap)
    found = kernels.attention(q * dtype(1e6), k * dtype(1e6), v, score_options, off_by_one)
    assert all(np.isfinite(array).all() for array in found)
    assert np.abs(found[0]).max() <= np.abs(v).max() * (1 + 1e-5)
    slopes = gradients_of(kernels, q, q * dtype(1e6), k * dtype(1e6), v, found, score_options)
    assert all(np.isfinite(slope).all() for slope in slopes)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("factor", [30.0, 1000.0])
@pytest.mark.parametrize(
    "sizes", [Sizes(1, 40, 40, 2, 2, 4), Sizes(2, 300, 300, 2, 1, 8), Sizes(1, 20, 1500, 2, 2, 3)], ids=str
)
@pytest.mark.parametrize("off_by_one", [True, False])
@pytest.mark.parametrize("window", [None, 200])
def test_attention_matches_the_reference_for_large_scores(sizes, factor, off_by_one, window, rng):
    """Only some blocks must subtract the largest score before exponentiation."""
    q, k, v = qkv(rng, sizes)
    q[:, sizes.queries // 2 :] *= factor
    score_options = ScoreOptions(0.5, sizes.keys - sizes.queries, window)
    expected = reference.attention(q, k, v, score_options, off_by_one)
    assert_all_close(kernels.attention(q, k, v, score_options, off_by_one), expected, 1e-9, 1e-12)
    grad = rng.standard_normal(q.shape)
    expected_gradients = gradients_of(reference, grad, q, k, v, expected, score_options)
    for actual, expected_value in zip(
        gradients_of(kernels, grad, q, k, v, expected, score_options), expected_gradients
    ):
        np.testing.assert_allclose(actual, expected_value, 1e-7, 1e-9 * np.abs(expected_value).max())


def test_short_sequences_are_batched_per_chunk(monkeypatch, rng):
    monkeypatch.setattr(threads, "n_threads", lambda: 2)
    monkeypatch.setattr(chunks, "CHUNK_SIZE", 2 * 20 * 20 * 2)
    q, k, v = qkv(rng, Sizes(9, 20, 20, 2, 1, 3))
    whole_mask = np.where(rng.random((9, 1, 1, 20)) < 0.3, -np.inf, 0)
    batch_sizes, original = [], reference.attention
    noting = lambda q, *others: batch_sizes.append(len(q)) or original(q, *others)
    monkeypatch.setattr(kernels.attention, "reference", noting)
    score_options = ScoreOptions(0.5, 0)
    for mask in (None, whole_mask, whole_mask[:1]):
        batch_sizes.clear()
        actual = kernels.attention(q, k, v, score_options, False, mask)
        assert sorted(batch_sizes) == [1, 2, 2, 2, 2]
        expected = original(q, k, v, score_options, False, mask)
        assert_all_close(actual, expected, 1e-12, 1e-14)
        expected_gradients = gradients_of(reference, q, q, k, v, expected, score_options, mask)
        assert_all_close(gradients_of(kernels, q, q, k, v, actual, score_options, mask), expected_gradients)


def test_empty_batch_queries_or_keys_give_zeros(rng):
    for sizes in (Sizes(0, 20, 20, 2, 1, 3), Sizes(2, 0, 20, 2, 1, 3), Sizes(2, 20, 0, 2, 1, 3)):
        q, k, v = qkv(rng, sizes)
        for module, score_options in product((reference, kernels), (ScoreOptions(1.0), ScoreOptions(1.0, 0, 3, 5.0))):
            out, logsumexp = module.attention(q, k, v, score_options, True)
            assert out.shape == q.shape and not out.any() and not logsumexp.any()
            slopes = gradients_of(module, q, q, k, v, (out, logsumexp), score_options)
            assert not any(slope.any() for slope in slopes)
