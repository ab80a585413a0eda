"""The kernel of low-rank updates: a product that is added to an array in place."""

from __future__ import annotations

from tricycle import kernels
from tricycle.devices import Array
from tricycle.kernels.dispatch import kernel


@kernel
def add_matmul(total: Array, a: Array, b: Array, precision: str = "float32") -> None:
    """Add a (M, K) @ b (K, N) to `total` (M, N) in place; the sum is computed in the product's dtype.

    Args:
        a: an operand of the precision, as `kernels.matmul_operand` returns it; b likewise.
    """
    product = kernels.matmul(a, b, None, None, None, precision)
    if total.dtype == product.dtype:
        total += product
    else:
        total[...] = total.astype(product.dtype) + product
