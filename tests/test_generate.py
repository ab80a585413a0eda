"""Sampling and generation against logits of full passes and against expected frequencies."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tricycle import generate as generation
from tricycle.attention import KeyValueCache
from tricycle.configs import DebugConfig
from tricycle.decoding import batch as batch_module
from tricycle.decoding import prompt_lookup, speculative
from tricycle.decoding.batch import GenerationBatch, generate_batch
from tricycle.decoding.exactness import is_certain, sample_if_certain
from tricycle.decoding.penalties import PenalizedSamplingParams, ngram_completions
from tricycle.decoding.prompt_lookup import generate_prompt_lookup
from tricycle.decoding.ragged import next_logits
from tricycle.decoding.speculative import SpeculativeState
from tricycle.generate import DecodingState, generate
from tricycle.kernels import FEW_ROWS
from tricycle.latent_attention import LatentConfig
from tricycle.models import GPT
from tricycle.sampling import SamplingParams, top_indices
from tricycle.tensor import no_grad, to_tensor
from tricycle.weights import quantize

CONFIG = DebugConfig(vocab_size=50, context_window=12, embedding_dim=16, n_layers=2, tied=False, bias=False)


def new_model(**changes) -> GPT:
    model = GPT(replace(CONFIG, **changes))
    generator = np.random.default_rng(1)
    for parameter in model.parameters():  # far from the small first weights, so that logits differ clearly
        parameter.array[...] = generator.normal(0, 1, parameter.shape)
    return model


@pytest.fixture(scope="module")
def model() -> GPT:
    return new_model()


def full_logits(model: GPT, tokens: list[int]) -> np.ndarray:
    """Return the logits after the given tokens, computed by one full pass."""
    with no_grad():
        return model.eval()(to_tensor([tokens], dtype=int)).array[0, -1]


# -------------------------------------------------------------------- generate
@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("n_prompt", [1, 5, 12])
def test_greedy_equals_argmax_of_the_full_pass(positions, n_prompt):
    """The prompt may fill the context window."""
    model = new_model(positions=positions)
    prompt, tokens = np.arange(n_prompt, dtype=np.uint16), list(range(n_prompt))
    for token in generate(model, prompt, 13 - n_prompt, temperature=0):
        assert token == full_logits(model, tokens).argmax()
        tokens.append(token)
    assert len(tokens) == 13
    assert prompt.tolist() == list(range(n_prompt))


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("window", [1, 2, 5, 12])
def test_generation_continues_past_the_context_window(positions, window):
    """When the window is full, its second half is encoded again."""
    model = new_model(positions=positions, context_window=window)
    tokens = [3]
    drawn = list(generate(model, [3], 40, temperature=0))
    assert len(drawn) == 40
    assert window < 5 or len(set(drawn)) >= 5  # so what was read matters
    n_seen = 1
    for token in drawn:
        if n_seen > window:
            n_seen = max(1, window // 2)
        assert token == full_logits(model, tokens[-n_seen:]).argmax()
        tokens.append(token)
        n_seen += 1


@pytest.mark.parametrize("function", [generate, generate_prompt_lookup])
def test_overflow_error_option_raises_at_full_context(model, function):
    plain = list(generate(model, [1, 2], 11, temperature=0))
    settings = {"temperature": 0, "overflow": "error"}
    assert list(function(model, [1, 2], 11, **settings)) == plain  # the last one is not read
    drawn = function(model, [1, 2], 12, **settings)
    assert [next(drawn) for _ in range(11)] == plain
    with pytest.raises(ValueError, match="context window of 12"):
        next(drawn)
    with pytest.raises(ValueError, match=r"overflow.*truncate.*error.*'slide'"):
        function(model, [1], 3, overflow="slide")


def test_seed_determines_the_tokens_of_a_lazy_iterator(model):
    def run(seed):
        return list(generate(model, [1], 30, SamplingParams(seed=seed)))

    assert run(1) == run(1) != run(2)
    assert run((1, 2)) == run((1, 2)) != run((1, 3))
    assert len({tuple(run(None)) for _ in range(3)}) > 1
    assert next(generate(model, [1], 10**9)) in range(50) and list(generate(model, [1], 0)) == []


def test_sampling_matches_the_full_pass(model):
    """Sampling from logits of full passes with the same generator gives the same tokens."""
    settings = {"temperature": 0.9, "top_k": 20, "top_p": 0.9}
    generator, tokens = np.random.default_rng(5), [4]
    for token in generate(model, [4], 11, SamplingParams(**settings, seed=5)):
        assert token == SamplingParams(**settings).sample(full_logits(model, tokens), generator)
        tokens.append(token)


def test_only_ids_of_the_tokeniser_are_sampled(model):
    assert max(generate(model, [1], 300, temperature=50.0)) > 7
    assert set(generate(model, [1], 300, SamplingParams(50.0, n_vocab=7))) == set(range(7))
    assert list(generate(model, [1], 5, SamplingParams(n_vocab=1))) == [0] * 5
    assert list(generate(model, [1], 9, SamplingParams(n_vocab=50))) == list(generate(model, [1], 9))


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_disabled_during_generation(training):
    model, plain = new_model(dropout=0.5), new_model().eval()
    model.train() if training else model.eval()
    assert list(generate(model, [1], 11, temperature=0)) == list(generate(plain, [1], 11, temperature=0))
    assert {layer.training for layer in model.layers()} == {training}


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([], {}, "prompt.*1 to 12 tokens.*got 0"),
        (range(13), {}, "prompt.*1 to 12 tokens.*got 13"),
        ([1], {"n_tokens": -1}, "n_tokens.*got -1"),
        ([1], {"temperature": -0.1}, r"temperature.*got -0\.1"),
        ([1], {"temperature": float("nan")}, "temperature.*got nan"),
        ([1], {"top_k": -1}, "top_k.*got -1"),
        ([1], {"top_p": 0}, "top_p.*got 0"),
        ([1], {"min_p": -0.1}, r"min_p.*got -0\.1"),
        ([1], {"no_repeat_ngram_size": -1}, "no_repeat_ngram_size.*got -1"),
        ([1], {"repetition_penalty": 0}, "repetition_penalty.*got 0"),
        ([1], {"n_vocab": 0}, "n_vocab.*got 0"),
        ([1], {"seed": -1}, "seed.*got -1"),
        ([1], {"stop_tokens": "</s>"}, "stop_tokens.*got '</s>'"),
        ([1], {"n_vocab": 51}, "n_vocab.*1 to 50.*got 51"),
    ],
)
def test_bad_settings_raise_before_sampling(model, prompt, settings, message):
    n_tokens = settings.pop("n_tokens", 3)
    with pytest.raises(ValueError, match=message):
        generate(model, prompt, n_tokens, PenalizedSamplingParams(**settings))


def test_temperature_argument_equals_sampling_params(model):
    for temperature in (0, 0.5):
        pair = [
            generate(model, [1], 30, temperature=temperature),
            generate(model, [1], 30, SamplingParams(temperature)),
        ]
        assert list(pair[0]) == list(pair[1])
    with pytest.raises(ValueError, match=r"temperature.*got -1"):
        generate(model, [1], 3, temperature=-1)
    with pytest.raises(ValueError, match=r"temperature.*SamplingParams.*both"):
        generate(model, [1], 3, SamplingParams(), temperature=0)
    with pytest.raises(TypeError, match=r"SamplingParams.*got 0.8"):
        generate(model, [1], 3, 0.8)


# -------------------------------------------------------------------- sample
LOGITS = np.log(np.array([0.1, 0.4, 0.05, 0.25, 0.2], np.float32))


def draw(logits, generator, never=(), **settings) -> int:
    return PenalizedSamplingParams(**settings, suppress_tokens=never).sample(logits, generator)


def frequencies(n: int = 4000, **settings) -> np.ndarray:
    generator = np.random.default_rng(0)
    return np.bincount([draw(LOGITS, generator, **settings) for _ in range(n)], minlength=5) / n


@pytest.mark.nightly_except(8)
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.1, 0.4, 0.05, 0.25, 0.2]),
        ({"top_k": 2}, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
        ({"top_k": 1}, [0, 1, 0, 0, 0]),
        ({"top_p": 0.6}, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
        ({"top_p": 1e-9}, [0, 1, 0, 0, 0]),
        ({"min_p": 0.61}, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
        ({"min_p": 0.3, "temperature": 0.5}, np.array([0, 0.16, 0, 0.0625, 0]) / 0.2225),
        ({"never": [1]}, np.array([0.1, 0, 0.05, 0.25, 0.2]) / 0.6),
        ({"never": [1, 3, 1], "temperature": 0}, [0, 0, 0, 0, 1]),
        ({"never": [0, 1, 2, 3, 4]}, [0.1, 0.4, 0.05, 0.25, 0.2]),
        ({"never": [1], "top_k": 2}, np.array([0, 0, 0, 0.25, 0.2]) / 0.45),
        ({"never": [1, 5, 99]}, np.array([0.1, 0, 0.05, 0.25, 0.2]) / 0.6),
        ({"temperature": 0}, [0, 1, 0, 0, 0]),
        ({"temperature": 1e-300}, [0, 1, 0, 0, 0]),
        ({"temperature": 0.5}, np.array([0.01, 0.16, 0.0025, 0.0625, 0.04]) / 0.275),
        ({"temperature": 1e9}, [0.2] * 5),
    ],
)
def test_sampled_frequencies(settings, expected):
    actual = frequencies(**settings)
    np.testing.assert_allclose(actual, expected, atol=0.03)
    assert not actual[np.array(expected) == 0].any()


@given(
    st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=20),
    st.floats(0, 1e6),
    st.integers(0, 25),
    st.floats(0, 1, exclude_min=True),
    st.floats(0, 1),
)
def test_finite_logits_give_an_allowed_token(logits, temperature, top_k, top_p, min_p):
    logits = np.array(logits, np.float32)
    token = SamplingParams(temperature, top_k, top_p, min_p).sample(logits, np.random.default_rng(0))
    assert 0 <= token < len(logits)
    n_above = (logits > logits[token]).sum()
    assert n_above < (top_k or len(logits))
    if temperature == 0:
        assert n_above == 0


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_logits_are_rejected(bad, temperature):
    with pytest.raises(ValueError, match="finite logits"):
        SamplingParams(temperature).sample(np.array([0, bad, 1], np.float32), np.random.default_rng(0))


@pytest.mark.parametrize(
    ("tokens", "size", "expected"),
    [
        ([], 3, []),
        ([1, 2], 3, []),
        ([1, 2, 3, 1, 2], 0, []),
        ([1, 2, 3, 1, 2], 3, [3]),
        ([1, 2, 3, 1, 2, 4, 1, 2], 3, [3, 4]),
        ([1, 2, 3, 2, 1], 3, []),
        ([1, 1], 3, []),
        ([1, 1, 1], 3, [1]),
        ([5, 6, 5], 1, [5, 6, 5]),
        ([5, 6, 5], 2, [6]),
    ],
)
def test_tokens_that_repeat_an_ngram(tokens, size, expected):
    assert ngram_completions(tokens, size) == ngram_completions(tuple(tokens), size) == expected


def test_prompt_may_contain_excluded_tokens(model):
    tokens = list(generate(model, [45, 1], 30, PenalizedSamplingParams(n_vocab=40, no_repeat_ngram_size=1)))
    assert len(set(tokens)) == 30 and max(tokens) < 40 and 1 not in tokens


@pytest.mark.parametrize(("size", "n"), [(1, 40), (2, 200), (4, 200)])
def test_no_ngram_is_repeated(model, size, n):
    def repeated(**settings) -> int:
        text = [1, 2, 3, *generate(model, [1, 2, 3], n, PenalizedSamplingParams(0, **settings))]
        runs = [tuple(text[i : i + size]) for i in range(len(text) - size + 1)]
        return len(runs) - len(set(runs))

    assert repeated() > 0
    assert repeated(no_repeat_ngram_size=size) == 0


# -------------------------------------------------------------------- several ends, and a penalty on repetition
def test_generation_ends_at_any_stop_token(model):
    drawn = list(generate(model, [1], 60, temperature=2.0))
    stops = [drawn[9], drawn[4], drawn[30]]
    n_until = min(map(drawn.index, stops)) + 1
    for some in (stops, tuple(stops), np.array(stops)):
        assert list(generate(model, [1], 60, SamplingParams(2.0, stop_tokens=some))) == drawn[:n_until]
    assert list(generate(model, [1], 60, SamplingParams(2.0, stop_tokens=()))) == drawn
    assert SamplingParams(1.5, np.int64(3), 0.1, stop_tokens=np.int64(3)).stop_tokens == (3,)


@pytest.mark.parametrize("penalty", [0.5, 1.3, 5.0])
def test_repetition_penalty_matches_transformers(penalty):
    processors = pytest.importorskip("transformers").generation.logits_process
    torch = pytest.importorskip("torch")
    generator = np.random.default_rng(0)
    logits, tokens = generator.normal(0, 2, 30), generator.integers(0, 30, 12)
    processor = processors.RepetitionPenaltyLogitsProcessor(penalty)
    expected = processor(torch.tensor(tokens[None]), torch.tensor(logits[None]))
    sampling = PenalizedSamplingParams(0, repetition_penalty=penalty)
    order = [replace(sampling, suppress_tokens=range(i)).sample(logits, generator, tokens) for i in range(30)]
    assert order == [int(expected[0, i:].argmax()) + i for i in range(30)]


def test_repetition_penalty_counts_prompt_and_completion(model):
    drawn = list(generate(model, [7, 8], 10, PenalizedSamplingParams(0, repetition_penalty=1e9)))
    assert len({7, 8, *drawn}) == 12
    plain = list(generate(model, [7, 8], 10, temperature=0))
    assert list(generate(model, [7, 8], 10, PenalizedSamplingParams(0, repetition_penalty=1.0))) == plain


# -------------------------------------------------------------------- decoding state
def count_reads(monkeypatch) -> list[list[int]]:
    """Record the number of tokens of each forward pass."""
    reads: list[list[int]] = []

    def counted(model, tokens, caches, every=False):
        reads.append([len(new) for new in tokens])
        return next_logits(model, tokens, caches, every)

    set_next_logits(monkeypatch, counted)
    return reads


def set_next_logits(monkeypatch, function) -> None:
    def of_one(model, tokens, caches, every=False):
        return function(model, [tokens], [caches], every)

    monkeypatch.setattr(generation, "next_logits", of_one)
    monkeypatch.setattr(speculative, "next_logits", function)


@pytest.mark.parametrize("new_state", [DecodingState, SpeculativeState])
@pytest.mark.parametrize("changes", [{}, {"token_shift": True}, {"key_shift": True}])
def test_state_processes_only_new_tokens(monkeypatch, changes, new_state):
    model = new_model(**changes)
    state, texts = new_state(model), ([1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 9], [1, 2, 9], [1], [8, 2], [8, 2, *range(10)])
    expected = [full_logits(model, text) for text in texts]
    reads = count_reads(monkeypatch)
    for text, logits in zip(texts, expected):
        np.testing.assert_allclose(state.logits(text), logits, rtol=1e-4, atol=1e-4)
        assert state.tokens == text
    assert [n for (n,) in reads] == ([3, 2, 3, 3, 1, 2, 10] if changes else [3, 2, 1, 1, 1, 2, 10])


def count_tokens_of_passes(model) -> list[int]:
    sizes: list[int] = []
    place = model.place
    model.place = lambda ids: sizes.extend(ids.shape[1:]) or place(ids)  # of positions it has one axis
    return sizes


@pytest.mark.parametrize("changes", [{}, {"positions": "rotary", "window": 5}, {"token_shift": True}, {"n_experts": 3}])
def test_long_prompt_is_processed_in_parts(monkeypatch, changes):
    model, text = new_model(**changes), list(range(11))
    expected = full_logits(model, text)
    monkeypatch.setattr(generation, "PREFILL_TOKENS", 4)
    sizes = count_tokens_of_passes(model)
    np.testing.assert_allclose(DecodingState(model).logits(text), expected, rtol=1e-4, atol=1e-4)
    assert sizes == [4, 4, 3]
    next_logits(model, [text], [model.new_caches()], every=True)
    assert sizes == [4, 4, 3, 11]


def test_longrope_prompt_is_processed_at_once(monkeypatch):
    """Its frequencies depend on the length of the whole text."""
    model = new_model(positions="rotary")
    object.__setattr__(model.config, "rotary_scaling", "longrope")
    monkeypatch.setattr(generation, "PREFILL_TOKENS", 4)
    sizes = count_tokens_of_passes(model)
    generation.next_logits(model, range(11), model.new_caches())
    assert sizes == [11]


def test_cache_allocates_memory_for_a_whole_prompt():
    cache, keys = KeyValueCache(5000), np.zeros((1, 500, 1, 1), np.float32)
    cache.expected_length = 1500
    for _ in range(3):
        cache.append(keys, keys)
        assert cache._keys.shape[1] == 1628
    cache.append(keys[:, :129], keys[:, :129])
    assert cache._keys.shape[1] == 3256


def test_conversation_is_prefilled_once(model, monkeypatch):
    state = DecodingState(model)
    text = [1, 2, 3, *generate(model, [1, 2, 3], 4, temperature=0, state=state), 5]
    fresh = list(generate(model, text, 3, temperature=0))
    reads = count_reads(monkeypatch)
    assert list(generate(model, text, 3, temperature=0, state=state)) == fresh
    assert reads == [[2], [1], [1]]  # the last token drawn had not been read


@pytest.mark.parametrize("new_state", [DecodingState, SpeculativeState])
def test_interrupted_state_restarts(model, monkeypatch, new_state):
    state = new_state(model)
    state.logits([1, 2])

    def interrupted(x):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setitem(vars(model.blocks[1].mlp), "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            state.logits([1, 2, 3])
    np.testing.assert_allclose(state.logits([1, 2, 3]), full_logits(model, [1, 2, 3]), rtol=1e-4, atol=1e-4)


def test_cache_grows_and_truncates():
    cache = KeyValueCache(1000)
    keys = np.arange(700, dtype=np.float32).reshape(1, 700, 1, 1)
    for start, stop in ((0, 10), (10, 11), (11, 300), (300, 700)):
        held, values = cache.append(keys[:, start:stop], -keys[:, start:stop])
        np.testing.assert_array_equal(held, keys[:, :stop])
        np.testing.assert_array_equal(values, -held)
    assert cache._keys.shape[1] == 1000 > 700
    cache.truncate(5)
    held, _ = cache.append(keys[:, 99:100], keys[:, 99:100])
    assert held.ravel().tolist() == [0, 1, 2, 3, 4, 99]
    for length in (-1, 7):
        with pytest.raises(ValueError, match=f"0 to 6 tokens.*got {length}"):
            cache.truncate(length)
    cache.last["token_shift"] = keys[:, :1]
    cache.truncate(6)
    with pytest.raises(ValueError, match="without token shift"):
        cache.truncate(3)


def test_sliding_window_cache_keeps_visible_tokens():
    """Each token gets its visible keys, with any chunk size, and the cache stays small."""
    rng = np.random.default_rng(0)
    for window in (1, 7, 100, 400):
        cache = KeyValueCache(5000, window=window)
        most, longest = window - 1 + 256, 0
        keys = np.arange(5000, dtype=np.float32).reshape(1, 5000, 1, 1)
        while cache.length < 5000:
            start = cache.length
            n = min(int(rng.choice([1, 1, 1, 16, 300, 1500])), 5000 - start)
            held, values = cache.append(keys[:, start : start + n], -keys[:, start : start + n])
            n_seen = min(start + n, window - 1 + n)
            np.testing.assert_array_equal(held[:, -n_seen:], keys[:, start + n - n_seen : start + n])
            np.testing.assert_array_equal(values, -held)
            assert cache._keys.shape[1] <= 2 * most
            longest = max(longest, cache.length)
            length = longest - int(rng.integers(0, 64))
            if 0 <= length <= cache.length and rng.random() < 0.5:
                assert cache.can_truncate(length)
                cache.truncate(length)
                kept = cache.keys[0, :, 0, 0]
                assert len(kept) >= min(length, window - 1)
                np.testing.assert_array_equal(kept, np.arange(length - len(kept), length))
        assert not cache.can_truncate(window)
        with pytest.raises(ValueError, match=r"position.*got 1000"):
            cache.truncate(1000)
        cache.truncate(0)
        assert cache.append(keys[:, :3], keys[:, :3])[0].ravel().tolist() == [0, 1, 2]


LATENT = {"head_size": 8, "rotary_size": 4, "value_size": 8, "latent_size": 8, "n_dense_layers": 2, "n_layers": 2}


@pytest.mark.parametrize("kind", [GPT, LatentConfig], ids=["heads", "latents"])
def test_mask_of_all_tokens_fits_caches_that_have_dropped_some(kind):
    fields = {"vocab_size": 50, "context_window": 400, "embedding_dim": 16, "n_heads": 2, "window": 5}
    config = LatentConfig(**fields, **LATENT) if kind is LatentConfig else replace(CONFIG, **fields)
    model, rng = GPT(replace(config, full_layers=(0,), positions="rotary")), np.random.default_rng(0)
    tokens, mask = rng.integers(0, 50, (2, 330)), rng.random((2, 330)) < 0.9
    with model.evaluating():
        expected, caches, parts = model(tokens, mask=mask).array, model.new_caches(), []
        for start, stop in ((0, 290), (290, 291), (291, 292), (292, 330)):
            parts.append(model(tokens[:, start:stop], caches, mask=mask[:, :stop]).array)
    assert caches[1].keys.shape[1] < 290
    np.testing.assert_allclose(np.concatenate(parts, axis=1), expected, 1e-3, 1e-5)


def test_sliding_window_cache_truncates_to_stored_tokens():
    cache = KeyValueCache(5000, window=7)
    keys = np.arange(5000, dtype=np.float32).reshape(1, 5000, 1, 1)
    cache.append(keys[:, :500], keys[:, :500])
    for pinned in (500, None):
        cache.pin(pinned)
        for start in range(500, 1500, 10):
            cache.append(keys[:, start : start + 10], keys[:, start : start + 10])
        assert cache.can_truncate(500) == bool(pinned)
        if pinned:
            cache.truncate(500)
            assert cache.keys[0, :, 0, 0][-6:].tolist() == [494, 495, 496, 497, 498, 499]


@pytest.mark.nightly_except(2)
@pytest.mark.parametrize("n_draft_tokens", [0, 5])
@pytest.mark.parametrize("changes", [{}, {"full_layers": (1,)}, {"softmax": "softmax1"}, {"softmax": "blocks"}])
def test_sliding_window_generation_matches_the_full_pass(changes, n_draft_tokens):
    """Generate several windows of text, part of it in a second call, and compare with full passes."""
    model = new_model(context_window=900, positions="rotary", window=9, **changes)
    state = SpeculativeState(model)
    prompt = list(np.random.default_rng(0).integers(0, 50, 300))
    tokens = list(prompt)
    for n in (150, 300):
        sampling = SamplingParams(seed=n)
        tokens += generate_prompt_lookup(model, tokens, n, sampling, state=state, n_draft_tokens=n_draft_tokens)
    np.testing.assert_allclose(state.logits(tokens), full_logits(model, tokens), rtol=1e-3, atol=1e-3)
    if not n_draft_tokens:  # draft tokens may have to be recomputed
        are_small = [cache.keys.shape[1] <= 9 - 1 + 256 for cache in state.caches]
        assert are_small == [changes.get("softmax") != "blocks", changes in ({}, {"softmax": "softmax1"})]
    other = [*tokens[:100], 3, 4]  # too far back for the cache: it is recomputed
    np.testing.assert_allclose(state.logits(other), full_logits(model, other), rtol=1e-3, atol=1e-3)


# -------------------------------------------------------------------- several texts at once
SETTINGS = [
    {"temperature": 0},
    {"temperature": 0.8, "top_k": 9, "seed": 3},
    {"temperature": 1.3, "no_repeat_ngram_size": 2, "stop_tokens": [1, 2, 3]},
    {"temperature": 0, "repetition_penalty": 1.5, "n_vocab": 30},
]
CHANGES = [{}, {"positions": "rotary", "window": 4}, {"token_shift": True}, {"key_shift": True}]


@pytest.mark.nightly_except(4)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("changes", CHANGES)
def test_batched_generation_equals_single_generation(changes, settings):
    model = new_model(**changes)
    prompts = [[1, 2, 3], [4], list(range(12)), np.array([7, 7]), [5] * 9]
    seed = settings.get("seed", 0)
    samplings = [PenalizedSamplingParams(**{**settings, "seed": seed + i}) for i in range(5)]
    alone = [list(generate(model, prompt, 20, way)) for prompt, way in zip(prompts, samplings)]
    assert generate_batch(model, prompts, 20, PenalizedSamplingParams(**settings)) == alone
    assert generate_batch(model, prompts, 20, samplings) == alone
    assert generate_batch(model, prompts, 20, samplings, n_draft_tokens=5) == alone
    assert len(set(map(tuple, alone))) == 5
    assert all(1 <= len(drawn) <= 20 for drawn in alone)


def test_empty_batch_and_bad_batch_arguments(model):
    assert generate_batch(model, [], 3) == []
    assert generate_batch(model, [[1], [2]], 0) == [[], []]
    with pytest.raises(ValueError, match=r"prompt.*12 tokens, got 0"):
        generate_batch(model, [[1], []], 3)
    with pytest.raises(ValueError, match="temperature"):
        generate_batch(model, [[1]], 3, temperature=-1)
    with pytest.raises(ValueError, match="3 prompts, got 2"):
        generate_batch(model, [[1], [1], [1, 2]], 9, [SamplingParams(), SamplingParams()])
    with pytest.raises(TypeError, match="SamplingParams"):
        generate_batch(model, [[1]], 9, [1])


@pytest.mark.parametrize("changes", CHANGES)
def test_texts_join_and_leave_a_batch(changes):
    """Each text has other settings and gets the same tokens as alone."""
    model = new_model(**changes)
    batch = GenerationBatch(model)
    all_params = [
        ([1, 2, 3], 9, {"temperature": 0}, 0),
        ([4], 30, {}, 1),
        ([5, 6], 4, {"top_k": 3, "repetition_penalty": 1.5}, 2),
        ([7] * 12, 5, {"min_p": 0.1, "no_repeat_ngram_size": 2}, 3),
        ([8], 0, {}, 4),
    ]
    drawn = {number: [] for number in range(len(all_params))}

    def steps(n: int) -> None:
        for _ in range(n):
            for number, token in batch.step():
                drawn[number].append(token)

    for number, (prompt, n_tokens, settings, seed) in enumerate(all_params):
        assert batch.add(prompt, n_tokens, PenalizedSamplingParams(**settings, seed=seed)) == number
        steps(number)
    assert len(batch) == 1  # the last had none to write
    batch.remove(1)
    batch.remove(1)
    n_of_removed = len(drawn[1])
    while len(batch):
        steps(1)
    for number, (prompt, n_tokens, settings, seed) in enumerate(all_params):
        alone = list(generate(model, prompt, n_tokens, PenalizedSamplingParams(**settings, seed=seed)))
        assert drawn[number] == (alone[:n_of_removed] if number == 1 else alone)
    assert 6 < n_of_removed < 30
    assert batch.step() == []


def test_batch_decodes_in_one_pass_and_prefills_long_prompts_in_chunks(model, monkeypatch):
    prompts = [[1] * 5, [2], [3] * 9, [4] * 4]
    alone = [list(generate(model, prompt, 2, temperature=0)) for prompt in prompts]
    reads = count_reads(monkeypatch)
    generate_batch(model, [[1, 2, 3], [4], [5, 6]], 3, temperature=0)
    assert reads == [[1, 2, 3], [1, 1, 1], [1, 1, 1]]
    reads.clear()
    monkeypatch.setattr(batch_module, "MANY_ROWS", 5)
    assert generate_batch(model, prompts, 2, temperature=0) == alone
    assert reads == [[1, 4], [5], [9], [1, 1, 1, 1]]


def test_batch_splits_rows_at_16_bit_precision_alone(monkeypatch):
    """Products of few rows are more exact at 16-bit precision; quantized weights do not need them."""
    model, n_texts = quantize(new_model()), FEW_ROWS + 1
    reads = count_reads(monkeypatch)
    generate_batch(model, [[4]] * n_texts, 1, temperature=0)
    assert reads == [[1] * n_texts]
    reads.clear()
    generate_batch(new_model().use_precision("bfloat16"), [[4]] * n_texts, 1, temperature=0)
    assert reads == [[1] * FEW_ROWS, [1]]


def test_logits_callback_receives_every_token(model):
    received = []
    batch = GenerationBatch(model)
    batch.add([3], 4, SamplingParams(temperature=0))
    number = batch.add([1, 2], 5, SamplingParams(temperature=0), listener=lambda *token: received.append(token))
    drawn = []
    while len(batch):
        drawn += [token for which, token in batch.step() if which == number]
    assert [token for token, _ in received] == drawn
    text = [1, 2]
    for token, logits in received:
        np.testing.assert_allclose(logits, DecodingState(model).logits(text), rtol=1e-5, atol=1e-5)
        text.append(token)


@pytest.mark.parametrize("changes", CHANGES)
def test_forked_state_is_independent(changes):
    model = new_model(context_window=30, **changes)
    state = SpeculativeState(model)
    state.logits([1, 2, 3, 4, 5, 6])
    forked = state.fork(4)
    assert forked.tokens in ([1, 2, 3, 4], [])  # a shift cannot be undone
    assert forked.tokens or {"token_shift", "key_shift"} & set(changes)
    assert state.fork(6).tokens == state.fork(99).tokens == state.tokens
    # Weights from a normal distribution magnify rounding: without Numba, logits of 11 differ by 6e-5.
    expected = DecodingState(model).logits([1, 2, 3, 4, 9])
    np.testing.assert_allclose(forked.logits([1, 2, 3, 4, 9]), expected, rtol=1e-5, atol=1e-4)
    assert state.tokens == [1, 2, 3, 4, 5, 6]
    expected = DecodingState(model).logits([1, 2, 3, 4, 5, 6, 7])
    np.testing.assert_allclose(state.logits([1, 2, 3, 4, 5, 6, 7]), expected, atol=1e-5)


def test_frequency_presence_penalties_and_logit_bias():
    logits = np.array([1.0, 2.0, 3.0, 4.0, 5.0], np.float32)
    tokens = [4, 4, 3, 3, 3, 2]  # two of the prompt

    def shifted(**settings):
        return PenalizedSamplingParams(**settings).adjusted_logits(logits, tokens, 2).tolist()

    assert shifted(presence_penalty=1.5) == [1, 2, 1.5, 2.5, 5]
    assert shifted(frequency_penalty=1) == [1, 2, 2, 1, 5]
    assert shifted(frequency_penalty=-1, presence_penalty=0.5) == [1, 2, 3.5, 6.5, 5]
    assert shifted(logit_bias=((0, 100), (4, -100), (99, 1))) == [101, 2, 3, 4, -95]
    for wrong in ({"presence_penalty": np.nan}, {"logit_bias": ((-1, 1),)}, {"logit_bias": ((1, np.inf),)}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            PenalizedSamplingParams(**wrong)


def test_frequency_penalty_ignores_the_prompt(model):
    prompt = [*generate(model, [1, 2], 10, temperature=0)]
    plain = [*generate(model, prompt, 20, temperature=0)]
    sampling = PenalizedSamplingParams(temperature=0, presence_penalty=1e6)
    penalised = [*generate(model, prompt, 20, sampling)]
    assert penalised[0] == plain[0]
    assert len(set(penalised)) == min(20, model.config.vocab_size)
    assert penalised == generate_batch(model, [prompt], 20, sampling)[0]
    assert penalised == [*generate_prompt_lookup(model, prompt, 20, sampling)]


# -------------------------------------------------------------------- draft tokens
@pytest.mark.nightly_except(6)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("n_draft_tokens", [1, 3, 30])
@pytest.mark.parametrize("changes", CHANGES)
def test_draft_tokens_change_nothing(changes, n_draft_tokens, settings):
    model = new_model(context_window=30, **changes)
    for prompt in ([1, 2, 3, 4] * 5, [7], [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4]):
        sampling = PenalizedSamplingParams(**settings)
        plain = list(generate(model, prompt, 50, sampling))
        assert list(generate_prompt_lookup(model, prompt, 50, sampling, n_draft_tokens=n_draft_tokens)) == plain


def test_draft_tokens_reduce_steps_on_repetitive_text(monkeypatch):
    model = new_model(context_window=200, positions="none", window=1)  # the last token decides the next
    plain = list(generate(model, [1], 150, temperature=0))
    assert len(set(plain[50:])) < 25
    batch = generate_batch(model, [[1], [2], [3]], 150, temperature=0)
    reads = count_reads(monkeypatch)
    assert list(generate_prompt_lookup(model, [1], 150, temperature=0, n_draft_tokens=5)) == plain
    assert len(reads) < 80
    assert max(reads) == [6]
    reads.clear()
    assert generate_batch(model, [[1], [2], [3]], 150, temperature=0, n_draft_tokens=15) == batch
    assert len(reads) < 80
    assert 10 < max(map(sum, reads)) <= 16  # as many as are read at the speed of the weights


def add_noise(monkeypatch) -> None:
    """Change the logits of draft tokens by up to 9% of the largest, as several rows at once may."""
    noise = np.random.default_rng(3)

    def noisy(model, tokens, caches, every=False):
        logits = next_logits(model, tokens, caches, every)
        if every:
            drafted = np.concatenate([[[len(new) > 1]] * len(new) for new in tokens])
            logits += noise.uniform(-0.09, 0.09, logits.shape) * np.abs(logits).max(-1, keepdims=True) * drafted
        return logits

    set_next_logits(monkeypatch, noisy)


@pytest.mark.nightly_except(5)
@pytest.mark.parametrize(
    "settings", [{"temperature": 0}, {}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2, "repetition_penalty": 1.1}]
)
def test_draft_tokens_change_nothing_despite_rounding(settings, monkeypatch):
    """Several rows at once give logits that are off by as much as is thought possible."""
    model = new_model(context_window=60)
    n_recomputed = []

    class Counting(SpeculativeState):
        def recompute_logits(self, text):
            n_recomputed.append(len(text))
            return super().recompute_logits(text)

    def same() -> bool:
        prompt, all_params = [1, 2, 3, 4] * 5, [PenalizedSamplingParams(**settings, seed=seed) for seed in range(10)]
        expected = [list(generate(model, prompt, 60, way)) for way in all_params]
        return expected == [
            list(generate_prompt_lookup(model, prompt, 60, way, state=Counting(model), n_draft_tokens=4))
            for way in all_params
        ]

    add_noise(monkeypatch)
    monkeypatch.setattr(prompt_lookup, "TOLERANCE", 0.0)
    assert not same()
    assert not n_recomputed
    monkeypatch.setattr(prompt_lookup, "TOLERANCE", 0.1)
    assert same()
    assert n_recomputed


@given(
    st.integers(0, 10**6), st.integers(0, 12), st.floats(0.05, 1), st.floats(0, 1), st.floats(0.05, 3), st.booleans()
)
def test_certain_tokens_are_stable_under_small_changes(seed, top_k, top_p, min_p, temperature, plain):
    numbers = np.random.default_rng(seed)
    logits = numbers.normal(0, 3, 30)
    settings = (temperature, 0, 1.0, 0.0) if plain else (temperature, top_k, top_p, min_p)
    sampling, number = SamplingParams(*settings), np.random.default_rng(seed).random()
    token = sampling.token_at_quantile(logits, number)
    for _ in range(20 if is_certain(sampling, logits, token, number, 0.01) else 0):
        near = logits + numbers.choice([-0.01, 0.01], 30)
        assert sampling.token_at_quantile(near, number) == token


def test_certainty_depends_on_excluded_logits_too():
    logits, generator = np.array([90.0, 1e-4, 0.0]), np.random.default_rng(0)
    sampling = PenalizedSamplingParams(0, suppress_tokens=(0,))
    assert sample_if_certain(sampling, logits, generator, [1], 1e-7) == 1
    assert sample_if_certain(sampling, logits, generator, [1], 1e-5) is None


@pytest.mark.slow
def test_most_tokens_are_certain():
    """If few tokens were certain, draft tokens would rarely be accepted."""
    logits = np.random.default_rng(0).normal(0, 4, (100, 50_000))
    for settings in ((0, 0, 1.0, 0.0), (0.8, 50, 0.95, 0.02)):
        sampling, numbers = SamplingParams(*settings), [np.random.default_rng(i).random() for i in range(100)]
        pairs = list(zip(logits, numbers))
        assert sum(is_certain(sampling, row, sampling.token_at_quantile(row, u), u, 5e-4) for row, u in pairs) > 90


def test_draft_tokens_stop_at_max_tokens(model, monkeypatch):
    reads = count_reads(monkeypatch)
    assert len(list(generate_prompt_lookup(model, [1, 2, 1, 2, 1, 2], 1, temperature=0))) == 1
    assert reads == [[6]]


@pytest.mark.nightly_except(6)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("n_texts", [2, 5, 20])
def test_batched_draft_tokens_change_nothing(settings, n_texts):
    """Texts of different lengths, some repetitive; a batch of 20 leaves no room for draft tokens."""
    model = new_model(context_window=30, positions="rotary", window=6)
    prompts = [[*range(i % 7), *[1, 2, 3, 4] * (i % 3), i] for i in range(n_texts)]
    all_params = [PenalizedSamplingParams(**{**settings, "seed": i}) for i in range(n_texts)]
    alone = [list(generate(model, prompt, 50, way)) for prompt, way in zip(prompts, all_params)]
    for n_draft_tokens in (1, 4, 30):
        assert generate_batch(model, prompts, 50, all_params, n_draft_tokens=n_draft_tokens) == alone


def test_batched_draft_tokens_change_nothing_despite_rounding(monkeypatch):
    model = new_model(context_window=60)
    prompts, all_params = [[1, 2, 3, 4] * 5, [4, 3] * 4], [SamplingParams(seed=0), SamplingParams(0)]
    expected = generate_batch(model, prompts, 60, all_params)
    add_noise(monkeypatch)
    monkeypatch.setattr(prompt_lookup, "TOLERANCE", 0.0)
    assert generate_batch(model, prompts, 60, all_params, n_draft_tokens=4) != expected
    monkeypatch.setattr(prompt_lookup, "TOLERANCE", 0.1)
    assert generate_batch(model, prompts, 60, all_params, n_draft_tokens=4) == expected


# -------------------------------------------------------------------- candidates
@given(st.integers(0, 10**6), st.integers(0, 12), st.floats(0.01, 1), st.floats(0, 1), st.floats(0.05, 3))
def test_candidates_contain_every_token_that_can_be_sampled(seed, top_k, top_p, min_p, temperature):
    """Compare with a sort of all tokens."""
    logits = np.random.default_rng(seed).normal(0, 2, 40).round(1)
    chosen, probabilities = SamplingParams(temperature, top_k, top_p, min_p).candidates(logits)
    expected = np.argsort(-logits, kind="stable")[: top_k or None]
    shares = np.exp((logits[expected] - logits.max()) / temperature)
    shares /= shares.sum()
    n_likely = np.count_nonzero(shares >= min_p * shares[0])
    n_kept = min(n_likely, int(np.searchsorted(shares.cumsum(), top_p)) + 1)
    if top_p == 1 and min_p == 0:
        n_kept = len(expected)
    near_an_edge = np.abs(shares.cumsum() - top_p).min() < 1e-9 or np.abs(shares - min_p * shares[0]).min() < 1e-12
    if not near_an_edge:
        by_id = np.argsort(expected[:n_kept])
        np.testing.assert_array_equal(chosen, expected[by_id])
        np.testing.assert_allclose(probabilities, shares[by_id] / shares[:n_kept].sum(), rtol=1e-9)


@pytest.mark.parametrize("n", [1, 2, 4, 7, 9, 12])
def test_top_indices_are_the_first_of_a_stable_sort(n):
    rounded = np.random.default_rng(0).normal(size=1000).round(1)
    holes = np.where(rounded > 2, np.nan, rounded)
    for scores in ([2, -np.inf, 5, 2, np.nan, 5, -np.inf, 2, 0], [np.nan] * 4, [-np.inf] * 100, rounded, holes):
        expected = np.argsort(-np.asarray(scores), kind="stable")[:n]
        np.testing.assert_array_equal(top_indices(np.asarray(scores), n), expected)
