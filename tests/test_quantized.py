"""Weights of 8 and 16 bits: what they stand for, products with them, models that have them."""

import copy
import pickle

import numpy as np
import pytest
from programs import good
from test_onednn import USABLE
from test_threads import run_with
from transformers_families import LIKE_LLAMA

from tricycle.configs.model import ModelConfig
from tricycle.debug import use_reference
from tricycle.functions import linear
from tricycle.gradcheck import gradcheck
from tricycle.kernels.quantized import (
    QuantizedMatrix,
    quantized_dtype,
    quantized_matmul,
    round_float32,
    to_float32,
)
from tricycle.layers import Dense
from tricycle.models import GPT
from tricycle.parameter import Parameter
from tricycle.tensor import Tensor, to_tensor
from tricycle.weights import quantize
from tricycle_accelerators import onednn, threads
from tricycle_accelerators.compiled.elementwise import round_float32 as narrow
from tricycle_accelerators.compiled.elementwise import to_float32 as convert
from tricycle_accelerators.compiled.loader import load_loops

KINDS = ("int8", "bfloat16", "float16")
STEPS = {"int8": 1 / 254, "bfloat16": 2**-8, "float16": 2**-11}  # of a row's largest; of a number
SIZES = {"vocab_size": 96, "context_window": 32, "embedding_dim": 32, "n_heads": 4, "n_layers": 2}
CONFIG = ModelConfig(**{**SIZES, **LIKE_LLAMA, "bias": True})
TOKENS = to_tensor(np.arange(24).reshape(2, 12), dtype=int)


def matrix_of(kind: str, shape: tuple[int, int], transposed: bool = True) -> tuple[np.ndarray, QuantizedMatrix]:
    if kind == "bfloat16":
        pytest.importorskip("ml_dtypes")
    numbers = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return numbers, QuantizedMatrix.quantize(numbers, kind, transposed)


# -------------------------------------------------------------------- the matrix
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (70, 5), (0, 4), (4, 0), (1000, 700)])
def test_quantization_error_is_within_the_bound_of_each_kind(kind, transposed, shape):
    numbers, matrix = matrix_of(kind, shape, transposed)
    before = numbers.copy()
    assert matrix.shape == shape and matrix.size == numbers.size and matrix.ndim == 2
    found = np.asarray(matrix)
    assert found.dtype == np.float32 and found.shape == shape
    axis = 0 if transposed else 1
    allowed = np.abs(numbers).max(axis=axis, keepdims=True, initial=0) if kind == "int8" else np.abs(numbers)
    assert (np.abs(found - numbers) <= allowed * STEPS[kind] * 1.001 + 1e-7).all()
    np.testing.assert_array_equal(np.asarray(matrix.T), found.T)
    np.testing.assert_array_equal(numbers, before)
    again = QuantizedMatrix.quantize(found, kind, transposed)
    np.testing.assert_array_equal(np.asarray(again), found)  # once more changes nothing


def test_rows_of_zeros_and_of_the_smallest_numbers():
    for number in (0.0, 1e-45, 1e-39):
        matrix = QuantizedMatrix.quantize(np.full((3, 4), number, np.float32), "int8")
        np.testing.assert_array_equal(np.asarray(matrix), 0)
    zeros = QuantizedMatrix.quantize(np.zeros((3, 4)), "int8", True)
    assert not quantized_matmul(np.ones((2, 3), np.float32), zeros).any()
    assert np.isfinite(np.asarray(QuantizedMatrix.quantize(np.full((1, 3), 3e38), "int8"))).all()


NOT_FINITE = [(bad, kind, rf"\({kind}\): .*finite") for kind in KINDS for bad in (np.nan, np.inf, -np.inf)]


@pytest.mark.parametrize(
    "number, kind, message", [*NOT_FINITE, (1e6, "float16", "too large"), (1, "int4", "int8, .*'int4'")]
)
def test_non_finite_or_too_large_numbers_and_unknown_kinds_are_rejected(number, kind, message):
    if kind == "bfloat16":
        pytest.importorskip("ml_dtypes")
    numbers = np.ones((5, 4))
    numbers[3, 2] = number
    with pytest.raises(ValueError, match=message):
        QuantizedMatrix.quantize(numbers, kind)


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_matrix_of_16_bits_is_not_copied_and_read_exactly(kind):
    """All numbers of the type, as NumPy converts them, the smallest included; small arrays are converted by NumPy."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    every = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16 if kind == "bfloat16" else np.float16)
    with np.errstate(invalid="ignore"):  # of signaling NaN, which some processors report
        wide, converted = every.astype(np.float32), to_float32(every)
    np.testing.assert_array_equal(converted, wide)  # NaN equals NaN here
    finite = every[np.isfinite(wide)].reshape(2, -1)
    matrix = QuantizedMatrix.quantize(finite, kind)
    assert matrix.values is finite
    expected = finite.astype(np.float32).view(np.uint32)
    np.testing.assert_array_equal(matrix.dequantize_rows(slice(0, 2)).view(np.uint32), expected)
    np.testing.assert_array_equal(matrix.dequantize_rows([1, 0]).view(np.uint32), expected[::-1])
    np.testing.assert_array_equal(to_float32(finite[:, ::64]).view(np.uint32), expected[:, ::64])
    with pytest.raises(ValueError, match="finite"):
        QuantizedMatrix.quantize(every.reshape(64, -1), kind)


@pytest.mark.parametrize("n", [100, 2**17])
@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_numbers_are_rounded_to_the_nearest(kind, n):
    pytest.importorskip("ml_dtypes")
    x = np.random.default_rng(0).integers(0, 2**32, n, dtype=np.uint32).view(np.float32)
    x[abs(x) < 2e-38] = 0  # processors may take denormal numbers for 0
    x[:3] = np.inf, -np.inf, np.nan
    rounded = np.empty(n, quantized_dtype(kind))
    with np.errstate(all="ignore"):  # too large for float16, and signaling NaN
        round_float32(x, rounded)
        expected = x.astype(rounded.dtype)
    np.testing.assert_array_equal(rounded.astype(np.float32), expected.astype(np.float32))


def test_conversion_declines_with_a_reason(monkeypatch):
    pytest.importorskip("numba")
    halves = np.ones((2, 2**13), np.float16)
    monkeypatch.setattr(load_loops("vector_loops"), "HAS_FLOAT16", False)
    for x, phrase in ((halves, "converts float16"), (halves[:, :9], "fewer than"), (halves.view(np.int16), "int16")):
        assert phrase in convert.decline_reason(x)
        assert convert(x) is NotImplemented
    floats = halves.astype(np.float32)
    for x, out, phrase in (
        (floats[:, :9], halves, "fewer than"),
        (halves, halves, "float32"),
        (floats, halves, "bfloat16"),
    ):
        assert phrase in narrow.decline_reason(x, out)


def test_bfloat16_without_ml_dtypes(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    with pytest.raises(ImportError, match=r"ml_dtypes.*tricycle-gpt\[bf16\]"):
        QuantizedMatrix.quantize(np.ones((2, 2)), "bfloat16")


def test_rows_are_read_from_embeddings_only():
    _, matrix = matrix_of("int8", (9, 6), transposed=False)
    ids = np.array([[3, 8], [0, 3]])
    np.testing.assert_array_equal(matrix[ids], np.asarray(matrix)[ids])
    assert matrix[ids].dtype == np.float32
    with pytest.raises(TypeError, match="embedding table"):
        matrix.T[ids]
    assert matrix.transpose((0, 1)) is matrix and matrix.copy() is matrix
    assert matrix.T.T.prepared is matrix.prepared


# -------------------------------------------------------------------- products
@USABLE
@pytest.mark.parametrize("kind", ["int8", "bfloat16"])
@pytest.mark.parametrize("n_rows", [1, 2, 16, 17, 150])
@pytest.mark.parametrize("shape", [(1, 1), (33, 65), (96, 500), (576, 130)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, "bfloat16"])
def test_onednn_product_matches_the_reference(monkeypatch, kind, n_rows, shape, dtype):
    """Several times, for its primitives are used again."""
    import ml_dtypes

    dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    matrix = matrix_of(kind, shape)[1]
    rng = np.random.default_rng(1)
    x = rng.standard_normal((n_rows, 2 * len(matrix))).astype(dtype)[:, ::2]
    bias = rng.standard_normal(matrix.shape[1]).astype(np.float32)
    expected = x.astype(np.float64) @ np.asarray(matrix, np.float64) + bias
    monkeypatch.setattr(threads, "n_threads", lambda: 3)
    for scale in (1, 100, 1):
        product = onednn.quantized.quantized_matmul((x * scale).astype(dtype), matrix, bias)
        assert product.dtype == dtype and "onednn" in matrix.prepared
    rounded = {2: 2**-7}.get(dtype.itemsize, 1e-4)
    assert np.linalg.norm(product - expected) <= rounded * np.linalg.norm(expected)


@USABLE
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_changes_no_other_row(bad):
    matrix = matrix_of("bfloat16", (70, 67))[1]
    x = np.random.default_rng(1).standard_normal((80, len(matrix))).astype(np.float32)
    expected = onednn.quantized.quantized_matmul(x, matrix)
    x[3, 5] = bad
    expected[3] = bad * np.asarray(matrix, np.float32)[5]
    np.testing.assert_array_equal(onednn.quantized.quantized_matmul(x, matrix), expected)


@USABLE
@pytest.mark.parametrize("n_rows", [17, 33])
def test_onednn_multiplies_no_single_row_with_factors(monkeypatch, n_rows):
    """oneDNN takes 200 times as long for one row as for two, and one of two threads has one of 17 rows."""
    library = onednn.quantized.library
    run, counts = library._run, []

    def spy(describe, options, places, arrays, layouts=None):
        counts.append(len(arrays[0]))
        run(describe, options, places, arrays, layouts)

    matrix = matrix_of("int8", (576, 130))[1]
    onednn.quantized._packed(matrix)
    monkeypatch.setattr(library, "_run", spy)
    monkeypatch.setattr(threads, "n_threads", lambda: 2)
    x = np.random.default_rng(1).standard_normal((n_rows, len(matrix))).astype(np.float32)
    np.testing.assert_allclose(onednn.quantized.quantized_matmul(x, matrix), x @ np.asarray(matrix), 1e-3, 1e-2)
    assert sorted(set(counts)) == [2, n_rows - 1]


WITH_THREADS = """
import numpy as np
from tricycle.kernels.quantized import QuantizedMatrix, quantized_matmul
rng = np.random.default_rng(0)
for kind in ("int8", "bfloat16"):
    for shape in ((64, 96), (128, 96), (100, 33), (96, 200)):
        matrix = QuantizedMatrix.quantize(rng.standard_normal(shape).astype(np.float32), kind, transposed=True)
        for n_rows in (1, 40):
            x = np.asfortranarray(rng.standard_normal((n_rows, shape[0])).astype(np.float32))
            for _ in range(20):
                product = quantized_matmul(x, matrix)
            expected = quantized_matmul.reference(x, matrix)
            assert np.linalg.norm(product - expected) <= 1e-4 * np.linalg.norm(expected), (kind, shape, n_rows)
print("all equal")
"""


@pytest.mark.nightly_except(3)
@USABLE
@pytest.mark.parametrize("n_threads", ["3", "4", "7"])
def test_onednn_products_match_the_reference_with_threads(n_threads):
    """The layout that oneDNN likes best depends on their number: one that is asked for twice must be the same twice."""
    variables = {"OMP_NUM_THREADS": n_threads, "TRICYCLE_NUM_THREADS": n_threads, "TRICYCLE_KERNELS": "-numba"}
    done = run_with(WITH_THREADS, **variables)
    assert good(done) == "all equal\n"


@USABLE
def test_many_rows_are_rounded_to_the_precision():
    _, matrix = matrix_of("bfloat16", (96, 70))
    x = np.random.default_rng(0).standard_normal((100, 96)).astype(np.float32)
    expected = x.astype(np.float64) @ np.asarray(matrix, np.float64)
    off = [np.linalg.norm(quantized_matmul(x, matrix, None, p) - expected) for p in ("float32", "bfloat16")]
    assert off[0] < 1e-4 * np.linalg.norm(expected) < 1e-3 * np.linalg.norm(expected) < off[1]


@USABLE
@pytest.mark.parametrize("n_rows", [1, 40])
def test_rows_of_any_size_and_non_finite_values(n_rows):
    """Each row has a scale of its own; and infinity is no whole number, but gives what the plain version gives."""
    _, matrix = matrix_of("int8", (64, 70))
    x = np.random.default_rng(0).standard_normal((n_rows, 64)).astype(np.float32)
    x *= np.geomspace(1e-20, 1e20, n_rows).astype(np.float32)[:, None]
    x[0] = 0
    expected = x.astype(np.float64) @ np.asarray(matrix, np.float64)
    actual = quantized_matmul(x, matrix)
    assert not actual[0].any()
    for row, truth in zip(actual[1:], expected[1:]):
        assert np.linalg.norm(row - truth) <= 1e-4 * np.linalg.norm(truth)
    x[0, 0] = np.nan
    assert np.isnan(quantized_matmul(x, matrix)[0]).all()
    assert np.isfinite(quantized_matmul(x, matrix)[1:]).all()


@USABLE
def test_several_threads_multiply_one_matrix_by_onednn():
    from concurrent.futures import ThreadPoolExecutor

    _, matrix = matrix_of("int8", (200, 300))
    xs = np.random.default_rng(0).standard_normal((64, 1, 200)).astype(np.float32)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda x: onednn.quantized.quantized_matmul(x, matrix), xs))
    for x, product in zip(xs, found):
        np.testing.assert_array_equal(product, onednn.quantized.quantized_matmul(x, matrix))


# -------------------------------------------------------------------- gradients
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_bias", [True, False])
def test_gradients_of_the_input_and_bias(kind, with_bias):
    _, matrix = matrix_of(kind, (5, 3))
    weights = Tensor(matrix, requires_grad=False)
    rng = np.random.default_rng(0)
    inputs = [Tensor(rng.standard_normal((2, 4, 5)))] + ([Tensor(rng.standard_normal(3))] if with_bias else [])
    gradcheck(lambda x, *bias: linear(x, weights, *bias), *inputs)
    x = Tensor(rng.standard_normal((4, 5)).astype(np.float32))
    (linear(x, weights) * 2).sum().backward()
    np.testing.assert_allclose(x.grad.array, np.full((4, 3), 2) @ np.asarray(matrix).T, 1e-3, 1e-4)


def test_quantized_weights_do_not_require_grad():
    layer = Dense(4, 3, generator=0)
    quantize(layer, "int8")
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    with pytest.raises(ValueError, match=r"Dense.unfreeze: .*32 bits"):
        layer.unfreeze()
    layer.weights.requires_grad = True
    with pytest.raises(ValueError, match=r"dense: .*float32.*\(4, 3\) int8"):
        layer(np.ones((2, 4), np.float32))


# -------------------------------------------------------------------- models
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("plain", [True, False])
def test_logits_of_a_quantized_model_are_close(kind, tied, plain):
    if kind == "bfloat16":
        pytest.importorskip("ml_dtypes")
    model = GPT(ModelConfig(**{**vars(CONFIG), "tied": tied})).eval()
    before = model(TOKENS).array
    state = {name: array.copy() for name, array in model.state_dict().items()}
    n_parameters = model.n_parameters
    assert quantize(model, kind) is model
    context = use_reference if plain else pytest.MonkeyPatch.context
    with context():
        after = model(TOKENS).array
    assert 0 < np.linalg.norm(after - before) < 0.02 * np.linalg.norm(before)
    assert model.n_parameters == n_parameters and f" {kind}" in repr(model)
    for name, array in model.state_dict().items():
        assert array.dtype == np.float32
        np.testing.assert_allclose(array, state[name], atol=np.abs(state[name]).max() * 2**-7)
    again = GPT(model.config)
    again.load_state_dict(model.state_dict())
    np.testing.assert_allclose(again(TOKENS).array, after, 0, 2e-4 if kind == "int8" else 5e-3)
    quantize(model, kind)  # once more changes nothing
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        np.testing.assert_allclose(twin(TOKENS).array, model(TOKENS).array, 0, 5e-3)


def test_quantize_rejects_nan_and_unknown_kinds():
    model = GPT(CONFIG)
    model.blocks[1].mlp.up.weights.array[0, 0] = np.nan
    with pytest.raises(ValueError, match="finite"):
        quantize(model)
    assert all(parameter.dtype == np.float32 and parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(ValueError, match="int8"):
        quantize(model, "int3")
    model = quantize(GPT(CONFIG))
    state = GPT(CONFIG).state_dict()
    with pytest.raises(ValueError, match=r"token_embedding.weights: .*32 bits"):
        model.load_state_dict(state)
    with pytest.raises(ValueError, match=r"GPT.to_gpu: .*float32.*token_embedding.weights \(96, 32\)"):
        model.to_gpu()


def test_quantize_keeps_parameter_names_and_shared_weights():
    model = GPT(ModelConfig(**{**vars(CONFIG), "positions": "learned"}))
    quantize(model)
    assert model.position_embedding.weights.array.dtype == np.float32
    assert model.token_embedding.weights.array.dtype == np.int8
    first, second = Dense(3, 3, generator=0), Dense(3, 3, generator=1)
    second.weights = first.weights
    both = GPT(CONFIG)
    both.pair = [first, second]
    quantize(both)
    assert isinstance(first.weights, Parameter) and first.weights.array is second.weights.array
