"""Encoder-decoders: steps against whole targets, padding, gradients, learning, search, refusals."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from tables import bad_input
from test_layers import check_layer_gradients

from tricycle.layers import Layer
from tricycle.loss import CrossEntropy
from tricycle.sequences.attentions import AdditiveAttention, LuongAttention
from tricycle.sequences.beam_search import beam_search, select_rows
from tricycle.sequences.seq2seq import (
    EncoderDecoder,
    LearnedPositions,
    Seq2Seq,
    Seq2SeqAttention,
    SinusoidalPositions,
    Transformer,
    sinusoids,
)
from tricycle.tensor import no_grad, to_tensor

V, PAD, BEGIN, END = 7, 0, 1, 2
SIZES = (V, V, 6, 5)
OTHER_PARTS = {"norm_first": True, "learned_positions": True, "tied": True, "softmax": "softmax1"}


def attending(attention: Layer, **options) -> EncoderDecoder:
    return Seq2SeqAttention(attention, *SIZES, generator=0, **options)


MODELS: dict[str, Callable[[], EncoderDecoder]] = {
    "fixed context": lambda: Seq2Seq(*SIZES, generator=0),
    "fixed context, two LSTM layers": lambda: Seq2Seq(*SIZES, n_layers=2, cell="lstm", generator=0),
    "Bahdanau": lambda: attending(AdditiveAttention(5, 10, 4, generator=0)),
    "Bahdanau, two layers": lambda: attending(AdditiveAttention(5, 10, 4, generator=0), n_layers=2, cell="rnn"),
    "Luong": lambda: attending(LuongAttention(5, 10, generator=0), attend_before_step=False, cell="lstm"),
    "Luong, concat": lambda: attending(LuongAttention(5, 10, "concat", generator=0), attend_before_step=False),
    "Transformer": lambda: Transformer(V, V, 8, 2, 2, 12, dropout=0.0, generator=0),
    "Transformer, norm first": lambda: Transformer(V, V, 8, 2, 1, 12, dropout=0.0, generator=0, **OTHER_PARTS),
}
each_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def lively(make: Callable) -> EncoderDecoder:
    model, generator = make(), np.random.default_rng(3)
    for p in model.parameters():
        p.array[...] = 0.5 * generator.standard_normal(p.shape) + (p.ndim == 1)
    return model


@pytest.fixture
def pair(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sources, their lengths, and targets."""
    return rng.integers(3, V, (3, 6)), np.array([6, 2, 4]), rng.integers(1, V, (3, 5))


@each_model
def test_incremental_decoding_equals_teacher_forcing(make: Callable, pair: tuple) -> None:
    source, lengths, target = pair
    model = lively(make)
    with no_grad():
        whole = model(source, target, lengths).array
        assert whole.shape == (3, 5, V)
        state = model.start_decoding(source, lengths, capacity=5)
        parts = [model.decode(target[:, t : t + 1], state).array for t in range(5)]
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, rtol=1e-4, atol=1e-5)


@each_model
def test_a_later_token_changes_no_earlier_logit(make: Callable, pair: tuple) -> None:
    source, lengths, target = pair
    model, changed = lively(make), target.copy()
    changed[:, 3] = (target[:, 3] + 1) % V
    before, after = (model(source, y, lengths).array for y in (target, changed))
    np.testing.assert_allclose(after[:, :3], before[:, :3], rtol=1e-5, atol=1e-6)
    assert (np.abs(after[:, 3:] - before[:, 3:]).max(axis=(0, 2)) > 1e-5).all()


@each_model
def test_padding_changes_nothing(make: Callable, pair: tuple) -> None:
    source, lengths, target = pair
    model = lively(make)
    together = model(source, target, lengths).array
    for item, n in enumerate(lengths):
        alone = model(source[item : item + 1, :n], target[item : item + 1]).array[0]
        np.testing.assert_allclose(together[item], alone, rtol=1e-4, atol=1e-5)


@each_model
def test_every_parameter_gets_a_gradient(make: Callable, pair: tuple) -> None:
    source, lengths, target = pair
    model = lively(make)
    CrossEntropy()(target, model(source, target, lengths)).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and np.isfinite(p.grad.array).all(), name
        # a bias of the keys moves all scores of a row alike; a table has rows that did not occur
        assert np.abs(p.grad.array).max() > 0 or name.endswith("key.bias"), name


@pytest.mark.nightly_except(4)
@pytest.mark.parametrize("name", ["fixed context", "Bahdanau", "Luong", "Transformer, norm first"])
def test_gradients(name: str, pair: tuple) -> None:
    source, lengths, target = pair
    lengths = np.minimum(lengths[:2], 3)
    check_layer_gradients(MODELS[name](), source=source[:2, :3], target=target[:2, :3], lengths=lengths)


def test_attention_weights_of_a_call_can_be_read(pair: tuple) -> None:
    source, lengths, target = pair
    model = MODELS["Bahdanau"]()
    state = model.start_decoding(source, lengths)
    model.decode(target, state)
    weights = state["weights"].array
    assert weights.shape == (3, 5, 6)
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-5)
    assert (weights[1, :, 2:] == 0).all() and (weights[2, :, 4:] == 0).all()


# -------------------------------------------------------------------- positions
def test_sinusoids_follow_the_formula() -> None:
    table = sinusoids(50, 6)
    for p, i in itertools.product((0, 1, 49), range(3)):
        angle = p / 10_000 ** (2 * i / 6)
        np.testing.assert_allclose(table[p, 2 * i : 2 * i + 2], [np.sin(angle), np.cos(angle)], atol=1e-12)
    assert sinusoids(4, 5).shape == (4, 5)


@pytest.mark.parametrize("learned", [True, False])
def test_positions_are_added_from_an_offset_on(learned: bool) -> None:
    layer = LearnedPositions(10, 4, generator=0) if learned else SinusoidalPositions(10, 4)
    x, table = to_tensor(np.ones((2, 3, 4))), layer.weights.array if learned else sinusoids(10, 4)
    np.testing.assert_allclose(layer(x, offset=5).array - 1, np.stack([table[5:8]] * 2), rtol=1e-5, atol=1e-6)


def test_sinusoids_of_a_huge_context_window_need_little_memory() -> None:
    x = to_tensor(np.zeros((1, 5, 6)))
    expected = SinusoidalPositions(64, 6)(x, offset=3).array
    np.testing.assert_array_equal(SinusoidalPositions(10**12, 6)(x, offset=3).array, expected)


# -------------------------------------------------------------------- search
@each_model
def test_greedy_search_takes_the_most_probable_token(make: Callable, pair: tuple) -> None:
    source, lengths, _ = pair
    model = lively(make)
    written = beam_search(model, source, lengths, begin=BEGIN, end=END, max_length=6)
    for item, n in enumerate(lengths):
        tokens = [BEGIN]
        for _ in range(6):
            tokens.append(int(model(source[item : item + 1, :n], np.array([tokens])).array[0, -1].argmax()))
            if tokens[-1] == END:
                break
        assert written[item] == [token for token in tokens[1:] if token != END]


@pytest.mark.parametrize("name", ["fixed context", "Bahdanau", "Luong", "Transformer"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_a_wide_beam_finds_the_optimum(name: str, length_penalty: float, pair: tuple) -> None:
    """With as many beams as targets of up to three tokens, the search is exhaustive."""
    source, _, _ = pair
    model = lively(MODELS[name])
    letters = [token for token in range(V) if token != END]
    targets = [list(t) for n in range(3) for t in itertools.product(letters, repeat=n)]
    written = beam_search(
        model, source[:1], begin=BEGIN, end=END, max_length=3, beam_size=300, length_penalty=length_penalty
    )[0]

    def score(target: list[int]) -> float:
        labels = np.array([[*target, END]])
        mean = -float(CrossEntropy()(labels, model(source[:1], np.array([[BEGIN, *target]]))))
        return mean * labels.size ** (1 - length_penalty)

    scores = [score(target) for target in targets]
    assert len(written) == 3 or written == targets[int(np.argmax(scores))]
    if len(written) < 3:
        assert score(written) == pytest.approx(max(scores), rel=1e-4)


@each_model
def test_a_batch_equals_its_items(make: Callable, pair: tuple) -> None:
    source, lengths, _ = pair
    model = lively(make)
    options = {"begin": BEGIN, "end": END, "max_length": 6, "beam_size": 3}
    together = beam_search(model, source, lengths, **options)
    alone = [beam_search(model, source[i : i + 1, :n], [n], **options)[0] for i, n in enumerate(lengths)]
    assert together == alone
    assert model.training


def test_select_rows_of_nested_states() -> None:
    x = np.arange(6).reshape(3, 2)
    rows = np.array([2, 2, 0])
    state = select_rows({"a": to_tensor(x), "b": [x, None], "c": (x,), "n": 3}, rows)
    for found in (state["a"].array, state["b"][0], state["c"][0]):
        assert np.array_equal(found, x[rows])
    assert state["b"][1] is None and state["n"] == 3


BAD = {
    "an unknown cell": (lambda: Seq2Seq(*SIZES, cell="elman"), "cell.*rnn, gru, lstm.*elman"),
    "lengths beyond the source": (
        lambda: MODELS["Transformer"]()(np.ones((2, 4), int), np.ones((2, 3), int), [4, 5]),
        "length_mask: .*0 to 4.*got 4 to 5",
    ),
    "lengths of another batch": (
        lambda: MODELS["Transformer"]()(np.ones((2, 4), int), np.ones((2, 3), int), [3]),
        r"length_mask: .*shape \(2,\), got int64 of shape \(1,\)",
    ),
    "an empty source": (
        lambda: MODELS["fixed context"]()(np.ones((2, 0), int), np.ones((2, 3), int)),
        r"GRU\(input_size=6\): .*step.*got \(2, 0, 6\)",
    ),
    "two vocabularies in one table": (lambda: Transformer(5, 6, tied=True), "Transformer: .*one vocabulary"),
    "a target beyond the window": (
        lambda: MODELS["Transformer"]()(np.ones((1, 4), int), np.ones((1, 13), int)),
        r"SinusoidalPositions\(context_window=12\): .*got 13",
    ),
    "no beam": (
        lambda: beam_search(MODELS["Luong"](), np.ones((1, 2), int), begin=1, end=2, beam_size=0),
        "beam_search: .*beam_size.*got 0",
    ),
}
test_bad_input = bad_input(BAD)


def test_a_second_call_of_decode_needs_a_capacity() -> None:
    """Without keys in a cache, it would attend only to the new tokens."""
    model, tokens = MODELS["Transformer"](), np.ones((1, 2), int)
    state = model.start_decoding(tokens)
    model.decode(tokens, state)
    with pytest.raises(ValueError, match=r"Transformer: .*capacity"):
        model.decode(tokens, state)


def test_the_base_class_names_missing_methods() -> None:
    for call in (lambda: EncoderDecoder().start_decoding([[1]]), lambda: EncoderDecoder().decode([[1]], {})):
        with pytest.raises(NotImplementedError, match="EncoderDecoder"):
            call()
