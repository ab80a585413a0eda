"""What would be wrong without a word: arrays changed too early, gradients of gradients, blocks out of order."""

import contextvars
import gc
import itertools
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
from test_threads import run_threads

from tricycle import no_grad, to_tensor
from tricycle.autograd import increment_versions
from tricycle.debug import use_reference, watch_arrays
from tricycle.einsum import Einsum
from tricycle.extra_ops import exp
from tricycle.kernels.dispatch import reference_only
from tricycle.layers import Dense
from tricycle.optimiser_rules import Adafactor, Lion, Muon
from tricycle.optimisers import AdamW, StochasticGradientDescent
from tricycle.transforms import grad, hvp, vmap


# -------------------------------------------------------------------- changed between forward and backward
@pytest.mark.parametrize(
    "optimiser", [AdamW(), Adafactor(), Lion(), Muon(), StochasticGradientDescent(0.1)], ids=lambda o: repr(o)[:30]
)
def test_an_update_between_forward_and_backward_is_refused(optimiser, rng):
    layer, x = Dense(3, 2), to_tensor(rng.standard_normal((4, 3)))
    first, second = (layer(x) ** 2).sum(), (layer(x) ** 3).sum()
    first.backward()
    layer.update(optimiser)
    with pytest.raises(RuntimeError, match=r"\(3, 2\).*in place.*dense"):
        second.backward()
    (layer(x) ** 3).sum().backward()


def test_loading_between_forward_and_backward_is_refused(rng):
    layer, x = Dense(3, 2), to_tensor(rng.standard_normal((4, 3)))
    loss = layer(x).sum()
    layer.load_state_dict(layer.state_dict())
    with pytest.raises(RuntimeError, match="in place"):
        loss.backward()


def test_other_models_may_change_meanwhile(rng):
    """As the two networks of a GAN do: what was made of the one stays good when the other learns."""
    maker, judge, x = Dense(3, 3), Dense(3, 1), to_tensor(rng.standard_normal((4, 3)))
    made = maker(x)
    judge(made.detach()).sum().backward()
    judge.update(AdamW())
    judge(made).sum().backward()
    assert all(p.grad is not None for p in maker.parameters())


def test_updates_in_other_threads_do_not_matter(rng):
    """Each thread trains a model of its own."""
    problems = []

    def train(seed: int) -> None:
        layer, optimiser = Dense(3, 2, generator=seed), AdamW()
        try:
            for _ in range(200):
                layer(to_tensor(np.ones((2, 3)))).sum().backward()
                layer.update(optimiser)
        except RuntimeError as error:
            problems.append(error)

    run_threads(*[partial(train, seed) for seed in range(4)])
    assert problems == []


def test_gradients_may_be_gathered_before_an_update(rng):
    layer, x = Dense(3, 2), to_tensor(rng.standard_normal((4, 3)))
    losses = [layer(x).sum() for _ in range(3)]
    for loss in losses:
        loss.backward()
    layer.update(AdamW())


def test_user_can_declare_a_changed_array():
    x = to_tensor([1.0, 2.0])
    y = (x * x).sum()
    x.array *= 10
    increment_versions([x])
    with pytest.raises(RuntimeError, match=r"\(2,\).*in place"):
        y.backward()


def test_changing_an_array_used_by_the_graph_raises():
    """Without this, only a block with watch_arrays detects the change."""
    for change_result, create_graph in itertools.product((False, True), repeat=2):
        x = to_tensor([1.0, 2.0], name="x")
        with watch_arrays():
            y = exp(x)
            total = (y * 2).sum()
        (y if change_result else x).array *= 10
        title = "exp" if change_result else "x"
        with pytest.raises(RuntimeError, match=rf"backward: {title}.*\(2,\).*in place"):
            total.backward(create_graph=create_graph)


def test_watching_changes_no_derivative_of_higher_order():
    x = to_tensor([1.0, 2.0], dtype=float, requires_grad=False)
    f = lambda x: (exp(x[[1, 0]]) ** 3).sum()
    derivatives = lambda: [grad(lambda x: grad(f)(x).sum())(x), hvp(f, (x,), (x,))[0], vmap(grad(lambda x: x**3))(x)]
    with watch_arrays(), watch_arrays():
        watched = derivatives()
    for found, expected in zip(watched, derivatives(), strict=True):
        np.testing.assert_array_equal(found.array, expected.array)


def test_watching_changes_no_result(rng):
    layer, x = Dense(3, 2), to_tensor(rng.standard_normal((4, 3)))
    with watch_arrays():
        loss = (layer(x)[:, 0] ** 2).sum()
    loss.backward(retain_graph=True)
    watched = layer.weights.grad.numpy()
    layer.zero_grad()
    (layer(x)[:, 0] ** 2).sum().backward()
    np.testing.assert_array_equal(watched, layer.weights.grad.numpy())
    with watch_arrays(), no_grad():
        assert not layer(x).requires_grad


# -------------------------------------------------------------------- gradients of gradients
def test_gradients_of_gradients_without_graph_are_refused():
    x = to_tensor([1.0, 2.0])
    (x * x * x).sum().backward()
    for of_gradient in (x.grad, (x.grad * x.grad).sum()):
        with pytest.raises(RuntimeError, match="create_graph=True"):
            of_gradient.backward()


# -------------------------------------------------------------------- blocks in generators
def inside(block) -> Iterator[int]:
    with block():
        yield from range(3)


def remembers() -> bool:
    x = to_tensor([1.0])
    return (x * x).requires_grad


@pytest.mark.parametrize(
    ("block", "is_usual"), [(no_grad, remembers), (use_reference, lambda: not reference_only.get())]
)
def test_blocks_may_end_in_any_order(block, is_usual):
    first, second = inside(block), inside(block)
    next(first), next(second)
    list(first)
    assert not is_usual()  # the second is still in there
    list(second)
    assert is_usual()


def test_no_grad_block_may_end_in_another_context():
    """A generator that is dropped in another context, such as another thread's, does not affect that context."""
    waiting = [inside(no_grad)]
    contextvars.copy_context().run(next, waiting[0])
    assert remembers()
    del waiting[0]
    gc.collect()
    assert remembers()


# -------------------------------------------------------------------- einsum
def test_an_ellipsis_is_not_summed_away_unasked(rng):
    x = to_tensor(rng.standard_normal((2, 3)))
    with pytest.raises(ValueError, match=r"Einsum\('a...->a'\): .*'\.\.\.'.*\(\(2, 3\),\)"):
        Einsum("a...->a")(x)
    assert Einsum("a...->a")(x[:, 0]).shape == (2,)  # no axes behind it: nothing to sum
    assert Einsum("a...->")(x[0]).shape == ()
