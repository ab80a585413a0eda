"""The sides of the comparison of gradient transforms: the same functions in each library.

Each function of SIDES returns a step, which computes a gradient or a Hessian-vector product and returns its arrays. The
libraries that follow NumPy's functions (HIPS autograd and JAX) share the code of the GPT; PyTorch has its fused
functions, as its users write it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.overhead import VALUES, multiply_add_chain
from benchmarks.shapes import SHAPES
from benchmarks.workers import random_batches, serve
from tricycle.configs import GPTConfig

Step = Callable[[], list[np.ndarray]]  # returns the gradients, or the products, in the order of the arguments
CHAIN_LENGTH = 500  # of `x * b + c`, two nodes each
MLPS = {"small": (32, (16, 32, 32, 1)), "large": (128, (784, 512, 512, 10))}  # rows, and sizes of the layers
TASKS = ("chain", *(f"mlp-{name}" for name in MLPS), "hvp-tiny", "hvp-S")


# -------------------------------------------------------------------- arrays and functions, the same for all sides
def chain_inputs() -> list[np.ndarray]:
    """Return x, b and c as float32 arrays of one element."""
    return [np.array([value], np.float32) for value in VALUES]


def mlp_inputs(name: str) -> tuple[list[Any], np.ndarray, np.ndarray]:
    """Return float32 weights (pairs of matrix and bias), inputs and targets of an MLP in MLPS."""
    rng, (n_rows, sizes) = np.random.default_rng(0), MLPS[name]
    draw: Any = lambda *shape: rng.standard_normal(shape, dtype=np.float32)
    weights = [(draw(m, n) * np.float32(m**-0.5), draw(n) * np.float32(0.1)) for m, n in pairwise(sizes)]
    return weights, draw(n_rows, sizes[0]), draw(n_rows, sizes[-1])


def mlp_loss(weights: Any, x: Any, y: Any, tanh: Callable[[Any], Any]) -> Any:
    """Return the mean squared error, a scalar, of an MLP with tanh; `weights` are pairs of matrix and bias."""
    for matrix, bias in weights[:-1]:
        x = tanh(x @ matrix + bias)
    return ((x @ weights[-1][0] + weights[-1][1] - y) ** 2).mean()


def gpt_config(shape: str, batch_size: int) -> GPTConfig:
    """Return the configuration of a shape of SHAPES with a batch size (0: its own)."""
    return replace(SHAPES[shape], batch_size=batch_size or SHAPES[shape].batch_size)


def gpt_inputs(config: GPTConfig) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Return parameters of Tricycle's GPT and tangents, by name, and arrays (batch, tokens) of inputs and labels."""
    from tricycle.models import GPT

    rng = np.random.default_rng(0)
    parameters = {name: p.array for name, p in GPT(config).named_parameters()}
    tangents = {name: rng.standard_normal(p.shape, dtype=np.float32) for name, p in parameters.items()}
    ids, labels = next(random_batches(config))
    return parameters, tangents, ids, labels


def gpt_loss(p: Any, ids: np.ndarray, labels: np.ndarray, config: GPTConfig, xp: Any, logsumexp: Any) -> Any:
    """Return the cross-entropy of a GPT with the parameters p, by name, computed with NumPy's functions of `xp`."""
    n_items, n_tokens = ids.shape
    mask = np.triu(np.full((n_tokens, n_tokens), np.float32(-1e9)), 1)

    def norm(x: Any, name: str) -> Any:
        x = x - x.mean(axis=-1, keepdims=True)
        return x / xp.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * p[f"{name}.gain"] + p[f"{name}.bias"]

    def linear(x: Any, name: str) -> Any:
        return x @ p[f"{name}.weights"] + p[f"{name}.bias"]

    def heads(x: Any) -> Any:
        return x.reshape(n_items, n_tokens, config.n_heads, -1).transpose((0, 2, 1, 3))

    def attention(x: Any, name: str) -> Any:
        q, k, v = (heads(part) for part in xp.split(linear(x, f"{name}.qkv"), 3, axis=-1))
        scores = q @ k.transpose((0, 1, 3, 2)) * q.shape[-1] ** -0.5 + mask
        weights = xp.exp(scores - logsumexp(scores, axis=-1, keepdims=True))
        return linear((weights @ v).transpose((0, 2, 1, 3)).reshape(x.shape), f"{name}.projection")

    def mlp(x: Any, name: str) -> Any:
        x = linear(x, f"{name}.up")
        return linear(0.5 * x * (1 + xp.tanh(0.7978845608 * (x + 0.044715 * x**3))), f"{name}.projection")

    x = p["token_embedding.weights"][ids] + p["position_embedding.weights"][:n_tokens]
    for i in range(config.n_layers):
        x = x + attention(norm(x, f"blocks.{i}.attention_norm"), f"blocks.{i}.attention")
        x = x + mlp(norm(x, f"blocks.{i}.mlp_norm"), f"blocks.{i}.mlp")
    head = p["token_embedding.weights"].T if config.tied else p["head.weights"]
    logits = (norm(x, "norm") @ head).reshape(n_items * n_tokens, -1)
    return (logsumexp(logits, axis=-1) - logits[np.arange(labels.size), labels.ravel()]).mean()


# -------------------------------------------------------------------- the sides
def tricycle_step(task: str, config: GPTConfig) -> Step:
    """Return a function that computes a task's gradients (for "hvp-", the Hessian-vector product) by Tricycle."""
    from tricycle.loss import CrossEntropy
    from tricycle.models import GPT
    from tricycle.ops import tanh
    from tricycle.tensor import Tensor
    from tricycle.transforms import functional_call, grad, hvp, tree_leaves, tree_map

    arrays = lambda tree: [leaf.array for leaf in tree_leaves(tree)]
    tensors = lambda tree: tree_map(lambda x: Tensor(x, False), tree)
    if task == "chain":
        inputs = tensors(chain_inputs())
        slopes = grad(lambda *xs: multiply_add_chain(CHAIN_LENGTH, *xs), (0, 1, 2))
        return lambda: arrays(slopes(*inputs))
    if task.startswith("mlp"):
        weights, x, y = tensors(mlp_inputs(task.removeprefix("mlp-")))
        slope = grad(lambda weights: mlp_loss(weights, x, y, tanh))
        return lambda: arrays(slope(weights))
    parameters, tangents, ids, labels = gpt_inputs(config)
    model, primal, tangent = GPT(config), tensors(parameters), tensors(tangents)
    loss = lambda parameters: CrossEntropy()(labels, functional_call(model, parameters, ids))
    return lambda: arrays(hvp(loss, (primal,), (tangent,)))


def autograd_step(task: str, config: GPTConfig) -> Step:
    """Return a function that computes a task's gradients by HIPS autograd; for "hvp-", of <gradient, tangents>."""
    import autograd.numpy as anp
    from autograd import grad
    from autograd.scipy.special import logsumexp

    if task == "chain":
        chain = grad(lambda xs: multiply_add_chain(CHAIN_LENGTH, *xs)[0])
        inputs = chain_inputs()
        return lambda: list(chain(inputs))
    if task.startswith("mlp"):
        weights, x, y = mlp_inputs(task.removeprefix("mlp-"))
        slope = grad(lambda weights: mlp_loss(weights, x, y, anp.tanh))
        return lambda: [array for pair in slope(weights) for array in pair]
    parameters, tangents, ids, labels = gpt_inputs(config)
    gradient = grad(lambda p: gpt_loss(p, ids, labels, config, anp, logsumexp))

    def directional(p: Any) -> Any:
        slopes = gradient(p)
        return sum(anp.sum(slopes[name] * tangent) for name, tangent in tangents.items())

    return lambda: list(grad(directional)(parameters).values())


def torch_step(task: str, config: GPTConfig) -> Step:
    """Return a function for eager PyTorch's gradients of "chain" or "mlp-..."; else GPT's Hessian-vector product."""
    import torch
    from torch.autograd import grad
    from torch.nn import functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    variable = lambda array: torch.from_numpy(array).requires_grad_()
    arrays = lambda tensors: [tensor.numpy() for tensor in tensors]
    if task == "chain":
        inputs = [variable(array) for array in chain_inputs()]
        return lambda: arrays(grad(multiply_add_chain(CHAIN_LENGTH, *inputs), inputs))
    if task.startswith("mlp"):
        weights, x, y = mlp_inputs(task.removeprefix("mlp-"))
        pairs = [[variable(array) for array in pair] for pair in weights]
        leaves, rows, targets = [leaf for pair in pairs for leaf in pair], torch.from_numpy(x), torch.from_numpy(y)
        return lambda: arrays(grad(mlp_loss(pairs, rows, targets, torch.tanh), leaves))
    parameters, tangents, *batch = gpt_inputs(config)
    p = {name: variable(array) for name, array in parameters.items()}
    vectors = [torch.from_numpy(tangent) for tangent in tangents.values()]
    ids, labels = map(torch.from_numpy, batch)

    def linear(x: Any, name: str) -> Any:
        return F.linear(x, p[f"{name}.weights"].T, p[f"{name}.bias"])

    def norm(x: Any, name: str) -> Any:
        return F.layer_norm(x, x.shape[-1:], p[f"{name}.gain"], p[f"{name}.bias"])

    def loss() -> Any:
        x = F.embedding(ids, p["token_embedding.weights"]) + p["position_embedding.weights"][: ids.shape[1]]
        for i in range(config.n_layers):
            qkv = linear(norm(x, f"blocks.{i}.attention_norm"), f"blocks.{i}.attention.qkv")
            q, k, v = qkv.view(*ids.shape, 3, config.n_heads, -1).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
            x = x + linear(y, f"blocks.{i}.attention.projection")
            y = F.gelu(linear(norm(x, f"blocks.{i}.mlp_norm"), f"blocks.{i}.mlp.up"), approximate="tanh")
            x = x + linear(y, f"blocks.{i}.mlp.projection")
        head = p["token_embedding.weights"] if config.tied else p["head.weights"].T
        return F.cross_entropy(F.linear(norm(x, "norm"), head).flatten(0, 1), labels.flatten())

    def step() -> list[np.ndarray]:
        with sdpa_kernel(SDPBackend.MATH):  # the gradient of the fused kernel cannot be differentiated
            slopes = grad(loss(), list(p.values()), create_graph=True)
            return arrays(grad(slopes, list(p.values()), vectors))

    return step


def jax_step(task: str, config: GPTConfig, jitted: bool = False) -> Step:
    """Return a function that computes a task's gradients by JAX; for "hvp-", the gradient's jvp. `jitted`: compiled."""
    import jax
    import jax.numpy as jnp
    from jax.scipy.special import logsumexp

    wrap = jax.jit if jitted else lambda function: function
    arrays = lambda tree: [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]  # waits for the result
    tensors = lambda tree: jax.tree.map(jnp.asarray, tree)
    if task == "chain":
        chain: Any = wrap(jax.grad(lambda xs: multiply_add_chain(CHAIN_LENGTH, *xs)[0]))
        inputs = tensors(chain_inputs())
        return lambda: arrays(chain(inputs))
    if task.startswith("mlp"):
        weights, x, y = tensors(mlp_inputs(task.removeprefix("mlp-")))
        slope: Any = wrap(jax.grad(lambda weights, x, y: mlp_loss(weights, x, y, jnp.tanh)))
        return lambda: arrays(slope(weights, x, y))
    parameters, tangents, ids, labels = gpt_inputs(config)
    names, primal, tangent = list(parameters), tensors(parameters), tensors(tangents)
    gradient = jax.grad(lambda p, ids, labels: gpt_loss(p, ids, labels, config, jnp, logsumexp))
    product: Any = wrap(lambda p, v, ids, labels: jax.jvp(lambda p: gradient(p, ids, labels), (p,), (v,))[1])

    def step() -> list[np.ndarray]:
        result = product(primal, tangent, ids, labels)
        return [np.asarray(result[name]) for name in names]  # JAX sorts the names of a dict

    return step


SIDES: dict[str, Callable[[str, GPTConfig], Step]] = {
    "tricycle": tricycle_step,
    "autograd": autograd_step,
    "torch": torch_step,
    "jax": jax_step,
    "jax-jit": partial(jax_step, jitted=True),
}


def new_step(side: str, task: str, batch_size: int = 0) -> Step:
    """Return the step of a side for a task of TASKS; `batch_size` of the GPT (0: that of the shape)."""
    return SIDES[side](task, gpt_config("S" if task == "hvp-S" else "tiny", batch_size))


def main() -> None:
    """Answer requests on stdin (see `workers.serve`), also the name of a task, which "step" then runs: SIDE BATCH."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("batch", type=int)
    arguments = parser.parse_args()
    n_threads = int(os.environ["OMP_NUM_THREADS"])
    if sys.platform == "linux" and arguments.side.startswith("jax"):  # XLA reads no variable
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:n_threads])
    selected: dict[str, Step] = {}

    def select(task: str) -> None:
        selected.clear()  # its memory
        selected["step"] = new_step(arguments.side, task, arguments.batch)

    serve(arguments.side, lambda: selected["step"](), answers={task: partial(select, task) for task in TASKS})


if __name__ == "__main__":
    main()
