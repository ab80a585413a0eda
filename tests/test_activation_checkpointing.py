"""Recomputation changes no bit of a training, and takes less memory; the loss in pieces is the loss."""

import ast
import tracemalloc
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tricycle import models, no_grad, to_tensor
from tricycle.activation_checkpointing import checkpoint_activations
from tricycle.autograd import topological_order
from tricycle.configs import DebugConfig, EncoderConfig, GPTConfig
from tricycle.debug import watch_arrays
from tricycle.evaluation import evaluate
from tricycle.finetuning.lora import Adapter, LoRAConfig, LoRATarget, LowRankUpdate
from tricycle.finetuning.packing import packed_forward_kwargs
from tricycle.functions import linear, softcap
from tricycle.layers import Dense, Dropout, Layer
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.sequences.text_encoder import TextEncoder
from tricycle.state.activations import free_activations, free_activations_inside
from tricycle.tensor import record
from tricycle.tensor_methods import leaf_gradients
from tricycle.training import compute_gradients, supervised_loss
from tricycle.training_state import new_state, resume_state, train_step, training_bytes

CONFIG = DebugConfig(vocab_size=97, n_layers=3, dropout=0.3, seed=5)
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 97, (2, 4, 16))


def gradients(module) -> dict[str, np.ndarray]:
    return {name: p.grad.array for name, p in module.named_parameters() if p.grad is not None}


def grads_of(model, batch=TOKENS, loss_fn=None) -> tuple[float, dict[str, np.ndarray]]:
    model.zero_grad()
    loss = compute_gradients(model, supervised_loss(model, loss_fn or CrossEntropy()), [tuple(batch)]).loss
    return float(loss), gradients(model)


def plain_and_recomputed(config, kind=GPT):
    """Yield two equal models: the second computes its blocks again in the backward pass."""
    for recompute in (None, checkpoint_activations):
        model = kind(config)
        model.recompute = recompute
        yield model


def peak_memory(model, batch) -> int:
    tracemalloc.start()
    grads_of(model, batch)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)


# -------------------------------------------------------------------- recomputation
MODELS = {
    "gpt": {},
    "untied": {"tied": False, "norm_placement": "both", "logit_cap": 5.0, "score_cap": 9.0},
    "parallel": {"parallel": True, "shared_norm": True, "positions": "rotary"},
    "llama": {"norm": "rms_norm", "activation": "swish", "gated": True, "positions": "rotary", "n_key_heads": 1},
    "shift": {
        "token_shift": True,
        "key_shift": True,
        "qk_norm": True,
        "positions": "rotary",
        "norm_placement": "after",
    },
    "adaptive": {"softmax": "adaptive"},
    "blocks": {"softmax": "blocks"},
    "bfloat16": {"precision": "bfloat16"},
}
each_model = lambda test: pytest.mark.filterwarnings("ignore:precision bfloat16")(
    pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)(test)
)


@pytest.mark.filterwarnings("ignore:precision bfloat16")
def test_bfloat16_gradients_with_few_rows_are_bit_identical():
    """In evaluation products of so few rows are made in float32; a first pass without gradients is no evaluation."""
    config = replace(CONFIG, precision="bfloat16", n_layers=1, dropout=0.0)
    (loss, grads), again = (grads_of(model, TOKENS[:, :1, :4]) for model in plain_and_recomputed(config))
    assert loss == again[0] and same(grads, again[1])


@each_model
def test_gradients_are_bit_identical(changes):
    plain, other = plain_and_recomputed(replace(CONFIG, **changes))
    draws = []
    for _ in range(2):  # the generator has gone on as far
        (loss, grads), again = grads_of(plain), grads_of(other)
        assert loss == again[0] and same(grads, again[1])
        draws.append(grads)
    assert not same(*draws)
    assert plain.generator.bit_generator.state == other.generator.bit_generator.state


# -------------------------------------------------------------------- freed activations
def batch_loss(model) -> tuple[dict[str, np.ndarray], int]:
    """Gradients, and how many numbers can be seen on the way to the loss."""
    model.zero_grad()
    loss = CrossEntropy()(to_tensor(TOKENS[1], dtype=int), model(to_tensor(TOKENS[0], dtype=int)))
    n_seen = sum(node.size for node in topological_order(loss) if np.isfinite(node.array).all())
    loss.backward()
    return gradients(model), n_seen


@each_model
def test_blocks_free_activations_not_needed_for_gradients(changes):
    plain, n_seen = batch_loss(GPT(replace(CONFIG, **changes)))
    with free_activations():
        freed, n_left = batch_loss(GPT(replace(CONFIG, **changes)))
    assert same(plain, freed)
    assert n_left < 0.7 * n_seen


class Late(Layer):
    """A user's layer, whose gradient reads arrays only in the backward pass."""

    def forward(self, x):
        half = x * 0.5
        square = record(half.array**2, (half,), lambda grad, needs_grad: (grad * 2 * half.array,), "square")
        late = lambda grad, needs_grad: (grad * (square.array == square.array),)
        return record(square.array + 1, (square,), late, "one")


def test_inputs_of_user_layers_are_not_freed():
    model = GPT(CONFIG)
    model.blocks[1].mlp.activation = Late()  # in a block of the library
    plain, _ = batch_loss(model)
    model.blocks[1].mlp.dropout.generator.bit_generator.state = GPT(CONFIG).generator.bit_generator.state
    with free_activations():
        freed, _ = batch_loss(model)
    assert same(plain, freed)
    assert all(np.isfinite(grad).all() for grad in freed.values())


def test_results_of_user_functions_are_not_freed():
    """A penalty of activations, for example, reads them after the forward pass."""
    model, seen = GPT(CONFIG), []
    activation = model.blocks[1].mlp.activation

    def and_keep(x):
        seen.append(activation(x))
        return seen[-1]

    model.blocks[1].mlp.activation = and_keep
    with free_activations():
        model(to_tensor(TOKENS[0], dtype=int))
    assert np.isfinite(seen[0].array).all()


@pytest.mark.parametrize("checked_by", ["recorded", "set", "watched"])
def test_arguments_of_user_functions_are_not_freed(checked_by):
    start = to_tensor([1.0, 2.0])
    used = start * 3
    given = used + 1
    with watch_arrays() if checked_by == "watched" else nullcontext():
        squared = record(given.array**2, (given,), lambda grad, needs_grad: (grad * 2 * given.array,), "square")
    if checked_by == "set":
        squared.back_fns = (lambda grad: grad.array * 2 * given.array,)
    result = squared * 2
    free_activations_inside(result, start)
    assert np.isnan(used.array).all() and used.shape == (2,)
    assert all(np.isfinite(tensor.array).all() for tensor in (start, given, squared, result))
    result.sum().backward()
    assert np.array_equal(start.grad.array, 2 * 2 * np.array([4.0, 7.0]) * 3)


def late_looks(source: str) -> list[str]:
    """Where a gradient function looks at the array of a Tensor from outside of it."""
    places = []
    for function in ast.walk(ast.parse(source)):
        is_backward = isinstance(function, ast.FunctionDef) and function.name == "backward"
        if is_backward and function.args.args[0].arg != "self":
            nodes = list(ast.walk(function))
            own = {node.id for node in nodes if isinstance(node, ast.Name) and type(node.ctx) is ast.Store}
            own |= {argument.arg for argument in function.args.args}
            arrays = [node for node in nodes if isinstance(node, ast.Attribute) and node.attr == "array"]
            bases = [node.value for node in arrays if type(node.value) is ast.Name]
            places += [f"line {base.lineno}: {base.id}" for base in bases if base.id not in own]
    return places


def test_library_gradient_functions_capture_arrays_not_tensors():
    for path in Path(models.__file__).parent.rglob("*.py"):
        assert late_looks(path.read_text(encoding="utf-8")) == [], path
    assert late_looks("def f(x):\n  def backward(grad, needs_grad):\n    return grad * x.array\n") == ["line 3: x"]


def test_probes_see_intermediate_activations():
    inputs = []
    model = GPT(CONFIG)
    block = model.blocks[1]
    before = block.mlp.forward
    block.mlp.forward = lambda x: inputs.append(x) or before(x)
    with free_activations():
        model(to_tensor(TOKENS[0], dtype=int))
    assert np.isfinite(inputs[0].array).all()


def test_training_runs_are_identical_and_resume(tmp_path):
    config = replace(CONFIG, steps=6, batch_size=2, accumulation_steps=2, warmup_steps=2)
    tokens = RNG.integers(0, 97, 500)
    plain, again = new_state(config, tokens), new_state(replace(config, recompute=True), tokens)
    assert again.model.recompute and not plain.model.recompute
    for step in range(6):
        assert train_step(plain) == train_step(again)
        if step == 2:
            again.save(tmp_path / "last.safetensors", None)
            again = resume_state(tmp_path / "last.safetensors", tokens)
            assert again.model.recompute
    assert same(plain.model.state_dict(), again.model.state_dict())


def test_encoder_with_padding_mask():
    config = EncoderConfig(vocab_size=50, context_window=8, embedding_dim=8, n_heads=2, n_layers=2, dropout=0.2)
    mask = np.arange(8) < np.array([[8], [5]])
    tokens = to_tensor(RNG.integers(0, 50, (2, 8)), dtype=int)
    results = []
    for model in plain_and_recomputed(config, TextEncoder):
        model(tokens, mask).sum().backward()
        results.append(gradients(model))
    assert results[0] and same(*results)


def test_frozen_weights():
    results = []
    for model in plain_and_recomputed(CONFIG):
        model.freeze()
        for block in model.blocks[1:]:
            block.mlp.unfreeze()
        results.append(grads_of(model)[1])
    assert len(results[0]) == 8 and same(*results)


def test_adapters_with_dropout_on_packed_texts(monkeypatch):
    """As fine-tuning has them: recomputed, and with the loss in pieces, whose sums are rounded otherwise."""
    documents = np.repeat([[0, 1, 2], [0, 0, 1]], [5, 5, 6], axis=1)
    tokens = RNG.integers(0, 97, (2, 16))
    labels = to_tensor(np.where(RNG.random((2, 16)) < 0.5, -100, np.roll(tokens, -1, 1)), dtype=int)
    results = []
    for again, n_rows in ((False, 2**24), (True, 2**24), (True, 3)):
        monkeypatch.setattr(models, "n_logit_rows", lambda *_, n_rows=n_rows: n_rows)
        model = GPT(replace(CONFIG, positions="rotary"))
        model.recompute = again and checkpoint_activations
        part = LoRATarget("up", 0, 128, 4, 2.0)
        low_ranks = {}
        for i, block in enumerate(model.blocks):
            low_rank = LowRankUpdate(32, block.mlp.up.to_size, [part], 0.5, model.generator)
            low_rank.ups[0].array[...] = np.random.default_rng(i).standard_normal((4, 128))
            low_ranks[f"blocks.{i}.mlp.up"] = low_rank
        adapter = Adapter(model, low_ranks, LoRAConfig()).attach()
        packed = packed_forward_kwargs(model, tokens, documents)
        model.loss(tokens, labels, CrossEntropy(-100), 1.0, **packed).backward()
        results.append(gradients(adapter))
    assert len(results[0]) == 6 and all(array.any() for array in results[0].values())
    assert same(results[0], results[1])
    for name, array in results[0].items():
        np.testing.assert_allclose(results[2][name], array, 1e-4, 1e-5 * abs(array).max(), err_msg=name)


class Noisy(Layer):
    """Dropout twice, and a product that a setting may change."""

    def __init__(self):
        self.inner = [Dense(6, 6, generator=1), Dropout(0.5, 2)]
        self.outer = Dropout(0.5, 3)
        self.n_calls = 0

    def forward(self, x):
        self.n_calls += 1
        return self.outer(x * x + self.inner[1](self.inner[0](x)))


def test_random_draws_and_evaluation_before_backward_have_no_effect():
    """Neither what others draw before the backward pass, nor evaluation."""
    x = RNG.standard_normal((3, 6))
    results = []
    for again in (False, True):
        layer = Noisy()
        inputs = to_tensor(x)
        loss = (checkpoint_activations(layer, inputs) if again else layer(inputs)).sum()
        layer.inner[1].generator.random(7)
        layer.eval()
        with no_grad():
            loss.backward()
        assert not layer.training
        state = layer.inner[1].generator.bit_generator.state
        results.append((inputs.grad.array.tobytes(), layer.inner[0].weights.grad.array.tobytes(), state))
    assert results[0] == results[1]


def test_backward_within_evaluation_keeps_the_training_mode():
    layer = Noisy()
    y = checkpoint_activations(layer, to_tensor(RNG.standard_normal((3, 6))))
    with layer.evaluating():
        y.backward()
    assert all(part.training for part in layer.layers())


def test_retain_graph_and_freed_graph():
    layer, x = Noisy(), to_tensor(RNG.standard_normal((3, 6)))
    y = checkpoint_activations(layer, x)
    y.backward(retain_graph=True)
    once = x.grad.array.copy()
    y.backward()
    assert (x.grad.array == 2 * once).all()
    with pytest.raises(RuntimeError, match="freed"):
        y.backward()
    assert layer.n_calls == 3


def test_weights_changed_before_backward_raise():
    layer, x = Noisy(), to_tensor(RNG.standard_normal((3, 6)))
    y = checkpoint_activations(layer, x)
    layer.load_state_dict({name: 2 * array for name, array in layer.state_dict().items()})
    with pytest.raises(RuntimeError, match="in place"):
        y.backward()


def test_no_recomputation_without_gradients():
    layer = Noisy()
    with no_grad():
        assert not checkpoint_activations(layer, to_tensor(np.ones((2, 6)))).requires_grad
    layer.freeze()
    assert not checkpoint_activations(layer, to_tensor(np.ones((2, 6)), requires_grad=False)).requires_grad
    assert layer.n_calls == 2


def test_checkpointing_uses_less_memory():
    config = replace(CONFIG, n_layers=8, embedding_dim=64, context_window=64)
    batch = RNG.integers(0, 97, (2, 8, 64))
    peaks = []
    for model in plain_and_recomputed(config):
        grads_of(model, batch)
        model.zero_grad()
        peaks.append(peak_memory(model, batch))
    assert peaks[1] < 0.5 * peaks[0]
    assert training_bytes(replace(config, recompute=True)) < training_bytes(config)


def test_unused_inputs_get_no_gradient():
    x, y = to_tensor([1.0, 2.0]), to_tensor([3.0])
    (of_x, of_y) = leaf_gradients((x * x).sum(), np.float32(1), [x, y])
    assert of_x.tolist() == [2, 4]
    assert of_y is None
    assert x.grad is None
    assert leaf_gradients(x.detach(), np.ones(2), [x]) == [None]


# -------------------------------------------------------------------- chunked loss
LABELS = np.array([[1, 4, 0], [3, 3, 6]])
LOSSES = {
    "plain": CrossEntropy(),
    "smooth": CrossEntropy(label_smoothing=0.2),
    "masked": CrossEntropy(ignore_index=3),
    "both": CrossEntropy(ignore_index=0, label_smoothing=0.1),
}


@pytest.mark.parametrize("n_rows", [1, 2, 4, 100])
@pytest.mark.parametrize("loss_fn", LOSSES.values(), ids=LOSSES)
def test_chunked_loss_equals_full_loss(loss_fn, n_rows):
    """Of two heads: a tied one with a cap, and one with a bias."""
    arrays = [RNG.standard_normal(shape) for shape in ((2, 3, 5), (7, 5), 7)]
    hidden, table, bias = (to_tensor(array, dtype=np.float64) for array in arrays)
    capped = lambda x: softcap(linear(x, table.transpose()), 2.0)
    for head, parameters in ((capped, [table]), (lambda x: linear(x, table.transpose(), bias), [table, bias])):
        results = []
        whole = lambda: loss_fn(LABELS, head(hidden), 0.7)  # noqa: B023
        chunked = lambda: loss_fn.from_hidden(LABELS, hidden, head, parameters, n_rows, 0.7)  # noqa: B023
        for compute in (whole, chunked):
            loss = compute()
            (3 * loss).backward()
            results.append((loss.array, *(tensor.grad.array for tensor in (hidden, *parameters))))
            for tensor in (hidden, *parameters):
                tensor.zero_grad()
        for expected, got in zip(*results):
            assert expected.dtype == got.dtype
            np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-14)
        with no_grad():
            np.testing.assert_allclose(chunked().array, whole().array, rtol=1e-13)


def test_ignored_rows_are_not_computed():
    lengths = []

    def head(x):
        lengths.append(len(x))
        return linear(x, table)

    table = to_tensor(RNG.standard_normal((5, 7)))
    labels = np.full(50, -100)
    labels[[3, 4, 5, 20, 30]] = 2
    hidden = to_tensor(RNG.standard_normal((50, 5)))
    loss = CrossEntropy(-100).from_hidden(labels, hidden, head, [table], 3)
    loss.backward()
    assert lengths == [2, 3]
    assert np.flatnonzero(hidden.grad.array.any(axis=1)).tolist() == [3, 4, 5, 20, 30]


def test_only_inputs_that_require_grad_get_gradients():
    hidden, table = to_tensor(np.ones((6, 5))), to_tensor(np.ones((5, 7)), requires_grad=False)
    CrossEntropy().from_hidden(LABELS.ravel(), hidden, lambda x: linear(x, table), [table], 4).backward()
    assert hidden.grad is not None and table.grad is None
    table = to_tensor(np.ones((5, 7)))
    CrossEntropy().from_hidden(LABELS.ravel(), hidden.detach(), lambda x: linear(x, table), [table], 4).backward()
    assert table.grad is not None


def test_chunked_loss_supports_retain_graph():
    hidden, table = (to_tensor(RNG.standard_normal(shape)) for shape in ((6, 5), (5, 7)))
    with watch_arrays():
        loss = CrossEntropy().from_hidden(LABELS.ravel(), hidden, lambda x: linear(x, table), [table], 4)
    loss.backward(retain_graph=True)
    once = table.grad.array.copy()
    table.grad.array[...] = 0  # as if a user scaled it
    table.grad = None
    loss.backward(retain_graph=True)
    np.testing.assert_array_equal(table.grad.array, once)
    loss.backward()
    np.testing.assert_allclose(table.grad.array, 2 * once, rtol=1e-6)


@pytest.mark.parametrize(
    ("labels", "n_rows", "message"),
    [
        (np.zeros(5, int), 2, r"labels.*\(6, 5\).*got \(5,\)"),
        (np.zeros(6), 2, "whole numbers.*labels"),
        (np.full(6, 7), 2, "labels"),
        (np.full(6, -1), 2, "labels"),
        (np.full(6, 9), 2, "at least one label"),
        (np.zeros(6, int), 0, "n_rows.*got 0"),
    ],
)
def test_chunked_loss_rejects_bad_arguments(labels, n_rows, message):
    labels, head = to_tensor(labels, dtype=labels.dtype), to_tensor(np.ones((5, 7))).__rmatmul__
    with pytest.raises(ValueError, match=message):
        CrossEntropy(9).from_hidden(labels, np.ones((6, 5)), head, [], n_rows)


# -------------------------------------------------------------------- of a model
@each_model
def test_model_loss_is_chunked_for_many_logits(changes, monkeypatch):
    loss_fn = CrossEntropy(ignore_index=11)
    model = GPT(replace(CONFIG, dropout=0.0, **changes))
    for p in model.parameters():
        p.array[...] += RNG.normal(0, 0.05, p.shape)
    whole, expected = grads_of(model, TOKENS, loss_fn)
    monkeypatch.setattr(models, "n_logit_rows", lambda *_: 13)
    monkeypatch.setattr(CrossEntropy, "forward", None)  # and so the logits never exist whole
    tolerance = 2e-2 if model.precision == "bfloat16" else 1e-5
    assert grads_of(model, TOKENS, loss_fn)[0] == pytest.approx(whole, rel=tolerance)
    for name, p in model.named_parameters():
        largest = abs(expected[name]).max()
        np.testing.assert_allclose(p.grad.array, expected[name], rtol=0, atol=tolerance * largest, err_msg=name)


def test_chunked_loss_uses_less_memory(monkeypatch):
    config = GPTConfig(vocab_size=20_000, context_window=64, embedding_dim=16, n_heads=2, n_layers=1)
    model = GPT(config)
    batch = RNG.integers(0, 20_000, (2, 8, 64))
    peaks = []
    for n_rows in (2**16, 52):
        monkeypatch.setattr(models, "n_logit_rows", lambda *_, n_rows=n_rows: n_rows)
        peaks.append(peak_memory(model, batch))
    assert peaks[0] > 2 * 4 * 512 * 20_000  # logits, and their gradients
    assert peaks[1] < 0.4 * peaks[0]


def test_evaluation_uses_chunked_loss(monkeypatch):
    model = GPT(replace(CONFIG, context_window=16))
    tokens = RNG.integers(0, 97, 200)
    expected = evaluate(model, tokens, 4)
    monkeypatch.setattr(models, "n_logit_rows", lambda *_: 5)
    got = evaluate(model, tokens, 4)
    assert got == (pytest.approx(expected[0], rel=1e-6), expected[1])


def test_overridden_forward_is_called(monkeypatch):
    """A subclass's, or that of a caller with a hook."""

    class Doubled(GPT):
        def forward(self, tokens, caches=None, last=False):
            return 2 * super().forward(tokens, caches, last)

    model = Doubled(replace(CONFIG, dropout=0.0))
    expected = model.loss(TOKENS[0], to_tensor(TOKENS[1], dtype=int)).item()
    monkeypatch.setattr(models, "n_logit_rows", lambda *_: 1)
    assert model.loss(TOKENS[0], to_tensor(TOKENS[1], dtype=int)).item() == expected
