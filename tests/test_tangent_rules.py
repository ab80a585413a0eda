"""Forward-mode rules: products with Hessians by fused tangents equal those of the unfused forms, in all cases."""

import numpy as np
import pytest
from op_properties import Sample, with_parameters
from test_differentiable_rules import objective, random_like

from tricycle import create_graph, tangent_rules
from tricycle.activation import GeLU
from tricycle.activation_checkpointing import enable_grad
from tricycle.attention import Attention
from tricycle.create_graph import TANGENTS
from tricycle.functions import Softmax1, linear
from tricycle.gradcheck import gradcheck
from tricycle.layers import Embedding, LayerNorm, RMSNorm
from tricycle.loss import CrossEntropy
from tricycle.ops import split_heads
from tricycle.tensor import Tensor
from tricycle.transforms import grad, hvp, jvp

RULES = dict(TANGENTS)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape)


QKV = normal(2, 6, 4, 3), normal(2, 6, 2, 3), normal(2, 6, 2, 5)
EARLIER = normal(1, 2, 2, 3), normal(1, 5, 2, 3), normal(1, 5, 2, 3)  # queries after three cached keys
LOSS = CrossEntropy(ignore_index=2, label_smoothing=0.1)
FUSED = {
    "linear": Sample(linear, (normal(2, 3, 4), normal(4, 5), normal(5)), None),
    "transposed linear": Sample(lambda x, w: linear(x, w, transposed=True), (normal(3, 4), normal(5, 4)), None),
    "embedding": Sample(
        lambda w: with_parameters(Embedding(5, 3), "weights")(np.array([[1, 4, 1]]), w), (normal(5, 3),), None
    ),
    "heads": Sample(lambda x: split_heads(x, (2, 1), 2)[1] ** 2, (normal(1, 3, 6),), None),
    "GELU": Sample(GeLU(), (4 * normal(3, 7),), None),
    "GELU of a number": Sample(GeLU(), (normal(),), None),
    "layer norm": Sample(with_parameters(LayerNorm(4), "gain", "bias"), (normal(2, 3, 4), normal(4), normal(4)), None),
    "RMS norm": Sample(with_parameters(RMSNorm(4), "gain"), (normal(3, 4), normal(4)), None),
    "RMS norm with offset": Sample(
        with_parameters(RMSNorm(4, unit_offset=True), "gain"), (normal(3, 4), normal(4)), None
    ),
    "norm without gain": Sample(RMSNorm(4, gain=False), (normal(3, 4),), None),
    "cross-entropy": Sample(lambda x: LOSS(Tensor(np.array([0, 2, 3]), False), x) ** 2, (normal(3, 4),), None),
    "attention": Sample(Attention(), QKV, None),
    "all keys": Sample(Attention(causal=False), QKV, None),
    "softmax1, window": Sample(Attention(Softmax1(), window=2, scale=0.7), QKV, None),
    "attention to a cache": Sample(Attention(), EARLIER, None),
    "soft-capping": Sample(Attention(softcap=2.0), QKV, None),
}


def along(sample: Sample):
    """The inputs, a direction for each, and the function whose Hessian is multiplied.

    The inputs require no gradient: otherwise the second backward pass is one with a graph, of the unfused forms.
    """
    inputs = [x.detach() for x in sample.tensors()]
    return inputs, random_like(inputs), lambda *xs: objective(sample, list(xs))


@pytest.mark.parametrize("scores", [4, 2**17])
@pytest.mark.parametrize("sample", FUSED.values(), ids=FUSED)
def test_hessian_vector_products_equal_those_of_transposed_rules(sample, scores, monkeypatch):
    monkeypatch.setattr(tangent_rules, "MAX_BLOCK_SCORES", scores)
    monkeypatch.setattr(tangent_rules, "CHUNK_SIZE", scores)
    inputs, directions, f = along(sample)
    found = hvp(f, inputs, directions)
    monkeypatch.setattr(create_graph, "TANGENTS", {})
    for actual, expected in zip(found, hvp(f, inputs, directions), strict=True):
        np.testing.assert_allclose(actual.array, expected.array, 1e-9, 1e-10)


@pytest.mark.parametrize("sample", FUSED.values(), ids=FUSED)
def test_tangents_of_single_args(sample):
    """One arg has a tangent, and the others none: forward mode equals reverse mode."""
    inputs, directions, f = along(sample)
    for i, (x, direction) in enumerate(zip(inputs, directions)):
        g = lambda x, i=i: f(*inputs[:i], x, *inputs[i + 1 :])
        expected = (grad(g)(x).array * direction.array).sum()
        assert jvp(g, (x,), (direction,))[1].item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", ["GELU", "layer norm", "cross-entropy", "softmax1, window"])
def test_third_derivatives_of_fused_tangents(name):
    _, directions, f = along(FUSED[name])

    def product(*xs: Tensor) -> Tensor:
        with enable_grad():
            return hvp(f, xs, directions)[0]

    gradcheck(product, *FUSED[name].tensors(), n_directions=1, elementwise_up_to=0, rtol=1e-4, atol=1e-4)


def test_infinite_logits_of_ignored_labels_have_no_tangent():
    logits = Tensor(np.array([[0.0, 1.0], [np.inf, 0.0]]), False)
    loss = lambda x: CrossEntropy(ignore_index=1)(Tensor(np.array([0, 1]), False), x)
    with np.errstate(invalid="ignore"):
        (product,) = hvp(loss, (logits,), (np.array([[1.0, 0.0], [0.0, 0.0]]),))
    p = 1 / (1 + np.e)
    np.testing.assert_allclose(product.array, [[p * (1 - p), -p * (1 - p)], [0, 0]], 1e-10)


def test_every_rule_of_forward_mode_runs_here(monkeypatch):
    called = set()
    watched = lambda name, rule: lambda *args: called.add(name) or rule(*args)
    monkeypatch.setattr(create_graph, "TANGENTS", {name: watched(name, rule) for name, rule in RULES.items()})
    for sample in FUSED.values():
        inputs, directions, f = along(sample)
        hvp(f, inputs, directions)
    assert called | {"tricycle.ops.getitem"} == set(RULES)
    assert set(RULES) <= set(create_graph.RULES)
