"""RNN, GRU and LSTM: gradients, PyTorch's opinion, lengths, states that are handed on, bad input."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from tables import bad_input

from tricycle import extra_ops
from tricycle.debug import use_reference
from tricycle.gradcheck import gradcheck
from tricycle.sequences.recurrent import CELLS, GRU, LSTM, RNN, Recurrent
from tricycle.tensor import Tensor, no_grad, to_tensor
from tricycle.transforms import functional_call
from tricycle_accelerators import threads

N_ITEMS, N_STEPS, WIDTH, SIZE = 4, 6, 3, 2
LENGTHS = [[6, 1, 4, 2], [1, 1, 1, 1], [3, 5, 5, 2]]  # with a full one, with the shortest alone, with neither

# name -> the layer, PyTorch's, and the arguments of both
KINDS: dict[str, tuple[type[Recurrent], str, dict[str, str]]] = {
    "RNN": (RNN, "RNN", {}),
    "RNN relu": (RNN, "RNN", {"nonlinearity": "relu"}),
    "GRU": (GRU, "GRU", {}),
    "LSTM": (LSTM, "LSTM", {}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
STACKS = [(1, False), (1, True), (2, False), (2, True)]
every_stack = pytest.mark.parametrize(
    ("n_layers", "bidirectional"), STACKS, ids=["one", "one both ways", "two", "two both ways"]
)
every_lengths = pytest.mark.parametrize("lengths", [None, *LENGTHS], ids=str)


def new_layer(kind: str, *stack: Any, bias: bool = True, dtype: Any = np.float64) -> Recurrent:
    """With random biases too, for the first ones, zeros, would hide mistakes."""
    make, _, options = KINDS[kind]
    layer = make(WIDTH, SIZE, *stack, bias=bias, generator=0, **options)
    rng = np.random.default_rng(1)
    for p in layer.parameters():
        p.array = rng.standard_normal(p.shape).astype(dtype)
    return layer


def new_input(dtype: Any = np.float64) -> np.ndarray:
    return np.random.default_rng(2).standard_normal((N_ITEMS, N_STEPS, WIDTH)).astype(dtype)


def new_states(layer: Recurrent) -> list[Tensor]:
    """One for each state that the layer has."""
    rng, shape = np.random.default_rng(3), (sum(map(len, layer.runs)), N_ITEMS, SIZE)
    return [to_tensor(rng.standard_normal(shape), dtype=np.float64) for _ in range(CELLS[layer._cell].n_states)]


def as_initial(states: list) -> Any:
    return states[0] if len(states) == 1 else tuple(states)


def as_list(final: Any) -> list[Tensor]:
    return list(final) if isinstance(final, tuple) else [final]


def flat(outputs: Tensor, final: Any) -> Tensor:
    """Outputs and states at the end as one vector."""
    return extra_ops.concatenate([y.reshape(-1) for y in (outputs, *as_list(final))])


def all_gradients(layer: Recurrent, x: Tensor, initial: list[Tensor], *results: Tensor) -> list[np.ndarray]:
    """Those of the input, the initial states and the parameters, for a random weighting of the results."""
    rng = np.random.default_rng(4)
    total = sum(((y * rng.standard_normal(y.shape)).sum() for y in results), to_tensor(0.0, dtype=np.float64))
    total.backward()
    learned = x, *initial, *layer.parameters()
    grads = [t.grad.array for t in learned]
    for t in learned:
        t.zero_grad()
    return grads


# -------------------------------------------------------------------- gradients
@pytest.mark.nightly_except(12)
@every_kind
@every_stack
@every_lengths
def test_gradients(kind, n_layers, bidirectional, lengths) -> None:
    layer = new_layer(kind, n_layers, bidirectional)
    names = [name for name, _ in layer.named_parameters()]
    states = new_states(layer)

    def fn(x: Tensor, *others: Tensor) -> Tensor:
        parameters = dict(zip(names, others[len(states) :], strict=True))
        return flat(*functional_call(layer, parameters, x, lengths, as_initial(list(others[: len(states)]))))

    values = [p.array for p in layer.parameters()]
    gradcheck(fn, new_input(), *(state.array for state in states), *values, n_directions=1, elementwise_up_to=24)


@every_kind
def test_recurrent_layer_used_twice_in_one_graph(kind) -> None:
    """Its parameters get the sum of what both calls give; the second starts where the first ended."""
    layer, x, other = new_layer(kind, 2, True), new_input(), new_input()[:, :3] + 1

    def gradients(*choice: bool) -> list[np.ndarray]:
        calls = layer(to_tensor(x, dtype=float)), layer(to_tensor(other, dtype=float), [3, 1, 2, 2])
        total = [flat(*call).sum() for call, chosen in zip(calls, choice) if chosen]
        (total[0] + total[1] if len(total) == 2 else total[0]).backward()
        grads = [p.grad.array for p in layer.parameters()]
        layer.zero_grad()
        return grads

    for both, one, another in zip(gradients(True, True), gradients(True, False), gradients(False, True)):
        np.testing.assert_allclose(both, one + another, 1e-10, 1e-12)

    def chained(x: Tensor) -> Tensor:
        outputs, final = layer(x)
        return flat(*layer(x * outputs[..., :WIDTH], initial=final))

    gradcheck(chained, x)


@every_kind
def test_frozen_layers_and_no_grad(kind) -> None:
    layer, x = new_layer(kind).freeze(), to_tensor(new_input(), dtype=np.float64)
    outputs, _ = layer(x)
    outputs.backward()
    assert x.grad is not None and all(p.grad is None for p in layer.parameters())
    with no_grad():
        assert not layer(x)[0].requires_grad
    assert not layer(new_input())[0].requires_grad  # a constant, and nothing that learns


# -------------------------------------------------------------------- PyTorch
NAMES = {"input_weights": "weight_ih", "hidden_weights": "weight_hh", "input_bias": "bias_ih", "hidden_bias": "bias_hh"}


def torch_twin(kind: str, layer: Recurrent, n_layers: int, bidirectional: bool, bias: bool) -> tuple[Any, list[Any]]:
    """PyTorch's layer with the same weights, and its parameters in the order of Tricycle's layer."""
    torch = pytest.importorskip("torch")
    _, name, options = KINDS[kind]
    twin = getattr(torch.nn, name)(
        WIDTH, SIZE, n_layers, bias=bias, batch_first=True, bidirectional=bidirectional, **options
    ).double()
    parameters = []
    for key, p in layer.named_parameters():
        _, number, direction, part = key.split(".")
        torch_parameter = getattr(twin, f"{NAMES[part]}_l{number}{'_reverse' * int(direction)}")
        torch_parameter.data = torch.tensor(p.array.T)
        parameters.append(torch_parameter)
    assert len(parameters) == len(list(twin.parameters()))
    return twin, parameters


@every_kind
@every_stack
@every_lengths
@pytest.mark.parametrize("bias", [True, False])
def test_agrees_with_pytorch(kind, n_layers, bidirectional, lengths, bias) -> None:
    torch = pytest.importorskip("torch")
    rnn = torch.nn.utils.rnn
    layer = new_layer(kind, n_layers, bidirectional, bias=bias)
    twin, parameters = torch_twin(kind, layer, n_layers, bidirectional, bias)
    x, states = to_tensor(new_input(), dtype=np.float64), new_states(layer)
    outputs, final = layer(x, lengths, as_initial(states))

    torch_x = torch.tensor(x.array, requires_grad=True)
    torch_states = [torch.tensor(state.array, requires_grad=True) for state in states]
    packed: Any = torch_x
    if lengths is not None:
        packed = rnn.pack_padded_sequence(torch_x, torch.tensor(lengths), batch_first=True, enforce_sorted=False)
    torch_outputs, torch_final = twin(packed, as_initial(torch_states))
    if lengths is not None:
        torch_outputs, _ = rnn.pad_packed_sequence(torch_outputs, batch_first=True, total_length=N_STEPS)
    results, torch_results = [outputs, *as_list(final)], [torch_outputs, *as_list(torch_final)]
    for actual, expected in zip(results, torch_results, strict=True):
        np.testing.assert_allclose(actual.array, expected.detach().numpy(), 1e-10, 1e-12)

    rng = np.random.default_rng(4)
    sum((y * torch.tensor(rng.standard_normal(tuple(y.shape)))).sum() for y in torch_results).backward()
    expected_gradients = [t.grad.numpy() for t in (torch_x, *torch_states)] + [p.grad.numpy().T for p in parameters]
    for actual, expected in zip(all_gradients(layer, x, states, *results), expected_gradients, strict=True):
        np.testing.assert_allclose(actual, expected, 1e-9, 1e-11)


# -------------------------------------------------------------------- steps, states, shapes
@every_kind
@pytest.mark.parametrize("n_layers", [1, 2])
def test_two_chunks_with_state_equal_one_run(kind, n_layers) -> None:
    layer, states = new_layer(kind, n_layers), new_states(new_layer(kind, n_layers))
    x = to_tensor(new_input(), dtype=np.float64)
    whole, end = layer(x, initial=as_initial(states))
    expected = all_gradients(layer, x, states, whole, *as_list(end))
    first, between = layer(x[:, :2], initial=as_initial(states))
    second, final = layer(x[:, 2:], initial=between)
    joined = extra_ops.concatenate([first, second], axis=1)
    for result, reference in zip([joined, *as_list(final)], [whole, *as_list(end)], strict=True):
        np.testing.assert_allclose(result.array, reference.array, 1e-12)
    for result, reference in zip(all_gradients(layer, x, states, joined, *as_list(final)), expected, strict=True):
        np.testing.assert_allclose(result, reference, 1e-10, 1e-12)


@every_kind
@every_stack
def test_shapes_dtype_batch_flag_and_final_states(kind, n_layers, bidirectional) -> None:
    layer = new_layer(kind, n_layers, bidirectional, dtype=np.float32)
    width, n_runs = SIZE * (1 + bidirectional), n_layers * (1 + bidirectional)
    for x in (new_input(np.float32), new_input().tolist(), to_tensor(new_input(), is_batched=True)):
        outputs, final = layer(x)
        assert outputs.shape == (N_ITEMS, N_STEPS, width) and outputs.dtype == np.float32
        assert outputs.is_batched == isinstance(x, Tensor)
        assert isinstance(final, tuple) == (kind == "LSTM")
        for state in as_list(final):
            assert state.shape == (n_runs, N_ITEMS, SIZE) and state.dtype == np.float32 and not state.is_batched
        last_outputs = [outputs.array[:, -1, :SIZE], outputs.array[:, 0, SIZE:]][: 1 + bidirectional]
        np.testing.assert_array_equal(last_outputs, as_list(final)[0].array[-len(last_outputs) :])
    assert layer(np.zeros((0, N_STEPS, WIDTH)))[0].shape == (0, N_STEPS, width)
    assert layer(np.zeros((1, 1, WIDTH), int))[0].shape == (1, 1, width)


def test_threads_do_not_change_results(monkeypatch) -> None:
    """Many items, three threads."""
    rng = np.random.default_rng(0)
    for kind in KINDS:
        layer, x = new_layer(kind, 1, True), to_tensor(rng.standard_normal((101, 5, WIDTH)), dtype=np.float64)
        results = []
        for n_threads, context in ((1, nullcontext()), (3, nullcontext()), (3, use_reference())):
            monkeypatch.setattr(threads, "n_threads", lambda n=n_threads: n)
            with context:
                outputs, final = layer(x)
                results.append([outputs.array, *all_gradients(layer, x, [], outputs, *as_list(final))])
        for one, three, plain in zip(*results, strict=True):
            np.testing.assert_allclose(one, three, 1e-11, 1e-12)
            np.testing.assert_allclose(one, plain, 1e-11, 1e-12)


# -------------------------------------------------------------------- lengths
@every_kind
@every_stack
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_the_content_of_padding_does_not_matter(kind, n_layers, bidirectional, lengths, value) -> None:
    layer, results = new_layer(kind, n_layers, bidirectional), []
    padding = np.arange(N_STEPS) >= np.array(lengths)[:, None]
    for number in (0.0, value):
        states, array = new_states(layer), new_input()
        array[padding] = number
        x = to_tensor(array, dtype=np.float64)
        outputs, final = layer(x, lengths, as_initial(states))
        assert not outputs.array[padding].any()
        gradients = all_gradients(layer, x, states, outputs, *as_list(final))
        assert not gradients[0][padding].any()
        results.append([outputs.array, *(state.array for state in as_list(final)), *gradients])
    for clean, dirty in zip(*results, strict=True):
        np.testing.assert_array_equal(clean, dirty)


@every_kind
@every_stack
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_batch_items_are_independent(kind, n_layers, bidirectional, lengths) -> None:
    layer, x = new_layer(kind, n_layers, bidirectional), new_input()
    states = new_states(layer)
    outputs, final = layer(x, lengths, as_initial(states))
    for i, length in enumerate(lengths):
        alone, end = layer(x[i : i + 1, :length], initial=as_initial([state[:, i : i + 1] for state in states]))
        np.testing.assert_allclose(outputs.array[i, :length], alone.array[0], 1e-12, 1e-14)
        for actual, expected in zip(as_list(final), as_list(end), strict=True):
            np.testing.assert_allclose(actual.array[:, i], expected.array[:, 0], 1e-12, 1e-14)


def test_exploding_state_does_not_change_in_the_padding() -> None:
    """An RNN without a bound, which in the padding would reach infinity."""
    layer = RNN(1, 1, nonlinearity="relu")
    run = layer.runs[0][0]
    run.hidden_weights.array[...], run.input_weights.array[...] = 100, 1
    x = to_tensor(np.ones((2, 30, 1)))
    outputs, final = layer(x, [2, 1])
    np.testing.assert_allclose(final.array[0, :, 0], [101, 1])
    (outputs.sum() + final.sum()).backward()
    assert np.isfinite(x.grad.array).all() and np.isfinite(run.hidden_weights.grad.array).all()


def test_lengths_accept_lists_arrays_and_tensors() -> None:
    layer, x = new_layer("LSTM", 2, True), new_input()
    expected = layer(x, [3, 5, 5, 2])[0].array
    for lengths in (np.array([3, 5, 5, 2], np.uint8), to_tensor([3, 5, 5, 2], dtype=int)):
        np.testing.assert_array_equal(layer(x, lengths)[0].array, expected)
    np.testing.assert_array_equal(layer(x, [N_STEPS] * N_ITEMS)[0].array, layer(x)[0].array)


# -------------------------------------------------------------------- as a layer
def test_parameters_have_names_and_the_biases_start_at_0() -> None:
    layer = GRU(3, 5, n_layers=2, bidirectional=True, generator=0)
    shapes = {name: p.shape for name, p in layer.named_parameters()}
    assert len(shapes) == 16
    assert shapes["runs.0.0.input_weights"] == (3, 15) and shapes["runs.1.1.input_weights"] == (10, 15)
    assert shapes["runs.1.0.hidden_weights"] == (5, 15) and shapes["runs.0.1.input_bias"] == (15,)
    assert all(not p.array.any() for p in layer.parameters() if p.ndim == 1)
    assert [p.ndim for p in LSTM(2, 2, bias=False).parameters()] == [2, 2]
    again = GRU(3, 5, n_layers=2, bidirectional=True, generator=0)
    for one, other in zip(layer.parameters(), again.parameters()):
        np.testing.assert_array_equal(one.array, other.array)


def test_the_initialiser_sees_the_size_of_one_gate() -> None:
    shapes = []

    def ones(shape, generator) -> np.ndarray:
        shapes.append(shape)
        return np.ones(shape, np.float32)

    layer = LSTM(3, 5, initialiser=ones)
    assert shapes == [(3, 5)] * 4 + [(5, 5)] * 4
    assert all((p.array == 1).all() for p in layer.parameters() if p.ndim == 2)


@every_kind
def test_dropout_is_between_layers_and_only_in_training(kind) -> None:
    make, _, options = KINDS[kind]
    dropping, plain = (make(WIDTH, SIZE, 2, dropout=p, generator=0, **options) for p in (0.5, 0.0))
    x = new_input()
    first, second = dropping(x)[0].array, dropping(x)[0].array
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(dropping.eval()(x)[0].array, plain(x)[0].array)
    alone = make(WIDTH, SIZE, 1, dropout=0.9, generator=0, **options)
    np.testing.assert_array_equal(alone(x)[0].array, alone(x)[0].array)


# -------------------------------------------------------------------- bad input
_layer = LSTM(3, 2, 2, True, generator=0)
_x = np.zeros((4, 6, 3))


test_bad_input_is_refused = bad_input(
    {
        "a wrong width": (lambda: _layer(np.zeros((4, 6, 2))), r"LSTM\(input_size=3\): .*\(batch, steps, 3\)"),
        "one sequence without a batch": (lambda: GRU(3, 2)(np.zeros((6, 3))), r"GRU\(input_size=3\): .*shape"),
        "an empty sequence": (lambda: RNN(3, 2)(np.zeros((4, 0, 3))), r"RNN\(input_size=3\): .*shape \(batch,"),
        "lengths beyond the array": (lambda: _layer(_x, [6, 7, 1, 1]), "LSTM: .*lengths.*1 to 6.*got 1 to"),
        "a length of 0": (lambda: _layer(_x, [6, 0, 1, 1]), "LSTM: .*lengths.*1 to 6.*got 0 to 6"),
        "a negative length": (lambda: _layer(_x, [-1, 2, 1, 1]), "LSTM: .*lengths.*1 to 6.*got -1 to 2"),
        "lengths for other items": (lambda: _layer(_x, [6, 1, 1]), "LSTM: .*lengths.*whole numbers.*shape"),
        "one length": (lambda: _layer(_x, 3), r"LSTM: .*lengths.*\(4,\), got int64"),
        "lengths with a point": (lambda: _layer(_x, [1.0, 2.0, 3.0, 4.0]), "LSTM: .*lengths.*whole numbers"),
        "states of a wrong shape": (
            lambda: _layer(_x, initial=(np.zeros((4, 4, 2)), np.zeros((4, 1, 2)))),
            r"LSTM: .*initial states.*h and c, got \(4, 4, 2\) and \(4, 1, 2\)",
        ),
        "one state where there are two": (
            lambda: _layer(_x, initial=[np.zeros((4, 4, 2))]),
            r"LSTM: .*initial states.*h and c, got \(4, 4, 2\)$",
        ),
        "two states where there is one": (
            lambda: GRU(3, 2)(_x, initial=np.zeros((2, 1, 4, 2))),
            r"GRU: .*initial states.*\(2, 1, 4, 2\)",
        ),
        "an unknown nonlinearity": (lambda: RNN(3, 2, nonlinearity="gelu"), "RNN: .*nonlinearity.*tanh"),
        "no layer": (lambda: GRU(3, 2, 0), "GRU: .*n_layers.*got 0"),
        "a width of 0": (lambda: GRU(0, 2), "GRU: .*input_size.*got 0"),
        "dropping all": (lambda: GRU(1, 1, dropout=1.0), r"Dropout: .*probability.*got 1\.0"),
    }
)
