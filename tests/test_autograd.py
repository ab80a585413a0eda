"""The backward walk: order, sums of gradients, slices, modes, memory."""

import gc
import itertools
import threading
import tracemalloc
import weakref
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
from test_tensor import assert_equal, tensor
from test_threads import run_threads

from tricycle import extra_ops, no_grad, to_tensor
from tricycle.activation import ReLU
from tricycle.autograd import topological_order
from tricycle.functions import Softmax, linear
from tricycle.layers import Dense, LayerNorm
from tricycle.loss import CrossEntropy
from tricycle.tensor import record

# -------------------------------------------------------------------- differentiation
GRAPHS = {  # name: f(a, b), gradients at a = 3, b = 5
    "(a + b) + a": (lambda a, b: (a + b) + a, 2, 1),
    "a + a": (lambda a, b: a + a + 0 * b, 2, 0),
    "a - a": (lambda a, b: a - a + b, 0, 1),
    "a * a * a": (lambda a, b: a * a * a + b, 27, 1),
    "diamond": (lambda a, b: (lambda c: c * a + c * b)(a + b), 16, 16),
    "two diamonds": (lambda a, b: (lambda c: (lambda d: d + d * c)(c * c))(a + b), 8 * 2 + 3 * 64, 8 * 2 + 3 * 64),
    "deep and shallow": (lambda a, b: a + ((a * 2) * 3 + a) * b, 36, 21),
    "chain of one": (lambda a, b: extra_ops.negative(extra_ops.negative(-a)) + b, -1, 1),
    "one node three times": (lambda a, b: (lambda c: c + c + c)(a * b), 15, 9),
}


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_gradients_of_reused_nodes(name, shape):
    fn, expected_a, expected_b = GRAPHS[name]
    a, b = (to_tensor(np.full(shape, v)) for v in (3, 5))
    originals = a.array.copy(), b.array.copy()
    fn(a, b).backward()
    assert_equal(a.grad, np.full(shape, expected_a))
    assert_equal(b.grad, np.full(shape, expected_b))
    assert not np.shares_memory(a.grad.array, b.grad.array)
    a.grad.array[...] = -1
    assert_equal(b.grad, np.full(shape, expected_b))
    assert_equal(a, originals[0])
    assert_equal(b, originals[1])


@pytest.mark.parametrize("shape", [(), (1,), (3,)])
def test_gradient_shared_by_many_inputs_is_copied(shape):
    inputs = [to_tensor(np.zeros(shape)) for _ in range(5)]
    total = inputs[0]
    for x in inputs[1:]:
        total = total + x
    (total.reshape(shape) + inputs[0]).backward()
    for one, other in itertools.combinations(inputs, 2):
        assert not np.shares_memory(one.grad.array, other.grad.array)
    assert [float(x.grad.array.max()) for x in inputs] == [2, 1, 1, 1, 1]


def test_gradients_accumulate_out_of_place():
    x = tensor(3)
    (x * 2).backward()
    first = x.grad.array
    (x * 3).backward()
    assert_equal(x.grad, [5, 5, 5])
    np.testing.assert_array_equal(first, [2, 2, 2])
    x.zero_grad()
    assert x.grad is None


def test_only_leaves_keep_gradients():
    x = tensor(3)
    middle = x * 2
    (middle * 3).backward()
    assert middle.grad is None and x.grad is not None


def test_backward_of_a_leaf():
    x = tensor(2)
    x.backward()
    x.backward()
    assert_equal(x.grad, [2, 2])


@pytest.mark.nightly_except(3)
@pytest.mark.parametrize(
    "make", [lambda x: x * 1.0001, lambda x: x + x * 0, lambda x: x + 1], ids=["times", "diamonds", "plus"]
)
def test_backward_through_100_000_nodes(make):
    x = y = to_tensor(1.0, dtype=np.float64)
    for _ in range(100_000):
        y = make(y)
    y.backward()
    np.testing.assert_allclose(x.grad.array, y.array if y.item() < 1e5 and y.item() > 1 else 1, 1e-9)


def test_dropping_a_long_graph_does_not_recurse():
    x = y = to_tensor(1.0)
    for _ in range(100_000):
        y = y + 1
    del y
    gc.collect()
    assert x.grad is None


def test_backward_visits_each_node_once():
    visits = []
    x = tensor(2)
    y = record(x.array, (x,), lambda grad, needs_grad: (visits.append(1) or grad,), "watch")
    for _ in range(40):  # 2^40 paths
        y = y + y
    y.backward()
    assert visits == [1]
    assert_equal(x.grad, [2.0**40] * 2)


def test_backward_is_called_once_with_needs_grad():
    calls = []

    def backward(grad, needs_grad):
        calls.append(list(needs_grad))
        return grad * 2, grad * 3, None

    a, b, c = tensor(2), tensor(2), tensor(2, requires_grad=False)
    y = record(a.array + b.array, (a, b, c), backward, "both")
    y.backward(retain_graph=True)
    assert calls == [[True, True, False]]
    y.backward()
    assert len(calls) == 2
    assert_equal(a.grad, [4, 4])
    assert_equal(b.grad, [6, 6])
    assert c.grad is None


def test_too_few_gradients_raise():
    a, b = tensor(2), tensor(2)
    with pytest.raises(ValueError, match="shorter"):
        record(a.array, (a, b), lambda grad, needs_grad: (grad,), "mine").backward()


# -------------------------------------------------------------------- graph and backward pass
def test_gradients_of_several_slices_are_summed():
    """Taking a sequence apart costs as much as its length, not as its square."""
    x = to_tensor(np.arange(12.0).reshape(3, 4), dtype=np.float64)
    y = x[0] * 2 + x[1] * 3 + x[0] + x[:, 1].sum() + x[[0, 0, 2]].sum()
    y.backward()
    whole = np.zeros((3, 4))
    whole[0] += 3
    whole[1] += 3
    whole[:, 1] += 4
    whole[0] += 8
    whole[2] += 4
    assert_equal(x.grad, whole)


@pytest.mark.parametrize("together", [True, False], ids=["one memory", "apart"])
def test_adjacent_slice_gradients_are_not_copied(together, rng):
    """Gradients that lie as their parts do are the gradient of the whole already."""
    x = to_tensor(rng.standard_normal((2, 3, 6)), dtype=np.float64)
    grads = rng.standard_normal((2, 3, 6))
    pieces = [grads[..., :1], grads[..., 1:4], grads[..., 4:]]
    if not together:
        pieces = [piece.copy() for piece in pieces]

    arrived = []
    twin = record(x.array, (x,), lambda grad, needs_grad: (arrived.append(grad) or grad,), "watch")
    parts = extra_ops.split_sizes(twin, [1, 3, 2])
    y = record(np.zeros(()), tuple(parts), lambda grad, needs_grad: pieces, "all")
    y.backward()
    assert_equal(x.grad, grads)
    assert (arrived[0] is grads) == together


def test_slice_gradients_with_gaps_and_a_full_gradient(rng):
    x = to_tensor(rng.standard_normal((4, 5)), dtype=np.float64)
    y = (x[:, 1:3] * 2).sum() + (x[:, 3:] * 3).sum() + (x * 10).sum()
    y.backward()
    assert_equal(x.grad, np.tile([10, 12, 12, 13, 13], (4, 1)))


@pytest.mark.parametrize("rows", [[0, 2], np.array([0, 2]), (slice(None), [0, 2])], ids=["list", "array", "behind"])
def test_gradients_of_mixed_array_and_slice_index(rows):
    index = (*rows, slice(1, 3)) if isinstance(rows, tuple) else (rows, slice(None), slice(1, 3))
    x, whole = tensor(3, 3, 4), np.zeros((3, 3, 4))
    x[index].backward()
    whole[index] = 1
    assert_equal(x.grad, whole)


def test_back_fns_of_a_slice_return_the_full_gradient():
    x = tensor(4)
    (back_fn,) = x[1:3].back_fns
    np.testing.assert_array_equal(back_fn(to_tensor([5, 6], dtype=np.float64)), [0, 5, 6, 0])


def test_second_backward_over_a_freed_graph_raises():
    x = tensor(2)
    middle = x * 2
    one, other = middle.exp(), middle.sum()
    one.backward()
    assert one.args == () and one.back_fns == ()
    grad = x.grad.array.copy()
    for result in (one, other, one + 1, middle):
        with pytest.raises(RuntimeError, match=r"freed.*retain_graph=True"):
            result.backward()
    assert_equal(x.grad, grad)


def test_retain_graph_allows_second_backward():
    x = tensor(2)
    y = (x * 2).sum()
    for times in (1, 2):
        y.backward(retain_graph=True)
        assert_equal(x.grad, [2 * times] * 2)
    y.backward()
    with pytest.raises(RuntimeError, match="freed"):
        y.backward()


def test_backward_order_is_depth_first():
    """Arguments from left to right, each after all that it was made from, as a recursive walk would find them."""
    a, b = tensor(2), tensor(2)
    c = a * b
    d = c.exp()
    e = extra_ops.stack([c, d, a, d, b])
    actual = topological_order(e + d)
    expected, visited = [], set()

    def walk(node):
        if id(node) not in visited:
            visited.add(id(node))
            for arg in node.args:
                walk(arg)
            expected.append(node)

    walk(actual[-1])
    assert [id(node) for node in actual] == [id(node) for node in expected]


def test_backward_receives_saved_arrays():
    """An op may hand the same backward to all its results; `back_fns` has a separate function for each arg."""

    def backward(grad, needs_grad, x, y):
        return grad * y, grad * x

    a, b = tensor(3), tensor(3)
    c = record(a.array * b.array, (a, b), backward, "mine", saved=(a.array, b.array))
    assert len(c.back_fns) == 2
    two = to_tensor([2, 2, 2], dtype=np.float64)
    for back_fn, other in zip(c.back_fns, (b, a), strict=True):
        np.testing.assert_array_equal(back_fn(two), 2 * other.array)
    c.backward()
    assert_equal(a.grad, b.array)
    assert_equal(b.grad, a.array)
    assert c.args == () and c.back_fns == ()


def test_back_fns_can_be_replaced():
    a, b = tensor(3), tensor(3)
    c = a * b
    c.back_fns = (lambda grad: grad.array * 5, lambda grad: grad)
    c.backward()
    assert_equal(a.grad, [5, 5, 5])
    assert_equal(b.grad, [1, 1, 1])


def test_freed_result_releases_saved_values():
    a, b = tensor(3), tensor(3)
    doubled = a * 2
    kept = doubled * b
    array = weakref.ref(doubled.array)
    del doubled
    kept.backward()
    assert array() is None


@pytest.mark.parametrize("retain_graph", [False, True])
def test_result_array_is_freed_before_backward_of_its_op(retain_graph):
    """So that a large one, such as logits, need not stand in memory beside what its gradient becomes."""
    x = tensor(3)
    alive = []

    def backward(grad, needs_grad):
        alive.append(array() is not None)
        return (grad,)

    result = record(x.array * 2, (x,), backward, "doubled")
    array = weakref.ref(result.array)
    total = result.sum()
    del result
    total.backward(retain_graph=retain_graph)
    assert alive == [retain_graph]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (2,), (2, 3)], ids=str)
def test_first_gradient_sum_is_out_of_place(shape):
    """Also for one element, which is summed out of place always: no array that a backward returned may change."""
    x, handed_out = to_tensor(np.ones(shape)), []

    def watch(grad, needs_grad):
        handed_out.append(grad)
        return (grad,)

    total = record(x.array, (x,), watch, "watch")
    for _ in range(4):
        total = total + record(x.array, (x,), watch, "watch")
    total.backward()
    assert_equal(x.grad, np.full(shape, 5))
    assert type(x.grad.array) is np.ndarray
    assert len(handed_out) == 5
    for array in handed_out:
        np.testing.assert_array_equal(array, np.ones(shape))


def test_inputs_with_requires_grad_false_get_no_gradient():
    a, b = tensor(2), tensor(2, requires_grad=False)
    (a * b).backward()
    assert a.grad.close_to(b) and b.grad is None
    c = b * b
    assert not c.requires_grad and c.args == ()
    for without in (c, to_tensor([1], dtype=int), to_tensor([1.0]) < 2):
        with pytest.raises(RuntimeError, match=r"require.* gradient"):
            without.backward()


def test_detach_removes_the_graph():
    x = tensor(2, is_batched=True, name="x")
    y = x.detach()
    assert y.array is x.array and not y.requires_grad and (y.is_batched, y.name) == (True, "x")
    (x * x.detach()).backward()
    assert x.grad.close_to(x)


def test_no_grad_records_no_graph():
    x = tensor(2)
    with no_grad():
        with no_grad():
            assert not (x * 2).requires_grad
        y = x * 2
        assert not y.requires_grad and y.args == () and y.back_fns == ()
    assert (x * 2).requires_grad
    with pytest.raises(KeyError), no_grad():
        raise KeyError
    assert (x * 2).requires_grad


def test_no_grad_on_a_recursive_function():
    x = tensor(2)

    @no_grad()
    def within(depth):
        return (depth > 0 and within(depth - 1)) or (x * 2).requires_grad

    assert not within(2)
    assert (x * 2).requires_grad


def test_no_grad_is_thread_local():
    x, results, barrier = tensor(2), {}, threading.Barrier(2)

    def work(block):
        with block():
            barrier.wait(10)
            results[block] = (x * 2).requires_grad

    with no_grad():
        run_threads(partial(work, no_grad), partial(work, nullcontext))
    assert results == {no_grad: False, nullcontext: True}


def test_concurrent_backward_passes(rng):
    """The same op and layers in every thread, on inputs of different shapes."""
    dense, norm, softmax = Dense(8, 8, generator=0).freeze(), LayerNorm(8).freeze(), Softmax()
    arrays = [rng.standard_normal((3 + i, 8)).astype(np.float32) for i in range(4)]

    def work(x):
        for _ in range(20):
            softmax(norm(dense(x))).max(-1).sum().backward()

    shared, alone = ([to_tensor(array) for array in arrays] for _ in range(2))
    run_threads(*[partial(work, x) for x in shared])
    for x, expected in zip(shared, alone):
        work(expected)
        assert_equal(x.grad, expected.grad.array)


def test_gradient_of_wrong_shape_raises():
    x = tensor(2)
    with pytest.raises(RuntimeError, match=r"\(2,\).*\(3,\)"):
        record(x.array, (x,), lambda grad, needs_grad: (np.ones(3),), "wrong").backward()


def test_gradients_have_dtype_and_is_batched_of_their_tensor():
    x, wide = to_tensor([1, 2], is_batched=True), to_tensor([3, 4], dtype=np.float64)
    (x * wide).backward()
    assert (x.grad.dtype, wide.grad.dtype) == (np.float32, np.float64)
    assert x.grad.is_batched and not x.grad.requires_grad


# -------------------------------------------------------------------- memory
def test_backward_frees_the_graph_as_it_goes():
    """When the gradient reaches the first op, all that came after it is gone."""
    alive = []
    x = tensor(4)
    y = record(
        x.array, (x,), lambda grad, needs_grad: (alive.append(sum(r() is not None for r in later)) or grad,), "watch"
    )
    later = []
    for _ in range(10):
        y = y.exp() * 0.1
        later.append(weakref.ref(y.array))
    y = y.sum()
    y.backward()
    assert alive == [0]


def test_dropped_result_frees_its_graph():
    x = tensor(4)
    y = x * 2
    middle = weakref.ref(y.array)
    y = y.exp().sum()
    assert middle() is not None
    del y
    assert middle() is None  # at once, without the garbage collector


def test_training_memory_does_not_grow():
    rng = np.random.default_rng(0)
    weights = [to_tensor(rng.standard_normal(shape) * 0.1) for shape in ((8, 16), (16,), (16, 4))]
    x, labels = rng.standard_normal((32, 8)), rng.integers(0, 4, 32)

    def step():
        w1, b1, w2 = weights
        loss = CrossEntropy()(to_tensor(labels, dtype=int), linear(ReLU()(linear(to_tensor(x), w1, b1)), w2))
        loss.backward()
        for w in weights:
            w.array -= 0.1 * w.grad.array
            w.zero_grad()
        return float(loss)

    gc.disable()  # nothing here may need it
    try:
        first, *_ = [step() for _ in range(20)]
        tracemalloc.start()
        sizes = []
        for _ in range(4):  # Python's own stores of freed objects fill up meanwhile, but not again and again
            for _ in range(200):
                last = step()
            sizes.append(tracemalloc.get_traced_memory()[0])
        grown = min(after - before for before, after in itertools.pairwise(sizes))
    finally:
        tracemalloc.stop()
        gc.enable()
    assert last < first
    assert grown < 4_000, f"{grown} bytes in 200 steps"
