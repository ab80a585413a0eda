"""What Numba compiles, beside the plain versions; `test_kernels.py` has more of these."""

import itertools
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from attention_cases import Sizes, normal
from test_onednn import distance

from benchmarks.avx2 import HASWELL
from tricycle import kernels
from tricycle.kernels import ScoreOptions
from tricycle.kernels import experts as experts_kernels
from tricycle.kernels.experts import Routing
from tricycle_accelerators import compiled, libraries, matmul_plan, threads
from tricycle_accelerators.compiled import __main__ as command
from tricycle_accelerators.compiled import (
    amx_matmul,
    attention,
    elementwise,
    experts,
    loader,
    losses,
    low_rank,
    normalisation,
    optimisers,
    recurrence,
    tables,
    tiled_matmul,
)
from tricycle_accelerators.compiled import compile as ahead
from tricycle_accelerators.compiled.loader import load_loops

numba = pytest.importorskip("numba")
jit, tiles = load_loops("jit"), load_loops("tiles")
needs_amx = pytest.mark.skipif(amx_matmul.unavailable_reason() is not None, reason=str(amx_matmul.unavailable_reason()))
without_long_compilation = pytest.mark.skipif(
    not tiles.HAS_PAIRS and "TRICYCLE_LONG" not in os.environ,
    reason="without instructions for pairs of bfloat16, Numba compiles these loops for 45 seconds: TRICYCLE_LONG=1",
)


FEW_QUERIES = normal(1, 2, 4, 8), normal(1, 5, 2, 8), normal(1, 5, 2, 8)


def test_machine_code_of_other_sources_is_discarded(tmp_path):
    folder = tmp_path / "package" / "loops"
    kept = folder / "__pycache__"
    kept.mkdir(parents=True)
    discard = loader.discard_stale_code.__wrapped__
    sources, code = [folder / "a.py", tmp_path / "package" / "b.py"], [kept / "a.f-1.py311.nbi", kept / "a.f-1.1.nbc"]
    for source in sources:
        source.write_text("x = 1", encoding="utf-8")
    for change in (lambda: None, lambda: sources[0].write_text("x = 12", encoding="utf-8"), sources[1].unlink):
        change()
        for path in code:
            path.touch()
        discard(folder)
        assert not any(path.exists() for path in code)
        code[0].touch()
        discard(folder)
        assert code[0].exists()
    discard(tmp_path / "missing" / "loops")  # as where nothing can be written


def test_compilation_is_announced_once_on_a_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loader, "__file__", str(tmp_path / "loader.py"))
    monkeypatch.setattr(loader, "discard_stale_code", lambda folder: None)
    monkeypatch.setattr(loader, "import_module", lambda name: None)
    announced = "note: Numba compiles kernels for this processor, once, which takes up to a minute\n"
    kept = tmp_path / "__pycache__"
    kept.mkdir()
    for is_terminal, names, expected in (
        (False, ("loops", "jit"), ""),  # as in a log
        (True, ("jit",), ""),  # without loops
        (True, ("loops", "expert_loops"), announced),
        (True, ("attention_loops",), ""),  # which has machine code
    ):
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_terminal=is_terminal: is_terminal, raising=False)
        (kept / "attention_loops.forward-35.py311.nbi").touch()
        loader._announce_compilation.cache_clear()
        for name in names:
            loader.load_loops.__wrapped__(name)
        assert capsys.readouterr().err == expected


def test_loops_are_compiled_where_machine_code_cannot_be_kept():
    """Numba keeps none of functions that no file has, or where it cannot write."""
    add_one = eval("lambda x: x + 1")
    assert jit.compile_loop("i8(i8)")(add_one)(1) == jit.compile_callback("i8(i8)")(add_one).ctypes(1) == 2


@pytest.mark.parametrize(("method", "error"), [("save", OSError("disk full")), ("load", EOFError())])
def test_loops_are_compiled_if_the_disk_is_full_or_a_file_cut_off(method, error, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr(numba.core.caching.IndexDataCacheFile, method, fail)
    assert jit.compile_loop("i8(i8)")(lambda x: x + 1)(1) == 2


def test_all_loops_can_be_compiled_ahead(monkeypatch, capsys):
    sources = [path.read_text(encoding="utf-8") for path in Path(compiled.__file__).parent.glob("*.py")]
    loaded = {name for source in sources for name in re.findall(r'load_loops\("(\w+)"\)', source)}
    helpers = {"jit", "registers", "tiles", "block_rows"}  # which the others import
    assert loaded - helpers == {*ahead.MODULES, *ahead.AMX_MODULES}
    monkeypatch.setattr(ahead, "MODULES", ("loops",))
    monkeypatch.setattr(ahead, "AMX_MODULES", ())
    monkeypatch.setattr(ahead, "ATTENTION", ())
    command.main()
    assert re.fullmatch(r"loops +\d+\.\d s\n", capsys.readouterr().out)


def test_loops_of_attention_for_training_can_be_compiled_ahead(monkeypatch):
    loops = load_loops("attention_loops")
    for function in ahead.ATTENTION:
        calls = []
        monkeypatch.setattr(loops, function, lambda *kind, calls=calls: calls.append(kind))
        assert ahead.compile_loops(function)[0] == function
        kinds = [(dtype, narrow) for narrow in (False, True) for dtype in attention.operand_dtypes(narrow, 4096)]
        assert calls == [(*kind, False) for kind in kinds] and len({narrow for _, narrow in kinds}) == 2


@pytest.mark.parametrize("factor", [None, 0.3, 0.0, np.float32(np.nan)])
def test_adamw_matches_reference(factor):
    """The arrays exceed the minimum size, and their size is not a multiple of the vector length."""
    arrays = [normal(70_001, seed=i) for i in range(3)]
    arrays.append(np.abs(normal(70_001, seed=4)) * 1e-3)
    arrays[1][:5] = 0
    arrays[3][:5] = 0
    expected = [a.astype(np.float64) for a in arrays]
    numbers = 7, 0.01, (0.9, 0.99), 1e-8, 0.1, factor
    assert optimisers.adamw(*arrays, *numbers) is None
    kernels.adamw.reference(*expected, *numbers)
    for result, reference in zip(arrays, expected):
        np.testing.assert_allclose(result, reference, 1e-5, 1e-6)


def test_cross_entropy_with_minus_infinity_logits_matches_reference():
    """Logits of minus infinity get no probability; a row of weight 0 may have infinite loss."""
    logits, labels = normal(300, 400), np.arange(300) % 200
    logits[:, 200:] = -np.inf
    labels[7] = 399
    weights = np.full(300, 1 / 300, np.float32)
    weights[7] = 0
    loss, slope = losses.cross_entropy(logits, labels, weights)
    expected, slopes = kernels.cross_entropy.reference(logits.astype(np.float64), labels, weights)
    np.testing.assert_allclose(loss, expected, 1e-5)
    np.testing.assert_allclose(slope, slopes, 1e-5, 1e-8)
    assert (slope[:, 200:] == 0).all()
    loss_only, no_gradient = losses.cross_entropy(logits, labels, weights, 0.0, False)
    np.testing.assert_allclose(loss_only, expected, 1e-5)
    assert no_gradient is None
    labels[0] = 400
    assert losses.cross_entropy(logits, labels, weights) is NotImplemented


def test_large_exponents_match_reference():
    pairs = np.concatenate([normal(3, 300), np.linspace(-200, 200, 900, dtype=np.float32).reshape(3, 300)], 1)
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(elementwise.swiglu(pairs), kernels.swiglu.reference(pairs), 1e-5, 1e-6)
    arguments = 200 * normal(1, 1, 4, 8), normal(1, 50, 2, 8), normal(1, 50, 2, 8, seed=1), ScoreOptions(1.0, 49), True
    for found, expected in zip(attention.attention(*arguments), kernels.attention.reference(*arguments)):
        np.testing.assert_allclose(found, expected, 1e-5, 1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("off_by_one", [False, True])
def test_attention_of_few_queries_on_a_cache_matches_reference(dtype, window, off_by_one):
    """The last of 4 queries is at the position of the last of 9 keys; the cache has capacity for 20."""
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    cached = normal(2, 1, 20, 2, 8, seed=1).astype(np.dtype(dtype))
    q, k, v = 3 * normal(1, 4, 6, 8), cached[0][:, :9], cached[1][:, :9]
    score_options = ScoreOptions(0.4, 5, window)
    found = attention.attention(q, k, v, score_options, off_by_one)
    expected = kernels.attention.reference(
        q.astype(np.float64), k.astype(np.float64), v.astype(np.float64), score_options, off_by_one
    )
    for actual, reference in zip(found, expected):
        np.testing.assert_allclose(actual, reference, 1e-5, 1e-6)
    one_by_one = [
        attention.attention(
            q[:, t : t + 1], k[:, : 6 + t], v[:, : 6 + t], score_options._replace(offset=5 + t), off_by_one
        )[0]
        for t in range(4)
    ]
    assert np.array_equal(np.concatenate(one_by_one, axis=1), found[0])


def test_norms_sum_in_a_fixed_order():
    """Each partial sum takes every n-th number: a 1 is lost beside 1e8, which other orders would keep.

    LLVM optimizes the norms again for fused sublayers, and could choose another order there.
    """
    n = load_loops("loops").N_PARTIAL_SUMS
    x, gain = np.zeros((1, 64 * n), np.float32), np.ones(64 * n, np.float32)
    x[0, [0, n, 2 * n]] = 1e8, 1, -1e8
    assert normalisation.layer_norm(x, gain, gain, 1e-5, True)[1] == 0
    x[0, ::n] = 1  # each of these is lost beside the square of the first
    x[0, 0] = 8192
    assert normalisation.layer_norm(x, gain, None, 0.0, False)[2] == np.float32(8 * np.sqrt(n) / 8192)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_values_propagate(bad):
    """Sampling detects broken weights by logits that are not finite, so no kernel may hide them."""
    x = normal(1, 64)
    x[0, 37] = bad
    gain = np.ones(64, np.float32)
    assert not np.isfinite(normalisation.layer_norm(x, gain, None, 1e-5, False)[0]).all()
    assert not np.isfinite(normalisation.layer_norm(x, gain, gain, 1e-5, True)[0]).all()
    assert not np.isfinite(elementwise.swiglu(x)).all()
    values = normal(1, 5, 1, 64)
    values[0, 3, 0, 1] = bad
    q, keys = normal(1, 1, 2, 64), normal(1, 5, 1, 64)
    assert not np.isfinite(attention.attention(q, keys, values, ScoreOptions(0.1, 4), False)[0]).all()


def test_numba_is_imported_only_when_a_kernel_needs_it():
    program = """
import sys
import numpy as np
from tricycle import kernels
kernels.matmul(np.ones((2, 2)), np.ones((2, 2)))
assert "numba" not in sys.modules
kernels.swiglu(np.ones((1, 2), np.float32))
assert "numba" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


# -------------------------------------------------------------------- products and recurrent layers
@pytest.mark.parametrize("n_rows", [1, 5, 6, 12, 13, 32])
@pytest.mark.parametrize(("n_terms", "n_columns"), [(1, 1), (7, 31), (300, 33), (300, 64)])
def test_packed_products_match_float64(n_rows, n_terms, n_columns):
    packed_matmul = load_loops("packed_matmul")
    x, matrix = normal(n_rows, n_terms), normal(n_terms, n_columns, seed=1)
    for right in (matrix, np.asfortranarray(matrix)):
        cut = packed_matmul.pack_panels(right)
        bias = normal(len(cut) * packed_matmul.PANEL)
        for steps in (x[None], normal(n_rows, 3, n_terms).swapaxes(0, 1)):
            wide = np.full((len(steps), n_rows, n_columns + 1), np.nan, np.float32)
            packed_matmul.multiply_packed(steps, cut, bias, wide[..., :-1])
            expected = steps.astype(np.float64) @ matrix + bias[:n_columns]
            np.testing.assert_allclose(wide[..., :-1], expected, 1e-4, 1e-4)
            assert np.isnan(wide[..., -1]).all()


# -------------------------------------------------------------------- large products
@pytest.fixture
def large(monkeypatch):
    """Return tiled_matmul.matmul with three threads, without minimum sizes, whatever BLAS is installed."""
    monkeypatch.setattr(tiled_matmul, "_loops", lambda: load_loops("matrix_loops"))
    monkeypatch.setattr(matmul_plan, "MIN_TILED_ROWS", 1)
    monkeypatch.setattr(matmul_plan, "MIN_TILED_WORK", 1)
    monkeypatch.setattr(threads, "n_threads", lambda: 3)
    return tiled_matmul.matmul


@pytest.mark.parametrize("shape", [(3, 1, 16), (8, 70, 48), (133, 769, 1040), (262, 1537, 64), (4096, 20, 384)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_tiled_products_match_float64(large, shape, transposed, with_bias):
    n_rows, n_inner, n_columns = shape
    left, right = normal(n_rows, n_inner + 3)[:, 1:-2], normal(n_inner, n_columns, seed=1)
    bias = normal(n_columns, seed=2) if with_bias else None
    expected = left.astype(np.float64) @ right + (0 if bias is None else bias)
    product = large(left, np.asfortranarray(right) if transposed else right, bias)
    np.testing.assert_allclose(product, expected, 1e-4, 1e-4 * n_inner**0.5)
    wide = np.full((n_rows, n_columns + 1), np.nan, np.float32)
    assert large(left, right, bias, wide[:, :-1]).base is wide
    np.testing.assert_allclose(wide[:, :-1], expected, 1e-4, 1e-4 * n_inner**0.5)
    assert np.isnan(wide[:, -1]).all()


def test_rounding_errors_of_tiled_products_do_not_grow_with_the_sum(large):
    """A single chain of 576 products has a relative error of 4.3e-7."""
    for n_rows, n_inner in ((8, 576), (7, 1536)):
        left, right = normal(n_rows, n_inner), normal(n_inner, 512, seed=1)
        expected = left.astype(np.float64) @ right
        error = large(left, right) - expected
        assert np.sqrt(np.square(error).mean() / np.square(expected).mean()) < 2.2e-7


def test_tiled_products_are_bit_identical_for_any_number_of_threads(large, monkeypatch):
    left, right = normal(301, 1000), normal(1000, 448, seed=1)
    products = []
    for n_threads in (1, 2, 4, 5, 7, 16):
        monkeypatch.setattr(threads, "n_threads", lambda n=n_threads: n)
        products.append(large(left, right))
    assert all((product == products[0]).all() for product in products)


# -------------------------------------------------------------------- mixtures of experts
def test_route_puts_nan_last_and_the_first_of_equal_scores_first():
    logits = normal(16, 6)
    logits[0], logits[1], logits[2] = 0, [1, 3, 1, 3, 2, 2], -np.inf
    for sigmoid in (False, True):
        logits[3] = [np.nan, 1, 2, np.nan, np.inf, 3] if sigmoid else np.nan
        for correction in (None, np.array([0, 0, 1, 0, 0, 0], np.float32)):
            for n_active in (1, 3, 6):
                arguments = logits, Routing(n_active, sigmoid=sigmoid), correction
                with np.errstate(all="ignore"):
                    expected = experts_kernels.route.reference(*arguments)
                for actual, reference in zip(experts.route(*arguments), expected):
                    np.testing.assert_allclose(actual, reference, 1e-6, 1e-7)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (48, 33, 3), (192, 256, 2), (40, 600, 8)])
def test_experts_of_one_token_match_the_reference(sizes, monkeypatch):
    n_channels, size, n_active = sizes
    shapes = [(1, n_channels), (1, n_active), *[(n_channels, 2 * size), (size, n_channels)] * n_active]
    arrays = [np.asfortranarray(normal(*shape, seed=i)) for i, shape in enumerate(shapes)]
    expected = experts_kernels.mix_swiglu_experts.reference(*(array.astype(np.float64) for array in arrays))
    results = []
    for n_threads in (1, 3):
        monkeypatch.setattr(threads, "n_threads", lambda n=n_threads: n)
        results += [experts.mix_swiglu_experts(*arrays) for _ in range(3)]
    np.testing.assert_allclose(results[0], expected, 1e-5, 1e-5 * float(np.abs(expected).max()))
    assert all(np.array_equal(result, results[0]) for result in results)


BIG = normal(300, 400)  # above the minimum sizes
IDS = np.zeros(300, np.int64)
GATES, STATES, WEIGHTS = normal(4, 6, 20), normal(3, 5, 6, 5, seed=1), normal(5, 20, seed=2)
LEFT, RIGHT, TOTAL = normal(8, 32), normal(32, 48), normal(200, 192)
X, U, D = normal(1, 32), np.asfortranarray(RIGHT), np.asfortranarray(normal(24, 32, seed=2))
MANY_QUERIES = normal(1, 20, 4, 8), normal(1, 20, 2, 8), normal(1, 20, 2, 8)


def backward_of(queries: tuple, dtype: type = np.float32) -> tuple:
    q = queries[0]
    return q, *queries, q, normal(1, 4, 20), ScoreOptions(0.3), *(np.empty(array.shape, dtype) for array in queries)


def locked(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.setflags(write=False)
    return array


@pytest.mark.parametrize(
    ("version", "arguments", "phrase"),
    [
        (elementwise.gelu, (BIG[:5],), None),
        (elementwise.gelu, (BIG,), None),
        (elementwise.gelu, (BIG[:20],), "fewer than 8192.*16 rows"),
        (elementwise.gelu_with_derivative, (BIG[:2].astype(np.float64),), "few rows.*float64"),
        (elementwise.gelu_with_derivative, (BIG.astype(np.float64),), "bfloat16, got float64"),
        (elementwise.gelu_backward, (BIG, BIG, None), None),
        (elementwise.gelu_backward, (BIG, BIG, BIG), "slope.*kept"),
        (elementwise.gelu_backward, (BIG[:2], BIG[:2], None), "fewer than 8192"),
        (elementwise.matmul_operand_and_sums, (BIG, "float32"), "products of bfloat16 alone"),
        (elementwise.matmul_operand_and_sums, (BIG[:20], "bfloat16"), "fewer than 8192|onednn"),
        (elementwise.matmul_operand_and_sums, (BIG.astype(np.float64), "bfloat16"), "float32, got float64|onednn"),
        (elementwise.swiglu, (BIG[:3, ::2],), None),
        (elementwise.swiglu, (BIG[0, 0],), "no rows"),
        (elementwise.swiglu_backward, (BIG, BIG), None),
        (elementwise.swiglu_backward, (BIG, BIG.astype(np.float64)), "one dtype.*float64"),
        (elementwise.sum_rows, (BIG.astype(np.float64),), "float32 or bfloat16, got float64"),
        (elementwise.sum_rows, (BIG[0],), "two axes"),
        (elementwise.sum_squares, (BIG,), "fewer than 262144"),
        (elementwise.sum_squares, (np.ones(300_000),), "float32, got float64"),
        (elementwise.sum_squares, (normal(300_000),), None),
        (elementwise.apply_rope, (normal(1, 2, 4, 8), normal(2, 4), normal(2, 4)), None),
        (elementwise.apply_rope, (normal(2, 2, 4, 8), normal(2, 4), normal(2, 4)), "fewer than 8192"),
        (elementwise.apply_rope, (normal(1, 2, 4, 16)[..., ::2], normal(2, 4), normal(2, 4)), "heads in one piece"),
        (elementwise.apply_rope, (normal(1, 2, 4, 8), normal(2, 8)[:, ::2], normal(2, 4)), "cosines and sines"),
        (normalisation.layer_norm, (BIG[:2], BIG[0], None, 1e-5, False), None),
        (normalisation.layer_norm, (BIG, BIG[0], BIG[1], 1e-5, True), None),
        (normalisation.layer_norm, (BIG, BIG[0], BIG[1], 1e-5, False), "bias.*not centred"),
        (normalisation.layer_norm, (BIG, BIG[0], None, 1e-5, True, np.float64), "rows of float32.*float64"),
        (normalisation.layer_norm, (BIG[:2], BIG[0], None, 1e-5, True, np.float64), "results.*float64"),
        (normalisation.layer_norm, (BIG[:2], locked(BIG[0]), None, 1e-5, True), "parameters and statistics"),
        (normalisation.layer_norm_backward, (BIG, BIG, BIG[0], BIG[:, :1].copy(), IDS, True), "statistics of float32"),
        (normalisation.layer_norm_backward, (locked(BIG), BIG, BIG[0], BIG[0], BIG[0], True), None),
        (experts.route, (LEFT, Routing(2)), None),
        (experts.route, (LEFT, Routing(2, n_groups=4, n_active_groups=2)), "all groups"),
        (experts.route, (LEFT, Routing(2), LEFT[0].astype(np.float64)), "a correction of float32"),
        (experts.route, (LEFT, Routing(33)), "at most 32 active"),
        (experts.route, (LEFT, Routing(2), LEFT[0, :31]), "a correction of each"),
        (experts.route, (BIG, Routing(2)), None),
        (experts.route, (BIG[:, :8], Routing(2)), "float32 in one piece"),
        (experts.grouped_matmul, (BIG, [100, 200], *[np.asfortranarray(BIG.T)] * 2), None),
        (experts.grouped_matmul, (LEFT, [8], RIGHT), "fewer than .* multiplications"),
        (experts.grouped_matmul, (BIG, [300], BIG.T.astype(np.float64)), "of float32.*got float64"),
        (experts.grouped_matmul, (BIG, [300, 9], BIG.T, BIG.T), "300 rows.*got 309"),
        (experts.grouped_matmul, (BIG, [300, 0], BIG.T, BIG.T[:, :32]), r"of \(400, 300\).*\(400, 32\)"),
        (experts.grouped_weight_gradients, (BIG, [300, 0], BIG), None),
        (experts.grouped_weight_gradients, (BIG, [300], BIG[:, ::2]), "contiguous rows or columns"),
        (experts.sum_by_token, (BIG, IDS.reshape(150, 2)), None),
        (experts.sum_by_token, (BIG, IDS.reshape(150, 2)[:9]), "places of int64.*one for each row"),
        (experts.sum_by_token, (BIG, IDS.reshape(150, 2), BIG[:150]), "weights of float32.*one for each row"),
        (experts.sum_by_token_backward, (BIG.astype(np.float64), BIG, IDS, IDS), "a gradient of float32"),
        (experts.mix_swiglu_experts, (X, WEIGHTS[:1, :2], U, D, U, D), None),
        (experts.mix_swiglu_experts, (LEFT, LEFT[:, :1], U, D), "one row and one expert.*got 8"),
        (experts.mix_swiglu_experts, (X, WEIGHTS[:1, :0]), "one expert or more.*got 1 rows and 0 matrices"),
        (experts.mix_swiglu_experts, (X, WEIGHTS[:1, :1], U, D.astype(np.float64)), "float32 alone, got float64"),
        (experts.mix_swiglu_experts, (X, WEIGHTS[:1, :1], U.copy("C"), D), "matrices by columns"),
        (experts.mix_swiglu_experts, (X, WEIGHTS[:1, :2], U, D), r"shapes \[\(32, 48\), \(24, 32\), \(32, 48\)"),
        (experts.mix_swiglu_experts, (X, WEIGHTS[:1, :1], U[:, :46], D), r"shapes \[\(32, 48\).*got \[\(32, 46\)"),
        (losses.cross_entropy, (BIG, IDS, BIG[0]), None),
        (losses.cross_entropy, (BIG[:2], IDS, BIG[0]), "fewer than 8192 elements"),
        (tables.embedding_backward, (BIG, IDS, 5), None),
        (tables.embedding_backward, (BIG, IDS.astype(np.int32), 5), "ids of int64, got int32"),
        (optimisers.adamw, (BIG, BIG, BIG, BIG, 1, 0.1, (0.9, 0.9), 1e-8, 0.1), None),
        (optimisers.adamw, (BIG.T, BIG, BIG.T, BIG.T, 1, 0.1, (0.9, 0.9), 1e-8, 0.1), None),
        (optimisers.adamw, (BIG, np.broadcast_to(BIG[0], BIG.shape), BIG, BIG), None),
        (optimisers.adamw, (BIG, locked(BIG), BIG, BIG), "gradient.*not read-only"),
        (optimisers.adamw, (BIG, BIG, BIG, BIG.T), "moments.*alike"),
        (optimisers.adamw, [BIG[:2]] * 4, "fewer than 8192"),
        (optimisers.adamw, [BIG[::-1]] * 4, "moments.*alike"),
        (optimisers.adamw, (BIG, BIG.astype(np.float64), BIG, BIG), "float32 alone, got float64"),
        (attention.attention, (*FEW_QUERIES, ScoreOptions(0.3, 3), False), None),
        (attention.attention, (*FEW_QUERIES, ScoreOptions(0.3, 3), False, BIG), "a mask or a soft-cap"),
        (attention.attention, (*FEW_QUERIES, ScoreOptions(0.3, 1), False), "not at the last keys"),
        (attention.attention, (normal(2, 2, 4, 8), *FEW_QUERIES[1:], ScoreOptions(0.3), False), "one text alone"),
        (attention.attention, (*FEW_QUERIES, ScoreOptions(0.3, 3), False, None, np.float64), "float32, got .*float64"),
        (attention.attention, (*MANY_QUERIES, ScoreOptions(0.3), False), None),
        (attention.attention, (*MANY_QUERIES, ScoreOptions(0.3, 0, None, 2.0), False), "a mask or a soft-cap"),
        (attention.attention, (*MANY_QUERIES, ScoreOptions(0.3, -3), False), "see no key"),
        (attention.attention, (*MANY_QUERIES, ScoreOptions(-1.0), False), "scale.*got -1.0"),
        (attention.attention_backward, backward_of(MANY_QUERIES), None),
        (attention.attention_backward, backward_of(MANY_QUERIES, np.float64), "gradients.*float64"),
        (attention.attention_backward, backward_of(FEW_QUERIES), "fewer than 16 queries"),
        (recurrence.prepare_matrix, (BIG.astype(np.float64),), "float32 alone, got float64"),
        (recurrence.lstm, (GATES, STATES, WEIGHTS, None, None), None),
        (recurrence.rnn, (GATES[:1], STATES[:, :2], WEIGHTS, None, None), "fewer than 16 rows"),
        (recurrence.gru, (GATES[:, :, ::2], STATES, WEIGHTS, None, None), "steps.*one piece"),
        (recurrence.lstm, (GATES, STATES, WEIGHTS.astype(np.float64), None, None), "weights of float32"),
        (recurrence.lstm_backward, (STATES, GATES, STATES, WEIGHTS, None, GATES, STATES), None),
        (recurrence.rnn_backward, (STATES, GATES, STATES, WEIGHTS, None, GATES, locked(STATES), True), "not read-only"),
        (recurrence.project, (GATES, WEIGHTS, None, GATES), "prepare_matrix"),
        (recurrence.run_batch_parallel, (GATES, [], None, None), "fewer than 16 items"),
        (recurrence.run_batch_parallel, (GATES.astype(np.float64), [], None, None), "float32 alone, got float64"),
        (low_rank.add_matmul, (TOTAL, TOTAL[:, :5], TOTAL[:5]), None),
        (low_rank.add_matmul, (LEFT, LEFT[:, :5], LEFT[:5]), "fewer than 8192"),
        (low_rank.add_matmul, (TOTAL, TOTAL, TOTAL), "more than 128 terms"),
        (low_rank.add_matmul, (TOTAL, TOTAL[:, :5].astype(np.float64), TOTAL[:5]), "got float32, float64"),
        (low_rank.add_matmul, (TOTAL.T, TOTAL.T[:, :5], TOTAL.T[:5]), "contiguous rows"),
        (low_rank.add_matmul, (locked(TOTAL), TOTAL[:, :5], TOTAL[:5]), "not read-only"),
        (low_rank.add_matmul, (TOTAL[:, :99], TOTAL[:, :5], TOTAL[:5, :99]), "a multiple of .* columns, got 99"),
        (tiled_matmul.matmul, (LEFT, RIGHT), None),
        (tiled_matmul.matmul, (np.asfortranarray(LEFT), RIGHT), "rows in one piece"),
        (tiled_matmul.matmul, (LEFT, RIGHT[:, :34]), "a multiple of .* columns, got 34"),
        (tiled_matmul.matmul, (LEFT, RIGHT.astype(np.float64)), "float32.*got float32 and float64"),
        (tiled_matmul.matmul, (LEFT, RIGHT, None, None, np.float64), "float32 alone"),
        (tiled_matmul.matmul, (LEFT, RIGHT[:, ::3]), "a right matrix with contiguous rows or columns"),
        (tiled_matmul.matmul, (LEFT, RIGHT, None, np.empty((8, 48), np.float32, "F")), "an out with contiguous rows"),
    ],
)
def test_decline_reasons_name_the_cause(large, version, arguments, phrase):
    reason = version.decline_reason(*arguments)
    assert reason is None if phrase is None else re.search(phrase, reason)
    if phrase is not None:
        assert version(*arguments) is NotImplemented


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_is_added_to_some_columns(dtype):
    total, left, right = normal(301, 96).astype(dtype), normal(301, 5, seed=1), normal(5, 48, seed=2)
    expected = total.astype(np.float64)
    expected[:, 32:80] += left @ right
    right.flags.writeable = False  # as in a mapped file
    assert low_rank.add_matmul(total[:, 32:80], left, right) is None
    unit = 2.0**-8 if dtype == "bfloat16" else 1e-6
    np.testing.assert_allclose(total.astype(np.float64), expected, unit, unit)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("n_rows", [3, 300])
def test_rows_that_are_not_contiguous_give_the_bits_of_a_copy(dtype, n_rows):
    x, grad, gain = *normal(2, n_rows, 160).astype(dtype), normal(80)
    half, half_grad = x[:, 80:], grad[:, :80]
    _, means, scales = normalisation.layer_norm(half.astype(np.float32), gain, None, 1e-5, False)
    calls = [
        (elementwise.gelu, [half]),
        (elementwise.gelu_backward, [half_grad, half, None]),
        (elementwise.swiglu, [half]),
        (elementwise.swiglu_backward, [half_grad[:, :40], half]),
        (elementwise.softmax, [half, False]),
        (elementwise.softmax_backward, [half_grad, half]),
        (normalisation.layer_norm, [half, gain, None, 1e-5, False]),
        (normalisation.layer_norm_backward, [half_grad, half, gain, means, scales, False]),
    ]
    taken = [version.decline_reason(*arguments) is None for version, arguments in calls]
    single = dtype == "float32"
    few = [single, False, single, False, single, False, single, False]
    assert taken == (few if n_rows == 3 else [True] * 4 + [single] * 2 + [True] * 2)
    for version, arguments in itertools.compress(calls, taken):
        copies = [a.copy() if isinstance(a, np.ndarray) else a for a in arguments]
        found, expected = (
            result if isinstance(result, tuple) else (result,) for result in (version(*arguments), version(*copies))
        )
        for array, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(array, other)


# -------------------------------------------------------------------- attention
# items, queries, keys, heads, key heads, head size; score options; whether softmax1
ATTENTION = [
    (Sizes(2, 256, 256, 3, 3, 64), ScoreOptions(0.125, 0), False),
    (Sizes(1, 200, 333, 2, 2, 32), ScoreOptions(0.2, 133), True),
    (Sizes(1, 40, 40, 2, 2, 48), ScoreOptions(0.15, 0), False),
    (Sizes(2, 300, 100, 1, 1, 16), ScoreOptions(0.25), False),
    (Sizes(1, 130, 400, 2, 2, 64), ScoreOptions(0.125, 20), False),
    (Sizes(3, 16, 16, 1, 1, 8), ScoreOptions(0.3, 0), True),
    (Sizes(1, 5, 9, 2, 2, 16), ScoreOptions(0.25, 4), False),
    (Sizes(1, 128, 129, 1, 1, 64), ScoreOptions(0.125, 0), False),
    (Sizes(2, 200, 200, 6, 2, 32), ScoreOptions(0.2, 0), False),
    (Sizes(1, 150, 150, 8, 1, 16), ScoreOptions(0.25), True),
    (Sizes(1, 300, 300, 2, 2, 16), ScoreOptions(0.25, 0, 40), False),
    (Sizes(1, 300, 500, 4, 2, 16), ScoreOptions(0.25, 200, 300), True),
    (Sizes(2, 130, 130, 3, 1, 16), ScoreOptions(0.25, 0, 2), False),
    (Sizes(1, 40, 300, 2, 1, 16), ScoreOptions(0.25, 100, 1000), False),
    # queries positioned behind the last key, as in a block of a block softmax: the window exceeds the number of keys
    (Sizes(2, 20, 8, 2, 1, 16), ScoreOptions(0.25, 0, 20), False),
    (Sizes(1, 150, 70, 2, 2, 16), ScoreOptions(0.25, 100, 200), True),
    (Sizes(1, 130, 64, 4, 2, 16), ScoreOptions(0.25, 64, 2**62), False),
]
DECLINED_ATTENTION = [
    (Sizes(1, 40, 40, 2, 1, 16), ScoreOptions(0.25, 0, None, 2.0), False),
    (Sizes(1, 40, 40, 2, 2, 16), ScoreOptions(0.25, -3), False),
    (Sizes(1, 40, 20, 2, 2, 16), ScoreOptions(0.25, 0, 5), False),
    (Sizes(1, 3, 400, 4, 2, 16), ScoreOptions(0.25, 300, 16, 2.0), True),
]


def heads(rng, sizes: Sizes, scale: float = 1.0, dtype: str = "bfloat16") -> list[np.ndarray]:
    """q, k and v as slices of one packed array."""
    pytest.importorskip("ml_dtypes")
    items, queries, keys, n_heads, key_heads, size = sizes
    packed = rng.standard_normal((items, max(queries, keys), n_heads + 2 * key_heads, size)) * scale
    packed = packed.astype(np.dtype(dtype))
    k, v = packed[:, :keys, n_heads : n_heads + key_heads], packed[:, :keys, n_heads + key_heads :]
    return [packed[:, :queries, :n_heads], k, v]


def attend_both(qkv, score_options, off_by_one, mask=None, narrow=False):
    """Results, logs and gradients of the compiled kernel and of the reference in float64.

    Args:
        narrow: results and gradients have 16 bits, too.
    """
    grad = np.random.default_rng(5).standard_normal(qkv[0].shape)
    dtype = qkv[0].dtype if narrow else np.dtype(np.float32)
    exact = [array.astype(np.float64) for array in qkv]
    actual = kernels.attention(*qkv, score_options, off_by_one, mask, dtype)
    expected = kernels.attention.reference(*exact, score_options, off_by_one, mask)
    poisoned = [np.full(array.shape, np.nan, dtype) for array in qkv]
    kernels.attention_backward(grad.astype(dtype), *qkv, *actual, score_options, *poisoned, mask)
    expected_gradients = [np.full(array.shape, np.nan) for array in qkv]
    kernels.attention_backward.reference(grad, *exact, *expected, score_options, *expected_gradients, mask)
    return [*actual, *poisoned], [*expected, *expected_gradients]


@pytest.mark.parametrize(("sizes", "score_options", "off_by_one"), ATTENTION + DECLINED_ATTENTION, ids=str)
@pytest.mark.parametrize(
    ("dtype", "narrow", "by_parts", "tolerance"),
    [
        ("float32", False, False, 1e-5),
        pytest.param("float32", False, True, 1e-5, marks=needs_amx),
        pytest.param("bfloat16", False, False, 5e-3, marks=without_long_compilation),
        pytest.param("bfloat16", True, False, 1e-2, marks=without_long_compilation),
    ],
)
def test_attention_matches_reference(sizes, score_options, off_by_one, dtype, narrow, by_parts, tolerance, monkeypatch):
    monkeypatch.setattr(attention, "LEAST_KEYS_OF_PARTS", 0 if by_parts else 10**9)
    monkeypatch.setattr(threads, "n_threads", lambda: 3)
    qkv = heads(np.random.default_rng(6), sizes, 1.0, dtype)
    actual, expected = attend_both(qkv, score_options, off_by_one, None, narrow)
    for i, (result, reference) in enumerate(zip(actual, expected)):
        assert result.dtype == (qkv[0].dtype if narrow and i != 1 else np.float32)
        result = result.astype(np.float64)
        finite = np.isfinite(reference)
        assert (np.isneginf(result) == ~finite).all()
        assert distance(result[finite], reference[finite]) < tolerance


@pytest.mark.parametrize("narrow", [False, True])
def test_attention_of_non_contiguous_rows_is_bit_identical(narrow):
    sizes, score_options = Sizes(1, 70, 70, 4, 2, 24), ScoreOptions(0.2, 0)
    qkv = heads(np.random.default_rng(8), sizes, 1.0, "bfloat16" if narrow else "float32")
    strided = [np.repeat(array, 2, axis=3)[..., ::2] for array in qkv]
    for one, other in zip(attend_both(qkv, score_options, False)[0], attend_both(strided, score_options, False)[0]):
        np.testing.assert_array_equal(one, other)
    places = [np.empty((*array.shape[:3], 48), np.float32)[..., ::2] for array in qkv]
    result = attention.attention(*qkv, score_options, False)
    assert attention.attention_backward(result[0], *qkv, *result, score_options, *places) is NotImplemented


def test_attention_cases_are_accepted_or_declined_as_listed():
    """Otherwise test_attention_matches_reference would not test the intended kernel."""
    for accepted, cases in ((True, [case for case in ATTENTION if case[0].queries >= 16]), (False, DECLINED_ATTENTION)):
        for sizes, score_options, _ in cases:
            reason = attention.attention.decline_reason(*heads(np.random.default_rng(6), sizes), score_options, False)
            assert (reason is None) is accepted


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("dtype", "scale"), [("float32", 8.0), *(("bfloat16", scale) for scale in (1e-3, 30.0, 1e4))])
@pytest.mark.parametrize(("n_key_heads", "window"), [(4, None), (1, 20)])
def test_attention_with_tiny_and_huge_scores_matches_reference(dtype, scale, n_key_heads, window, masked, rng):
    """The largest score may be in any block of keys."""
    mask = np.where(rng.random((2, 1, 1, 150)) < 0.5, 0, -np.inf).astype(np.float32) if masked else None
    qkv = heads(np.random.default_rng(7), Sizes(2, 150, 150, 4, n_key_heads, 16), scale, dtype)
    actual, expected = attend_both(qkv, ScoreOptions(0.25, 0, window), False, mask)
    for result, reference in zip(actual, expected):
        finite = np.isfinite(reference)  # but the logs of queries without visible keys
        assert (np.isneginf(result) == ~finite).all()
        assert distance(result[finite], reference[finite]) < 5e-3 or np.abs(reference[finite]).max() < 1e-6


def test_nan_key_affects_only_its_head_and_later_queries():
    q, k, v = normal(1, 40, 2, 8), normal(1, 40, 2, 8), normal(1, 40, 2, 8)
    k[0, 3, 1, 0] = np.nan
    results, _ = attend_both((q, k, v), ScoreOptions(0.5, 0), False)
    for result in results:
        assert not np.isfinite(result).all()
    assert np.isfinite(results[0][:, :3]).all()  # queries before the key
    assert np.isfinite(results[0][:, :, 0]).all()  # and the other head


@needs_amx
@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan, np.finfo(np.float32).max])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_parts_leave_numbers_that_are_not_finite_to_float32(number, which, monkeypatch):
    qkv = [normal(1, 70, 2, 16, seed=seed) for seed in range(3)]
    qkv[which][0, 3, 1, 0] = number
    results = []
    for least in (0, 10**9):
        monkeypatch.setattr(attention, "LEAST_KEYS_OF_PARTS", least)
        with np.errstate(all="ignore"):
            results.append(attend_both(qkv, ScoreOptions(0.5, 0), False)[0])
    for found, expected in zip(*results):
        np.testing.assert_allclose(found, expected, 1e-4, 1e-5)
    if not np.isfinite(number):
        assert not all(np.isfinite(found).all() for found in results[0])


def test_keys_visible_to_no_query_get_zero_gradients():
    found, _ = attend_both(
        heads(np.random.default_rng(9), Sizes(1, 50, 90, 2, 1, 16)), ScoreOptions(0.25, 20, 5), False
    )
    for gradient in found[3:]:
        np.testing.assert_array_equal(gradient[:, :16], 0)
        np.testing.assert_array_equal(gradient[:, 70:], 0)
        assert gradient[:, 16:70].all()


# -------------------------------------------------------------------- tile products
@pytest.mark.nightly_except(2)
@pytest.mark.parametrize("shape", [(4, 16, 1), (64, 64, 64), (12, 48, 7), (8, 112, 33)])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_tile_products_match_float64(shape, add, transposed):
    """Multiply tiles of float32, and of bfloat16 pairs where the processor has them, also for an odd inner size."""

    @numba.njit
    def multiply(left, right, out, add):
        tiles.multiply(left, right, out, add)

    n_rows, n_columns, n_inner = shape
    a, b, initial = normal(n_rows, n_inner), normal(n_inner, n_columns, seed=1), normal(n_rows, n_columns, seed=2)
    left, out = np.asarray(a, order="F" if transposed else "C"), initial.copy()
    multiply(left.T.copy().T if transposed else left, b, out, add)
    np.testing.assert_allclose(out, a.astype(np.float64) @ b + add * initial, 1e-4, 1e-5)
    if not tiles.HAS_BFLOAT or amx_matmul.pairs_unavailable_reason():
        return

    @numba.njit
    def multiply_packed(a, b, like, memory, out, add):
        n_rows, n_steps = len(out), tiles.n_inner_steps(b.shape[0], like)
        tiles.begin_products(like)
        left = tiles.take_zeros(memory, n_rows, tiles.round_up_to_lanes(n_steps), like)
        if transposed:
            scratch = tiles.take_zeros(memory, tiles.round_up_to_lanes(n_steps), n_rows, like)
            tiles.pack_transposed(a, scratch, left)
        else:
            tiles.pack_left(a, left)
        right = tiles.take_zeros(memory, n_steps, b.shape[1], like)
        tiles.multiply(left, tiles.right_operand(b, right), out, add)
        tiles.end_products(like)

    n_whole = tiles.round_up_to_lanes(n_rows)
    memory, bfloat16 = np.full(2**17, 8), pytest.importorskip("ml_dtypes").bfloat16
    kinds = [(np.uint32, [x.astype(bfloat16) for x in (a, b)])] + [(np.int32, [a, b])] * tiles.HAS_AMX
    for kind, operands in kinds:
        out = np.concatenate([initial, np.zeros((n_whole - n_rows, n_columns), np.float32)])
        multiply_packed(a.T.copy() if transposed else a, b, np.zeros(1, kind), memory, out, add)
        exact_a, exact_b = (x.astype(np.float64) for x in operands)
        np.testing.assert_allclose(out[:n_rows], exact_a @ exact_b + add * initial, 1e-4, 1e-5)
        assert not out[n_rows:].any()


def test_operands_without_enough_memory_raise_memory_error():
    @numba.njit
    def take(memory, n_rows, like):
        return tiles.take_zeros(memory, n_rows, 16, like)

    memory, like = np.full(32, 8), np.zeros(1, np.float32)
    assert take(memory, 2, like).shape == (2, 16)
    with pytest.raises(MemoryError):
        take(memory, 2, like)


@pytest.mark.parametrize("shape", [(5, 3), (16, 16), (70, 33)])
def test_pack_right_transposed_matches_numpy_transpose(shape):
    @numba.njit
    def pack(x, scratch, out):
        tiles.pack_right_transposed(x, scratch, out)

    x = normal(*shape)
    wide, long = (-(-n // tiles.LANES) * tiles.LANES for n in shape[::-1])
    out = np.zeros((wide, long), np.float32)
    pack(x, np.zeros((tiles.LANES, wide), np.float32), out)
    np.testing.assert_array_equal(out[: shape[1], : shape[0]], x.T)


def test_bfloat16_operands_are_packed_as_float32():
    """This is the packing for processors without fast products of bfloat16 pairs."""

    @numba.njit
    def pack(x, left, right, right_transposed, scratch):
        tiles.pack_left(x, left)
        tiles.pack_right(x, right)
        tiles.pack_right_transposed(x, scratch, right_transposed)

    x = normal(32, 48).astype(pytest.importorskip("ml_dtypes").bfloat16)
    packed = [np.zeros(shape, np.float32) for shape in ((32, 48), (32, 48), (48, 32))]
    pack(x.view(np.uint16), *packed, np.zeros((tiles.LANES, 48), np.float32))
    for found in (*packed[:2], packed[2].T):
        np.testing.assert_array_equal(found, x.astype(np.float32))


@pytest.mark.parametrize("size", [7, 64, 200])
def test_norms_that_overwrite_their_rows_have_the_same_bits(size):
    """Fused sublayers overwrite them: LLVM vectorizes these loops for other arrays alone."""
    loops, gain, bias = load_loops("loops"), normal(size), normal(size, seed=1)
    for norm, parameters in [(loops.layer_norm, (gain, bias)), (loops.rms_norm, (gain,))]:
        rows, y = normal(3, size, seed=2), np.empty((3, size), np.float32)
        statistics = np.empty((2, 3), np.float32)[2 - len(parameters) :]
        norm(rows, *parameters, 1e-5, y, *statistics)
        norm(rows, *parameters, 1e-5, rows, *statistics)
        np.testing.assert_array_equal(rows, y)


@pytest.mark.parametrize("subtract_mean", [False, True])
def test_bfloat16_norms_match_float64(subtract_mean):
    """Float32 rows with bfloat16 results and gradients; without mean subtraction also bfloat16 rows."""
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    x, grad, gain = normal(1100, 64), normal(1100, 64, seed=1), normal(64, seed=2)
    for dtype in [np.float32] if subtract_mean else [np.float32, bfloat16]:
        rows, slopes = x.astype(dtype), grad.astype(bfloat16)
        y, mean, scale = normalisation.layer_norm(rows, gain, None, 1e-5, subtract_mean, np.dtype(bfloat16))
        expected = kernels.layer_norm.reference(rows.astype(np.float64), gain, None, 1e-5, subtract_mean)
        assert y.dtype == bfloat16
        np.testing.assert_allclose(y.astype(np.float64), expected[0], 2**-8, 1e-6)
        np.testing.assert_allclose(scale, expected[2], 1e-5)
        back = normalisation.layer_norm_backward(slopes, rows, gain, mean, scale, subtract_mean)
        wide = slopes.astype(np.float64), rows.astype(np.float64)
        expected = kernels.layer_norm_backward.reference(*wide, gain, *expected[1:], subtract_mean)
        assert back[0].dtype == dtype
        for result, reference in zip(back, expected):
            np.testing.assert_allclose(result.astype(np.float64), reference, 2**-7, 1e-2)


# -------------------------------------------------------------------- other processors
OLDER_FILES = ("test_kernel_attention.py", "test_vectors.py")
AS_OLDER = """
import numpy as np, pytest
from tricycle_accelerators.compiled import registers
print(registers.LANES, int(pytest.main(["-q", "-p", "no:cacheprovider", "-x", *FILES])))
"""


@pytest.mark.nightly
@pytest.mark.long
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names processors of x86-64")
@pytest.mark.parametrize(
    ("cpu", "features", "lanes", "names"),
    [
        ("haswell", HASWELL, 8, (*OLDER_FILES, "test_quantized_blocks.py")),
        ("x86-64", "+sse,+sse2", 4, OLDER_FILES),
    ],
    ids=["AVX2", "SSE2"],
)
def test_loops_compiled_for_older_processors_pass_their_tests(cpu, features, lanes, names, tmp_path):
    """Run the tests of attention, vector and quantized products with code compiled for processors without AVX-512."""
    files = [str(Path(__file__).with_name(file)) for file in names]
    variables = {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features, "NUMBA_CACHE_DIR": str(tmp_path)}
    code = AS_OLDER.replace("FILES", repr(files))
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **variables}, capture_output=True, text=True, timeout=600
    )
    assert run.stdout.rstrip().endswith(f"\n{lanes} 0"), run.stdout


@pytest.mark.parametrize(("cpu", "found"), [("neoverse-n1", True), ("generic", None)])
def test_dot_products_of_arm_are_found_by_linux(cpu, found, monkeypatch):
    monkeypatch.setattr(jit, "vendor_and_features", lambda: ("", frozenset({"asimd", "asimddp"})))
    monkeypatch.setattr(jit.binding, "get_host_cpu_features", lambda: {"neon": True})
    monkeypatch.setattr(jit.binding, "get_host_cpu_name", lambda: cpu)
    monkeypatch.setattr(numba.config, "CPU_NAME", None)
    assert jit._features().get("dotprod") is found


def test_unloadable_numba_libraries_raise_with_advice(monkeypatch):
    def fail(name):
        raise OSError("Could not find/load shared object file 'libllvmlite.so'. This could mean anything.")

    monkeypatch.setattr("tricycle_accelerators.compiled.loader.import_module", fail)
    with pytest.raises(RuntimeError, match=r"libllvmlite\.so'\): .*memory.*TRICYCLE_KERNELS=-numba"):
        load_loops("no_such_loops")


def resident_kilobytes(library: str) -> int:
    """Return the kB of a library's pages that this process has in memory."""
    mappings = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    found = [mapping for mapping in mappings if library in mapping.partition("\n")[0]]
    return sum(int(re.search(r"(?m)^Rss: +(\d+) kB$", mapping)[1]) for mapping in found)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")
def test_compiler_is_released_and_still_compiles():
    load_loops("loops")
    libraries.release_memory()
    released = resident_kilobytes("libllvmlite")
    assert numba.njit(lambda x: x + 1)(1) == 2
    assert released < resident_kilobytes("libllvmlite") / 2
