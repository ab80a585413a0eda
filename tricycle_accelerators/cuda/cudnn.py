"""Attention on a GPU by cuDNN (fused scaled dot-product attention), directly on slices of a packed QKV array.

cuDNN's kernels keep no matrix of scores (Dao et al. 2022, "FlashAttention"). They take floats of 16 bits, plain softmax
and softmax1 (whose "nothing" is put in afterwards), causal or not. What they do not take is left to the caller.

Needs the packages nvidia-cudnn-frontend and nvidia-cudnn-cu12 or -cu13 (the extras cudnn12 and cudnn13).
"""

from __future__ import annotations

import threading
import warnings
from functools import cache
from typing import Any, NamedTuple

from tricycle.devices import Array
from tricycle.kernels import ScoreOptions

KINDS = {"float16": "HALF", "bfloat16": "BFLOAT16"}  # names of dtypes, and what cuDNN calls them
TOKENS = 64  # sequences of multiples of it: each length needs a graph of its own, which takes a while to build
ALIGNED = 16  # bytes, of addresses and strides
MAX_GRAPHS = 64
# Sums of dq in a fixed order, so that training gives the same bits in every run; without it the backward is faster.
DETERMINISTIC = True


# Cache: valid for the life of the process: what is installed later is found after a restart.
@cache
def unavailable_reason() -> str | None:
    """Return why cuDNN or its Python frontend cannot be loaded, in one line; None if both can; cached."""
    try:
        import cudnn
    except ImportError:
        return "cuDNN's frontend is not installed (pip install 'tricycle-gpt[cudnn13]', or [cudnn12])"
    except (OSError, RuntimeError) as error:
        return f"cuDNN cannot be loaded: {' '.join(str(error).split())}"
    try:
        cudnn.backend_version()
    except RuntimeError as error:
        return f"cuDNN's library is not installed (pip install nvidia-cudnn-cu13, or -cu12): {error}"
    return None


def version_text() -> str:
    """Return the versions as text, such as "cuDNN 91000, frontend 1.14.0"; ImportError without the frontend."""
    import cudnn

    return f"cuDNN {cudnn.backend_version()}, frontend {cudnn.__version__}"


# -------------------------------------------------------------------- what is asked for: pure, without a GPU
Strides = tuple[int, int, int, int]


class AttentionShape(NamedTuple):
    """The sizes, strides and options of an attention call; equal shapes share a cuDNN graph.

    Sizes are (B, T, H, D); strides are in elements along B, H, T and D.

    Attributes:
        scale: scores are scale * q . k.
        dtype: its name.
        strides: of q, k and v; in the backward also of out, its gradient, dq, dk and dv.
    """

    n_items: int
    n_tokens: int
    n_heads: int
    size: int
    causal: bool
    scale: float
    dtype: str
    strides: tuple[Strides, ...]


def bhtd_strides(x: Array) -> Strides:
    """Return the strides of an array (B, T, H, D) in elements, in cuDNN's order of axes: B, H, T, D."""
    b, t, h, d = (stride // x.dtype.itemsize for stride in x.strides)
    return b, h, t, d


def supported_shape(q: Array, score_options: ScoreOptions, *others: Array) -> AttentionShape | None:
    """Return cuDNN's AttentionShape; None unless 16-bit, D <= 128, D % 8 == T % 64 == 0, equal shapes, no window.

    It is not asked for fewer key heads than query heads, windows and caps.
    """
    n_items, n_tokens, n_heads, size = q.shape
    arrays = (q, *others)
    fits = q.dtype.name in KINDS and size % 8 == 0 and size <= 128 and n_tokens % TOKENS == 0
    fits = fits and score_options.offset in (0, None) and score_options.window is None and score_options.softcap is None
    fits = fits and 0 not in q.shape
    fits = fits and all(x.shape == q.shape and x.dtype == q.dtype for x in others)
    if not fits or not all(_aligned(x) for x in arrays):
        return None
    strides = tuple(bhtd_strides(x) for x in arrays)
    causal = score_options.offset is not None
    return AttentionShape(n_items, n_tokens, n_heads, size, causal, score_options.scale, q.dtype.name, strides)


def _aligned(x: Array) -> bool:
    """Return whether x is contiguous along its last axis, with address and other strides multiples of ALIGNED."""
    whole = x.strides[-1] == x.dtype.itemsize and all(stride % ALIGNED == 0 for stride in x.strides[:-1])
    return whole and x.data.ptr % ALIGNED == 0


# -------------------------------------------------------------------- graphs
class AttentionGraph(NamedTuple):
    """A cuDNN graph and its tensors in the order in which `_run` takes the arrays."""

    graph: Any
    arrays: tuple[Any, ...]


def build_forward_graph(shape: AttentionShape, **target: Any) -> AttentionGraph:
    """Return a cuDNN graph of attention, not built yet: q, k, v to output (B, T, H, D) and logsumexp (B, H, T).

    Args:
        target: what `cudnn.pygraph` must be told of the GPU, if there is none (sm_version), or its handle.
    """
    graph, arrays, kind = _new_graph(shape, ("q", "k", "v"), **target)
    out, totals = graph.sdpa(*arrays, generate_stats=True, name="attention", **_attention_options(shape))
    _declare_result(out, shape, contiguous_strides(shape), kind)
    _declare_result(totals, shape._replace(size=1), _strides_of_totals(shape), _data_type("FLOAT"))
    return AttentionGraph(graph, (*arrays, out, totals))


def build_backward_graph(shape: AttentionShape, **target: Any) -> AttentionGraph:
    """Return a cuDNN graph, not built yet, of attention's backward: q, k, v, out, grad, logsumexp to dq, dk, dv."""
    graph, arrays, kind = _new_graph(shape, ("q", "k", "v", "out", "grad"), **target)
    sizes, strides = _sizes(shape._replace(size=1)), _strides_of_totals(shape)
    totals = graph.tensor(name="totals", dim=sizes, stride=strides, data_type=_data_type("FLOAT"))
    how = {**_attention_options(shape), "use_deterministic_algorithm": DETERMINISTIC}
    results = graph.sdpa_backward(*arrays, totals, name="attention_backward", **how)
    for result, place in zip(results, shape.strides[5:]):
        _declare_result(result, shape, place, kind)
    return AttentionGraph(graph, (*arrays, totals, *results))


def _new_graph(shape: AttentionShape, names: tuple[str, ...], **target: Any) -> tuple[Any, list[Any], Any]:
    """Return a new cuDNN graph, its input tensors in the order of `names`, and their data type; sums are float32."""
    import cudnn

    kind, wide = _data_type(KINDS[shape.dtype]), _data_type("FLOAT")
    graph = cudnn.pygraph(io_data_type=kind, intermediate_data_type=wide, compute_data_type=wide, **target)
    sizes = _sizes(shape)
    arrays = [
        graph.tensor(name=name, dim=sizes, stride=strides, data_type=kind)
        for name, strides in zip(names, shape.strides)
    ]
    return graph, arrays, kind


def _attention_options(shape: AttentionShape) -> dict[str, Any]:
    """Return cuDNN's keyword arguments for the score scale and the causal mask."""
    return {"attn_scale": shape.scale, "use_causal_mask": shape.causal}


def _data_type(name: str) -> Any:
    """Import cuDNN's frontend (ImportError without it), and return its data type of this name."""
    import cudnn

    return getattr(cudnn.data_type, name)


def _sizes(shape: AttentionShape) -> tuple[int, int, int, int]:
    """Return (batch, heads, tokens, head size) in cuDNN's order of axes."""
    return shape.n_items, shape.n_heads, shape.n_tokens, shape.size


def contiguous_strides(shape: AttentionShape) -> Strides:
    """Return the strides, in elements, of a C-contiguous array (B, T, H, D) in cuDNN's order of axes: B, H, T, D."""
    return shape.n_tokens * shape.n_heads * shape.size, shape.size, shape.n_heads * shape.size, 1


def _strides_of_totals(shape: AttentionShape) -> Strides:
    """Return the contiguous strides of the logsumexp, (B, H, T, 1)."""
    return shape.n_heads * shape.n_tokens, shape.n_tokens, 1, 1


def _declare_result(tensor: Any, shape: AttentionShape, strides: Strides, kind: Any) -> None:
    """Declare a graph's tensor as an output with this shape, strides and data type, in place."""
    tensor.set_output(True).set_data_type(kind).set_dim(_sizes(shape)).set_stride(strides)


# -------------------------------------------------------------------- on a device
_graphs: dict[tuple[Any, ...], AttentionGraph | None] = {}
_here = threading.local()  # a handle belongs to one thread


def _handle() -> Any:
    """Return the cuDNN handle of this thread and device, created once, set to CuPy's current stream."""
    import cudnn
    import cupy

    device = cupy.cuda.runtime.getDevice()
    handles = vars(_here).setdefault("handles", {})
    if device not in handles:
        handles[device] = cudnn.create_handle()
    cudnn.set_stream(handle=handles[device], stream=cupy.cuda.get_current_stream().ptr)
    return handles[device]


def _cached_graph(
    make: Any, mask: Array | None, q: Array, score_options: ScoreOptions, *others: Array
) -> AttentionGraph | None:
    """Return a built graph, cached per thread and device; None if unsupported or, with a warning, if building fails."""
    shape = None if mask is not None or unavailable_reason() else supported_shape(q, score_options, *others)
    if shape is None:
        return None
    import cudnn
    import cupy

    key = make.__name__, shape, cupy.cuda.runtime.getDevice(), threading.get_ident()
    if key not in _graphs:
        if len(_graphs) >= MAX_GRAPHS:
            _graphs.clear()
        try:
            built = make(shape, handle=_handle())
            built.graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        except cudnn.cudnnGraphNotSupportedError:
            built = None
        except RuntimeError as error:  # a library that is broken or too old: slower, but no error
            said = " ".join(str(error).split())
            warnings.warn(f"cuDNN's attention failed, so another kernel is used: {said}", stacklevel=2)
            built = None
        _graphs[key] = built
    return _graphs[key]


def _run(ready: AttentionGraph, arrays: tuple[Array, ...]) -> None:
    """Execute a graph on arrays, in the order of its tensors, on the current stream with a new workspace."""
    import cupy

    # on one stream memory that is given back serves whatever comes later
    workspace = cupy.empty(max(1, ready.graph.get_workspace_size()), cupy.uint8)
    addresses = {tensor: array.data.ptr for tensor, array in zip(ready.arrays, arrays)}
    ready.graph.execute(addresses, workspace.data.ptr, handle=_handle())


def attention_forward(
    q: Array, k: Array, v: Array, score_options: ScoreOptions, off_by_one: bool, mask: Array | None
) -> tuple[Array, Array] | None:
    """Return output (B, T, H, D) and float32 logsumexp (B, H, T) of attention by cuDNN; None if not supported."""
    import cupy

    ready = _cached_graph(build_forward_graph, mask, q, score_options, k, v)
    if ready is None:
        return None
    out, totals = cupy.empty(q.shape, q.dtype), cupy.empty((len(q), q.shape[2], q.shape[1]), cupy.float32)
    _run(ready, (q, k, v, out, totals))
    if not off_by_one:
        return out, totals
    # beside sums e^t of exponentials there is a 1: each weight becomes e^t / (e^t + 1) of what it was
    whole = cupy.logaddexp(totals, cupy.float32(0))
    share = cupy.exp(totals - whole).transpose(0, 2, 1)[..., None]
    return (out.astype(cupy.float32) * share).astype(q.dtype), whole


def attention_backward(
    grad: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    logsumexp: Array,
    score_options: ScoreOptions,
    dq: Array,
    dk: Array,
    dv: Array,
    mask: Array | None,
) -> bool:
    """Write attention's gradients into dq, dk, dv by cuDNN and return True; False, nothing written, if not supported.

    The gradient is right for softmax1 too, whose weights are e^(score - logsumexp) as well.
    """
    import cupy

    ready = _cached_graph(build_backward_graph, mask, q, score_options, k, v, out, grad, dq, dk, dv)
    if ready is None:
        return False
    totals = cupy.ascontiguousarray(logsumexp.astype(cupy.float32, copy=False))
    _run(ready, (q, k, v, out, grad, totals, dq, dk, dv))
    return True
