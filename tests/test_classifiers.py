"""Classifiers of sequences: padding counts nowhere, weights say what was looked at, everything learns."""

import numpy as np
import pytest
from tables import bad_input
from test_layers import check_layer_gradients

from tricycle.loss import CrossEntropy
from tricycle.optimisers import AdamW
from tricycle.sequences.classifiers import AttentionPooling, Classifier, ConvolutionalEncoder, MaxPooling
from tricycle.sequences.seq2seq import RecurrentEncoder, TransformerEncoder
from tricycle.tensor import Tensor, to_tensor

V, N_CLASSES = 9, 3


def classifier(encoder, pooling) -> Classifier:
    return Classifier(encoder, pooling, 6, N_CLASSES, generator=2)


def recurrent(**options) -> Classifier:
    return classifier(RecurrentEncoder(V, 4, 3, generator=0, **options), AttentionPooling(6, generator=1))


MAKERS = {
    "recurrent": recurrent,
    "two LSTM layers": lambda: recurrent(cell="lstm", n_layers=2),
    "convolution": lambda: classifier(ConvolutionalEncoder(V, 4, 3, (2, 3), generator=0), MaxPooling()),
    "Transformer": lambda: classifier(
        TransformerEncoder(V, 6, 2, 2, 12, dropout=0.0, generator=0), AttentionPooling(6, 4, generator=1)
    ),
}
each_model = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@pytest.fixture
def batch(rng) -> tuple[np.ndarray, np.ndarray]:
    return rng.integers(0, V, (4, 7)), np.array([7, 1, 4, 2])


@each_model
def test_padding_is_ignored(make, batch):
    tokens, lengths = batch
    model, other = make().eval(), tokens.copy()
    for row, length in zip(other, lengths):
        row[length:] = (row[length:] + 3) % V
    logits, weights = model(tokens, lengths, return_weights=True)
    np.testing.assert_allclose(model(other, lengths).array, logits.array, 1e-5, 1e-6)
    for i, length in enumerate(lengths):
        alone, its_weights = model(tokens[i : i + 1, :length], return_weights=True)
        np.testing.assert_allclose(logits.array[i], alone.array[0], 1e-4, 1e-5)
        np.testing.assert_allclose(weights[i, :length], its_weights[0], 1e-4, 1e-5)
        assert (weights[i, length:] == 0).all()
    np.testing.assert_allclose(weights.sum(axis=1), 1, 1e-5)


@each_model
def test_all_parameters_learn(make, batch):
    tokens, lengths = batch
    model, optimiser = make(), AdamW(0.02, weight_decay=0)
    labels = to_tensor([0, 1, 2, 1], dtype=int)
    losses = []
    for _ in range(60):
        loss = CrossEntropy()(labels, model(tokens, lengths))
        loss.backward()
        if not losses:
            still = [n for n, p in model.named_parameters() if p.grad is None or not np.abs(p.grad.array).max() > 0]
            assert all("key" in name and "bias" in name for name in still), still  # softmax does not see these
        losses.append(float(loss))
        model.update(optimiser)
    assert losses[0] > 0.5 > 0.1 > losses[-1]


@pytest.mark.nightly_except(4)
@each_model
def test_gradients_match_finite_differences(make, batch):
    tokens, lengths = batch
    check_layer_gradients(make().eval(), tokens=tokens, lengths=lengths)


def test_pooling_matches_values_computed_by_hand():
    x = to_tensor([[[1, 5], [3, 2], [9, 9]]])
    pooled, weights = MaxPooling()(x, np.array([[True, True, False]]))
    assert pooled.array.tolist() == [[3, 5]]
    assert weights.tolist() == [[0.5, 0.5, 0]]
    pooled, weights = MaxPooling()(to_tensor([[[1, 1], [1, 0]]]))
    assert weights.tolist() == [[0.75, 0.25]]  # two that are equally large share
    pooled, _ = MaxPooling()(x, np.array([[False, False, False]]))
    assert pooled.array.tolist() == [[0, 0]]
    pooling = AttentionPooling(2, generator=0)
    pooled, weights = pooling(x, np.array([[False, True, False]]))
    np.testing.assert_allclose(pooled.array, [[3, 2]])
    assert weights.tolist() == [[0, 1, 0]]
    pooling.attention.vector.weights.array[...] = 0
    np.testing.assert_allclose(pooling(x)[0].array, x.array.mean(axis=1), 1e-6)


def test_even_and_odd_kernel_sizes_keep_the_length():
    encoder = ConvolutionalEncoder(V, 4, 2, (1, 2, 3, 4, 5), generator=0)
    assert encoder(np.array([[1, 2, 3]])).shape == (1, 3, 10)
    assert encoder(np.array([[1]])).shape == (1, 1, 10)
    assert isinstance(encoder(np.array([[1]])), Tensor)


TOKENS = np.array([[1, 2], [3, 4]])
REFUSED = {
    "an unknown cell": (lambda: RecurrentEncoder(V, 4, 3, cell="elman"), "cell.*rnn, gru, lstm.*elman"),
    "one sequence": (lambda: recurrent()(TOKENS[0]), "Classifier: .*tokens.*batch"),
    "no tokens": (lambda: recurrent()(TOKENS[:, :0]), "Classifier: .*tokens.*batch"),
    "lengths beyond the array": (lambda: recurrent()(TOKENS, [2, 3]), "length_mask: .*0 to 2"),
    "an empty sequence for a run": (lambda: recurrent()(TOKENS, [2, 0]), "GRU: .*lengths.*1 to 2"),
    "a token that is none": (lambda: recurrent()(TOKENS + V), rf"Embedding\(from_size={V}\): .*ids"),
}
test_bad_input = bad_input(REFUSED)


def test_lengths_of_another_batch_are_refused():
    encoder = ConvolutionalEncoder(V, 4, 2, (1,), generator=0)
    for layer in (encoder, Classifier(encoder, MaxPooling(), 2, 3, generator=0)):
        with pytest.raises(ValueError, match=r"expected lengths .* of shape \(2,\), got int64 of shape \(1,\)"):
            layer(np.array([[1, 2], [3, 4]]), [1])
