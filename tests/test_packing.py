"""Sequence packing: packed rows have the loss and gradients of separate texts; every label has the same weight."""

import numpy as np
import pytest

from tricycle.activation_checkpointing import checkpoint_activations
from tricycle.configs import ModelConfig
from tricycle.finetuning.packing import (
    IGNORED,
    Example,
    PackedDataset,
    document_positions,
    pack_lengths,
    packed_forward_kwargs,
    supports_packing,
)
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.training import compute_gradients

SIZES = {"vocab_size": 30, "context_window": 40, "embedding_dim": 16, "n_heads": 2, "n_layers": 2, "dropout": 0.0}
MODELS = {
    "learned": ModelConfig(**SIZES),
    "rotary": ModelConfig(**SIZES, positions="rotary", norm="rms_norm", n_key_heads=1, window=6),
    "shared norm": ModelConfig(**SIZES, parallel=True, softmax="softmax1"),
}


def some_examples(lengths, seed=0) -> list[Example]:
    """Return examples whose second half is predicted."""
    rng = np.random.default_rng(seed)
    return [Example(rng.integers(0, 30, n), np.arange(n) >= n // 2) for n in lengths]


def batch_loss(model: GPT):
    def of(batch, factor):
        options = packed_forward_kwargs(model, batch.tokens, batch.documents)
        return model.loss(batch.tokens, batch.labels, CrossEntropy(IGNORED), factor, **options)

    return of


def random_model(config: ModelConfig) -> GPT:
    model = GPT(config)
    rng = np.random.default_rng(2)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.array[...] = rng.normal(0, 0.3, parameter.shape)
    return model


# -------------------------------------------------------------------- rows
def test_rows_contain_all_items_and_are_full():
    lengths = np.random.default_rng(0).integers(1, 50, 300).tolist()
    rows = pack_lengths(lengths, 60)
    assert sorted(item for row in rows for item in row) == list(range(300))
    assert all(sum(lengths[item] for item in row) <= 60 for row in rows)
    assert len(rows) <= 1.05 * sum(lengths) / 60 + 1
    assert len(pack_lengths([5, 5, 3, 2], 7)) == 3


def test_invalid_arguments():
    with pytest.raises(ValueError, match=r"1 to 7.*2 to 8"):
        pack_lengths([8, 2], 7)
    with pytest.raises(ValueError, match="no examples"):
        PackedDataset([], 2, 8)
    with pytest.raises(ValueError, match="example 1"):
        PackedDataset([*some_examples([4]), Example(np.arange(3), np.array([True, False, False]))], 2, 8)
    for options in ({"key_shift": True}, {"softmax": "blocks"}):
        assert not supports_packing(GPT(ModelConfig(**SIZES, **options)))
    long = {"positions": "rotary", "rotary_scaling": "longrope", "rotary_original_window": 6}
    model = GPT(ModelConfig(**SIZES, **long, rotary_divisors=(1.0,) * (SIZES["embedding_dim"] // SIZES["n_heads"])))
    assert supports_packing(model, 6) and not supports_packing(model, 7) and not supports_packing(model)
    model = GPT(ModelConfig(**SIZES, token_shift=True))
    assert not supports_packing(model)
    with pytest.raises(ValueError, match="one text per row"):
        packed_forward_kwargs(model, np.zeros((1, 4), int), np.zeros((1, 4), int))
    with pytest.raises(ValueError, match=r"documents of shape \(1, 4\)"):
        packed_forward_kwargs(GPT(MODELS["learned"]), np.zeros((1, 4), int), np.zeros((1, 3), int))


def test_document_positions():
    positions = document_positions(np.array([[0, 0, 1, 1, 1, -1], [3, 0, 0, 0, 0, 0]]))
    assert positions.tolist() == [[0, 1, 0, 1, 2, 0], [0, 0, 1, 2, 3, 4]]


def test_batches_continue_after_load_state():
    examples = some_examples([5, 9, 3, 12, 7, 2, 6])
    first = PackedDataset(examples, 2, 12, seed=3)
    [next(first) for _ in range(5)]
    second = PackedDataset(examples, 2, 12, seed=3)
    second.load_state(first.state())
    for _ in range(5):
        for array, expected in zip(next(second), next(first)):
            np.testing.assert_array_equal(array, expected)


# -------------------------------------------------------------------- packed rows and separate texts
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_packed_rows_equal_separate_texts(name, recompute):
    """The losses and the gradients are equal."""
    examples = some_examples([9, 4, 17, 2, 6, 30, 3])
    model = random_model(MODELS[name])
    model.recompute = recompute and checkpoint_activations
    dataset = PackedDataset(examples, 2, 40)
    batches = [dataset.collate([row]) for row in range(dataset.n_items)]
    assert any(batch.documents is not None for batch in batches)
    packed_loss = compute_gradients(model, batch_loss(model), batches, [batch.n_labels for batch in batches]).loss
    got = {name: parameter.grad.numpy().copy() for name, parameter in model.named_parameters()}
    model.zero_grad()
    separate = PackedDataset(examples, 1, 40, pack=False)
    batches = [separate.collate([row]) for row in range(separate.n_items)]
    assert all(batch.documents is None for batch in batches)
    loss = compute_gradients(model, batch_loss(model), batches, [batch.n_labels for batch in batches]).loss
    assert packed_loss == pytest.approx(loss, rel=1e-5)
    for parameter_name, parameter in model.named_parameters():
        np.testing.assert_allclose(got[parameter_name], parameter.grad.numpy(), rtol=2e-3, atol=2e-6)


def test_the_loss_is_a_mean_over_tokens_and_not_over_batches():
    """Answers of 1 and of 29 tokens in two batches give the mean over all 30 tokens."""
    model = random_model(MODELS["rotary"])
    rng = np.random.default_rng(1)
    loss_masks = [np.arange(30) >= 29, np.arange(30) >= 1]
    examples = [Example(rng.integers(0, 30, 30), loss_mask) for loss_mask in loss_masks]
    dataset = PackedDataset(examples, 1, 29)
    batches = [dataset.collate([row]) for row in (0, 1)]
    got = compute_gradients(model, batch_loss(model), batches, [batch.n_labels for batch in batches]).loss
    model.zero_grad()
    total = 0.0
    for ids, loss_mask in examples:
        logits = model(ids[None, :-1]).numpy()[0].astype(np.float64)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
        total -= sum(logits[i, ids[i + 1]] for i in range(29) if loss_mask[i + 1])
    assert got == pytest.approx(total / 30, rel=1e-5)
    means = [compute_gradients(model, batch_loss(model), [batch]).loss for batch in batches]
    assert abs(np.mean(means) - got) > 1e-2  # as the mean of batches would be
