"""Every kernel against the reference in float64: odd shapes, strided inputs, outputs filled with NaN."""

import itertools
import math
import re
from contextlib import nullcontext
from importlib import import_module
from pkgutil import iter_modules

import attention_cases
import numpy as np
import pytest
from attention_cases import normal
from implementations import registered_by

from tricycle import kernels
from tricycle.debug import use_reference
from tricycle.kernels import KERNELS, recurrent
from tricycle.kernels.dispatch import Kernel
from tricycle.kernels.experts import Routing
from tricycle.kernels.quantized import QuantizedMatrix
from tricycle_accelerators import attention_blocks, chunks, cpu, matmul_plan, registry, threads


# -------------------------------------------------------------------- arguments
def _rows(rng, shape, *options):
    return rng.standard_normal(shape), *options


def _two(rng, shape):
    return rng.standard_normal(shape), rng.standard_normal(shape)


def _gelu_backward(rng, shape, knows):
    grad, x = _two(rng, shape)
    return (grad, x, None) if knows == "x" else (grad, None, x)


def _softmax_backward(rng, shape):
    return rng.standard_normal(shape), kernels.softmax.reference(rng.standard_normal(shape))


def _layer_norm(rng, shape, subtract_mean, bias):
    x, channels = rng.standard_normal(shape) * 3 + 1, shape[-1]
    return x, rng.standard_normal(channels), rng.standard_normal(channels) if bias else None, 1e-5, subtract_mean


def _layer_norm_backward(rng, shape, subtract_mean):
    x, gain, _, eps, _ = _layer_norm(rng, shape, subtract_mean, False)
    _, mean, scale = kernels.layer_norm.reference(x, gain, None, eps, subtract_mean)
    return rng.standard_normal(shape), x, gain, mean, scale, subtract_mean


def _embedding_backward(rng, n_ids, n_rows, channels):
    return rng.standard_normal((n_ids, channels)), rng.integers(0, n_rows, n_ids), n_rows


def _add_at(rng, n_ids, n_rows, *channels):
    total = rng.standard_normal((n_rows, *channels))
    return total, rng.integers(-n_rows, n_rows, n_ids), rng.standard_normal((n_ids, *channels))


def _cross_entropy(rng, n, n_classes, *smoothing):
    weights = rng.random(n) * (rng.random(n) < 0.8)
    return rng.standard_normal((n, n_classes)) * 5, rng.integers(0, n_classes, n), weights, *smoothing


def _batched_matmul(rng, shape, k, m):
    *items, n = shape
    return rng.standard_normal((*items, n, k)), rng.standard_normal((*items, k, m))


def _matmul(rng, n, k, m, bias):
    return rng.standard_normal((n, k)), rng.standard_normal((k, m)), rng.standard_normal(m) if bias else None


def _add_matmul(rng, n, k, m):
    return rng.standard_normal((n, m)), rng.standard_normal((n, k)), rng.standard_normal((k, m))


def _quantized_matmul(rng, n, k, m, kind, transposed, bias):
    if kind == "bfloat16":
        pytest.importorskip("ml_dtypes")
    numbers = rng.standard_normal((k, m)).astype(np.float32)
    matrix = QuantizedMatrix.quantize(numbers, kind, transposed)
    return rng.standard_normal((n, k)), matrix, rng.standard_normal(m) if bias else None


def _route(rng, n, n_experts, corrected, *fields):
    correction = rng.standard_normal(n_experts) / 9 if corrected else None
    return rng.standard_normal((n, n_experts)), Routing(*fields), correction


def _mix_experts(rng, n, n_channels, size, n_active):
    shapes = [(n, n_channels), (n, n_active), *[(n_channels, 2 * size), (size, n_channels)] * n_active]
    return [rng.standard_normal(shape) for shape in shapes]


def _grouped(rng, counts, n_channels, size):
    matrices = [rng.standard_normal((n_channels, size)) for _ in counts]
    return rng.standard_normal((sum(counts), n_channels)), counts, *matrices


def _grouped_gradients(rng, counts, *sizes):
    x, grad = (rng.standard_normal((sum(counts), size)) for size in sizes)
    return x, counts, grad


def _sum_by_token(rng, n_tokens, n_active, n_channels, weighted):
    n_rows = n_tokens * n_active
    places = rng.permutation(n_rows).reshape(n_tokens, n_active)
    return rng.standard_normal((n_rows, n_channels)), places, rng.random((n_tokens, n_active)) if weighted else None


def _sum_by_token_backward(rng, n_tokens, n_active, n_channels):
    arguments = _sum_by_token(rng, n_tokens, n_active, n_channels, True)
    return rng.standard_normal((n_tokens, n_channels)), *arguments


def _rotate(rng, items, tokens, heads, size):
    angles = rng.standard_normal((tokens, size // 2))
    return rng.standard_normal((items, tokens, heads, size)), np.cos(angles), np.sin(angles)


def _adamw(rng, shape, step, decay):
    weights, grad, first = (rng.standard_normal(shape) for _ in range(3))
    return weights, grad, first, rng.random(shape), step, 0.01, (0.9, 0.95), 1e-8, decay


def _recurrence(rng, n_gates, n_kept, steps, items, size, bias, masked, *options):
    """Return the arguments that the layers pass, with NaN in place of the states."""
    gates = rng.standard_normal((steps, items, n_gates * size))
    states = np.full((n_kept, steps + 1, items, size), np.nan)
    states[:, 0] = rng.standard_normal((n_kept, items, size))
    weights = rng.standard_normal((size, n_gates * size)) / np.sqrt(size)
    bias = rng.standard_normal(n_gates * size) if bias else None
    return gates, states, weights, bias, rng.random((steps, items, 1)) < 0.7 if masked else None, *options


def _recurrence_backward(rng, forward, n_gates, n_states, n_kept, n_grads, *sizes):
    gates, states, weights, bias, active, *options = _recurrence(rng, n_gates, n_kept, *sizes)
    KERNELS[forward].reference(gates, states, weights, bias, active, *options)
    grad = rng.standard_normal((n_states, *states.shape[1:]))
    poisoned = np.full((n_grads, *gates.shape), np.nan)
    return grad, gates, states, weights, active, poisoned, grad[:, -1].copy(), *options


ROWS = [(1,), (7,), (3, 5), (1, 1), (2, 3, 7), (0, 4), (131, 1031)]
SMALL_PRODUCTS = [(1, 1, 1), (3, 5, 2), (0, 3, 2), (3, 0, 2), (3, 2, 0)]
LARGE_PRODUCTS = [(1031, 70, 67), (2, 300, 500), (7, 600, 700), (67, 70, 1031), (2100, 3, 70), (70, 4000, 70)]
GROUPS = [([1], 1, 1), ([0, 3], 5, 2), ([200, 0, 31, 500], 40, 64), ([700, 90], 96, 160)]
TOKENS = [(1, 1, 1), (5, 2, 3), (0, 2, 3), (300, 3, 130)]
TWO_FLAGS = [*itertools.product((False, True), (False, True))]
ANY = [(), *ROWS, (2, 0, 3), (65_537,), (140_000,)]
# steps, items, hidden size; 2 and 32 items and 480 terms of a sum are where the CPU's version turns
RECURRENCES = [
    (*sizes, bias, masked)
    for sizes in [(1, 1, 1), (3, 2, 5), (0, 2, 3), (2, 0, 3), (2, 33, 3), (2, 3, 23), (2, 2, 500), (3, 16, 32)]
    for bias, masked in [(True, False), (False, True)]
]
ELMAN = [(*sizes, relu) for sizes in RECURRENCES for relu in (True, False)]
LOGITS = [(1, 1), (1, 5), (7, 3), (131, 1031), (3, 70_001), (7, 3, 0.3), (131, 1031, 0.1)]  # and smoothing

# name -> how to draw its arguments, and the sizes to draw them in
CASES = {
    "softmax": (_rows, [*itertools.product(ROWS, (False, True))]),
    "softmax_backward": (_softmax_backward, [(shape,) for shape in ROWS]),
    "log_softmax": (_rows, [(shape,) for shape in ROWS]),
    "swiglu": (_rows, [((*shape, 2 * n),) for shape in ((), (3,), (2, 0), (2, 5), (700,)) for n in (1, 17, 500)]),
    "swiglu_backward": (
        lambda rng, shape, n: (rng.standard_normal((*shape, n)), 9 * rng.standard_normal((*shape, 2 * n))),
        [(shape, n) for shape in ((), (3,), (2, 0), (2, 5), (700,)) for n in (1, 17, 500)],
    ),
    "gelu": (_rows, [(shape,) for shape in ANY]),
    "gelu_with_derivative": (_rows, [(shape,) for shape in ANY]),
    "gelu_backward": (_gelu_backward, [(shape, knows) for shape in ANY for knows in ("x", "slope")]),
    "relu_squared": (_rows, [(shape,) for shape in ANY]),
    "exact_gelu": (_rows, [(shape,) for shape in ANY]),
    "exact_gelu_backward": (_two, [(shape,) for shape in ANY]),
    "sum_squares": (_rows, [(shape,) for shape in ANY]),
    "matmul_operand": (_rows, [((2, 3), "float32")]),
    "to_compute_dtype": (_rows, [((2, 3), "float32")]),
    "matmul_operand_and_sums": (_rows, [((2, 3), "float32"), ((70_001, 5), "float32")]),
    "multiply": (_two, [(shape,) for shape in [*ANY, (3, 70_001)]]),
    "add": (_two, [(shape,) for shape in [*ANY, (8, 70_001)]]),
    "sigmoid": (_rows, [(shape,) for shape in ANY]),
    "batched_matmul": (
        _batched_matmul,
        [((3,), 2, 4), ((2, 3), 4, 5), ((0, 2), 3, 4), ((2, 1, 3), 0, 2), ((7, 33), 40, 65), ((300, 40), 41, 42)],
    ),
    "matmul": (_matmul, [(*sizes, bias) for sizes in [*SMALL_PRODUCTS, *LARGE_PRODUCTS] for bias in (True, False)]),
    "add_matmul": (_add_matmul, [*SMALL_PRODUCTS, (1031, 7, 48), (600, 100, 64), (70, 130, 256)]),
    "quantized_matmul": (
        _quantized_matmul,
        [
            (*sizes, kind, transposed, bias)
            for kind, transposed in [("int8", True), ("int8", False), ("float16", True), ("bfloat16", True)]
            for sizes in [*SMALL_PRODUCTS, (16, 70, 67), (1, 300, 1031)]
            for bias in (True, False)
        ]
        + [(140, 37, 70, "int8", True, True)],
    ),
    "route": (
        _route,
        [
            (1, 1, False, 1),
            (0, 8, False, 3),
            *((n, 8, corrected, 3, normalized, True) for n in (1, 16) for corrected, normalized in TWO_FLAGS),
            *((40, 8, False, 8, normalized, sigmoid) for normalized, sigmoid in TWO_FLAGS),
            *((7, 8, corrected, 3, True, sigmoid, 4, 2, 1.7) for corrected, sigmoid in TWO_FLAGS),
            (3, 70, False, 70, False, False, 1, 1, 1.7),
        ],
    ),
    "mix_swiglu_experts": (_mix_experts, [(1, 1, 1, 1), (1, 48, 33, 3), (3, 5, 4, 2), (0, 3, 2, 1)]),
    "grouped_matmul": (_grouped, GROUPS),
    "grouped_weight_gradients": (_grouped_gradients, GROUPS),
    "sum_by_token": (_sum_by_token, [(*sizes, weighted) for sizes in TOKENS for weighted in (False, True)]),
    "sum_by_token_backward": (_sum_by_token_backward, TOKENS),
    "sum_rows": (_rows, [((1, 1),), ((7, 3),), ((0, 4),), ((1031, 131),), ((3, 70_001),)]),
    "layer_norm": (_layer_norm, [*itertools.product(ROWS, (True, False), (True, False))]),
    "layer_norm_backward": (_layer_norm_backward, [*itertools.product(ROWS, (True, False))]),
    "embedding_backward": (
        _embedding_backward,
        [(1, 1, 1), (7, 5, 3), (100, 3, 2), (5, 1000, 1), (0, 4, 3), (64, 64, 7), (100, 7, 70), (1000, 9, 130)],
    ),
    "add_at": (_add_at, [(1, 1, 1), (7, 5, 3), (100, 3, 2), (5, 1000), (0, 4, 3), (64, 64, 7, 2), (1000, 9, 130)]),
    "cross_entropy": (_cross_entropy, LOGITS),
    **attention_cases.CASES,
    "apply_rope": (_rotate, [(1, 1, 1, 2), (2, 5, 3, 4), (1, 0, 2, 6)]),
    "orthogonalize": (_rows, [((1, 1, 1),), ((3, 4, 4),), ((2, 3, 7),), ((2, 7, 3),), ((0, 3, 3),), ((5, 70, 70),)]),
    "adamw": (
        _adamw,
        [((1,), 1, 0.0), ((7, 3), 1, 0.1), ((65_539,), 5, 0.1), ((0,), 1, 0.1), ((), 2, 0.1), ((300, 500), 1000, 0.0)],
    ),
    "project": (
        lambda rng, shape, n, bias: (
            rng.standard_normal(shape),
            rng.standard_normal((shape[-1], n)),
            rng.standard_normal(n) if bias else None,
            np.full((*shape[:-1], n), np.nan),
        ),
        [((2, 3, 5), 7, True), ((40, 33, 70), 65, False), ((0, 3, 5), 2, True)],
    ),
    "rnn": (_recurrence, [(1, 1, *sizes) for sizes in ELMAN]),
    "rnn_backward": (_recurrence_backward, [("rnn", 1, 1, 1, 1, *sizes) for sizes in ELMAN]),
    "gru": (_recurrence, [(3, 2, *sizes) for sizes in RECURRENCES]),
    "gru_backward": (_recurrence_backward, [("gru", 3, 1, 2, 2, *sizes) for sizes in RECURRENCES]),
    "lstm": (_recurrence, [(4, 3, *sizes) for sizes in RECURRENCES]),
    "lstm_backward": (_recurrence_backward, [("lstm", 4, 2, 3, 1, *sizes) for sizes in RECURRENCES]),
}
# which arguments they write
IN_PLACE = {
    "add_matmul": slice(0, 1),
    "attention_backward": slice(-3, None),
    "row_attention_backward": slice(-3, None),
    "adamw": slice(0, 4),
    "add_at": slice(0, 1),
    "project": slice(3, 4),
    **dict.fromkeys(("rnn", "gru", "lstm"), slice(0, 2)),
    **dict.fromkeys(("rnn_backward", "gru_backward", "lstm_backward"), slice(5, 7)),
}
# helpers, and what draws
NOT_OPS = {"run_independent", "run_over_batch", "prepare_matrix", "run_batch_parallel", "dropout_mask", "empty"}
NOT_OPS |= {"new_recorder", "compute_in_chunks"}

all_cases = pytest.mark.parametrize(
    ("name", "size"),
    [pytest.param(name, size, id=f"{name}-{size}") for name, (_, sizes) in CASES.items() for size in sizes],
)


# -------------------------------------------------------------------- running a kernel
def contiguous(array: np.ndarray) -> np.ndarray:
    return np.array(array, order="C")


def strided(array: np.ndarray) -> np.ndarray:
    """Return the same values with NaN-filled gaps between elements and rows in reverse order."""
    if not array.ndim:
        return array.copy()
    gap = np.nan if array.dtype.kind == "f" else 10**9
    view = np.full((*array.shape[:-1], 2 * array.shape[-1]), gap).astype(array.dtype)[..., ::2][::-1]
    view[...] = array
    return view


def draw(name: str, size: tuple, dtype: type, layout=contiguous) -> list:
    make, _ = CASES[name]
    arguments = make(np.random.default_rng(3), *size)
    arguments = [np.asarray(a) if isinstance(a, np.generic) else a for a in arguments]
    return [
        layout(a.astype(dtype) if a.dtype.kind == "f" else a) if isinstance(a, np.ndarray) else a for a in arguments
    ]


def outputs(name: str, kernel, arguments: list) -> list[np.ndarray]:
    """Return the outputs of the kernel; check that its other inputs are unchanged."""
    written = arguments[IN_PLACE[name]] if name in IN_PLACE else []
    read = [(a, a.copy()) for a in arguments if isinstance(a, np.ndarray) and not any(a is w for w in written)]
    result = kernel(*arguments)
    for array, before in read:
        if not (name == "adamw" and array is arguments[1]):
            np.testing.assert_array_equal(array, before)
    if name in IN_PLACE:
        assert result is None
        return written
    return list(result) if isinstance(result, tuple) else [result]


def assert_close(name: str, actual: list, expected: list, dtype: type) -> None:
    tolerance = {np.float64: 1e-11, np.float32: 3e-4}[dtype]
    assert len(actual) == len(expected)
    for result, reference in zip(actual, expected):
        if result is None and name == "gelu_with_derivative" and reference is expected[1]:  # it is found again from x
            continue
        if reference.dtype.kind == "i":
            np.testing.assert_array_equal(result, reference)
            continue
        assert result.dtype == dtype and np.shape(result) == np.shape(reference)
        scale = max(1.0, float(np.abs(reference).max(initial=0, where=np.isfinite(reference))))
        # int8 products round x to 15 bits of its largest number, which counts when a sum is near 0
        absolute = tolerance * scale / (1 if name == "quantized_matmul" else 10)
        np.testing.assert_allclose(result, reference, tolerance, absolute, err_msg=name)


# -------------------------------------------------------------------- tests
def test_every_kernel_is_exported_and_has_a_case():
    assert set(KERNELS) - NOT_OPS == set(CASES)
    homes = [kernels, *(import_module(f"tricycle.kernels.{file.name}") for file in iter_modules(kernels.__path__))]
    found = {name: x for home in homes for name, x in vars(home).items() if isinstance(x, Kernel)}
    assert found.pop("dequantize_blocks") not in KERNELS.values()  # takes bytes: test_ggml_quantization.py
    assert found.pop("quantized_attention") not in KERNELS.values()  # takes no arrays: test_quantized_heads.py
    assert found.pop("ragged_attention") not in KERNELS.values()  # takes lists: test_ragged_attention.py
    assert found.pop("run_sublayers") not in KERNELS.values()  # takes tuples: test_sublayers.py
    assert found.pop("to_float32") not in KERNELS.values()  # takes few bits: test_quantized.py
    assert found.pop("round_float32") not in KERNELS.values()  # writes few bits: test_quantized.py
    assert found == KERNELS


@all_cases
def test_providers_match_the_reference_in_float64(name, size):
    expected = outputs(name, KERNELS[name].reference, draw(name, size, np.float64))
    for layout, dtype in ((contiguous, np.float32), (contiguous, np.float64), (strided, np.float32)):
        actual = outputs(name, KERNELS[name], draw(name, size, dtype, layout))
        assert_close(name, actual, expected, dtype)


@pytest.mark.parametrize("name", sorted(set(registered_by(registry.register_numpy)) - NOT_OPS))
def test_results_do_not_depend_on_the_number_of_threads(name, monkeypatch):
    """Compare with three threads and chunks so small that every thread gets some."""
    monkeypatch.setattr(threads, "n_threads", lambda: 3)
    monkeypatch.setattr(chunks, "CHUNK_SIZE", 64)
    monkeypatch.setattr(attention_blocks, "KEY_BLOCK", 96)
    monkeypatch.setattr(matmul_plan, "MIN_SHARED_WORK", 0)
    monkeypatch.setattr(cpu.attention, "MAX_BATCHED_SCORES", 0)
    for size in CASES[name][1]:
        expected = outputs(name, KERNELS[name].reference, draw(name, size, np.float64))
        for _ in range(2):
            actual = outputs(name, KERNELS[name], draw(name, size, np.float64))
            assert_close(name, actual, expected, np.float64)


@all_cases
def test_reference_keeps_float32_and_accepts_any_layout(name, size):
    expected = outputs(name, KERNELS[name].reference, draw(name, size, np.float64))
    with use_reference():
        actual = outputs(name, KERNELS[name], draw(name, size, np.float32, strided))
    assert_close(name, actual, expected, np.float32)


@pytest.mark.gpu
@all_cases
@pytest.mark.parametrize("plain", [False, True])
def test_gpu_matches_the_reference(name, size, plain):
    cupy = pytest.importorskip("cupy")
    if name == "quantized_matmul":
        pytest.skip("for CPUs alone")
    expected = outputs(name, KERNELS[name].reference, draw(name, size, np.float64))
    arguments = [cupy.asarray(a) if isinstance(a, np.ndarray) else a for a in draw(name, size, np.float32)]
    kernel = KERNELS[name].reference if plain else KERNELS[name]
    result = kernel(*arguments)
    actual = arguments[IN_PLACE[name]] if name in IN_PLACE else list(result) if isinstance(result, tuple) else [result]
    assert_close(name, [None if a is None else cupy.asnumpy(a) for a in actual], expected, np.float32)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("shift", [-1e4, -70.0, 0.0, 70.0, 1e4])
def test_cross_entropy_of_shifted_logits(shift):
    logits, labels, weights = draw("cross_entropy", (40, 30), np.float64)
    logits[::2] += shift
    expected = kernels.cross_entropy.reference(logits, labels, weights)
    actual = kernels.cross_entropy(logits, labels, weights)
    alone, nothing = kernels.cross_entropy(logits, labels, weights, 0.0, False)
    assert nothing is None
    for result, reference in zip([*actual, alone], [*expected, expected[0]]):
        np.testing.assert_allclose(result, reference, 1e-9, 1e-13)


# -------------------------------------------------------------------- helpers of recurrence
@pytest.fixture
def two_threads(monkeypatch):
    monkeypatch.setattr(threads, "n_threads", lambda: 2)


def test_arrays_are_multiplied_by_prepared_matrices():
    left, matrix, right = normal(7, 5), normal(5, 3, seed=1), normal(7, 3, seed=2)
    prepared = recurrent.prepare_matrix(matrix)
    np.testing.assert_array_equal(left @ prepared, left @ matrix)
    np.testing.assert_array_equal(right @ prepared.T, right @ matrix.T)


@pytest.mark.parametrize("n_items", [1, cpu.recurrence.ITEMS + 1])
@pytest.mark.parametrize("plain", [True, False])
def test_batch_parallel_runs_steps_in_order(two_threads, n_items, plain):
    pieces, done = [(slice(i, i + 1), slice(0, n_items)) for i in range(20)], []

    def then(piece):
        assert ("first", piece[0].start) in done
        done.append(("then", piece[0].start))

    with use_reference() if plain else nullcontext():
        recurrent.run_batch_parallel(
            np.ones((20, n_items, 1)), pieces, lambda piece: done.append(("first", piece[0].start)), then
        )
    for name in ("first", "then"):
        assert [number for step, number in done if step == name] == list(range(20))


@pytest.mark.parametrize("which", [0, 1])
def test_error_in_batch_parallel_stops_it(two_threads, which):
    def dies(piece):
        raise ArithmeticError("broken")

    functions = [lambda piece: None, lambda piece: None]
    functions[which] = dies
    with pytest.raises(ArithmeticError, match="broken"):
        recurrent.run_batch_parallel(np.ones((9, 1, 1)), [(slice(i, i + 1), slice(0, 1)) for i in range(9)], *functions)


# -------------------------------------------------------------------- arguments that CPU providers decline
X, EMPTY, HALF = np.ones((4, 6)), np.ones((0, 6)), np.ones((4, 6), np.float16)
WEIGHTS = QuantizedMatrix.quantize(X, "float16", True)
STEP = (1, 0.1, (0.9, 0.99), 1e-8, 0.0)
DECLINED = [
    (cpu.quantized.quantized_matmul, (X.T, WEIGHTS), None),
    (cpu.quantized.quantized_matmul, (X, WEIGHTS.T), "not transposed"),
    (cpu.quantized.quantized_matmul, (HALF, WEIGHTS), None),
    (cpu.quantized.quantized_matmul, (EMPTY, WEIGHTS), "empty"),
    (cpu.normalisation.layer_norm_backward, (X, X, X[0], X[:, :1], X[:, :1], True), None),
    (cpu.normalisation.layer_norm_backward, (EMPTY, EMPTY, X[0], EMPTY, EMPTY, True), "empty"),
    (cpu.losses.cross_entropy, (X, np.zeros(4, int), X[:, 0]), None),
    (cpu.losses.cross_entropy, (EMPTY, np.zeros(0, int), EMPTY[:, 0]), "empty"),
    (cpu.recurrence.run_batch_parallel, (X[None], [(slice(1), slice(4))] * 2, print, print), None),
    (cpu.recurrence.run_batch_parallel, (X[None], [(slice(1), slice(4))], print, print), "fewer than two pieces"),
    (cpu.recurrence.run_batch_parallel, (np.ones((1, 33, 1)), [], print, print), "more than 32 items"),
    (cpu.attention.run_over_batch, (X, print), None),
    (cpu.attention.run_over_batch, (X[:1], print), "fewer items than threads"),
    (cpu.chunkwise.multiply, (X, np.ones(())), None),
    (cpu.chunkwise.multiply, (X[:1], X[:1]), "too few"),
    (cpu.chunkwise.add, (X, X.T.copy().T, X), None),
    (cpu.chunkwise.softmax, (X,), None),
    (cpu.tables.add_at, (X, (slice(None), np.array([1, 1])), X[:, :2]), None),
    (cpu.tables.add_at, (X, (slice(1), np.array([1, 1])), X[:1, :2]), "after whole axes"),
    (cpu.tables.add_at, (X, (np.array([1]), np.array([1])), X[0, :1]), "after whole axes"),
    (cpu.tables.add_at, (X, X > 0, X[X > 0]), "whole numbers"),
    (cpu.chunkwise.softmax, (X.reshape(-1),), "no axis to divide"),
    (cpu.matrices.batched_matmul, (X[None], X.T[None]), None),
    (cpu.matrices.batched_matmul, (X[None], HALF.T[None]), "16 bits"),
    (cpu.matrices.batched_matmul, (EMPTY[None], X.T[None]), "empty"),
    (cpu.optimisers.adamw, (X, X, X, X, *STEP), None),
    (cpu.optimisers.adamw, (X.T, X.T.copy(), X.T, X.T, *STEP), None),
    (cpu.optimisers.adamw, (X, X, X, X.T.copy().T, *STEP), "in the same order"),
    (cpu.optimisers.adamw, (X, HALF, X, X, *STEP), "16 bits"),
]


@pytest.mark.parametrize(("version", "arguments", "reason"), DECLINED)
def test_cpu_providers_decline_with_a_reason(version, arguments, reason, two_threads, monkeypatch):
    monkeypatch.setattr(cpu.chunkwise, "CHUNK_SIZE", 12)
    if reason is None:
        assert version.decline_reason(*arguments) is None
    else:
        assert re.search(reason, version.decline_reason(*arguments))
        assert version(*arguments) is NotImplemented


# -------------------------------------------------------------------- extreme values
# not those between e^-104 and e^-87, whose sigmoids are denormal: faster versions take them for 0
ENDS = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 3e38, -3e38, 1e-45, 86.0, -86.0, 200.0, -1e5]
ACTIVATIONS = {
    "gelu": lambda pairs: kernels.gelu(pairs),
    "gelu_backward": lambda pairs: kernels.gelu_backward(np.ones_like(pairs), pairs, None),
    "sigmoid": lambda pairs: kernels.sigmoid(pairs),
    "relu_squared": lambda pairs: KERNELS["relu_squared"](pairs),
    "swiglu": lambda pairs: kernels.swiglu(pairs),
    "swiglu_backward": lambda pairs: kernels.swiglu_backward(np.ones_like(pairs[:, :1]), pairs),
    "softmax": lambda pairs: kernels.softmax(pairs),
    "softmax1": lambda pairs: kernels.softmax(pairs, True),
    "softmax of one row": lambda pairs: np.concatenate([kernels.softmax(row[None]) for row in pairs[:196]]),
    "softmax1 of one row": lambda pairs: np.concatenate([kernels.softmax(row[None], True) for row in pairs[:196]]),
    "log_softmax": lambda pairs: kernels.log_softmax(pairs),
    "multiply": lambda pairs: kernels.multiply(pairs, pairs[:, ::-1].copy()),
    "add": lambda pairs: kernels.add(pairs, pairs[:, ::-1].copy()),
}


@pytest.mark.parametrize("n_copies", [1, 400], ids=["small", "large"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_providers_match_the_reference_on_extreme_values(name, dtype, n_copies):
    """Test infinity, NaN, overflow and zeros; large arrays use compiled loops."""
    pytest.importorskip("ml_dtypes")
    with np.errstate(all="ignore"):
        pairs = np.array([*itertools.product(ENDS, ENDS)] * n_copies).astype(np.dtype(dtype))
        found = ACTIVATIONS[name](pairs)
        with use_reference():
            expected = ACTIVATIONS[name](pairs)
        both = zip(found, expected) if isinstance(found, tuple) else [(found, expected)]
        for actual, reference in both:
            np.testing.assert_allclose(actual.astype(np.float64), reference.astype(np.float64), 0.01, 1e-30)
