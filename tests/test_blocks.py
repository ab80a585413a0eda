"""The blocks of a transformer: shapes, causality, gradients, caches, refusals."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from packed_attention import SelfAttention
from tables import bad_input
from test_layers import check_layer_gradients

from tricycle.activation import ACTIVATIONS
from tricycle.attention import KeyValueCache, length_mask
from tricycle.blocks import GPT2TransformerBlock, MLPBlock, MultiHeadSelfAttention, TransformerBlock
from tricycle.configs import ModelConfig
from tricycle.functions import Softmax
from tricycle.gradcheck import gradcheck
from tricycle.layers import Layer
from tricycle.sequences.cross_attention import DecoderBlock, MultiHeadAttention
from tricycle.softmaxes import SOFTMAXES, AdaptiveSoftmax, BlockSoftmax
from tricycle.tensor import to_tensor
from tricycle_lab.probe import Probe


@pytest.mark.nightly_except(4)
@pytest.mark.parametrize(
    "norm, activation, rotary", list(itertools.product(["layer_norm", "rms_norm"], ACTIVATIONS, [False, True])), ids=str
)
def test_gradients_of_the_transformer_block(norm: str, activation: str, rotary: bool, rng: np.random.Generator) -> None:
    positions = "rotary" if rotary else "learned"
    block = GPT2TransformerBlock(4, 2, 8, expansion_ratio=2, activation=activation, norm=norm, positions=positions)
    check_layer_gradients(block, rng.standard_normal((2, 3, 4)))


# -------------------------------------------------------------------- layers and blocks
def test_block_accepts_unbatched_sequence(rng: np.random.Generator) -> None:
    block, x = GPT2TransformerBlock(8, 2, 24, generator=0), rng.standard_normal((5, 8))
    np.testing.assert_allclose(block(x).array, block(x[None]).array[0], rtol=1e-4, atol=1e-5)


def test_mlp_is_two_projections_with_an_activation(rng: np.random.Generator) -> None:
    mlp, x = MLPBlock(4, 3, "relu", generator=1), rng.standard_normal((5, 4)).astype(np.float32)
    hidden = np.maximum(x @ mlp.up.weights.array, 0)
    np.testing.assert_allclose(mlp(x).array, hidden @ mlp.projection.weights.array, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "activation, ratio, up, hidden",
    [
        ("gelu", 4, 96, 96),
        ("relu", 1.5, 36, 36),
        ("swish", 0.5, 12, 12),
        ("swiglu", 4, 128, 64),  # 2/3 of 96
        ("swiglu", 2, 64, 32),
        ("swiglu", 2.1, 80, 40),  # 2/3 of 50 is 33.3, rounded up to a multiple of 8
    ],
)
def test_mlp_hidden_size(activation: str, ratio: float, up: int, hidden: int) -> None:
    mlp = MLPBlock(24, ratio, activation)
    assert mlp.up.weights.shape == (24, up) and mlp.projection.weights.shape == (hidden, 24)


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_block_adds_attention_and_mlp_to_residual_stream(norm: str, rng: np.random.Generator) -> None:
    block, x = GPT2TransformerBlock(8, 2, 6, norm=norm, generator=0), to_tensor(rng.standard_normal((2, 6, 8)))
    middle = x + block.attention(block.attention_norm(x))
    expected = middle + block.mlp(block.mlp_norm(middle))
    assert np.array_equal(block(x).array, expected.array)
    for p in (*block.attention.projection.parameters(), *block.mlp.projection.parameters()):
        p.array[...] = 0
    assert np.array_equal(block(x).array, x.array)


def test_dropout_follows_both_projections_only_in_training(rng: np.random.Generator) -> None:
    block, x = GPT2TransformerBlock(8, 2, 6, dropout=0.5, generator=0), rng.standard_normal((2, 6, 8))
    for part in (block.attention, block.mlp):
        share = (part(x).array == 0).mean()
        assert 0.2 < share < 0.8
    assert not np.array_equal(block(x).array, block(x).array)
    block.eval()
    assert np.array_equal(block(x).array, block(x).array)
    same = GPT2TransformerBlock(8, 2, 6, dropout=0.0, generator=0)
    assert np.array_equal(block(x).array, same(x).array)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_bias_option_of_each_layer(norm: str, bias: bool) -> None:
    block = GPT2TransformerBlock(8, 2, 6, norm=norm, bias=bias)
    names = {name for name, _ in block.named_parameters() if name.endswith("bias")}
    dense = {f"{part}.bias" for part in ("attention.qkv", "attention.projection", "mlp.up", "mlp.projection")}
    norms = {"attention_norm.bias", "mlp_norm.bias"} if norm == "layer_norm" else set()
    assert names == (dense | norms if bias else set())


# -------------------------------------------------------------------- softmax variants
@pytest.mark.parametrize("per_head", [True, False])
def test_block_softmax_scales_get_gradients(per_head: bool, rng: np.random.Generator) -> None:
    layer = MultiHeadSelfAttention(8, 2, 24, softmax=BlockSoftmax(3, per_head=per_head), generator=0)
    scales = dict(layer.named_parameters())["softmax_scales"]
    assert scales.shape == ((2, 3, 24) if per_head else (3, 24)) and (scales.array == 1).all()
    layer(rng.standard_normal((2, 10, 8))).backward()
    gradient = scales.grad.array
    # 8 keys a block: 10 queries see the first, 2 of them the second, none the third; later positions did not occur
    visible = np.zeros((3, 24), bool)
    visible[0, :10] = visible[1, 8:10] = True
    assert ((gradient != 0) == visible).all()
    layer.use_softmax("softmax")
    assert "softmax_scales" not in dict(layer.named_parameters())


@pytest.mark.parametrize("per_head", [True, False])
def test_scale_per_block_pair_equals_repeated_scales(per_head: bool, rng: np.random.Generator) -> None:
    """All positions of a block share one scale; test_properties.py compares gradients."""
    layer = MultiHeadSelfAttention(8, 2, 24, softmax=BlockSoftmax(3, per_head=per_head), generator=0)
    x = rng.standard_normal((2, 21, 8))
    pairs = rng.random((2, 3, 3) if per_head else (3, 3))
    layer.softmax_scales.array[...] = pairs.repeat(8, axis=-1)
    expected = layer(x)
    layer.use_softmax(BlockSoftmax(3, per_head=per_head, per_position=False))
    assert layer.softmax_scales.shape == pairs.shape and (layer.softmax_scales.array == 1).all()
    layer.softmax_scales.array[...] = pairs
    with Probe(layer) as probe:
        np.testing.assert_array_equal(layer(x).array, expected.array)
    (weights,) = probe.weights.values()
    sums = weights[..., :8].sum(axis=-1)[0, :, 16]  # of a query in the third block, over the keys of the first
    np.testing.assert_allclose(sums, np.broadcast_to(pairs[..., 0, 2], 2), rtol=1e-5)
    layer.softmax_scales.array = np.ones((3, 21), np.float32)
    with pytest.raises(ValueError, match=r"scale.*\(3, 21\)"):
        layer(x)


def test_attention_accepts_a_user_softmax(rng: np.random.Generator) -> None:
    """A custom softmax variant: uniform over the visible keys, which is a mean of the values."""

    class Uniform(Softmax):
        def row_softmax(self, scores):
            visible = (scores > -np.inf).astype(scores.dtype)
            return visible / visible.sum(axis=-1, keepdims=True)

        def row_softmax_backward(self, grad, scores, weights):
            return np.zeros_like(scores)

        attend = AdaptiveSoftmax.attend  # by rows, as for all that the kernels do not know

    x = to_tensor(rng.standard_normal((2, 20, 8)))
    layer = MultiHeadSelfAttention(8, 2, 24, softmax=Uniform(), generator=0)
    values = layer.qkv(x).array[..., 16:]
    means = np.cumsum(values, axis=1) / np.arange(1, 21)[:, None]
    out = layer(x)
    np.testing.assert_allclose(out.array, layer.projection(means).array, rtol=1e-4, atol=1e-5)
    out.backward()
    assert (layer.qkv.weights.grad.array[:, :16] == 0).all() and np.isfinite(x.grad.array).all()


@pytest.mark.parametrize("softmax", SOFTMAXES)
def test_cross_attention_gradients(softmax: str, rng: np.random.Generator) -> None:
    layer = MultiHeadAttention(8, 2, key_size=5, value_size=3, softmax=softmax, context_window=20, generator=0)
    query, key, value = (rng.standard_normal((2, *shape)) for shape in ((17, 8), (20, 5), (20, 3)))
    out = layer(query, key, value)
    assert out.shape == (2, 17, 8)
    check_layer_gradients(layer, query, key, value)


def test_cross_attention_to_itself_equals_bidirectional_self_attention(rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 20, 8))
    layer = MultiHeadAttention(8, 2, generator=0)
    qkv = np.concatenate([part(x).array for part in (layer.query, layer.key, layer.value)], axis=-1)
    expected = layer.projection(SelfAttention(2, causal=False)(qkv)).array
    np.testing.assert_allclose(layer(x, x).array, expected, rtol=1e-4, atol=1e-5)


SMALL = ModelConfig(embedding_dim=8, n_heads=2, context_window=4)
ATTENTION = MultiHeadSelfAttention(8, 2, 4)
BAD = {
    "heads": (lambda: MultiHeadSelfAttention(8, 3, 4), "ModelConfig: .*n_heads.*divisor"),
    "no head": (lambda: MultiHeadSelfAttention(8, 0, 4), "ModelConfig: .*n_heads.*got 0"),
    "no window": (lambda: MultiHeadSelfAttention(8, 2, -1), "ModelConfig: .*context_window.*got -1"),
    "dropout": (lambda: MultiHeadSelfAttention(8, 2, 4, dropout=1.0), "ModelConfig: .*dropout.*got 1.0"),
    "width": (lambda: ATTENTION(np.ones((1, 4, 6))), r"MultiHeadSelfAttention\(embedding_dim=8\)"),
    "a vector": (lambda: ATTENTION(np.ones(8)), r"MultiHeadSelfAttention\(embedding_dim=8\)"),
    "no token": (lambda: ATTENTION(np.ones((1, 0, 8))), r"MultiHeadSelfAttention.*tokens.*got \(1, 0, 8\)"),
    "too long": (lambda: ATTENTION(np.ones((1, 5, 8))), r"MultiHeadSelfAttention\(context_window=4\): .*got 5"),
    "mlp width": (lambda: MLPBlock(0), "ModelConfig: .*embedding_dim.*got 0"),
    "mlp ratio 0": (lambda: MLPBlock(8, 0), "ModelConfig: .*expansion_ratio.*got 0"),
    "mlp ratio nan": (lambda: MLPBlock(8, np.nan), "ModelConfig: .*expansion_ratio.*finite"),
    "mlp activation": (lambda: MLPBlock(8, activation="softplus"), "ModelConfig: .*activation.*softplus"),
    "mlp input": (lambda: MLPBlock(8)(np.ones((2, 4))), r"Dense\(from_size=8\): .*last axis"),
    "norm": (lambda: GPT2TransformerBlock(8, 2, 4, norm="batch_norm"), "ModelConfig: .*norm.*batch_norm"),
    "heads of keys": (lambda: MultiHeadSelfAttention(8, 4, 4, n_key_heads=3), "ModelConfig: .*n_key_heads"),
    "no keys": (lambda: DecoderBlock(SMALL)(np.ones((1, 4, 8))), r"DecoderBlock: .*cross\.project_kv.*None"),
    "block input": (lambda: GPT2TransformerBlock(8, 2, 4)(np.ones((1, 4, 6))), r"LayerNorm\(size=8\): .*last axis"),
}


test_bad_input = bad_input(BAD)


def test_cached_tokens_count_toward_context_window() -> None:
    attention, cache = MultiHeadSelfAttention(8, 2, 4), KeyValueCache(10)
    attention(np.ones((1, 3, 8)), cache)
    with pytest.raises(ValueError, match=r"context_window=4.*got 5"):
        attention(np.ones((1, 2, 8)), cache)
    assert cache.length == 3


# -------------------------------------------------------------------- encoder and decoder blocks
def copy_attention(tricycle_layer: Layer, torch_layer) -> None:
    """PyTorch keeps the three projections in one matrix (3 C, C)."""
    if isinstance(tricycle_layer, MultiHeadSelfAttention):
        weights, bias = tricycle_layer.qkv.weights.array, tricycle_layer.qkv.bias.array
    else:
        parts = (tricycle_layer.query, tricycle_layer.key, tricycle_layer.value)
        weights, bias = (np.concatenate([getattr(p, n).array for p in parts], axis=-1) for n in ("weights", "bias"))
    put(torch_layer.in_proj_weight, weights.T)
    put(torch_layer.in_proj_bias, bias)
    put(torch_layer.out_proj.weight, tricycle_layer.projection.weights.array.T)
    put(torch_layer.out_proj.bias, tricycle_layer.projection.bias.array)


def put(torch_parameter, array: np.ndarray) -> None:
    import torch

    with torch.no_grad():
        torch_parameter.copy_(torch.tensor(np.ascontiguousarray(array)))


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("decoder", [True, False])
def test_encoder_and_decoder_blocks_match_pytorch(decoder: bool, norm_first: bool, rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    kind = torch.nn.TransformerDecoderLayer if decoder else torch.nn.TransformerEncoderLayer
    torch_layer = kind(8, 2, 32, 0.0, "relu", batch_first=True, norm_first=norm_first)
    placement = "before" if norm_first else "after"
    config = ModelConfig(embedding_dim=8, n_heads=2, context_window=20, activation="relu", norm_placement=placement)
    tricycle_layer = DecoderBlock(config) if decoder else TransformerBlock(config, causal=False)
    for p in tricycle_layer.parameters():
        p.array[...] += 0.1 * rng.standard_normal(p.shape)
    copy_attention(tricycle_layer.attention, torch_layer.self_attn)
    norms = [tricycle_layer.attention_norm, tricycle_layer.mlp_norm]
    if decoder:
        copy_attention(tricycle_layer.cross, torch_layer.multihead_attn)
        norms.insert(1, tricycle_layer.cross_norm)
    for i, norm in enumerate(norms, start=1):
        put(getattr(torch_layer, f"norm{i}").weight, norm.gain.array)
        put(getattr(torch_layer, f"norm{i}").bias, norm.bias.array)
    for tricycle_part, torch_part in (
        (tricycle_layer.mlp.up, torch_layer.linear1),
        (tricycle_layer.mlp.projection, torch_layer.linear2),
    ):
        put(torch_part.weight, tricycle_part.weights.array.T)
        put(torch_part.bias, tricycle_part.bias.array)
    x, memory = (rng.standard_normal((3, n, 8)).astype(np.float32) for n in (18, 7))
    mask, memory_seen = length_mask([18, 5, 11], 18), length_mask([7, 2, 4], 7)
    tricycle_x, torch_x = to_tensor(x), torch.tensor(x, requires_grad=True)
    if decoder:
        out = tricycle_layer(tricycle_x, kv=tricycle_layer.cross.project_kv(memory), kv_mask=memory_seen)
        later = torch.nn.Transformer.generate_square_subsequent_mask(18)
        padding = torch.where(torch.tensor(memory_seen), 0.0, -torch.inf)
        expected = torch_layer(torch_x, torch.tensor(memory), tgt_mask=later, memory_key_padding_mask=padding)
    else:
        out = tricycle_layer(tricycle_x, mask=mask)
        expected = torch_layer(torch_x, src_key_padding_mask=torch.where(torch.tensor(mask), 0.0, -torch.inf))
    np.testing.assert_allclose(out.array, expected.detach().numpy(), rtol=1e-3, atol=1e-5)
    grad = rng.standard_normal(out.shape).astype(np.float32)
    (out * grad).sum().backward()
    (expected * torch.tensor(grad)).sum().backward()
    np.testing.assert_allclose(tricycle_x.grad.array, torch_x.grad.numpy(), rtol=1e-3, atol=1e-4)
    tricycle_part, torch_part = tricycle_layer.mlp.up.weights.grad.array, torch_layer.linear1.weight.grad.numpy().T
    np.testing.assert_allclose(tricycle_part, torch_part, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("norm_first", [True, False])
def test_gradients_of_a_decoder_block(norm_first: bool, rng: np.random.Generator) -> None:
    placement = "before" if norm_first else "after"
    config = ModelConfig(embedding_dim=8, n_heads=2, context_window=6, activation="swish", norm_placement=placement)
    block = DecoderBlock(config, generator=0)
    kv_mask = length_mask([3, 1], 4)

    def call(x, memory):
        return block(x, kv=block.cross.project_kv(memory), kv_mask=kv_mask)

    gradcheck(call, *(to_tensor(rng.standard_normal((2, n, 8)), dtype=float) for n in (5, 4)), elementwise_up_to=20)


def test_cross_attention_rejects_keys_with_projected_kv() -> None:
    layer, x = MultiHeadAttention(8, 2), np.ones((1, 2, 8))
    for arguments in ({}, {"key": x, "kv": layer.project_kv(x)}):
        with pytest.raises(ValueError, match="keys"):
            layer(x, **arguments)


def test_cross_attention_returns_weights(rng: np.random.Generator) -> None:
    """They sum to 1 where a key is seen, and with the values they make the output."""
    layer, mask = MultiHeadAttention(8, 2, generator=0), length_mask([3, 0], 5)
    query, key = rng.standard_normal((2, 4, 8)), rng.standard_normal((2, 5, 8))
    out, weights = layer(query, key, mask=mask, return_weights=True)
    np.testing.assert_allclose(weights.sum(axis=-1), [[[1] * 4] * 2, [[0] * 4] * 2], atol=1e-6)
    assert (weights[0, :, :, 3:] == 0).all()
    values = layer.value(key).array.reshape(2, 5, 2, 4).transpose(0, 2, 1, 3)
    mixed = (weights @ values).transpose(0, 2, 1, 3).reshape(2, 4, 8)
    np.testing.assert_allclose(layer.projection(mixed).array, out.array, 1e-4, 1e-5)
    np.testing.assert_array_equal(layer(query, key, mask=mask).array, out.array)
