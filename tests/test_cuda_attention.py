"""cuDNN's attention without a GPU: which shapes it is given, its graphs, and results through a stand-in for cuDNN."""

import contextlib
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from test_cuda_gemm import array_at, dtype_of, fake_cupy, on_device  # noqa: F401 (fake_cupy is a fixture)

from tricycle import kernels
from tricycle.kernels import ScoreOptions
from tricycle_accelerators.cuda import cudnn
from tricycle_accelerators.cuda.cudnn import AttentionShape, supported_shape

B, T, H, D = 2, 64, 3, 16
CAUSAL = ScoreOptions(0.25, 0)
PACKED = (T * 3 * H * D, D, 3 * H * D, 1)
PLAIN = (T * H * D, D, H * D, 1)


def packed_heads(rng, dtype, n_tokens: int = T, size: int = D):
    """q, k and v as slices of one array, as self-attention has them."""
    packed = on_device(rng.standard_normal((B, n_tokens, 3, H, size)).astype(dtype))
    return [packed[:, :, i] for i in range(3)]


# -------------------------------------------------------------------- supported shapes
@pytest.mark.parametrize("score_options", [ScoreOptions(0.25, 0), ScoreOptions(0.1)], ids=str)
def test_packed_heads_give_a_supported_shape(rng, score_options):
    q, k, v = packed_heads(rng, np.float16)
    shape = supported_shape(q, score_options, k, v)
    assert shape == AttentionShape(B, T, H, D, score_options.offset == 0, score_options.scale, "float16", (PACKED,) * 3)
    assert cudnn.contiguous_strides(shape) == PLAIN


@pytest.mark.parametrize(
    "odd",
    [
        {"dtype": np.float32},
        {"n_tokens": 65},
        {"n_tokens": 1},
        {"size": 12},
        {"size": 136},
        {"score_options": ScoreOptions(0.25, 3)},
        {"score_options": ScoreOptions(0.25, 0, 9)},
        {"score_options": ScoreOptions(0.25, 0, None, 5.0)},
        {"kind": "fewer key heads"},
        {"kind": "keys of another length"},
        {"kind": "gaps"},
        {"kind": "mixed"},
        {"kind": "unaligned"},
        {"n_tokens": 0},
    ],
    ids=str,
)
def test_unsupported_arguments_are_declined(rng, odd):
    q, k, v = packed_heads(rng, odd.get("dtype", np.float16), odd.get("n_tokens", T), odd.get("size", D))
    kind = odd.get("kind")
    if kind == "keys of another length":
        k, v = k[:, :32], v[:, :32]
    elif kind == "fewer key heads":
        k, v = k[:, :, :1], v[:, :, :1]
    elif kind == "gaps":
        k = on_device(np.repeat(k, 2, axis=-1))[..., ::2]
    elif kind == "mixed":
        k = k.astype(np.float32)
    elif kind == "unaligned":
        memory = on_device(np.zeros(q.size + 16, np.float16))
        start = next(i for i in range(9) if memory[i:].data.ptr % 16)
        k = memory[start : start + q.size].reshape(q.shape)
    assert supported_shape(q, odd.get("score_options", CAUSAL), k, v) is None


# -------------------------------------------------------------------- cuDNN itself, where it is installed
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("causal", [True, False])
def test_graphs_are_valid(dtype, causal):
    if cudnn.unavailable_reason():
        pytest.skip(cudnn.unavailable_reason())
    forward = AttentionShape(32, 1024, 12, 64, causal, 0.125, dtype, ((1024 * 2304, 64, 2304, 1),) * 3)
    plain = cudnn.contiguous_strides(forward)
    backward = forward._replace(strides=(*forward.strides, plain, plain, *forward.strides))
    for make, shape, n_arrays in ((cudnn.build_forward_graph, forward, 5), (cudnn.build_backward_graph, backward, 9)):
        made = make(shape, sm_version=90, sm_count=132)
        made.graph.validate()
        assert len(made.arrays) == n_arrays
        assert all(list(tensor.get_dim())[:3] == [32, 12, 1024] for tensor in made.arrays)
    assert "cuDNN" in cudnn.version_text()


def test_unavailable_reason_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", None)
    problem = cudnn.unavailable_reason.__wrapped__()
    assert "cuDNN's frontend" in problem and "\n" not in problem
    broken = ModuleType("cudnn")
    monkeypatch.setitem(sys.modules, "cudnn", broken)

    def fails():
        raise RuntimeError("no symbol")

    broken.backend_version = fails
    assert "cuDNN's library" in cudnn.unavailable_reason.__wrapped__()


# -------------------------------------------------------------------- a stand-in for cuDNN
class FakeTensor:
    def __init__(self, dim=None, stride=None, data_type=None, name=""):
        self.dim, self.stride, self.data_type, self.name, self.output = dim, stride, data_type, name, False

    set_output, set_data_type, set_dim, set_stride = (
        lambda self, value, name=name: setattr(self, name, value) or self
        for name in ("output", "data_type", "dim", "stride")
    )


class FakeGraph:
    """What cuDNN computes, by the plain kernels, in memory that its tensors describe."""

    built = 0

    def __init__(self, dtypes, supported, **settings):
        self.dtypes, self.supported, self.settings = dtypes, supported, settings
        assert settings.get("handle") == 99

    def tensor(self, **about):
        return FakeTensor(**about)

    def sdpa(self, q, k, v, generate_stats, attn_scale, use_causal_mask, name):
        assert generate_stats
        return self._declare((q, k, v), 2, attn_scale, use_causal_mask)

    def sdpa_backward(self, q, k, v, o, dO, stats, attn_scale, use_causal_mask, use_deterministic_algorithm, name):
        assert use_deterministic_algorithm
        return self._declare((q, k, v, o, dO, stats), 3, attn_scale, use_causal_mask)

    def _declare(self, inputs, n_outputs, scale, causal):
        assert scale > 0
        self.inputs, self.outputs = inputs, [FakeTensor() for _ in range(n_outputs)]
        self.score_options = ScoreOptions(scale, 0 if causal else None)
        return self.outputs

    def build(self, modes):
        if not self.supported:
            raise NotSupported
        assert all(tensor.output for tensor in self.outputs)
        FakeGraph.built += 1

    def get_workspace_size(self):
        return 128

    def execute(self, addresses, workspace, handle):
        assert handle == 99 and workspace
        arrays = [self._array(tensor, addresses[tensor]) for tensor in (*self.inputs, *self.outputs)]
        (q, k, v), rest = [x.transpose(0, 2, 1, 3) for x in arrays[:3]], arrays[3:]
        if len(rest) == 2:
            out, totals = kernels.attention.reference(q, k, v, self.score_options, False)
            rest[0][...], rest[1][..., 0] = out.transpose(0, 2, 1, 3), totals
        else:
            (out, grad), totals = [x.transpose(0, 2, 1, 3) for x in rest[:2]], rest[2]
            places = [x.transpose(0, 2, 1, 3) for x in rest[3:]]
            kernels.attention_backward.reference(grad, q, k, v, out, totals[..., 0], self.score_options, *places)

    def _array(self, tensor, address):
        return array_at(address, self.dtypes[tensor.data_type], tensor.dim, tensor.stride)


class NotSupported(Exception):
    pass


@pytest.fixture
def stand_in(fake_cupy, monkeypatch):  # noqa: F811
    """Installs a `cudnn` with the few functions that are asked for."""
    fake_cudnn = ModuleType("cudnn")
    state = SimpleNamespace(supported=True, streams=[])
    dtypes = {"HALF": np.dtype(np.float16), "FLOAT": np.dtype(np.float32)}
    with contextlib.suppress(pytest.skip.Exception):
        dtypes["BFLOAT16"] = dtype_of("bfloat16")
    fake_cudnn.data_type = SimpleNamespace(**{name: name for name in ("HALF", "FLOAT", "BFLOAT16")})
    fake_cudnn.heur_mode = SimpleNamespace(A=0, FALLBACK=1)
    fake_cudnn.cudnnGraphNotSupportedError = NotSupported
    fake_cudnn.create_handle = lambda: 99
    fake_cudnn.set_stream = lambda handle, stream: state.streams.append(stream)
    fake_cudnn.pygraph = lambda **settings: FakeGraph(dtypes, state.supported, **settings)
    monkeypatch.setitem(sys.modules, "cudnn", fake_cudnn)
    monkeypatch.setattr(cudnn, "unavailable_reason", lambda: None)
    monkeypatch.setattr(cudnn, "_graphs", {})
    monkeypatch.setattr(cudnn._here, "handles", {}, raising=False)
    FakeGraph.built = 0
    return state


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("score_options", [ScoreOptions(0.25, 0), ScoreOptions(0.1)], ids=str)
@pytest.mark.parametrize("off_by_one", [True, False])
def test_cudnn_attention_matches_reference(stand_in, rng, kind, score_options, off_by_one):
    dtype = dtype_of(kind)
    for _ in range(2):
        q, k, v = packed_heads(rng, dtype)
        out, totals = cudnn.attention_forward(q, k, v, score_options, off_by_one, None)
        exact = [np.asarray(x).astype(np.float64) for x in (q, k, v)]
        expected, logs = kernels.attention.reference(*exact, score_options, off_by_one)
        assert out.dtype == dtype and totals.dtype == np.float32 and out.flags.c_contiguous
        np.testing.assert_allclose(out.astype(float), expected, 0.02, 0.01)
        np.testing.assert_allclose(totals, logs, 1e-4, 1e-4)
        grad = on_device(rng.standard_normal(q.shape).astype(dtype))
        packed = on_device(np.full((B, T, 3, H, D), np.nan, np.float32).astype(dtype))
        places = [packed[:, :, i] for i in range(3)]
        assert cudnn.attention_backward(grad, q, k, v, out, totals, score_options, *places, None) is True
        expected_gradients = [np.full(q.shape, np.nan) for _ in range(3)]
        kernels.attention_backward.reference(
            np.asarray(grad).astype(float), *exact, expected, logs, score_options, *expected_gradients
        )
        for actual, reference in zip(places, expected_gradients):
            np.testing.assert_allclose(actual.astype(float), reference, 0.05, 0.05)
    assert FakeGraph.built == 2 and set(stand_in.streams) == {5}


def test_cudnn_declines_masks_odd_lengths_and_unsupported_graphs(stand_in, rng):
    q, k, v = packed_heads(rng, np.float16)
    mask = on_device(np.zeros((1, 1, 1, T), np.float16))
    assert cudnn.attention_forward(q, k, v, CAUSAL, False, mask) is None
    assert cudnn.attention_forward(q[:, :33], k[:, :33], v[:, :33], CAUSAL, False, None) is None
    stand_in.supported = False
    for _ in range(2):
        assert cudnn.attention_forward(q, k, v, CAUSAL, False, None) is None
    places = [on_device(np.zeros(q.shape, np.float16)) for _ in range(3)]
    totals = on_device(np.zeros((B, H, T), np.float32))
    assert cudnn.attention_backward(q, q, k, v, q, totals, CAUSAL, *places, None) is False
    assert not any(place.any() for place in places)
    assert len(cudnn._graphs) == 2 and FakeGraph.built == 0


def test_library_failure_is_reported_once(stand_in, rng, monkeypatch):
    def fails(self, modes):
        raise RuntimeError("symbol missing")

    monkeypatch.setattr(FakeGraph, "build", fails)
    q, k, v = packed_heads(rng, np.float16)
    with pytest.warns(UserWarning, match=r"cuDNN.*symbol missing"):
        assert cudnn.attention_forward(q, k, v, CAUSAL, False, None) is None
    assert cudnn.attention_forward(q, k, v, CAUSAL, False, None) is None


def test_number_of_cached_graphs_is_bounded(stand_in, rng, monkeypatch):
    monkeypatch.setattr(cudnn, "MAX_GRAPHS", 2)
    for n_tokens in (64, 128, 192, 64):
        assert cudnn.attention_forward(*packed_heads(rng, np.float16, n_tokens), CAUSAL, False, None) is not None
        assert len(cudnn._graphs) <= 2
    assert FakeGraph.built == 4
