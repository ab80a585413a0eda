"""What each library differentiates, found by differentiating (`python -m benchmarks.transforms_probes LIBRARY`).

Each probe computes derivatives with a library and compares them with known values or with finite differences. It prints
JSON: for each probe "yes", or the reason why not, such as the type of the error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

Vector = np.ndarray
X = np.array([0.3, -0.7, 1.1])
V = np.array([1.0, 0.5, -2.0])
LINEAR_ALGEBRA: dict[str, Callable[[Any, Any, Any], Any]] = {  # functions (library, symmetric matrix, matrix)
    "solve": lambda lib, s, a: lib.linalg.solve(a, s),
    "inv": lambda lib, s, a: lib.linalg.inv(a),
    "det": lambda lib, s, a: lib.linalg.det(a),
    "slogdet": lambda lib, s, a: lib.linalg.slogdet(a)[1],
    "cholesky": lambda lib, s, a: lib.linalg.cholesky(s),
    "eigh": lambda lib, s, a: lib.linalg.eigh(s)[0],
    "svd": lambda lib, s, a: lib.svd(a)[1],
    "qr": lambda lib, s, a: lib.linalg.qr(a)[1],
    "pinv": lambda lib, s, a: lib.linalg.pinv(a),
}


# -------------------------------------------------------------------- the libraries
# Each has array (NumPy array to its own), numpy (back), grad, jvp, vmap and attention, None where there is no such
# function, linalg, svd, and the functions transpose, tanh and sum.
def tricycle() -> SimpleNamespace:
    """Return Tricycle's functions under the names that the probes use, such as array, grad and vmap."""
    from tricycle import extra_ops, linalg, ops, transforms
    from tricycle.attention.attend import Attention
    from tricycle.tensor import Tensor

    return SimpleNamespace(
        array=lambda x: Tensor(x, False),
        numpy=lambda x: x.array,
        grad=transforms.grad,
        jvp=lambda f, x, v: transforms.jvp(f, (x,), (v,))[1],
        vmap=transforms.vmap,
        attention=Attention(),
        linalg=linalg,
        svd=linalg.svd,
        transpose=extra_ops.transpose,
        tanh=ops.tanh,
        sum=extra_ops.sum,
    )


def autograd() -> SimpleNamespace:
    """Return HIPS autograd's functions under the names that the probes use; None for those it lacks."""
    import autograd.numpy as anp
    from autograd import grad, make_jvp

    return SimpleNamespace(
        array=lambda x: x,
        numpy=np.asarray,
        grad=grad,
        jvp=lambda f, x, v: make_jvp(f)(x)(v)[1],
        vmap=None,
        attention=None,
        linalg=anp.linalg,
        svd=lambda a: anp.linalg.svd(a, full_matrices=False),
        transpose=anp.transpose,
        tanh=anp.tanh,
        sum=anp.sum,
    )


def torch() -> SimpleNamespace:
    """Return PyTorch's functions under the names that the probes use, such as array, grad and vmap."""
    import torch

    return SimpleNamespace(
        array=torch.from_numpy,
        numpy=lambda x: x.detach().numpy(),
        grad=torch.func.grad,
        jvp=lambda f, x, v: torch.func.jvp(f, (x,), (v,))[1],
        vmap=torch.func.vmap,
        attention=lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        linalg=torch.linalg,
        svd=lambda a: torch.linalg.svd(a, full_matrices=False),
        transpose=torch.t,
        tanh=torch.tanh,
        sum=torch.sum,
    )


def jax() -> SimpleNamespace:
    """Return JAX's functions under the names that the probes use, and enable float64 in the whole process."""
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", True)
    return SimpleNamespace(
        array=jnp.asarray,
        numpy=np.asarray,
        grad=jax.grad,
        jvp=lambda f, x, v: jax.jvp(f, (x,), (v,))[1],
        vmap=jax.vmap,
        attention=lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True),
        linalg=jnp.linalg,
        svd=lambda a: jnp.linalg.svd(a, full_matrices=False),
        transpose=jnp.transpose,
        tanh=jnp.tanh,
        sum=jnp.sum,
    )


LIBRARIES: dict[str, Callable[[], SimpleNamespace]] = {
    function.__name__: function for function in (tricycle, autograd, torch, jax)
}


# -------------------------------------------------------------------- probes
class MissingFunction(Exception):
    """The library has no such function."""


def required(lib: Any, name: str) -> Any:
    """Return a function of a library; raise MissingFunction if it is None."""
    function = getattr(lib, name)
    if function is None:
        raise MissingFunction(name)
    return function


def check_close(actual: Any, expected: Any, tolerance: float = 1e-6) -> None:
    """Raise ValueError if arrays differ by over `tolerance` times the largest expected absolute value (at least 1)."""
    error = np.max(np.abs(np.asarray(actual) - expected))
    if not error <= tolerance * max(1.0, np.max(np.abs(expected))):
        raise ValueError(f"expected {expected}, got {actual}")


def check_orders(lib: Any, f: Callable[[Any], Any], x: Vector, step: float = 1e-5, tolerance: float = 1e-5) -> None:
    """Raise ValueError if first or second derivatives of f (to a scalar) differ from finite differences."""
    direction = np.random.default_rng(0).standard_normal(x.shape)
    value = lambda z: float(lib.numpy(f(lib.array(z))))
    slope = lambda z: lib.numpy(lib.grad(f)(lib.array(z)))
    first = (value(x + step * direction) - value(x - step * direction)) / (2 * step)
    check_close((slope(x) * direction).sum(), first, tolerance)
    second = (slope(x + step * direction) - slope(x - step * direction)) / (2 * step)
    along = lambda z: lib.sum(lib.grad(f)(z) * lib.array(direction))
    check_close(lib.numpy(lib.grad(along)(lib.array(x))), second, tolerance)


def forward_mode(lib: Any) -> str:
    """Return "yes" if the jvp of tanh is right; ValueError if not, MissingFunction without a jvp."""
    tangent = required(lib, "jvp")(lib.tanh, lib.array(X), lib.array(V))
    check_close(lib.numpy(tangent), V / np.cosh(X) ** 2)
    return "yes"


def nested_gradients(lib: Any) -> str:
    """Return "yes" if the third derivative by nested gradients is right, else raise ValueError."""
    f = lambda x: lib.sum(lib.tanh(x))
    third = lib.grad(lambda x: lib.sum(lib.grad(lambda x: lib.sum(lib.grad(f)(x)))(x)))(lib.array(X))
    t = np.tanh(X)
    check_close(lib.numpy(third), (1 - t**2) * (6 * t**2 - 2))
    return "yes"


def batching(lib: Any) -> str:
    """Return "yes" if vmap of grad calls the function once, else "in a loop"; raise if it is wrong or missing."""
    calls = []

    def f(x: Any) -> Any:
        calls.append(1)
        return lib.sum(lib.tanh(x) * x)

    batch = np.stack([X, V, X + V])
    slopes = required(lib, "vmap")(lib.grad(f))(lib.array(batch))
    check_close(lib.numpy(slopes), np.tanh(batch) + batch / np.cosh(batch) ** 2)
    return "yes" if len(calls) == 1 else "in a loop"


def nested_containers(lib: Any) -> str:
    """Return "yes" if gradients with respect to a dict of lists and tuples are right, else raise ValueError."""
    tree = {"a": [lib.array(X), (lib.array(V),)], "b": lib.array(X + 1)}
    slopes = lib.grad(lambda tree: lib.sum(tree["a"][0] * tree["a"][1][0] * tree["b"]))(tree)
    check_close(lib.numpy(slopes["a"][1][0]), X * (X + 1))
    return "yes"


def attention(lib: Any) -> str:
    """Return "yes" if attention's first and second derivatives are right; raise if they are wrong or it is missing."""
    function, (heads, rest) = (
        required(lib, "attention"),
        np.split(np.random.default_rng(0).random((1, 2, 8, 2, 4)), 2, 1),
    )
    fixed = lib.array(rest[:, 0])
    f = lambda x: lib.sum(function(x, fixed, x) ** 2)
    check_orders(lib, f, heads[:, 0], 1e-2, 1e-2)  # JAX computes the softmax in float32
    return "yes"


def numpy_functions(lib: Any) -> str:
    """Return "yes" if the gradient of NumPy's own functions is right, else raise ValueError."""
    matrix = np.random.default_rng(0).random((3, 3)) + 2 * np.eye(3)
    f = lambda x: np.sum(np.linalg.solve(matrix, np.tanh(x)) * np.exp(x))
    expected = [(f(X + step) - f(X - step)) / 2e-6 for step in 1e-6 * np.eye(3)]
    check_close(lib.numpy(lib.grad(f)(lib.array(X))), np.array(expected), 1e-5)
    return "yes"


def linear_algebra(lib: Any) -> str:
    """Return "yes", or "all but NAMES": the functions of LINEAR_ALGEBRA with a wrong first or second derivative."""
    start = np.random.default_rng(0).random((3, 3)) + 2 * np.eye(3)
    missing = []
    for name, function in LINEAR_ALGEBRA.items():

        def f(x: Any, function: Any = function) -> Any:
            symmetric = (x + lib.transpose(x)) * 0.5 + lib.array(np.diag([1.0, 2.0, 4.0]))
            return lib.sum(lib.tanh(function(lib, symmetric, x) * 0.1))

        try:
            check_orders(lib, f, start)
        except Exception:  # the libraries raise errors of all types
            missing.append(name)
    return f"all but {', '.join(missing)}" if missing else "yes"


PROBES: dict[str, Callable[[Any], str]] = {
    "forward mode": forward_mode,
    "third derivative by nested gradients": nested_gradients,
    "`vmap` of a gradient": batching,
    "nested containers": nested_containers,
    "second order of the attention function": attention,
    "NumPy's own functions": numpy_functions,
    "linear algebra, both orders": linear_algebra,
}


def probe(library: str) -> Iterator[tuple[str, str]]:
    """Yield (probe, result text) for all PROBES in a library of LIBRARIES; exceptions become results, too."""
    lib = LIBRARIES[library]()
    for name, function in PROBES.items():
        try:
            yield name, function(lib)
        except MissingFunction:
            yield name, "no such function"
        except Exception as error:  # the libraries raise errors of all types
            yield name, f"no: {type(error).__name__}"


if __name__ == "__main__":
    print(json.dumps(dict(probe(sys.argv[1]))))
