"""PyTorch as a second opinion: the same weights and batches give the same losses, gradients and training."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from op_properties import HIDDEN, attention_weights

from tricycle.configs import GPTConfig
from tricycle.layers import Layer
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.optimisers import AdamW, clip_gradients, decays
from tricycle.scheduler import WarmupCosine
from tricycle.softmaxes import new_softmax
from tricycle.tensor import Tensor
from tricycle.transforms import functional_call, hvp

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("one_torch_thread")
F = torch.nn.functional

BATCH, TOKENS, STEPS = 4, 24, 20
BASE = GPTConfig(
    vocab_size=61,
    context_window=32,
    embedding_dim=24,
    n_heads=3,
    n_layers=2,
    max_learning_rate=1e-2,
    min_learning_rate=1e-3,
    warmup_steps=5,
    steps=STEPS,
    weight_decay=0.1,
    beta2=0.95,
)
CONFIGS: dict[str, GPTConfig] = {
    "GPT-2": BASE,
    "untied": replace(BASE, tied=False),
    "no bias": replace(BASE, bias=False, activation="relu"),
    "RMSNorm": replace(BASE, norm="rms_norm", activation="swish", tied=False),
    "rotary": replace(BASE, positions="rotary", bias=False, tied=False),
    "modern": replace(BASE, positions="rotary", norm="rms_norm", activation="swiglu", bias=False),
    "softmax1": replace(BASE, softmax="softmax1"),
    "adaptive": replace(BASE, softmax="adaptive"),
    "sink": replace(BASE, softmax="sink"),
    "blocks": replace(BASE, softmax="blocks", softmax_blocks=2, bias=False),
    "mixed": replace(BASE, positions="rotary", activation="swiglu", expansion_ratio=2.5),
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@dataclass
class TorchGPT:
    """The model as a function of a dict of torch parameters, which has the names of Tricycle's parameters."""

    config: GPTConfig
    p: dict[str, torch.Tensor]

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.p[f"{name}.weights"].T, self.p.get(f"{name}.bias"))

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        size, gain = (self.config.embedding_dim,), self.p[f"{name}.gain"]
        if self.config.norm == "rms_norm":
            return F.rms_norm(x, size, gain, eps=1e-5)
        return F.layer_norm(x, size, gain, self.p.get(f"{name}.bias"), eps=1e-5)

    def activation(self, x: torch.Tensor) -> torch.Tensor:
        if self.config.activation == "swiglu":
            value, gate = x.chunk(2, dim=-1)
            return value * F.silu(gate)
        known = {"gelu": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu, "swish": F.silu}
        return known[self.config.activation](x)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """(B, H, T, D), with channels i and i + D/2 as one complex number."""
        n_tokens, size = x.shape[-2:]
        speeds = 10_000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angles = torch.arange(n_tokens, dtype=torch.float64)[:, None] * speeds
        turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
        z = torch.complex(x[..., : size // 2].contiguous(), x[..., size // 2 :].contiguous()) * turn
        return torch.cat([z.real, z.imag], dim=-1)

    def attention(self, x: torch.Tensor, name: str) -> torch.Tensor:
        n_items, n_tokens, width = x.shape
        heads = (n_items, n_tokens, self.config.n_heads, width // self.config.n_heads)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.linear(x, f"{name}.qkv").chunk(3, dim=-1))
        if self.config.positions == "rotary":
            q, k = self.rotate(q), self.rotate(k)
        if self.config.softmax == "softmax":
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            hidden = torch.ones(n_tokens, n_tokens, dtype=torch.bool).triu(1)
            scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(hidden, HIDDEN)
            softmax, _ = new_softmax(self.config.softmax, self.config).for_layer(1, self.config.context_window)
            scales = [self.p[key] for key in (f"{name}.softmax_scales",) if key in self.p]
            out = attention_weights(torch, softmax, scores, 0, *scales) @ v
        return self.linear(out.transpose(1, 2).reshape(x.shape), f"{name}.projection")

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.p["token_embedding.weights"][tokens]
        if self.config.positions == "learned":
            x = x + self.p["position_embedding.weights"][: tokens.shape[1]]
        for i in range(self.config.n_layers):
            block = f"blocks.{i}"
            x = x + self.attention(self.norm(x, f"{block}.attention_norm"), f"{block}.attention")
            hidden = self.activation(self.linear(self.norm(x, f"{block}.mlp_norm"), f"{block}.mlp.up"))
            x = x + self.linear(hidden, f"{block}.mlp.projection")
        x = self.norm(x, "norm")
        return x @ self.p["token_embedding.weights"].T if self.config.tied else self.linear(x, "head")

    def loss(self, inputs: np.ndarray, outputs: np.ndarray) -> torch.Tensor:
        logits = self(torch.from_numpy(inputs))
        return F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(outputs).flatten())


def copy_of(model: Layer) -> dict[str, torch.Tensor]:
    """The parameters as torch's, by name."""
    return {name: torch.tensor(array, requires_grad=True) for name, array in model.state_dict().items()}


def a_pair(config: GPTConfig) -> tuple[GPT, TorchGPT]:
    """Our model and torch's with the same weights; biases and gains are moved off 0 and 1 to count."""
    model, generator = GPT(config), np.random.default_rng(1)
    for p in model.parameters():
        if p.ndim == 1 or p.shape == (config.softmax_blocks, config.context_window):
            p.array += 0.1 * generator.standard_normal(p.shape, dtype=np.float32)
    return model, TorchGPT(config, copy_of(model))


def batches(config: GPTConfig) -> list[tuple[np.ndarray, np.ndarray]]:
    """Text that can be learned: each token follows from the one before, with some noise."""
    generator = np.random.default_rng(2)
    tokens = generator.integers(0, config.vocab_size, (STEPS, BATCH, TOKENS + 1))
    for t in range(1, TOKENS + 1):
        follow = generator.random((STEPS, BATCH)) < 0.8
        tokens[..., t] = np.where(follow, (7 * tokens[..., t - 1] + 3) % config.vocab_size, tokens[..., t])
    return [(batch[:, :-1].copy(), batch[:, 1:].copy()) for batch in tokens]


def assert_close(actual: np.ndarray, reference: torch.Tensor, title: str, tolerance: float = 1e-4) -> None:
    """Relative to the largest element: where terms cancel, an element by itself has no relative precision."""
    expected = reference.detach().numpy()
    assert actual.shape == expected.shape, title
    assert np.abs(expected).max() > 0, title
    assert np.abs(actual - expected).max() <= tolerance * np.abs(expected).max(), title
    assert np.linalg.norm(actual - expected) <= tolerance * np.linalg.norm(expected), title


# -------------------------------------------------------------------- whole models
@each_config
def test_loss_and_every_gradient_agree_at_step_0(config: GPTConfig) -> None:
    model, torch_model = a_pair(config)
    inputs, outputs = batches(config)[0]
    assert_close(model(inputs).array, torch_model(torch.from_numpy(inputs)), "logits")

    loss, torch_loss = CrossEntropy()(outputs, model(inputs)), torch_model.loss(inputs, outputs)
    assert loss.item() == pytest.approx(torch_loss.item(), rel=1e-5)
    loss.backward()
    torch_loss.backward()
    for name, p in model.named_parameters():
        assert_close(p.grad.array, torch_model.p[name].grad, name)


@each_config
def test_hessian_vector_products_agree(config: GPTConfig) -> None:
    """In float64; PyTorch's fused attention has no second derivatives."""
    model, torch_model = a_pair(replace(config, n_layers=1))
    rng, (inputs, outputs) = np.random.default_rng(3), batches(config)[0]
    parameters = {name: Tensor(p.array.astype(np.float64), False) for name, p in model.named_parameters()}
    direction = {name: rng.standard_normal(p.shape) for name, p in parameters.items()}
    loss = lambda values: CrossEntropy()(outputs, functional_call(model, values, inputs))
    (product,) = hvp(loss, (parameters,), (direction,))

    torch_model.p = {name: torch.tensor(p.array, requires_grad=True) for name, p in parameters.items()}
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        leaves = list(torch_model.p.values())
        grads = torch.autograd.grad(torch_model.loss(inputs, outputs), leaves, create_graph=True)
        expected = torch.autograd.grad(grads, leaves, [torch.from_numpy(v) for v in direction.values()])
    for name, reference in zip(parameters, expected):
        assert_close(product[name].array, reference, name, 1e-6 if config.positions == "rotary" else 1e-10)


@each_config
def test_twenty_steps_of_training_agree(config: GPTConfig) -> None:
    """Use AdamW with the decay rule, the schedule and the gradient clipping of training."""
    model, torch_model = a_pair(config)
    schedule = WarmupCosine(config.max_learning_rate, config.min_learning_rate, config.warmup_steps, STEPS)
    optimiser = AdamW(schedule, (config.beta1, config.beta2), weight_decay=config.weight_decay)
    names = [name for name, _ in model.named_parameters()]
    vectors = ("position_embedding.weights", "softmax_scales")  # or what counts as such
    matrices = [name for name, p in model.named_parameters() if p.ndim == 2 and not name.endswith(vectors)]
    assert matrices == [name for name, p in model.named_parameters() if decays(p)]
    groups = [
        {"params": [torch_model.p[name] for name in names if (name in matrices) == decayed], "weight_decay": decay}
        for decayed, decay in ((True, config.weight_decay), (False, 0.0))
    ]
    torch_optimiser = torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), eps=1e-8)

    tricycle_losses, torch_losses, n_clipped = [], [], 0
    for step, (inputs, outputs) in enumerate(batches(config), start=1):
        optimiser.step()
        loss = CrossEntropy()(outputs, model(inputs))
        loss.backward()
        norm = clip_gradients(model, 0.5)
        model.update(optimiser)
        tricycle_losses.append(loss.item())

        for group in torch_optimiser.param_groups:
            group["lr"] = schedule(step)
        torch_optimiser.zero_grad()
        torch_loss = torch_model.loss(inputs, outputs)
        torch_loss.backward()
        torch_norm = torch.nn.utils.clip_grad_norm_(torch_model.p.values(), 0.5)
        torch_optimiser.step()
        torch_losses.append(torch_loss.item())
        assert norm == pytest.approx(torch_norm.item(), rel=1e-3)
        n_clipped += norm > 0.5

    np.testing.assert_allclose(tricycle_losses, torch_losses, rtol=0, atol=1e-3)
    assert tricycle_losses[-1] < tricycle_losses[0] - 0.3 and n_clipped > 0  # it did learn, and clipping did happen
    for name, p in model.named_parameters():
        assert_close(p.array, torch_model.p[name], name, tolerance=1e-2)
