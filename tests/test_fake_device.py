"""Nothing mixes host and device: every op, and a model's training and generation, on a device that refuses it."""

from dataclasses import replace

import numpy as np
import pytest
import test_autoencoders
import test_classifiers
import test_seq2seq
from fake_device import FakeArray, fake_module, to_device
from test_registry import assert_same, every_sample, gradients

from tricycle import backend, no_grad
from tricycle.attention import HardAttention, ScaledDotProductAttention, reinforce
from tricycle.configs import DebugConfig
from tricycle.generate import beam_search, generate
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.optimisers import AdamW
from tricycle.tensor import Tensor, to_tensor
from tricycle.training import evaluate, new_state, train_step

CONFIG = replace(DebugConfig(), vocab_size=64, dropout=0.1, accumulation_steps=2)
VARIANTS = [
    {},
    {"norm": "rms_norm", "positions": "rotary", "activation": "swiglu", "bias": False, "tied": False},
    {"activation": "relu"},
    {"activation": "relu_squared", "positions": "rotary", "qk_norm": True, "optimiser": "muon"},
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


# -------------------------------------------------------------------- sequence models
def twins(make):
    """The same model on the device and on the host."""
    return make().to_gpu(), make()


def train_both(make, loss_of, n_steps: int = 3) -> tuple:
    """Both models after some updates, which must have gone alike."""
    models, losses = twins(make), []
    for model in models:
        optimiser = AdamW(1e-2)
        losses.append([])
        for _ in range(n_steps):
            loss = loss_of(model)
            losses[-1].append(loss.item())
            loss.backward()
            model.update(optimiser)
    np.testing.assert_allclose(*losses, rtol=1e-4)
    assert all(isinstance(p.array, FakeArray) for p in models[0].parameters())
    return models


@pytest.mark.parametrize("make", test_seq2seq.MODELS.values(), ids=test_seq2seq.MODELS)
def test_encoder_decoders_train_and_translate_on_the_device(device, make, rng):
    source, lengths = rng.integers(3, 7, (3, 6)), np.array([6, 2, 4])
    target = rng.integers(1, 7, (3, 5))

    def loss_of(model):
        logits = model(model.place(source), model.place(target[:, :-1]), lengths)
        return CrossEntropy(0, 0.1)(model.place(target[:, 1:]), logits)

    models = train_both(make, loss_of)
    how = {"begin": 1, "end": 2, "max_length": 6}
    for beam_size in (1, 3):
        found = [beam_search(model, source, lengths, beam_size=beam_size, **how) for model in models]
        assert found[0] == found[1]


@pytest.mark.parametrize("make", test_classifiers.MAKERS.values(), ids=test_classifiers.MAKERS)
def test_classifiers_train_on_the_device(device, make, rng):
    tokens, lengths, labels = rng.integers(0, 9, (4, 7)), np.array([7, 1, 4, 2]), np.array([0, 1, 2, 1])
    models = train_both(make, lambda model: CrossEntropy()(model.place(labels), model(model.place(tokens), lengths)))
    weights = [model(model.place(tokens), lengths, return_weights=True)[1] for model in models]
    np.testing.assert_allclose(weights[0].held, weights[1], 1e-3, 1e-5)


@pytest.mark.parametrize(("make", "shape"), test_autoencoders.MAKERS.values(), ids=test_autoencoders.MAKERS)
def test_autoencoders_train_on_the_device(device, make, shape, rng):
    x = rng.standard_normal((3, *shape)).astype(np.float32)

    def loss_of(model):
        given = to_tensor(x, requires_grad=False)
        return model.loss(given.to_gpu() if next(model.parameters()).on_gpu else given)

    train_both(make, loss_of)


def test_hard_attention_on_the_device(device, rng):
    query, keys = rng.standard_normal((2, 3, 4)).astype(np.float32), rng.standard_normal((2, 5, 4)).astype(np.float32)
    found = []
    for place in (lambda t: t.to_gpu(), lambda t: t):
        q, k = place(to_tensor(query)), place(to_tensor(keys))
        chosen, log_probability = HardAttention(ScaledDotProductAttention(), generator=0)(q, k)
        reinforce(log_probability, chosen.array[..., 0], 0.5).backward()
        found.append((chosen.numpy(), q.grad.numpy()))
    for mine, theirs in zip(*found):
        np.testing.assert_allclose(mine, theirs, 1e-4, 1e-6)
