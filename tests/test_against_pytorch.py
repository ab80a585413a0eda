"""PyTorch as a second opinion: the same weights and batches give the same losses, gradients and training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from tricycle.configs import GPTConfig
from tricycle.finetuning.distillation import distillation_loss
from tricycle.layers import Dense, Layer
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.optimiser_rules import Adafactor
from tricycle.optimisers import AdamW, Optimiser, StochasticGradientDescent, clip_gradients, decays
from tricycle.scheduler import WarmupCosine
from tricycle.tensor import to_tensor
from tricycle.training import train_on_batch

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
HIDDEN = -1e9  # -inf would make PyTorch's gradients NaN where it is multiplied
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
        gelu, relu_squared = lambda x: F.gelu(x, approximate="tanh"), lambda x: F.relu(x) ** 2
        known = {"gelu": gelu, "relu": F.relu, "relu_squared": relu_squared, "swish": F.silu}
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
            out = self.weigh(scores, f"{name}.softmax_scales") @ v
        return self.linear(out.transpose(1, 2).reshape(x.shape), f"{name}.projection")

    def weigh(self, scores: torch.Tensor, scales: str) -> torch.Tensor:
        if self.config.softmax == "softmax1":
            return torch.cat([scores, torch.zeros_like(scores[..., :1])], -1).softmax(-1)[..., :-1]
        if self.config.softmax == "sink":
            sink = self.p[scales][:, None, None].expand(*scores.shape[:-1], 1)
            return torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        if self.config.softmax == "adaptive":
            plain = scores.softmax(-1)
            entropy = -(plain * torch.where(plain > 0, plain, 1).log()).sum(-1, keepdim=True)
            value = -0.037 * entropy**4 + 0.481 * entropy**3 - 2.3 * entropy**2 + 4.917 * entropy - 1.791
            return (scores * torch.where((entropy > 0.5) & (value > 1), value, 1)).softmax(-1)
        parts = scores.split(-(-self.config.context_window // self.config.softmax_blocks), -1)
        weights = [part.softmax(-1) * (part > HIDDEN) for part in parts]
        return torch.cat([w * self.p[scales][i, : w.shape[-2], None] for i, w in enumerate(weights)], -1)

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


@pytest.mark.parametrize("hard_weight", [0.0, 0.25])
def test_ten_updates_of_distillation_agree(hard_weight: float) -> None:
    model, torch_model = a_pair(replace(BASE, weight_decay=0.0))
    teacher, torch_teacher = a_pair(replace(BASE, n_layers=3, seed=9))
    for name, p in teacher.named_parameters():
        if p.ndim == 2:  # so that it does not predict all tokens alike
            p.array *= 8
            torch_teacher.p[name].data *= 8
    batch_loss = distillation_loss(model, teacher, 2.0, hard_weight)
    optimiser, torch_optimiser = AdamW(3e-3, weight_decay=0.0), torch.optim.Adam(torch_model.p.values(), 3e-3)
    for inputs, outputs in batches(BASE)[:10]:
        loss = train_on_batch(model, optimiser, batch_loss, (inputs, outputs))
        student_log = (torch_model(torch.from_numpy(inputs)) / 2).log_softmax(-1).flatten(0, 1)
        teacher_log = (torch_teacher(torch.from_numpy(inputs)) / 2).log_softmax(-1).flatten(0, 1).detach()
        soft = 4 * F.kl_div(student_log, teacher_log, reduction="batchmean", log_target=True)
        torch_loss = (1 - hard_weight) * soft + hard_weight * torch_model.loss(inputs, outputs)
        torch_optimiser.zero_grad()
        torch_loss.backward()
        torch_optimiser.step()
        assert loss == pytest.approx(torch_loss.item(), rel=1e-3)
    for name, p in model.named_parameters():
        assert_close(p.array, torch_model.p[name], name, tolerance=1e-2)


# -------------------------------------------------------------------- optimisers
def both_ways(optimiser: Optimiser, make: Callable, rng: np.random.Generator, n_steps: int = 25) -> None:
    """The same random gradients, of sizes from 1e-6 to 1e3, to a layer here and to its copy in torch."""
    layer = Dense(5, 4, generator=0)
    expected = copy_of(layer)
    torch_optimiser = make([expected["weights"]], [expected["bias"]])
    for _ in range(n_steps):
        for name, p in layer.named_parameters():
            grad = (rng.standard_normal(p.shape) * 10.0 ** rng.integers(-6, 4, p.shape)).astype(np.float32)
            p.grad, expected[name].grad = to_tensor(grad), torch.from_numpy(grad)
        layer.update(optimiser)
        torch_optimiser.step()
    for name, p in layer.named_parameters():
        np.testing.assert_allclose(p.array, expected[name].detach().numpy(), rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("betas, eps", [((0.9, 0.999), 1e-8), ((0.8, 0.9), 1e-3), ((0.0, 0.95), 1e-8)], ids=str)
def test_adamw_agrees(betas: tuple[float, float], eps: float, decay: float, rng: np.random.Generator) -> None:
    def make(matrices: list, vectors: list) -> torch.optim.Optimizer:
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.01, betas=betas, eps=eps, weight_decay=decay)

    both_ways(AdamW(0.01, betas, eps, decay), make, rng)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.95])
def test_sgd_agrees(momentum: float, rng: np.random.Generator) -> None:
    def make(matrices: list, vectors: list) -> torch.optim.Optimizer:
        return torch.optim.SGD(matrices + vectors, lr=1e-3, momentum=momentum)

    both_ways(StochasticGradientDescent(1e-3, momentum=momentum), make, rng)


def test_sgd_with_decay_agrees(rng: np.random.Generator) -> None:
    """Without momentum, torch's decay through the gradient equals Tricycle's decoupled decay."""

    def make(matrices: list, vectors: list) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": matrices, "weight_decay": 0.5}, {"params": vectors}], lr=1e-3)

    both_ways(StochasticGradientDescent(1e-3, weight_decay=0.5), make, rng)


def test_sgd_with_momentum_and_decoupled_decay_agrees(rng: np.random.Generator) -> None:
    class Decoupled(torch.optim.SGD):
        def step(self) -> None:
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p.mul_(1 - 1e-3 * 0.5)
            super().step()

    def make(matrices: list, vectors: list) -> torch.optim.Optimizer:
        return Decoupled([{"params": matrices}, {"params": vectors}], lr=1e-3, momentum=0.9)

    both_ways(StochasticGradientDescent(1e-3, momentum=0.9, weight_decay=0.5), make, rng)


@pytest.mark.parametrize("beta2_decay, threshold, decay", [(-0.8, 1.0, 0.0), (-0.5, 1.5, 0.3), (-1.0, 10.0, 0.1)])
def test_adafactor_agrees(beta2_decay: float, threshold: float, decay: float, rng: np.random.Generator) -> None:
    """Torch always takes steps relative to the weights, and keeps the square of its eps in the second moment."""

    def make(matrices: list, vectors: list) -> torch.optim.Optimizer:
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        options = {"lr": 0.05, "beta2_decay": beta2_decay, "eps": (1e-15, 1e-3), "d": threshold, "weight_decay": decay}
        return torch.optim.Adafactor(groups, **options)

    both_ways(Adafactor(0.05, beta2_decay, (1e-30, 1e-3), threshold, decay, relative_step=True), make, rng, 10)
