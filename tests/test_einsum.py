"""Einsum and matmul against NumPy, on random subscripts and on bad ones."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from op_properties import draw_terms

from tricycle import to_tensor
from tricycle.einsum import Einsum, contract, matmul
from tricycle.gradcheck import gradcheck


@st.composite
def contractions(draw):
    """Subscripts and the shapes of inputs that fit them: repeats, '...' that broadcasts, sizes from 0."""
    inputs, shapes = draw_terms(draw)
    left = ",".join(inputs)
    if draw(st.booleans()):
        return left, shapes
    present = sorted(set(left) - set(",."))
    output = draw(st.permutations(present))[: draw(st.integers(0, len(present)))]
    if "..." in left:
        output.insert(draw(st.integers(0, len(output))), "...")
    return f"{left}->{''.join(output)}", shapes


@settings(max_examples=250)
@given(contraction=contractions(), seed=st.integers(0, 2**16))
def test_random_subscripts_match_numpy(contraction, seed):
    subscripts, shapes = contraction
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal(shape) for shape in shapes]
    op = Einsum(subscripts)
    actual, expected = op(*(to_tensor(a, dtype=np.float64) for a in arrays)), np.einsum(subscripts, *arrays)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual.array, expected, 1e-10, 1e-12)
    gradcheck(op, *arrays, n_directions=1, elementwise_up_to=3)


@given(
    shapes=hnp.mutually_broadcastable_shapes(signature=np.matmul.signature, max_dims=2, min_side=0, max_side=3),
    seed=st.integers(0, 2**16),
)
def test_matmul_matches_numpy(shapes, seed):
    rng = np.random.default_rng(seed)
    x, y = (rng.standard_normal(shape) for shape in shapes.input_shapes)
    found = to_tensor(x, dtype=np.float64) @ to_tensor(y, dtype=np.float64)
    np.testing.assert_allclose(found.array, x @ y, 1e-10, 1e-12)
    assert found.name == "matmul"
    gradcheck(matmul, x, y, n_directions=1, elementwise_up_to=3)


@pytest.mark.parametrize("n_batched", range(1, 4))
def test_batched_einsum_equals_einsum_per_item(n_batched, rng):
    """Subscripts describe one item: the same as item by item, in values and gradients."""
    shapes, batched = [(2, 3), (3, 4), (4, 2)], [i < n_batched for i in range(3)]
    arrays = [rng.standard_normal((5, *shape) if flag else shape) for shape, flag in zip(shapes, batched)]
    op = Einsum("ij,jk,kl->li")

    def tensors():
        return [to_tensor(a, dtype=np.float64, is_batched=flag) for a, flag in zip(arrays, batched)]

    together = tensors()
    output = op(*together)
    assert output.shape == (5, 2, 2) and output.is_batched
    output.backward()
    singly = tensors()
    for item in range(5):
        one = op(*(t[item] if flag else t for t, flag in zip(singly, batched)))
        np.testing.assert_allclose(one.array, output.array[item])
        one.backward()
    for actual, expected in zip(together, singly):
        np.testing.assert_allclose(actual.grad.array, expected.grad.array)


def test_gradient_equals_einsum_of_swapped_subscripts(rng):
    """The two examples of seed document 003."""
    a = to_tensor(rng.random((2, 3)))
    y = Einsum("ij->ji")(a)
    y.backward()
    assert a.grad.close_to(Einsum("ji->ij")(to_tensor(np.ones_like(y))))
    inputs, weights = to_tensor(rng.random((5, 4, 2, 3))), to_tensor(rng.random((3, 6)))
    y = Einsum("zxTb,bW->zxTW")(inputs, weights)
    y.backward()
    assert weights.grad.close_to(Einsum("zxTb,zxTW->bW")(inputs, to_tensor(np.ones_like(y))), rtol=1e-4)


def test_einsum_op_is_reusable_for_other_shapes():
    op = Einsum(" ij, jk -> ik ")
    for n in (1, 3):
        assert op(to_tensor(np.ones((2, n))), to_tensor(np.ones((n, 4)))).array.tolist() == [[n] * 4] * 2
    assert repr(op) == "Einsum(' ij, jk -> ik ')"


def test_einsum_method_transposes_and_names_the_tensor():
    assert str(to_tensor([[1, 2], [3, 4]]).einsum("ij->ji")) == "Tensor([[1. 3.], [2. 4.]], name=einsum ij->ji)"


def test_einsum_of_many_inputs_and_axes():
    vectors = [np.full(2, i + 1.0) for i in range(8)]
    letters = "abcdefgh"
    found = Einsum(",".join(letters) + "->" + letters)(*(to_tensor(v) for v in vectors))
    assert found.shape == (2,) * 8 and found.array.max() == 40_320


def test_contract_broadcasts_and_repeats():
    """Operations of gradients that NumPy's einsum lacks."""
    x = np.array([1.0, 2.0])
    assert contract((x,), ("i",), "ii", {"i": 2}).tolist() == [[1, 0], [0, 2]]
    assert contract((x,), ("i",), "ji", {"i": 2, "j": 3}).tolist() == [[1, 2]] * 3
    assert contract((x,), ("i",), "iji", {"i": 2, "j": 1}).tolist() == [[[1, 0]], [[0, 2]]]


@pytest.mark.parametrize(
    ("subscripts", "message"),
    [
        ("ij->k", "output.*indices of the inputs"),
        ("ij->ii", "each once"),
        ("i1->i", "expected letters"),
        ("i.j->i", "expected letters"),
        ("......->", "at most one"),
        ("ij->ji->ij", "expected letters"),
        ("ij-ji", "expected letters"),
        ("ij->...i", "expected '...' in an input"),
        ("é->é", "expected letters"),
        ("ij;jk->ik", "expected letters"),
    ],
)
def test_bad_subscripts_are_rejected(subscripts, message):
    with pytest.raises(ValueError, match=message) as caught:
        Einsum(subscripts)
    assert str(caught.value).startswith(f"Einsum({subscripts!r}): ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("subscripts", "shapes", "batched", "message"),
    [
        ("ij,jk->ik", [(2, 3)], False, "expected 2 inputs, got 1"),
        ("ij->i", [(2, 3), (2, 3)], False, "expected 1 inputs, got 2"),
        ("ij->i", [(2,)], False, r"'ij'.*every axis.*\(2,\)"),
        ("ij->i", [(2, 3, 4)], False, r"'ij'.*every axis.*\(2, 3, 4\)"),
        ("...ij->...", [(2,)], False, r"'\.\.\.ij'.*every axis.*\(2,\)"),
        ("ij->i", [(2, 3)], True, r"'ij'.*batch.*every axis.*\(2, 3\)"),
        ("ij,jk->ik", [(2, 3), (4, 5)], False, r"'j'.* 3 .* 4 .*shapes \(\(2,"),
        ("ij,jk->ik", [(2, 3), (1, 5)], False, "'j'.* 3 .* 1 "),
        ("ii->i", [(2, 3)], False, "'i'.* 2 .* 3"),
        ("...i,...i->...", [(2, 3), (4, 3)], False, "length 2 .* 4"),
        ("i,i->i", [(2, 3), (4, 3)], True, "batch.* 2 .* 4"),
    ],
)
def test_bad_inputs_are_rejected(subscripts, shapes, batched, message):
    with pytest.raises(ValueError, match=message) as caught:
        Einsum(subscripts)(*(to_tensor(np.ones(shape), is_batched=batched) for shape in shapes))
    assert str(caught.value).startswith(f"Einsum({subscripts!r}): ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ((2, 3), (2, 3), r"matmul: .*\(2, 3\) and \(2, 3\)"),
        ((3,), (2,), "do not fit"),
        ((2, 1), (3, 2), "do not fit"),
        ((2, 2, 3), (3, 3, 2), "do not fit"),
        ((), (2,), "at least one axis"),
        ((2,), (), "at least one axis"),
    ],
)
def test_bad_matmul_shapes_are_rejected(x, y, message):
    with pytest.raises(ValueError, match=message):
        to_tensor(np.ones(x)) @ to_tensor(np.ones(y))
