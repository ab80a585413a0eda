"""KV caches in int8: their rounding, their memory, and generation with them, compared with float32 caches."""

from dataclasses import replace

import numpy as np
import pytest
from attention_cases import normal
from fake_device import FakeArray
from test_decoding import CONFIGS, all_at_once, new_model, text_of
from test_fake_device import device  # noqa: F401  (a fixture)

from tricycle import kernels
from tricycle.attention import KeyValueCache
from tricycle.debug import use_reference
from tricycle.decoding.batch import generate_batch
from tricycle.decoding.prompt_lookup import generate_prompt_lookup
from tricycle.decoding.ragged import next_logits, select_items
from tricycle.decoding.speculative import SpeculativeState
from tricycle.generate import DecodingState, generate
from tricycle.kernels import ScoreOptions
from tricycle.kernels.quantized_heads import QuantizedHeads, quantized_attention
from tricycle.sampling import SamplingParams
from tricycle.tensor import Tensor
from tricycle_accelerators import compiled
from tricycle_accelerators.compiled import attention

NAMES = "gpt-2 rotary window caps softmax1 blocks sink adaptive".split()
NAMES += ["shared key heads", "one key head", "window in some layers", "nothing in a window", "both shifts"]


def quantized(x: np.ndarray, n_tokens: int | None = None) -> QuantizedHeads:
    heads = QuantizedHeads.allocate(x, n_tokens or x.shape[1])
    heads[:, : x.shape[1]] = x
    return heads[:, : x.shape[1]]


# -------------------------------------------------------------------- rounding
@pytest.mark.parametrize(("size", "n_blocks"), [(64, 2), (80, 4), (6, 1), (37, 1), (1, 1), (256, 8)])
@pytest.mark.parametrize("factor", [1.0, 1e-30, 1e-40, 1e30])
def test_elements_are_rounded_to_steps_of_their_block(size, n_blocks, factor):
    x = normal(2, 5, 3, size) * np.float32(factor)
    x[0, 1] = 0
    x[..., 0] *= 100  # only its own block has larger steps
    heads = quantized(x)
    assert heads.shape == x.shape and heads.scales.shape == (2, 5, 3, n_blocks)
    found, blocks = heads.dequantize(), x.reshape(2, 5, 3, n_blocks, -1)
    assert found.dtype == np.float32 and (found[0, 1] == 0).all()
    steps = np.abs(blocks).max(-1, keepdims=True) / 127 * (1 + 2.0**-7) + np.float32(1e-40)
    assert (np.abs(found.reshape(blocks.shape) - blocks) <= steps * 0.501).all()
    assert 126 <= np.abs(heads.values).max() <= 127 or factor < 1e-38


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_elements_make_their_block_nan(bad):
    x = normal(1, 3, 2, 64)
    x[0, 1, 0, 40] = bad
    with np.errstate(all="raise"):
        found = quantized(x).dequantize()
    expected = np.zeros(x.shape, bool)
    expected[0, 1, 0, 32:] = True
    np.testing.assert_array_equal(np.isnan(found), expected)
    model = new_model(CONFIGS["shared key heads"])
    model.blocks[1].attention.qkv.weights.array[3, 5] = bad
    assert not np.isfinite(DecodingState(model, "int8").logits([1, 2, 3])).any()


def test_memory_is_about_a_quarter_of_float32():
    n_bytes = {}
    for dtype in ("float32", "float16", "int8"):
        cache = KeyValueCache(1000, dtype)
        for _ in range(10):
            cache.append(normal(1, 70, 3, 64), normal(1, 70, 3, 64))
        n_bytes[dtype] = cache._keys.nbytes + cache._values.nbytes
    assert n_bytes["float32"] == 2 * n_bytes["float16"] == 2 * 1000 * 3 * 64 * 4
    assert 0.25 < n_bytes["int8"] / n_bytes["float32"] < 0.28


# -------------------------------------------------------------------- caches
@pytest.mark.parametrize("window", [None, 1, 50])
def test_cache_holds_the_same_tokens_as_a_float32_cache(window):
    """Appending, growth, dropping of tokens, truncation, pinned positions and selection of items."""
    rng = np.random.default_rng(0)
    caches = [KeyValueCache(3000, dtype, window) for dtype in ("float32", "int8")]
    tokens = normal(2, 3000, 2, 6, seed=1)
    while caches[0].length < 2900:
        start = caches[0].length
        new = tokens[:, start : start + int(rng.choice([1, 1, 1, 16, 90]))]
        expected, found = (cache.append(new, -new) for cache in caches)
        for plain, narrow in zip(expected, found):
            np.testing.assert_allclose(narrow.dequantize(), plain, atol=0.02)
        length = max(0, caches[0].length - int(rng.integers(0, 64)))
        for cache in caches:
            cache.pin(length if rng.random() < 0.1 else None)
        assert caches[0].can_truncate(length) == caches[1].can_truncate(length)
        if caches[0].can_truncate(length) and rng.random() < 0.3:
            for cache in caches:
                cache.truncate(length)
    chosen = select_items(caches[1], np.array([1, 1, 0]))
    np.testing.assert_array_equal(chosen.keys.dequantize(), caches[1].keys.dequantize()[[1, 1, 0]])
    held = caches[1].keys.dequantize()
    chosen.append(tokens[[0, 0, 0], :1], tokens[[0, 0, 0], :1])
    np.testing.assert_array_equal(caches[1].keys.dequantize(), held)


# -------------------------------------------------------------------- generation
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_near_those_of_a_float32_cache(name):
    model = new_model(CONFIGS[name])
    tokens = text_of(model, 20)
    expected = all_at_once(model, tokens)[8:]
    caches = model.new_caches("int8")
    parts = [tokens[:9], *([token] for token in tokens[9:17]), tokens[17:]]
    logits = np.concatenate([next_logits(model, [part], [caches], every=True) for part in parts])[8:]
    assert 0 < np.abs(logits - expected).max() < 0.03 * np.abs(expected).max()
    assert {cache.keys.dtype.name for cache in caches} == {"int8"}
    state = SpeculativeState(model, "int8")
    state.logits([*tokens[:15], 3, 4])
    after = state.logits(tokens)  # the last two are removed, or with token shifts all
    np.testing.assert_allclose(after, logits[-1], atol=0.03 * np.abs(expected).max())
    assert state.fork(10).tokens == (tokens[:10] if state.can_truncate else [])


@pytest.mark.nightly_except(4)
@pytest.mark.parametrize("name", ["rotary", "shared key heads", "window", "caps", "softmax1", "blocks", "token shift"])
@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 0.9, "seed": 3}])
def test_draft_tokens_and_batches_change_nothing(name, settings):
    model = new_model(replace(CONFIGS[name], context_window=80))
    prompts = [[1, 2, 3, 1, 2, 3, 1, 2], text_of(model, 12), [5]]
    sampling = [SamplingParams(**settings) for _ in prompts]
    expected = [list(generate(model, p, 40, s, state=DecodingState(model, "int8"))) for p, s in zip(prompts, sampling)]
    states = [SpeculativeState(model, "int8") for _ in prompts]
    found = [
        list(generate_prompt_lookup(model, p, 40, s, state=state, n_draft_tokens=5))
        for p, s, state in zip(prompts, sampling, states)
    ]
    assert found == expected
    ragged = [model.new_caches("int8") for _ in prompts]
    together = next_logits(model, prompts, ragged)
    alone = [DecodingState(model, "int8").logits(prompt) for prompt in prompts]
    np.testing.assert_allclose(together, alone, rtol=1e-3, atol=0.02 * np.abs(alone).max())
    assert len(generate_batch(model, prompts, 5)) == 3


def test_more_tokens_are_recomputed_with_caches_of_fewer_bits(monkeypatch):
    """A key that is rounded to another int8 number changes logits far more than the rounding of float32 does."""
    model, prompt = new_model(replace(CONFIGS["rotary"], context_window=80)), [1, 2, 3, 1, 2, 3, 1, 2]
    recompute, n_recomputed = SpeculativeState.recompute_logits, {None: 0, "float16": 0, "int8": 0}

    def counted(state, text):
        n_recomputed[state.dtype] += 1
        return recompute(state, text)

    monkeypatch.setattr(SpeculativeState, "recompute_logits", counted)
    for dtype in n_recomputed:
        for seed in range(3):
            sampling, state = SamplingParams(temperature=0.3, seed=seed), SpeculativeState(model, dtype)
            list(generate_prompt_lookup(model, prompt, 60, sampling, state=state))
    assert n_recomputed[None] < n_recomputed["float16"] < n_recomputed["int8"]


# -------------------------------------------------------------------- attention
@pytest.fixture
def calls(monkeypatch) -> list[tuple[int, ...]]:
    """The shapes of the queries of each call of the kernel for quantized keys."""
    shapes = []
    plain = kernels.quantized_heads.quantized_attention

    def counted(q, *args):
        shapes.append(q.shape)
        return plain(q, *args)

    monkeypatch.setattr(kernels.quantized_heads, "quantized_attention", counted)
    return shapes


@pytest.mark.parametrize(("name", "n_calls"), [("gpt-2", 3), ("nothing in a window", 3), ("blocks", 0), ("sink", 0)])
def test_kernel_is_called_for_softmax_and_softmax1(name, n_calls, calls):
    model = new_model(CONFIGS[name])
    DecodingState(model, "int8").logits([1, 2, 3])
    assert len(calls) == n_calls


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("off_by_one", [False, True])
@pytest.mark.parametrize(("n_heads", "key_heads", "size", "n_keys"), [(6, 2, 8, 9), (4, 4, 64, 70), (3, 1, 80, 33)])
def test_compiled_attention_matches_reference(window, off_by_one, n_heads, key_heads, size, n_keys):
    if compiled.unavailable_reason():
        pytest.skip("Numba is not available")
    q, (k, v) = 3 * normal(2, 4, n_heads, size), normal(2, 2, n_keys, key_heads, size, seed=1)
    keys, values = quantized(k, n_keys + 9), quantized(v, n_keys + 9)
    options = ScoreOptions(size**-0.5, n_keys - 4, window)
    found = attention.quantized_attention(q, keys, values, options, off_by_one)
    exact = [x.astype(np.float64) for x in (q, keys.dequantize(), values.dequantize())]
    expected, _ = kernels.attention.reference(*exact, options, off_by_one)
    np.testing.assert_allclose(found, expected, 1e-5, 1e-6)
    with use_reference():
        np.testing.assert_allclose(quantized_attention(q, keys, values, options, off_by_one), expected, 1e-5, 3e-6)
    one, cut = options._replace(offset=n_keys - 4), slice(None, n_keys - 3)
    alone = attention.quantized_attention(q[:, :1], keys[:, cut], values[:, cut], one, off_by_one)
    np.testing.assert_array_equal(alone, found[:, :1])


def test_compiled_attention_declines_what_it_cannot_compute():
    q, keys = normal(1, 2, 2, 8), quantized(normal(1, 5, 2, 8))
    options = ScoreOptions(0.3, 3)
    wrong = [
        (q, keys, options._replace(softcap=1.0), "soft-cap"),
        (q, keys, options._replace(offset=None), "last keys"),
        (q, keys, options._replace(offset=1), "last keys"),
        (normal(1, 17, 2, 8), quantized(normal(1, 20, 2, 8)), options, "17"),
        (q.astype(np.float64), keys, options, "float64"),
        (q.astype(np.float16), keys, options, "float16"),
    ]
    for queries, held, others, reason in wrong:
        assert reason in attention.quantized_attention.decline_reason(queries, held, held, others, False)
        result = quantized_attention(queries, held, held, others, False)
        expected = kernels.attention(queries, held.dequantize(), held.dequantize(), others, False)[0]
        np.testing.assert_allclose(result, expected, 1e-5, 1e-6)
    reason = attention.quantized_attention.decline_reason
    for queries, values in ((normal(1, 2, 3, 8), keys), (normal(1, 2, 2, 4), keys), (q, keys[:, 1:])):
        assert "fit" in reason(queries, keys, values, options, False)


def test_masks_and_gradients_of_queries_use_float32_keys(calls):
    op = new_model(CONFIGS["gpt-2"]).blocks[0].attention.attention
    q, keys = Tensor(normal(1, 2, 4, 4)), quantized(normal(1, 5, 4, 4))
    mask = np.array([[True, False, True, True, True]])
    float_keys = Tensor(keys.dequantize(), False)
    narrow = Tensor(keys, False)
    np.testing.assert_allclose(op(q, narrow, narrow, mask).array, op(q, float_keys, float_keys, mask).array, 1e-6)
    op(q, narrow, narrow).backward()
    grad = q.grad.array.copy()
    q.grad = None
    op(q, float_keys, float_keys).backward()
    np.testing.assert_array_equal(grad, q.grad.array)
    assert calls == []


def test_generation_on_a_device(device):  # noqa: F811
    """All arrays of the cache are on the device: the fake device rejects others."""
    for name in ("shared key heads", "window"):
        model = new_model(CONFIGS[name])
        expected = DecodingState(model, "int8").logits([1, 2, 3])
        model.to_gpu()
        state = DecodingState(model, "int8")
        state.logits([1, 2])
        np.testing.assert_allclose(state.logits([1, 2, 3]), expected, rtol=1e-3, atol=1e-3)
        assert {type(cache.keys.values) for cache in state.caches} == {FakeArray}
        assert select_items(state.caches[0], np.array([0, 0])).keys.shape[0] == 2
