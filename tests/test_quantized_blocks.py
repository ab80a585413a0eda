"""Matrices in the quantized blocks of GGUF files: products, and files that change while they are mapped."""

import copy
import os
import pickle
import time
from pathlib import Path

import numpy as np
import pytest
from test_ggml_quantization import random_blocks
from test_gguf_writer import new_model

from tricycle.debug import use_reference
from tricycle.finetuning.lora import LoRAConfig
from tricycle.generate import generate
from tricycle.kernels.explanation import explain
from tricycle.kernels.quantized import quantized_matmul
from tricycle.kernels.quantized_blocks import BLOCK_FORMATS, BlockMatrix, BlockRows, has_fast_products
from tricycle.pretrained import load
from tricycle.pretrained.adapters import new_adapter
from tricycle.pretrained.gguf_writer import export_gguf
from tricycle.tensor import to_tensor
from tricycle_accelerators import matmul_plan

each_format = pytest.mark.parametrize("name", BLOCK_FORMATS)


def block_rows(name: str, n_rows: int, n_values: int, seed: int = 0) -> BlockRows:
    return BlockRows(random_blocks(name, (n_rows, n_values // BLOCK_FORMATS[name].n_values), seed, "finite"), name)


def matrix_of(name: str, n_values: int, n_rows: int, exact: bool = False) -> BlockMatrix:
    """Return a matrix (n_values, 2 n_rows + 3) of rows in a format, in Q8_0, and in the format again."""
    parts = [block_rows(name, n_rows, n_values, 1), block_rows("Q8_0", 3, n_values), block_rows(name, n_rows, n_values)]
    return BlockMatrix(tuple(parts), True, exact)


def relative_error(product: np.ndarray, x: np.ndarray, matrix: BlockMatrix, bias: np.ndarray | float = 0.0) -> float:
    expected = x.astype(np.float64) @ np.asarray(matrix, np.float64) + bias
    return float(np.linalg.norm(product - expected) / np.linalg.norm(expected))


@each_format
@pytest.mark.parametrize("n_rows", [1, 3, 8, 9, 40])
@pytest.mark.parametrize("n_values", [256, 768])
def test_product_matches_float64_within_the_rounding_of_x(name, n_values, n_rows, monkeypatch):
    monkeypatch.setattr(matmul_plan, "MIN_VECTOR_BYTES", 0)
    rng = np.random.default_rng(0)
    matrix = matrix_of(name, n_values, 37)
    bias = rng.standard_normal(matrix.shape[1]).astype(np.float32)
    for scale in (1, 1e-4, 1e4):
        x = (scale * rng.standard_normal((n_rows, n_values))).astype(np.float32)
        assert relative_error(quantized_matmul(x, matrix, bias), x, matrix, bias) < 0.015
        exact = BlockMatrix(matrix.parts, True, exact=True)
        assert relative_error(quantized_matmul(x, exact, bias), x, exact, bias) < 1e-6
        assert relative_error(quantized_matmul.reference(x, matrix, bias), x, matrix, bias) < 1e-6


@each_format
@pytest.mark.parametrize("n_blocks", [1, 2, 5])
def test_integers_of_x_are_multiplied_exactly(name, n_blocks):
    """With 127 in each block of 32 the scale of x is 1, so nothing is rounded but the sums."""
    n_values = n_blocks * BLOCK_FORMATS[name].n_values
    x = np.random.default_rng(0).integers(-127, 128, (2, n_values)).astype(np.float32)
    x[:, ::32] = 127
    matrix = matrix_of(name, n_values, 30)
    assert relative_error(quantized_matmul(x, matrix), x, matrix) < 2e-6


@each_format
@pytest.mark.parametrize("n_rows", [6, 19])
def test_products_of_many_rows_equal_those_of_each_row(name, n_rows):
    matrix = matrix_of(name, 2304, 21)  # more values than are unpacked at once, and groups of rows that are not full
    x = np.random.default_rng(0).standard_normal((n_rows, 2304)).astype(np.float32)
    expected = np.concatenate([quantized_matmul(x[i : i + 1], matrix) for i in range(n_rows)])
    np.testing.assert_allclose(quantized_matmul(x, matrix), expected, rtol=0, atol=2e-6 * np.abs(expected).max())


@each_format
def test_rows_of_zeros_give_zeros(name):
    product = quantized_matmul(np.zeros((2, 256), np.float32), matrix_of(name, 256, 5))
    np.testing.assert_array_equal(product, 0)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype_name", ["bfloat16", "float16"])
def test_products_of_16_bit_rows_are_made_by_threads(dtype_name, exact):
    """As in training at the precision bfloat16, forward and backward."""
    dtype = pytest.importorskip("ml_dtypes").bfloat16 if dtype_name == "bfloat16" else np.float16
    matrix, rng = matrix_of("Q4_K", 512, 37, exact), np.random.default_rng(0)
    for each in (matrix, matrix.T):
        x = rng.standard_normal((70, each.shape[0])).astype(dtype)
        bias = rng.standard_normal(each.shape[1]).astype(np.float32)
        assert explain(quantized_matmul, x, each, bias).provider == "numpy"
        product = quantized_matmul(x, each, bias)
        assert product.dtype == dtype and relative_error(product.astype(np.float64), x, each, bias) < 0.005


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_rows_stay_apart(bad):
    x = np.ones((2, 256), np.float32)
    x[0, 100] = bad
    product = quantized_matmul(x, matrix_of("Q4_K", 256, 5))
    assert not np.isfinite(product[0]).any() and np.isfinite(product[1]).all()


def test_matrix_has_the_properties_of_an_array():
    matrix = matrix_of("Q4_K", 512, 10)
    assert matrix.shape == (512, 23) and matrix.size == 512 * 23 and repr(matrix) == "(512, 23) Q4_K and Q8_0"
    assert matrix.nbytes == 20 * 2 * 144 + 3 * 16 * 34
    np.testing.assert_array_equal(np.asarray(matrix.T), np.asarray(matrix).T)
    table = BlockMatrix((block_rows("Q6_K", 9, 256),))
    ids = np.array([[3, 8], [0, 3]])
    np.testing.assert_array_equal(table[ids], np.asarray(table)[ids])
    assert table.transpose((0, 1)) is table and table.T.T.parts is table.parts


def test_linear_has_gradients_for_x_and_bias():
    matrix = matrix_of("Q5_K", 256, 6, exact=True)
    rng = np.random.default_rng(0)
    x, bias = to_tensor(rng.standard_normal((4, 256))), to_tensor(rng.standard_normal(15))
    weights = to_tensor(np.zeros(1), requires_grad=False)
    matrix.linear(x, weights, bias, "dense", "float32").sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), np.broadcast_to(np.asarray(matrix).sum(axis=1), (4, 256)), 1e-4, 1e-3)
    np.testing.assert_allclose(bias.grad.numpy(), 4.0)


def test_copies_do_not_use_addresses_of_the_original():
    matrix, x = matrix_of("Q4_0", 256, 40), np.ones((1, 256), np.float32)
    expected = quantized_matmul(x, matrix)
    unpickled = pickle.loads(pickle.dumps(matrix))
    assert unpickled.prepared == {} and copy.deepcopy(matrix) is matrix
    np.testing.assert_array_equal(quantized_matmul(x, unpickled), expected)


# -------------------------------------------------------------------- in files
@pytest.fixture
def quantized_file(tmp_path: Path) -> Path:
    pytest.importorskip("gguf")
    export_gguf(new_model("llama"), None, tmp_path / "model.gguf", "Q8_0")
    return tmp_path / "model.gguf"


@pytest.mark.parametrize("weights", ["stored", "exact"])
def test_blocks_stay_in_the_mapped_file(quantized_file, weights):
    model = load(quantized_file, weights).model
    matrices = [p.array for p in model.parameters() if isinstance(p.array, BlockMatrix)]
    assert matrices and all(matrix.exact == (weights == "exact") for matrix in matrices)
    n_mapped = sum(not part.packed.flags.owndata for matrix in matrices for part in matrix.parts)
    assert n_mapped > 0  # queries and keys are copied, because their rows are in another order
    tokens = to_tensor(np.arange(8).reshape(1, 8), dtype=int)
    logits, expected = model(tokens).numpy(), load(quantized_file).model(tokens).numpy()
    error = np.linalg.norm(logits - expected) / np.linalg.norm(expected)
    assert error < (1e-5 if weights == "exact" else 0.02)
    assert len(list(generate(model, [1, 2, 3], 5, temperature=0))) == 5


def test_auto_keeps_the_format_of_files_if_a_provider_multiplies_with_it(quantized_file, tmp_path):
    def n_bytes(path: Path) -> int:
        return sum(parameter.array.nbytes for parameter in load(path, "auto").model.parameters())

    def has_blocks() -> bool:
        model = load(quantized_file, "auto").model
        return any(isinstance(parameter.array, BlockMatrix) for parameter in model.parameters())

    export_gguf(new_model("llama"), None, tmp_path / "half.gguf", "F16")
    with use_reference():
        assert not has_blocks()
        wide = n_bytes(tmp_path / "half.gguf")
    assert has_blocks() == has_fast_products()
    assert (n_bytes(tmp_path / "half.gguf") < 0.6 * wide) == has_fast_products()


@pytest.mark.parametrize("weights", ["stored", "exact"])
def test_adapter_on_blocks_has_the_gradients_of_one_on_float32(quantized_file, weights):
    """The dequantized matrices are never stored, and no gradient is computed for them."""
    gradients, tokens = [], np.arange(40).reshape(2, 20) % 30
    for kind in (weights, "float32"):
        loaded = load(quantized_file, kind)
        adapter = new_adapter(loaded, LoRAConfig(rank=2))
        for low_rank in adapter.low_ranks.values():
            for up in low_rank.ups:
                up.array[...] = np.random.default_rng(0).normal(0, 0.02, up.shape)
        loaded.model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        gradients.append([parameter.grad.numpy() for parameter in adapter.parameters()])
        assert all(parameter.grad is None for parameter in loaded.model.parameters() if not parameter.requires_grad)
    for ours, expected in zip(*gradients, strict=True):
        error = np.linalg.norm(ours - expected) / np.linalg.norm(expected)
        assert error < (1e-4 if weights == "exact" else 0.05)


@pytest.mark.skipif(os.name == "nt", reason="Windows does not let a mapped file be changed")
@pytest.mark.parametrize("change", ["truncate", "write"])
def test_changed_files_raise_instead_of_ending_the_process(quantized_file, change):
    model = load(quantized_file, "stored").model
    list(generate(model, [1, 2, 3], 2, temperature=0))
    if change == "truncate":
        os.truncate(quantized_file, 100)
    else:
        content = quantized_file.read_bytes()
        quantized_file.write_bytes(content[:-1] + b"\0")
        os.utime(quantized_file, ns=(1, 1))
    time.sleep(0.02)  # a check counts for 10 ms
    with pytest.raises(OSError, match=r"model\.gguf: was changed .* load the model again"):
        list(generate(model, [1, 2, 3], 2, temperature=0))


@pytest.mark.skipif(os.name == "nt", reason="Windows does not let a mapped file be replaced")
def test_replaced_file_keeps_the_loaded_model(quantized_file):
    model = load(quantized_file, "stored").model
    before = list(generate(model, [1, 2, 3], 5, temperature=0))
    other = quantized_file.with_name("other")
    other.write_bytes(b"GGUF")
    os.replace(other, quantized_file)
    assert list(generate(model, [1, 2, 3], 5, temperature=0)) == before
