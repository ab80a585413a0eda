"""Autoencoders: shapes, what they learn, gradients, the variational loss by hand, bad input."""

import numpy as np
import pytest
from tables import bad_input
from test_layers import check_layer_gradients

from tricycle.layers import Dense
from tricycle.optimisers import AdamW
from tricycle.sequences.autoencoders import Autoencoder, RecurrentAutoencoder, VariationalAutoencoder
from tricycle.tensor import to_tensor

MAKERS = {
    "dense": (lambda: Autoencoder.dense((12, 6, 2), generator=0), (12,)),
    "convolutional": (lambda: Autoencoder.convolutional((5, 4, 2), (3, 4), 2, generator=0), (5, 4, 2)),
    "variational": (lambda: VariationalAutoencoder.dense((12, 6, 2), generator=0, output_std=0.5), (12,)),
    "variational, convolutional": (
        lambda: VariationalAutoencoder.convolutional((4, 4, 1), (3,), 2, generator=0),
        (4, 4, 1),
    ),
    "recurrent": (lambda: RecurrentAutoencoder(3, 5, 2, generator=0), (6, 3)),
    "recurrent, LSTM": (lambda: RecurrentAutoencoder(3, 5, 2, cell="lstm", generator=0), (6, 3)),
}
each = pytest.mark.parametrize(("make", "shape"), MAKERS.values(), ids=MAKERS)


@each
def test_output_code_and_loss_shapes(make, shape, rng):
    model, x = make().eval(), rng.standard_normal((3, *shape))
    assert model(x).shape == (3, *shape)
    assert model.encode(x).shape == (3, 2)
    assert model.loss(x).shape == ()
    assert model(x).close_to(model(x))


@each
def test_every_parameter_learns_and_the_loss_falls(make, shape, rng):
    model, optimiser = make(), AdamW(0.01, weight_decay=0)
    x = np.outer(rng.standard_normal(8), rng.standard_normal(np.prod(shape))).reshape(8, *shape)  # one number each
    losses = []
    for _ in range(150):
        loss = model.loss(x)
        loss.backward()
        if not losses:
            assert all(np.abs(p.grad.array).max() > 0 for p in model.parameters())
        losses.append(float(loss))
        model.update(optimiser)
    assert np.mean(losses[-10:]) < 0.7 * losses[0]


@pytest.mark.nightly_except(2)
@each
def test_gradients_match_finite_differences(make, shape, rng):
    check_layer_gradients(make().eval(), rng.standard_normal((2, *shape)))


def test_loss_is_mean_squared_error_to_input_or_target(rng):
    model, x, clean = Autoencoder.dense((4, 2), generator=0), rng.standard_normal((3, 4)), rng.standard_normal((3, 4))
    decoded = model(x).array
    assert model.loss(x).close_to(((decoded - x) ** 2).mean(), 1e-5)
    assert model.loss(x, clean).close_to(((decoded - clean) ** 2).mean(), 1e-5)


def test_variational_loss_matches_formula_of_the_paper(rng):
    """Kingma and Welling 2014, appendices B and C.2; in evaluation the posterior mean replaces the sample."""
    model, x = VariationalAutoencoder.dense((6, 5, 2), generator=0, output_std=0.4).eval(), rng.standard_normal((3, 6))
    mean, log_variance = (t.array for t in model.posterior(x))
    divergence = -0.5 * (1 + log_variance - mean**2 - np.exp(log_variance)).sum(axis=1)
    log_likelihood = -((x - model.decode(mean).array) ** 2 / (2 * 0.4**2)).sum(axis=1)
    assert model.loss(x).close_to((divergence - log_likelihood).mean(), 1e-5)


def test_sampled_codes_have_the_posterior_moments():
    model = VariationalAutoencoder.dense((2, 1), generator=0)
    mean, log_variance = to_tensor(np.full((20_000, 1), 3.0)), to_tensor(np.full((20_000, 1), np.log(0.25)))
    drawn = model.sample_code(mean, log_variance)
    np.testing.assert_allclose([drawn.array.mean(), drawn.array.std()], [3, 0.5], rtol=0.02)
    drawn.sum().backward()  # dz/dmean = 1, dz/dlog variance = deviation * noise / 2
    np.testing.assert_allclose(mean.grad.array, 1)
    np.testing.assert_allclose(log_variance.grad.array, (drawn.array - 3) / 2, 1e-4, 1e-6)
    assert model.eval().sample_code(mean, log_variance) is mean


def test_steps_beyond_the_sequence_length_are_ignored(rng):
    model, x = RecurrentAutoencoder(2, 4, 3, generator=0), rng.standard_normal((2, 6, 2))
    codes = model.encode(x, lengths=[3, 6]).array
    x[0, 3:] = 7
    np.testing.assert_allclose(model.encode(x, lengths=[3, 6]).array, codes, 1e-6)
    np.testing.assert_allclose(model.encode(x[:1, :3]).array, codes[:1], 1e-5, 1e-6)
    assert model.decode(codes, 4).shape == (2, 4, 2)


REFUSED = {
    "no code": (lambda: Autoencoder.dense((5,)), r"Autoencoder\.dense: .*sizes"),
    "a deviation of nothing": (
        lambda: VariationalAutoencoder(Dense(3, 4), Dense(2, 3), output_std=0),
        "VariationalAutoencoder: .*output_std.*got 0",
    ),
    "an unknown cell": (lambda: RecurrentAutoencoder(2, 3, 1, cell="elman"), "cell.*rnn, gru"),
    "another width": (lambda: Autoencoder.dense((5, 2))(np.ones((3, 4))), r"Dense\(from_size=5\): .*last axis"),
}
test_bad_input = bad_input(REFUSED)
