"""Losses: seed values, masks, ranges, bad input; their gradients are in test_registry.py."""

import numpy as np
import pytest

from tricycle import to_tensor
from tricycle.debug import use_reference
from tricycle.loss import CrossEntropy, MeanSquaredError

ROWS = [[0.0, 0, 1], [0, 0, 1], [0, 0, 1]]


def labels(values, dtype=int):
    return to_tensor(values, dtype=dtype)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.int64, np.uint16])
def test_cross_entropy_accepts_any_integer_dtype(dtype):
    assert CrossEntropy(ignore_index=-100)(labels([0, 1, 2], dtype), ROWS).close_to(1.2181114)
    assert CrossEntropy()([0, 1, 2], ROWS).close_to(1.2181114)


@pytest.mark.filterwarnings("error")
def test_cross_entropy_of_large_logits_is_exact():
    logits = to_tensor([[1e30, 0], [1e30, 0], [0, -80], [1e4, 0]])
    for row, (label, expected) in enumerate([(0, 0), (1, 1e30), (0, 0), (1, 1e4)]):
        assert CrossEntropy()(labels([label]), logits[row : row + 1]).close_to(expected)
    CrossEntropy()(labels([0, 1, 0, 1]), logits).backward()
    np.testing.assert_allclose(logits.grad.array, np.float32([[0, 0], [1, -1], [0, 0], [1, -1]]) / 4, atol=1e-7)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("ignore", [-1, -100, 0, 2])
def test_ignored_positions_have_no_effect(ignore, rng):
    ids, logits = np.array([1, ignore, 1, ignore]), rng.standard_normal((4, 3))
    logits[1] = [-np.inf, 0, 3]  # an infinite cost that must not count
    x = to_tensor(logits)
    loss = CrossEntropy(ignore_index=ignore)(labels(ids), x)
    loss.backward()
    kept = to_tensor(logits[[0, 2]])
    expected = CrossEntropy()(labels([1, 1]), kept)
    expected.backward()
    assert loss.close_to(expected)
    np.testing.assert_allclose(x.grad.array[[0, 2]], kept.grad.array, 1e-6)
    assert (x.grad.array[[1, 3]] == 0).all()
    with use_reference():
        assert CrossEntropy(ignore_index=ignore)(labels(ids), x).close_to(expected)


@pytest.mark.parametrize(
    ("loss", "truth", "predicted", "message"),
    [
        (CrossEntropy(), labels([0, 1]), np.ones((3, 4)), r"labels.*\(3,\).*logits.*\(3,"),
        (CrossEntropy(), labels([[0], [1]]), np.ones((2, 4)), r"labels.*\(2,\)"),
        (CrossEntropy(), labels(0), np.ones(()), r"labels.*got \(\)"),
        (CrossEntropy(), to_tensor([0, 1]), np.ones((2, 4)), "whole numbers.*labels.*float32"),
        (CrossEntropy(), to_tensor([True, False]), np.ones((2, 4)), "whole numbers.*labels.*bool"),
        (CrossEntropy(), labels([0, 4]), np.ones((2, 4)), "labels: .*0 to 3.*got 4"),
        (CrossEntropy(), labels([0, -1]), np.ones((2, 4)), "labels: .*0 to 3.*got -1"),
        (CrossEntropy(ignore_index=-1), labels([-1, -2]), np.ones((2, 4)), "labels: .*0 to 3.*got -2"),
        (CrossEntropy(ignore_index=1), labels([1, 1]), np.ones((2, 4)), "at least one label"),
        (CrossEntropy(), labels([]), np.ones((0, 4)), "at least one label.*shape"),
        (MeanSquaredError(), to_tensor([1, 2]), np.ones(3), r"equal shapes.*\(2,\) and \(3,\)"),
        (MeanSquaredError(), to_tensor([1, 2]), np.ones((2, 1)), r"equal shapes.*\(2,\) and \(2, 1\)"),
        (MeanSquaredError(), to_tensor([]), np.ones(0), r"at least one element.*\(0,\)"),
    ],
)
def test_bad_input(loss, truth, predicted, message):
    with pytest.raises(ValueError, match=f"{type(loss).__name__}.*{message}") as caught:
        loss(truth, to_tensor(predicted))
    assert "\n" not in str(caught.value)


def test_mean_squared_error_values():
    x, y = to_tensor([1, 2]), to_tensor([4, 6])
    loss = MeanSquaredError()(x, y)
    assert str(loss) == "Tensor(12.5, name=mean_squared_error)"
    loss.backward()
    assert x.grad.array.tolist() == [-3, -4] and y.grad.array.tolist() == [3, 4]
    assert MeanSquaredError()(labels([1, 2]), y).item() == 12.5
    assert MeanSquaredError()([1, 2], y).dtype == np.float32


@pytest.mark.parametrize("share", [-0.1, 1, 1.5, float("nan")])
def test_bad_label_smoothing_is_rejected(share):
    with pytest.raises(ValueError, match="label_smoothing"):
        CrossEntropy(label_smoothing=share)


def test_loss_scale_applies_before_rounding(rng):
    """Without a loss scale, most gradients of many classes underflow in float16."""
    values, labels = rng.standard_normal((4096, 200)) / 4, rng.integers(0, 200, 4096)
    exact, small = to_tensor(values, dtype=float), to_tensor(values, dtype=np.float16)
    CrossEntropy()(labels, exact).backward()
    losses = {}
    for scale in (1.0, 2.0**12, np.array(2.0**12, np.float32)):
        small.grad = None
        loss = CrossEntropy()(labels, small, scale)
        loss.backward()
        assert small.grad.dtype == np.float16 and loss.dtype == np.float32
        losses[float(scale)] = float(loss) / float(scale)
        error = np.abs(small.grad.array.astype(float) / float(scale) - exact.grad.array) / np.abs(exact.grad.array)
        assert (np.median(error) < 1e-3) == (float(scale) > 1)
    assert losses[1.0] == pytest.approx(losses[2.0**12], rel=1e-6)
