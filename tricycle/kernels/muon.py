"""The kernel of the Muon optimizer: approximate orthogonalization of matrices."""

from __future__ import annotations

from tricycle.devices import Array, array_module
from tricycle.kernels.dispatch import kernel, upcasting

# The coefficients of x, x x^T x and (x x^T)^2 x in five steps of the Newton-Schulz iteration, which brings singular
# values of at most 1 near 1 (Amsel et al. 2025, "The Polar Express").
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
    """Return about U V^T, in x's dtype, of each U S V^T in x (N, R, C) by 5 Newton-Schulz (Polar Express) steps.

    Args:
        precision: of the matrix products.
    """
    xp = array_module(x)
    if x.shape[1] > x.shape[2]:
        return orthogonalize.reference(x.swapaxes(1, 2)).swapaxes(1, 2)
    x = x / (1.01 * xp.sqrt((x * x).sum(axis=(1, 2), keepdims=True)) + 1e-7)
    for a, b, c in POLAR:
        square = xp.matmul(x, x.swapaxes(1, 2))
        x = a * x + xp.matmul(b * square + c * xp.matmul(square, square), x)
    return x
