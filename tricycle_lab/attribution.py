"""Direct logit attribution: the logit of a token as the sum of what each part of a decoder adds to the residual stream.

The last norm divides the residual stream by its scale. With that scale held at its actual value, the logit is a linear
function of the stream, and the stream is a sum of the embedding and of the results of heads and MLPs.

Sources: nostalgebraist 2020 (logit lens); Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits".

Shapes: T tokens, C channels, L layers, H heads, E channels of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any, NamedTuple

import numpy as np

from tricycle.blocks import MultiHeadSelfAttention
from tricycle.devices import Array, array_module, to_cpu
from tricycle.layers import Layer, LayerNorm, RMSNorm
from tricycle.models import GPT
from tricycle.tensor import Tensor
from tricycle_lab.recorded_run import Recording, record_run


class LogitAttribution(NamedTuple):
    """A logit, or the difference of two logits, and the contributions that add up to it.

    Attributes:
        logit: the value that the model computes.
        embedding: the contribution of the token embedding and of learned positions.
        heads: of the attention heads, (L, H).
        attention_biases: of the biases of the attention layers' output projections, (L,).
        mlps: of the MLPs with their biases, (L,).
        bias: of the biases of the last norm and of the output head.
    """

    logit: float
    embedding: float
    heads: np.ndarray
    attention_biases: np.ndarray
    mlps: np.ndarray
    bias: float

    @property
    def total(self) -> float:
        """Return the sum of all contributions: the logit, up to rounding (also of activations with 8-bit weights)."""
        parts = (self.heads, self.attention_biases, self.mlps)
        return self.embedding + self.bias + sum(float(part.sum()) for part in parts)


def attribute_logit(
    model: GPT, tokens: Sequence[int], token: int, other: int | None = None, position: int = -1
) -> LogitAttribution:
    """Split the logit of `token` after a position, minus that of `other`, into contributions; ValueError if invalid.

    Args:
        model: a pre-norm decoder, sequential or parallel, without logit soft-capping.
        tokens: the text, T ids.
        token: the id whose logit is attributed.
        other: the id whose logit is subtracted.
        position: of the text; negative positions count from the end.

    Raises:
        ValueError: another model, no tokens, or a token or position out of range.
    """
    check_decoder("attribute_logit", model)
    _check_linear("attribute_logit", model)
    check_tokens("attribute_logit", tokens, model.config.vocab_size)
    check_tokens("attribute_logit", [token, token if other is None else other], model.config.vocab_size)
    if not -len(tokens) <= position < len(tokens):
        raise ValueError(f"attribute_logit: expected a position of {len(tokens)} tokens, got {position}")
    run = Recording(*([array[0, position] for array in arrays] for arrays in record_run(model, tokens)))
    logit, direction, bias = _output_direction(model, run.stream[-1], token, other)
    embedding = float(_to_float64(run.stream[0]) @ direction)
    direction *= model.config.residual_scale  # of what the blocks add
    heads = [_project_heads(block.attention, each) @ direction for block, each in zip(model.blocks, run.heads)]
    return LogitAttribution(
        logit,
        embedding,
        np.stack([rows[:-1] for rows in heads]),
        np.stack([rows[-1] for rows in heads]),
        np.stack([_to_float64(result) @ direction for result in run.mlp]),
        bias,
    )


def check_decoder(caller: str, model: Any) -> None:
    """Raise a ValueError unless the model is a `GPT` with multi-head attention in each block."""
    if not isinstance(model, GPT):
        raise ValueError(f"{caller}: expected a decoder (GPT), got a {type(model).__name__}")
    for block in model.blocks:
        attention = getattr(block, "attention", block)  # blocks of Mamba have none
        if not isinstance(attention, MultiHeadSelfAttention):
            got = type(attention).__name__
            raise ValueError(f"{caller}: expected MultiHeadSelfAttention in all blocks, got {got}")


def check_tokens(caller: str, tokens: Sequence[int], vocab_size: int) -> None:
    """Raise a ValueError unless `tokens` is a list of at least one id of the vocabulary."""
    ids = np.asarray(tokens)
    if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= vocab_size:
        raise ValueError(f"{caller}: expected at least one token, ids from 0 to {vocab_size - 1}, got {tokens!r}")


def _check_linear(caller: str, model: GPT) -> None:
    """Raise a ValueError unless logits are linear in the results of all layers once the last norm's scale is known."""
    placement = model.config.norm_placement
    if placement != "before" or not isinstance(model.norm, LayerNorm):
        got = f'norm_placement="{placement}"'
        raise ValueError(f"{caller}: expected a pre-norm model with a last norm (LayerNorm or RMSNorm), got {got}")
    if any(block.attention.gates_output for block in model.blocks):
        raise ValueError(f"{caller}: expected attention without a gate on its output, got one")
    if model.config.logit_cap:
        got = f"logit_cap={model.config.logit_cap}"
        raise ValueError(f"{caller}: expected a model without logit soft-capping, got {got}")


# -------------------------------------------------------------------- the residual stream
def _project_heads(attention: MultiHeadSelfAttention, heads: Array) -> np.ndarray:
    """Return what each head (H, E) adds to the residual stream, and the bias of the projection as last row: (H + 1, C).

    The layer itself projects one row for each head, so quantized weights and adapters are included.
    """
    n_heads, size = heads.shape
    xp = array_module(heads)
    rows = xp.zeros((n_heads + 1, n_heads, size), heads.dtype)
    each = xp.arange(n_heads)
    rows[each, each] = heads
    with attention.evaluating():
        projected = attention.projection(Tensor(rows.reshape(n_heads + 1, -1), requires_grad=False))
    result = _to_float64(projected.array)
    result[:-1] -= result[-1]
    return result


def _to_float64(array: Array) -> np.ndarray:
    """Return a float64 copy of an array in host memory."""
    return to_cpu(array).astype(np.float64)


# -------------------------------------------------------------------- the output layer
def _output_direction(model: GPT, stream: Array, token: int, other: int | None) -> tuple[float, np.ndarray, float]:
    """Return the logit (difference) after `stream` (C,), its gradient (C,) at a fixed scale of the norm, and its bias.

    The logit is the dot product of stream and gradient, plus the bias.
    """
    norm: Any = model.norm
    head = copy(model)
    head.norm = None
    with model.evaluating():
        normalized = norm(Tensor(stream[None], requires_grad=False)).array

    def logit_of(x: Tensor) -> Tensor:
        logits = head.logits(x)
        return logits[0, token] if other is None else logits[0, token] - logits[0, other]

    with frozen(model):
        x = Tensor(normalized)
        logit = logit_of(x)
        value = float(logit.array)
        logit.backward()
        bias = float(logit_of(Tensor(0 * normalized, requires_grad=False)).array)
    unembedding = _to_float64(gradient_of(x)[0])
    if norm.bias is not None:
        bias += float(_to_float64(norm.bias.array) @ unembedding)
    return value, _through_norm(norm, _to_float64(stream), unembedding), bias


def _through_norm(norm: LayerNorm, stream: np.ndarray, direction: np.ndarray) -> np.ndarray:
    """Return the gradient (C,) of `direction @ norm(x)` at `stream`, with the scale of the norm as a constant."""
    gain = 1.0 if norm.gain is None else _to_float64(norm.gain.array) + getattr(norm, "unit_offset", False)
    if isinstance(norm, RMSNorm):
        return direction * gain / np.sqrt(np.mean(stream**2) + norm.eps)
    scaled = direction * gain / np.sqrt(stream.var() + norm.eps)
    return scaled - scaled.mean()


def gradient_of(x: Tensor) -> Array:
    """Return the gradient of a Tensor after `backward`; zeros if the result does not depend on it."""
    return x.xp.zeros_like(x.array) if x.grad is None else x.grad.array


@contextmanager
def frozen(model: Layer) -> Iterator[None]:
    """Compute gradients of activations alone in a context: no dropout, and no parameter requires a gradient."""
    modes = [(layer, layer.training) for layer in model.layers()]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.eval()
    for parameter in parameters:
        parameter.requires_grad = False
    try:
        yield
    finally:
        for layer, training in modes:
            layer.training = training
        for parameter in parameters:
            parameter.requires_grad = True
