"""DPO: losses, gradients and updates equal those of PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers_families import VOCABULARY, difference

from tricycle.configs import ModelConfig
from tricycle.finetuning.lora import LoRAConfig
from tricycle.finetuning.packing import IGNORED, Example
from tricycle.finetuning.preferences import PairBatch, PairDataset, dpo_loss, sequence_log_probs
from tricycle.models import GPT
from tricycle.optimisers import AdamW
from tricycle.pretrained.adapters import new_adapter, save_adapter
from tricycle.tensor import Tensor, no_grad
from tricycle.training import apply_gradients, compute_gradients
from tricycle.weights import set_memory_order

BETA = 0.3
N_STEPS = 10
CONFIG = ModelConfig(vocab_size=40, context_window=24, embedding_dim=16, n_heads=2, n_layers=2)


def some_pairs(n: int = 8, n_ids: int = VOCABULARY) -> list[Example]:
    """Prompts of 2 to 6 tokens, each with two answers of 1 to 9."""
    generator = np.random.default_rng(11)
    examples = []
    for _ in range(n):
        prompt = generator.integers(0, n_ids, generator.integers(2, 7))
        for _ in range(2):
            ids = np.concatenate([prompt, generator.integers(0, n_ids, generator.integers(1, 10))])
            examples.append(Example(ids, np.arange(len(ids)) >= len(prompt)))
    return examples


def random_model() -> GPT:
    model = GPT(CONFIG)
    generator = np.random.default_rng(2)
    for parameter in model.parameters():
        parameter.array += generator.normal(0, 0.3, parameter.shape).astype(np.float32)
    return model


# -------------------------------------------------------------------- without PyTorch
def test_batches_hold_both_answers_of_each_pair():
    examples = some_pairs(5)
    dataset = PairDataset(examples, 2, 30, seed=3)
    dataset.reference_log_probs[...] = np.arange(10).reshape(5, 2)
    numbers = []
    for _ in range(5):
        batch = next(dataset)
        assert batch.n_labels == 2
        for pair in range(2):
            number = int(batch.reference_log_probs[pair]) // 2
            assert batch.reference_log_probs[2 + pair] == 2 * number + 1
            for side in range(2):
                ids, loss_mask = examples[2 * number + side]
                row = batch.labels[2 * side + pair]
                np.testing.assert_array_equal(row[row != IGNORED], ids[loss_mask])
            numbers.append(number)
    assert sorted(numbers) == sorted([*range(5)] * 2)
    state = dataset.state()
    expected = next(dataset).tokens
    again = PairDataset(examples, 2, 30)
    again.load_state(state)
    np.testing.assert_array_equal(next(again).tokens, expected)
    with pytest.raises(ValueError, match="got 3 examples"):
        PairDataset(examples[:3], 2, 30)


def test_sequence_log_probs(monkeypatch):
    model = random_model()
    batch = next(PairDataset(some_pairs(n_ids=40), 4, 24))
    hidden = model.hidden_states(batch.tokens)
    log_probs = sequence_log_probs(model, hidden, batch.labels)
    logits = model(batch.tokens).numpy().astype(np.float64)
    np.testing.assert_allclose(log_probs, expected_log_probs(logits, batch), rtol=1e-5)
    monkeypatch.setattr("tricycle.finetuning.preferences.n_logit_rows", lambda *_: 3)  # in chunks
    np.testing.assert_allclose(sequence_log_probs(model, hidden, batch.labels), log_probs, rtol=1e-6)


def test_gradients_are_those_of_the_loss(monkeypatch):
    """The slope along a random direction equals finite differences, also with logits computed in chunks."""
    model = random_model()
    dataset = PairDataset(some_pairs(n_ids=40), 8, 24)
    dataset.compute_reference_log_probs(model)
    batch = next(dataset)
    generator = np.random.default_rng(3)
    for parameter in model.parameters():  # away from the reference, where all margins are 0
        parameter.array = parameter.array + generator.normal(0, 0.1, parameter.shape)
        assert parameter.array.dtype == np.float64
    margins: list[np.ndarray] = []
    loss = compute_gradients(model, dpo_loss(model, BETA, margins.append), [batch]).loss
    assert loss == pytest.approx(np.log1p(np.exp(-margins[0])).mean(), rel=1e-6)
    assert np.ptp(margins[0]) > 1
    grads = {name: parameter.grad.array.copy() for name, parameter in model.named_parameters()}
    model.zero_grad()
    monkeypatch.setattr("tricycle.models.n_logit_rows", lambda *_: 7)
    compute_gradients(model, dpo_loss(model, BETA), [batch])
    direction = {name: generator.normal(size=grad.shape) for name, grad in grads.items()}
    slope = sum(float((grads[name] * direction[name]).sum()) for name in grads)
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(parameter.grad.array, grads[name], rtol=1e-6, atol=1e-9)
    values = []
    for sign in (1, -1):
        for name, parameter in model.named_parameters():
            parameter.array += sign * 1e-5 * direction[name]
        with no_grad():
            hidden = model.hidden_states(batch.tokens)
            logs = expected_log_probs(model.logits(hidden).array, batch)
        log_ratios = logs - batch.reference_log_probs
        values.append(np.logaddexp(0, -BETA * (log_ratios[:8] - log_ratios[8:])).mean())
        for name, parameter in model.named_parameters():
            parameter.array -= sign * 1e-5 * direction[name]
    assert slope == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-5)


def test_hessian_is_that_of_the_loss():
    """Cross-entropy with constant weights has the gradients of the loss, but not its second derivatives."""
    model = random_model()
    dataset = PairDataset(some_pairs(4, n_ids=40), 4, 24)
    dataset.compute_reference_log_probs(model)
    batch, generator = next(dataset), np.random.default_rng(3)
    start = [p.array + generator.normal(0, 0.1, p.shape) for p in model.parameters()]
    direction = [generator.normal(size=array.shape) for array in start]

    def gradients(eps: float, create_graph: bool = False) -> list[Tensor]:
        for p, array, d in zip(model.parameters(), start, direction):
            p.array, p.grad = array + eps * d, None
        dpo_loss(model, BETA)(batch, 1.0).backward(create_graph=create_graph)
        return [p.grad for p in model.parameters()]

    above, below, slopes = gradients(1e-4), gradients(-1e-4), gradients(0, create_graph=True)
    model.zero_grad()
    sum((slope * d).sum() for slope, d in zip(slopes, direction)).backward()
    for (name, parameter), a, b in zip(model.named_parameters(), above, below):
        expected = (a.array - b.array) / 2e-4
        np.testing.assert_allclose(parameter.grad.array, expected, 1e-3, 1e-3 * np.abs(expected).max(), err_msg=name)


def expected_log_probs(logits: np.ndarray, batch: PairBatch) -> np.ndarray:
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    rows, places = np.nonzero(batch.labels != IGNORED)
    return np.bincount(rows, logs[rows, places, batch.labels[rows, places]])


# -------------------------------------------------------------------- compared with PyTorch
def torch_log_probs(model: Any, batch: PairBatch) -> Any:
    """Return the log-probability of each row's labels."""
    import torch

    labels = torch.tensor(batch.labels)
    logs = model(torch.tensor(batch.tokens)).logits.log_softmax(-1)
    chosen = logs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return (chosen * (labels != IGNORED)).sum(-1)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_ten_updates_are_those_of_pytorch(method: str, tmp_path: Path) -> None:
    """Losses, gradient norms and the trained models are equal."""
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    from test_adapters import both  # which needs these

    hf_model, loaded = both("Llama", tmp_path / "base")
    reference_model, _ = both("Llama", tmp_path / "again")
    dataset = PairDataset(some_pairs(), 3, 30)
    dataset.compute_reference_log_probs(loaded.model)
    if method == "lora":
        adapter = new_adapter(loaded, LoRAConfig(rank=3, alpha=6), seed=1)
        save_adapter(adapter, loaded, tmp_path / "adapter")
        hf_model = peft.PeftModel.from_pretrained(hf_model, tmp_path / "adapter", is_trainable=True).eval()
    else:
        set_memory_order(loaded.model.unfreeze(), "C")
    rate = 1e-2 if method == "lora" else 1e-3
    learning = [p for p in hf_model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(learning, lr=rate, weight_decay=0.0)
    tricycle_optimiser = AdamW(rate, weight_decay=0.0)
    losses = []
    for _ in range(N_STEPS):
        batch = next(dataset)
        with torch.no_grad():
            reference = torch_log_probs(reference_model, batch)
        np.testing.assert_allclose(batch.reference_log_probs, reference.numpy(), rtol=1e-5, atol=1e-5)
        log_ratios = torch_log_probs(hf_model, batch) - reference
        loss = -torch.nn.functional.logsigmoid(BETA * (log_ratios[:3] - log_ratios[3:])).mean()
        optimiser.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(learning, 1.0).item()
        optimiser.step()
        grads = compute_gradients(loaded.model, dpo_loss(loaded.model, BETA), [batch])
        assert grads.loss == pytest.approx(loss.item(), rel=1e-3)
        assert apply_gradients(loaded.model, tricycle_optimiser, grads, 1.0) == pytest.approx(norm, rel=1e-3)
        losses.append(grads.loss)
    assert losses[0] == pytest.approx(np.log(2), abs=1e-5)
    assert losses[-1] < losses[0] - 0.05
    with torch.no_grad():
        expected = hf_model(torch.tensor(batch.tokens)).logits.numpy()
    assert difference(loaded.model(batch.tokens).numpy(), expected) < 1e-3
