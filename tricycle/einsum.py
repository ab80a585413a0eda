"""Einstein summation: `Einsum` and `matmul` of Tensors.

`contract` computes an einsum of arrays with one BLAS matrix product per pair of inputs. The gradient of an einsum with
respect to one input is an einsum, too: with the subscripts of that input and the output swapped, and the gradient in
place of the input. So `Einsum` calls `contract` in forward and backward.
"""

from __future__ import annotations

import math
import string
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from tricycle.autograd import NeedsGrad
from tricycle.devices import Array, array_module
from tricycle.kernels.batched import batched_matmul
from tricycle.kernels.dispatch import upcasting
from tricycle.ops import Op, as_tensors, check_device, promote_integers, register
from tricycle.tensor import Operand, Tensor, record


class Einsum(Op):
    """The sum of products of Tensors over the indices that are missing in the output, as `numpy.einsum`.

    Args:
        subscripts: NumPy's notation, such as "ij,jk->ik": repeated indices within an input take a
            diagonal, "..." represents any number of axes (the output must contain it, too), and without
            "->" the output has the indices that occur once, in alphabetical order. For batched inputs the
            subscripts describe one item, and the batch axis is preserved.

    Raises:
        ValueError: malformed subscripts, or inputs that do not fit them.
    """

    def __init__(self, subscripts: str) -> None:
        self.subscripts = subscripts
        _parse(subscripts)  # raises an error here

    def __repr__(self) -> str:
        """Return "Einsum('SUBSCRIPTS')"."""
        return f"Einsum({self.subscripts!r})"

    def forward(self, *tensors: Operand) -> Tensor:
        """Compute the einsum of Tensors, one for each input in the subscripts; raise a ValueError for a misfit."""
        inputs = as_tensors(*tensors)
        plan = _resolve(self.subscripts, tuple(t.shape for t in inputs), tuple(t.is_batched for t in inputs))
        return contraction(inputs, plan, f"einsum {self.subscripts}")


@register
def matmul(x: Operand, y: Operand) -> Tensor:
    """Compute the matrix product over the last two axes, broadcast as by `numpy.matmul`; ValueError for a misfit."""
    x, y = as_tensors(x, y)
    if x.ndim == 0 or y.ndim == 0:
        raise ValueError(f"matmul: expected at least one axis on both sides, got shapes {x.shape} and {y.shape}")
    left = "j" if x.ndim == 1 else "...ij"
    right = "j" if y.ndim == 1 else "...jk"
    out = "..." * (x.ndim > 1 or y.ndim > 1) + "i" * (x.ndim > 1) + "k" * (y.ndim > 1)
    try:
        plan = _resolve(f"{left},{right}->{out}", (x.shape, y.shape), (False, False))
    except ValueError:
        raise ValueError(f"matmul: shapes {x.shape} and {y.shape} do not fit") from None
    return contraction((x, y), plan, "matmul")


@dataclass(frozen=True, eq=False)
class Plan:
    """A letter for each axis of the inputs and the output of an einsum.

    Attributes:
        labels: the letters of each input.
        shapes: the shape of each input. An axis of length 1 may be broadcast.
        out: the letters of the output.
        sizes: the length of each letter.
    """

    labels: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    out: str
    sizes: dict[str, int]

    # Cache: a pure function of the plan.
    @cached_property
    def gradients(self) -> list[Plan]:
        """The plan of each input's gradient, in which the gradient of the output takes the input's place.

        The result lacks axes of the input that were broadcast: it must be reshaped.
        """
        shape = tuple(self.sizes[letter] for letter in self.out)
        plans = []
        for i, (labels, sizes) in enumerate(zip(self.labels, self.shapes)):
            kept = "".join(letter for letter, n in zip(labels, sizes) if n == self.sizes[letter])
            inputs = (*self.labels[:i], self.out, *self.labels[i + 1 :])
            plans.append(Plan(inputs, (*self.shapes[:i], shape, *self.shapes[i + 1 :]), kept, self.sizes))
        return plans

    # Cache: a pure function of the plan.
    @cached_property
    def matrices(self) -> tuple[bool, bool, bool] | None:
        """For a product of two matrices, without broadcasting: whether the second is the left one, and transpositions.

        Other products take several calls, which take longer than a small product of matrices.
        """
        if len(self.labels) != 2 or any(len(letters) != 2 for letters in (self.out, *self.labels)):
            return None
        rows, columns = self.out[0], self.out[1]
        is_swapped = rows not in self.labels[0]
        left, right = self.labels[::-1] if is_swapped else self.labels
        inner = left.replace(rows, "")
        if len(inner) != 1 or inner in self.out or rows == columns:
            return None
        if {*left} != {rows, inner} or {*right} != {inner, columns}:
            return None
        if any(shape != tuple(self.sizes[c] for c in letters) for letters, shape in zip(self.labels, self.shapes)):
            return None
        return is_swapped, left[0] != rows, right[1] != columns


def contraction(inputs: tuple[Tensor, ...], plan: Plan, name: str) -> Tensor:
    """Compute `contract` of Tensors, integers promoted, as a differentiable operation named `name`."""
    check_device(name, *(t.array for t in inputs))
    arrays = promote_integers(*(t.array for t in inputs))
    return record(contract(arrays, plan), inputs, contraction_backward, name, None, (plan, *arrays))


def contraction_backward(grad: Array, needs_grad: NeedsGrad, plan: Plan, *arrays: Array) -> list[Array | None]:
    """Return the gradients of the inputs of an einsum; None for those that need none."""
    grads: list[Array | None] = []
    for i, (x, gradient) in enumerate(zip(arrays, plan.gradients)):
        dx = contract((*arrays[:i], grad, *arrays[i + 1 :]), gradient) if needs_grad[i] else None
        # the view that `reshape` makes would be copied, as if another array used its memory
        grads.append(dx if dx is None or dx.shape == x.shape else dx.reshape(x.shape))
    return grads


# -------------------------------------------------------------------- subscripts
# Cache: a pure function of the text; the results are tuples.
@lru_cache(maxsize=1024)
def _parse(subscripts: str) -> tuple[tuple[str, ...], str]:
    """Parse subscripts to those of the inputs and the output, made explicit, without spaces; ValueError if invalid."""
    text = subscripts.replace(" ", "")
    left, arrow, output = text.partition("->")
    inputs = tuple(left.split(","))
    for part in (*inputs, output):
        letters = part.replace("...", "", 1)
        if letters and not (letters.isascii() and letters.isalpha()):
            raise ValueError(f"Einsum({subscripts!r}): expected letters, at most one '...', commas and '->'")
    if not arrow:
        counts = Counter("".join(inputs).replace(".", ""))
        output = "..." * ("..." in left) + "".join(sorted(c for c, n in counts.items() if n == 1))
    unknown = set(output.replace(".", "")) - set(left)
    if unknown or len(set(output.replace("...", ""))) != len(output.replace("...", "")):
        raise ValueError(f"Einsum({subscripts!r}): expected an output that names indices of the inputs, each once")
    if "..." in output and "..." not in left:
        raise ValueError(f"Einsum({subscripts!r}): expected '...' in an input, as it is in the output")
    return inputs, output


# Cache: a pure function of text and shapes; no caller changes the plan's dict.
@lru_cache(maxsize=1024)
def _resolve(subscripts: str, shapes: tuple[tuple[int, ...], ...], batched: tuple[bool, ...]) -> Plan:
    """Return the plan of an einsum of inputs with these shapes; ValueError for a misfit."""
    inputs, out = _parse(subscripts)
    title = f"Einsum({subscripts!r})"
    if len(inputs) != len(shapes):
        raise ValueError(f"{title}: expected {len(inputs)} inputs, got {len(shapes)}")
    spare = [c for c in string.ascii_letters if c not in subscripts]
    batch = spare.pop() if any(batched) else ""
    n_hidden = [
        len(shape) - has_batch - len(part.replace("...", "")) for part, shape, has_batch in zip(inputs, shapes, batched)
    ]
    most = max([n for n, part in zip(n_hidden, inputs) if "..." in part], default=0)
    if most > len(spare):
        raise ValueError(f"{title}: too many axes for one letter each, in shapes {shapes}")
    if most > 0 and "..." not in out:
        raise ValueError(f"{title}: expected '...' in the output, or no axes behind it, got shapes {shapes}")
    ellipsis = "".join(spare[: max(most, 0)])
    labels = []
    sizes: dict[str, int] = {}
    for part, shape, has_batch, hidden in zip(inputs, shapes, batched, n_hidden):
        if hidden < 0 or (hidden and "..." not in part):
            kind = " for each item of a batch" if has_batch else ""
            raise ValueError(f"{title}: expected {part!r}{kind} to name every axis, got shape {shape}")
        letters = (batch if has_batch else "") + part.replace("...", ellipsis[most - hidden :])
        labels.append(letters)
        for letter, n in zip(letters, shape):
            known = sizes.get(letter, n)
            # only axes of "..." broadcast; a named index has the same length everywhere
            if known != n and not (letter in ellipsis and 1 in (known, n)):
                index = "the batch" if letter == batch else f"index {letter!r}"
                raise ValueError(
                    f"{title}: {index} has length {known} in one input and {n} in another: shapes {shapes}"
                )
            sizes[letter] = n if known == 1 else known
    return Plan(tuple(labels), shapes, batch + out.replace("...", ellipsis), sizes)


# -------------------------------------------------------------------- contraction of arrays
def contract(arrays: tuple[Array, ...], plan: Plan) -> Array:
    """Compute an einsum of arrays by products of two arrays at a time.

    More general than NumPy's, as gradients require: the output may have an index of no input (the result is
    repeated along it), or an index twice (the result fills the diagonal, other elements are 0). An axis of
    length 1 broadcasts to any length.
    """
    if plan.matrices is not None:
        is_swapped, left_transposed, right_transposed = plan.matrices
        a, b = arrays[::-1] if is_swapped else arrays
        return batched_matmul(a.T if left_transposed else a, b.T if right_transposed else b)
    out, sizes = plan.out, plan.sizes
    if len(set(out)) < len(out):
        return _onto_diagonal(contract(arrays, replace(plan, out="".join(dict.fromkeys(out)))), out)
    terms = [_diagonal(a, l, sizes) for a, l in zip(arrays, plan.labels)]
    for i, j in _pair_order(tuple(l for _, l in terms), out, tuple(sorted(sizes.items()))):
        second, first = terms.pop(max(i, j)), terms.pop(min(i, j))
        kept = set(out).union(*(l for _, l in terms))
        terms.append(_multiply(first, second, kept))
    array, left = terms[0]
    gone = tuple(axis for axis, letter in enumerate(left) if letter not in out)
    if gone:
        array = _sum(array, gone)
        left = "".join(letter for letter in left if letter in out)
    array = _align(array, left, out)
    full = tuple(sizes[letter] for letter in out)
    return array if array.shape == full else array_module(array).broadcast_to(array, full)


# Cache: a pure function of labels and sizes; the results are tuples.
@lru_cache(maxsize=1024)
def _pair_order(labels: tuple[str, ...], out: str, sizes: tuple[tuple[str, int], ...]) -> tuple[tuple[int, int], ...]:
    """Return the index pairs (i, j) of terms to multiply, in order; a pair is removed, and its product appended."""
    if len(labels) <= 2:
        return ((0, 1),) * (len(labels) - 1)
    lengths = dict(sizes)
    known = "".join(letter for letter in out if any(letter in l for l in labels))
    dummies = [np.broadcast_to(0.0, [lengths[letter] for letter in l]) for l in labels]
    path, _ = np.einsum_path(f"{','.join(labels)}->{known}", *dummies, optimize="greedy")
    pairs: list[tuple[int, int]] = []
    n = len(labels)
    for step in path[1:]:  # a step may name one term or several: fold it into pairs
        places = sorted(step)
        while len(places) > 1:
            j, i = places.pop(), places.pop()
            pairs.append((i, j))
            n -= 1
            places.append(n - 1)
    return tuple(pairs)


def _diagonal(array: Array, labels: str, sizes: dict[str, int]) -> tuple[Array, str]:
    """Return (array, labels) with the diagonal of repeated labels, without axes of length 1 that broadcast."""
    for letter in dict.fromkeys(labels):
        while labels.count(letter) > 1:
            i = labels.index(letter)
            j = labels.index(letter, i + 1)
            array = array.diagonal(axis1=i, axis2=j)  # the diagonal becomes the last axis
            labels = labels[:i] + labels[i + 1 : j] + labels[j + 1 :] + letter
    stretched = tuple(i for i, letter in enumerate(labels) if array.shape[i] == 1 and sizes[letter] != 1)
    if stretched:
        array = array.squeeze(stretched)
        labels = "".join(letter for i, letter in enumerate(labels) if i not in stretched)
    return array, labels


def _onto_diagonal(array: Array, out: str) -> Array:
    """Write an array, labelled with the distinct letters of `out`, onto the diagonals of a zero array."""
    xp = array_module(array)
    letters = "".join(dict.fromkeys(out))
    lengths = dict(zip(letters, array.shape))
    full = xp.zeros([lengths[letter] for letter in out], array.dtype)
    strides = [sum(stride for stride, other in zip(full.strides, out) if other == letter) for letter in letters]
    xp.lib.stride_tricks.as_strided(full, array.shape, strides)[...] = array
    return full


def _align(array: Array, labels: str, out: str) -> Array:
    """Transpose an array to the order of `out`, with axes of length 1 for missing letters."""
    array = array.transpose([labels.index(letter) for letter in out if letter in labels])
    lengths = dict(zip(sorted(labels, key=out.index), array.shape))
    return array.reshape([lengths.get(letter, 1) for letter in out])


def _multiply(first: tuple[Array, str], second: tuple[Array, str], kept: set[str]) -> tuple[Array, str]:
    """Multiply two terms, and sum over labels that are not in `kept`; return (product, its labels).

    There are four groups of letters: batch (in both, kept), rows (in the first), columns (in the second) and
    inner (in both, summed). With inner letters this is one matmul, otherwise an elementwise product.
    """
    (a, left), (b, right) = first, second
    a, left = _sum_out(a, left, kept | set(right))
    b, right = _sum_out(b, right, kept | set(left))
    batch = "".join(c for c in left if c in right and c in kept)
    inner = "".join(c for c in left if c in right and c not in kept)
    rows = "".join(c for c in left if c not in right)
    columns = "".join(c for c in right if c not in left)
    out = batch + rows + columns
    if not inner:
        return _align(a, left, out) * _align(b, right, out), out
    lengths = dict(zip(left, a.shape)) | dict(zip(right, b.shape))
    matrix_a = _as_matrix(a, left, batch, rows, inner)
    matrix_b = _as_matrix(b, right, batch, inner, columns)
    product = batched_matmul(matrix_a, matrix_b)
    return product.reshape([lengths[c] for c in out]), out


@upcasting(1)
def _sum(array: Array, axes: tuple[int, ...]) -> Array:
    """Return the sum over axes."""
    return array.sum(axis=axes)


def _sum_out(array: Array, labels: str, needed: set[str]) -> tuple[Array, str]:
    """Return (array, labels) summed over the labels that are not needed; unchanged if all are."""
    axes = tuple(i for i, letter in enumerate(labels) if letter not in needed)
    return (_sum(array, axes), "".join(c for c in labels if c in needed)) if axes else (array, labels)


def _as_matrix(array: Array, labels: str, batch: str, rows: str, columns: str) -> Array:
    """Reshape an array to (batch..., rows, columns), without a copy where its memory allows.

    BLAS accepts transposed matrices, so a view suffices for an array in the order columns, rows.
    """
    lengths = dict(zip(labels, array.shape))
    n_rows, n_columns = (math.prod(lengths[c] for c in group) for group in (rows, columns))
    lead = [lengths[c] for c in batch]
    is_transposed = labels == batch + columns + rows and rows and columns
    order = batch + (columns + rows if is_transposed else rows + columns)
    array = array.transpose([labels.index(c) for c in order])
    if is_transposed:
        return array.reshape([*lead, n_columns, n_rows]).swapaxes(-1, -2)
    return array.reshape([*lead, n_rows, n_columns])


for _name, _method in {
    "__matmul__": matmul,
    "__rmatmul__": lambda x, y: matmul(y, x),
    "einsum": lambda x, subscripts: Einsum(subscripts)(x),
}.items():
    setattr(Tensor, _name, _method)
