"""The model of a `GPTConfig`, and Muon, in idiomatic PyTorch.

Parameters have the names and shapes of ours. Shapes: B batch, T tokens, C channels, H heads, D = C / H.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tricycle.configs import GPTConfig
from tricycle.kernels.muon import POLAR

EPS, QK_EPS = 1e-5, 1e-6


class Dense(nn.Module):
    """A linear layer with weights (from_size, to_size)."""

    def __init__(self, from_size: int, to_size: int, bias: bool) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(from_size, to_size))
        self.bias = nn.Parameter(torch.zeros(to_size)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ weights (+ bias), (..., to_size)."""
        return F.linear(x, self.weights.T, self.bias)


class Norm(nn.Module):
    """A layer norm or RMS norm."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.size, self.centred = (config.embedding_dim,), config.norm == "layer_norm"
        self.gain = nn.Parameter(torch.ones(self.size))
        self.bias = nn.Parameter(torch.zeros(self.size)) if self.centred and config.bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x (..., C) normalized over its last axis: layer norm if `centred`, else RMS norm, without the bias."""
        if self.centred:
            return F.layer_norm(x, self.size, self.gain, self.bias, eps=EPS)
        return F.rms_norm(x, self.size, self.gain, eps=EPS)


class TokenShift(nn.Module):
    """A learned mix of each token with the one before it: x_t + mix * x_(t-1)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x (B, T, C) plus `mix` times the previous token (zeros for the first)."""
        return x + self.mix * F.pad(x, (0, 0, 1, -1))


class KeyShift(nn.Module):
    """A learned interpolation of each key with the one before it: k_t + mix * (k_(t-1) - k_t)."""

    def __init__(self, n_heads: int, head_size: int) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.linspace(0, 1, head_size).repeat(n_heads))

    def forward(self, keys: torch.Tensor) -> torch.Tensor:
        """Return keys (B, T, C) moved by `mix` toward those of the previous token (zeros for the first)."""
        return keys + self.mix * (F.pad(keys, (0, 0, 1, -1)) - keys)


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config, size = config, config.embedding_dim
        self.shift = TokenShift(size) if getattr(config, "token_shift", False) else None
        self.qkv = Dense(size, 3 * size, config.bias)
        self.key_shift = KeyShift(config.n_heads, size // config.n_heads) if config.key_shift else None
        self.projection = Dense(size, size, config.bias)
        if config.positions == "rotary":
            d = int(size // config.n_heads * config.rotary_fraction)
            speeds = 10_000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
            angles = torch.arange(config.context_window, dtype=torch.float64)[:, None] * speeds
            self.register_buffer("cos", angles.cos().float(), persistent=False)
            self.register_buffer("sin", angles.sin().float(), persistent=False)

    def apply_rope(self, x: torch.Tensor) -> torch.Tensor:
        """Return x (B, H, T, D) with RoPE: channels i and i + R/2 of the first R form a pair."""
        cos, sin = (table[: x.shape[-2]] for table in (self.cos, self.sin))
        half = cos.shape[-1]
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the causal self-attention output (B, T, C) for x (B, T, C)."""
        n_items, n_tokens, _ = x.shape
        qkv = self.qkv(x if self.shift is None else self.shift(x))
        if self.key_shift is not None:
            q, k, v = qkv.chunk(3, dim=-1)
            qkv = torch.cat([q, self.key_shift(k), v], dim=-1)
        q, k, v = qkv.view(n_items, n_tokens, 3, self.config.n_heads, -1).permute(2, 0, 3, 1, 4)
        if self.config.qk_norm:
            q, k = (F.rms_norm(heads, heads.shape[-1:], eps=QK_EPS) for heads in (q, k))
        if self.config.positions == "rotary":
            q, k = self.apply_rope(q).to(v.dtype), self.apply_rope(k).to(v.dtype)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.config.score_scale or None)
        return F.dropout(self.projection(mixed.transpose(1, 2).reshape(x.shape)), self.config.dropout, self.training)


class MLP(nn.Module):
    """The feed-forward network of a block."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config, gated = config, config.activation == "swiglu"
        hidden = round(config.embedding_dim * config.expansion_ratio)
        hidden = -(-2 * hidden // 3 // 8) * 8 if gated else hidden
        self.up = Dense(config.embedding_dim, 2 * hidden if gated else hidden, config.bias)
        self.projection = Dense(hidden, config.embedding_dim, config.bias)

    def activation(self, x: torch.Tensor) -> torch.Tensor:
        """Return the config's activation of x (..., F); "swiglu" gives (..., F / 2)."""
        name = self.config.activation
        if name == "swiglu":
            value, gate = x.chunk(2, dim=-1)
            return value * F.silu(gate)
        if name == "gelu":
            return F.gelu(x, approximate="tanh")
        return F.silu(x) if name == "swish" else F.relu(x) if name == "relu" else F.relu(x).square()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output (B, T, C) of the network for x (B, T, C)."""
        return F.dropout(self.projection(self.activation(self.up(x))), self.config.dropout, self.training)


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm, self.attention = Norm(config), Attention(config)
        self.mlp_norm, self.mlp = Norm(config), MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the hidden states (B, T, C) after the block, residual connections included."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class EmbeddingTable(nn.Module):
    """An embedding table."""

    def __init__(self, n: int, size: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(n, size))


class TorchGPT(nn.Module):
    """A GPT from tokens (B, T) to logits (B, T, V).

    Raises:
        ValueError: a softmax of attention that PyTorch has no fused kernel for.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.softmax != "softmax":
            raise ValueError(f"TorchGPT: expected softmax to be softmax, got {config.softmax}")
        self.config, size = config, config.embedding_dim
        self.token_embedding = EmbeddingTable(config.vocab_size, size)
        self.position_embedding = EmbeddingTable(config.context_window, size) if config.positions == "learned" else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = Norm(config)
        self.head = None if config.tied else Dense(size, config.vocab_size, False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits (B, T, V) of tokens (B, T)."""
        x = F.embedding(tokens, self.token_embedding.weights)
        if self.position_embedding is not None:
            x = x + self.position_embedding.weights[: tokens.shape[1]]
        x = F.dropout(x, self.config.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return F.linear(x, self.token_embedding.weights) if self.head is None else self.head(x)


# -------------------------------------------------------------------- Muon
class Muon(torch.optim.Optimizer):
    """The Muon optimizer: Nesterov momentum with orthogonalized updates (Jordan et al. 2024).

    A matrix that is made of square ones side by side is taken as these.

    Args:
        lr: of the matrices.
        decay_rate: what the decay is multiplied by, the rate of the other parameters.
        low: make the products in bfloat16.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        lr: float,
        weight_decay: float,
        momentum: float = 0.95,
        low: bool = False,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "decay_rate": lr})
        self.momentum, self.weight_decay, self.low = momentum, weight_decay, low

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient, in place; `closure` is ignored, the result is None."""
        for group in self.param_groups:
            for weights in group["params"]:
                if weights.grad is not None:
                    self._update(weights, weights.grad, group["lr"], group["decay_rate"])

    def _update(self, weights: torch.Tensor, grad: torch.Tensor, rate: float, decay_rate: float) -> None:
        """Decay a matrix, then subtract the orthogonalized Nesterov momentum of its square blocks; in place."""
        state = self.state[weights]
        if not state:
            state["velocity"] = torch.zeros_like(weights)
        state["velocity"].lerp_(grad, 1 - self.momentum)
        ahead = grad.lerp(state["velocity"], self.momentum)
        parts = blocks(ahead)
        n_rows, n_columns = weights.shape
        parts.copy_(orthogonalize(parts.bfloat16() if self.low else parts))
        if self.weight_decay:
            weights.mul_(1 - decay_rate * self.weight_decay)
        weights.add_(ahead, alpha=-rate * math.sqrt(max(1, n_columns / n_rows) / len(parts)))


def blocks(matrix: torch.Tensor) -> torch.Tensor:
    """Return a view of the square blocks of a matrix, (N, R, C); one block if it cannot be split."""
    n_rows, n_columns = matrix.shape
    if n_columns % n_rows == 0:
        return matrix.view(n_rows, -1, n_rows).transpose(0, 1)
    return matrix.view(-1, n_columns, n_columns) if n_rows % n_columns == 0 else matrix[None]


def orthogonalize(x: torch.Tensor) -> torch.Tensor:
    """Return approximately U V^T for each matrix U S V^T of x (N, R, C), in the same shape and dtype."""
    if x.shape[1] > x.shape[2]:
        return orthogonalize(x.mT).mT
    x = x / (1.01 * x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for a, b, c in POLAR:
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x
