"""Small matrices beside a layer's own. Beside `peft`: test_adapters.py."""

import copy
import pickle

import numpy as np
import pytest

from tricycle.configs import ModelConfig
from tricycle.finetuning.lora import AdaptedDense, Adapter, LoRAConfig, LowRank, Part, column_squares
from tricycle.generate import DecodingState
from tricycle.gradcheck import gradcheck
from tricycle.kernels.quantized import QuantizedMatrix
from tricycle.layers import Dense
from tricycle.models import GPT
from tricycle.tensor import to_tensor

PARTS = [Part("q", 0, 3, 2, 0.5), Part("v", 5, 7, 1, 2.0)]
CONFIG = ModelConfig(vocab_size=20, context_window=8, embedding_dim=8, n_heads=2, n_layers=1)


def small(dropout: float = 0.0, dtype: type = np.float64) -> AdaptedDense:
    rng = np.random.default_rng(0)
    low_rank = LowRank(4, 7, PARTS, dropout, rng)
    layer = AdaptedDense(Dense(4, 7, generator=1).freeze(), low_rank)
    for tensor in (low_rank.down, *low_rank.ups, layer.weights, layer.bias):
        tensor.array = rng.normal(size=tensor.shape).astype(dtype)
    return layer


def by_hand(layer: AdaptedDense, x: np.ndarray) -> np.ndarray:
    down, ups = layer.low_rank.down.array, [up.array for up in layer.low_rank.ups]
    parts = [0.5 * x @ down[:, :2] @ ups[0], np.zeros((*x.shape[:-1], 2)), 2 * x @ down[:, 2:] @ ups[1]]
    return x @ layer.weights.array + layer.bias.array + np.concatenate(parts, axis=-1)


def test_each_part_adds_to_its_columns():
    layer = small()
    x = np.random.default_rng(1).normal(size=(2, 3, 4))
    np.testing.assert_allclose(layer(to_tensor(x, dtype=np.float64)).array, by_hand(layer, x), rtol=1e-12)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_gradients(dropout):
    layer = small(dropout)
    low_rank = layer.low_rank

    def run(x, down, up, other):
        low_rank.down, low_rank.ups = down, [up, other]
        low_rank.dropout.generator = np.random.default_rng(3)
        return layer(x)

    rng = np.random.default_rng(1)
    gradcheck(run, rng.normal(size=(5, 4)), rng.normal(size=(4, 3)), rng.normal(size=(2, 3)), rng.normal(size=(1, 2)))


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_sixteen_bits(precision):
    layer = small(dtype=np.float32).use_precision(precision)
    x = np.random.default_rng(1).normal(size=(40, 4)).astype(np.float32)
    given = to_tensor(x)
    y = layer(given)
    np.testing.assert_allclose(y.numpy().astype(np.float32), by_hand(layer, x), rtol=0.05, atol=0.1)
    y.sum().backward()
    ones = np.ones((40, 7), np.float32)
    whole = layer.weights.array + layer.low_rank.matrix()
    np.testing.assert_allclose(given.grad.numpy(), ones @ whole.T, rtol=0.05, atol=0.1)


def test_the_matrix_that_it_stands_for():
    layer = small(dtype=np.float32)
    x = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32)
    whole = x @ (layer.weights.array + layer.low_rank.matrix()) + layer.bias.array
    np.testing.assert_allclose(layer(x).numpy(), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_lengths_of_columns(dropout):
    """DoRA: a layer begins as it was; then it is the matrix with other lengths, where a part is."""
    layer = small(dropout, np.float32)
    x = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32)
    layer.low_rank.eval()
    ups = [up.array for up in layer.low_rank.ups]
    for up in layer.low_rank.ups:
        up.array = np.zeros_like(up.array)
    plain = layer(x).numpy()
    layer.low_rank.learn_lengths(layer)
    np.testing.assert_array_equal(layer(x).numpy(), plain)
    for up, array in zip(layer.low_rank.ups, ups):
        up.array = array
    assert [m.role for m in layer.low_rank.magnitudes] == ["gain", "gain"]
    for magnitude in layer.low_rank.magnitudes:
        magnitude.array *= np.linspace(0.5, 2, len(magnitude.array), dtype=np.float32)
    whole = layer.low_rank.merged(layer)
    np.testing.assert_allclose(layer(x).numpy(), x @ whole + layer.bias.array, rtol=1e-5, atol=1e-5)
    ratio = np.linalg.norm(whole, axis=0) / np.linalg.norm(layer.weights.array, axis=0)
    np.testing.assert_allclose(ratio, [0.5, 1.25, 2, 1, 1, 0.5, 2], rtol=1e-5)
    layer.low_rank.train()
    layer(x).sum().backward()
    assert all(np.abs(parameter.grad.numpy()).max() > 0 for parameter in layer.low_rank.parameters())


def test_an_adapter_is_made_of_the_small_matrices_alone():
    model = GPT(CONFIG)
    low_rank = LowRank(8, 24, [Part("qkv", 0, 24, 2, 1.0)], 0.0, np.random.default_rng(0))
    names = [name for name, _ in model.named_parameters()]
    adapter = Adapter(model, {"blocks.0.attention.qkv": low_rank}, LoRAConfig(rank=2)).put_on()
    own = [name for name, _ in adapter.named_parameters()]
    assert own == [f"low_ranks.blocks.0.attention.qkv.{name}" for name in ("down", "ups.0")]
    learning = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert learning == [f"blocks.0.attention.qkv.low_rank.{name}" for name in ("down", "ups.0")]
    assert [name for name, _ in model.named_parameters() if "low_rank" not in name] == names
    adapter.take_off()
    assert [name for name, _ in model.named_parameters()] == names
    assert type(model.blocks[0].attention.qkv) is Dense


def adapted(seed: int, dora: bool = True) -> tuple[GPT, Adapter]:
    """A model with an adapter whose matrices are not zero."""
    generator = np.random.default_rng(seed)
    model = GPT(CONFIG)
    for parameter in model.parameters():
        parameter.array[...] = generator.normal(0, 0.5, parameter.shape)
    base = model.blocks[0].attention.qkv
    low_rank = LowRank(8, 24, [Part("qkv", 0, 24, 2, 1.0)], 0.0, generator)
    low_rank.ups[0].array[...] = generator.normal(0, 0.5, (2, 24))
    if dora:
        low_rank.learn_lengths(base)
    return model, Adapter(model, {"blocks.0.attention.qkv": low_rank}, LoRAConfig(rank=2, dora=dora)).put_on()


def logits_of(model: GPT) -> np.ndarray:
    with model.evaluating():
        return model(to_tensor([[1, 2, 3]], dtype=int)).array


def test_lengths_of_columns_are_those_of_the_matrix_that_is_there():
    """Whatever was computed with another one before."""
    expected = logits_of(adapted(0)[0])
    loaded, copied, replaced, quantized = (adapted(1)[0] for _ in range(4))
    for model in (loaded, copied, replaced, quantized):
        assert np.abs(logits_of(model) - expected).max() > 0.01  # fills what is kept
    loaded.load_state_dict(adapted(0)[0].state_dict())
    np.testing.assert_array_equal(logits_of(loaded), expected)
    for twin in (copy.deepcopy(copied), pickle.loads(pickle.dumps(copied))):
        twin.load_state_dict(adapted(0)[0].state_dict())
        np.testing.assert_array_equal(logits_of(twin), expected)
    for own, other in zip(replaced.parameters(), adapted(0)[0].parameters()):
        own.array = other.array
    np.testing.assert_array_equal(logits_of(replaced), expected)
    layer = quantized.blocks[0].attention.qkv
    layer.weights.array = QuantizedMatrix.quantize(layer.weights.array * 3, "int8", transposed=True)
    np.testing.assert_allclose(layer._column_squares(), column_squares(layer.weights))


@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_is_merged_once(dora):
    model, adapter = adapted(0, dora)
    expected = logits_of(model)
    adapter.merge()
    np.testing.assert_allclose(logits_of(model), expected, 1e-4, 1e-5)
    for again in (adapter.merge, adapter.put_on):
        with pytest.raises(ValueError, match="expected an adapter that is not merged, got one that the model contains"):
            again()
    np.testing.assert_allclose(logits_of(model), expected, 1e-4, 1e-5)


def test_generation_drops_nothing_out_while_a_model_is_in_training():
    """As when samples are drawn between updates."""
    model = GPT(CONFIG)
    low_rank = LowRank(8, 24, [Part("qkv", 0, 24, 2, 1.0)], 0.5, np.random.default_rng(0))
    low_rank.ups[0].array[...] = 1
    Adapter(model, {"blocks.0.attention.qkv": low_rank}, LoRAConfig(rank=2)).put_on()
    with model.evaluating():
        expected = model(to_tensor([[1, 2, 3]], dtype=int)).array[0, -1]
    np.testing.assert_allclose(DecodingState(model).logits([1, 2, 3]), expected, 1e-5, 1e-6)
    assert model.training and low_rank.dropout.training


def test_what_is_refused():
    with pytest.raises(ValueError, match="expected the name of a Dense layer, got 'norm'"):
        Adapter(GPT(CONFIG), {"norm": LowRank(8, 8, PARTS, 0.0, np.random.default_rng(0))}, LoRAConfig())
    with pytest.raises(ValueError, match="expected dropout to be from 0 to below 1, got 1"):
        LoRAConfig(dropout=1.0)
    with pytest.raises(ValueError, match="expected targets to be names"):
        LoRAConfig(targets=(3,))
    layer = small()
    layer.weights.requires_grad = True
    with pytest.raises(ValueError, match="expected a frozen matrix"):
        layer(np.ones((2, 4)))
