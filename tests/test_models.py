"""GPT: shapes, initial weights, causality, gradients, caches, both heads, copies, invalid arguments."""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tables import bad_input
from test_layers import check_layer_gradients, each_copy
from transformers_families import LIKE_LLAMA

from tricycle import kernels, models
from tricycle.configs import DebugConfig, GPT2Config, GPTConfig, ShakespeareConfig, SmolGPTConfig
from tricycle.functions import Softmax1
from tricycle.layers import Dense, Layer
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.optimisers import AdamW
from tricycle.softmaxes import AdaptiveSoftmax, BlockSoftmax, SinkSoftmax, config_with_softmax
from tricycle.tensor import Tensor, no_grad, to_tensor

TINY = GPTConfig(vocab_size=11, context_window=20, embedding_dim=8, n_heads=2, n_layers=2, expansion_ratio=2)
ROTARY = {"positions": "rotary", "norm": "rms_norm", "bias": False}
KINDS: dict[str, GPTConfig] = {
    "gpt2": TINY,
    "untied, no bias": replace(TINY, tied=False, bias=False),
    "rotary, rms, swiglu": replace(TINY, **ROTARY, activation="swiglu"),
    "softmax1": replace(TINY, softmax="softmax1"),
    "adaptive": replace(TINY, softmax="adaptive"),
    "blocks": replace(TINY, softmax="blocks", softmax_blocks=3),
    "sink": replace(TINY, softmax="sink"),
    "rotary, qk norm, relu squared": replace(TINY, **ROTARY, qk_norm=True, token_shift=True, activation="relu_squared"),
    "key shift": replace(TINY, positions="rotary", norm="rms_norm", qk_norm=True, key_shift=True, rotary_fraction=0.5),
    "rotary, untied, relu": replace(TINY, positions="rotary", tied=False, activation="relu"),
}
LLAMA = replace(TINY, **LIKE_LLAMA, embedding_dim=12, hidden_size=20, n_heads=6, n_key_heads=2, rotary_base=500.0)
GEMMA_SCORES = {"score_cap": 3.0, "logit_cap": 5.0, "score_scale": 0.4, "window": 4, "full_layers": (1,)}
GEMMA_PARTS = {"activation": "gelu", "norm_placement": "both", "norm_unit_offset": True, "embedding_scale": 3.0}
GEMMA = replace(LLAMA, **GEMMA_SCORES, **GEMMA_PARTS, head_size=4, n_key_heads=3)
PARALLEL = replace(TINY, positions="rotary", rotary_fraction=0.5, parallel=True, tied=False)
OPT = replace(TINY, position_offset=2, activation="relu")
FAMILIES: dict[str, GPTConfig] = {
    "llama": LLAMA,
    "llama 3": replace(LLAMA, rotary_scaling="llama3", rotary_factor=4.0, rotary_original_window=16, tied=False),
    "mistral": replace(LLAMA, window=5),
    "mistral, softmax1": replace(LLAMA, window=5, softmax="softmax1"),
    "mistral, adaptive": replace(LLAMA, window=5, softmax="adaptive"),
    "mistral, blocks": replace(LLAMA, window=5, softmax="blocks", softmax_blocks=3),
    "qwen2": replace(LLAMA, qkv_bias=True),
    "qwen3": replace(LLAMA, qk_norm=True, qk_norm_gain=True, head_size=4),
    "gemma 2": GEMMA,
    "gemma 2, softmax1": replace(GEMMA, softmax="softmax1"),
    "gemma 2, blocks": replace(GEMMA, softmax="blocks", softmax_blocks=2),
    "gemma 3": replace(GEMMA, qk_norm=True, qk_norm_gain=True, rotary_local_base=50.0, score_cap=0.0, logit_cap=0.0),
    "neox": replace(PARALLEL, activation="gelu_exact"),
    "phi": replace(PARALLEL, shared_norm=True, head_bias=True),
    "opt": OPT,
    "opt, norms after": replace(OPT, norm_placement="after", embedding_size=6, mlp_bias=False),
    "no positions": replace(TINY, positions="none", output_bias=False),
}
each_kind = pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
each_family = pytest.mark.parametrize("config", (KINDS | FAMILIES).values(), ids=KINDS | FAMILIES)


def lively(config: GPTConfig) -> GPT:
    """Return a GPT with weights so large that every part affects the logits."""
    model, generator = GPT(config), np.random.default_rng(5)
    for p in model.parameters():
        p.array[...] = 0.4 * generator.standard_normal(p.shape) + (p.ndim == 1)
    return model


@pytest.fixture
def tokens(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, TINY.vocab_size, (3, TINY.context_window))


# -------------------------------------------------------------------- shapes and inputs
@pytest.mark.nightly_except(3)
@each_family
def test_logits_shape_for_any_batch_and_length(config: GPTConfig, rng: np.random.Generator) -> None:
    for shape in [(1, 1), (3, 1), (2, 7), (1, 19), (2, 20), (5,), (20,)]:
        model, tokens = GPT(config), rng.integers(0, config.vocab_size, shape)
        logits = model(tokens)
        assert logits.shape == (*shape, config.vocab_size) and logits.dtype == np.float32
        CrossEntropy()(tokens, logits).backward()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


@each_family
def test_batch_items_are_independent(config: GPTConfig, tokens: np.ndarray) -> None:
    model = lively(config)
    together = model(tokens).array
    for item in range(len(tokens)):
        np.testing.assert_allclose(model(tokens[item]).array, together[item], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64])
def test_tokens_of_any_integer_dtype_give_equal_logits(dtype: Any, tokens: np.ndarray) -> None:
    model = lively(TINY)
    assert np.array_equal(model(tokens.astype(dtype)).array, model(tokens.tolist()).array)
    assert np.array_equal(model(to_tensor(tokens, dtype=dtype, is_batched=True)).array, model(tokens).array)
    assert model(to_tensor(tokens, dtype=dtype, is_batched=True)).is_batched


# -------------------------------------------------------------------- parameters and their initialization
def count_by_formula(config: GPTConfig) -> int:
    width, hidden = config.embedding_dim, round(config.embedding_dim * config.expansion_ratio)
    gated = config.activation == "swiglu"
    if gated:
        hidden = math.ceil(hidden * 2 / 3 / 8) * 8
    norm = width * (2 if config.bias and config.norm == "layer_norm" else 1)
    attention = 4 * width**2 + config.bias * 4 * width + (config.token_shift + config.key_shift) * width
    if config.softmax == "blocks":
        attention += config.softmax_blocks * config.context_window
    if config.softmax == "sink":
        attention += config.n_heads
    up = hidden * (2 if gated else 1)
    mlp = width * up + hidden * width + config.bias * (up + width)
    tables = config.vocab_size * width * (1 if config.tied else 2)
    if config.positions == "learned":
        tables += config.context_window * width
    return tables + config.n_layers * (attention + mlp + 2 * norm) + norm


@each_kind
def test_number_of_parameters_matches_the_formula(config: GPTConfig) -> None:
    assert GPT(config).n_parameters == count_by_formula(config)


@pytest.mark.parametrize("config", [GPT2Config(), SmolGPTConfig(), ShakespeareConfig()])
def test_preset_sizes(config: GPTConfig) -> None:
    n_parameters = GPT(config, draw_weights=False).n_parameters  # zeros that nothing writes to take no memory
    assert n_parameters == count_by_formula(config)
    lowest, highest = {"GPT2Config": (124_439_808,) * 2, "SmolGPTConfig": (48.5e6, 49.5e6)}.get(
        type(config).__name__, (10e6, 12e6)
    )
    assert lowest <= n_parameters <= highest


def test_blocks_with_zero_projections_are_identity() -> None:
    config = replace(TINY, zero_projections=True)
    model, tokens = GPT(config), np.arange(5)[None]
    for name, p in model.named_parameters():
        assert (p.array == 0).all() == (name.endswith(("projection.weights", "bias"))), name
    expected = model.norm(model.token_embedding(tokens) + model.position_embedding(np.arange(5)))
    logits = expected @ model.token_embedding.weights.transpose()
    np.testing.assert_allclose(model(tokens).array, logits.array, 1e-4, 1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_precision_applies_to_every_matmul(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, precisions = GPT(replace(TINY, tied=tied, precision="tf32")), []
    model(np.arange(5)[None])  # faster versions register with the kernels
    monkeypatch.setattr(kernels, "matmul_operand", lambda x, precision: (x.size and precisions.append(precision)) or x)
    model(np.arange(5)[None])
    n_products = 4 * TINY.n_layers + 1
    n_others = TINY.n_layers  # attention
    assert set(precisions) == {"tf32"} and len(precisions) == 2 * n_products + n_others
    precisions.clear()
    assert model.use_precision("float32") is model and model.config.precision == "float32"
    model(np.arange(5)[None])
    assert "tf32" not in precisions
    with pytest.raises(ValueError, match=r"precision.*float32, tf32, .*'int8'"):
        model.use_precision("int8")


@pytest.mark.parametrize("n_layers", [2, 8])
def test_initial_weights_match_gpt2(n_layers: int) -> None:
    model = GPT(replace(TINY, embedding_dim=96, vocab_size=300, context_window=64, n_layers=n_layers, tied=False))
    residual = 0
    for name, p in model.named_parameters():
        if p.ndim == 1:
            assert (p.array == (1 if name.endswith("gain") else 0)).all(), name
            continue
        is_residual = name.endswith(("attention.projection.weights", "mlp.projection.weights"))
        residual += is_residual
        std = 0.02 / math.sqrt(2 * n_layers) if is_residual else 0.02
        assert p.array.std() == pytest.approx(std, rel=0.05), name
        assert abs(p.array.mean()) < 5 * std / math.sqrt(p.size), name
    assert residual == 2 * n_layers


@each_family
def test_seed_determines_the_weights(config: GPTConfig) -> None:
    states = [GPT(replace(config, seed=seed)).state_dict() for seed in (1, 1, 2)]
    for name, array in states[0].items():
        assert np.array_equal(array, states[1][name])
        assert array.ndim == 1 or "scales" in name or not np.array_equal(array, states[2][name])


@each_family
def test_initial_loss_is_near_uniform(config: GPTConfig, tokens: np.ndarray) -> None:
    loss = CrossEntropy()(np.roll(tokens, 7), GPT(config)(tokens))
    assert loss.item() == pytest.approx(math.log(config.vocab_size), abs=0.1)


# -------------------------------------------------------------------- causality
@each_family
def test_later_tokens_do_not_change_earlier_logits(config: GPTConfig, tokens: np.ndarray) -> None:
    model = lively(config)
    before = model(tokens).array
    for place in (0, 7, 19):
        changed = tokens.copy()
        changed[:, place] = (changed[:, place] + 1) % config.vocab_size
        after = model(changed).array
        np.testing.assert_allclose(after[:, :place], before[:, :place], rtol=1e-4, atol=1e-5)
        reached = abs(after - before)[:, place : place + reach(config)]
        assert (reached.max(axis=(0, 2)) > 1e-4).all()
        assert abs(after - before)[:, place + reach(config) :].max(initial=0) < 1e-5


def reach(config: GPTConfig) -> int:
    """Return the number of logits that a token can change, its own included."""
    if not config.window or config.full_layers:
        return config.context_window
    return config.n_layers * (config.window - 1) + 1


def test_logits_have_no_gradient_at_later_positions(tokens: np.ndarray) -> None:
    model = lively(TINY)
    (model(tokens)[:, 6] ** 2).sum().backward()
    reached = abs(model.position_embedding.weights.grad.array).max(axis=1) > 0
    assert reached.tolist() == [True] * 7 + [False] * 13


# -------------------------------------------------------------------- gradients
@pytest.mark.nightly_except(3)
@each_family
def test_model_gradients_match_finite_differences(config: GPTConfig, rng: np.random.Generator) -> None:
    width = config.embedding_dim if config.n_key_heads or config.rotary_fraction < 1 else 4
    model = GPT(replace(config, n_layers=1, full_layers=(), embedding_dim=width, vocab_size=5, context_window=4))
    check_layer_gradients(model, rng.integers(0, 5, (2, 3)))


def test_tied_head_gradient_is_the_sum_of_both_uses(tokens: np.ndarray) -> None:
    tied, untied = lively(TINY), GPT(replace(TINY, tied=False))
    state = tied.state_dict()
    untied.load_state_dict(state | {"head.weights": state["token_embedding.weights"].T})
    targets = np.roll(tokens, 1)
    losses = []
    for model in (tied, untied):
        loss = CrossEntropy()(targets, model(tokens))
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    both = untied.token_embedding.weights.grad.array + untied.head.weights.grad.array.T
    np.testing.assert_allclose(tied.token_embedding.weights.grad.array, both, rtol=1e-4, atol=1e-6)
    assert tied.head is None and "head.weights" not in state


# -------------------------------------------------------------------- dropout
def test_dropout_applies_only_in_training_and_follows_the_seed(tokens: np.ndarray) -> None:
    config = replace(TINY, dropout=0.3)
    a, b = GPT(config), GPT(config)
    first, second = a(tokens).array, a(tokens).array
    assert np.array_equal(first, b(tokens).array) and np.array_equal(second, b(tokens).array)
    assert not np.array_equal(first, second)
    a.eval()
    assert np.array_equal(a(tokens).array, a(tokens).array)
    assert np.array_equal(a(tokens).array, GPT(TINY)(tokens).array)


def test_dropout_follows_the_embedding(tokens: np.ndarray) -> None:
    model = GPT(replace(TINY, dropout=0.5))
    model.blocks = []
    assert not np.array_equal(model(tokens).array, model(tokens).array)


# -------------------------------------------------------------------- state and copies
@pytest.mark.nightly_except(3)
@each_copy
@each_family
def test_copy_trains_identically_and_is_independent(config: GPTConfig, duplicate: Callable, tokens: np.ndarray) -> None:
    model = GPT(replace(config, dropout=0.2))
    CrossEntropy()(tokens, model(tokens)).backward()  # a gradient is there, which stays behind
    before = len(pickle.dumps(GPT(replace(config, dropout=0.2))))
    assert len(pickle.dumps(model)) < before + 100
    twin = duplicate(model)
    assert twin.config == model.config and twin.n_parameters == model.n_parameters
    assert all(p.grad is None and p.args == () for p in twin.parameters())
    assert twin.blocks[0].mlp.dropout.generator is twin.generator is not model.generator

    model.zero_grad()
    for each in (model, twin):
        CrossEntropy()(tokens, each(tokens)).backward()  # with the same dropout masks
        each.update(AdamW(0.01))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert np.array_equal(p.array, q.array) and not np.shares_memory(p.array, q.array)


def test_softmax_can_be_replaced_on_a_trained_model(tokens: np.ndarray) -> None:
    model = lively(TINY)
    plain, known = model(tokens).array, {name: p.array.copy() for name, p in model.named_parameters()}
    for name in ("softmax1", "adaptive", "blocks"):
        model.use_softmax(name, n_blocks=4)
        assert model.config == replace(TINY, softmax=name, softmax_blocks=4)
        assert np.abs(model(tokens).array - plain).max() > 1e-4
        fresh = GPT(model.config)
        fresh.load_state_dict(model.state_dict())
        np.testing.assert_array_equal(fresh(tokens).array, model(tokens).array)
    model.use_softmax("softmax")
    np.testing.assert_array_equal(model(tokens).array, plain)
    assert model.state_dict().keys() == known.keys()
    with pytest.raises(ValueError, match="softmax"):
        model.use_softmax("softer")


@pytest.mark.parametrize(
    ("variant", "named"),
    [
        (Softmax1(), {"softmax": "softmax1"}),
        (AdaptiveSoftmax(), {"softmax": "adaptive"}),
        (SinkSoftmax(), {"softmax": "sink"}),
        (BlockSoftmax(4), {"softmax": "blocks", "softmax_blocks": 4}),
        (AdaptiveSoftmax(threshold=0.1), None),
        (SinkSoftmax(2.0), None),
    ],
)
def test_softmax_object_replaces_that_of_all_blocks(tokens, variant, named) -> None:
    model, other = lively(TINY), lively(TINY)
    model.use_softmax(variant)
    for block in other.blocks:
        block.attention.use_softmax(variant)
    np.testing.assert_array_equal(model(tokens).array, other(tokens).array)
    assert model.config == TINY
    if named is None:
        with pytest.raises(ValueError, match=rf"a name in functions\.SOFTMAXES, got {re.escape(repr(variant))}$"):
            config_with_softmax(model)
    else:
        assert config_with_softmax(model) == replace(TINY, **named)
        other.blocks[0].attention.use_softmax("softmax")
        with pytest.raises(ValueError, match=r"one variant in all blocks.*, got .*Softmax.*, .*Softmax"):
            config_with_softmax(other)


def test_frozen_model_trains_only_block_scales(tokens: np.ndarray) -> None:
    model = lively(TINY).freeze()
    frozen = {name: p.array.tobytes() for name, p in model.named_parameters()}
    model.use_softmax("blocks", n_blocks=2)
    optimiser = AdamW(1e-2, weight_decay=0.5)
    for _ in range(3):
        CrossEntropy()(tokens[:, 1:], model(tokens)[:, :-1]).backward()
        model.update(optimiser)
    for name, p in model.named_parameters():
        if name in frozen:
            assert p.array.tobytes() == frozen[name]
        else:
            assert name.endswith("attention.softmax_scales") and (p.array[1, TINY.context_window // 2 : -1] != 1).all()
            assert (p.array[1, : TINY.context_window // 2] == 1).all()  # these see no second block, and do not decay


def test_repr_lists_layers_with_their_parameter_counts() -> None:
    lines = repr(GPT(DebugConfig())).splitlines()
    assert lines[0] == f"GPT: {count_by_formula(DebugConfig()):,} parameters"
    assert lines[1:3] == ["  token_embedding Embedding: 9,600 parameters", "    weights (300, 32)"]
    assert "  blocks.1 TransformerBlock: 12,704 parameters" in lines
    assert "      qkv Dense: 3,168 parameters" in lines


# Variants of a family or a kind learn as it does.
LEARNERS = [
    pytest.param(config, id=name, marks=[pytest.mark.nightly] * ("," in name))
    for name, config in (KINDS | FAMILIES).items()
]


@pytest.mark.nightly_except(9)
@pytest.mark.parametrize("config", LEARNERS)
def test_model_overfits_a_small_text(config: GPTConfig) -> None:
    model, optimiser = GPT(config), AdamW(0.02, weight_decay=0.0)
    text = np.array([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]])
    for step in range(120):
        # at one rate one seed in a dozen jumps at the end, as rounding has it, and so it does with PyTorch
        optimiser.learning_rate = 0.02 * min(1, 2 - step / 60)
        loss = CrossEntropy()(text[:, 1:], model(text[:, :-1]))
        loss.backward()
        model.update(optimiser)
    assert loss.item() < 0.1
    assert np.array_equal(model(text[:, :-1]).array.argmax(-1), text[:, 1:])


def test_token_embeddings_are_scaled(tokens: np.ndarray) -> None:
    config = replace(TINY, tied=False, embedding_scale=3.0)
    scaled, plain = GPT(config).eval(), GPT(replace(config, embedding_scale=1.0)).eval()
    before = plain(tokens).array
    plain.token_embedding.weights.array[...] *= 3
    np.testing.assert_allclose(scaled(tokens).array, plain(tokens).array, rtol=1e-5, atol=1e-6)
    assert np.abs(scaled(tokens).array - before).max() > 1e-3


# -------------------------------------------------------------------- bad input
LENGTH = r"GPT\(context_window=20\): .*tokens.*got"
BAD: dict[str, tuple[Any, str]] = {
    "too long": (np.zeros((2, 21), int), f"{LENGTH} 21"),
    "no token": (np.zeros((2, 0), int), f"{LENGTH} 0"),
    "no sequence": (np.zeros((0, 5), int), f"{LENGTH} 0"),
    "an empty list": ([], f"{LENGTH} 0"),
    "one number": (3, r"GPT: .*tokens.*\(\)"),
    "three axes": (np.zeros((1, 2, 3), int), r"GPT: .*tokens.*\(1, 2, 3\)"),
    "id too large": ([[1, 11]], r"Embedding\(from_size=11\): .*got 11"),
    "id below 0": ([[-1, 1]], r"Embedding\(from_size=11\): .*got -1"),
    "floats": ([[0.0, 1.0]], "Embedding: .*whole numbers.*float32"),
}
calls = {name: (lambda tokens=tokens: GPT(TINY)(tokens), message) for name, (tokens, message) in BAD.items()}
calls["no caches"] = (lambda: GPT(TINY)([1], []), "GPT: .*cache.*got 0")
calls["a cache too few"] = (lambda: GPT(TINY)([1], GPT(TINY).new_caches()[:1]), "GPT: .*cache.*2")
test_bad_input = bad_input(calls)


def test_tokens_beyond_the_context_window_with_caches_raise(tokens: np.ndarray) -> None:
    model = GPT(TINY)
    caches = model.new_caches()
    model(tokens[:, :18], caches)
    with pytest.raises(ValueError, match=f"{LENGTH} 3 after 18"):
        model(tokens[:, :3], caches)
    assert all(cache.length == 18 for cache in caches)


@pytest.mark.parametrize("config", [None, DebugConfig, {"n_layers": 2}], ids=["None", "the class", "a dict"])
def test_gpt_requires_a_config(config: Any) -> None:
    with pytest.raises(TypeError, match=f"GPT: .*ModelConfig.*{re.escape(repr(config))}"):
        GPT(config)


def test_losses_store_at_least_256_rows_of_logits_and_fewer_of_quantized_models():
    assert models.n_logit_rows(2**18) == models.n_logit_rows(2**18, True) == 256
    assert models.n_logit_rows(50_304) >= 512  # a batch of GPT-2's benchmark in one piece
    assert models.n_logit_rows(1024, True) == models.n_logit_rows(1024) // 4


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("n_rows", [2**22, 1])
def test_logits_are_bfloat16_only_in_training_without_softcap(tied, n_rows, monkeypatch):
    """Training in bfloat16 computes the loss from bfloat16 logits; without gradients or with a cap they are float32."""
    model = GPT(replace(DebugConfig(), tied=tied, precision="bfloat16"))
    if kernels.matmul_operand(np.zeros((1, 1), np.float32), "bfloat16").dtype == np.float32:
        pytest.skip("bfloat16 products are not supported here")
    monkeypatch.setattr(models, "n_logit_rows", lambda *_: n_rows)
    dtypes = []
    original = CrossEntropy._weighted_sum

    def record_dtype(self, logits, *arguments):
        dtypes.append(logits.dtype.name)
        return original(self, logits, *arguments)

    monkeypatch.setattr(CrossEntropy, "_weighted_sum", record_dtype)
    tokens = np.arange(16).reshape(2, 8)
    batch = to_tensor(tokens, dtype=int), to_tensor(tokens + 1, dtype=int)
    loss = model.loss(*batch)
    loss.backward()
    assert set(dtypes) == {"bfloat16"}
    assert all(parameter.grad.dtype == np.float32 for parameter in model.parameters())
    dtypes.clear()
    with no_grad():
        np.testing.assert_allclose(float(loss.array), float(model.loss(*batch).array), 2e-3)
    model.config = replace(model.config, logit_cap=30.0)
    model.loss(*batch)
    assert set(dtypes) == {"float32"}


class Halved(Layer):
    """A head whose only argument is x."""

    def __init__(self, head: Layer) -> None:
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) * 0.5


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_user_head_receives_only_x(precision):
    model = GPT(replace(DebugConfig(), tied=False, precision=precision))
    model.head = Halved(model.head)
    tokens = to_tensor(np.arange(16).reshape(2, 8), dtype=int)
    loss = model.loss(tokens, tokens)
    loss.backward()
    assert np.isfinite(float(loss.array)) and model.head.head.weights.grad is not None


class TwoHeads(GPT):
    """A GPT that adds the logits of a second head with one parameter."""

    def __init__(self, config):
        super().__init__(config)
        self.second = Dense(config.embedding_dim, config.vocab_size, generator=1)

    def logits(self, x):
        return super().logits(x) + self.second(self.norm(x))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.filterwarnings("ignore:precision bfloat16")
def test_user_head_parameters_get_gradients(precision, monkeypatch):
    """Chunks are so small that the built-in head would compute the loss in several."""
    monkeypatch.setattr(models, "n_logit_rows", lambda *_: 2)
    config = replace(TINY, vocab_size=40, precision=precision)
    tokens = to_tensor(np.arange(16).reshape(2, 8), dtype=int)
    grads = []
    for batch_loss in (lambda model: model.loss(tokens, tokens), lambda model: CrossEntropy()(tokens, model(tokens))):
        model = TwoHeads(config)
        batch_loss(model).backward()
        grads.append({name: parameter.grad.array for name, parameter in model.named_parameters()})
    for name, gradient in grads[1].items():
        np.testing.assert_array_equal(grads[0][name], gradient)
        assert gradient.any()


class DoubledLoss(CrossEntropy):
    """Twice the cross-entropy."""

    def forward(self, labels, logits, scale=1.0):
        return 2 * super().forward(labels, logits, scale)


@pytest.mark.parametrize("loss_fn", [DoubledLoss(), lambda *args: 2 * CrossEntropy()(*args)], ids=["class", "function"])
def test_user_losses_are_called_for_many_logits_too(loss_fn, monkeypatch):
    monkeypatch.setattr(models, "n_logit_rows", lambda *_: 2)
    model, tokens = GPT(TINY), to_tensor(np.arange(8).reshape(2, 4) % 5, dtype=int)
    assert model.loss(tokens, tokens, loss_fn).item() == pytest.approx(2 * model.loss(tokens, tokens).item())
