"""Differentiable linear algebra on matrices (..., n, n): solve, inv, det, slogdet, cholesky, eigh and svd.

Leading axes are a batch, as in `numpy.linalg`. Each gradient is one function of matrices, which computes with arrays
in the backward pass and with Tensors where gradients are differentiated further. On a GPU, CuPy does not report
singular matrices: the results are infinite or NaN.

Source: Giles 2008, "Collected matrix derivative results for forward and reverse mode algorithmic differentiation".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np

from tricycle import create_graph
from tricycle.autograd import NeedsGrad
from tricycle.devices import Array, array_module
from tricycle.ops import as_floating, as_tensor, as_tensors, check_device, promote_integers, register, unbroadcast
from tricycle.tensor import Operand, Tensor, record

Matrix: TypeAlias = Any  # an array or a Tensor
# gradient(linalg, needs_grad, g, *args, *results) maps the gradient of one result of an operation to those of its args.
# `linalg` has `solve` and `inv` for this type of matrices.
Gradient: TypeAlias = Callable[..., Sequence[Any]]


# -------------------------------------------------------------------- recording
def _matrices(op: str, *tensors: Tensor, square: bool = True) -> tuple[Array, ...]:
    """Return arrays, integers as float32; TypeError for other dtypes, ValueError if the first is no (square) matrix."""
    check_device(op, *(t.array for t in tensors))
    arrays = tuple(as_floating(array) for array in promote_integers(*(t.array for t in tensors)))
    for array in arrays:
        if array.dtype.name not in ("float32", "float64"):
            raise TypeError(f"{op}: expected float32 or float64, got {array.dtype}: convert it by to_tensor(x)")
    shape = arrays[0].shape
    if len(shape) < 2 or (square and shape[-1] != shape[-2]):
        expected = "square matrices (..., n, n)" if square else "matrices (..., m, n)"
        raise ValueError(f"{op}: expected {expected}, got shape {shape}")
    return arrays


def _computed(op: str, rule: str, *arrays: Array, **options: Any) -> Any:
    """Return the result of `numpy.linalg` or `cupy.linalg`'s function `op`; ValueError with the rule where it fails."""
    xp = array_module(arrays[0])
    try:
        return getattr(xp.linalg, op)(*arrays, **options)
    except np.linalg.LinAlgError:
        is_finite = all(bool(xp.isfinite(array).all()) for array in arrays)
        got = f"a matrix among shape {arrays[0].shape} that is not" if is_finite else "NaN or infinity"
        raise ValueError(f"{op}: expected {rule if is_finite else 'finite numbers'}, got {got}") from None


def _record(
    op: Callable[..., Any],
    gradient: Gradient,
    result: Array,
    args: Sequence[Tensor],
    values: Sequence[Array],
    name: str,
) -> Tensor:
    """Return `result` as a Tensor in the graph; `values` (the arrays of args and all results) is for `gradient`."""
    batched = any(x.is_batched and x.ndim > 2 for x in args)
    return record(result, tuple(args), _backward, name, batched, (gradient, op, *values))


def _backward(grad: Array, needs_grad: NeedsGrad, gradient: Gradient, op: Any, *values: Array) -> Sequence[Any]:
    """Return the gradients of the args by a gradient rule applied to arrays; `op` is ignored here."""
    return gradient(ON_ARRAYS, needs_grad, grad, *values)


@create_graph.rule("tricycle.linalg._backward")
def _differentiable(node: Tensor, grad: Tensor, variables: Any) -> Sequence[Any]:
    """Return gradients with a graph: recompute the operation on Tensors, then call its gradient function on them."""
    gradient, op, *_ = node._saved
    results = op(*node.args)
    results = results if isinstance(results, tuple) else (results,)
    needs_grad = [x.requires_grad for x in node.args]
    return gradient(ON_TENSORS, needs_grad, grad, *node.args, *results)


def _solve_arrays(a: Array, b: Array) -> Array:
    """Solve a x = b for arrays (..., n, n) and (..., n, k), whose leading axes CuPy's function does not broadcast."""
    leading = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    same = [array_module(x).broadcast_to(x, (*leading, *x.shape[-2:])) for x in (a, b)]
    return _computed("solve", "an invertible matrix", *same)


# The functions that gradients call, of arrays; ON_TENSORS has those of Tensors
ON_ARRAYS = SimpleNamespace(solve=_solve_arrays, inv=partial(_computed, "inv", "an invertible matrix"))


# -------------------------------------------------------------------- parts of gradients, of arrays and Tensors
def _transposed(x: Matrix) -> Matrix:
    """Return x with its last two axes exchanged."""
    return x.transpose((*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))


def _identity(like: Matrix) -> Array:
    """Return the identity matrix (n, n) of the dtype of `like`, an array or Tensor whose last axis has length n."""
    return array_module(like.array if isinstance(like, Tensor) else like).eye(like.shape[-1], dtype=like.dtype)


def _inverse_gaps(values: Matrix) -> Matrix:
    """Return F (..., n, n) with F_ij = 1 / (v_j - v_i), and 0 on the diagonal, for values (..., n)."""
    eye = _identity(values)
    return 1 / (values[..., None, :] - values[..., :, None] + eye) * (1 - eye)


def _symmetric(x: Matrix) -> Matrix:
    """Return the mean of matrices and their transposes."""
    return 0.5 * (x + _transposed(x))


# -------------------------------------------------------------------- systems of equations
def _solve_gradient(linalg: Any, needs_grad: NeedsGrad, g: Matrix, a: Matrix, b: Matrix, x: Matrix) -> Sequence[Any]:
    """Return the gradients of a (None if not needed) and b from that of x = solve(a, b), g."""
    to_b = linalg.solve(_transposed(a), g)
    to_a = unbroadcast(-to_b @ _transposed(x), a.shape) if needs_grad[0] else None
    return to_a, unbroadcast(to_b, b.shape)


@register
def solve(a: Operand, b: Operand) -> Tensor:
    """Solve a x = b for x; a is (..., n, n), b (n,) or (..., n, k); ValueError if a is singular or shapes do not fit.

    Args:
        a: invertible matrices (..., n, n).
        b: a vector (n,), or matrices (..., n, k); leading axes broadcast.

    Raises:
        ValueError: a is singular or not square, or the shapes do not fit.
        TypeError: the numbers are neither float32 nor float64, nor integers.
    """
    a, b = as_tensors(a, b)
    if b.ndim == 1:
        x = solve(a, b.reshape(b.size, 1))
        return x.reshape(x.shape[:-1])
    arrays = _matrices("solve", a, b)
    if b.ndim < 2 or b.shape[-2] != a.shape[-1]:
        raise ValueError(f"solve: expected b with {a.shape[-1]} rows, (n,) or (..., n, k), got shape {b.shape}")
    try:
        np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise ValueError(f"solve: shapes {a.shape} and {b.shape} do not broadcast in their leading axes") from None
    x = ON_ARRAYS.solve(*arrays)
    return _record(solve, _solve_gradient, x, (a, b), (*arrays, x), "solve")


def _inv_gradient(linalg: Any, needs_grad: NeedsGrad, g: Matrix, x: Matrix, y: Matrix) -> Sequence[Any]:
    """Return (gradient of x,) from g, that of y = inv(x)."""
    return (-_transposed(y) @ g @ _transposed(y),)


@register
def inv(x: Operand) -> Tensor:
    """Invert matrices (..., n, n); ValueError for singular ones. `solve(a, b)` is more precise than inv(a) b."""
    x = as_tensor(x)
    (array,) = _matrices("inv", x)
    y = _computed("inv", "an invertible matrix", array)
    return _record(inv, _inv_gradient, y, (x,), (array, y), "inv")


ON_TENSORS = SimpleNamespace(solve=solve, inv=inv)


# -------------------------------------------------------------------- determinants
def _det_gradient(linalg: Any, needs_grad: NeedsGrad, g: Matrix, x: Matrix, y: Matrix) -> Sequence[Any]:
    """Return (gradient of x,) from g, that of y = det(x); it inverts x."""
    return ((g * y)[..., None, None] * _transposed(linalg.inv(x)),)


@register
def det(x: Operand) -> Tensor:
    """Return the determinants (...) of matrices (..., n, n); the gradient raises a ValueError for singular ones."""
    x = as_tensor(x)
    (array,) = _matrices("det", x)
    y = _computed("det", "finite numbers", array)
    return _record(det, _det_gradient, y, (x,), (array, y), "det")


def _slogdet_gradient(linalg: Any, needs_grad: NeedsGrad, g: Matrix, x: Matrix, *_: Matrix) -> Sequence[Any]:
    """Return (gradient of x,) from g, that of log |det(x)|; it inverts x."""
    return (g[..., None, None] * _transposed(linalg.inv(x)),)


@register
def slogdet(x: Operand) -> tuple[Tensor, Tensor]:
    """Return signs and logarithms of the absolute values of determinants, (...) each; only the second has a gradient.

    It neither overflows nor underflows for large matrices. The gradient raises a ValueError for singular matrices.
    """
    x = as_tensor(x)
    (array,) = _matrices("slogdet", x)
    sign, log = _computed("slogdet", "finite numbers", array)
    values = (array, sign, log)
    return Tensor(sign, False, x.is_batched and x.ndim > 2), _record(
        slogdet, _slogdet_gradient, log, (x,), values, "slogdet"
    )


# -------------------------------------------------------------------- factorizations
def _cholesky_gradient(linalg: Any, needs_grad: NeedsGrad, g: Matrix, x: Matrix, y: Matrix) -> Sequence[Any]:
    """Return the symmetric gradient of x from that of its Cholesky factor y, g, in a tuple."""
    upper, eye = _transposed(y), _identity(y)
    lower = array_module(eye).tri(len(eye), dtype=eye.dtype) - 0.5 * eye  # the triangle, with half of the diagonal
    inner = (upper @ g) * lower
    right = _transposed(linalg.solve(upper, _transposed(inner)))
    return (_symmetric(linalg.solve(upper, right)),)


@register
def cholesky(x: Operand) -> Tensor:
    """Return lower triangular L with x = L transposed(L), for symmetric, positive definite matrices (..., n, n).

    Only the lower triangle of x is read; the gradient is that of a symmetric matrix. A ValueError is raised if x is not
    positive definite. Source: Murray 2016, "Differentiation of the Cholesky decomposition".
    """
    x = as_tensor(x)
    (array,) = _matrices("cholesky", x)
    y = _computed("cholesky", "a positive definite matrix", array)
    return _record(cholesky, _cholesky_gradient, y, (x,), (array, y), "cholesky")


def _eigenvalue_gradient(
    linalg: Any, needs_grad: NeedsGrad, g: Matrix, x: Matrix, values: Matrix, vectors: Matrix
) -> Sequence[Any]:
    """Return (gradient of x,) from g, that of the eigenvalues of a symmetric x."""
    return ((vectors * g[..., None, :]) @ _transposed(vectors),)


def _eigenvector_gradient(
    linalg: Any, needs_grad: NeedsGrad, g: Matrix, x: Matrix, values: Matrix, vectors: Matrix
) -> Sequence[Any]:
    """Return (gradient of x,), symmetric, from g, that of the eigenvectors of a symmetric x."""
    back = _transposed(vectors)
    return (_symmetric(vectors @ (_inverse_gaps(values) * (back @ g)) @ back),)


@register
def eigh(x: Operand) -> tuple[Tensor, Tensor]:
    """Return eigenvalues (..., n), ascending, and eigenvectors (columns) of symmetric matrices, from lower triangles.

    Only the lower triangle of x is read; the gradient is that of a symmetric matrix. Where eigenvalues are equal, the
    gradient of the eigenvectors does not exist: it is infinite or NaN.
    """
    x = as_tensor(x)
    (array,) = _matrices("eigh", x)
    values, vectors = _computed("eigh", "a matrix whose eigenvalues converge", array)
    saved = (array, values, vectors)
    return (
        _record(eigh, _eigenvalue_gradient, values, (x,), saved, "eigh values"),
        _record(eigh, _eigenvector_gradient, vectors, (x,), saved, "eigh vectors"),
    )


def _singular_value_gradient(
    linalg: Any, needs_grad: NeedsGrad, g: Matrix, x: Matrix, u: Matrix, s: Matrix, vh: Matrix
) -> Sequence[Any]:
    """Return (gradient of x,) from g, that of the singular values."""
    return ((u * g[..., None, :]) @ vh,)


def _left_vector_gradient(
    linalg: Any, needs_grad: NeedsGrad, g: Matrix, x: Matrix, u: Matrix, s: Matrix, vh: Matrix
) -> Sequence[Any]:
    """Return the gradient of x from that of its left singular vectors u, g, in a tuple."""
    inner, columns = _transposed(u) @ g, s[..., None, :]
    within = u @ (_inverse_gaps(s * s) * (inner - _transposed(inner)) * columns)
    return ((within + (g - u @ inner) / columns) @ vh,)


def _right_vector_gradient(linalg: Any, needs_grad: NeedsGrad, g: Matrix, x: Matrix, *usv: Matrix) -> Sequence[Any]:
    """Return the gradient of x from that of vh, g, in a tuple: as of left vectors of the transposed matrix."""
    u, s, vh = usv
    mirrored = (_transposed(vh), s, _transposed(u))
    (gradient,) = _left_vector_gradient(linalg, needs_grad, _transposed(g), x, *mirrored)
    return (_transposed(gradient),)


@register
def svd(x: Operand) -> tuple[Tensor, Tensor, Tensor]:
    """Return U (..., m, k), s (..., k), descending, and Vh (..., k, n) with x = U diag(s) Vh, for x (..., m, n).

    k is the smaller of m and n, as in `numpy.linalg.svd(x, full_matrices=False)`. Where singular values are equal, or
    0, the gradients of U and Vh do not exist: they are infinite or NaN.
    """
    x = as_tensor(x)
    (array,) = _matrices("svd", x, square=False)
    results = _computed("svd", "a matrix whose singular values converge", array, full_matrices=False)
    gradients = {"u": _left_vector_gradient, "s": _singular_value_gradient, "vh": _right_vector_gradient}
    u, s, vh = (
        _record(svd, gradient, result, (x,), (array, *results), f"svd {name}")
        for (name, gradient), result in zip(gradients.items(), results)
    )
    return u, s, vh
