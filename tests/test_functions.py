"""Softmax variants at extreme values, linear maps, and accumulated gradients."""

from contextlib import nullcontext

import numpy as np
import pytest
from tables import bad_input

from tricycle import to_tensor
from tricycle.activation import GLU, GeLU, ReLU, SwiGLU, Swish
from tricycle.configs import ModelConfig
from tricycle.debug import use_reference
from tricycle.functions import LogSoftmax, RowSoftmax, Sigmoid, Softmax, Softmax1, Tanh, linear
from tricycle.kernels import ScoreOptions
from tricycle.kernels.row_attention import attention_scores
from tricycle.softmaxes import SOFTMAXES, AdaptiveSoftmax, BlockSoftmax, SinkSoftmax, new_softmax

INF = np.inf

EXTREMES = [
    # x, softmax, softmax1
    ([1e30, -1e30, 0], [1, 0, 0], [1, 0, 0]),
    ([1e30, 1e30], [0.5, 0.5], [0.5, 0.5]),
    ([-1e30, -1e30], [0.5, 0.5], [0, 0]),
    ([3e38, -3e38], [1, 0], [1, 0]),
    ([-INF, -INF], [0, 0], [0, 0]),
    ([-INF, 0], [0, 1], [0, 0.5]),
    ([-INF, -1e30], [0, 1], [0, 0]),
    ([100, 100], [0.5, 0.5], [0.5, 0.5]),
    ([0], [1], [0.5]),
    ([[0, 0], [-INF, -INF]], [[0.5, 0.5], [0, 0]], [[1 / 3, 1 / 3], [0, 0]]),
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("x", "softmax", "softmax1"), EXTREMES, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("plain", [False, True])
def test_softmax_of_extreme_rows(x, softmax, softmax1, dtype, plain):
    for op, expected in ((Softmax(), softmax), (Softmax1(), softmax1)):
        t = to_tensor(x, dtype=dtype)
        with use_reference() if plain else nullcontext():
            y = op(t)
        (y * np.arange(t.size).reshape(t.shape)).sum().backward()
        np.testing.assert_allclose(y.array, expected, 1e-6)
        assert y.dtype == dtype and np.isfinite(t.grad.array).all()


# -------------------------------------------------------------------- adaptive temperature
def test_adaptive_softmax_sharpens_only_flat_rows():
    flat, sharp = to_tensor([3, 2, 1, 0], dtype=float), to_tensor([9, 2, 1, 0], dtype=float)
    assert AdaptiveSoftmax()(flat).array.max() > Softmax()(flat).array.max() + 0.05
    np.testing.assert_array_equal(AdaptiveSoftmax()(sharp).array, Softmax()(sharp).array)
    constant = AdaptiveSoftmax([2.0], threshold=0.0)
    np.testing.assert_allclose(constant(flat).array, Softmax()(flat * 2).array, 1e-12)
    never_blurs = AdaptiveSoftmax([0.1], threshold=0.0)
    np.testing.assert_array_equal(never_blurs(flat).array, Softmax()(flat).array)


@pytest.mark.filterwarnings("error")
def test_adaptive_softmax_of_masked_keys():
    rows = np.array([[1.0, 0.5, -INF, 0.7], [-INF] * 4])
    x = to_tensor(rows, dtype=float)
    y = AdaptiveSoftmax()(x)
    (y * np.arange(4)).sum().backward()
    np.testing.assert_allclose(y.array[0, [0, 1, 3]], AdaptiveSoftmax()(to_tensor([1, 0.5, 0.7], dtype=float)).array)
    assert y.array[0, 2] == 0 and (y.array[1] == 0).all() and np.isfinite(x.grad.array).all()


def test_detached_temperature_is_constant_in_backward(rng):
    values = rng.standard_normal((3, 6))
    grads = []
    for op in (AdaptiveSoftmax(stop_gradient=True), AdaptiveSoftmax()):
        x = to_tensor(values, dtype=float)
        (op(x) * np.arange(6)).sum().backward()
        grads.append(x.grad.array)
    x, beta = to_tensor(values, dtype=float), AdaptiveSoftmax().inverse_temperature(values)[0]
    (Softmax()(x * beta) * np.arange(6)).sum().backward()
    assert (beta > 1).all()
    np.testing.assert_allclose(grads[0], x.grad.array, 1e-9)
    assert np.abs(grads[0] - grads[1]).max() > 1e-3


# -------------------------------------------------------------------- blocks
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("correction", ["none", "exact"])
def test_fully_masked_block_gives_zeros(correction):
    x = to_tensor([[-INF, -INF, 1, 1], [-INF] * 4], dtype=float)
    y = BlockSoftmax(2, correction)(x)
    y.backward()
    assert y.array.tolist() == [[0, 0, 0.5, 0.5], [0] * 4]
    assert np.isfinite(x.grad.array).all()


# -------------------------------------------------------------------- a learned sink
def test_sink_softmax_generalizes_softmax_and_softmax1(rng):
    x = to_tensor(rng.standard_normal((2, 3, 4, 5)), dtype=float)
    np.testing.assert_allclose(SinkSoftmax()(x).array, Softmax1()(x).array, rtol=1e-12)
    np.testing.assert_allclose(SinkSoftmax(-700.0)(x).array, Softmax()(x).array, rtol=1e-12)


@pytest.mark.filterwarnings("error")
def test_sink_softmax_of_extreme_scores(rng):
    x = to_tensor([[1e4, -1e4, -INF], [-INF] * 3, [-1e4] * 3], dtype=float)
    for sink in (-1e5, -1e4, 0.0, 1e5):
        sinks = to_tensor(sink, dtype=float)
        y = SinkSoftmax()(x, sinks)
        y.backward()
        assert np.isfinite(y.array).all() and np.isfinite(x.grad.array).all() and np.isfinite(sinks.grad.array)
        assert (y.array[1] == 0).all()
        x.zero_grad()
    q, k, v = (1e3 * rng.standard_normal((1, 3, 2, 4)) for _ in range(3))
    for sink in (-np.inf, -1e8, 1e8):
        out, backward = SinkSoftmax().attend(q, k, v, ScoreOptions(1.0, 0), None, np.array([sink, 0.0]))
        slopes = [np.full(q.shape, np.nan) for _ in range(3)]
        assert np.isfinite(backward(np.ones(out.shape), *slopes)).all() and np.isfinite(slopes).all()
        assert (out[:, :, 0] == 0).all() == (sink == 1e8)


def test_bad_sinks_are_rejected():
    with pytest.raises(ValueError, match=r"sinks.*\(3,\).*\(2,\)"):
        SinkSoftmax()(np.ones((3, 4, 5)), np.ones(2))
    with pytest.raises(ValueError, match=r"sinks.*\(2,\).*\(3,\)"):
        SinkSoftmax().attend(*[np.ones((1, 3, 2, 4))] * 3, ScoreOptions(1.0), None, np.ones(3))
    with pytest.raises(ValueError, match=r"finite.*-inf"):
        SinkSoftmax(-INF)


# -------------------------------------------------------------------- names
# offsets, windows and caps of 11 queries and 17 keys
SCORINGS = [ScoreOptions(0.5, *rest) for rest in ((), (6, None, 2.0), (6, 5), (12, 3, 2.0), (-4, 2))]
CORRECTIONS = ["exact", "none", "learned"]


@pytest.mark.parametrize("score_options", SCORINGS, ids=str)
@pytest.mark.parametrize(
    "softmax",
    [Softmax(), Softmax1(), AdaptiveSoftmax(), *(BlockSoftmax(3, c) for c in CORRECTIONS), SinkSoftmax(0.5)],
    ids=str,
)
def test_fused_attention_equals_row_softmax_attention(softmax, score_options, rng):
    """Values, and gradients along a direction; six query heads share two key heads, values have another size."""
    q, k, v = (rng.standard_normal(shape) for shape in ((2, 11, 6, 4), (2, 17, 2, 4), (2, 17, 2, 3)))
    mask = np.where(rng.random((2, 1, 11, 17)) < 0.2, -np.inf, 0)
    scales = rng.random((3, 40)) if softmax.name == "block_softmax" and softmax.correction == "learned" else None
    start = score_options.offset or 0
    if scales is not None and start < 0:
        pytest.skip("scales belong to positions from 0 on")
    parameters = () if scales is None else (scales,)

    def rows(q, k, v):
        scores = attention_scores(q, k, score_options, mask)
        weights = softmax.row_softmax(scores, *(scale[:, start : start + 11] for scale in parameters))
        return np.einsum("bhts,bshe->bthe", weights, v.repeat(3, axis=2))

    expected = rows(q, k, v)
    out, backward = softmax.attend(q, k, v, score_options, mask, *parameters)
    np.testing.assert_allclose(out, expected, 1e-9, 1e-12)
    grad, slopes = rng.standard_normal(out.shape), [np.full(array.shape, np.nan) for array in (q, k, v)]
    backward(grad, *slopes)
    directions = [1e-6 * rng.standard_normal(array.shape) for array in (q, k, v)]
    ahead = rows(*(array + direction for array, direction in zip((q, k, v), directions)))
    behind = rows(*(array - direction for array, direction in zip((q, k, v), directions)))
    change = sum((slope * direction).sum() for slope, direction in zip(slopes, directions))
    np.testing.assert_allclose(change, ((ahead - behind) * grad).sum() / 2, 1e-5, 1e-11)


def test_softmaxes_resolve_by_name():
    assert all(type(new_softmax(name)) is kind for name, kind in SOFTMAXES.items())
    assert new_softmax("blocks", ModelConfig(softmax_blocks=7)).n_blocks == 7
    softmax = Softmax1()
    assert new_softmax(softmax) is softmax


SCORES = to_tensor(np.ones((2, 6)))
REFUSED = {
    "an unknown name": (lambda: new_softmax("softmax2"), "softmax: .*softmax2"),
    "no block": (lambda: BlockSoftmax(0), "BlockSoftmax: .*n_blocks.*got 0"),
    "an unknown correction": (lambda: BlockSoftmax(2, "some"), "BlockSoftmax: .*correction.*some"),
    "missing scales": (lambda: BlockSoftmax(2)(SCORES), "BlockSoftmax.*scales.*got None"),
    "scales of another shape": (
        lambda: BlockSoftmax(2)(SCORES, to_tensor(np.ones((2, 3)))),
        r"BlockSoftmax.*scales.*here \(2, 2\).*got \(2, 3\)",
    ),
    "scales without use": (
        lambda: BlockSoftmax(2, "none")(SCORES, to_tensor(np.ones((2, 2)))),
        r"BlockSoftmax.*scales.*here None.*got \(2, 2\)",
    ),
    "coefficients": (lambda: AdaptiveSoftmax([np.nan]), r"AdaptiveSoftmax: .*coefficients.*\(nan,\)"),
}
test_refusals = bad_input(REFUSED)


def test_bad_softmax_is_rejected():
    with pytest.raises(TypeError, match="RowSoftmax, got 3"):
        new_softmax(3)
    with pytest.raises(NotImplementedError, match="RowSoftmax defines no row_softmax"):
        RowSoftmax()([1, 2])


def test_log_softmax_keeps_small_probabilities():
    y = LogSoftmax()(to_tensor([0, -1000, 1e30]))
    assert y.array.tolist() == np.float32([-1e30, -1e30, 0]).tolist()
    y = LogSoftmax()(to_tensor([0, -1000]))
    assert y.array.tolist() == [0, -1000]


@pytest.mark.parametrize("op", [Softmax(), Softmax1(), LogSoftmax()], ids=repr)
def test_row_functions_reject_scalars(op):
    with pytest.raises(ValueError, match=f"^{type(op).__name__}: .*axis"):
        op(to_tensor(1))


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (Softmax(), "softmax"),
        (Softmax1(), "softmax1"),
        (LogSoftmax(), "log_softmax"),
        (Sigmoid(), "sigmoid"),
        (Tanh(), "tanh"),
        (ReLU(), "> 0"),
        (GeLU(), "gelu"),
        (Swish(), "swish"),
        (GLU(), "glu"),
        (SwiGLU(), "swiglu"),
    ],
    ids=repr,
)
def test_functions_have_op_name_and_repr_and_accept_lists(op, name):
    result = op([1.0, 2.0])
    assert result.name == name and result.dtype == np.float32
    assert repr(op).startswith(f"{type(op).__name__}(")


@pytest.mark.parametrize(
    ("x", "weights", "bias", "message"),
    [
        ((2, 4), (3, 5), None, r"Linear\(from_size=3\): .*last axis.*\(2, 4\)"),
        ((), (3, 5), None, r"last axis.*shape \(\)"),
        ((2, 3), (3,), None, r"linear: .*weights.*bias.*got shapes \(3,\)"),
        ((2, 3), (3, 5), (4,), r"\(3, 5\) and \(4,\)"),
        ((2, 3), (3, 5), (1,), r"\(3, 5\) and \(1,\)"),
        ((2, 3), (3, 5), (), r"\(3, 5\) and \(\)"),
    ],
)
def test_linear_rejects_bad_input(x, weights, bias, message):
    with pytest.raises(ValueError, match=message) as caught:
        linear(*(None if shape is None else to_tensor(np.ones(shape)) for shape in (x, weights, bias)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("order", ["C", "F"])
def test_linear_with_a_transposed_table(order, rng):
    """Equals a multiplication by the transposed table; the table gets its gradient without a copy."""
    arrays = (
        rng.standard_normal((2, 3, 4)),
        np.asarray(rng.standard_normal((5, 4)), order=order),
        rng.standard_normal(5),
    )
    x, table, bias = map(to_tensor, arrays)
    y, expected = linear(x, table, bias, transposed=True), linear(x, table.transpose(), bias)
    np.testing.assert_array_equal(y.array, expected.array)
    gradients = []
    for result in (y, expected):
        (result * result).sum().backward()
        gradients.append([tensor.grad.array for tensor in (x, table, bias)])
        for tensor in (x, table, bias):
            tensor.zero_grad()
    for gradient, expected_gradient in zip(*gradients):
        np.testing.assert_allclose(gradient, expected_gradient, 1e-6)
    assert gradients[0][1].flags[f"{order}_CONTIGUOUS"]
