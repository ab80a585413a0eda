"""LoRA and DoRA layers and adapters. test_adapters.py compares them with `peft`."""

import copy
import pickle

import numpy as np
import pytest

from tricycle.configs import ModelConfig
from tricycle.finetuning.lora import AdaptedDense, Adapter, LoRAConfig, LoRATarget, LowRankUpdate, squared_column_norms
from tricycle.generate import DecodingState
from tricycle.gradcheck import gradcheck
from tricycle.kernels.quantized import QuantizedMatrix
from tricycle.layers import Dense
from tricycle.models import GPT
from tricycle.tensor import to_tensor

TARGETS = [LoRATarget("q", 0, 3, 2, 0.5), LoRATarget("v", 5, 7, 1, 2.0)]
CONFIG = ModelConfig(vocab_size=20, context_window=8, embedding_dim=8, n_heads=2, n_layers=1)


def small_layer(dropout: float = 0.0, dtype: type = np.float64) -> AdaptedDense:
    rng = np.random.default_rng(0)
    low_rank = LowRankUpdate(4, 7, TARGETS, dropout, rng)
    layer = AdaptedDense(Dense(4, 7, generator=1).freeze(), low_rank)
    for tensor in (low_rank.down, *low_rank.ups, layer.weights, layer.bias):
        tensor.array = rng.normal(size=tensor.shape).astype(dtype)
    return layer


def expected_output(layer: AdaptedDense, x: np.ndarray) -> np.ndarray:
    down, ups = layer.low_rank.down.array, [up.array for up in layer.low_rank.ups]
    updates = [0.5 * x @ down[:, :2] @ ups[0], np.zeros((*x.shape[:-1], 2)), 2 * x @ down[:, 2:] @ ups[1]]
    return x @ layer.weights.array + layer.bias.array + np.concatenate(updates, axis=-1)


def test_each_target_updates_only_its_columns():
    layer = small_layer()
    x = np.random.default_rng(1).normal(size=(2, 3, 4))
    np.testing.assert_allclose(layer(to_tensor(x, dtype=np.float64)).array, expected_output(layer, x), rtol=1e-12)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_gradients_match_finite_differences(dropout):
    layer = small_layer(dropout)
    low_rank = layer.low_rank

    def run(x, down, up, other):
        low_rank.down, low_rank.ups = down, [up, other]
        low_rank.dropout.generator = np.random.default_rng(3)
        return layer(x)

    rng = np.random.default_rng(1)
    gradcheck(run, rng.normal(size=(5, 4)), rng.normal(size=(4, 3)), rng.normal(size=(2, 3)), rng.normal(size=(1, 2)))


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_16_bit_outputs_and_gradients_are_near_float32(precision):
    layer = small_layer(dtype=np.float32).use_precision(precision)
    x = np.random.default_rng(1).normal(size=(40, 4)).astype(np.float32)
    x_tensor = to_tensor(x)
    y = layer(x_tensor)
    np.testing.assert_allclose(y.numpy().astype(np.float32), expected_output(layer, x), rtol=0.05, atol=0.1)
    y.sum().backward()
    ones = np.ones((40, 7), np.float32)
    weights = layer.weights.array + layer.low_rank.delta_weights()
    np.testing.assert_allclose(x_tensor.grad.numpy(), ones @ weights.T, rtol=0.05, atol=0.1)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_dora_magnitudes_scale_target_columns(dropout):
    """A new DoRA layer does not change the output; its magnitudes then scale the columns of its targets."""
    layer = small_layer(dropout, np.float32)
    x = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32)
    layer.low_rank.eval()
    ups = [up.array for up in layer.low_rank.ups]
    for up in layer.low_rank.ups:
        up.array = np.zeros_like(up.array)
    plain = layer(x).numpy()
    layer.low_rank.init_dora_magnitudes(layer)
    np.testing.assert_array_equal(layer(x).numpy(), plain)
    for up, array in zip(layer.low_rank.ups, ups):
        up.array = array
    assert [m.role for m in layer.low_rank.magnitudes] == ["gain", "gain"]
    for magnitude in layer.low_rank.magnitudes:
        magnitude.array *= np.linspace(0.5, 2, len(magnitude.array), dtype=np.float32)
    merged = layer.low_rank.merged_weights(layer)
    np.testing.assert_allclose(layer(x).numpy(), x @ merged + layer.bias.array, rtol=1e-5, atol=1e-5)
    ratio = np.linalg.norm(merged, axis=0) / np.linalg.norm(layer.weights.array, axis=0)
    np.testing.assert_allclose(ratio, [0.5, 1.25, 2, 1, 1, 0.5, 2], rtol=1e-5)
    layer.low_rank.train()
    layer(x).sum().backward()
    assert all(np.abs(parameter.grad.numpy()).max() > 0 for parameter in layer.low_rank.parameters())


def test_adapter_trains_only_its_low_rank_matrices():
    names = [name for name, _ in GPT(CONFIG).named_parameters()]
    model, adapter = adapted(0, dora=False)
    adapter_names = [name for name, _ in adapter.named_parameters()]
    assert adapter_names == [f"low_ranks.blocks.0.attention.qkv.{name}" for name in ("down", "ups.0")]
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trainable == [f"blocks.0.attention.qkv.low_rank.{name}" for name in ("down", "ups.0")]
    assert [name for name, _ in model.named_parameters() if "low_rank" not in name] == names
    adapter.detach()
    assert [name for name, _ in model.named_parameters()] == names
    assert type(model.blocks[0].attention.qkv) is Dense


def adapted(seed: int, dora: bool = True, dropout: float = 0.0) -> tuple[GPT, Adapter]:
    """Return a model with an adapter whose matrices are not zero."""
    generator = np.random.default_rng(seed)
    model = GPT(CONFIG)
    for parameter in model.parameters():
        parameter.array[...] = generator.normal(0, 0.5, parameter.shape)
    base = model.blocks[0].attention.qkv
    low_rank = LowRankUpdate(8, 24, [LoRATarget("qkv", 0, 24, 2, 1.0)], dropout, generator)
    low_rank.ups[0].array[...] = generator.normal(0, 0.5, (2, 24))
    if dora:
        low_rank.init_dora_magnitudes(base)
    return model, Adapter(model, {"blocks.0.attention.qkv": low_rank}, LoRAConfig(rank=2, dora=dora)).attach()


def logits_of(model: GPT) -> np.ndarray:
    with model.evaluating():
        return model(to_tensor([[1, 2, 3]], dtype=int)).array


def test_cached_column_norms_are_recomputed_for_changed_weights():
    """The cache is invalidated when weights are loaded, replaced or quantized."""
    expected = logits_of(adapted(0)[0])
    loaded, copied, replaced, quantized = (adapted(1)[0] for _ in range(4))
    for model in (loaded, copied, replaced, quantized):
        assert np.abs(logits_of(model) - expected).max() > 0.01  # fills the cache
    loaded.load_state_dict(adapted(0)[0].state_dict())
    np.testing.assert_array_equal(logits_of(loaded), expected)
    for twin in (copy.deepcopy(copied), pickle.loads(pickle.dumps(copied))):
        twin.load_state_dict(adapted(0)[0].state_dict())
        np.testing.assert_array_equal(logits_of(twin), expected)
    for parameter, source in zip(replaced.parameters(), adapted(0)[0].parameters()):
        parameter.array = source.array
    np.testing.assert_array_equal(logits_of(replaced), expected)
    layer = quantized.blocks[0].attention.qkv
    layer.weights.array = QuantizedMatrix.quantize(layer.weights.array * 3, "int8", transposed=True)
    np.testing.assert_allclose(layer._squared_column_norms(), squared_column_norms(layer.weights))


@pytest.mark.parametrize("dora", [False, True])
def test_merge_keeps_the_logits_and_cannot_be_repeated(dora):
    model, adapter = adapted(0, dora)
    expected = logits_of(model)
    adapter.merge()
    np.testing.assert_allclose(logits_of(model), expected, 1e-4, 1e-5)
    for again in (adapter.merge, adapter.attach):
        with pytest.raises(ValueError, match="not merged"):
            again()
    np.testing.assert_allclose(logits_of(model), expected, 1e-4, 1e-5)


def test_generation_does_not_use_dropout_in_training_mode():
    """Samples are generated between updates."""
    model, adapter = adapted(0, dora=False, dropout=0.5)
    np.testing.assert_allclose(DecodingState(model).logits([1, 2, 3]), logits_of(model)[0, -1], 1e-5, 1e-6)
    assert all(layer.training for layer in (*model.layers(), *adapter.layers()))


def test_attaching_within_evaluation_keeps_the_training_mode():
    model, adapter = adapted(0)
    with model.evaluating():
        adapter.detach().attach()
    assert all(layer.training for layer in model.layers())
    model.eval()
    assert not any(layer.training for layer in adapter.detach().attach().model.layers())


def test_invalid_adapter_arguments_raise():
    with pytest.raises(ValueError, match=r"Dense layer.*'norm'"):
        Adapter(GPT(CONFIG), {"norm": LowRankUpdate(8, 8, TARGETS, 0.0, np.random.default_rng(0))}, LoRAConfig())
    with pytest.raises(ValueError, match=r"dropout.*got 1"):
        LoRAConfig(dropout=1.0)
    with pytest.raises(ValueError, match=r"targets.*names"):
        LoRAConfig(targets=(3,))
    layer = small_layer()
    layer.weights.requires_grad = True
    with pytest.raises(ValueError, match="expected frozen"):
        layer(np.ones((2, 4)))
