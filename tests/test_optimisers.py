"""Optimizers: each rule against its formula, steps, weight decay, optimizer state, gradient clipping."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tables import bad_input
from test_layers import each_copy

from tricycle.configs import DebugConfig
from tricycle.kernels import muon
from tricycle.layers import Dense, Layer, Sequential
from tricycle.models import GPT
from tricycle.optimiser_rules import OPTIMISERS as OPTIMISERS_BY_NAME
from tricycle.optimiser_rules import Adafactor, Lion, Muon, any_parameter, is_hidden_matrix
from tricycle.optimisers import (
    AdamW,
    AdamWRule,
    Optimiser,
    Rule,
    State,
    Step,
    StochasticGradientDescent,
    clip_gradients,
    decays,
    gradient_norm,
    role_of,
)
from tricycle.parameter import ROLES, Parameter
from tricycle.scheduler import WarmupCosine
from tricycle.sequences.classifiers import AttentionPooling
from tricycle.tensor import to_tensor
from tricycle.training_state import new_optimiser
from tricycle_accelerators import threads
from tricycle_accelerators.cpu import optimisers as cpu_optimisers

OPTIMISERS: dict[str, Callable[..., Optimiser]] = {
    "sgd": StochasticGradientDescent,
    "momentum": lambda *args, **kwargs: StochasticGradientDescent(*args, momentum=0.9, **kwargs),
    "adamw": AdamW,
    "muon": Muon,
    "lion": Lion,
    "adafactor": Adafactor,
}
each_optimiser = pytest.mark.parametrize("make", OPTIMISERS.values(), ids=OPTIMISERS)


class Weights(Layer):
    """Have one matrix and one vector, and no forward pass."""

    def __init__(self) -> None:
        self.matrix = to_tensor([[1.0, -2.0], [3.0, 0.5]])
        self.vector = to_tensor([1.0, -1.0])

    def receive(self, *grads: float) -> Weights:
        """Set gradients that are constant over the matrix and over the vector."""
        for parameter, grad in zip(self.parameters(), grads):
            parameter.grad = to_tensor(np.full(parameter.shape, grad))
        return self


# -------------------------------------------------------------------- the rules
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_sgd_matches_formula(momentum: float) -> None:
    model, optimiser = Weights(), StochasticGradientDescent(0.1, momentum=momentum)
    moved, velocity = 0.0, 0.0
    for grad in (1.0, 3.0, -2.0):
        model.receive(grad).update(optimiser)
        velocity = momentum * velocity + grad
        moved += 0.1 * velocity
        np.testing.assert_allclose(model.matrix.array, Weights().matrix.array - moved, rtol=1e-6)


def test_adamw_matches_algorithm_2() -> None:
    rate, beta1, beta2, eps, decay = 0.1, 0.8, 0.9, 1e-3, 0.05
    model, optimiser = Weights(), AdamW(rate, (beta1, beta2), eps, decay)
    expected, m, v = Weights().matrix.array.astype(np.float64), 0.0, 0.0
    for t, grad in enumerate((1.0, -3.0, 0.5, 0.0), start=1):
        model.receive(grad).update(optimiser)
        m, v = beta1 * m + (1 - beta1) * grad, beta2 * v + (1 - beta2) * grad**2
        expected *= 1 - rate * decay
        expected -= rate * (m / (1 - beta1**t)) / (math.sqrt(v / (1 - beta2**t)) + eps)
        np.testing.assert_allclose(model.matrix.array, expected, rtol=1e-5)


def test_lion_matches_algorithm_2() -> None:
    rate, beta1, beta2, decay = 0.1, 0.7, 0.9, 0.05
    model, optimiser = Weights(), Lion(rate, (beta1, beta2), decay)
    expected, m = Weights().matrix.array.astype(np.float64), 0.0
    for grad in (1.0, -0.3, -0.3, -0.3, 0.0):
        model.receive(grad).update(optimiser)
        expected -= rate * (math.copysign(1, beta1 * m + (1 - beta1) * grad) + decay * expected)
        m = beta2 * m + (1 - beta2) * grad
        np.testing.assert_allclose(model.matrix.array, expected, rtol=1e-5)


@pytest.mark.parametrize("relative_step", [False, True])
def test_adafactor_matches_algorithms_4_and_5(relative_step: bool, rng: np.random.Generator) -> None:
    """Compare with the algorithm in the paper, in float64, with the full second moment of a matrix."""
    optimiser = Adafactor(0.1, -0.8, clip_threshold=0.9, weight_decay=0.2, relative_step=relative_step)
    model = Weights()
    expected = [p.array.astype(np.float64) for p in model.parameters()]
    rows, columns, second = np.zeros(2), np.zeros(2), np.zeros(2)
    for t in range(1, 11):
        grads = [rng.standard_normal(p.shape) * 10.0 ** rng.integers(-3, 3) for p in model.parameters()]
        for p, grad in zip(model.parameters(), grads):
            p.grad = to_tensor(grad)
        model.update(optimiser)
        kept, (matrix, vector) = 1 - t**-0.8, [grad**2 + 1e-30 for grad in grads]
        rows = kept * rows + (1 - kept) * matrix.sum(axis=1)
        columns = kept * columns + (1 - kept) * matrix.sum(axis=0)
        second = kept * second + (1 - kept) * vector
        for i, moment in enumerate([np.outer(rows, columns) / rows.sum(), second]):
            change = grads[i] / np.sqrt(moment)
            rate = 0.1 * (max(1e-3, np.sqrt(np.mean(expected[i] ** 2))) if relative_step else 1)
            expected[i] *= 1 - 0.1 * 0.2 if i == 0 else 1
            expected[i] -= rate * change / max(1, np.sqrt(np.mean(change**2)) / 0.9)
        for p, array in zip(model.parameters(), expected):
            np.testing.assert_allclose(p.array, array, rtol=1e-4, atol=1e-6)


def test_adafactor_state_is_factored() -> None:
    parameter, optimiser = Parameter(np.ones((3, 4, 5))), Adafactor()
    assert {name: array.shape for name, array in optimiser.state_of(parameter)[1].items()} == {
        "rows": (3, 4),
        "columns": (3, 5),
    }
    with pytest.raises(ValueError, match=r"^Adafactor: .*got \(3, 4, 5\)"):
        optimiser.set_state(parameter, 1, {"rows": parameter.array, "columns": parameter.array})


@each_optimiser
def test_a_parameter_without_axes_is_updated(make: Callable[..., Optimiser]) -> None:
    parameter, optimiser = Parameter(2.0), make(0.1)
    for _ in range(2):
        parameter.grad = to_tensor(1.0)
        optimiser.update([("scale", parameter)])
    assert parameter.shape == () and parameter.item() < 2


@each_optimiser
def test_state_of_16_bit_parameters_is_float32(make: Callable[..., Optimiser], rng: np.random.Generator) -> None:
    """The squares of these gradients are 0 in float16."""
    grads, results = rng.standard_normal((5, 4, 4)).astype(np.float16) * np.float16(1e-4), []
    for dtype in (np.float16, np.float64):
        parameter, optimiser = to_tensor(np.ones((4, 4)), dtype=dtype), make(0.05)
        for grad in grads:
            parameter.grad = to_tensor(grad, dtype=dtype)
            optimiser.update([("matrix", parameter)])
        assert parameter.dtype == dtype
        assert all(array.dtype != np.float16 for array in optimiser.state_of(parameter)[1].values())
        results.append(parameter.array)
    np.testing.assert_allclose(*results, 0, 0.05)


@pytest.mark.parametrize("name", OPTIMISERS_BY_NAME)
def test_optimizer_table_gives_state_size_and_config_fields(name: str) -> None:
    row, config = OPTIMISERS_BY_NAME[name], DebugConfig(optimiser=name, beta1=0.5, beta2=0.75, weight_decay=0.25)
    optimiser = new_optimiser(config)
    assert type(optimiser) is row.kind and optimiser.weight_decay == 0.25
    matrix = Parameter(np.ones((64, 64)), "matrix")
    n_numbers = sum(array.size for array in optimiser.state_of(matrix)[1].values())
    assert row.n_state_arrays * matrix.size <= n_numbers < (row.n_state_arrays + 0.1) * matrix.size
    rule = optimiser.rule_of(Parameter(np.ones(3), "gain"))
    assert getattr(rule, "betas", (0.5, 0.75)) == (0.5, 0.75)


@each_optimiser
def test_updates_are_in_place_keep_the_dtype_and_need_a_learning_rate(make: Callable) -> None:
    model = Weights()
    array = model.matrix.array
    for rate, changed in ((0.0, False), (np.float64(0.1), True)):
        model.receive(1.0, 1.0).update(make(rate, weight_decay=0.1))
        assert model.matrix.array is array and array.dtype == np.float32
        assert np.array_equal(array, Weights().matrix.array) != changed


@each_optimiser
def test_strided_parameter_is_updated_like_a_contiguous_one(make: Callable) -> None:
    plain, strided = Weights(), Weights()
    strided.matrix.array = np.asfortranarray(strided.matrix.array)
    optimisers = make(0.1, weight_decay=0.1), make(0.1, weight_decay=0.1)
    for _ in range(3):
        for model, optimiser in zip((plain, strided), optimisers):
            model.matrix.grad = to_tensor([[1.0, 2.0], [3.0, 4.0]])
            model.update(optimiser)
    np.testing.assert_allclose(strided.matrix.array, plain.matrix.array, rtol=1e-6)


# -------------------------------------------------------------------- steps and schedules
@each_optimiser
def test_update_with_and_without_step_argument(make: Callable) -> None:
    with_step, without = Weights(), Weights()
    first, second = make(lambda step: 0.1 * step), make(lambda step: 0.1 * step)
    for n in range(1, 4):
        first.step()
        assert first.n_steps == n and first.learning_rate == pytest.approx(0.1 * n)
        with_step.receive(1.0, 2.0).update(first)
        without.receive(1.0, 2.0).update(second)
        assert first.n_steps == second.n_steps == n
        assert first.learning_rate == second.learning_rate
    assert np.array_equal(with_step.matrix.array, without.matrix.array)
    assert np.array_equal(with_step.vector.array, without.vector.array)


def test_schedule_sets_the_rate_of_every_step() -> None:
    schedule = WarmupCosine(1.0, 0.1, 2, 4)
    optimiser, model = StochasticGradientDescent(schedule), Weights()
    assert optimiser.learning_rate == 0.5  # of the first step, readable before it
    rates = []
    for _ in range(5):
        before = model.vector.array.copy()
        model.receive(0.0, 1.0).update(optimiser)
        rates.append(float((before - model.vector.array)[0]))
    assert rates == pytest.approx([schedule(n) for n in range(1, 6)], rel=1e-5)


def test_assigned_learning_rate_persists() -> None:
    optimiser, model = StochasticGradientDescent(0.5), Weights()
    optimiser.learning_rate = 0.25
    model.receive(1.0).update(optimiser)
    np.testing.assert_allclose(model.matrix.array, Weights().matrix.array - 0.25)


# -------------------------------------------------------------------- weight decay
@pytest.mark.parametrize("options, axes", [({}, 2), ({"decays": lambda p: p.ndim == 1}, 1)], ids=["default", "own"])
@each_optimiser
def test_weight_decay_applies_only_to_decayed_parameters(make: Callable, options: dict, axes: int) -> None:
    model = Weights().receive(0.0, 0.0)
    model.update(make(0.5, weight_decay=0.2, **options))
    for parameter, before in zip(model.parameters(), Weights().parameters()):
        factor = 0.9 if parameter.ndim == axes else 1
        np.testing.assert_allclose(parameter.array, factor * before.array, rtol=1e-6)


# -------------------------------------------------------------------- parameter roles
def test_parameter_roles_of_a_gpt() -> None:
    changes: dict[str, Any] = {"tied": False, "n_layers": 1, "softmax": "blocks"}
    roles = {name: role_of(p) for name, p in GPT(DebugConfig(**changes)).named_parameters()}
    assert roles["token_embedding.weights"] == "embedding"
    assert roles["position_embedding.weights"] == "position"
    assert roles["head.weights"] == "head"
    assert roles["blocks.0.attention.softmax_scales"] == "scale"
    assert roles["norm.gain"] == "gain"
    assert roles["norm.bias"] == roles["blocks.0.mlp.up.bias"] == "bias"
    assert roles["blocks.0.mlp.up.weights"] == roles["blocks.0.attention.qkv.weights"] == "matrix"


ROLE_RULES: dict[str, tuple[Any, bool, bool]] = {  # parameter, decays, is a hidden matrix
    **{
        role: (Parameter(np.ones((2, 2)), role), role in ("matrix", "embedding", "head", "router"), role == "matrix")
        for role in ROLES
    },
    "pooling query": (AttentionPooling(4).query, True, False),
    "matrix without role": (Weights().matrix, True, True),
    "vector without role": (Weights().vector, False, False),
}


@pytest.mark.parametrize("name", ROLE_RULES)
def test_roles_determine_decay_and_muon(name: str) -> None:
    parameter, is_decayed, is_hidden = ROLE_RULES[name]
    assert (decays(parameter), is_hidden_matrix(parameter)) == (is_decayed, is_hidden)


@each_copy
@pytest.mark.parametrize("role", [None, *ROLES])
def test_copies_keep_the_role(duplicate: Callable, role: str | None) -> None:
    parameter = Parameter(np.ones((2, 1)), role)
    parameter.requires_grad = False
    twin = duplicate(parameter)
    assert type(twin) is Parameter and twin.role == role and not twin.requires_grad
    assert str(twin) == str(to_tensor(np.ones((2, 1))))
    np.testing.assert_array_equal(twin.array, parameter.array)


def test_unknown_role_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"^Parameter: .*role.*matrix, .*'weights'"):
        Parameter([1.0], "weights")


# -------------------------------------------------------------------- user-defined rules, and factors
class Trace(Rule):
    """Behave like a rule that a user writes: one state array, no code for devices or factors."""

    state_names = ("sum",)

    def update(self, weights: Any, grad: Any, state: State, step: Step) -> None:
        state["sum"] += grad
        weights *= step.decay_factor
        weights -= step.learning_rate / step.number * state["sum"]


def test_user_defined_rule_updates_parameters() -> None:
    model, optimiser = Weights(), Optimiser(0.5, Trace(), weight_decay=0.1)
    model.receive(1.0, 2.0).update(optimiser)
    model.receive(3.0, 4.0).update(optimiser)
    once = Weights().matrix.array * 0.95 - 0.5
    np.testing.assert_allclose(model.matrix.array, once * 0.95 - 0.25 * 4, rtol=1e-6)
    np.testing.assert_allclose(model.vector.array, Weights().vector.array - 0.5 * 2 - 0.25 * 6, rtol=1e-6)


def test_rules_are_chosen_by_predicate() -> None:
    optimiser = Optimiser(0.5, [(is_hidden_matrix, Trace()), (any_parameter, AdamWRule())])
    matrix, vector = Weights().parameters()
    assert list(optimiser.state_of(matrix)[1]) == ["sum"]
    assert list(optimiser.state_of(vector)[1]) == ["first", "second"]


def test_muon_state_is_one_moment_per_matrix() -> None:
    optimiser = Muon()
    matrix, vector = Weights().parameters()
    assert list(optimiser.state_of(matrix)[1]) == ["first"]
    assert list(optimiser.state_of(vector)[1]) == ["first", "second"]
    both = {"first": np.ones((2, 2)), "second": np.zeros((2, 2))}
    optimiser.set_state(matrix, 3, both)
    assert list(optimiser.state_of(matrix)[1]) == ["first"]


WITH_A_FACTOR: dict[str, Callable[..., Optimiser]] = {**OPTIMISERS, "own": lambda rate: Optimiser(rate, Trace())}
each_with_a_factor = pytest.mark.parametrize("make", WITH_A_FACTOR.values(), ids=WITH_A_FACTOR)


@pytest.mark.parametrize("kind", [float, np.array, np.float32], ids=["number", "array", "scalar"])
@each_with_a_factor
def test_factor_multiplies_the_gradients(make: Callable, kind: Callable, rng: np.random.Generator) -> None:
    models = [Weights(), Weights()]
    optimisers = [make(0.1), make(0.1)]
    for scale in (0.5, 1.0, 0.25):
        for model, optimiser, with_factor in zip(models, optimisers, (True, False)):
            model.receive(*([3.0, -1.0] if with_factor else [3.0 * scale, -scale]))
            optimiser.update(model.named_parameters(), kind(scale) if with_factor else None)
    for actual, expected in zip(models[0].parameters(), models[1].parameters()):
        assert actual.dtype == np.float32
        np.testing.assert_allclose(actual.array, expected.array, rtol=1e-6)


@pytest.mark.parametrize("factor", [0.0, -1.0, math.nan, np.array(0.0), np.array(math.nan)])
@each_with_a_factor
def test_non_positive_factor_changes_nothing(make: Callable, factor: Any) -> None:
    model, optimiser = Weights(), make(0.1)
    model.receive(1.0, 1.0).update(optimiser)
    weights = [p.array.copy() for p in model.parameters()]
    memories = [copy.deepcopy(optimiser.state_of(p)) for p in model.parameters()]
    model.receive(math.nan, 1.0)
    optimiser.update(model.named_parameters(), factor)
    for parameter, before, (n_updates, state) in zip(model.parameters(), weights, memories):
        assert parameter.array.tobytes() == before.tobytes()
        assert optimiser.state_of(parameter)[0] == n_updates == 1
        assert all(array.tobytes() == state[name].tobytes() for name, array in optimiser.state_of(parameter)[1].items())


# -------------------------------------------------------------------- unchanged parameters
@each_optimiser
def test_parameter_without_gradient_is_unchanged(make: Callable) -> None:
    model, optimiser = Weights(), make(0.1, weight_decay=0.1)
    model.receive(1.0).update(optimiser)  # none for the vector
    assert np.array_equal(model.vector.array, Weights().vector.array)
    assert optimiser.state_of(model.matrix)[0] == 1 and optimiser.state_of(model.vector)[0] == 0
    # its own count of updates starts when its first gradient comes
    late, fresh = model.receive(1.0, 1.0), Weights().receive(1.0, 1.0)
    late.update(optimiser)
    fresh.update(make(0.1, weight_decay=0.1))
    assert np.array_equal(late.vector.array, fresh.vector.array)


@each_optimiser
def test_frozen_parameter_is_unchanged(make: Callable) -> None:
    model, optimiser = Weights().receive(1.0, 1.0), make(0.1, weight_decay=0.1)
    model.matrix.requires_grad = False  # frozen after its gradient came
    model.update(optimiser)
    assert model.matrix.array.tobytes() == Weights().matrix.array.tobytes()
    assert model.matrix.grad is None
    assert not np.array_equal(model.vector.array, Weights().vector.array)


# -------------------------------------------------------------------- optimizer state
@each_optimiser
def test_restored_optimizer_state_continues_bit_exactly(make: Callable, rng: np.random.Generator) -> None:
    grads = rng.standard_normal(8)
    model, optimiser = Weights(), make(0.1)
    for grad in grads[:4]:
        model.receive(grad, -grad).update(optimiser)

    other, resumed = Weights(), make(0.1)
    other.load_state_dict(model.state_dict())
    for parameter, restored in zip(model.parameters(), other.parameters()):
        n_updates, moments = optimiser.state_of(parameter)
        resumed.set_state(restored, n_updates, {name: moment.copy() for name, moment in moments.items()})
    for grad in grads[4:]:
        model.receive(grad, -grad).update(optimiser)
        other.receive(grad, -grad).update(resumed)
    assert other.matrix.array.tobytes() == model.matrix.array.tobytes()
    assert other.vector.array.tobytes() == model.vector.array.tobytes()


@each_copy
@each_optimiser
def test_copied_model_and_optimizer_continue_bit_exactly(make: Callable, duplicate: Callable) -> None:
    model, optimiser = Weights(), make(0.1)
    for grad in (1.0, -2.0):
        model.receive(grad, grad).update(optimiser)
    twin, twin_optimiser = duplicate((model, optimiser))
    for weights, memory in ((model, optimiser), (twin, twin_optimiser)):
        weights.receive(0.5, 0.5).update(memory)
    assert twin.matrix.array.tobytes() == model.matrix.array.tobytes()
    assert twin_optimiser.state_of(twin.matrix)[0] == 3


def test_parameters_of_equal_shape_have_separate_state() -> None:
    model = Sequential(Dense(2, 2, bias=False), Dense(2, 2, bias=False))
    first, second = model.parameters()
    optimiser = AdamW(0.1)
    first.grad, second.grad = to_tensor(np.ones((2, 2))), to_tensor(np.full((2, 2), -3.0))
    model.update(optimiser)
    assert optimiser.state_of(first)[1]["first"][0, 0] == pytest.approx(0.1)
    assert optimiser.state_of(second)[1]["first"][0, 0] == pytest.approx(-0.3)


@pytest.mark.parametrize(
    "moments, message",
    [
        ({}, "first.*got none"),
        ({"first": np.zeros((2, 2))}, "second.*got none"),
        ({"first": np.zeros(2), "second": np.zeros((2, 2))}, r"first.*\(2, 2\).*got \(2,\)"),
    ],
)
def test_mismatched_optimizer_state_is_rejected(moments: dict, message: str) -> None:
    model, optimiser = Weights(), AdamW(0.1)
    with pytest.raises(ValueError, match=f"AdamW: .*{message}"):
        optimiser.set_state(model.matrix, 3, moments)
    assert optimiser.state_of(model.matrix)[0] == 0


# -------------------------------------------------------------------- clipping
def test_gradient_norm_is_global() -> None:
    model = Weights().receive(2.0, 3.0)
    assert gradient_norm(model) == pytest.approx(math.sqrt(4 * 4 + 2 * 9))
    model.vector.grad = None
    assert gradient_norm(model) == pytest.approx(4.0)
    assert gradient_norm(Sequential(model, model)) == pytest.approx(4.0)  # a shared parameter counts once
    assert gradient_norm(Weights()) == 0.0


@pytest.fixture
def twins(rng: np.random.Generator) -> list[Layer]:
    """Return two equal layers with gradients and enough weights for several threads."""
    sizes = [(600, 500), (3, 700), (400, 400), (50, 60)]
    pair = [Sequential(*(Dense(*shape, generator=0) for shape in sizes)) for _ in range(2)]
    for parameters in zip(*(layer.parameters() for layer in pair), strict=True):
        grad = rng.standard_normal(parameters[0].shape, dtype=np.float32)
        for parameter in parameters:
            parameter.grad = to_tensor(grad.copy())
    return pair


@each_optimiser
def test_parallel_updates_are_bit_identical(
    make: Callable, twins: list[Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare with sequential updates, whichever parameters are updated by all threads."""
    monkeypatch.setattr(cpu_optimisers, "LARGE", 200_000)
    parallel_model, sequential_model = twins
    n_shared: list[int] = []
    parallel = threads.parallel_for

    def record_parallel(work: Callable[[Any], None], items: Any, calls_blas: bool = True) -> None:
        if work.__qualname__.startswith("run_independent."):
            n_shared.append(len(items))
        parallel(work, items, calls_blas)

    monkeypatch.setattr(threads, "parallel_for", record_parallel)
    norm = gradient_norm(parallel_model)
    parallel_model.update(make(0.1, weight_decay=0.1))
    assert n_shared == [7, 8 if make is Muon else 7]  # all but the first matrix, unless it keeps one thread busy anyway
    monkeypatch.setattr(cpu_optimisers, "SMALL", math.inf)
    assert gradient_norm(sequential_model) == norm
    sequential_model.update(make(0.1, weight_decay=0.1))
    assert len(n_shared) == 2
    for actual, expected in zip(parallel_model.parameters(), sequential_model.parameters(), strict=True):
        np.testing.assert_array_equal(actual.array, expected.array)


def test_rule_without_thread_safe_flag_runs_in_one_thread(twins: list[Layer], monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(Rule):
        def update(self, weights: np.ndarray, grad: np.ndarray, state: State, step: Step) -> None:
            callers.append(threading.current_thread())

    callers: list[threading.Thread] = []
    monkeypatch.setattr(threads, "parallel_for", None)
    twins[0].update(Optimiser(0.1, Counting()))
    assert callers == [threading.current_thread()] * 8


@pytest.mark.parametrize("kind", [float, np.float64, np.float32])
def test_large_gradients_are_scaled_to_the_limit(kind: Callable) -> None:
    model = Weights().receive(30.0, -40.0)
    grads = [p.grad.array.copy() for p in model.parameters()]
    norm = clip_gradients(model, kind(1.5))
    assert norm == pytest.approx(math.sqrt(4 * 900 + 2 * 1600))
    assert gradient_norm(model) == pytest.approx(1.5, rel=1e-5)
    for parameter, before in zip(model.parameters(), grads, strict=True):
        np.testing.assert_allclose(parameter.grad.array, before * (1.5 / norm), rtol=1e-6)


@pytest.mark.parametrize("limit", [10.0, math.inf])
def test_small_gradients_are_not_clipped(limit: float) -> None:
    model = Weights().receive(1.0, 2.0)
    assert clip_gradients(model, limit) == pytest.approx(math.sqrt(12))
    assert (model.matrix.grad.array == 1).all() and (model.vector.grad.array == 2).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_clipping_returns_the_non_finite_norm(bad: float) -> None:
    model = Weights().receive(1.0, bad)
    assert not math.isfinite(clip_gradients(model, 1.0))
    assert (model.matrix.grad.array == 1).all()


# -------------------------------------------------------------------- bad input
SGD = StochasticGradientDescent
BAD = {
    "growing beta2": (lambda: Adafactor(beta2_decay=0.8), "Adafactor: .*beta2_decay.*got 0.8"),
    "adafactor eps 0": (lambda: Adafactor(eps=(0, 1e-3)), r"Adafactor: .*eps.*got \(0, 0.001\)"),
    "threshold 0": (lambda: Adafactor(clip_threshold=0), "Adafactor: .*clip_threshold.*got 0"),
    "negative rate": (lambda: SGD(-0.1), "StochasticGradientDescent: .*learning_rate.*got -0.1"),
    "infinite rate": (lambda: AdamW(math.inf), "AdamW: .*learning_rate.*got inf"),
    "parameters as rate": (lambda: AdamW(Weights().parameters()), "AdamW: .*learning_rate.*got <generator"),
    "model as rate": (lambda: AdamW(Weights()), "AdamW: .*learning_rate.*got Weights"),
    "rate nan": (lambda: AdamW(math.nan), "AdamW: .*learning_rate.*got nan"),
    "negative decay": (lambda: AdamW(weight_decay=-1), "AdamW: .*weight_decay.*got -1"),
    "decay nan": (lambda: SGD(0.1, weight_decay=math.nan), "StochasticGradientDescent: .*weight_decay.*got nan"),
    "momentum 1": (lambda: SGD(0.1, momentum=1), "StochasticGradientDescent: .*momentum.*got 1"),
    "negative momentum": (lambda: SGD(0.1, momentum=-0.5), "StochasticGradientDescent: .*momentum.*got -0.5"),
    "beta 1": (lambda: AdamW(betas=(0.9, 1.0)), r"AdamW: .*betas.*got \(0.9, 1.0\)"),
    "negative beta": (lambda: AdamW(betas=(-0.1, 0.9)), r"AdamW: .*betas.*got \(-0.1, 0.9\)"),
    "one beta": (lambda: AdamW(betas=(0.9,)), r"AdamW: .*betas.*got \(0.9,\)"),
    "a number for betas": (lambda: AdamW(betas=0.9), "AdamW: .*betas.*got 0.9"),
    "muon's momentum 1": (lambda: Muon(momentum=1.0), "Muon: .*momentum"),
    "negative matrix rate": (lambda: Muon(matrix_rate=-1), "Muon: .*matrix_rate"),
    "eps 0": (lambda: AdamW(eps=0), "AdamW: .*eps.*got 0"),
    "clip at 0": (lambda: clip_gradients(Weights(), 0), "clip_gradients: .*max_norm.*got 0"),
    "clip below 0": (lambda: clip_gradients(Weights(), -1.0), "clip_gradients: .*max_norm.*got -1.0"),
    "clip at nan": (lambda: clip_gradients(Weights(), math.nan), "clip_gradients: .*max_norm.*got nan"),
}


test_bad_input = bad_input(BAD)


def test_rule_without_update_raises() -> None:
    with pytest.raises(NotImplementedError, match=r"Rule.*update"):
        Weights().receive(1.0).update(Optimiser(0.1, Rule()))


@pytest.mark.parametrize("rules", [None, [], SGD, [AdamWRule()], [("all", AdamWRule())], [(any_parameter, AdamW())]])
def test_bad_rules_are_rejected(rules: Any) -> None:
    with pytest.raises(TypeError, match=r"^Optimiser: .*Rule"):
        Optimiser(0.1, rules)


def test_parameter_without_a_rule_raises() -> None:
    optimiser = Optimiser(0.1, [(is_hidden_matrix, AdamWRule())])
    with pytest.raises(ValueError, match=r"^Optimiser: .*vector.*\(2,\)"):
        Weights().receive(1.0, 1.0).update(optimiser)


# -------------------------------------------------------------------- Muon
def one_matrix(shape: tuple[int, int], rng: np.random.Generator) -> tuple[Layer, np.ndarray, np.ndarray]:
    """Return a layer with one matrix that has a gradient, the matrix, and the gradient."""
    layer, grad = Dense(*shape, bias=False, generator=0), rng.standard_normal(shape).astype(np.float32)
    layer.weights.grad = to_tensor(grad)
    return layer, layer.weights.array.copy(), grad


@pytest.mark.parametrize(
    "n_rows, n_columns, n_blocks", [(8, 8, 1), (8, 12, 1), (12, 8, 1), (5, 13, 1), (4, 12, 3), (12, 4, 3)]
)
def test_muon_update_is_nearly_orthogonal(n_rows: int, n_columns: int, n_blocks: int, rng) -> None:
    """Long matrices are split into square blocks."""
    layer, before, grad = one_matrix((n_rows, n_columns), rng)
    layer.update(Muon(0.01, weight_decay=0, matrix_rate=2.0))
    axis = int(n_columns > n_rows)
    moved = (before - layer.weights.array) / (0.02 * math.sqrt(max(1, n_columns / n_rows) / n_blocks))
    for part, grads in zip(np.split(moved, n_blocks, axis), np.split(grad, n_blocks, axis)):
        u, _, v = np.linalg.svd(grads, full_matrices=False)
        # five steps of the iteration bring singular values to within a fifth of 1, not to 1
        np.testing.assert_allclose(np.linalg.svd(part)[1], 1, atol=0.2)
        assert np.vdot(part, u @ v) / (np.linalg.norm(part) * np.linalg.norm(u @ v)) > 0.99


def test_muon_uses_nesterov_momentum(rng: np.random.Generator) -> None:
    layer, _, grad = one_matrix((6, 6), rng)
    other = rng.standard_normal((6, 6)).astype(np.float32)
    optimiser = Muon(0.1, weight_decay=0.5, matrix_rate=1.0, momentum=0.8)
    layer.update(optimiser)
    between = layer.weights.array.copy()
    layer.weights.grad = to_tensor(other)
    layer.update(optimiser)
    mean = 0.2 * 0.8 * grad + 0.2 * other
    np.testing.assert_allclose(optimiser.state_of(layer.weights)[1]["first"], mean, 1e-5, 1e-6)
    moved = between * (1 - 0.1 * 0.5) - layer.weights.array
    expected = muon.orthogonalize.reference((0.2 * other + 0.8 * mean)[None])[0] * 0.1
    np.testing.assert_allclose(moved, expected, 1e-3, 1e-5)


def test_muon_updates_other_parameters_with_adamw() -> None:
    twins = [Weights().receive(2.0, -4.0) for _ in range(2)]
    twins[0].update(Muon(0.1, uses_muon=lambda parameter: False))
    twins[1].update(AdamW(0.1))
    for actual, expected in zip(twins[0].parameters(), twins[1].parameters()):
        np.testing.assert_array_equal(actual.array, expected.array)
