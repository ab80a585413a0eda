"""Convolutions: PyTorch's opinion, shapes, the transpose, bad input; gradients of the ops are in test_registry.py."""

import numpy as np
import pytest
from tables import bad_input
from test_layers import check_layer_gradients

from tricycle.sequences.convolution import Conv1d, Conv2d, ConvTranspose2d, fold, unfold
from tricycle.tensor import to_tensor

OPTIONS = [
    {"kernel_size": 1},
    {"kernel_size": 3},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 4, "stride": 3, "padding": 2, "bias": False},
    {"kernel_size": 2, "stride": 3},
]


def torch_weights(layer, transposed: bool = False) -> np.ndarray:
    """Convert weights (K * C_in, C_out) to (C_out, C_in, *kernel), or (C_in, K * C_out) to (C_in, C_out, *kernel)."""
    if transposed:
        shaped = layer.weights.array.reshape(layer.from_size, *layer.kernel, layer.to_size)
        return np.moveaxis(shaped, -1, 1)
    shaped = layer.weights.array.reshape(*layer.kernel, layer.from_size, layer.to_size)
    return np.moveaxis(shaped, (-1, -2), (0, 1))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", [Conv1d, Conv2d, ConvTranspose2d])
def test_outputs_and_gradients_match_pytorch(kind, options, rng):
    torch = pytest.importorskip("torch")
    transposed = kind is ConvTranspose2d
    options = dict(options, **({"output_padding": 1} if transposed and options.get("stride", 1) > 1 else {}))
    tricycle_layer, torch_layer = kind(3, 4, generator=0, **options), getattr(torch.nn, kind.__name__)(3, 4, **options)
    with torch.no_grad():
        torch_layer.weight.copy_(torch.tensor(torch_weights(tricycle_layer, transposed)))
        if tricycle_layer.bias is not None:
            tricycle_layer.bias.array[...] = rng.standard_normal(4)
            torch_layer.bias.copy_(torch.tensor(tricycle_layer.bias.array))
    x = to_tensor(rng.standard_normal((2, 7, 3) if kind is Conv1d else (2, 7, 6, 3)))
    torch_x = torch.tensor(np.moveaxis(x.array, -1, 1), requires_grad=True)
    y, torch_y = tricycle_layer(x), torch_layer(torch_x)
    np.testing.assert_allclose(np.moveaxis(y.array, -1, 1), torch_y.detach().numpy(), 1e-4, 1e-5)
    weighting = rng.standard_normal(y.shape).astype(np.float32)
    (y * weighting).sum().backward()
    (torch_y * torch.tensor(np.moveaxis(weighting, -1, 1))).sum().backward()
    np.testing.assert_allclose(np.moveaxis(x.grad.array, -1, 1), torch_x.grad.numpy(), 1e-4, 1e-5)
    if tricycle_layer.bias is not None:
        np.testing.assert_allclose(tricycle_layer.bias.grad.array, torch_layer.bias.grad.numpy(), 1e-4, 1e-4)
    tricycle_layer.weights.array[...] = tricycle_layer.weights.grad.array
    np.testing.assert_allclose(torch_weights(tricycle_layer, transposed), torch_layer.weight.grad.numpy(), 1e-4, 1e-4)


def test_convolutions_match_values_computed_by_hand():
    layer = Conv1d(1, 1, 2, bias=False)
    layer.weights.array[...] = [[1], [10]]
    assert layer(to_tensor([[[1], [2], [3]]])).array.ravel().tolist() == [21, 32]
    pixels = np.arange(9.0).reshape(1, 3, 3, 1)
    sums = Conv2d(1, 1, 2, stride=1, padding=1, bias=False)
    sums.weights.array[...] = 1
    padded = np.pad(pixels[0, :, :, 0], 1)
    expected = padded[:-1, :-1] + padded[1:, :-1] + padded[:-1, 1:] + padded[1:, 1:]
    np.testing.assert_allclose(sums(pixels).array[0, :, :, 0], expected)


@pytest.mark.parametrize("kind", [Conv1d, Conv2d, ConvTranspose2d])
def test_gradients_match_finite_differences(kind, rng):
    layer = kind(2, 3, 3, stride=2, padding=1, generator=0)
    check_layer_gradients(layer, rng.standard_normal((2, 5, 2) if kind is Conv1d else (2, 5, 4, 2)))


@pytest.mark.parametrize("size", [1, 4, 5, 8])
def test_conv_transpose_restores_any_input_size(size):
    x = to_tensor(np.ones((1, size, size, 2)))
    halved = Conv2d(2, 3, 3, stride=2, padding=1)(x)
    extra = size - (2 * halved.shape[1] - 1)
    assert ConvTranspose2d(3, 2, 3, stride=2, padding=1, output_padding=extra)(halved).shape == x.shape


def test_fold_is_the_adjoint_of_unfold(rng):
    """<unfold(x), y> = <x, fold(y)>."""
    geometry = (3, 2), (2, 1), (1, 0)
    x = to_tensor(rng.standard_normal((2, 6, 5, 3)), dtype=np.float64)
    columns = unfold(x, *geometry)
    y = rng.standard_normal(columns.shape)
    folded = fold(to_tensor(y, dtype=float), (6, 5), *geometry).array
    np.testing.assert_allclose((columns.array * y).sum(), (x.array * folded).sum())


def test_kernel_size_and_stride_per_axis_give_the_right_shape():
    assert Conv2d(1, 1, (1, 3), stride=(2, 1), padding=(0, 1))(np.ones((1, 4, 6, 1))).shape == (1, 2, 6, 1)


X = np.ones((2, 5, 3), np.float32)
REFUSED = {
    "another number of channels": (lambda: Conv1d(4, 2, 3)(X), r"Conv1d\(from_size=4\): .*last axis"),
    "no batch": (lambda: Conv1d(3, 2, 3)(X[0]), r"unfold: .*\(batch, size, channels\).*got \(5, 3\)"),
    "a kernel that does not fit": (lambda: Conv1d(3, 2, 6)(X), r"unfold: .*\(batch, size, channels\).*6"),
    "another number of channels to grow": (
        lambda: ConvTranspose2d(4, 2, 3)(X[None]),
        r"ConvTranspose2d\(from_size=4\)",
    ),
    "a sequence for images": (lambda: Conv2d(3, 2, 3)(X), r"unfold: .*\(batch, size, size, channels\)"),
    "a kernel of nothing": (lambda: Conv1d(3, 2, 0), "Conv1d: .*kernel_size.*1 on"),
    "too many strides": (lambda: Conv2d(3, 2, 3, stride=(1, 2, 3)), "Conv2d: .*stride"),
    "a negative padding": (lambda: Conv2d(3, 2, 3, padding=-1), "Conv2d: .*padding.*0 on"),
    "no channels": (lambda: Conv1d(0, 2, 3), "Conv1d: .*from_size.*got 0"),
}
test_bad_input = bad_input(REFUSED)


@pytest.mark.parametrize(("shape", "padding"), [((2, 3, 4), 0), ((1, 2, 2, 4), 2)])
def test_conv_transpose_refuses_other_axes_and_empty_outputs(shape, padding):
    with pytest.raises(ValueError, match=r"ConvTranspose2d: expected shape \(batch, height, width, 4\)"):
        ConvTranspose2d(4, 2, 3, padding=padding)(np.ones(shape))
