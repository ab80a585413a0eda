"""Einsum and matmul: reuse, names, many axes, and bad subscripts; random subscripts are in test_properties.py."""

import numpy as np
import pytest

from tricycle import to_tensor
from tricycle.einsum import Einsum, Plan, contract


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
    for out, sizes, expected in (
        ("ii", {"i": 2}, [[1, 0], [0, 2]]),
        ("ji", {"i": 2, "j": 3}, [[1, 2]] * 3),
        ("iji", {"i": 2, "j": 1}, [[[1, 0]], [[0, 2]]]),
    ):
        assert contract((x,), Plan(("i",), (x.shape,), out, sizes)).tolist() == expected


@pytest.mark.parametrize("out", ["ik", "ki", "ij"])
@pytest.mark.parametrize("right", ["jk", "kj", "jjk", "ij", "k"])
@pytest.mark.parametrize("left", ["ij", "ji", "iij"])
def test_contract_of_two_terms_equals_numpy(left, right, out, rng):
    """Products of two matrices take a shorter way; diagonals, elementwise products and broadcasting do not."""
    sizes = {"i": 2, "j": 3, "k": 4}
    if not set(out) <= set(left + right):
        pytest.skip("NumPy's einsum has no such output")
    for length in (3, 1):
        a, b = (rng.standard_normal([{**sizes, "j": n}[c] for c in l]) for l, n in ((left, 3), (right, length)))
        wide = np.broadcast_to(b, [sizes[c] for c in right])
        plan = Plan((left, right), (a.shape, b.shape), out, sizes)
        np.testing.assert_allclose(contract((a, b), plan), np.einsum(f"{left},{right}->{out}", a, wide))


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
