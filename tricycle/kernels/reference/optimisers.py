"""What optimisers do with one parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tricycle.devices import Array, array_module
from tricycle.kernels.dispatch import kernel
from tricycle.kernels.reference.widening import widening, widening_in_place


@kernel
@widening_in_place(0, 2, 3)
def adamw(
    weights: Array,
    grad: Array,
    first: Array,
    second: Array,
    step: int,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    factor: Array | float | None = None,
) -> None:
    """One update of AdamW (Loshchilov and Hutter 2019, algorithm 2), in place on weights and both moments.

    Args:
        step: how many updates these weights will have had, this one included; a number or a 0-d array.
        factor: the gradient is multiplied by it, a number or a 0-d array; where it is not above 0, nothing changes.
    """
    xp = array_module(weights)
    changed = (weights, first, second)
    before = [array.copy() for array in changed if factor is not None]
    grad = grad if factor is None else grad * factor
    beta1, beta2 = betas
    first *= beta1
    first += (1 - beta1) * grad
    second *= beta2
    second += (1 - beta2) * (grad * grad)
    if decay:
        weights *= 1 - learning_rate * decay
    deviation = xp.sqrt(second) / (1 - beta2**step) ** 0.5 + eps
    weights -= learning_rate / (1 - beta1**step) * first / deviation
    for array, old in zip(changed, before):
        array[...] = xp.where(xp.asarray(factor) > 0, array, old)


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
def each(like: Array, jobs: Sequence[tuple[Callable[[], Any], int, bool, bool]]) -> list[Any]:
    """Call functions that do not depend on each other, which compute with arrays like `like`; return their results.

    Args:
        jobs: of each the function, the number of elements that it computes with, whether it may run in any thread, at
            the same time as others, and whether it uses one thread only, however many elements there are.
    """
    return [job[0]() for job in jobs]


@kernel
@widening(1)
def orthogonalise(x: Array, precision: str = "float32") -> Array:
    """Each matrix of (N, R, C) with all its singular values brought near 1: U V^T for U S V^T, about.

    Args:
        precision: of the products.
    """
    xp = array_module(x)
    if x.shape[1] > x.shape[2]:
        return orthogonalise.plain(x.swapaxes(1, 2)).swapaxes(1, 2)
    x = x / (1.01 * xp.sqrt((x * x).sum(axis=(1, 2), keepdims=True)) + 1e-7)
    for a, b, c in POLAR:
        square = xp.matmul(x, x.swapaxes(1, 2))
        x = a * x + xp.matmul(b * square + c * xp.matmul(square, square), x)
    return x
