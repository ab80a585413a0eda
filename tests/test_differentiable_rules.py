"""Gradients of gradients of every op of the registry, against finite differences of its gradients."""

import ast
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from op_properties import BINARY, UNARY, Sample
from test_quantized_blocks import matrix_of
from test_registry import ALL, import_all_modules

import tricycle
from tricycle import differentiable_rules, extra_ops, tangent_rules
from tricycle.activation_checkpointing import enable_grad
from tricycle.attention import Attention
from tricycle.configs.model import ModelConfig
from tricycle.create_graph import RULES, WITHOUT_RULE, gradients, tangents
from tricycle.experts import MixtureOfExperts, Router, Routing, add_router_loss
from tricycle.finetuning.distillation import _soft_loss
from tricycle.finetuning.lora import AdaptedDense, LoRATarget, LowRankUpdate
from tricycle.functions import linear
from tricycle.gradcheck import gradcheck
from tricycle.kernels.quantized import QuantizedMatrix
from tricycle.layers import Dense, Dropout, Layer, RMSNorm
from tricycle.tensor import Tensor
from tricycle.transforms import grad, hvp, jvp


def at_a_kink(name: str, sample: Sample) -> bool:
    """Whether two operands of a maximum or minimum are equal, where the gradient jumps."""
    return (
        name.startswith(("maximum-", "minimum-")) and len(sample.inputs) == 2 and bool(np.any(np.equal(*sample.inputs)))
    )


DIFFERENTIABLE = {name: sample for name, sample in ALL.items() if not at_a_kink(name, sample)}


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape)


def objective(sample: Sample, tensors: list[Tensor]) -> Tensor:
    """A scalar whose gradient depends on the values of the output, so that its gradient does on all inputs."""
    output = sample.call(*tensors)
    weights = np.random.default_rng(1).standard_normal(output.shape)
    return (output * (output + output.xp.asarray(weights))).sum()


def joined_gradients(sample: Sample, tensors: list[Tensor]) -> Tensor:
    """The gradients of all inputs in one vector, with a graph."""
    with enable_grad():
        y = objective(sample, tensors)
        inputs = [x for x in tensors if x.requires_grad]
        grads = gradients([y], [Tensor(np.ones(()), False)], inputs)
    zeros = [Tensor(np.zeros(x.size), False) for x in inputs]
    return extra_ops.concatenate([z if g is None else g.reshape(-1) for g, z in zip(grads, zeros)])


@pytest.mark.nightly_except(3)
@pytest.mark.parametrize("sample", DIFFERENTIABLE.values(), ids=DIFFERENTIABLE)
def test_second_derivatives_match_finite_differences_of_first(sample):
    tensors = sample.tensors()
    first = joined_gradients(sample, tensors)
    objective(sample, tensors).backward()
    expected = [np.zeros(x.size) if x.grad is None else x.grad.array.ravel() for x in tensors if x.requires_grad]
    np.testing.assert_allclose(first.array, np.concatenate(expected), 1e-9, 1e-11)
    if first.size and first.requires_grad:
        options = {"n_directions": 1, "elementwise_up_to": 0, "rtol": 1e-4, "atol": 1e-4}
        gradcheck(lambda *xs: joined_gradients(sample, list(xs)), *sample.tensors(), **options)


# -------------------------------------------------------------------- forward mode
def random_like(tensors: list[Tensor]) -> list[Tensor]:
    rng = np.random.default_rng(2)
    return [Tensor(rng.standard_normal(x.shape), False) for x in tensors]


def check_forward_mode(call: Callable[..., Tensor], tensors: list[Tensor]) -> None:
    """Compare <w, J v> of forward mode with <J^T w, v> of reverse mode."""
    inputs = [x for x in tensors if x.requires_grad]
    directions = random_like(inputs)
    with enable_grad():
        output = call(*tensors)
        if not output.requires_grad:
            return
        (tangent,) = tangents([output], inputs, directions)
        (weights,) = random_like([output])
        grads = gradients([output], [weights], inputs)
    pairs = [(g, d) for g, d in zip(grads, directions) if g is not None]
    expected = sum((float((g.array * d.array).sum()) for g, d in pairs), 0.0)
    actual = 0.0 if tangent is None else float((weights.array * tangent.array).sum())
    scale = sum((float(np.abs(g.array * d.array).sum()) for g, d in pairs), 1.0)
    assert abs(actual - expected) <= 1e-9 * scale


@pytest.mark.nightly_except(8)
@pytest.mark.parametrize("sample", DIFFERENTIABLE.values(), ids=DIFFERENTIABLE)
def test_forward_mode_matches_reverse_mode(sample):
    check_forward_mode(sample.call, sample.tensors())
    check_forward_mode(lambda *xs: joined_gradients(sample, list(xs)), sample.tensors())


ELEMENTWISE_OPS = {*UNARY, *BINARY, "GeLU", "ExactGeLU", "softcap"}
ELEMENTWISE_SAMPLES = {name: s for name, s in DIFFERENTIABLE.items() if name.rsplit("-", 1)[0] in ELEMENTWISE_OPS}


@pytest.mark.nightly_except(12)
@pytest.mark.parametrize("sample", ELEMENTWISE_SAMPLES.values(), ids=ELEMENTWISE_SAMPLES)
def test_third_derivatives_of_elementwise_ops(sample):
    """Three nested directional derivatives equal finite differences of two, and those of reverse mode."""
    inputs = sample.tensors()
    directions = [
        Tensor(np.zeros(x.shape) if x.dtype.kind == "i" else d.array) for x, d in zip(inputs, random_like(inputs))
    ]
    along = lambda f: lambda t: grad(lambda s: f(s).sum())(t)
    line = lambda t: sample.call(*(x + t * d.array if x.requires_grad else x for x, d in zip(inputs, directions)))
    derivative = lambda f: lambda t: jvp(f, (t,), (1.0,))[1]
    second = derivative(derivative(line))
    third = derivative(second)(Tensor(np.zeros(()))).array
    values = [second(Tensor(np.array(eps))).array for eps in (1e-5, -1e-5)]
    expected = (values[0] - values[1]) / 2e-5
    np.testing.assert_allclose(third, expected, 1e-4, 1e-4 * max(1.0, np.abs(expected).max(initial=0)))
    by_reverse_mode = along(along(along(line)))(Tensor(np.zeros(())))
    np.testing.assert_allclose(third.sum(), by_reverse_mode.array, 1e-7, 1e-7 * max(1.0, np.abs(third).sum()))


# -------------------------------------------------------------------- outside of the registry
def cubes_of_parts(x: Tensor) -> Tensor:
    first, second = x.split(2, axis=1)
    return first * first * second


def in_float64(layer: Layer) -> Layer:
    for parameter in layer.parameters():
        parameter.array = parameter.array.astype(np.float64)
    return layer


def adapted(x: Tensor, down: Tensor, *others: Tensor, dora: bool = False) -> Tensor:
    """Apply a LoRA layer with two targets and these factors; with `dora`, `others` are magnitudes."""
    targets = [LoRATarget("q", 0, 3, 2, 0.5), LoRATarget("v", 5, 7, 1, 2.0)]
    update = LowRankUpdate(4, 7, targets, 0.0, np.random.default_rng(0))
    layer = AdaptedDense(in_float64(Dense(4, 7, generator=1)).freeze(), update)
    layer.low_rank.down, layer.low_rank.ups = down, [Tensor(normal(2, 3), False), Tensor(normal(1, 2), False)]
    setattr(layer.low_rank, "magnitudes" if dora else "ups", list(others))
    return layer(x)


EXPERTS = ModelConfig(embedding_dim=4, n_heads=1, n_experts=4, hidden_size=5, activation="tanh", router_loss=0.0)


def mixture(x: Tensor, *options) -> Tensor:
    return in_float64(MixtureOfExperts(EXPERTS, *options, generator=0))(x)


def quantized(x: Tensor, *bias: Tensor) -> Tensor:
    return linear(x, Tensor(QuantizedMatrix.quantize(normal(4, 3).astype(np.float32), "int8", True), False), *bias)


SIGMOID = Routing(2, sigmoid=True, n_groups=2, scale=1.5)
UNREGISTERED = {
    "LoRA": Sample(adapted, (normal(2, 3, 4), normal(4, 3), normal(2, 3), normal(1, 2)), None),
    "DoRA": Sample(
        lambda x, *ms: adapted(x, Tensor(normal(4, 3), False), *ms, dora=True),
        (normal(2, 3, 4), normal(3), normal(2)),
        None,
    ),
    "mixture of experts": Sample(mixture, (normal(5, 4),), None),
    "sigmoid router": Sample(lambda x: mixture(x, SIGMOID, 3), (normal(5, 4),), None),
    "router": Sample(lambda x: Router(4, 3, generator=0)(x), (normal(2, 4),), None),
    "int8 weights": Sample(quantized, (normal(2, 2, 4), normal(3)), None),
    "blocks of weights": Sample(
        lambda x: linear(x, Tensor(matrix_of("Q8_0", 32, 2, True), False)), (normal(1, 32),), None
    ),
    "distillation": Sample(lambda x: _soft_loss(x, normal(2, 3, 7) + 1, 2.5, 0.7), (normal(2, 3, 7),), None),
    "split": Sample(cubes_of_parts, (normal(3, 4),), None),
    "dropout": Sample(lambda x: Dropout(0.5, generator=0)(x), (normal(3, 4),), None),
    "transposed linear": Sample(lambda x, w: linear(x, w, transposed=True), (normal(2, 3), normal(4, 3)), None),
    "norm without gain": Sample(RMSNorm(4, gain=False), (normal(3, 4),), None),
    "norm with unit offset": Sample(RMSNorm(4, unit_offset=True), (normal(3, 4),), None),
}


@pytest.mark.parametrize("sample", UNREGISTERED.values(), ids=UNREGISTERED)
def test_second_derivatives_beside_the_registry(sample):
    gradcheck(lambda *xs: joined_gradients(sample, list(xs)), *sample.tensors())
    check_forward_mode(sample.call, sample.tensors())
    check_forward_mode(lambda *xs: joined_gradients(sample, list(xs)), sample.tensors())


def test_mixed_derivative_of_power_with_exponent_zero():
    slope = lambda y: grad(lambda x: x**y)(2.0)
    assert grad(slope)(0.0).item() == pytest.approx(0.5)  # d/dy of y x^(y - 1)


# -------------------------------------------------------------------- attention in linear memory
FUSED_ATTENTION = {n: s for n, s in DIFFERENTIABLE.items() if n.startswith("Attention-") and min(s.inputs[0].shape) > 0}


@pytest.mark.nightly_except(40)
@pytest.mark.parametrize("sample", FUSED_ATTENTION.values(), ids=FUSED_ATTENTION)
def test_attention_for_some_queries_at_a_time(sample, monkeypatch):
    whole = joined_gradients(sample, sample.tensors())
    monkeypatch.setattr(differentiable_rules, "MAX_SCORES", 1)
    np.testing.assert_allclose(joined_gradients(sample, sample.tensors()).array, whole.array, 1e-9, 1e-11)
    check_forward_mode(sample.call, sample.tensors())
    check_forward_mode(lambda *xs: joined_gradients(sample, list(xs)), sample.tensors())


def reverse_over_reverse(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return grad(lambda y: (grad(f)(y) * x).sum())(x)


@pytest.mark.parametrize("product", [reverse_over_reverse, lambda f, x: hvp(f, (x,), (x,))])
def test_second_derivatives_of_attention_take_linear_memory(product, monkeypatch):
    monkeypatch.setattr(differentiable_rules, "MAX_SCORES", 2**13)
    monkeypatch.setattr(tangent_rules, "MAX_BLOCK_SCORES", 2**13)
    x = Tensor(normal(1, 256, 1, 4), False)
    tracemalloc.start()
    product(lambda x: (Attention()(x, x, x) ** 2).sum(), x)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * 256 * 256 * 8  # bytes; without chunks it takes 17 matrices of scores


# -------------------------------------------------------------------- completeness
def recorders() -> Iterator[str]:
    """The names, as in RULES, of all functions of the package that record a node with a backward function."""
    folder = Path(tricycle.__file__).parent
    for path in folder.rglob("*.py"):
        module = ".".join(("tricycle", *path.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        outer: list[tuple[str, ast.AST]] = []
        for node in tree.body:
            parts = node.body if isinstance(node, ast.ClassDef) else [node]
            prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
            outer += [(f"{prefix}{part.name}", part) for part in parts if isinstance(part, ast.FunctionDef)]
        shared = {name for name, _ in outer}  # backward functions outside of the function that records
        for name, function in outer:
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "record":
                    backward = call.args[2]
                    if not (isinstance(backward, ast.Constant) and backward.value is None):
                        used = getattr(backward, "id", "")
                        yield f"{module}.{used if used in shared else name}"


def test_every_recorded_operation_has_a_rule_or_a_reason():
    import_all_modules()
    found = set(recorders())
    assert {"tricycle.ops.unary_op", "tricycle.linalg._backward", "tricycle.layers.Dropout.forward"} <= found
    assert found - set(RULES) == set(WITHOUT_RULE)
    assert not set(WITHOUT_RULE) & set(RULES)


def test_operation_without_rule_names_the_reason():
    layer = MixtureOfExperts(EXPERTS, generator=0)
    loss = add_router_loss(lambda: layer(normal(5, 4).astype(np.float32)).sum(), 0.1)
    with pytest.raises(NotImplementedError, match=r"add_router_loss.*set router_loss to 0"):
        loss.backward(create_graph=True)
