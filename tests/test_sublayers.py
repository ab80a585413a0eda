"""Fused sublayers for a few tokens: bits of separate layers, the kernels against the reference, and fallbacks."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from attention_cases import normal
from test_quantized_blocks import block_rows

from tricycle import blocks, models
from tricycle.attention.cache import KeyValueCache
from tricycle.configs import ModelConfig
from tricycle.debug import use_reference
from tricycle.decoding.ragged import next_logits
from tricycle.finetuning.lora import Adapter, LoRAConfig, LoRATarget, LowRankUpdate
from tricycle.kernels import FEW_ROWS, ScoreOptions
from tricycle.kernels.quantized import QuantizedMatrix
from tricycle.kernels.quantized_blocks import BlockMatrix
from tricycle.kernels.sublayers import AttentionState, Linear, Norm, Sublayer, Sublayers, run_sublayers
from tricycle.layers import RMSNorm
from tricycle.models import GPT
from tricycle.parameter import Parameter
from tricycle.weights import quantize, set_memory_order
from tricycle_accelerators import compiled, matmul_plan, threads
from tricycle_accelerators.compiled import sublayers, vector_matmul
from tricycle_accelerators.compiled.loader import load_loops

SIZES = {"vocab_size": 97, "embedding_dim": 64, "n_heads": 4, "n_layers": 2, "context_window": 128}
LLAMA = {"activation": "swiglu", "norm": "rms_norm", "positions": "rotary", "bias": False}
GEMMA = {**LLAMA, "activation": "gelu", "gated": True, "norm_placement": "both", "norm_unit_offset": True}
N_PROMPT, N_NEW = 70, 20  # more tokens in a prompt than are fused

needs_numba = pytest.mark.skipif(compiled.unavailable_reason() is not None, reason="needs Numba")


def new_model(weights: str = "float32", **fields) -> GPT:
    model = GPT(ModelConfig(**SIZES, **fields)).eval()
    for i, parameter in enumerate(model.parameters()):
        parameter.array += 0.1 * normal(*parameter.shape, seed=i)
    return set_memory_order(model, "F") if weights == "float32" else quantize(model, weights)


def decoded(model: GPT, **cache_options) -> np.ndarray:
    """Return the logits after each of N_NEW tokens, which the model reads one at a time."""
    ids = np.random.default_rng(1).integers(0, SIZES["vocab_size"], (1, N_PROMPT + N_NEW))
    caches = model.new_caches(**cache_options)
    with model.evaluating():
        model(ids[:, :N_PROMPT], caches)
        return np.concatenate([model(ids[:, t : t + 1], caches).numpy() for t in range(N_PROMPT, ids.shape[1])])


@pytest.fixture
def n_fused(monkeypatch) -> list[int]:
    """Return a list that grows by the number of sublayers with each call that Numba computes."""
    numbers = []
    (decline_reason, run), *others = run_sublayers.implementations_for(np.ndarray)

    def counted(x, sublayers, states):
        result = run(x, sublayers, states)
        if result is not NotImplemented:
            numbers.append(len(sublayers))
        return result

    monkeypatch.setitem(run_sublayers.implementations, np.ndarray, [(decline_reason, counted), *others])
    return numbers


@pytest.fixture
def without_fusing(monkeypatch) -> Callable[[], None]:
    """Return a function after whose call layers compute one after the other."""

    def stop() -> None:
        for module in (blocks, models):
            monkeypatch.setattr(module, "FUSED", {})

    return stop


def decoded_together(model: GPT, n_new: list[int]) -> np.ndarray:
    """Return the logits of steps in which texts of different lengths each read some new tokens, those of `n_new`."""
    draw = np.random.default_rng(2)
    caches = [model.new_caches() for _ in n_new]
    for i, of_text in enumerate(caches):
        next_logits(model, [draw.integers(0, SIZES["vocab_size"], N_PROMPT + i).tolist()], [of_text])
    steps = [[draw.integers(0, SIZES["vocab_size"], n).tolist() for n in n_new] for _ in range(2)]
    return np.concatenate([next_logits(model, tokens, caches, every=True) for tokens in steps])


# -------------------------------------------------------------------- models
@needs_numba
@pytest.mark.parametrize("n_new", [[1, 1, 1], [2, 3], [5], [1] * 7, [1] * FEW_ROWS], ids=str)
@pytest.mark.parametrize(
    "fields",
    [LLAMA, {"window": 7}, {**GEMMA, "qk_norm": True, "qk_norm_gain": True, "qk_norm_per_head": False}],
    ids=["llama", "window", "gemma"],
)
@pytest.mark.parametrize("weights", ["float32", "int8", "bfloat16"])
def test_texts_together_have_the_same_bits_as_from_separate_layers(
    weights, fields, n_new, n_fused, without_fusing, monkeypatch
):
    monkeypatch.setattr(matmul_plan, "MIN_VECTORS_BYTES", 0)
    model = new_model(weights, **fields)
    fused = decoded_together(model, n_new)
    assert n_fused == [4] * 2
    without_fusing()
    np.testing.assert_array_equal(fused, decoded_together(model, n_new))


@needs_numba
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("n_new", "is_fused"),
    [([1] * 17, True), ([14] * 9, True), ([16] * 8, False), ([17, 1], False)],
    ids=["17 texts", "126 tokens", "128 tokens", "17 tokens of a long text"],
)
def test_more_than_few_rows_are_fused_in_float32_up_to_127_tokens(
    n_new, is_fused, precision, n_fused, without_fusing, monkeypatch
):
    monkeypatch.setattr(vector_matmul, "MAX_VECTORS", 127)  # of int8: more rows are left to others
    model = new_model("int8", **LLAMA).use_precision(precision)
    fused = decoded_together(model, n_new)
    assert n_fused == ([4] * 2 if is_fused and precision == "float32" else [])
    without_fusing()
    # NumPy computes more than a few small rows
    np.testing.assert_allclose(fused, decoded_together(model, n_new), 1e-4, 1e-4)


@needs_numba
def test_short_prompts_are_fused(n_fused, without_fusing):
    model, caches = new_model("int8", **LLAMA), []

    def run() -> np.ndarray:
        caches[:] = [model.new_caches() for _ in range(2)]
        prompts = [[list(range(17))], [list(range(40))], [list(range(24)), [1]], [[2], list(range(30))]]
        return np.concatenate([next_logits(model, new, caches[: len(new)], every=True) for new in prompts])

    fused = run()
    assert n_fused == [4, 4, 4]  # not the third step, after which the first text has 81 tokens
    without_fusing()
    np.testing.assert_allclose(fused, run(), 1e-4, 1e-4)


@needs_numba
def test_texts_that_join_and_leave_have_the_same_bits_as_from_separate_layers(n_fused, without_fusing):
    model = new_model("int8", **LLAMA)

    def run() -> np.ndarray:
        caches = [model.new_caches() for _ in range(3)]
        for i, of_text in enumerate(caches):
            next_logits(model, [[i] * (N_PROMPT + i)], [of_text])
        steps = [(0, 1), (0, 1, 2), (0,), (0, 1, 2), (1, 2), (2, 1)]
        logits = [next_logits(model, [[i] for i in texts], [caches[i] for i in texts]) for texts in steps]
        return np.concatenate(logits)

    fused = run()
    assert n_fused == [4] * 6
    without_fusing()
    np.testing.assert_array_equal(fused, run())


class DoubledCache(KeyValueCache):
    """A user's cache, which keeps twice the values."""

    def append(self, keys, values):
        return super().append(keys, 2 * values)


@needs_numba
def test_texts_with_a_cache_of_another_kind_are_left_to_separate_layers(n_fused):
    model = new_model("int8", **LLAMA)
    caches = [model.new_caches(), [DoubledCache(128) for _ in model.blocks]]
    for of_text in caches:
        next_logits(model, [[1, 2, 3] * 25], [of_text])
    together = next_logits(model, [[4], [4]], caches)
    assert n_fused == [1] * 2  # the MLPs
    assert not np.array_equal(*together)


@needs_numba
@pytest.mark.parametrize(
    ("fields", "per_layer"),
    [
        ({}, 2),
        (LLAMA, 2),
        ({**LLAMA, "n_key_heads": 2, "rotary_fraction": 0.5}, 2),
        ({"window": 7, "softmax": "softmax1", "norm": "rms_norm"}, 2),
        ({**LLAMA, "qk_norm": True}, 2),
        ({**LLAMA, "qk_norm": True, "qk_norm_gain": True, "n_key_heads": 2}, 2),
        ({**LLAMA, "qk_norm": True, "qk_norm_gain": True, "qk_norm_per_head": False, "n_key_heads": 2}, 2),
        ({"norm_placement": "both"}, 2),
        ({**LLAMA, "norm_placement": "output", "qk_norm": True, "qk_norm_gain": True, "qk_norm_per_head": False}, 2),
        ({**GEMMA, "qk_norm": True, "qk_norm_gain": True, "n_key_heads": 1, "head_size": 32}, 2),
        ({"activation": "gelu_exact"}, 1),
        ({**GEMMA, "activation": "gelu_exact"}, 1),
        ({"activation": "relu", "gated": True}, 1),
        ({"softmax": "sink"}, 1),
        ({"score_cap": 3.0}, 1),
        ({"token_shift": True}, 1),
        ({"norm_placement": "after"}, 0),
        ({"residual_scale": 0.3}, 2),
        ({"parallel": True}, 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("weights", ["float32", "int8", "bfloat16", "float16"])
def test_logits_have_the_same_bits_as_from_separate_layers(weights, fields, per_layer, n_fused, without_fusing):
    model = new_model(weights, **fields)
    fused = decoded(model)
    # all blocks at once if all sublayers can be fused, else each one that can
    assert n_fused == ([4] * N_NEW if per_layer == 2 else [1] * (N_NEW * SIZES["n_layers"] * per_layer))
    without_fusing()
    np.testing.assert_array_equal(fused, decoded(model))


@needs_numba
def test_other_sublayers_are_fused_if_one_is_declined(n_fused, without_fusing):
    model = new_model(**LLAMA)
    last = model.blocks[1].mlp.projection
    last.weights.array = last.weights.array.copy("C")
    fused = decoded(model)
    assert n_fused == [1] * (3 * N_NEW)
    without_fusing()
    np.testing.assert_array_equal(fused, decoded(model))


@needs_numba
@pytest.mark.parametrize("fields", [LLAMA, {**GEMMA, "qk_norm": True, "qk_norm_gain": True}], ids=["llama", "gemma"])
@pytest.mark.parametrize("name", ["weights", "array", "gain", "eps", "in place", "block", "method"])
def test_change_between_tokens_counts_from_the_next_token_on(name, fields, without_fusing, monkeypatch):
    """A model whose parameters are known from the token before, and one that never fuses, are changed alike."""

    def change(model: GPT) -> None:
        block = model.blocks[1]
        norm, up = block.attention.query_norm or block.mlp_norm, block.mlp.up
        if name == "weights":
            up.weights = Parameter(up.weights.array * 2, "matrix")
        elif name == "array":
            up.weights.array = up.weights.array * 2
        elif name == "gain":
            norm.gain.array = norm.gain.array * 2
        elif name == "eps":
            norm.eps = 10.0
        elif name == "in place":
            up.weights.array *= 2
            norm.gain.array *= 2
            block.mlp_norm.gain.array *= 3
        elif name == "block":
            model.blocks.reverse()
        else:
            forward = RMSNorm.forward
            monkeypatch.setattr(RMSNorm, "forward", lambda self, x, *args: forward(self, x * 2 + 1, *args))

    def run(model: GPT) -> list[np.ndarray]:
        caches, logits = model.new_caches(), []
        with model.evaluating():
            model(np.array([[1, 2, 3]]), caches)
            for t in range(4):
                if t == 2:
                    change(model)
                logits.append(model(np.array([[t]]), caches).numpy())
        monkeypatch.undo()
        return logits

    fused = run(new_model(**fields))
    without_fusing()
    separate = run(new_model(**fields))
    np.testing.assert_array_equal(fused, separate)


@needs_numba
def test_few_bit_precisions_fuse_as_well(n_fused):
    model = new_model()
    expected = decoded(model)
    model.use_precision("bfloat16")
    np.testing.assert_allclose(decoded(model), expected, 0.1, 0.1)  # the prompt has 16-bit products
    assert n_fused == [4] * (2 * N_NEW)


class Doubled(blocks.MLPBlock):
    """An MLP of a user, with twice the result."""

    def forward(self, x, dtype=None):
        return super().forward(x, dtype) * 2


def use_own_mlp(model: GPT) -> None:
    for block in model.blocks:
        block.mlp.__class__ = Doubled


def hook_everywhere(model: GPT) -> list[str]:
    """Give each layer of the second block a hook, as `tricycle_lab.hooks` does; return the names that were called."""
    called: list[str] = []
    for name, layer in model.blocks[1].named_layers():
        forward = layer.forward
        layer.forward = lambda *args, name=name, forward=forward, **options: (
            called.append(name) or forward(*args, **options)
        )
    return called


@needs_numba
@pytest.mark.parametrize("fields", [LLAMA, {**GEMMA, "qk_norm": True}], ids=["llama", "gemma"])
def test_hooks_of_all_layers_are_called(fields):
    model = new_model(**fields)
    expected = decoded(model)
    called = hook_everywhere(model)
    np.testing.assert_array_equal(decoded(model), expected)
    names = {name for name, _ in model.blocks[1].named_layers()}
    assert set(called) == names and min(map(called.count, names)) >= N_NEW


@needs_numba
def test_caches_are_freed_with_their_text_without_garbage_collection(n_fused):
    model = new_model(**LLAMA)
    caches = model.new_caches()
    with model.evaluating():
        for token in ([[1, 2]], [[3]], [[4]]):
            model(np.array(token), caches)
    assert n_fused == [4, 4]
    memory = weakref.ref(caches[0]._keys)
    gc.disable()
    try:
        del caches
        assert memory() is None
    finally:
        gc.enable()


def adapt(model: GPT) -> None:
    low_rank = LowRankUpdate(64, 64, [LoRATarget("projection", 0, 64, 2, 1.0)], 0.0, np.random.default_rng(0))
    adapter = Adapter(model, {"blocks.0.attention.projection": low_rank}, LoRAConfig(rank=2)).attach()
    for i, parameter in enumerate(adapter.parameters()):
        parameter.array += normal(*parameter.shape, seed=i)


@needs_numba
@pytest.mark.parametrize("change", [use_own_mlp, adapt, lambda model: model.blocks[0].mlp.up.freeze()])
def test_changed_models_give_the_same_as_without_fusing(change: Callable[[GPT], None], without_fusing):
    model = new_model(**LLAMA)
    before = decoded(model)
    change(model)
    after = decoded(model)
    assert np.array_equal(before, after) == (change not in (use_own_mlp, adapt))
    without_fusing()
    np.testing.assert_array_equal(after, decoded(model))


@needs_numba
@pytest.mark.parametrize("dtype", ["int8", "float16"])
def test_caches_of_fewer_bits_are_left_to_separate_kernels(dtype, n_fused, without_fusing):
    model = new_model(**LLAMA)
    fused = decoded(model, dtype=dtype)
    assert n_fused == [1] * (N_NEW * SIZES["n_layers"])
    without_fusing()
    np.testing.assert_array_equal(fused, decoded(model, dtype=dtype))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_reference_computes_the_same(dtype):
    model = new_model(**LLAMA)
    for parameter in model.parameters():
        parameter.array = parameter.array.astype(dtype)
    expected = decoded(model)
    assert expected.dtype == dtype
    with use_reference():
        np.testing.assert_allclose(decoded(model), expected, 1e-3, 1e-4 if dtype == np.float32 else 1e-9)


def test_full_context_raises_the_error_of_the_layer():
    model = new_model()
    caches = model.new_caches()
    with model.evaluating():
        model(np.zeros((1, 128), int), caches)
        with pytest.raises(ValueError, match="context"):
            model(np.zeros((1, 1), int), caches)


@pytest.mark.parametrize("place", ["attention_norm", "mlp_post_norm", "attention.query_norm", "attention.key_norm"])
def test_norm_of_another_size_raises_the_error_of_the_layer(place):
    model = new_model(**GEMMA, qk_norm=True)
    *parts, name = place.split(".")
    setattr(getattr(model.blocks[1], parts[0]) if parts else model.blocks[1], name, RMSNorm(8))
    with model.evaluating(), pytest.raises(ValueError, match=r"RMSNorm\(size=8\)"):
        model(np.zeros((1, 1), int), model.new_caches())


def test_training_does_not_fuse(n_fused):
    model = new_model().train()
    model(np.zeros((1, 1), int)).sum().backward()
    assert not n_fused and all(parameter.grad is not None for parameter in model.blocks[0].mlp.parameters())


# -------------------------------------------------------------------- kernels
def linear(kind: str, n_in: int, n_out: int, bias: bool = True, seed: int = 0) -> Linear:
    weights = normal(n_in, n_out, seed=seed) / np.float32(n_in**0.5)
    matrix = np.asfortranarray(weights)
    if kind in ("Q4_K", "Q8_0"):
        if not load_loops("block_rows").HAS_BLOCKS:
            pytest.skip("needs AVX2 or ARM's dot products")
        matrix = BlockMatrix((block_rows(kind, n_out, n_in, seed),), True)
    elif kind != "float32":
        matrix = QuantizedMatrix.quantize(weights, kind, transposed=True)
    return Linear(matrix, normal(n_out, seed=seed + 1) if bias else None)


def norm_of(size: int, subtract_mean: bool, bias: bool) -> Norm:
    return Norm(normal(size, seed=5), normal(size, seed=6) if bias else None, 1e-5, subtract_mean)


NORMS = [(True, True), (True, False), (False, False)]
KINDS = ["float32", "int8", "bfloat16", "float16", "Q8_0", "Q4_K"]


# Of tokens, the text and how many tokens of it each attends to.
ONE_TOKEN = [(0, 150)]
THREE_TOKENS = [(0, 149), (0, 150), (1, 20)]
EIGHT_TOKENS = [(0, 147), (0, 148), (0, 149), (0, 150), (1, 70), (2, 1), (2, 2), (2, 3)]


def assert_close_for_all_threads(arguments: tuple, monkeypatch, tolerance: float = 2e-2) -> None:
    """Compare with the reference, whose products do not round x to 8 or 16 bits, and one with three threads."""
    expected = run_sublayers.reference(*arguments)
    results = []
    for n_threads in (1, 3):
        monkeypatch.setattr(threads, "n_threads", lambda n=n_threads: n)
        results += [run_sublayers(*arguments) for _ in range(3)]
    np.testing.assert_allclose(results[0], expected, 0, tolerance * float(np.abs(expected - arguments[0]).max()))
    assert all(np.array_equal(result, results[0]) for result in results)


@needs_numba
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", ["swiglu", "gelu", "geglu"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("n_tokens", [1, 3, 8])
def test_mlp_matches_the_reference(n_tokens, kind, activation, norm, n_fused, monkeypatch):
    hidden = 256 if activation == "gelu" else 512
    linears = linear(kind, 256, hidden), linear(kind, 256, 256, False)
    post_norm = norm_of(256, *norm)._replace(unit_offset=True) if activation == "geglu" else None
    sublayers = Sublayers([Sublayer(norm_of(256, *norm), *linears, activation, post_norm=post_norm, scale=0.3)])
    assert_close_for_all_threads((normal(n_tokens, 256), sublayers, [None]), monkeypatch)
    assert n_fused == [1] * 6


@needs_numba
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("n_rotated", "window", "off_by_one", "norm", "sizes"),
    [
        (0, None, False, NORMS[0], None),
        (64, None, True, NORMS[1], (256, 128)),
        (32, 70, False, NORMS[2], None),
        (64, 1000, False, NORMS[2], (64, 64)),
    ],
)
@pytest.mark.parametrize("tokens", [ONE_TOKEN, THREE_TOKENS, EIGHT_TOKENS], ids=len)
def test_attention_matches_the_reference(
    tokens, kind, n_rotated, window, off_by_one, norm, sizes, n_fused, monkeypatch
):
    angles = normal(len(tokens), n_rotated // 2, seed=7)
    rope = (np.cos(angles), np.sin(angles)) if n_rotated else None
    texts, counts = zip(*tokens)
    memory = [(normal(1, n, 2, 64, seed=n), normal(1, n, 2, 64, seed=n + 1)) for n in (160, 90, 4)]
    cached = list(zip(*(memory[text] for text in texts)))
    linears = linear(kind, 256, 8 * 64), linear(kind, 256, 256, seed=2)
    qk_norms = sizes and tuple(norm_of(size, *norm)._replace(unit_offset=True, eps=0.1) for size in sizes)
    options = ScoreOptions(0.125, 0, window), off_by_one, norm_of(256, *norm) if sizes else None, qk_norms
    attention = Sublayer(norm_of(256, *norm), *linears, "", *options)
    arguments = normal(len(tokens), 256), Sublayers([attention]), [AttentionState(rope, *cached, counts)]

    def copy_last() -> np.ndarray:
        """Return the keys and values of all tokens, (2, N, K, D)."""
        return np.array([[array[0, n - 1] for array, n in zip(arrays, counts)] for arrays in cached])

    before = copy_last()
    assert_close_for_all_threads(arguments, monkeypatch)
    assert n_fused == [1] * 6
    written = copy_last()
    run_sublayers.reference(*arguments)
    assert (written != before).any((2, 3)).all()
    np.testing.assert_allclose(written, copy_last(), 0, 0.05)


@needs_numba
def test_keys_and_values_may_move_between_tokens(n_fused):
    attention = Sublayer(norm_of(256, *NORMS[0]), linear("float32", 256, 8 * 64), linear("float32", 256, 256), "")
    alone, x = Sublayers([attention]), normal(1, 256)
    first, longer = ((normal(1, n, 2, 64, seed=8), normal(1, n, 2, 64, seed=9)) for n in (70, 90))
    for arrays, n_tokens in ((first, 69), (first, 70), (longer, 71), (first, 12), (longer[::-1], 90)):
        states = [AttentionState(None, *([array] for array in arrays), [n_tokens])]
        copies = ([array.copy()] for array in arrays)
        expected = run_sublayers.reference(x, alone, [AttentionState(None, *copies, [n_tokens])])
        np.testing.assert_allclose(run_sublayers(x, alone, states), expected, 0, 1e-4)
    assert n_fused == [1] * 5
    reason = sublayers.run_sublayers.decline_reason(x, alone, [AttentionState(None, *([a] for a in longer), [91])])
    assert "91 tokens, got 90" in reason


@needs_numba
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_infinity_and_nan_are_left_to_the_reference(bad, n_fused):
    x = normal(1, 256)
    x[0, 3] = bad
    sublayer = Sublayer(norm_of(256, False, False), linear("Q8_0", 256, 512), linear("Q8_0", 256, 256), "swiglu")
    with np.errstate(all="ignore"):
        assert np.isnan(run_sublayers(x, Sublayers([sublayer]), [None])).all() and not n_fused


ROW, NORM, UP, DOWN = normal(1, 64), norm_of(64, True, True), linear("float32", 64, 128), linear("float32", 64, 64)
MLP, ATTENTION = Sublayer(NORM, UP, DOWN, "swiglu"), Sublayer(NORM, linear("float32", 64, 128), DOWN)
CACHED, OPTIONS = ([normal(1, 5, 1, 32)], [normal(1, 5, 1, 32)]), ScoreOptions(0.2, 4)


@needs_numba
@pytest.mark.parametrize(
    ("x", "changes", "phrase"),
    [
        (ROW, {}, None),
        (normal(0, 64), {}, "rows of float32.*0, 64"),
        (normal(128, 64), {}, "from 1 to .* rows, got 128"),
        (ROW.astype(np.float64), {}, "float64"),
        (ROW, {"norm": NORM._replace(gain=NORM.gain.astype(np.float64))}, "parameters of float32"),
        (ROW, {"first": UP._replace(bias=UP.bias[::2])}, "parameters of float32"),
        (ROW, {"first": Linear(UP.weights.copy("C"), None)}, "matrix by columns"),
        (ROW, {"first": Linear(QuantizedMatrix.quantize(UP.weights, "int8"), None)}, "lies by rows"),
        (ROW, {"activation": "gelu"}, "64 and 64 channels, got .*64, 128"),
        (ROW, {"first": linear("float32", 64, 129), "activation": "geglu"}, "64 and 64 channels, got .*64, 129"),
        (ROW[:, :32].copy(), {}, "32 and 64 channels"),
        (ROW, {"first": UP._replace(bias=UP.bias[:64])}, "a bias for 128"),
        (ROW, {"post_norm": norm_of(32, True, True)}, "64 and 64 channels"),
        (ROW, {"post_norm": NORM._replace(bias=NORM.bias[:32])}, "64 and 64 channels"),
        (ROW, {"post_norm": NORM._replace(gain=NORM.gain.astype(np.float64))}, "parameters of float32"),
    ],
)
def test_mlp_declines_with_a_reason(x, changes, phrase):
    arguments = x, Sublayers([MLP._replace(**changes)]), [None]
    for _ in range(2):  # the second time from memory
        reason = sublayers.run_sublayers.decline_reason(*arguments)
        assert reason is None if phrase is None else re.search(phrase, reason)


@needs_numba
@pytest.mark.parametrize(
    ("changes", "options", "phrase"),
    [
        ({"norms": (32, 32)}, OPTIONS, None),
        ({"norms": (64, 32)}, OPTIONS, None),
        ({"norms": (16, 32)}, OPTIONS, "norms for 32 or 64 channels, got .16"),
        ({"norms": (64, 64)}, OPTIONS, "norms for 32 or 32 channels, got .64"),
        ({}, OPTIONS, None),
        ({}, OPTIONS._replace(softcap=2.0), "soft-cap"),
        ({"keys": [CACHED[0][0].astype(np.float16)]}, OPTIONS, "caches of float32"),
        ({"values": [CACHED[1][0][:, ::2]]}, OPTIONS, "caches of float32"),
        ({"values": [CACHED[1][0][:, :4].copy()]}, OPTIONS, "one shape"),
        ({"n_tokens": [6]}, OPTIONS, "6 tokens, got 5"),
        ({"n_tokens": [4, 5]}, OPTIONS, "each of 1 rows"),
        ({"keys": CACHED[0] * 2, "values": CACHED[1] * 2, "n_tokens": [4, 5]}, OPTIONS, "each of 1 rows"),
        ({"keys": [normal(1, 5, 2, 32)], "values": [normal(1, 5, 2, 32)]}, OPTIONS, "queries"),
        ({"rope": (normal(1, 16), normal(1, 16))}, OPTIONS, None),
        ({"rope": (normal(1, 17), normal(1, 17))}, OPTIONS, "angles that fit"),
        ({"rope": (np.ones((1, 8)), np.ones((1, 8)))}, OPTIONS, "cosines.*float32"),
    ],
)
def test_attention_declines_with_a_reason(changes, options, phrase):
    qk_norms = tuple(norm_of(size, False, False) for size in changes.get("norms", ())) or None
    state = AttentionState(None, *CACHED, [5])._replace(**{key: changes[key] for key in changes if key != "norms"})
    attention = ATTENTION._replace(score_options=options, qk_norms=qk_norms)
    arguments = ROW, Sublayers([MLP, attention]), [None, state]
    reason = sublayers.run_sublayers.decline_reason(*arguments)
    assert reason is None if phrase is None else re.search(phrase, reason)
