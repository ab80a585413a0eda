"""Attention as pure functions, rotary positions and the cache of keys and values."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from packed_attention import CrossAttention, SelfAttention, apply_rope, split_heads
from tables import bad_input
from test_layers import check_layer_gradients

from tricycle.attention import (
    Attention,
    KeyShift,
    KeyValueCache,
    Rotary,
    RotaryScaling,
    TokenShift,
    causal_mask,
    length_mask,
    scores_and_weights,
)
from tricycle.attention.scaling import LongRotaryScaling
from tricycle.configs import ModelConfig
from tricycle.debug import use_reference
from tricycle.decoding.ragged import select_items
from tricycle.extra_ops import log, split_sizes
from tricycle.functions import Softmax
from tricycle.kernels.row_attention import attention_scores
from tricycle.models import GPT
from tricycle.optimisers import AdamW
from tricycle.sequences.attentions import (
    AdditiveAttention,
    HardAttention,
    LuongAttention,
    ScaledDotProductAttention,
    reinforce,
)
from tricycle.softmaxes import SOFTMAXES, BlockSoftmax
from tricycle.tensor import record, to_tensor


# -------------------------------------------------------------------- masks
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("softmax", [*SOFTMAXES, BlockSoftmax(2, "exact")], ids=str)
@pytest.mark.parametrize("n_queries", [3, 20])
def test_fully_masked_queries_get_zeros(softmax: str, n_queries: int, rng: np.random.Generator) -> None:
    q, k, v = (to_tensor(rng.standard_normal((2, n, 8))) for n in (n_queries, 9, 9))
    scales = {"blocks": to_tensor(np.ones((2, n_queries))), "sink": to_tensor(np.zeros(2))}.get(str(softmax))
    out = CrossAttention(2, softmax)(q, k, v, scales, mask=length_mask([0, 9], 9))
    out.backward()
    assert (out.array[0] == 0).all() and (np.abs(out.array[1]).sum(axis=-1) > 0).all()
    for x in (q, k, v):
        assert (x.grad.array[0] == 0).all() and np.isfinite(x.grad.array).all()


def test_length_mask_values() -> None:
    assert length_mask([2, 0, 3], 3).tolist() == [[True, True, False], [False] * 3, [True] * 3]
    assert length_mask([], 3).shape == (0, 3)


# -------------------------------------------------------------------- rotary positions
def test_rope_scalings_match_formulas() -> None:
    speeds = 10_000.0 ** (-np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(RotaryScaling("linear", 4.0).scale_frequencies(speeds), speeds / 4)
    scaling = RotaryScaling("llama3", 8.0, 1.0, 4.0, 512)
    actual = scaling.scale_frequencies(speeds)
    lengths = 2 * math.pi / speeds
    for speed, length, scaled in zip(speeds, lengths, actual, strict=True):
        if length < 512 / 4:
            expected = speed
        elif length > 512 / 1:
            expected = speed / 8
        else:
            smooth = (512 / length - 1) / (4 - 1)
            expected = speed * ((1 - smooth) / 8 + smooth)
        assert scaled == pytest.approx(expected, rel=1e-12)
    assert (actual == speeds).any() and (actual == speeds / 8).any()


def test_yarn_keeps_fast_pairs_and_divides_slow_ones() -> None:
    """The pairs of Qwen 2.5: 32 rotations in 32,768 tokens at pair 23.7, and one at pair 39.7."""
    speeds = 1e6 ** (-np.arange(0, 128, 2) / 128)
    scaling = RotaryScaling("yarn", 4.0, 1.0, 32.0, 32_768)
    ratio = scaling.scale_frequencies(speeds) / speeds
    np.testing.assert_allclose(ratio[:24], 1, rtol=1e-12)
    np.testing.assert_allclose(ratio[40:], 1 / 4, rtol=1e-12)
    np.testing.assert_allclose(np.diff(ratio[23:41]), -0.75 / 17, rtol=1e-9)
    exact = replace(scaling, rounded=False).scale_frequencies(speeds) / speeds
    assert exact[24] < 1 and ratio[39] < exact[39] + 0.05
    np.testing.assert_array_equal(scaling.scale_frequencies(speeds[:1]), speeds[:1])


def test_longrope_depends_on_the_length_of_the_text(rng: np.random.Generator) -> None:
    scaling = LongRotaryScaling((1.0, 2.0), (3.0, 5.0), original_window=4, attention_factor=1.5)
    rotary = scaling.new_rotary(100.0, 1.0, scaling)
    x = to_tensor(rng.standard_normal((1, 6, 1, 4)))
    speeds = np.array([1, 0.1])
    for n_tokens, divisors in ((4, [1, 2]), (6, [3, 5])):
        angles = np.arange(n_tokens)[:, None] * (speeds / divisors)
        a, b = x.array[0, :n_tokens, 0, :2], x.array[0, :n_tokens, 0, 2:]
        expected = 1.5 * np.concatenate(
            [a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)], 1
        )
        np.testing.assert_allclose(rotary(x[:, :n_tokens], ((0, n_tokens),)).array[0, :, 0], expected, rtol=1e-5)
    together = rotary(x, ((3, 1), (5, 5))).array  # a short and a long text
    np.testing.assert_array_equal(together[:, :1], rotary(x[:, :1], ((3, 1),)).array)
    np.testing.assert_array_equal(together[:, 1:], rotary(x[:, 1:], ((5, 5),)).array)
    with pytest.raises(ValueError, match=r"within 4 tokens.*got 2 tokens after 3"):
        rotary(x[:, :2], ((3, 2),))
    config = {"positions": "rotary", "rotary_scaling": "longrope", "n_heads": 1, "embedding_dim": 4}
    with pytest.raises(ValueError, match=r"rotary_divisors .*2 numbers above 0"):
        GPT(ModelConfig(**config, rotary_divisors=(1.0, 2.0, 3.0)))


def test_rope_attention_depends_only_on_distance(rng: np.random.Generator) -> None:
    qkv = to_tensor(rng.standard_normal((2, 12, 24)), dtype=np.float64)
    attention = SelfAttention(2)
    expected, actual = (attention(apply_rope(qkv, 2, offset)).array for offset in (0, 1000))
    np.testing.assert_allclose(actual, expected, rtol=1e-8, atol=1e-10)
    # Without RoPE, the order of earlier tokens has no effect; with RoPE it has.
    order = [2, 0, 1, *range(3, 12)]
    shuffled = to_tensor(qkv.array[:, order], dtype=np.float64)
    np.testing.assert_allclose(attention(shuffled).array[:, -1], attention(qkv).array[:, -1], rtol=1e-9)
    assert abs(attention(apply_rope(shuffled, 2)).array - attention(apply_rope(qkv, 2)).array)[:, -1].max() > 1e-3


# -------------------------------------------------------------------- heads, windows, caps
def attention_by_rows(op: Attention, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    weights = op.softmax.row_softmax(attention_scores(q, k, op.score_options(q, k), None))
    return np.einsum("bhts,bshe->bthe", weights, v.repeat(q.shape[2] // k.shape[2], axis=2))


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 3}, {"window": 30}, {"softcap": 0.7}, {"window": 5, "softcap": 2.0, "scale": 0.2}],
    ids=str,
)
@pytest.mark.parametrize("n_heads, key_heads", [(2, 2), (6, 2), (5, 1)])
@pytest.mark.parametrize("n_queries, n_keys", [(5, 5), (150, 150), (20, 33)])
def test_windows_and_softcaps_match_row_attention(options, n_heads, key_heads, n_queries, n_keys, rng) -> None:
    q = rng.standard_normal((2, n_queries, n_heads, 4))
    k, v = (rng.standard_normal((2, n_keys, key_heads, 4)) for _ in range(2))
    op = Attention(**options)
    found = op(*(to_tensor(x, dtype=np.float64) for x in (q, k, v)))
    np.testing.assert_allclose(found.array, attention_by_rows(op, q, k, v), rtol=1e-9, atol=1e-12)


def test_gradients_of_q_k_v_share_one_array(rng) -> None:
    """So that the gradient of the product is there without a copy."""
    arrived = []
    x = to_tensor(rng.standard_normal((2, 5, 32)))
    whole = record(x.array.copy(), (x,), lambda grad, needs_grad: (arrived.append(grad) or grad,), "product")
    q, k, v = split_sizes(whole, [16, 8, 8])
    out = Attention()(split_heads(q, 4), split_heads(k, 2), split_heads(v, 2))
    out.backward()
    assert arrived[0].base is None and arrived[0].shape == (2, 5, 32)
    separate = [to_tensor(part.array.copy()) for part in (split_heads(q, 4), split_heads(k, 2), split_heads(v, 2))]
    Attention()(*separate).backward()
    expected = np.concatenate([part.grad.array.reshape(2, 5, -1) for part in separate], axis=-1)
    np.testing.assert_array_equal(x.grad.array, expected)


@pytest.mark.parametrize("reference", [True, False])
def test_large_scores_give_finite_output(reference: bool, rng: np.random.Generator) -> None:
    q, k, v = (to_tensor(100 * rng.standard_normal((1, 20, 2, 4))) for _ in range(3))
    with use_reference() if reference else nullcontext():
        out = Attention()(q, k, v)
    out.backward()
    expected = attention_by_rows(Attention(), *(x.array.astype(np.float64) for x in (q, k, v)))
    np.testing.assert_allclose(out.array, expected, rtol=1e-3, atol=1e-2)
    assert all(np.isfinite(x.grad.array).all() for x in (q, k, v))


# -------------------------------------------------------------------- token shift
@pytest.mark.parametrize(
    "make, initial, keeps",
    [(lambda: TokenShift(6), [0] * 6, lambda mix: 1), (lambda: KeyShift(2, 3), [0, 0.5, 1] * 2, lambda mix: 1 - mix)],
    ids=["token shift", "key shift"],
)
def test_shifts_mix_with_the_previous_token(make: Callable, initial: list, keeps: Callable, rng) -> None:
    x, shift = rng.standard_normal((2, 5, 6)), make()
    assert shift.mix.array.tolist() == initial
    shift.mix = to_tensor(rng.standard_normal(6), dtype=np.float64)
    mix, before = shift.mix.array, np.concatenate([np.zeros((2, 1, 6)), x[:, :-1]], axis=1)
    whole = shift(to_tensor(x, dtype=np.float64)).array
    np.testing.assert_allclose(whole, keeps(mix) * x + mix * before, 1e-12)
    check_layer_gradients(make(), x)
    cache, parts = KeyValueCache(5), []
    for piece in (slice(0, 2), slice(2, 3), slice(3, 5)):
        parts.append(shift(to_tensor(x[:, piece], dtype=np.float64), cache).array)
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)
    (last,) = select_items(cache, np.array([1, 1])).last.values()
    np.testing.assert_array_equal(last, x[[1, 1], -1:])


def test_shifted_keys_are_initialized_close_to_queries() -> None:
    """A token's query meets its like in the key behind an earlier occurrence, with first weights already."""
    config = ModelConfig(
        vocab_size=50, context_window=8, embedding_dim=64, n_heads=4, n_key_heads=2, n_layers=1, positions="none"
    )
    for key_shift, most in ((False, 0.1), (True, 0.75)):
        weights = GPT(replace(config, key_shift=key_shift)).blocks[0].attention.qkv.weights.array.reshape(64, 8, 16)
        assert weights[:, 4:6].std() == pytest.approx(0.02, rel=0.05)
        for head, queries in ((4, 0), (5, 2)):
            correlation = np.corrcoef(weights[:, queries].ravel(), weights[:, head].ravel())[0, 1]
            assert most - 0.1 < correlation + 0.05 < most + 0.1


# -------------------------------------------------------------------- the cache


@pytest.mark.parametrize("first", [20, 130])
def test_chunked_prefill_matches_one_pass(first: int, rng: np.random.Generator) -> None:
    qkv = rng.standard_normal((1, 200, 12)).astype(np.float32)
    op, cache = SelfAttention(2), KeyValueCache(200)
    parts = [op(qkv[:, :first], cache).array, op(qkv[:, first:], cache).array]
    np.testing.assert_allclose(np.concatenate(parts, axis=1), op(qkv).array, rtol=1e-4, atol=1e-5)


def test_cache_stores_arrays_without_graph(rng: np.random.Generator) -> None:
    cache = KeyValueCache(3)
    keys, values = rng.standard_normal((2, 2, 3, 1, 4))
    k, v = cache.append(keys[:, :2], values[:, :2])
    assert np.array_equal(k, keys[:, :2]) and np.array_equal(v, values[:, :2])
    k, v = cache.append(keys[:, 2:], values[:, 2:])
    assert np.array_equal(k, keys) and np.array_equal(v, values)
    out = SelfAttention(1)(to_tensor(np.ones((1, 1, 3))), KeyValueCache(1))
    assert not out.requires_grad and out.args == ()


# -------------------------------------------------------------------- bad input
def cache_of(capacity: int) -> KeyValueCache:
    """Return a cache that contains two tokens."""
    cache = KeyValueCache(capacity)
    cache.append(np.ones((1, 2, 1, 4)), np.ones((1, 2, 1, 4)))
    return cache


def ones(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    return [np.ones(shape) for shape in shapes]


def cross(n_queries: int, n_keys: int, n_values: int) -> list[np.ndarray]:
    """Return queries, keys and values of lengths that may not fit."""
    return ones((2, n_queries, 3), (2, n_keys, 3), (2, n_values, 3))


X = np.ones((1, 4, 6))


BAD = {
    "three axes": (lambda: Attention()(X, X, X), "Attention: .*query"),
    "heads that do not divide": (
        lambda: Attention()(*ones((1, 4, 3, 6), (1, 4, 2, 6), (1, 4, 2, 6))),
        r"Attention: .*query.*multiple.*\(1, 4, 2, 6\)",
    ),
    "a window of nothing": (lambda: Attention(window=0), "Attention: .*window of 1"),
    "a window without an order": (lambda: Attention(causal=False, window=3), "Attention: .*window.*causal"),
    "a cap of 0": (lambda: Attention(softcap=0.0), "Attention: .*softcap.*got 0.0"),
    "rotary shape": (lambda: Rotary()(np.ones((4, 12))), r"Rotary: .*shape.*\(4, 12\)"),
    "token shift of another width": (lambda: TokenShift(4)(np.ones((1, 2, 3))), "TokenShift: .*last axis"),
    "key shift of another width": (lambda: KeyShift(2, 2)(np.ones((1, 2, 3))), "KeyShift: .*last axis"),
    "token shift without a batch": (lambda: TokenShift(4)(np.ones((2, 4))), r"TokenShift: .*batch.*got \(2, 4\)"),
    "rotary of odd heads": (lambda: Rotary()(np.ones((1, 4, 1, 3))), "Rotary: .*even.*channels"),
    "a mask of numbers": (
        lambda: SelfAttention(2)(X, mask=np.ones((1, 4))),
        r"Attention: .*mask.*\(1, 2, 4, 4\).*float64",
    ),
    "a mask for other keys": (
        lambda: CrossAttention(1)(*cross(4, 5, 5), mask=np.ones((2, 4), bool)),
        r"Attention: .*mask.*\(2, 1, 4, 5\).*bool of \(2, 4\)",
    ),
    "a mask for another batch": (
        lambda: CrossAttention(1)(*cross(4, 5, 5), mask=np.ones((3, 5), bool)),
        r"Attention: .*mask.*bool of \(3, 5\)",
    ),
    "a mask of one axis": (
        lambda: SelfAttention(2)(X, mask=np.ones(4, bool)),
        r"Attention: .*mask.*\(1, 2, 4, 4\).*bool of \(4,\)",
    ),
    "keys and values of other lengths": (lambda: CrossAttention(1)(*cross(4, 5, 6)), r"Attention: .*\(2, 6, 1, 3\)"),
    "a length beyond the keys": (lambda: length_mask([3, 7], 5), "length_mask: .*0 to 5.*got 3 to 7"),
    "a length below 0": (lambda: length_mask([-1], 5), "length_mask: .*0 to 5.*got -1"),
    "lengths that are no whole numbers": (lambda: length_mask([1.0], 5), "length_mask: .*lengths.*whole"),
    "blocks without scales": (
        lambda: SelfAttention(2, softmax="blocks")(X),
        r"BlockSoftmax.*scales \(2, 4\).*got 4 keys.*None",
    ),
    "blocks with scales for too few": (
        lambda: SelfAttention(2, softmax="blocks")(X, None, to_tensor(np.ones((2, 3)))),
        r"BlockSoftmax.*scales \(2, 4\).*got 4 keys.*\(2, 3\)",
    ),
    "keys beyond the last block": (
        lambda: CrossAttention(1, BlockSoftmax(length=4))(*cross(2, 5, 5), to_tensor(np.ones((2, 9)))),
        r"BlockSoftmax.*scales \(2, 2\).*got 5 keys.*\(2, 9\)",
    ),
    "another batch": (lambda: cache_of(4).append(*ones((3, 1, 1, 4)) * 2), "KeyValueCache: .*batch of 1.*got 3"),
}


test_bad_input = bad_input(BAD)


def test_rejected_append_leaves_cache_unchanged() -> None:
    cache = cache_of(2)
    with pytest.raises(ValueError, match=r"KeyValueCache: .*capacity of 2"):
        cache.append(np.ones((1, 1, 1, 4)), np.ones((1, 1, 1, 4)))
    assert cache.length == 2


# -------------------------------------------------------------------- scored attention
SCORED: dict[str, Callable[[], ScaledDotProductAttention]] = {
    "scaled dot product": lambda: ScaledDotProductAttention(),
    "additive": lambda: AdditiveAttention(6, 6, 5, generator=0),
    "dot": lambda: LuongAttention(6, 6, "dot", generator=0),
    "general": lambda: LuongAttention(6, 6, "general", generator=0),
    "concat": lambda: LuongAttention(6, 6, "concat", generator=0),
    "softmax1": lambda: AdditiveAttention(6, 6, 5, "softmax1", generator=0),
}
each_scored = pytest.mark.parametrize("make", SCORED.values(), ids=SCORED)


def plain_scores(layer: ScaledDotProductAttention, q: np.ndarray, k: np.ndarray) -> float:
    """Of one query and one key, by the formula in the docstring."""
    if isinstance(layer, LuongAttention) and layer.score == "concat":
        layer = layer.concat
    if isinstance(layer, AdditiveAttention):
        hidden = np.tanh(q @ layer.query.weights.array + k @ layer.key.weights.array)
        return float((hidden @ layer.vector.weights.array)[0])
    if isinstance(layer, LuongAttention):
        return float(q @ (k if layer.score == "dot" else k @ layer.key.weights.array))
    return float(q @ k) / math.sqrt(len(q))


@each_scored
def test_scored_attention_matches_formula(make: Callable, rng: np.random.Generator) -> None:
    layer = make()
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 3, 6), (2, 4, 6), (2, 4, 7)))
    mask = np.array([[True, True, False, True], [True, False, False, False]])
    context, weights = layer(q, k, v, mask=mask, return_weights=True)
    for b in range(2):
        for t in range(3):
            e = np.array([np.exp(plain_scores(layer, q[b, t], k[b, s])) * mask[b, s] for s in range(4)])
            expected = e / (e.sum() + (layer.softmax.name == "softmax1"))
            np.testing.assert_allclose(weights.array[b, t], expected, rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(context.array[b, t], expected @ v[b], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(layer(q, k, v, mask=mask).array, context.array)


@each_scored
def test_scored_attention_gradients(make: Callable, rng: np.random.Generator) -> None:
    mask = np.array([[True, True, False, True], [False] * 4])
    q, k = rng.standard_normal((2, 3, 6)), rng.standard_normal((2, 4, 6))
    check_layer_gradients(make(), q, k, mask=mask)


@pytest.mark.filterwarnings("error")
@each_scored
def test_scored_attention_without_visible_keys_gives_zeros(make: Callable, rng: np.random.Generator) -> None:
    q, k = to_tensor(rng.standard_normal((1, 3, 6))), to_tensor(rng.standard_normal((1, 4, 6)))
    out = make()(q, k, mask=length_mask([0], 4))
    out.backward()
    assert (out.array == 0).all() and (q.grad.array == 0).all() and (k.grad.array == 0).all()


def test_additive_attention_accepts_different_query_and_key_sizes(rng: np.random.Generator) -> None:
    q, k = rng.standard_normal((2, 3, 5)), rng.standard_normal((2, 4, 9))
    for layer in (AdditiveAttention(5, 9, 7), LuongAttention(5, 9), LuongAttention(5, 9, "concat", 4)):
        assert layer(q, k).shape == (2, 3, 9)


# -------------------------------------------------------------------- hard attention
def test_hard_attention_samples_from_the_weights(rng: np.random.Generator) -> None:
    q, k = np.repeat(rng.standard_normal((1, 1, 6)), 4000, axis=1), rng.standard_normal((1, 4, 6))
    mask = np.array([[True, True, False, True]])
    hard = HardAttention(AdditiveAttention(6, 6, 5, generator=0), generator=1)
    _, weights = hard.soft(q, k, mask=mask, return_weights=True)
    out, log_probability = hard(q, k, mask=mask)
    chosen = np.abs(out.array[0][:, None] - k[0]).sum(axis=-1).argmin(axis=-1)
    np.testing.assert_allclose(out.array[0], k[0][chosen], rtol=1e-6)  # one key whole, not a mixture
    shares = np.bincount(chosen, minlength=4) / 4000
    np.testing.assert_allclose(shares, weights.array[0, 0], atol=0.03)
    np.testing.assert_allclose(np.exp(log_probability.array[0]), weights.array[0, 0][chosen], rtol=1e-5)
    best, _ = hard.eval()(q, k, mask=mask)
    np.testing.assert_allclose(best.array[0], np.repeat(k[:, weights.array[0, 0].argmax()], 4000, axis=0), rtol=1e-6)


def test_hard_attention_without_visible_keys_gives_zeros() -> None:
    out, log_probability = HardAttention(ScaledDotProductAttention())(
        np.ones((1, 2, 3)), np.ones((1, 4, 3)), mask=length_mask([0], 4)
    )
    assert (out.array == 0).all() and (log_probability.array == 0).all()


def test_reinforce_learns_the_rewarded_key(rng: np.random.Generator) -> None:
    """The values say nothing of it; only rewards do."""
    keys = rng.standard_normal((1, 5, 6))
    hard = HardAttention(AdditiveAttention(6, 6, 16, generator=0), generator=1)
    queries, optimiser, expected = np.ones((1, 64, 6)), AdamW(0.03), 0.0
    for _ in range(60):
        out, log_probability = hard(queries, keys)
        reward = (np.abs(out.array - keys[:, 3]).max(axis=-1) < 1e-4).astype(np.float32)
        reinforce(log_probability, reward, expected).backward()
        expected += 0.1 * (float(reward.mean()) - expected)
        hard.update(optimiser)
    _, weights = hard.soft(queries, keys, return_weights=True)
    assert weights.array[0, 0, 3] > 0.9


def test_reinforce_gradient_equals_gradient_of_expected_reward() -> None:
    """Summed over all choices with their probabilities, and whatever the baseline."""
    scores, rewards = to_tensor([0.3, -0.2, 0.9], dtype=float), np.array([1.0, 5.0, 2.0])
    (-(Softmax()(scores) * rewards).sum()).backward()
    expected, probabilities = scores.grad.array, Softmax()(scores).array
    for baseline in (0.0, 2.5):
        total = np.zeros(3)
        for choice in range(3):
            x = to_tensor(scores.array, dtype=float)
            reinforce(log(Softmax()(x)[choice]), rewards[choice], baseline).backward()
            total += probabilities[choice] * x.grad.array
        np.testing.assert_allclose(total, expected, rtol=1e-6)


BAD_SCORED = {
    "an unknown score": (lambda: LuongAttention(3, 3, "cosine"), "LuongAttention: .*score.*dot, general"),
    "dot of different sizes": (lambda: LuongAttention(3, 4, "dot"), "LuongAttention: .*query and key"),
    "two axes": (
        lambda: ScaledDotProductAttention()(np.ones((3, 4)), np.ones((2, 5, 4))),
        r"ScaledDotProductAttention: .*query.*\(3, 4\)",
    ),
    "values of another length": (
        lambda: AdditiveAttention(4, 4, 3)(np.ones((2, 3, 4)), np.ones((2, 5, 4)), np.ones((2, 6, 4))),
        r"AdditiveAttention: .*value.*\(2, 6, 4\)",
    ),
    "a mask of another length": (
        lambda: AdditiveAttention(4, 4, 3)(np.ones((2, 3, 4)), np.ones((2, 5, 4)), mask=np.ones((2, 6), bool)),
        r"AdditiveAttention: .*mask.*\(2, 1, 3, 5\).*got bool of \(2, 6\)",
    ),
}
test_bad_input_of_scored_attention = bad_input(BAD_SCORED)


def test_causal_mask_equals_causal_option(rng: np.random.Generator) -> None:
    assert causal_mask(2, 3).tolist() == [[[True, True, False], [True, True, True]]]
    qkv = to_tensor(rng.standard_normal((2, 5, 12)))
    masked = SelfAttention(2, causal=False)(qkv, mask=causal_mask(5))
    np.testing.assert_allclose(masked.array, SelfAttention(2)(qkv).array, 1e-5, 1e-6)
    heads = split_heads(qkv, 2)
    scores, weights = scores_and_weights(Attention(causal=False), heads, heads, mask=causal_mask(5))
    assert ((scores == -np.inf) == (weights == 0)).all() and ((weights == 0) == ~np.tri(5, dtype=bool)).all()
    x = rng.standard_normal((1, 4, 3))
    weights = ScaledDotProductAttention()(x, x, mask=causal_mask(4), return_weights=True)[1].array
    assert (weights[0][~np.tri(4, dtype=bool)] == 0).all() and (weights[0][np.tri(4, dtype=bool)] > 0).all()
