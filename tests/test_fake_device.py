"""Every op, training and generation on a fake device that rejects operands on the host."""

import math
from dataclasses import replace

import fake_device
import numpy as np
import pytest
import test_autoencoders
import test_classifiers
import test_kernels
import test_seq2seq
import test_text_encoder
import test_training
from fake_device import FakeArray, fake_module, to_device, to_host
from implementations import replace_implementations
from test_differentiable_rules import DIFFERENTIABLE, objective
from test_registry import assert_same, every_sample, gradients

from tricycle import devices, kernels, no_grad, training, training_state
from tricycle.autograd import topological_order
from tricycle.configs import DebugConfig
from tricycle.evaluation import evaluate
from tricycle.extra_ops import stack
from tricycle.finetuning.lora import LoRAConfig
from tricycle.finetuning.packing import Example
from tricycle.finetuning.preferences import PairDataset, dpo_loss
from tricycle.generate import generate
from tricycle.layers import Dense
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.optimiser_rules import OPTIMISERS, Adafactor, Lion, Muon
from tricycle.optimisers import (
    AdamW,
    Optimiser,
    Rule,
    StochasticGradientDescent,
    clip_gradients,
    gradient_norm,
)
from tricycle.pretrained import Pretrained
from tricycle.pretrained.adapters import new_adapter
from tricycle.pretrained.generation_settings import GenerationSettings
from tricycle.sequences.attentions import HardAttention, ScaledDotProductAttention, reinforce
from tricycle.sequences.beam_search import beam_search
from tricycle.sequences.text_encoder import SentencePooling, TextEncoder
from tricycle.tensor import Tensor, to_tensor
from tricycle.training import NonFiniteError, train_on_batch
from tricycle.training_state import new_state, read_steps, resume_state, train_step
from tricycle_cli import run as running
from tricycle_cli import updates

CONFIG = replace(DebugConfig(), vocab_size=64, dropout=0.1, accumulation_steps=2)
SHIFTS = {"token_shift": True, "key_shift": True}
VARIANTS = [
    {},
    {"norm": "rms_norm", "positions": "rotary", "activation": "swiglu", "bias": False, "tied": False},
    {"activation": "relu"},
    {**SHIFTS, "activation": "relu_squared", "positions": "rotary", "qk_norm": True, "optimiser": "muon"},
    {"activation": "swish", "softmax": "softmax1"},
    {"softmax": "adaptive"},
    {"softmax": "blocks"},
]


@pytest.fixture
def device(monkeypatch):
    """The fake device."""
    monkeypatch.setitem(devices.ARRAY_MODULES, FakeArray, fake_module)
    monkeypatch.setattr(devices, "to_gpu", to_device)
    monkeypatch.setattr(devices, "to_cpu", to_host)
    replace_implementations(monkeypatch, FakeArray, fake_device.IMPLEMENTATIONS)
    fake_device.reads.clear()


@pytest.fixture(params=["fake", pytest.param("gpu", marks=pytest.mark.gpu)])
def any_device(request):
    """Run a test on the fake device and on a GPU; the name of the device."""
    if request.param == "fake":
        request.getfixturevalue("device")
    return request.param


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
        lambda a: a.reshape(1, 1, 3).astype(np.float16) @ a.reshape(1, 3, 1).astype(np.float16),
        lambda a: fake_module.einsum("bij->bji", a.reshape(1, 1, 3).astype(np.float16)),
    ],
)
def test_fake_device_rejects_mixed_operands(mix):
    with pytest.raises(TypeError):
        mix(to_device(np.ones(3)))


@every_sample
def test_every_op_runs_on_the_device(device, sample):
    tensors = [t.to_gpu() for t in sample.tensors()]
    output = sample.call(*tensors)
    assert isinstance(output.array, FakeArray)
    output.backward()
    assert all(t.grad is None or isinstance(t.grad.array, FakeArray) for t in tensors)
    on_host = sample.tensors()
    expected = sample.call(*on_host)
    expected.backward()
    assert_same((output.numpy(), gradients(tensors)), (expected.array, gradients(on_host)), 1e-9, 1e-11)


@pytest.mark.nightly_except(3)
@pytest.mark.parametrize("sample", DIFFERENTIABLE.values(), ids=DIFFERENTIABLE)
def test_gradient_of_gradient_runs_on_the_device(any_device, sample):
    def of_gradient(tensors):
        objective(sample, tensors).backward(create_graph=True)
        total = stack([(t.grad * t.grad).sum() for t in tensors if t.grad is not None]).sum()
        for tensor in tensors:
            tensor.zero_grad()
        total.backward()
        return total.numpy(), gradients(tensors)

    rtol = 1e-9 if any_device == "fake" else 1e-2  # only on a GPU are activations rounded to 16 bits
    assert_same(of_gradient([t.to_gpu() for t in sample.tensors()]), of_gradient(sample.tensors()), rtol, 1e-2 * rtol)


def paired(precisions: list[str]) -> list:
    """Every variant with one precision after another, and the first with all; the other pairs are slow tests."""
    pairs = []
    for i, changes in enumerate(VARIANTS):
        for j, precision in enumerate(precisions):
            marks = [] if i == 0 or i % len(precisions) == j else [pytest.mark.nightly]
            pairs.append(pytest.param(changes, precision, marks=marks))
    return pairs


def train_without_reading(state) -> list:
    """Losses and norms of three steps, which read nothing from the device before the end."""
    results = [train_step(state) for _ in range(3)]
    assert fake_device.reads == []
    results = read_steps(state, results)
    assert fake_device.reads == ["asnumpy"] * next(state.model.parameters()).on_gpu
    fake_device.reads.clear()
    return results


@pytest.mark.nightly_except(4)
@pytest.mark.parametrize("changes", VARIANTS)
def test_model_trains_and_generates_on_the_device(device, changes):
    config = replace(CONFIG, **changes)
    tokens = np.random.default_rng(0).integers(0, 64, 2000)
    states = [new_state(config, tokens, on_gpu) for on_gpu in (True, False)]
    np.testing.assert_allclose(*map(train_without_reading, states), rtol=1e-4)
    on_device, host = (state.model for state in states)
    for (name, actual), expected in zip(on_device.named_parameters(), host.parameters()):
        assert isinstance(actual.array, FakeArray), name
        np.testing.assert_allclose(actual.numpy(), expected.array, rtol=1e-3, atol=2e-4, err_msg=name)
    assert evaluate(on_device, tokens[:200], 2)[0] == pytest.approx(evaluate(host, tokens[:200], 2)[0], rel=1e-4)
    drawn = [list(generate(model, [1, 2, 3], 50, temperature=0)) for model in (on_device, host)]
    assert drawn[0] == drawn[1]


def test_mixture_of_experts_trains_on_the_device(device):
    """Each mixture reads the number of rows of its experts, and nothing else."""
    config = replace(CONFIG, n_experts=4, router_loss=0.5)
    tokens = np.random.default_rng(0).integers(0, 64, 2000)
    states = [new_state(config, tokens, on_gpu) for on_gpu in (True, False)]
    losses = [[float(to_host(train_step(state)[0])) for _ in range(3)] for state in states]
    np.testing.assert_allclose(*losses, rtol=1e-4)
    assert len(fake_device.reads) == 3 * (config.n_layers * config.accumulation_steps + 1)  # with the loss
    on_device, host = (state.model for state in states)
    for (name, actual), expected in zip(on_device.named_parameters(), host.parameters()):
        assert isinstance(actual.array, FakeArray), name
        np.testing.assert_allclose(actual.numpy(), expected.array, rtol=1e-3, atol=2e-4, err_msg=name)


def test_checkpoint_from_the_device_loads_on_the_host(device, tmp_path):
    import pickle

    model = GPT(CONFIG).to_gpu()
    expected = GPT(CONFIG)
    loaded = pickle.loads(pickle.dumps(model))
    with no_grad():
        np.testing.assert_array_equal(loaded.eval()([1, 2]).array, expected.eval()([1, 2]).array)
    assert isinstance(next(loaded.parameters()), Tensor) and not next(loaded.parameters()).on_gpu


# -------------------------------------------------------------------- precisions
SMALL = ["bfloat16", "float16"]
TOKENS = np.random.default_rng(0).integers(0, 64, 2000)


def small_type(precision: str) -> np.dtype:
    if precision == "bfloat16":
        return np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    return np.dtype(np.float16)


@pytest.mark.nightly_except(18)
@pytest.mark.parametrize(("changes", "precision"), paired(["bfloat16", "float16", "tf32"]))
def test_each_precision_trains_and_generates(device, changes, precision):
    if precision != "tf32":
        small_type(precision)
    states = [new_state(replace(CONFIG, precision=p, **changes), TOKENS, True) for p in (precision, "float32")]
    np.testing.assert_allclose(*map(train_without_reading, states), rtol=0.02)
    model, optimiser = states[0].model, states[0].optimiser
    for name, parameter in model.named_parameters():
        n_updates, moments = optimiser.state_of(parameter)
        assert n_updates == 3
        assert all(array.dtype == np.float32 for array in (parameter.array, *moments.values())), name
    means = [evaluate(state.model, TOKENS[:200], 2)[0] for state in states]
    assert means[0] == pytest.approx(means[1], rel=0.01)
    assert len(list(generate(model, [1, 2, 3], 50, temperature=0))) == 50


@pytest.mark.parametrize("precision", SMALL)
@pytest.mark.parametrize("changes", VARIANTS)
def test_activations_and_gradients_have_16_bits(device, changes, precision, monkeypatch):
    """A promotion to float32 would cost memory and time without failing other tests."""
    dtype = small_type(precision)
    model = GPT(replace(CONFIG, precision=precision, **changes)).to_gpu()
    ids = model.place(TOKENS[:64].reshape(2, 32))
    loss = CrossEntropy()(ids, model(ids))
    names = {"embedding", "getitem", "transpose", "cross_entropy"}
    nodes = [node for node in topological_order(loss) if node.args]
    start = next(i for i, node in enumerate(nodes) if node.name == "to_compute_dtype")
    wide = {node.name for node in nodes[start:] if node.dtype != dtype}
    assert wide <= names
    assert loss.dtype == np.float32
    loss.backward()
    assert all(parameter.grad.dtype == np.float32 for parameter in model.parameters())


ALONE = set(
    """matmul matmul_operand matmul_operand_and_sums to_compute_dtype orthogonalize adamw embedding_backward add_at
    route sum_rows grouped_matmul grouped_weight_gradients""".split()
)
SIXTEEN = [
    pytest.param(name, size, id=f"{name}-{size}")
    for name, (_, sizes) in test_kernels.CASES.items()
    for size in sizes[:3]
    if name not in ALONE | {"log_softmax"} and not name.startswith(("rnn", "gru", "lstm", "prepare_matrix"))
]


@pytest.mark.parametrize("precision", SMALL)
@pytest.mark.parametrize(("name", "size"), SIXTEEN)
def test_reference_kernels_compute_16_bit_inputs_in_float32(name, size, precision):
    dtype = small_type(precision)
    exact = test_kernels.draw(name, size, np.float64)
    # the first n arguments have 16 bits; statistics, gains, weights of rows and angles have 32
    held = {"layer_norm": 1, "layer_norm_backward": 2, "cross_entropy": 1, "apply_rope": 1}
    held |= {"sum_by_token": 1, "sum_by_token_backward": 2}
    small = [
        a.astype(dtype if i < held.get(name, 99) else np.float32)
        if isinstance(a, np.ndarray) and a.dtype.kind == "f"
        else a
        for i, a in enumerate(exact)
    ]
    rounded = [a.astype(np.float64) if isinstance(a, np.ndarray) and a.dtype.kind != "i" else a for a in small]
    plain = kernels.KERNELS[name].reference
    expected, actual = test_kernels.outputs(name, plain, rounded), test_kernels.outputs(name, plain, small)
    for i, (result, reference) in enumerate(zip(actual, expected, strict=True)):
        # logs and sums, losses, and gradients of parameters
        wide = (
            i > 0 and name.startswith(("layer_norm", "attention", "sum_by_token")) and name not in test_kernels.IN_PLACE
        )
        sums = {"attention_scores", "sum_squares"}
        wide = wide or name in sums or (name == "cross_entropy" and i == 0)
        assert result.dtype == (np.float32 if wide else dtype), (name, i)
        rest = np.abs(reference[np.isfinite(reference)])
        scale = max(1e-3, float(rest.max(initial=0)))
        tolerance = 1e-4 if wide else 2.0**-8 if precision == "bfloat16" else 2.0**-10
        np.testing.assert_allclose(result.astype(np.float64), reference, tolerance, tolerance * scale, err_msg=name)


# -------------------------------------------------------------------- nothing waits for the device
STEADY = replace(CONFIG, accumulation_steps=1, dropout=0.0, warmup_steps=0, min_learning_rate=3e-3, steps=100)


def snapshot(state) -> dict[str, np.ndarray]:
    """Copies of all weights and moments."""
    found = {}
    for name, parameter in state.model.named_parameters():
        arrays = {"weights": parameter.array, **state.optimiser.state_of(parameter)[1]}
        found.update({f"{name} {kind}": array.host_array.copy() for kind, array in arrays.items()})
    return found


def assert_equal(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert actual.keys() == expected.keys()
    for name, array in actual.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


def test_run_synchronizes_every_n_steps(device, tmp_path, monkeypatch):
    monkeypatch.setattr(updates, "UNREAD_STEPS", 5)
    monkeypatch.setattr(updates, "ESTIMATE_STEPS", ())
    monkeypatch.setattr(running.Run, "save", lambda run, state, path: run.flush())
    config = replace(STEADY, vocab_size=257, steps=23, eval_interval=1000, sample_interval=0)
    run = test_training.new_run(tmp_path / "device")
    assert test_training.train(new_state(config, test_training.TOKENS, True), run) is True
    # after 4 (the first steps are slow, and timed apart), 9, 14, 19 and 23
    assert fake_device.reads == ["asnumpy"] * 5
    other = test_training.new_run(tmp_path / "host")
    test_training.train(new_state(config, test_training.TOKENS), other)
    lines, expected = running.read_metrics(run.metrics), running.read_metrics(other.metrics)
    assert [line["step"] for line in lines] == list(range(1, 24))
    for line, other_line in zip(lines, expected, strict=True):
        assert line == pytest.approx(other_line | {"tokens_per_second": line["tokens_per_second"]}, rel=1e-3)


def test_run_on_the_device_stops_immediately(device, tmp_path):
    run = test_training.new_run(tmp_path / "run")
    state = new_state(replace(test_training.CONFIG, eval_interval=1000), test_training.TOKENS, True)
    run.stop = lambda: state.step == 7
    assert test_training.train(state, run) is False
    assert state.step == 7 and len(running.read_metrics(run.metrics)) == 7
    assert resume_state(run.last, test_training.TOKENS, True).step == 7


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_non_finite_update_changes_nothing_and_raises_when_read(device, optimiser, monkeypatch):
    state = new_state(replace(STEADY, optimiser=optimiser), TOKENS, True)
    results = [train_step(state)]
    before, plain = snapshot(state), training.gradient_norm

    def spoil(model):
        model.norm.gain.grad.array[0] = np.inf
        return plain(model)

    monkeypatch.setattr(training, "gradient_norm", spoil)
    results.append(train_step(state))
    assert_equal(snapshot(state), before)
    assert all(parameter.grad is None for parameter in state.model.parameters())
    assert fake_device.reads == []
    with pytest.raises(NonFiniteError, match=r"step 2: .*4\.\d+.*norm.*inf"):
        read_steps(state, results)


# -------------------------------------------------------------------- float16
HALF = replace(STEADY, precision="float16")


def test_float16_overflow_skips_the_update_and_halves_the_loss_scale(device):
    """The update after it is then the first one: its moments are corrected as such."""
    state, other = (new_state(HALF, TOKENS, True) for _ in range(2))
    state.loss_scaling[0] = 2.0**40
    before = snapshot(state)
    results = [train_step(state)]
    assert_equal(snapshot(state), before)
    assert to_host(state.loss_scaling).tolist() == [2.0**39, 0, 1]
    ((_, norm),) = read_steps(state, results)
    assert not math.isfinite(norm)
    next(other.dataset)
    state.loss_scaling[0] = 2.0**16
    train_step(state)
    train_step(other)
    assert to_host(state.loss_scaling).tolist() == [2.0**16, 1, 1]
    assert_equal(snapshot(state), snapshot(other))


def test_loss_scale_converges_and_stays_at_least_1(device):
    state = new_state(HALF, TOKENS, True)
    state.loss_scaling[0] = 2.0**30
    losses = read_steps(state, [train_step(state) for _ in range(30)])
    scale, _, n_skipped = to_host(state.loss_scaling).tolist()
    assert 2.0**5 <= scale <= 2.0**29 and n_skipped == sum(not math.isfinite(norm) for _, norm in losses) > 0
    state.model.norm.gain.array[...] = 1e38
    state.loss_scaling[0] = 1
    results = [train_step(state)]
    assert to_host(state.loss_scaling)[0] == 1
    with pytest.raises(NonFiniteError):
        read_steps(state, results)


def test_loss_scale_doubles_after_finite_updates(device, monkeypatch):
    monkeypatch.setattr(training_state, "GROWTH_STEPS", 3)
    state, scales = new_state(HALF, TOKENS, True), []
    state.loss_scaling[0] = 4.0
    for _ in range(7):
        train_step(state)
        scales.append(to_host(state.loss_scaling).tolist())
    assert scales == [[4, 1, 0], [4, 2, 0], [8, 0, 0], [8, 1, 0], [8, 2, 0], [16, 0, 0], [16, 1, 0]]


@pytest.mark.nightly_except(3)
@pytest.mark.parametrize("precision", ["float32", *SMALL])
def test_resumed_run_on_the_device_is_exact(device, tmp_path, precision):
    if precision != "float32":
        small_type(precision)
    config = replace(HALF, precision=precision)
    whole, state = (new_state(config, TOKENS, True) for _ in range(2))
    for each in (whole, state):
        if precision == "float16":
            each.loss_scaling[0] = 2.0**24  # some updates are left out at first
        for _ in range(4):
            train_step(each)
    state.save(tmp_path / "c", None)
    state = resume_state(tmp_path / "c", TOKENS, True)
    results = [[train_step(each) for _ in range(6)] for each in (whole, state)]
    assert read_steps(whole, results[0]) == read_steps(state, results[1])
    assert_equal(snapshot(whole), snapshot(state))
    np.testing.assert_array_equal(*(to_host(each.loss_scaling) for each in (whole, state)))


# -------------------------------------------------------------------- optimisers
class Trace(Rule):
    """A user-defined update rule without device-specific code."""

    state_names = ("sum",)

    def update(self, weights, grad, state, step):
        state["sum"] += grad
        weights -= step.learning_rate / step.number * state["sum"]


def test_user_optimizer_rule_trains_on_the_device(device):
    """With clipping and a loss scale; skipped updates must not count as steps."""
    wide = replace(HALF, precision="float32")
    model, host, first = GPT(HALF), GPT(wide), GPT(wide)
    states = [new_state(HALF, TOKENS, True, model), new_state(wide, TOKENS, False, host)]
    for state in states:
        state.optimiser = Optimiser(HALF.max_learning_rate, Trace())
    states[0].loss_scaling[0] = 2.0**40
    train_step(states[0])
    next(states[1].dataset)
    states[0].loss_scaling[0] = 2.0**10
    losses = [read_steps(state, [train_step(state) for _ in range(3)]) for state in states]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-2)
    for result, reference, before in zip(model.parameters(), host.parameters(), first.parameters(), strict=True):
        moved, expected = result.numpy() - before.array, reference.array - before.array
        rounding = 2 * np.spacing(np.float32(abs(before.array).max()))  # a move is the difference of two weights
        np.testing.assert_allclose(moved, expected, atol=0.02 * abs(expected).max() + rounding)


def test_labels_are_counted_on_the_device(device):
    """Micro-batches with different padding give the loss of one large batch, without a synchronization."""
    rng = np.random.default_rng(0)
    labels, inputs = rng.integers(1, 64, (2, 3, 5)), rng.integers(0, 64, (2, 3, 5))
    labels[1, :, 1:] = 0
    found, models = [], []
    for batches in (zip(inputs, labels), [(inputs.reshape(6, 5), labels.reshape(6, 5))]):
        model = GPT(replace(STEADY, n_layers=1)).to_gpu()
        placed = [tuple(model.place(ids) for ids in pair) for pair in batches]
        counts = [training_state.count_labels(pair[1], 0) for pair in placed]
        found.append(
            training.compute_gradients(model, training.supervised_loss(model, CrossEntropy(0)), placed, counts)
        )
        models.append(model)
    assert fake_device.reads == []
    assert found[0].n_labels.item() == found[1].n_labels.item() == 18
    assert found[0].loss.item() == pytest.approx(found[1].loss.item(), rel=1e-5)
    for actual, expected in zip(*(model.parameters() for model in models), strict=True):
        np.testing.assert_allclose(actual.grad.numpy(), expected.grad.numpy(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    "make",
    [lambda: StochasticGradientDescent(0.1, 0.9, 0.01), AdamW, Muon, Lion, Adafactor, lambda: Optimiser(0.1, Trace())],
    ids=["sgd", "adamw", "muon", "lion", "adafactor", "own"],
)
@pytest.mark.parametrize(
    "where", [float, lambda factor: fake_module.asarray(factor, np.float32)], ids=["host", "device"]
)
def test_update_factor_from_host_or_device(device, make, where):
    """0.5 is as if the gradients were half as large; 0 and NaN change nothing at all."""
    found = []
    for factors in ([0.5, 0.0, math.nan, 0.5], [None, None]):
        rng, optimiser = np.random.default_rng(0), make()
        weights = to_tensor(rng.standard_normal((4, 4))).to_gpu()
        for factor in factors:
            grad = np.ones((4, 4)) if factor == 0 or factor != factor else rng.standard_normal((4, 4))
            weights.grad = to_tensor(grad if factor is not None else grad / 2).to_gpu()
            given = [] if factor is None else [where(factor)]
            n_before = optimiser.state_of(weights)[0]
            optimiser.update([("weights", weights)], *given)
            if factor == 0 or (factor is not None and factor != factor):  # the caller says which were left out
                optimiser.set_state(weights, n_before, optimiser.state_of(weights)[1])
        found.append(weights.array.host_array)
    np.testing.assert_allclose(*found, rtol=1e-6)


def test_clipping_does_not_synchronize(device):
    for grad, limit in ((30.0, 1.5), (0.1, 1.5), (math.inf, 1.5), (0.0, 1.5)):
        results = []
        for place in (lambda layer: layer.to_gpu(), lambda layer: layer):
            layer = place(Dense(2, 3))
            for parameter in layer.parameters():
                parameter.grad = Tensor(parameter.xp.full(parameter.shape, grad, np.float32), False)
            with np.errstate(all="ignore"):
                norm = clip_gradients(layer, limit)
            results.append((norm, gradient_norm(layer), [p.grad.array for p in layer.parameters()]))
        assert fake_device.reads == []
        (norm, after, grads), (expected_norm, expected_after, expected_grads) = results
        assert norm.host_array == pytest.approx(expected_norm, rel=1e-5)
        assert after.host_array == pytest.approx(expected_after, rel=1e-5)
        for actual, expected in zip(grads, expected_grads):
            np.testing.assert_allclose(actual.host_array, expected, rtol=1e-5)


# -------------------------------------------------------------------- sequence models
def train_both(make, batch_loss) -> tuple:
    """Return a model on the device and the same one on the host, after three updates, which must have gone alike."""
    models, losses = (make().to_gpu(), make()), []
    for model in models:
        optimiser = AdamW(1e-2)
        losses.append([])
        for _ in range(3):
            loss = batch_loss(model)
            losses[-1].append(loss.item())
            loss.backward()
            model.update(optimiser)
    np.testing.assert_allclose(*losses, rtol=1e-4)
    assert all(p.on_gpu for p in models[0].parameters())
    return models


@pytest.mark.parametrize("make", test_seq2seq.MODELS.values(), ids=test_seq2seq.MODELS)
def test_encoder_decoders_train_and_generate_on_the_device(any_device, make, rng):
    source, lengths = rng.integers(3, 7, (3, 6)), np.array([6, 2, 4])
    target = rng.integers(1, 7, (3, 5))

    def batch_loss(model):
        logits = model(model.place(source), model.place(target[:, :-1]), lengths)
        return CrossEntropy(0, 0.1)(model.place(target[:, 1:]), logits)

    models = train_both(make, batch_loss)
    options = {"begin": 1, "end": 2, "max_length": 6}
    for beam_size in (1, 3):
        found = [beam_search(model, source, lengths, beam_size=beam_size, **options) for model in models]
        assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["mean", "first"])
def test_text_encoder_trains_on_the_device(device, kind):
    tokens, mask, types = test_text_encoder.a_batch(test_text_encoder.SMALL)

    def batch_loss(model):
        vectors = SentencePooling(kind)(model(model.place(tokens), mask, model.place(types)), mask)
        return ((vectors[:2] - vectors[2:]) ** 2).mean()  # texts that should be alike

    models = train_both(lambda: TextEncoder(test_text_encoder.SMALL), batch_loss)
    hidden = [model(model.place(tokens), mask) for model in models]
    np.testing.assert_allclose(hidden[0].array.host_array, hidden[1].array, 1e-3, 1e-4)


@pytest.mark.parametrize("make", test_classifiers.MAKERS.values(), ids=test_classifiers.MAKERS)
def test_classifiers_train_on_the_device(any_device, make, rng):
    tokens, lengths, labels = rng.integers(0, 9, (4, 7)), np.array([7, 1, 4, 2]), np.array([0, 1, 2, 1])
    models = train_both(make, lambda model: CrossEntropy()(model.place(labels), model(model.place(tokens), lengths)))
    if any_device == "fake":  # sums in another order change the weights after some updates more
        weights = [model(model.place(tokens), lengths, return_weights=True)[1] for model in models]
        np.testing.assert_allclose(weights[0].host_array, weights[1], 1e-3, 1e-5)


@pytest.mark.parametrize(("make", "shape"), test_autoencoders.MAKERS.values(), ids=test_autoencoders.MAKERS)
def test_autoencoders_train_on_the_device(any_device, make, shape, rng):
    x = rng.standard_normal((3, *shape)).astype(np.float32)

    def batch_loss(model):
        given = to_tensor(x, requires_grad=False)
        return model.loss(given.to_gpu() if next(model.parameters()).on_gpu else given)

    train_both(make, batch_loss)


def test_hard_attention_on_the_device(device, rng):
    query, keys = rng.standard_normal((2, 3, 4)).astype(np.float32), rng.standard_normal((2, 5, 4)).astype(np.float32)
    found = []
    for place in (lambda t: t.to_gpu(), lambda t: t):
        q, k = place(to_tensor(query)), place(to_tensor(keys))
        chosen, log_probability = HardAttention(ScaledDotProductAttention(), generator=0)(q, k)
        reinforce(log_probability, chosen.array[..., 0], 0.5).backward()
        found.append((chosen.numpy(), q.grad.numpy()))
    for actual, expected in zip(*found):
        np.testing.assert_allclose(actual, expected, 1e-4, 1e-6)


@pytest.mark.parametrize("kind", ["all weights", "LoRA", "DoRA"])
def test_preference_losses_train_on_the_device(device, kind):
    generator = np.random.default_rng(0)
    texts = [Example(generator.integers(0, 64, 12), np.arange(12) >= n) for n in (5, 6, 7, 5, 8, 3, 4, 4)]
    losses = []
    for on_gpu in (True, False):
        model = GPT(replace(CONFIG, dropout=0.0))
        if on_gpu:
            model.to_gpu()
        pairs = PairDataset(texts, 2, 16)
        if kind != "all weights":
            loaded = Pretrained(model, None, GenerationSettings())
            new_adapter(loaded, LoRAConfig(rank=2, dora=kind == "DoRA"))
        pairs.compute_reference_log_probs(model)
        optimiser = AdamW(1e-2)
        found = [train_on_batch(model, optimiser, dpo_loss(model, 0.3), next(pairs)) for _ in range(5)]
        losses.append([loss.item() if on_gpu else loss for loss in found])
    np.testing.assert_allclose(*losses, rtol=1e-4)
    assert losses[0][0] == pytest.approx(np.log(2), rel=1e-5)
    assert np.ptp(losses[0]) > 1e-3
