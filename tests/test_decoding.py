"""Decoding with a KV cache against one full pass, for every model family and config field."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from transformers_families import FAMILIES

from tricycle.configs import ModelConfig
from tricycle.decoding.prompt_lookup import generate_prompt_lookup
from tricycle.decoding.ragged import next_logits, select_items
from tricycle.decoding.speculative import SpeculativeState
from tricycle.generate import DecodingState, generate
from tricycle.layers import Layer
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.softmaxes import SOFTMAXES, BlockSoftmax
from tricycle.tensor import no_grad, to_tensor
from tricycle.weights import quantize
from tricycle_lab.probe import Probe

TINY = ModelConfig(vocab_size=40, context_window=24, embedding_dim=16, n_heads=4, n_layers=3)
ROTARY = {"positions": "rotary", "norm": "rms_norm", "bias": False}
LLAMA3 = {"rotary_scaling": "llama3", "rotary_factor": 8.0, "rotary_original_window": 8}
YARN = {"rotary_scaling": "yarn", "rotary_factor": 8.0, "rotary_original_window": 16, "rotary_attention_factor": 1.2}
OWN = {
    "gpt-2": {},
    "no positions": {"positions": "none"},
    "rotary": ROTARY,
    "a part turned": ROTARY | {"rotary_fraction": 0.5},
    "scaled": ROTARY | LLAMA3,
    "YaRN": ROTARY | YARN,
    "YaRN, any bounds": ROTARY | YARN | {"rotary_rounded": False, "rotary_high_frequency": 3.0},
    "scaled residuals and logits": {"residual_scale": 0.3, "logit_scale": 0.5},
    "router with a bias": {"n_experts": 3, "router_bias": True},
    "shared key heads": {"n_key_heads": 2},
    "one key head": ROTARY | {"n_key_heads": 1, "head_size": 6},
    "window": {"window": 5},
    "window in some layers": ROTARY | {"window": 3, "full_layers": (1,), "rotary_local_base": 100.0},
    "window of one": {"window": 1},
    "caps": {"score_cap": 0.7, "logit_cap": 1.5},
    "scale": {"score_scale": 0.9},
    "normed queries": ROTARY | {"qk_norm": True},
    "normed queries with a gain": ROTARY | {"qk_norm": True, "qk_norm_gain": True, "norm_unit_offset": True},
    "norms after": {"norm_placement": "after"},
    "queries normed over all heads": ROTARY | {"qk_norm": True, "qk_norm_per_head": False, "qk_norm_eps": 0.1},
    "norms of outputs": {"norm_placement": "output", "norm_eps": 0.1},
    "norms around": {"norm_placement": "both", "norm": "rms_norm", "norm_unit_offset": True},
    "side by side": {"parallel": True},
    "side by side, one norm": {"parallel": True, "shared_norm": True},
    "token shift": {"token_shift": True},
    "key shift": ROTARY | {"key_shift": True, "qk_norm": True, "n_key_heads": 2},
    "both shifts": {"key_shift": True, "token_shift": True},
    "untied": {"tied": False, "head_bias": True},
    "narrow embedding": {"embedding_size": 8},
    "narrow embedding, untied": {"embedding_size": 8, "tied": False},
    "scaled embedding": {"embedding_scale": 4.0, "position_offset": 2},
    "biases": ROTARY | {"qkv_bias": True, "output_bias": False, "mlp_bias": True},
    "dropout": {"dropout": 0.5},
    **{name: {"softmax": name} for name in SOFTMAXES},
    "blocks in a window": {"softmax": "blocks", "softmax_blocks": 3, "window": 7},
    "nothing in a window": {"softmax": "softmax1", "window": 4, "n_key_heads": 2},
    **{name: {"activation": name} for name in "gelu_exact relu relu_squared swish sigmoid tanh swiglu".split()},
    "gated": {"activation": "gelu", "gated": True},
    "linear scaling": ROTARY | {"rotary_scaling": "linear", "rotary_factor": 2.0, "rotary_base": 50.0},
    "bounds of scaling": {**ROTARY, **LLAMA3, "rotary_low_frequency": 0.5, "rotary_high_frequency": 2.0},
    "sizes": {"vocab_size": 30, "context_window": 23, "embedding_dim": 24, "n_heads": 2, "n_layers": 1},
    "width of the MLP": {"expansion_ratio": 2.0},
    "given width of the MLP": {"hidden_size": 12},
}
# Fields that decide the first weights, or how products are rounded: 16 bits are those of many rows alone.
NOT_OF_THE_COMPUTATION = {"seed", "zero_projections", "precision"}
# Settings of attention and of a block's order of norms act on one another, so each is tried with each.
ACTING_ON_OTHERS = """
rotary_fraction n_key_heads window full_layers score_cap score_scale qk_norm qk_norm_per_head norm_placement parallel
token_shift key_shift softmax rotary_scaling embedding_size
""".split()
PAIRED = [name for name, fields in OWN.items() if fields.keys() & {*ACTING_ON_OTHERS}]
CONFIGS = {name: replace(TINY, **fields) for name, fields in OWN.items()}
CONFIGS |= {f"family {name}": family.config for name, family in FAMILIES.items()}


def new_model(config: ModelConfig) -> GPT:
    """Return the model with random weights, so that every part affects the logits."""
    model = GPT(config)
    generator = np.random.default_rng(1)
    for parameter in model.parameters():
        size = 1 if parameter.ndim == 1 else 1.5 / np.sqrt(parameter.shape[0])
        parameter.array[...] = generator.normal(0, size, parameter.shape)
    return model


def all_at_once(model: GPT, tokens: list[int]) -> np.ndarray:
    """Return the logits after each token (T, V) of one full pass without a cache."""
    with model.evaluating():
        return model(to_tensor([tokens], dtype=int)).array[0]


def text_of(model: GPT, n_tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, model.config.vocab_size, n_tokens).tolist()


def pairs() -> dict[str, ModelConfig]:
    """Return the configs with two settings of PAIRED that may stand together."""
    configs = {}
    for one, other in combinations(PAIRED, 2):
        if all(OWN[one].get(name, value) == value for name, value in OWN[other].items()):
            try:
                configs[f"{one}; {other}"] = replace(TINY, n_layers=2, **OWN[one] | OWN[other])
            except ValueError:  # parallel blocks have their norms before
                continue
    return configs


PAIRS = pairs()


def assert_near(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


# -------------------------------------------------------------------- the same numbers
@pytest.mark.nightly_except(2)
@pytest.mark.parametrize("name", CONFIGS)
def test_cached_decoding_matches_the_full_pass(name):
    model = new_model(CONFIGS[name])
    tokens = text_of(model, 20)
    expected = all_at_once(model, tokens)
    caches = model.new_caches()
    assert_near(next_logits(model, [tokens[:7]], [caches], every=True), expected[:7])
    for i in range(7, 12):
        assert_near(next_logits(model, [tokens[i : i + 1]], [caches]), expected[i : i + 1])
    assert_near(next_logits(model, [tokens[12:]], [caches])[0], expected[-1])
    assert {cache.length for cache in caches} == {20}


@pytest.mark.nightly_except(4)
@pytest.mark.parametrize("name", CONFIGS)
def test_batched_texts_are_independent(name):
    model = new_model(CONFIGS[name])
    texts = [text_of(model, n_tokens, n_tokens) for n_tokens in (9, 1, 14, 6)]
    caches = [model.new_caches() for _ in texts]
    n_known = [4, 0, 13, 1]
    for text, cache, n in zip(texts, caches, n_known):
        if n:
            next_logits(model, [text[:n]], [cache])
    logits = next_logits(model, [text[n:] for text, n in zip(texts, n_known)], caches)
    assert logits.shape == (4, model.config.vocab_size)
    for row, text in zip(logits, texts):
        assert_near(row, all_at_once(model, text)[-1])
    every = next_logits(model, [[3], [4, 5], [6], [7]], caches, every=True)
    assert len(every) == 5
    assert_near(every[1:3], all_at_once(model, [*texts[1], 4, 5])[-2:])
    assert_near(every[4], all_at_once(model, [*texts[3], 7])[-1])


def test_longrope_text_is_processed_again_when_it_becomes_long():
    scaling = {"rotary_scaling": "longrope", "rotary_original_window": 10, "rotary_divisors": (1.0, 2.0, 3.0, 5.0)}
    model = new_model(replace(TINY, **ROTARY, **scaling))
    text = text_of(model, 7)
    for token in generate(model, text, 12, temperature=0):
        assert token == all_at_once(model, text)[-1].argmax()
        text.append(token)
    for state in (DecodingState(model), SpeculativeState(model)):
        for n_tokens in (9, 10, 11, 12, 8, 19, 14, 10):
            assert_near(state.logits(text[:n_tokens]), all_at_once(model, text[:n_tokens])[-1])
    assert len(state.fork(9).tokens) == 9 and not state.can_truncate
    state.logits(text)
    assert len(state.fork(14).tokens) == 14
    assert state.fork(9).tokens == []  # the frequencies of its keys are those of a long text


def test_every_config_field_has_a_case():
    usual = ModelConfig()
    changed = {
        name for config in CONFIGS.values() for name in vars(usual) if getattr(config, name) != getattr(usual, name)
    }
    assert set(vars(usual)) - changed == NOT_OF_THE_COMPUTATION
    assert len(PAIRS) > 300


@pytest.mark.nightly_except(4)
@pytest.mark.parametrize("name", PAIRS)
def test_setting_pairs_match_the_full_pass(name):
    model = new_model(PAIRS[name])
    tokens = text_of(model, 20)
    expected = all_at_once(model, tokens)
    other = all_at_once(model, tokens[::-1])
    caches, beside = model.new_caches(), model.new_caches()
    found = [next_logits(model, [tokens[:9]], [caches], every=True)]
    next_logits(model, [tokens[:14:-1]], [beside])
    for i, j in zip(range(9, 19), range(14, 4, -1)):  # two texts in one batch, one token of each
        rows = next_logits(model, [[tokens[i]], [tokens[j]]], [caches, beside])
        found.append(rows[:1])
        np.testing.assert_allclose(rows[1], other[19 - j], atol=1e-5 * np.abs(other).max())
    np.testing.assert_allclose(np.concatenate(found), expected[:19], atol=1e-5 * np.abs(expected).max())
    prompt = [*tokens[:5], *tokens[:4]]
    greedy = list(generate(model, prompt, 10, temperature=0))
    assert list(generate_prompt_lookup(model, prompt, 10, temperature=0)) == greedy
    assert greedy == all_at_once(model, prompt + greedy)[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("name", ["gpt-2", "rotary", "window", "blocks", "adaptive", "softmax1"])
def test_float16_cache(name):
    model = new_model(CONFIGS[name])
    tokens = text_of(model, 20)
    expected = all_at_once(model, tokens)[8:]
    caches = model.new_caches("float16")
    parts = [tokens[:9], *([token] for token in tokens[9:17]), tokens[17:]]
    logits = np.concatenate([next_logits(model, [part], [caches], every=True) for part in parts])[8:]
    difference = np.abs(logits - expected).max()
    assert 0 < difference < 0.02 * np.abs(expected).max()
    assert caches[0].keys.dtype == np.float16
    assert select_items(caches[0], np.array([0, 0])).keys.dtype == np.float16


@pytest.mark.parametrize("offset", [-100.0, 100.0, 3e4])
@pytest.mark.parametrize("softmax", ["softmax", "softmax1"])
def test_large_scores_do_not_overflow(softmax, offset):
    model = new_model(replace(TINY, softmax=softmax, n_key_heads=2))
    for block in model.blocks:
        block.attention.qkv.bias.array[:24] = offset  # of queries and keys
    assert_last_token_as_all_at_once(model)


@pytest.mark.parametrize(
    ("softmax", "shape"),
    [
        (BlockSoftmax(3, "none", False), None),
        (BlockSoftmax(3, "exact", False), None),
        (BlockSoftmax(3, "learned", True), (4, 3, 24)),
        (BlockSoftmax(3, per_position=False), (3, 3)),
    ],
)
def test_softmax_changed_after_construction(softmax, shape):
    model = new_model(TINY)
    for block in model.blocks:
        block.attention.use_softmax(softmax)
        assert (block.attention.softmax_scales is None) == (shape is None)
        if shape is not None:
            block.attention.softmax_scales.array[...] = np.random.default_rng(0).random(shape)
    assert_last_token_as_all_at_once(model)


def assert_last_token_as_all_at_once(model):
    tokens = text_of(model, 15)
    caches = model.new_caches()
    next_logits(model, [tokens[:-1]], [caches])
    assert_near(next_logits(model, [tokens[-1:]], [caches])[0], all_at_once(model, tokens)[-1])


# -------------------------------------------------------------------- weights
@pytest.mark.parametrize("n_tokens", [1, 20])
def test_float16_weights(n_tokens):
    model = new_model(replace(TINY, **ROTARY))
    for _, parameter in model.named_parameters():
        if parameter.ndim == 2:
            parameter.array = parameter.array.astype(np.float16)
    tokens = text_of(model, n_tokens)
    assert_near(next_logits(model, [tokens], [model.new_caches()], every=True), all_at_once(model, tokens))


@pytest.mark.parametrize("kind", ["int8", "float16"])
@pytest.mark.parametrize("name", ["gpt-2", "family Llama", "narrow embedding", "untied"])
def test_quantized_weights(name, kind):
    model = quantize(new_model(CONFIGS[name]), kind)
    tokens = text_of(model, 20)
    expected = all_at_once(model, tokens)
    caches = model.new_caches()
    logits = [next_logits(model, [new], [caches], every=True) for new in (tokens[:17], [tokens[17]], tokens[18:])]
    # where activations are rounded to 8 bits, a last bit decides which way
    close = 0.1 if kind == "int8" else 1e-3
    np.testing.assert_allclose(np.concatenate(logits), expected, atol=close * np.abs(expected).max())


# -------------------------------------------------------------------- parts of users
EVERYTHING = replace(
    TINY,
    **ROTARY | {"token_shift": True, "key_shift": True, "qk_norm": True, "activation": "relu_squared", "gated": True},
    logit_cap=3.0,
    embedding_size=8,
)
PARTS = {
    "model": (TINY, lambda model: model, "logits"),
    "embedding": (TINY, lambda model: model.token_embedding, "forward"),
    "block": (TINY, lambda model: model.blocks[1], "forward"),
    "residual rule": (TINY, lambda model: model.blocks[1], "add_sublayer"),
    "norm": (TINY, lambda model: model.blocks[1].mlp_norm, "forward"),
    "RMS norm": (EVERYTHING, lambda model: model.norm, "forward"),
    "norm of queries": (EVERYTHING, lambda model: model.blocks[1].attention.query_norm, "_gains"),
    "attention layer": (TINY, lambda model: model.blocks[1].attention, "forward"),
    "attention": (TINY, lambda model: model.blocks[1].attention.attention, "forward"),
    "softmax": (TINY, lambda model: model.blocks[1].attention.attention.softmax, "attend"),
    "rotary": (EVERYTHING, lambda model: model.blocks[1].attention.rotary, "forward"),
    "token shift": (EVERYTHING, lambda model: model.blocks[1].attention.shift, "forward"),
    "key shift": (EVERYTHING, lambda model: model.blocks[1].attention.key_shift, "forward"),
    "matrix": (TINY, lambda model: model.blocks[1].mlp.projection, "forward"),
    "matrix of queries": (TINY, lambda model: model.blocks[1].attention.qkv, "forward"),
    "matrix of attention": (TINY, lambda model: model.blocks[1].attention.projection, "forward"),
    "MLP": (TINY, lambda model: model.blocks[1].mlp, "forward"),
    "activation": (TINY, lambda model: model.blocks[1].mlp.activation, "forward"),
    "gate": (EVERYTHING, lambda model: model.blocks[1].mlp.activation, "forward"),
    "activation of a gate": (EVERYTHING, lambda model: model.blocks[1].mlp.activation.activation, "forward"),
    "SwiGLU": (CONFIGS["swiglu"], lambda model: model.blocks[1].mlp.activation, "forward"),
    "dropout": (TINY, lambda model: model.dropout, "forward"),
}


def changed(result):
    """A result of a method, with another factor for each channel, which no norm takes back."""
    if isinstance(result, tuple):  # of a softmax's `attend`
        return changed(result[0]), result[1]
    return result * np.linspace(0.5, 1.5, result.shape[-1], dtype=np.float32)


@pytest.mark.parametrize("where", ["class", "object", "subclass"])
@pytest.mark.parametrize("name", PARTS)
def test_overridden_methods_apply_in_training_and_generation(name, where, monkeypatch):
    config, part_of, method = PARTS[name]
    model = new_model(config)
    before = all_at_once(model, [1, 2, 3, 4])
    part = part_of(model)
    original = getattr(type(part), method)

    def other(self, *args, **options):
        return changed(original(self, *args, **options))

    if where == "class":
        monkeypatch.setattr(type(part), method, other)
    elif where == "subclass":
        monkeypatch.setattr(part, "__class__", type("Users", (type(part),), {method: other}))
    else:
        monkeypatch.setitem(vars(part), method, lambda *args, **options: other(part, *args, **options))
    expected = all_at_once(model, [1, 2, 3, 4])
    assert np.abs(expected - before).max() > 0.01 * np.abs(before).max()
    caches = model.new_caches()
    found = [next_logits(model, [tokens], [caches], every=True) for tokens in ([1, 2], [3], [4])]
    assert_near(np.concatenate(found), expected)
    both = next_logits(model, [[1, 2, 3, 4], [5]], [model.new_caches(), model.new_caches()])
    assert_near(both, np.stack([expected[-1], all_at_once(model, [5])[-1]]))
    loss = model.loss(to_tensor([[1, 2, 3, 4]], dtype=int), to_tensor([[2, 3, 4, 5]], dtype=int))
    assert loss.item() == pytest.approx(CrossEntropy()([2, 3, 4, 5], expected).item(), rel=1e-5)


class Whole(Layer):
    """A user-defined block without the library's attributes."""

    def forward(self, x, cache=None, mask=None):
        return x * 2


def test_user_block_without_standard_parts_and_norm_of_one_argument():
    model = new_model(TINY)
    model.blocks[1] = Whole()
    model.blocks[0].mlp_norm.forward = lambda x: x * 0.5
    assert_last_token_as_all_at_once(model)


# -------------------------------------------------------------------- probes, and layers of users
def test_probe_records_decoding_activations():
    model = new_model(TINY)
    caches = model.new_caches()
    next_logits(model, [[1, 2]], [caches])
    names = ["blocks.1.attention", "blocks.0.mlp", "norm", "dropout", "blocks.2.mlp_norm", "blocks.1.mlp.up"]
    for pattern in names:
        with Probe(model, pattern) as probe:
            next_logits(model, [[3]], [caches])
        (activation,) = probe.activations.values()
        assert activation.shape == (1, 1, 64 if pattern.endswith("up") else 16) and [*probe.activations] == [pattern]


def test_head_is_computed_only_for_the_last_token():
    model = new_model(TINY)
    with no_grad():
        model.eval()
        tokens = to_tensor([[1, 2, 3], [4, 5, 6]], dtype=int)
        assert_near(model(tokens, last=True).array, model(tokens).array[:, -1:])
        assert_near(model(to_tensor([1, 2, 3], dtype=int), last=True).array, model(tokens).array[0, -1:])


# -------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "1 to 24 tokens.*got 0 after 2"),
        ([1] * 23, "1 to 24 tokens.*got 23 after 2"),
        ([40], "ids.*0 to 39.*got 40"),
        ([-1], "ids.*0 to 39.*got -1"),
    ],
)
def test_bad_tokens_leave_the_cache_unchanged(tokens, message):
    model = new_model(TINY)
    caches = model.new_caches()
    next_logits(model, [[1, 2]], [caches])
    with pytest.raises(ValueError, match=message):
        next_logits(model, [tokens], [caches])
    assert {cache.length for cache in caches} == {2}
    with pytest.raises(ValueError, match="shorter"):
        next_logits(model, [[1], [2]], [model.new_caches()])
