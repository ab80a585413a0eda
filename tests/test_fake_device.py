"""Nothing mixes host and device: every op, and a model's training and generation, on a device that refuses it."""

from dataclasses import replace

import numpy as np
import pytest
from fake_device import FakeArray, fake_module, to_device
from test_registry import assert_same, every_sample, gradients

from tricycle import backend, no_grad
from tricycle.configs import DebugConfig
from tricycle.generate import generate
from tricycle.models import GPT
from tricycle.tensor import Tensor
from tricycle.training import evaluate, new_state, train_step

CONFIG = replace(DebugConfig(), vocab_size=64, dropout=0.1, accumulation_steps=2)
VARIANTS = [
    {},
    {"norm": "rms_norm", "positions": "rotary", "activation": "swiglu", "bias": False, "tied": False},
    {"activation": "relu"},
    {"activation": "swish", "softmax": "softmax1"},
    {"softmax": "adaptive"},
    {"softmax": "blocks"},
]


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setitem(backend.ARRAY_MODULES, FakeArray, fake_module)
    monkeypatch.setattr(backend, "to_gpu", to_device)
    monkeypatch.setattr(backend, "to_cpu", lambda a: a.held.copy() if isinstance(a, FakeArray) else np.asarray(a))


@pytest.mark.parametrize(
    "mix",
    [
        lambda a: a + np.ones(3),
        lambda a: np.ones(3) + a,
        lambda a: np.exp(a),
        lambda a: np.asarray(a),
        lambda a: a[np.arange(2)],
        lambda a: float(a[0]),
        lambda a: bool(a[0]),
        lambda a: fake_module.maximum(a, np.ones(3)),
        lambda a: a.max(initial=0),
        lambda a: list(a),
    ],
)
def test_the_device_refuses_what_a_gpu_would(mix):
    with pytest.raises(TypeError):
        mix(to_device(np.ones(3)))


@every_sample
def test_every_op_stays_on_the_device(device, sample):
    tensors = [t.to_gpu() for t in sample.tensors()]
    output = sample.call(*tensors)
    assert isinstance(output.array, FakeArray)
    output.backward()
    assert all(t.grad is None or isinstance(t.grad.array, FakeArray) for t in tensors)
    on_host = sample.tensors()
    expected = sample.call(*on_host)
    expected.backward()
    assert_same((output.numpy(), gradients(tensors)), (expected.array, gradients(on_host)), 1e-9, 1e-11)


@pytest.mark.parametrize("changes", VARIANTS)
def test_a_model_trains_and_talks_on_the_device(device, changes):
    config = replace(CONFIG, **changes)
    tokens = np.random.default_rng(0).integers(0, 64, 2000)
    losses, states = [], [new_state(config, tokens, on_gpu) for on_gpu in (True, False)]
    for state in states:
        losses.append([train_step(state) for _ in range(3)])
    np.testing.assert_allclose(*losses, rtol=1e-4)
    ours, host = (state.model for state in states)
    for (name, mine), theirs in zip(ours.named_parameters(), host.parameters()):
        assert isinstance(mine.array, FakeArray), name
        np.testing.assert_allclose(mine.numpy(), theirs.array, rtol=1e-3, atol=2e-4, err_msg=name)
    assert evaluate(ours, tokens[:200], 2)[0] == pytest.approx(evaluate(host, tokens[:200], 2)[0], rel=1e-4)
    drawn = [list(generate(model, [1, 2, 3], 50, temperature=0)) for model in (ours, host)]
    assert drawn[0] == drawn[1]


def test_a_model_from_the_device_loads_without_it(device, tmp_path):
    import pickle

    model = GPT(CONFIG).to_gpu()
    expected = GPT(CONFIG)
    loaded = pickle.loads(pickle.dumps(model))
    with no_grad():
        np.testing.assert_array_equal(loaded.eval()([1, 2]).array, expected.eval()([1, 2]).array)
    assert isinstance(next(loaded.parameters()), Tensor) and not next(loaded.parameters()).on_gpu
