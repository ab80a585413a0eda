"""The kernel of Muon: matrices whose singular values are all brought near 1."""

from __future__ import annotations

from tricycle.devices import Array, array_module
from tricycle.kernels.dispatch import kernel, upcasting

# How Newton and Schulz's iteration brings singular values near 1 in five steps, whatever they were (at most 1):
# x, x x^T x and (x x^T)^2 x with these weights (Amsel et al. 2025, "The Polar Express").
POLAR = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
]


@kernel
@upcasting(1)
def orthogonalize(x: Array, precision: str = "float32") -> Array:
    """Each matrix of (N, R, C) with all its singular values brought near 1: U V^T for U S V^T, about.

    Args:
        precision: of the products.
    """
    xp = array_module(x)
    if x.shape[1] > x.shape[2]:
        return orthogonalize.reference(x.swapaxes(1, 2)).swapaxes(1, 2)
    x = x / (1.01 * xp.sqrt((x * x).sum(axis=(1, 2), keepdims=True)) + 1e-7)
    for a, b, c in POLAR:
        square = xp.matmul(x, x.swapaxes(1, 2))
        x = a * x + xp.matmul(b * square + c * xp.matmul(square, square), x)
    return x
