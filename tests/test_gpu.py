"""Models on a GPU against the same models on the CPU, at every precision; `test_fake_device.py` has more of these.

All of it is skipped where there is no GPU.
"""

import itertools
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_fake_device import VARIANTS

from tricycle import devices, kernels
from tricycle.autograd import Mode, graph_mode
from tricycle.configs import DebugConfig, GPTConfig
from tricycle.debug import use_reference
from tricycle.devices import to_cpu
from tricycle.evaluation import evaluate
from tricycle.generate import generate
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.system.memory import gpu_memory
from tricycle.training import NonFiniteError
from tricycle.training_state import new_state, read_steps, resume_state, train_step

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[1]
SMALL = GPTConfig(
    vocab_size=256,
    context_window=128,
    embedding_dim=128,
    n_heads=2,
    n_layers=2,
    batch_size=8,
    steps=200,
    warmup_steps=20,
    max_learning_rate=3e-3,
    min_learning_rate=3e-4,
    beta2=0.99,
)
# How far a loss, and a gradient in its norm, may be from float32's on the CPU.
TOLERANCES = {"float32": (1e-5, 1e-4), "tf32": (1e-3, 1e-2), "bfloat16": (1e-2, 5e-2), "float16": (2e-3, 2e-2)}
RELU_FACTOR = 2.5  # its derivative jumps at 0, so rounding changes its gradient more


def text_tokens() -> np.ndarray:
    """Return bytes of this repository's sources."""
    content = b"".join(path.read_bytes() for path in sorted((ROOT / "tricycle").glob("*.py")))
    return np.frombuffer(content, np.uint8).astype(np.int64)


def loss_and_gradients(config: GPTConfig, on_gpu: bool) -> tuple[float, dict[str, np.ndarray]]:
    model = GPT(config)
    if on_gpu:
        model.to_gpu()
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 4, config.context_window))
    inputs, outputs = (model.place(ids) for ids in tokens)
    loss = CrossEntropy()(outputs, model(inputs))
    loss.backward()
    assert next(model.parameters()).on_gpu == on_gpu
    return float(loss), {name: to_cpu(p.grad.array) for name, p in model.named_parameters()}


# -------------------------------------------------------------------- forward and backward


@pytest.mark.parametrize("plain", [False, True], ids=["kernels", "reference"])
@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize("changes", VARIANTS)
def test_gpt_loss_and_gradients_match_the_cpu(changes, precision, plain):
    config = replace(SMALL, **changes)
    expected, expected_gradients = loss_and_gradients(config, False)
    small = replace(config, precision=precision)
    with use_reference() if plain else nullcontext():
        loss, grads = loss_and_gradients(small, True)
    rtol, of_norm = TOLERANCES[precision]
    of_norm *= RELU_FACTOR if changes.get("activation") == "relu" else 1
    assert loss == pytest.approx(expected, rel=rtol)
    for name, grad in grads.items():
        assert grad.dtype == np.float32, name
        distance = np.linalg.norm(grad - expected_gradients[name]) / max(np.linalg.norm(expected_gradients[name]), 1e-6)
        assert distance < of_norm, (name, distance)


@pytest.mark.parametrize("precision", TOLERANCES)
def test_training_on_the_gpu_is_deterministic(precision):
    config = replace(SMALL, precision=precision, dropout=0.1)
    found = []
    for _ in range(2):
        state = new_state(config, text_tokens(), True)
        losses = read_steps(state, [train_step(state) for _ in range(5)])
        found.append((losses, {name: to_cpu(p.array) for name, p in state.model.named_parameters()}))
    assert found[0][0] == found[1][0]
    for name, array in found[0][1].items():
        np.testing.assert_array_equal(array, found[1][1][name], err_msg=name)


# -------------------------------------------------------------------- training
@pytest.fixture(scope="module")
def curve_of_float32() -> np.ndarray:
    state = new_state(SMALL, text_tokens(), True)
    return np.array(read_steps(state, [train_step(state) for _ in range(200)]))[:, 0]


def test_float32_losses_match_the_cpu(curve_of_float32):
    state = new_state(SMALL, text_tokens())
    losses = np.array([train_step(state)[0] for _ in range(20)])
    np.testing.assert_allclose(curve_of_float32[:20], losses, rtol=1e-3)


@pytest.mark.parametrize("precision", ["tf32", "bfloat16", "float16"])
def test_the_loss_curve_is_within_one_percent_of_float32(curve_of_float32, precision):
    """Compare means of 20 updates, because single losses vary, after the first 60, in which the loss falls fast."""
    state = new_state(replace(SMALL, precision=precision), text_tokens(), True)
    losses = np.array(read_steps(state, [train_step(state) for _ in range(200)]))[:, 0]
    assert losses[-20:].mean() < 0.6 * losses[0]
    means = [curve[60:].reshape(-1, 20).mean(axis=1) for curve in (losses, curve_of_float32)]
    np.testing.assert_allclose(*means, rtol=0.01)


@pytest.mark.parametrize("changes", VARIANTS)
def test_every_variant_trains_in_bfloat16(changes):
    config = replace(SMALL, precision="bfloat16", accumulation_steps=2, dropout=0.1, **changes)
    state = new_state(config, text_tokens(), True)
    losses = np.array(read_steps(state, [train_step(state) for _ in range(60)]))[:, 0]
    assert np.isfinite(losses).all() and losses[-5:].mean() < 0.8 * losses[0]


RECORDED = [{"precision": precision, "dropout": 0.1, "accumulation_steps": 2} for precision in TOLERANCES] + [
    {"precision": "bfloat16", "positions": "rotary", "norm": "rms_norm"}
]


@pytest.mark.parametrize("changes", RECORDED, ids=str)
def test_recorded_updates_give_the_bits_of_plain_ones(changes):
    found = []
    for mode in (nullcontext, lambda: graph_mode(Mode())):  # a mode of the graph prevents recordings
        state = new_state(replace(SMALL, **changes), text_tokens(), True)
        with mode():
            losses = read_steps(state, [train_step(state) for _ in range(8)])
        updates = [n_updates for n_updates, _ in state.optimiser.states.values()]
        found.append((losses, updates, {name: to_cpu(p.array) for name, p in state.model.named_parameters()}))
        assert state.recorded.problem == "" and (state.recorded.recorder is None) == (mode is not nullcontext)
    assert found[0][:2] == found[1][:2]
    for name, array in found[0][2].items():
        np.testing.assert_array_equal(array, found[1][2][name], err_msg=name)


def test_recordings_can_be_excluded(monkeypatch):
    monkeypatch.setenv("TRICYCLE_KERNELS", "-cuda_graphs")
    state = new_state(SMALL, text_tokens(), True)
    read_steps(state, [train_step(state) for _ in range(4)])
    assert state.recorded.problem == "nothing records here"


def test_recorded_updates_go_on_after_a_rollback(tmp_path):
    state = new_state(SMALL, text_tokens(), True)
    read_steps(state, [train_step(state) for _ in range(4)])
    state.save(tmp_path / "checkpoint.npz", None)
    first = read_steps(state, [train_step(state) for _ in range(5)])
    state.roll_back(tmp_path / "checkpoint.npz")
    assert read_steps(state, [train_step(state) for _ in range(5)]) == first


def test_non_finite_update_changes_no_weight():
    state = new_state(SMALL, text_tokens(), True)
    results = [train_step(state)]
    dict(state.model.named_parameters())["norm.gain"].array[0] = np.nan
    before = {name: to_cpu(p.array) for name, p in state.model.named_parameters()}
    results.append(train_step(state))
    for name, parameter in state.model.named_parameters():
        np.testing.assert_array_equal(to_cpu(parameter.array), before[name], err_msg=name)
    with pytest.raises(NonFiniteError, match="step 2: the loss is nan"):
        read_steps(state, results)


@pytest.mark.parametrize("devices", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_checkpoints_resume_on_either_device(tmp_path, devices, precision):
    first, second = devices
    config = replace(SMALL, precision=precision)
    whole, state = (new_state(config, text_tokens(), first) for _ in range(2))
    for each in (whole, state):
        [train_step(each) for _ in range(3)]
    state.save(tmp_path / "c", None)
    state = resume_state(tmp_path / "c", text_tokens(), second)
    assert next(state.model.parameters()).on_gpu == second
    losses = [read_steps(each, [train_step(each) for _ in range(3)]) for each in (whole, state)]
    if first == second:
        assert losses[0] == losses[1]
    np.testing.assert_allclose(np.array(losses[0])[:, 0], np.array(losses[1])[:, 0], rtol=1e-3)


def test_exhausted_gpu_memory_raises_memory_error():
    with pytest.raises(MemoryError, match="Out of memory"):
        devices.to_gpu(np.zeros(1, np.float32)).repeat(2**42)
    free, total = gpu_memory()
    assert 0 < free <= total


# -------------------------------------------------------------------- using models
@pytest.mark.parametrize("changes", VARIANTS)
def test_generation_and_evaluation_match_the_cpu(changes):
    model, host = GPT(replace(SMALL, **changes)).to_gpu(), GPT(replace(SMALL, **changes))
    for each in (model, host):
        found = [list(generate(each, [1, 2, 3], 40, temperature=0)) for _ in range(2)]
        assert found[0] == found[1]
    prompt = list(range(60))  # sharper after some training, but the first tokens agree as they are
    drawn = [list(itertools.islice(generate(each, prompt, 10, temperature=0), 10)) for each in (model, host)]
    assert drawn[0] == drawn[1]
    means = [evaluate(each, text_tokens()[:2000], 4)[0] for each in (model, host)]
    assert means[0] == pytest.approx(means[1], rel=1e-4)


# -------------------------------------------------------------------- programs
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_training_script_trains_resumes_and_generates(tmp_path, precision):
    pytest.importorskip("tyro")
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and the dog sat on the log. " * 400, encoding="utf-8")
    folder = tmp_path / "run"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def call(*words):
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, encoding="utf-8")
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    words = ["train_smol_gpt.py", "--preset", "debug", "--data", "text", "--files", str(text), "--device", "gpu"]
    out = call(*words, "--precision", precision, "--run-folder", str(folder))
    assert "parameters on the GPU" in out and "held-out loss" in out
    assert call("inference.py", str(folder), "the cat", "--length", "20")
    call("train_smol_gpt.py", "--resume", str(folder), "--device", "gpu")


# -------------------------------------------------------------------- registered kernels
def test_gpu_kernels_of_tricycle_accelerators_are_registered():
    import cupy

    kernels.gelu(cupy.ones(3, cupy.float32))
    (version,) = kernels.gelu.registered[cupy.ndarray]
    assert version.__module__ == "tricycle_accelerators.cuda.elementwise"
    assert DebugConfig().precision == "float32"
