"""Matrix products and conversions with oneDNN against float64; fallbacks where it is unavailable."""

import math
import re
import warnings
from dataclasses import replace

import numpy as np
import pytest
from implementations import registered_by, replace_implementations

from tricycle import kernels
from tricycle.blocks import MLPBlock
from tricycle.configs import DebugConfig, GPTConfig
from tricycle.kernels import muon
from tricycle.kernels.explanation import UNAVAILABLE
from tricycle.kernels.quantized import QuantizedMatrix
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.tensor import to_tensor
from tricycle_accelerators import chunks, cpu, libraries, matmul_plan, registry, spin_threads, threads
from tricycle_accelerators import onednn as table
from tricycle_accelerators.onednn import library as onednn
from tricycle_accelerators.onednn import matrices
from tricycle_accelerators.onednn.optimisers import orthogonalize
from tricycle_accelerators.onednn.quantized import quantized_matmul

USABLE = pytest.mark.skipif(onednn.unavailable_reason() is not None, reason=str(onednn.unavailable_reason()))


def rounded(x: np.ndarray) -> np.ndarray:
    """Round to the nearest bfloat16 and return float64."""
    return x.astype(onednn.bfloat16()).astype(np.float64)


def distance(actual: np.ndarray, expected: np.ndarray) -> float:
    """Return the norm of the difference relative to the norm of `expected`."""
    return float(np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-30))


@pytest.fixture
def many_threads(monkeypatch):
    """Use three threads and small chunks."""
    monkeypatch.setattr(threads, "n_threads", lambda: 3)
    monkeypatch.setattr(chunks, "CHUNK_SIZE", 1024)


# -------------------------------------------------------------------- conversion
@USABLE
def test_bfloat16_conversion_rounds_like_ml_dtypes():
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    ties = (np.arange(2**16, dtype=np.uint32) << 16) + 0x8000  # half-way between two neighbours
    x = np.concatenate([bits, ties, ties - 1, ties + 1]).view(np.float32)
    with np.errstate(all="ignore"):
        actual, expected = kernels.matmul_operand(x, "bfloat16"), x.astype(onednn.bfloat16())
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(x))
    normal = np.abs(x) >= np.finfo(np.float32).smallest_normal
    same = actual.view(np.uint16) == expected.view(np.uint16)
    assert same[normal & ~np.isnan(x)].all()
    # The processor's conversion instruction flushes subnormal numbers to zero.
    tiny = ~normal & ~np.isnan(x)
    assert (same | (actual.astype(np.float64) == 0))[tiny].all()


@USABLE
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7, 5), (0, 3), (2, 3, 4), (1000, 300)])
def test_operands_keep_shape_and_layout(shape):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    for array in (x, x.T, x[::-1] if x.ndim else x):
        found = kernels.matmul_operand(array, "bfloat16")
        np.testing.assert_array_equal(found.astype(np.float64), rounded(array))
    if len(shape) == 2 and min(shape) > 1:
        assert kernels.matmul_operand(x.T, "bfloat16").flags.f_contiguous
    found = kernels.matmul_operand(x, "bfloat16")
    assert kernels.matmul_operand(found, "bfloat16") is found
    assert kernels.matmul_operand(x, "float32") is x
    assert kernels.matmul_operand(x, "tf32") is x


@USABLE
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (7, 5), (700, 30), (3001, 70)])
def test_matmul_operand_and_sums_converts_and_sums_over_rows(many_threads, shape):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    calls = [(kernels.matmul_operand_and_sums, array) for array in (x, np.asfortranarray(x), x[::-1])]
    calls += [(matrices.matmul_operand_and_sums, x)] * bool(x.size)  # Numba converts large arrays
    for convert, array in calls:
        found, sums = convert(array, "bfloat16")
        np.testing.assert_array_equal(found.astype(np.float64), rounded(array))
        assert sums.dtype == np.float32
        np.testing.assert_allclose(sums, array.astype(np.float64).sum(axis=0), 1e-5, 1e-4)


# -------------------------------------------------------------------- products
SIZES = [(1, 1, 1), (3, 5, 7), (1, 64, 300), (300, 64, 1), (130, 33, 65), (600, 384, 513), (64, 3000, 96)]
SIZES += [(0, 3, 4), (3, 0, 4), (3, 4, 0)]


@USABLE
@pytest.mark.parametrize("wide", [False, True], ids=["by oneDNN", "in float32"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("layout", ["plain", "a transposed", "b transposed", "both transposed", "slices", "reversed"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_bfloat16_matmul_matches_float64(many_threads, monkeypatch, wide, size, layout, with_bias):
    machine = matmul_plan.Machine("GenuineIntel" if wide else "AuthenticAMD", frozenset(), "openblas", frozenset())
    monkeypatch.setattr(matmul_plan, "this_machine", lambda: machine)
    monkeypatch.setattr(matrices, "UPCAST_TERMS", 700)
    n_rows, n_inner, n_columns = size
    rng = np.random.default_rng(1)

    def draw(rows: int, columns: int, transposed: bool) -> np.ndarray:
        if layout == "slices":
            return rng.standard_normal((rows, columns + 3)).astype(onednn.bfloat16())[:, 1 : columns + 1]
        if layout == "reversed":
            return rng.standard_normal((rows, 2 * columns)).astype(onednn.bfloat16())[::-1, ::2]
        shape = (columns, rows) if transposed else (rows, columns)
        matrix = rng.standard_normal(shape).astype(onednn.bfloat16())
        return matrix.T if transposed else matrix

    a = draw(n_rows, n_inner, layout in ("a transposed", "both transposed"))
    b = draw(n_inner, n_columns, layout in ("b transposed", "both transposed"))
    bias = rng.standard_normal(n_columns).astype(np.float32) if with_bias else None
    expected = a.astype(np.float64) @ b.astype(np.float64) + (0 if bias is None else bias)
    poisoned = np.full((n_rows, n_columns + 2), np.nan, np.float32)
    whole = np.full((n_rows, n_columns), np.nan, np.float32)
    outs = [None, poisoned[:, 1:-1], whole.reshape(n_columns, n_rows).T, whole[::-1]]
    for out in outs:
        actual = kernels.matmul(a, b, bias, out)
        assert actual.dtype == np.float32
        assert out is None or actual is out
        np.testing.assert_allclose(actual, expected, 1e-5, 1e-5 * np.sqrt(n_inner))
    assert np.isnan(poisoned[:, [0, -1]]).all()
    small = kernels.matmul(a, b, bias, None, onednn.bfloat16())
    assert small.dtype == onednn.bfloat16()
    np.testing.assert_allclose(small.astype(np.float64), expected, 2**-8, 1e-5 * np.sqrt(n_inner))


@USABLE
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("n_rows", "n_inner", "n_columns"), [(2, 300, 500), (3, 577, 1003), (8, 640, 70), (16, 99, 999)]
)
def test_float32_matmul_of_few_rows_matches_float64(n_rows, n_inner, n_columns, with_bias, many_threads, monkeypatch):
    rng = np.random.default_rng(3)
    a = rng.standard_normal((n_rows, n_inner), np.float32)
    b = rng.standard_normal((n_inner, n_columns), np.float32)
    bias = rng.standard_normal(n_columns, np.float32) if with_bias else None
    expected = a.astype(np.float64) @ b + (0 if bias is None else bias)
    assert matrices.matmul(a, b, bias) is not NotImplemented
    for result in (kernels.matmul(a, b, bias), kernels.matmul(a[::-1], b, bias)[::-1]):
        assert result.dtype == np.float32
        np.testing.assert_allclose(result, expected, 1e-4, 1e-5 * np.sqrt(n_inner))
    results = []
    for until in (0.0, math.inf):  # results are bit-identical with OpenMP threads and without
        monkeypatch.setattr(spin_threads.spin_policy, "until", until)
        results.append(kernels.matmul(a, b))
    np.testing.assert_array_equal(*results)


@USABLE
def test_non_finite_values_propagate():
    a, b = np.ones((4, 40), np.float32), np.ones((40, 4), np.float32)
    a[1, 3], a[2, 5] = np.nan, np.inf
    found = kernels.matmul(*(kernels.matmul_operand(x, "bfloat16") for x in (a, b)))
    assert np.isnan(found[1]).all()
    assert np.isposinf(found[2]).all()
    np.testing.assert_array_equal(found[[0, 3]], 40)


@USABLE
def test_primitive_cache_is_bounded(monkeypatch):
    monkeypatch.setattr(onednn, "N_PRIMITIVES", 4)
    thread = onednn._Thread()
    monkeypatch.setattr(onednn, "_this_thread", lambda: thread)
    for n in range(1, 20):
        a = np.full((n, n), 2, onednn.bfloat16())
        out = np.empty((n, n), np.float32)
        onednn.matmul(a, a, out)
        np.testing.assert_array_equal(out, 4 * n)
    assert thread.primitive.cache_info().currsize == 4


@USABLE
def test_library_error_names_the_failed_call():
    a = np.ones((3, 4), onednn.bfloat16())
    with pytest.raises(RuntimeError, match="dnnl_matmul_primitive_desc_create"):
        onednn.matmul(a, a, np.empty((3, 4), np.float32))
    with pytest.raises(MemoryError, match=r"memory: .*smaller batch"):
        onednn._check("dnnl_primitive_create", 1)


# -------------------------------------------------------------------- declined arguments
@USABLE
@pytest.mark.parametrize(
    ("version", "arguments_of", "reason"),
    [
        (matrices.matmul_operand, lambda x, half: (x, "bfloat16"), None),
        (matrices.matmul_operand, lambda x, half: (x, "float16"), "precision float16"),
        (matrices.matmul_operand_and_sums, lambda x, half: (x, "bfloat16"), None),
        (matrices.matmul_operand_and_sums, lambda x, half: (x, "float32"), "other than bfloat16"),
        (matrices.matmul_operand_and_sums, lambda x, half: (half, "bfloat16"), "float32 alone, got bfloat16"),
        (matrices.matmul_operand_and_sums, lambda x, half: (x[:0], "bfloat16"), "empty"),
        (matrices.matmul_operand_and_sums, lambda x, half: (x[:, ::2], "bfloat16"), "one piece"),
        (matrices.matmul, lambda x, half: (half, half.T), None),
        (matrices.matmul, lambda x, half: (half[:1], half.T, None, None, half.dtype), None),
        (matrices.matmul, lambda x, half: (half, x.T), "other than float32 or bfloat16"),
        (matrices.matmul, lambda x, half: (half, half.T, None, np.empty((16, 16))), "float32 alone, got float64"),
        (matrices.matmul, lambda x, half: (x, x.T.copy()), None),
        (matrices.matmul, lambda x, half: (x[:1], x.T), "fewer than two rows"),
        (matrices.matmul, lambda x, half: (x.T, x), "more than a few rows"),
        (matrices.matmul, lambda x, half: (x, half.T.copy()), "one dtype"),
        (matrices.matmul, lambda x, half: (x, x.T.copy(), None, x @ x.T), "an out or a dtype"),
        (matrices.matmul, lambda x, half: (x[:2], x.T), "small product"),
        (matrices.matmul, lambda x, half: (x, x.T), "by rows"),
        (matrices.matmul, lambda x, half: (x[::-1], x.T.copy()), "one piece"),
        (orthogonalize, lambda x, half: (x[None, :, :16], "bfloat16"), None),
        (orthogonalize, lambda x, half: (x[None],), "other than bfloat16"),
        (quantized_matmul, lambda x, half: (x, QuantizedMatrix(half, None, True)), None),
        (quantized_matmul, lambda x, half: (x, QuantizedMatrix(half.T)), "not transposed"),
        (quantized_matmul, lambda x, half: (x.astype(float), QuantizedMatrix(half, None, True)), "got float64"),
        (quantized_matmul, lambda x, half: (x, QuantizedMatrix.quantize(x, "float16").T), "float16"),
        (quantized_matmul, lambda x, half: (x[:0], QuantizedMatrix(half, None, True)), "empty"),
        (quantized_matmul, lambda x, half: (x, QuantizedMatrix(half[:0], None, True)), "empty"),
    ],
)
def test_unsupported_arguments_are_declined_with_a_reason(version, arguments_of, reason):
    x = np.ones((16, 1024), np.float32)
    arguments = arguments_of(x, x.astype(onednn.bfloat16()))
    if reason is None:
        assert version.decline_reason(*arguments) is None and version(*arguments) is not NotImplemented
    else:
        assert re.search(reason, version.decline_reason(*arguments))
        assert version(*arguments) is NotImplemented


# -------------------------------------------------------------------- orthogonalization
@USABLE
@pytest.mark.parametrize("shape", [(3, 40, 40), (2, 24, 60), (2, 60, 24), (1, 1, 5)], ids=str)
def test_orthogonalize_in_bfloat16_is_near_the_reference(many_threads, shape):
    """The bfloat16 result is near the reference, with bounded singular values; NumPy computes float32."""
    x = np.random.default_rng(11).standard_normal(shape)
    small, expected = x.astype(np.float32), muon.orthogonalize.reference(x)
    actual = muon.orthogonalize(small, "bfloat16")
    assert actual.dtype == np.float32
    assert (actual * expected).sum() > 0.99 * np.linalg.norm(actual) * np.linalg.norm(expected)
    assert np.linalg.norm(actual, 2, axis=(1, 2)).max() < 1.14
    np.testing.assert_allclose(muon.orthogonalize(small, "float32"), expected, 1e-3, 1e-3)


# -------------------------------------------------------------------- models
def gradients_of(config: GPTConfig) -> dict[str, np.ndarray]:
    """Return the loss and the gradients of a new model."""
    model, ids = GPT(config), np.random.default_rng(10).integers(0, config.vocab_size, (2, 3, config.context_window))
    loss = CrossEntropy()(to_tensor(ids[0], dtype=int), model(to_tensor(ids[1], dtype=int)))
    loss.backward()
    assert all(p.dtype == p.grad.dtype == np.float32 for p in model.parameters())
    return {"loss": loss.numpy(), **{name: p.grad.numpy() for name, p in model.named_parameters()}}


@USABLE
@pytest.mark.parametrize("tied", [True, False])
def test_gpt_gradients_in_bfloat16_are_near_float32(tied):
    config = GPTConfig(vocab_size=50, context_window=32, embedding_dim=64, n_heads=2, n_layers=2, tied=tied)
    actual, expected = (gradients_of(replace(config, precision=precision)) for precision in ("bfloat16", "float32"))
    for name in expected:
        assert distance(actual[name], expected[name]) < (1e-3 if name == "loss" else 2e-2), name
    everything = [np.concatenate([g.ravel() for g in gradients.values()]) for gradients in (actual, expected)]
    assert 1e-5 < distance(*everything) < 1e-2


# -------------------------------------------------------------------- fallbacks
@pytest.fixture
def unusable(monkeypatch):
    """Make oneDNN unavailable, as if it were not installed on a processor that it supports."""
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    distribution = onednn.DISTRIBUTION
    caches = (onednn._loaded, onednn._this_thread, cpu.matrices._warn_float32)
    monkeypatch.setattr(onednn, "DISTRIBUTION", "no-such-distribution")
    monkeypatch.setitem(UNAVAILABLE, "onednn", "")  # restored after the test
    for cached in caches:
        cached.cache_clear()
    replace_implementations(monkeypatch, np.ndarray, registered_by(registry.register_numpy))
    yield
    monkeypatch.setattr(onednn, "DISTRIBUTION", distribution)
    for cached in caches:
        cached.cache_clear()


def test_without_onednn_bfloat16_warns_once_and_uses_float32(unusable):
    versions = [version for offered in registered_by(registry.register_numpy).values() for version in offered]
    assert versions and not any(".onednn." in version.__module__ for version in versions)
    with pytest.warns(UserWarning, match=r"bfloat16.*float32.*tricycle-gpt\[bf16\]"):
        found = gradients_of(replace(DebugConfig(), precision="bfloat16"))
    with warnings.catch_warnings(action="error"):
        gradients_of(replace(DebugConfig(), precision="bfloat16"))
    for name, expected in gradients_of(replace(DebugConfig(), precision="float32")).items():
        np.testing.assert_array_equal(found[name], expected)


@USABLE
def test_onednn_takes_precedence_over_threaded_kernels():
    offered = registered_by(registry.register_numpy)
    for name, (version,) in registered_by(table.register).items():
        assert version in offered[name][:-1] and offered[name][-1].__module__.startswith("tricycle_accelerators.cpu.")


def test_float16_on_the_cpu_warns_and_uses_float32():
    cpu.matrices._warn_float32.cache_clear()
    x = np.ones((2, 2), np.float32)
    with pytest.warns(UserWarning, match=r"precision float16: .* float32 .*bfloat16"):
        assert kernels.matmul_operand(x, "float16") is x
    cpu.matrices._warn_float32.cache_clear()


def test_unavailable_reason_names_the_cause(unusable, monkeypatch, tmp_path):
    class Library:
        def __getattr__(self, name):
            call = lambda *arguments: 0x67 if name == "dnnl_get_effective_cpu_isa" else 0
            setattr(self, name, call)
            return call

    def reason() -> str | None:
        onednn._loaded.cache_clear()
        return onednn.unavailable_reason()

    with monkeypatch.context() as patch:
        patch.setattr("sys.platform", "darwin")
        patch.setattr("platform.machine", lambda: "arm64")
        assert "Linux on x86-64" in reason()
    pytest.importorskip("ml_dtypes")
    path = tmp_path / onednn.LIBRARY
    path.write_bytes(b"nothing of use")
    monkeypatch.setattr(libraries, "find_library", lambda *words: path)
    assert f"{onednn.LIBRARY} cannot be loaded" in reason()
    monkeypatch.setattr(onednn.ctypes, "CDLL", lambda path: Library())
    monkeypatch.setattr(onednn.ctypes, "PyDLL", lambda path: Library())
    assert "AVX-512" in reason() and "AMX" in reason()


# -------------------------------------------------------------------- hidden activations
@pytest.mark.parametrize("settings", [{}, {"gated": True, "activation": "swish"}, {"activation": "relu_squared"}])
@pytest.mark.filterwarnings("ignore:precision bfloat16")  # where oneDNN is not installed
def test_mlp_hidden_layer_is_stored_in_bfloat16(settings, rng, monkeypatch):
    """Input and output are float32; result and gradients match float32 within 16-bit precision."""
    mlp = MLPBlock(64, generator=0, **settings)
    x = to_tensor(rng.standard_normal((2, 600, 64)), requires_grad=True)
    grad = to_tensor(rng.standard_normal(x.shape))
    hidden, kind = [], type(mlp.activation)
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: hidden.append(x.dtype) or forward(self, x))
    results = {}
    for precision in ("float32", "bfloat16"):
        mlp.use_precision(precision)
        x.zero_grad()
        mlp.zero_grad()
        y = mlp(x)
        (y * grad).sum().backward()
        results[precision] = [y.array, x.grad.array, *(p.grad.array for p in mlp.parameters())]
    narrow = getattr(mlp.activation, "computes_in_float32", False) and onednn.unavailable_reason() is None
    assert hidden == [np.float32, onednn.bfloat16() if narrow else np.float32]
    for exact, rounded in zip(*results.values()):
        assert rounded.dtype == np.float32
        assert np.abs(rounded - exact).max() < 0.02 * np.abs(exact).max()
