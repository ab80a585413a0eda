"""The CUDA kernels: compiled by NVRTC, run on an emulator of CUDA on the CPU, and run on a GPU where one is.

The emulator (cuda_on_cpu) compiles the same sources with g++ and alternates the threads of a block; so the kernels'
arithmetic, their barriers and the Python that launches them are tested everywhere, but not their speed.
"""

import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cuda_on_cpu import emulate
from implementations import registered_by, replace_implementations
from tables import bad_input
from test_kernels import CASES, IN_PLACE, contiguous, draw, strided

from tricycle import kernels
from tricycle.configs import DebugConfig
from tricycle.debug import use_reference
from tricycle.devices import ARRAY_MODULES, array_module
from tricycle.kernels import ScoreOptions
from tricycle.kernels.row_attention import attention_scores
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.optimisers import AdamW
from tricycle.tensor import to_tensor
from tricycle_accelerators import registry
from tricycle_accelerators.cuda import attention, cudnn, elementwise, gemm, graphs, launch, losses, register
from tricycle_accelerators.cuda import compile as nvrtc
from tricycle_accelerators.cuda.arrays import cast
from tricycle_accelerators.cuda.launch import KERNELS, LaunchPlan, template_name, template_names

CUDA = registered_by(register)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = (np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)
# How far results may be from the reference in float64, relative and as a share of the largest: half a unit of the last
# place, and for 16 bits a few of them where weights were rounded on the way.
CLOSE = {"float32": 3e-4, "float16": 4e-3, "bfloat16": 2e-2}
NEED_FLOAT32 = {"adamw", "rnn", "rnn_backward", "gru", "gru_backward", "lstm", "lstm_backward"}  # else: the reference
FILES = sorted(path for path in launch.FOLDER.glob("*.cu"))

# -------------------------------------------------------------------- two devices
Device = Callable[[Any], Any]  # from arrays to arrays of the device
launched_kernels: set[str] = set()  # names of the kernels that tests launched on the emulator


@pytest.fixture(scope="session")
def emulator(tmp_path_factory) -> emulate.Emulator:
    if emulate.problem():
        pytest.skip(emulate.problem())
    return emulate.Emulator(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def no_cudnn(monkeypatch) -> None:
    monkeypatch.setattr(cudnn, "attention_forward", lambda *arguments: None)
    monkeypatch.setattr(cudnn, "attention_backward", lambda *arguments: False)


@pytest.fixture
def emulated(emulator, no_cudnn, monkeypatch) -> emulate.Emulator:
    """The table's launches go to the emulator, with NumPy arrays; matrix products to NumPy."""
    emulator.order = 0
    emulator.launched.clear()
    replace_implementations(monkeypatch, np.ndarray, CUDA)
    monkeypatch.setattr(launch, "launch", emulator.launch)
    monkeypatch.setattr(launch, "has_tensor_cores", lambda: True)
    monkeypatch.setattr(gemm, "matmul", kernels.matmul.reference)
    yield emulator
    launched_kernels.update(template_name(*each) for each in emulator.launched)


def offset_by_one(array: np.ndarray) -> np.ndarray:
    """The same values one element after a multiple of 16 bytes."""
    start = np.zeros(array.size + 32 // array.dtype.itemsize, array.dtype)
    first = -(start.ctypes.data // array.dtype.itemsize) % (16 // array.dtype.itemsize) + 1
    view = start[first : first + array.size].reshape(array.shape)
    view[...] = array
    return view


def to_emulator(array: np.ndarray, layout: Callable = contiguous) -> np.ndarray:
    return layout(array)


def to_cupy(array: np.ndarray, layout: Callable = contiguous) -> Any:
    import cupy

    array = cupy.asarray(np.ascontiguousarray(array).reshape(array.shape))
    if layout is contiguous or not array.ndim:
        return array
    if layout is strided:
        view = cupy.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)[..., ::2][::-1]
    else:
        view = cupy.zeros(array.size + 1, array.dtype)[1:].reshape(array.shape)
    view[...] = array
    return view


def to_host(array: Any) -> np.ndarray:
    return array if isinstance(array, (np.ndarray, np.generic)) else array.get()


def wide(argument: Any) -> Any:
    """Floats as float64, everything else as it is; arrays are copies."""
    if not isinstance(argument, np.ndarray):
        return argument
    return argument.copy() if argument.dtype.kind in "biu" else argument.astype(np.float64)


def drawn(name: str, size: tuple, dtype: np.dtype) -> list:
    """Arguments of a case, with floats rounded to a dtype."""
    return [
        a.astype(dtype) if isinstance(a, np.ndarray) and a.dtype.kind not in "biu" else a
        for a in draw(name, size, np.float64)
    ]


def results_of(name: str, kernel: Callable, arguments: list) -> list:
    found = kernel(*arguments)
    if name in IN_PLACE:
        assert found is None
        return arguments[IN_PLACE[name]]
    if name == "gelu_with_derivative" and found[1] is None:  # the backward recomputes it
        (x,) = arguments
        found = found[0], kernels.gelu_backward(array_module(x).full_like(x, 1), x, None)
    return list(found) if isinstance(found, tuple) else [found]


def assert_near(actual: list, expected: list, tolerance: float, share: float = 0.1) -> None:
    """Relative to each value, and to this share of the largest."""
    assert len(actual) == len(expected)
    for result, reference in zip(actual, expected):
        result = np.asarray(to_host(result), np.float64)
        assert result.shape == np.shape(reference)
        scale = max(1.0, float(np.abs(reference).max(initial=0, where=np.isfinite(reference))))
        np.testing.assert_allclose(result, reference, tolerance, tolerance * scale * share)


def check_case(name: str, size: tuple, dtype: np.dtype, layout: Callable, device: Device) -> None:
    arguments = drawn(name, size, dtype)
    expected = results_of(name, kernels.KERNELS[name].reference, [wide(a) for a in arguments])
    given = [device(a, layout) if isinstance(a, np.ndarray) else a for a in arguments]
    written = given[IN_PLACE[name]] if name in IN_PLACE else []
    read = [a for a in given if hasattr(a, "dtype") and not any(a is w for w in written)]
    before = [to_host(a).tobytes() for a in read]
    actual = results_of(name, kernels.KERNELS[name], given)
    assert before == [to_host(a).tobytes() for a in read]
    assert_near(actual, expected, CLOSE[dtype.name])
    small = [a for a in actual if a.dtype.itemsize == 2]
    assert all(a.dtype == dtype for a in small)


TESTED = [name for name in CASES if name in CUDA and name != "matmul"]
each_type = pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in TESTED for dtype in DTYPES if dtype == np.float32 or name not in NEED_FLOAT32],
)


# -------------------------------------------------------------------- on the emulator: the cases of all kernels
@each_type
def test_emulated_kernels_match_reference_in_float64(name, dtype, emulated):
    """Test every size in both layouts in float32, and alternate sizes and layouts in 16 bits."""
    sizes = CASES[name][1]
    if dtype == np.float32:
        cases = itertools.product(sizes, (contiguous, strided))
    else:
        cases = zip(sizes[DTYPES.index(dtype) - 1 :: 2] or sizes, itertools.cycle((contiguous, strided)))
    for size, layout in cases:
        check_case(name, size, dtype, layout, to_emulator)
    if dtype == np.float32 and name not in ("matmul_operand", "to_compute_dtype"):
        assert emulated.launched  # and not the reference


@pytest.mark.nightly_except(3)
@pytest.mark.parametrize("name", TESTED)
def test_emulated_results_do_not_depend_on_thread_order(name, emulated):
    for size in CASES[name][1]:
        results = []
        for emulated.order in (0, 1, 7):
            arguments = drawn(name, size, np.dtype(np.float32))
            results.append([a.tobytes() for a in results_of(name, kernels.KERNELS[name], arguments)])
        assert results[0] == results[1] == results[2], size


@pytest.fixture(params=["emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request) -> Device:
    """Run a test on the emulator and on a GPU."""
    if request.param == "gpu":
        request.getfixturevalue("no_cudnn")
        return to_cupy
    request.getfixturevalue("emulated")
    return to_emulator


# -------------------------------------------------------------------- sizes at which the GPU's versions change
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 64), (3, 776), (2, 2056), (1, 9000), (2, 40_000), (9, 129)], ids=str)
@pytest.mark.parametrize("name", ["softmax", "softmax1", "log_softmax", "softmax_backward"])
def test_softmax_kernels_match_reference_for_all_row_sizes(name, shape, dtype, device, rng):
    arrays = [(rng.standard_normal(shape) * 5).astype(dtype)]
    if name == "softmax_backward":
        arrays.append(kernels.softmax.reference(rng.standard_normal(shape)).astype(dtype))
    kernel, options = (kernels.softmax, [True]) if name == "softmax1" else (kernels.KERNELS[name], [])
    for layout in (contiguous, offset_by_one):
        found = kernel(*(device(a, layout) for a in arrays), *options)
        assert_near([found], [kernel.reference(*map(wide, arrays), *options)], CLOSE[dtype.name])


def test_softmax_handles_rows_of_infinities_and_nan(device):
    x = np.array([[-np.inf] * 5, [-np.inf, 0, 1, 2, 3], [1, np.nan, 2, 3, 4], [-1e30, 80, 88, -np.inf, 80]], np.float32)
    found = to_host(kernels.softmax(device(x)))
    assert (found[0] == 0).all() and np.isnan(found[2]).all()
    np.testing.assert_allclose(found[[1, 3]], kernels.softmax.reference(x.astype(float))[[1, 3]], 1e-5)
    assert (to_host(kernels.softmax(device(x), True))[0] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("subtract_mean", [True, False])
@pytest.mark.parametrize(
    "shape",
    [(1, 8), (7, 64), (4, 200), (6, 264), (5, 520), (3, 776), (2, 1000), (2, 2048), (3, 4096), (2, 8192), (2, 8200)]
    + [(4 * launch.NORM_BLOCKS + 5, 16)],
)
def test_layer_norm_kernels_match_reference(shape, subtract_mean, dtype, device, rng):
    """The last shape has more rows than there are teams in all blocks of the backward kernel."""
    x, grad = ((rng.standard_normal(shape) * 3 + 1).astype(dtype) for _ in range(2))
    gain, bias = (rng.standard_normal(shape[-1]).astype(np.float32) for _ in range(2))
    expected = kernels.layer_norm.reference(wide(x), wide(gain), wide(bias), 1e-5, subtract_mean)
    slopes = kernels.layer_norm_backward.reference(wide(grad), wide(x), wide(gain), *expected[1:], subtract_mean)
    for layout in (contiguous, offset_by_one):
        given = device(x, layout), device(gain, layout)
        y, mean, scale = actual = kernels.layer_norm(*given, device(bias, layout), 1e-5, subtract_mean)
        assert y.dtype == dtype and mean.dtype == scale.dtype == np.float32
        assert_near(list(actual), list(expected), CLOSE[dtype.name])
        actual = kernels.layer_norm_backward(device(grad, layout), *given, mean, scale, subtract_mean)
        assert actual[0].dtype == dtype and actual[1].dtype == actual[2].dtype == np.float32
        assert_near(list(actual), list(slopes), CLOSE[dtype.name])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2049, 24), (5000, 5), (3, 4104), (40_000, 8), (300, 1000)], ids=str)
def test_sum_kernels_match_float64(shape, dtype, device, rng):
    x = rng.standard_normal(shape).astype(dtype)
    for layout in (contiguous, offset_by_one):
        sums = kernels.sum_rows(device(x, layout))
        assert sums.dtype == np.float32
        assert_near([sums], [wide(x).sum(axis=0)], 1e-4)
    sums = kernels.sum_squares(device(x))
    assert sums.dtype == np.float32 and sums.shape == ()
    np.testing.assert_allclose(float(to_host(sums)), (wide(x) ** 2).sum(), 1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("n_tokens", "n_rows", "size"), [(3000, 7, 40), (600, 3, 1032), (1500, 2000, 5), (513, 4, 2056), (1, 5, 8)]
)
def test_embedding_backward_with_repeated_tokens_matches_reference(n_tokens, n_rows, size, dtype, device, rng):
    grad = rng.standard_normal((n_tokens, size)).astype(dtype)
    ids = np.minimum(rng.geometric(0.3, n_tokens) - 1, n_rows - 1)
    found = kernels.embedding_backward(device(grad), device(ids), n_rows)
    assert found.dtype == np.float32
    assert_near([found], [kernels.embedding_backward.reference(wide(grad), ids, n_rows)], 1e-4)
    again = kernels.embedding_backward(device(grad), device(ids.astype(np.int32)), n_rows)
    assert to_host(found).tobytes() == to_host(again).tobytes()
    apart = kernels.embedding_backward(device(grad, offset_by_one), device(ids), n_rows)
    assert_near([apart], [to_host(found)], 1e-6)


def test_rows_are_added_where_an_index_selects_them(device, rng):
    total, ids, rows = rng.standard_normal((5, 8)), np.array([[1, -1], [1, 3]]), rng.standard_normal((2, 2, 8))
    expected = total.astype(np.float32)
    np.add.at(expected, ids, rows)
    found = device(total.astype(np.float32))
    kernels.add_at(found, device(ids), device(rows.astype(np.float32)))
    assert_near([found], [expected], 1e-5)


def test_embedding_backward_ignores_ids_outside_the_table(device):
    grad, ids = np.ones((4, 2), np.float32), np.array([0, -1, 2, 7])
    found = to_host(kernels.embedding_backward(device(grad), device(ids), 3))
    assert found.tolist() == [[1, 1], [0, 0], [1, 1]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [8, 131, 4099])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy_and_its_gradient_match_reference(size, smoothing, dtype, device, rng):
    logits, labels = (rng.standard_normal((9, size)) * 5).astype(dtype), rng.integers(0, size, 9)
    weights = (rng.random(9) * (np.arange(9) % 3 != 0)).astype(np.float32)
    expected = kernels.cross_entropy.reference(wide(logits), labels, wide(weights), smoothing)
    loss, slope = kernels.cross_entropy(device(logits), device(labels), device(weights), smoothing)
    assert slope.dtype == dtype and loss.dtype == np.float32 and loss.shape == ()
    assert_near([loss, slope], list(expected), CLOSE[dtype.name])


def test_cross_entropy_ignores_non_finite_rows_of_weight_zero(device):
    logits = np.array([[np.nan, 1, np.inf], [0, 1, 2], [-np.inf, 0, 1]], np.float32)
    labels, weights = np.array([0, 2, 0]), np.array([0, 1, 0], np.float32)
    loss, slope = kernels.cross_entropy(device(logits), device(labels), device(weights))
    np.testing.assert_allclose(float(to_host(loss)), np.log(np.exp([0, 1, 2]).sum()) - 2, 1e-5)
    assert (to_host(slope)[[0, 2]] == 0).all() and np.isfinite(to_host(slope)).all()
    # a label out of range gives NaN, and memory beyond the row is not read
    zeros, labels = device(np.zeros((2, 3), np.float32)), device(np.array([0, 3]))
    bad, no_gradient = kernels.cross_entropy(zeros, labels, device(weights[:2] + 1), 0.0, False)
    assert np.isnan(to_host(bad)) and no_gradient is None


# -------------------------------------------------------------------- attention
SHAPES = [  # sizes but for the last, score_options, off_by_one, which axes the mask has (None: no mask)
    ((2, 70, 70, 2, 2), ScoreOptions(0.15, 0), False, None),
    ((1, 70, 131, 2, 2), ScoreOptions(0.15, 61), True, None),
    ((2, 33, 70, 1, 1), ScoreOptions(0.15), False, (1, 0, 0, 1)),
    ((1, 80, 65, 4, 2), ScoreOptions(0.2, 0, 40, 3.0), False, (1, 1, 1, 1)),  # everything at once
    ((1, 129, 65, 2, 2), ScoreOptions(0.1, -64), True, (1, 1, 1, 1)),
    ((1, 129, 65, 1, 1), ScoreOptions(0.1, -64), False, None),
    ((2, 1, 200, 2, 2), ScoreOptions(0.1, 199), False, None),
    ((1, 130, 40, 2, 2), ScoreOptions(0.1, 20), False, (0, 0, 1, 1)),
    ((1, 64, 64, 1, 1), ScoreOptions(0.1), True, None),
    ((1, 150, 150, 3, 1), ScoreOptions(0.2, 0), False, None),
    ((2, 70, 90, 2, 1), ScoreOptions(0.2), True, (1, 1, 0, 1)),
    ((1, 200, 200, 1, 1), ScoreOptions(0.2, 0, 9), False, None),
    ((1, 100, 230, 2, 1), ScoreOptions(0.2, 130, 70), False, (0, 1, 0, 1)),
    ((1, 140, 60, 2, 2), ScoreOptions(0.2, -20, 15), True, None),  # the first and the last queries see no key
    ((1, 65, 33, 1, 1), ScoreOptions(0.2, 0, 2**31 - 1), False, None),
    ((1, 40, 40, 2, 2), ScoreOptions(0.3, 0, None, 1.0), False, None),
    ((1, 4, 300, 4, 2), ScoreOptions(0.3, 296, 20, 5.0), True, None),
]


def attention_arguments(rng, size: int, dtype: np.dtype, shape: tuple) -> tuple:
    (items, queries, keys, heads, key_heads), score_options, off_by_one, axes = shape
    packed = (rng.standard_normal((items, max(queries, keys), heads + 2 * key_heads, size)) * 1.5).astype(dtype)
    mask = None
    if axes:
        lengths = [n if axis else 1 for axis, n in zip(axes, (items, heads, queries, keys))]
        mask = np.where(rng.random(lengths) < 0.3, -np.inf, 0.5 * (rng.random(lengths) < 0.3)).astype(np.float32)
    grad = rng.standard_normal((items, queries, heads, size)).astype(dtype)
    return packed, grad, score_options, off_by_one, mask


def split(packed: Any, sizes: tuple) -> tuple:
    _, queries, keys, heads, key_heads = sizes
    k, v = packed[:, :keys, heads : heads + key_heads], packed[:, :keys, heads + key_heads :]
    return packed[:, :queries, :heads], k, v


def attend(grad, qkv: tuple, score_options: ScoreOptions, off_by_one: bool, mask, places, of=lambda kernel: kernel):
    """Return the output and the logsumexp of attention, and write the gradients to three places.

    Args:
        of: what is called of the two kernels.
    """
    found = of(kernels.attention)(*qkv, score_options, off_by_one, mask)
    of(kernels.attention_backward)(grad, *qkv, *found, score_options, *places, mask)
    return found


def attend_in_float64(grad, qkv: tuple, score_options: ScoreOptions, off_by_one: bool, mask) -> tuple[list, list]:
    """Return the output and the logsumexp of the reference, and the gradients."""
    gradients, reference = [np.full(part.shape, np.nan) for part in qkv], lambda kernel: kernel.reference
    exact = wide(grad), tuple(map(wide, qkv)), score_options, off_by_one, wide(mask)
    return list(attend(*exact, gradients, reference)), gradients


KINDS = [*((size, dtype) for dtype in DTYPES for size in (32, 64, 128)), (100, DTYPES[0]), (20, BFLOAT16)]


@pytest.mark.nightly_except(2)
@pytest.mark.parametrize(
    ("size", "dtype", "shape"),
    # the first shapes with every kernel there is, the others with the fastest to emulate
    [
        pytest.param(*kind, shape, marks=[pytest.mark.nightly] * (1 < i < 4 or (i >= 4 and j != i % 3)))
        for i, shape in enumerate(SHAPES)
        for j, kind in enumerate(sorted(KINDS, key=lambda kind: kind[0] != 32))
        if i < 4 or kind[0] == 32
    ],
    ids=str,
)
def test_attention_matches_reference(size, dtype, shape, device, rng):
    packed, grad, *options, mask = attention_arguments(rng, size, dtype, shape)
    sizes, tolerance = shape[0], CLOSE[dtype.name]
    expected, expected_gradients = attend_in_float64(grad, split(packed, sizes), *options, mask)
    on_device = None if mask is None else device(mask)
    gradients = device(np.full(packed.shape, np.nan, dtype))
    places = split(gradients, sizes)
    out, logsumexp = attend(device(grad), split(device(packed), sizes), *options, on_device, places)
    assert out.dtype == dtype and logsumexp.dtype == np.float32
    assert_near([out, logsumexp, *places], [*expected, *expected_gradients], tolerance, 0.5)
    gradients_array, (_, queries, keys, heads, _) = to_host(gradients), sizes
    rest = [gradients_array[:, queries:, :heads], gradients_array[:, keys:, heads:]]
    assert all(np.isnan(a.astype(np.float32)).all() for a in rest)  # no other element was written


@pytest.mark.nightly_except(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_is_bit_identical_for_any_thread_order(dtype, emulated, rng):
    for shape in SHAPES[1:4]:
        packed, grad, *options = attention_arguments(rng, 64, dtype, shape)
        results = []
        for emulated.order in (0, 1, 7):
            gradients = np.full(packed.shape, np.nan, dtype)
            found = attend(grad, split(packed, shape[0]), *options, split(gradients, shape[0]))
            results.append([array.tobytes() for array in (*found, gradients)])
        assert results[0] == results[1] == results[2]


def test_attention_of_unaligned_rows_matches_reference(device, rng):
    """Rows start 1 element off 16-byte alignment: they are copied, and gradients are written to the original places."""
    sizes = 1, 20, 20, 2, 1
    packed, grad, *options = attention_arguments(rng, 32, BFLOAT16, (sizes, ScoreOptions(0.2, 0), False, None))
    unaligned = np.full((*packed.shape[:-1], 33), np.nan, BFLOAT16)
    gradients = device(unaligned.copy())
    unaligned[..., 1:] = packed
    places = split(gradients[..., 1:], sizes)
    out, _ = attend(device(grad), split(device(unaligned)[..., 1:], sizes), *options, places)
    expected, expected_gradients = attend_in_float64(grad, split(packed, sizes), *options)
    assert_near([out, *places], [expected[0], *expected_gradients], CLOSE["bfloat16"], 0.5)


# -------------------------------------------------------------------- the other kernels
@pytest.mark.parametrize("small", ["float16", "bfloat16"])
def test_casts_to_16_bits_match_numpy(small, device):
    dtype = DTYPES[1] if small == "float16" else BFLOAT16
    odd = [0, -0.0, 1, 1.00390625, 1.01171875, 65519, 65520, 1e-8, -3e-5, np.inf, -np.inf, np.nan, 1e38]
    x = np.concatenate([odd, np.arange(1000) / 3]).astype(np.float32)
    with np.errstate(over="ignore"):
        expected = x.astype(dtype)
    cast = kernels.matmul_operand(device(x), small)
    assert cast.dtype == dtype
    np.testing.assert_array_equal(to_host(cast).astype(np.float32), expected.astype(np.float32))
    assert kernels.matmul_operand(cast, small) is cast
    matrix = device(np.arange(48, dtype=np.float32).reshape(6, 8)).T
    transposed = kernels.to_compute_dtype(matrix, small)
    assert transposed.flags.f_contiguous and transposed.shape == (8, 6)
    np.testing.assert_array_equal(to_host(transposed).astype(np.float32), np.arange(48).reshape(6, 8).T)
    for precision in ("float32", "tf32"):
        assert kernels.matmul_operand(matrix, precision) is matrix


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_multiply_by_device_scalar_matches_numpy(dtype, device, rng):
    x = rng.standard_normal(1001).astype(dtype)
    for factor in (np.array(0.25, np.float32), np.array(0.25, dtype)):
        found = kernels.multiply(device(x), device(factor))
        assert found.dtype == dtype
        np.testing.assert_array_equal(to_host(found), (x * np.array(0.25, dtype)).astype(dtype))


def philox(seed: int, n: int) -> np.ndarray:
    """The first draws of Philox 4x32 with ten rounds: blocks of four for counters 0, 1, ... and a key of two halves."""
    counters = np.arange(-(-n // 4), dtype=np.uint64)
    words = [counters & 0xFFFFFFFF, counters >> np.uint64(32), counters * 0, counters * 0]
    keys = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        first, second = words[0] * np.uint64(0xD2511F53), words[2] * np.uint64(0xCD9E8D57)
        low = np.uint64(0xFFFFFFFF)
        words = [
            (second >> np.uint64(32)) ^ words[1] ^ np.uint64(keys[0]),
            second & low,
            (first >> np.uint64(32)) ^ words[3] ^ np.uint64(keys[1]),
            first & low,
        ]
        keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.stack(words, axis=1).reshape(-1)[:n]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_masks_match_philox(dtype, device):
    generator, again = np.random.default_rng(3), np.random.default_rng(3)
    found = to_host(kernels.dropout_mask(device(np.zeros(1, dtype)), (7, 1001), 0.8, generator))
    uniform = (philox(int(again.integers(2**63)), 7007) >> np.uint64(8)) / 2**24
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.where(uniform < 0.8, 1 / np.float32(0.8), 0).reshape(7, 1001).astype(dtype))
    assert generator.random() == again.random()


def test_dropout_reads_its_seed_from_the_device_while_recorded(device, monkeypatch):
    """A replay writes a new seed, so the recorded kernel takes an address."""
    seeds, drawn = device(np.zeros(2, np.uint64)), []
    recorder = SimpleNamespace(place_of_draw=lambda seed: drawn.append(seed) or seeds[1:])
    seeds[1:] = np.random.default_rng(3).integers(2**63)
    like, generator = device(np.zeros(1, np.float32)), np.random.default_rng(3)
    token = graphs._recording.set(recorder)
    found = kernels.dropout_mask(like, (7, 1001), 0.8, generator)
    graphs._recording.reset(token)
    np.testing.assert_array_equal(to_host(found), to_host(kernels.dropout_mask(like, (7, 1001), 0.8, generator)))
    assert len(drawn) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rope_on_a_slice_of_packed_qkv_matches_reference(dtype, device, rng):
    packed, angles = rng.standard_normal((2, 5, 3, 4, 16)).astype(dtype), rng.standard_normal((5, 8))
    cos, sin = np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)
    for part in range(3):
        actual = kernels.apply_rope(device(packed)[:, :, part], device(cos), device(sin))
        expected = kernels.apply_rope.reference(wide(packed)[:, :, part], wide(cos), wide(sin))
        assert_near([actual], [expected], CLOSE[dtype.name])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize(("shape", "turned"), [((1003,), False), ((16, 8), False), ((6, 10), True)])
def test_adamw_with_host_or_device_scalars_matches_reference(shape, turned, where, dtype, device, rng):
    """Arrays that are turned lie by columns."""
    weights, first = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    second, grad = rng.random(shape).astype(np.float32), rng.standard_normal(shape).astype(dtype)
    number = (lambda value: value) if where == "host" else (lambda value: device(np.array(value, np.float32)))
    place = (lambda array: device(array.T.copy()).T) if turned else (lambda array: device(array.copy()))
    for factor in (0.5, 0.0, np.nan):
        changed = [place(a) for a in (weights, first, second)]
        given = [changed[0], place(grad), *changed[1:], number(7), number(0.01), (0.9, 0.95), 1e-8, 0.1]
        kernels.adamw(*given, number(factor))
        if factor == 0.5:
            expected = [wide(weights), wide(grad) * 0.5, wide(first), wide(second)]
            kernels.adamw.reference(*expected, 7, 0.01, (0.9, 0.95), 1e-8, 0.1)
            assert_near(changed, [expected[0], *expected[2:]], 1e-5)
        else:
            for array, before in zip(changed, (weights, first, second)):
                assert to_host(array).tobytes() == before.tobytes()


@pytest.mark.parametrize("steps", [1, 100_000])
def test_adamw_bias_correction_is_exact_at_first_and_late_steps(steps, device):
    """1 - beta^step must lose no digits for a beta close to 1."""
    start = [np.full(4, value) for value in (1.0, 0.3, 0.2, 0.1)]
    expected, actual = [a.copy() for a in start], [device(a.astype(np.float32)) for a in start]
    for kernel, arrays in ((kernels.adamw.reference, expected), (kernels.adamw, actual)):
        kernel(*arrays, steps, 0.1, (0.9, 0.9999), 1e-8, 0.0)
    np.testing.assert_allclose(to_host(actual[0]), expected[0], 1e-6)


# -------------------------------------------------------------------- on a GPU
@pytest.mark.gpu
@each_type
@pytest.mark.parametrize("layout", [contiguous, strided, offset_by_one])
def test_gpu_kernels_match_reference_in_float64(name, layout, dtype, no_cudnn):
    for size in CASES[name][1]:
        check_case(name, size, dtype, layout, to_cupy)


@pytest.mark.gpu
@each_type
def test_gpu_results_are_bit_reproducible(name, dtype, no_cudnn):
    for size in CASES[name][1]:
        results = []
        for _ in range(2):
            arguments = [to_cupy(a) if isinstance(a, np.ndarray) else a for a in drawn(name, size, dtype)]
            results.append([to_host(a).tobytes() for a in results_of(name, kernels.KERNELS[name], arguments)])
        assert results[0] == results[1]


@pytest.mark.gpu
def test_arrays_of_more_than_2_to_the_31_elements():
    """Indices must have 64 bits."""
    import cupy

    n = 2**31 + 24
    if cupy.cuda.runtime.memGetInfo()[0] < 5 * n:
        pytest.skip("needs 10 GB of free memory on the GPU")
    x = cupy.zeros(n, np.float16)
    x[-3:] = 1
    y = kernels.KERNELS["relu_squared"](x)[1]
    assert to_host(y[-4:]).tolist() == [0, 2, 2, 2]
    del y
    rows = x.reshape(-1, 8)
    assert to_host(kernels.sum_rows(rows)).tolist() == [0, 0, 0, 0, 0, 1, 1, 1]


# -------------------------------------------------------------------- kernel list and launch plans
def test_every_kernel_of_the_sources_is_listed():
    assert [path.stem for path in FILES] == sorted(KERNELS)
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        pattern = r"(?:template <([^<>]*)>\s*)?__global__ void (?:__launch_bounds__\(.*?\) |LARGE_BLOCK )?(\w+)\("
        kernels_found = re.findall(pattern, text)
        found = {name: len(parameters.split(",")) if parameters else 0 for parameters, name in kernels_found}
        assert text.count("__global__") == len(found)
        assert found.keys() == KERNELS[path.stem].keys()
        for name, n_parameters in found.items():
            assert all(len(template) == n_parameters for template in KERNELS[path.stem][name]), name
    names = [name for file in KERNELS for name in template_names(file)]
    assert len(set(names)) == len(names)


def needs_a_gpu(test: Callable) -> bool:
    return any(mark.name == "gpu" for mark in getattr(test, "pytestmark", ()))


def test_every_kernel_has_run_on_the_emulator(request):
    """Run after the tests that launch kernels: pytest keeps the order of the file."""
    chosen = {item.name.split("[")[0] for item in request.session.items if item.path == request.path}
    defined = {name for name, test in globals().items() if name.startswith("test_") and not needs_a_gpu(test)}
    if chosen != defined or not launched_kernels or request.config.option.keyword:
        pytest.skip("only some tests of this file were chosen, or none could be emulated")
    assert {name for file in KERNELS for name in template_names(file)} - launched_kernels == set()


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("size", [1, 7, 8, 768, 1024, 1025, 4096, 50_257, 10**6])
@pytest.mark.parametrize("n_rows", [1, 3, 2048, 2049, 32_768, 2**31 - 5])
def test_launch_plans_cover_all_elements(n_rows, size, itemsize):
    pack = launch.elements_per_16_bytes(itemsize)
    plan = launch.plan_rows(n_rows, size, itemsize)
    assert plan.grid[0] * plan.block[1] >= n_rows > (plan.grid[0] - 1) * plan.block[1]
    assert plan.block[1] == 1 or plan.block[0] == 32  # several teams only if they need no barrier
    plan, chunk = launch.plan_column_sums(n_rows, size, itemsize)
    assert plan.grid[0] * plan.block[0] * pack >= size and plan.grid[1] * chunk >= n_rows
    assert (plan.grid[1] - 1) * chunk < n_rows and plan.shared <= launch.DEFAULT_MAX_SHARED
    assert launch.plan_total_sum(n_rows * size, itemsize).grid[0] <= 1024
    name = "float" if itemsize == 4 else "__half"
    for at_once in (1, pack):
        if size <= launch.LONGEST_NORM[at_once]:
            plan, n_held = launch.plan_norm_backward(n_rows, size, at_once)
            assert plan.block[0] * n_held * at_once >= size
            assert (name, str(at_once), str(n_held)) in KERNELS["norm"]["layer_norm_backward"]
            assert plan.shared >= 8 * size or plan.block[1] == 1
        plan = launch.plan_token_sums(min(n_rows, 2**20), size, at_once)
        assert plan.shared == 4 * at_once * plan.block[0] * plan.block[1]
    if n_rows * size < 2**40:
        assert launch.plan_elementwise(n_rows * size, pack).grid[0] * launch.THREADS * pack >= n_rows * size


@pytest.mark.parametrize("size", range(1, 129))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_head_size_has_its_kernels(size, dtype, monkeypatch):
    q = np.zeros((1, 2, 1, size), dtype)
    for tensor_cores in (True, False):
        monkeypatch.setattr(launch, "has_tensor_cores", lambda has=tensor_cores: has)
        selected = attention._select_kernels(q)
        assert selected.forward in KERNELS[selected.name][selected.name]
        assert selected.backward in KERNELS[selected.name][f"{selected.name}_backward_keys"]
        assert selected.backward in KERNELS[selected.name][f"{selected.name}_backward_queries"]
        assert (selected.name == "attention_mma") == (tensor_cores and dtype.itemsize == 2 and size in (32, 64, 128))
        for shared in selected.shared:
            launch.plan_attention(1000, 32, selected.rows, selected.threads, shared)


LABELS = np.zeros((2, 3), np.float32), np.zeros(3, int), np.ones(2, np.float32)
test_bad_plans_and_arguments = bad_input(
    {
        "no block": (lambda: LaunchPlan((0, 1), (32, 1)).check(), r"grid.*\(2147483647, 65535\)"),
        "too many blocks": (lambda: launch.plan_elementwise(2**40, 1), r"grid.*\(2147483647,"),
        "half a warp": (lambda: LaunchPlan((1, 1), (16, 1)).check(), "32 threads.*1024"),
        "too many threads": (lambda: LaunchPlan((1, 1), (1024, 2)).check(), "32 threads.*at most"),
        "too much shared memory": (lambda: LaunchPlan((1, 1), (32, 1), 2**20).check(), "at most 101376 bytes"),
        "labels of another length": (
            lambda: losses.cross_entropy(*LABELS),
            r"cross_entropy: .*labels.*\(3,\) and \(2,\)",
        ),
    }
)


@pytest.fixture
def calls(monkeypatch):
    """The modules, kernels and launches of `launch.launch` on fake devices, of which number 0 is the current one."""
    calls, current = [], [0]

    class Device:
        def __init__(self, number):
            self.number = number

        def __enter__(self):
            current.append(self.number)

        def __exit__(self, *error):
            current.pop()

    class Function:
        max_dynamic_shared_size_bytes = 0

        def __call__(self, *given, **options):
            calls.append((current[-1], given, options, self.max_dynamic_shared_size_bytes))

    module = SimpleNamespace(get_function=lambda name: calls.append(name) or Function())
    monkeypatch.setattr(launch, "_device", lambda: current[-1])
    monkeypatch.setattr(launch, "_module", lambda file, template, device: calls.append(device) or module)
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(Device=Device))
    launch._function.cache_clear()
    yield calls
    launch._function.cache_clear()
    assert current == [0]


def on_gpu(number: int) -> SimpleNamespace:
    """An array on a device."""
    return SimpleNamespace(device=SimpleNamespace(id=number))


def test_launch_errors_name_the_argument(calls):
    """A kernel that is not in the table, and arrays of two devices."""
    plan = LaunchPlan((1, 1), (32, 1))
    with pytest.raises(ValueError, match=r"adamw.cu: .*'double'"):
        launch.launch("adamw", "adamw", ("double",), plan)
    with pytest.raises(ValueError, match=r"adamw: .*device.*0 and 1"):
        launch.launch("adamw", "adamw", ("float",), plan, on_gpu(1), on_gpu(0))
    assert not calls


def test_kernel_runs_on_the_device_of_its_arrays(calls):
    """Launch on the second device while the first is current; the fixture sees that it is current again afterwards."""
    for number in (1, 0):
        launch.launch("adamw", "adamw", ("float",), LaunchPlan((1, 1), (32, 1)), on_gpu(number), None, np.float32(1))
    modules, launched = calls[::3], [number for number, *_ in calls[2::3]]
    assert launched == modules == [1, 0]


def test_launch_passes_null_pointers_and_shared_memory_size(calls):
    """Null pointers are passed as uint64, and shared memory above the default is requested."""
    launch.launch("attention", "attention", ("64", "64"), LaunchPlan((3, 1), (256, 1), 50_000), None, np.int32(5))
    _, name, (_, given, options, max_shared) = calls
    assert name == "attention<64, 64>" and options == {"shared_mem": 50_000} and max_shared == 50_000
    assert given == ((3, 1), (256, 1), (0, 5)) and given[2][0].dtype == np.uint64


# -------------------------------------------------------------------- declined arguments
def heads(n_tokens: int = 3, size: int = 8, dtype: Any = np.float32) -> np.ndarray:
    return np.ones((1, n_tokens, 2, size), dtype)


ROWS, HALVES = np.ones((2, 6), np.float32), np.ones((2, 6), np.float16)
NONE, DOUBLES = np.ones((0, 6), np.float32), np.ones((2, 6))
LONG = np.ones((1, 8192), np.float32)
GATES, STATES, MATRIX = np.ones((2, 1, 6), np.float32), np.ones((1, 3, 1, 6), np.float32), np.ones((6, 6), np.float32)
TURNED = np.asfortranarray(ROWS)
FLOATS = "^float32, float16 or bfloat16, got float64$"
DECLINE_REASONS = [
    *((name, (DOUBLES,), FLOATS) for name in ("gelu", "relu_squared", "softmax", "sum_rows", "sum_squares")),
    *((name, (NONE,), "^an empty array$") for name in ("gelu_with_derivative", "sigmoid", "log_softmax", "sum_rows")),
    *((name, (HALVES,), None) for name in ("gelu", "softmax", "log_softmax", "sum_squares")),
    ("softmax", (ROWS, True), None),
    ("softmax_backward", (ROWS, HALVES), r"gradient.*\(2, 6\) float16, got \(2, 6\) float32"),
    ("softmax_backward", (ROWS[:1], ROWS), "gradient.*softmax"),
    ("softmax_backward", (ROWS, TURNED), None),
    ("add", (ROWS, ROWS[0]), "one shape and dtype"),
    ("add", (DOUBLES, DOUBLES), FLOATS),
    ("add", (ROWS, ROWS, TURNED), "contiguous output"),
    ("add", (ROWS, ROWS, HALVES), "contiguous output"),
    ("add", (ROWS, TURNED, ROWS), None),
    ("multiply", (ROWS, 2.0), "arrays.*float"),
    ("multiply", (ROWS, ROWS[0]), "one shape and dtype"),
    ("multiply", (ROWS, HALVES), "one shape and dtype"),
    ("multiply", (DOUBLES, DOUBLES), FLOATS),
    ("multiply", (HALVES, np.array(2.0)), None),
    ("gelu_backward", (ROWS, None, ROWS), "input of the forward, got its derivative"),
    ("gelu_backward", (ROWS, HALVES, None), "one shape and dtype"),
    ("gelu_backward", (ROWS, ROWS, None), None),
    ("dropout_mask", (ROWS, (2, 0), 0.5, None), "^an empty mask$"),
    ("dropout_mask", (DOUBLES, (2, 3), 0.5, None), FLOATS),
    ("dropout_mask", (NONE, (2, 3), 0.5, None), None),
    ("apply_rope", (heads(size=7), ROWS, ROWS), "even head size.*7"),
    ("apply_rope", (heads(dtype=float), ROWS, ROWS), FLOATS),
    ("apply_rope", (heads(), ROWS, ROWS), None),
    ("cross_entropy", (DOUBLES, ROWS, ROWS), FLOATS),
    ("cross_entropy", (ROWS, ROWS, ROWS, 0.0, False), None),
    ("layer_norm", (ROWS, ROWS[0], None, 1e-5, True, np.float16), "result.*float32"),
    ("layer_norm", (NONE, ROWS[0], None, 1e-5, True), "^an empty array$"),
    ("layer_norm", (ROWS, ROWS[0], None, 1e-5, True, np.float32), None),
    ("layer_norm_backward", (HALVES, ROWS, ROWS[0], ROWS, ROWS, True), "gradient.*float32, got float16"),
    ("layer_norm_backward", (DOUBLES, DOUBLES, ROWS[0], ROWS, ROWS, True), FLOATS),
    ("layer_norm_backward", (*[np.ones((1, 8200), np.float32)] * 5, True), "rows above 8192"),
    ("layer_norm_backward", (*[np.ones((1, 4097), np.float32)] * 5, True), "rows above 4096"),
    ("layer_norm_backward", (LONG, LONG, offset_by_one(LONG[0]), ROWS, ROWS, True), "rows above 4096"),
    ("layer_norm_backward", (LONG, LONG, offset_by_one(LONG[0].astype(np.float16)), ROWS, ROWS, True), None),
    ("layer_norm_backward", (LONG, LONG, LONG[0], ROWS, ROWS, True), None),
    ("layer_norm_backward", (LONG, np.asfortranarray(np.ones((2, 8192), np.float32)), LONG[0], ROWS, ROWS, True), None),
    ("embedding_backward", (ROWS, ROWS, 0), "table without rows"),
    ("embedding_backward", (DOUBLES, ROWS, 3), FLOATS),
    ("embedding_backward", (ROWS, ROWS, 3), None),
    ("add_at", (ROWS, ROWS, ROWS), "whole numbers"),
    ("add_at", (ROWS, np.zeros(2, int), DOUBLES), FLOATS),
    ("add_at", (ROWS, np.zeros(2, int), ROWS), None),
    ("attention", (heads(size=129), heads(), heads(), None, False), "head size above 128"),
    ("attention", (heads(), heads(2), heads(), None, False), r"keys and values.*\(1, 2, 2, 8\)"),
    ("attention", (heads(), heads(), heads(dtype=np.float16), None, False), "keys and values.*one dtype"),
    ("attention", (heads(), heads(0), heads(0), None, False), "^no keys$"),
    ("attention", (heads(0), heads(), heads(), None, False), "^an empty array$"),
    ("attention", (*[heads(dtype=float)] * 3, None, False), FLOATS),
    ("attention", (heads(1, 128), heads(5, 128), heads(5, 128), None, True, ROWS), None),
    ("attention_backward", (heads(dtype=np.float16), *[heads()] * 4, ROWS, None), "output and a gradient"),
    ("attention_backward", (*[heads(size=129)] * 5, ROWS, None), "head size above 128"),
    ("attention_backward", (*[heads()] * 5, ROWS, None), None),
    ("adamw", (HALVES, ROWS, ROWS, ROWS, 1), "moments.*float32, got float16"),
    ("adamw", (ROWS, ROWS, ROWS, TURNED, 1), "moments.*one order"),
    ("adamw", (TURNED, ROWS, ROWS, TURNED, 1), "moments.*one order"),
    ("adamw", (ROWS, ROWS[:1], ROWS, ROWS, 1), r"gradient and moments.*\(2, 6\), got \(1, 6\)"),
    ("adamw", (ROWS, DOUBLES, ROWS, ROWS, 1), FLOATS),
    ("adamw", (NONE, NONE, NONE, NONE, 1), None),
    ("adamw", (TURNED, HALVES, TURNED, TURNED, 1), None),
    ("rnn", (GATES, STATES.astype(float), MATRIX, None, None, True), "^float32, got float64$"),
    ("gru", (GATES[..., ::2], STATES, MATRIX, None, None), "arrays in one piece"),
    ("lstm", (GATES[:0], STATES, MATRIX, None, None), "^an empty array$"),
    ("gru", (GATES, STATES, MATRIX.astype(float), None, None), "weights.*float64"),
    ("rnn", (GATES, STATES, MATRIX.T, None, GATES > 0, False), None),
    ("lstm_backward", (GATES, GATES, STATES, MATRIX, None, GATES.astype(np.float16), STATES), "^float32, got float16$"),
    ("rnn_backward", (GATES, GATES, STATES, MATRIX, None, GATES, STATES, True), None),
    ("new_recorder", (ROWS,), None),
]


@pytest.mark.parametrize(("name", "arguments", "expected_reason"), DECLINE_REASONS)
def test_decline_reasons_name_the_cause(name, arguments, expected_reason):
    (version,) = CUDA[name]
    found = version.decline_reason(*arguments)
    assert found is None if expected_reason is None else re.search(expected_reason, found), found
    if expected_reason is not None:
        assert version(*arguments) is NotImplemented


def test_every_declining_version_has_a_reason():
    takes_all = {"matmul_operand", "matmul_operand_and_sums", "to_compute_dtype", "matmul"}
    assert {name for name in CUDA if not hasattr(CUDA[name][0], "decline_reason")} == takes_all
    assert {name for name in CUDA if name not in takes_all} == {name for name, *_ in DECLINE_REASONS} | {"gru_backward"}


# -------------------------------------------------------------------- registration
def test_cuda_kernels_register_at_the_first_cupy_array(monkeypatch):
    """Use an array type whose module is named cupy."""
    made = type("ndarray", (np.ndarray,), {"__module__": "cupy"})
    monkeypatch.setitem(ARRAY_MODULES, made, np)
    calls = []
    monkeypatch.setattr(elementwise, "sigmoid", lambda x: calls.append("cuda") or NotImplemented)
    x = np.zeros(3, np.float32).view(made)
    assert made not in kernels.sigmoid.implementations
    assert kernels.sigmoid(x).tolist() == [0.5, 0.5, 0.5]
    assert kernels.sigmoid.registered[made] == [elementwise.sigmoid] and calls == ["cuda"]
    with use_reference():
        kernels.sigmoid(x)
    assert calls == ["cuda"]
    q = np.ones((1, 2, 1, 2), np.float32).view(made)
    assert attention_scores(q, q, ScoreOptions(1.0)).shape == (1, 1, 2, 2)
    assert attention_scores.implementations[made] == []


# -------------------------------------------------------------------- compiling
needs_nvrtc = pytest.mark.skipif(bool(nvrtc.unavailable_reason()), reason=str(nvrtc.unavailable_reason()))
FIRST, *OTHERS = nvrtc.ARCHITECTURES
LONG_TO_COMPILE = ("attention", "attention_mma", "norm", "rows")
ARCHITECTURES = [FIRST, *(pytest.param(other, marks=pytest.mark.nightly) for other in OTHERS)]


@needs_nvrtc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "file", [pytest.param(file, marks=[pytest.mark.nightly] * (file in LONG_TO_COMPILE)) for file in KERNELS]
)
def test_compiles_without_spills(file, architecture):
    usages = list(nvrtc.compile_file(file, architecture))
    print(nvrtc.format_table(usages))
    assert [usage.kernel for usage in usages] == list(template_names(file))
    spilled = [usage for usage in usages if usage.stack or usage.spills]
    assert not spilled, nvrtc.format_table(spilled)
    for usage in usages:
        threads = most_threads(file, usage.kernel)
        assert threads * 8 * -(-usage.registers // 8) <= 65_536, f"{usage} and {threads} threads"
        assert usage.shared <= launch.DEFAULT_MAX_SHARED


def most_threads(file: str, name: str) -> int:
    """Return the largest number of threads in a block of a kernel."""
    kernel, *template = re.findall(r"\w+", name)
    if kernel == "layer_norm_backward":
        return {"1": 1024, "4": 512, "8": 256}[template[1]]
    if file == "embedding":
        return {"start_rows": 1024, "add_tiles": 256}.get(kernel, 512)
    return 1024 if file in ("rows", "norm") or kernel == "sum_all" else 256


@needs_nvrtc
def test_compiler_errors_are_shown(monkeypatch):
    monkeypatch.setattr(nvrtc, "read_source", lambda file: "__global__ void adamw() { nonsense; }")
    monkeypatch.setattr(nvrtc, "template_names", lambda file: ("adamw",))
    with pytest.raises(RuntimeError, match=r'adamw\.cu for sm_90: .*\n.*"nonsense" is undefined'):
        list(nvrtc.compile_file("adamw", "sm_90"))


LOG = """ptxas info : Compiling entry function '_Z1f' for 'sm_90'
ptxas info : Function properties for _Z1f
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info : Used 40 registers, used 1 barriers, 8 bytes cumulative stack size, 128 bytes smem
ptxas info : Compiling entry function '_Z1g' for 'sm_90'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info : Used 16 registers"""


def test_ptxas_usage_output_is_parsed():
    usages = list(nvrtc.parse_usages(LOG, {"_Z1f": "f<float>", "_Z1g": "g"}, "sm_90"))
    assert usages == [
        nvrtc.KernelUsage("f<float>", "sm_90", 40, 128, 8, 16),
        nvrtc.KernelUsage("g", "sm_90", 16, 0, 0, 0),
    ]
    assert nvrtc.format_table(usages).splitlines()[2:] == ["| `f<float>` | 40 | 128 | 24 |", "| `g` | 16 | 0 | 0 |"]
    with pytest.raises(ValueError, match="sm_90"):
        list(nvrtc.parse_usages(LOG, {"_Z1h": "h"}, "sm_90"))


# -------------------------------------------------------------------- the emulator itself
RACE = """
__global__ void reverse(const float* x, float* y) {
    __shared__ float held[64];
    held[threadIdx.x] = x[threadIdx.x];
    BARRIER
    y[threadIdx.x] = held[63 - threadIdx.x];
}
"""


@pytest.mark.parametrize(("barrier", "differs"), [("", True), ("__syncthreads();", False)])
def test_emulator_results_show_a_missing_barrier(barrier, differs, tmp_path, monkeypatch):
    results = run_on_emulator(RACE.replace("BARRIER", barrier), tmp_path, monkeypatch)
    assert (results[0] != results[1]) == differs


def test_emulator_reports_threads_that_wait_forever(tmp_path, monkeypatch):
    with pytest.raises(RuntimeError, match=r"reverse with .*63 of 64 threads"):
        run_on_emulator(RACE.replace("BARRIER", "if (threadIdx.x) __syncthreads();"), tmp_path, monkeypatch)


def run_on_emulator(text: str, folder: Path, monkeypatch) -> list[bytes]:
    if emulate.problem():
        pytest.skip(emulate.problem())
    monkeypatch.setattr(emulate, "read_source", lambda file, folders: text)
    monkeypatch.setattr(emulate, "template_names", lambda file: ("reverse",))
    monkeypatch.setitem(KERNELS, "race", {"reverse": ((),)})
    emulator, results = emulate.Emulator(folder), []
    for emulator.order in (0, 1):
        y = np.zeros(64, np.float32)
        emulator.launch("race", "reverse", (), LaunchPlan((1, 1), (64, 1)), np.arange(64, dtype=np.float32), y)
        results.append(y.tobytes())
    return results


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_emulator_casts_of_16_bit_floats_match_numpy(dtype, emulated, rng):
    """Cast all 16-bit values to float32, and the midpoints of neighbors back with round-half-to-even."""
    every = np.arange(2**16, dtype=np.uint16).view(dtype)
    to_float32 = cast(every, np.dtype(np.float32))
    np.testing.assert_array_equal(to_float32, every.astype(np.float32))
    finite = to_float32[np.isfinite(to_float32)]
    between = np.sort(finite)
    with np.errstate(over="ignore"):
        values = np.concatenate([(between[1:] + between[:-1]) / 2, rng.standard_normal(1000).astype(np.float32)])
    np.testing.assert_array_equal(cast(values, dtype).astype(np.float32), values.astype(dtype).astype(np.float32))


# -------------------------------------------------------------------- a whole model
@pytest.mark.parametrize("softmax", ["softmax", "softmax1"])
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-4), ("float16", 2e-2), ("bfloat16", 6e-2)])
def test_training_step_matches_cpu_kernels(precision, tolerance, softmax, emulated, monkeypatch):
    """Loss, gradients and an update equal those of the CPU in float32; tensor cores support the head size."""
    results = {}
    for where, versions in (("cpu", registered_by(registry.register_numpy)), ("cuda", CUDA)):
        replace_implementations(monkeypatch, np.ndarray, versions)
        config = DebugConfig(
            embedding_dim=64,
            n_heads=2,
            context_window=20,
            vocab_size=31,
            softmax=softmax,
            seed=4,
            precision=precision if where == "cuda" else "float32",
        )
        model, optimiser = GPT(config), AdamW(1e-2)
        ids = np.random.default_rng(2).integers(0, 31, (3, 21))
        loss = CrossEntropy()(to_tensor(ids[:, 1:], dtype=int), model(to_tensor(ids[:, :-1], dtype=int)))
        loss.backward()
        gradients = {name: p.grad.array.copy() for name, p in model.named_parameters()}
        model.update(optimiser)
        assert all(p.dtype == np.float32 for p in model.parameters())
        assert all(g.dtype == np.float32 for g in gradients.values())
        results[where] = float(loss), gradients, {name: p.array for name, p in model.named_parameters()}
    names = {name for name, _ in emulated.launched}
    assert {"adamw", "layer_norm_backward", "cross_entropy", "sum_tokens"} <= names
    assert ("attention" if precision == "float32" else "attention_mma") in names
    (loss, gradients, _), (expected, expected_gradients, _) = results["cuda"], results["cpu"]
    np.testing.assert_allclose(loss, expected, tolerance)
    for name, gradient in expected_gradients.items():
        difference = np.linalg.norm(gradients[name] - gradient) / np.linalg.norm(gradient)
        assert difference < 3 * tolerance, (name, difference)
