"""Windows, epochs and positions of datasets: every batch can be computed by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import bad_input

from tricycle.dataset import Buckets, CausalLMDataset, Dataset, InfiniteBatchDataset, pad
from tricycle.tensor import Tensor

VOCAB = 1000


def windows(n_tokens: int = 100, batch_size: int = 3, context_window: int = 7, seed: int = 0) -> CausalLMDataset:
    """Windows over the tokens 0, 1, 2, ..., so that a token is its own place."""
    return CausalLMDataset(np.arange(n_tokens), VOCAB, batch_size, context_window, seed)


def first_tokens(dataset, n_items: int) -> list[int]:
    return [int(next(dataset)[0][0]) for _ in range(n_items)]


# -------------------------------------------------------------------- windows
def test_targets_are_inputs_shifted_by_one():
    dataset = windows().batch()
    for _ in range(10):
        inputs, outputs = next(dataset)
        assert inputs.shape == outputs.shape == (3, 7)
        np.testing.assert_array_equal(outputs, inputs + 1)
        np.testing.assert_array_equal(inputs, inputs[:, :1] + np.arange(7))


def test_unshuffled_windows_are_in_order():
    assert first_tokens(windows(), 14) == [7 * i for i in range(13)] + [0]
    inputs, _ = next(windows(22, batch_size=10).batch())  # a batch larger than an epoch
    assert inputs[:, 0].tolist() == [0, 7, 0, 7, 0, 7, 0, 7, 0, 7]


def test_batches_are_integers_with_is_batched():
    inputs, outputs = next(windows().batch().shuffle().to_tensor())
    for tensor in (inputs, outputs):
        assert isinstance(tensor, Tensor)
        assert tensor.dtype.kind == "i"
        assert tensor.is_batched
        assert not tensor.requires_grad
    assert not next(windows().to_tensor())[0].is_batched


@given(st.integers(2, 60), st.integers(1, 9), st.integers(0, 5))
def test_each_epoch_visits_every_window_once(n_tokens, context_window, seed):
    if n_tokens <= context_window:
        return
    dataset = windows(n_tokens, 1, context_window, seed).shuffle()
    for _ in range(3):
        starts = sorted(first_tokens(dataset, dataset.n_items))
        assert starts[0] >= 0
        assert starts[-1] + context_window < n_tokens
        assert np.diff(starts).tolist() == [context_window] * (dataset.n_items - 1)


def test_epochs_differ_in_order_and_offset():
    dataset = windows(1000).shuffle()
    passes = [first_tokens(dataset, dataset.n_items) for _ in range(4)]
    orders = {tuple(np.argsort(starts)) for starts in passes}
    assert len(orders) == 4
    assert len({min(starts) for starts in passes}) > 1


def test_seed_determines_the_order():
    runs = [first_tokens(windows(seed=seed).shuffle(), 40) for seed in (3, 3, 4)]
    assert runs[0] == runs[1] != runs[2]
    dataset = windows(seed=0).shuffle(seed=1)
    next(dataset)
    dataset.shuffle(seed=3)  # takes effect immediately
    dataset.position = 0
    assert first_tokens(dataset, 40) == runs[0]


def test_memory_map_is_read_one_window_at_a_time(tmp_path):
    path = tmp_path / "tokens.bin"
    with path.open("wb") as file:  # 1 GiB on paper, a hole on the disk
        file.truncate(2**30)
    dataset = CausalLMDataset(np.memmap(path, np.uint16, "r"), VOCAB, 4, 256).batch().shuffle()
    for _ in range(5):
        inputs, outputs = next(dataset)
        assert inputs.dtype == np.int64
        assert not inputs.any()
        assert not outputs.any()


# -------------------------------------------------------------------- position
@given(
    st.integers(9, 90),
    st.integers(1, 8),
    st.integers(1, 12),
    st.booleans(),
    *[st.integers(0, 20)] * 2,
    st.integers(0, 3),
)
def test_restored_state_continues_with_the_same_batches(
    n_tokens, context_window, batch_size, shuffled, n_before, n_used, other_seed
):
    def new(seed):
        dataset = windows(n_tokens, batch_size, context_window, seed).batch()
        return dataset.shuffle() if shuffled else dataset

    dataset = new(seed=1)
    for _ in range(n_before):
        next(dataset)
    state = dataset.state()
    expected = [next(dataset) for _ in range(5)]

    other = new(seed=other_seed)  # wherever it stands, and whatever its seed was
    for _ in range(n_used):
        next(other)
    other.load_state(state)
    for expected_values, got in zip(expected, [next(other) for _ in range(5)]):
        np.testing.assert_array_equal(expected_values, got)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_items": None}, "n_items.*13.*got None"),
        ({"position": "3"}, "position.*got '3'"),
        ({"position": -1}, "position.*got -1"),
        ({"position": 1.5}, "position.*got 1.5"),
        ({"seed": None}, "seed.*got None"),
        ({"seed": float("inf")}, "seed.*got inf"),
    ],
)
def test_bad_state_is_rejected(change, message):
    dataset = windows()
    next(dataset)
    with pytest.raises(ValueError, match=message):
        dataset.load_state({**dataset.state(), **change})
    assert dataset.position == 1


# -------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("tokens", "sizes", "message"),
    [
        ([], {}, "at least 9 tokens.*got 0"),
        (range(8), {}, "at least 9 tokens.*got 8"),
        (np.zeros((9, 20), int), {}, r"whole numbers.*int64.*\(20,\)"),
        (np.linspace(0, 1, 50), {}, "whole numbers.*float64"),
        (["a"] * 50, {}, "sequence of whole numbers"),
        (range(50), {"vocab_size": 0}, "vocab_size.*got 0"),
        (range(50), {"batch_size": -2}, "batch_size.*got -2"),
        (range(50), {"batch_size": 2.0}, "batch_size.*got 2.0"),
        (range(50), {"context_window": 0}, "context_window.*got 0"),
    ],
)
def test_bad_arguments_are_rejected(tokens, sizes, message):
    tokens = list(tokens) if isinstance(tokens, range) else tokens
    with pytest.raises(ValueError, match=message):
        CausalLMDataset(tokens, **{"vocab_size": 50, "batch_size": 2, "context_window": 8, **sizes})


@pytest.mark.parametrize("bad", [50, 10**6, -1])
def test_ids_outside_the_vocabulary_raise_and_keep_the_position(bad):
    tokens = np.arange(40)
    tokens[20] = bad
    dataset = CausalLMDataset(tokens, 50, 2, 8).batch()
    next(dataset)
    with pytest.raises(ValueError, match=f"0 to 49, got {bad}"):
        next(dataset)
    assert dataset.position == 2


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "2"])
def test_bad_batch_size_raises_and_changes_nothing(size):
    dataset = windows(batch_size=3)
    with pytest.raises(ValueError, match="batch_size"):
        dataset.batch(size)
    assert next(dataset.batch())[0].shape == (3, 7)


# -------------------------------------------------------------------- pairs
def test_dataset_yields_every_item_once_per_epoch():
    dataset = Dataset(np.arange(10), np.arange(10) * 2).batch(4).shuffle()
    assert len(dataset) == 3
    passes = []
    for _ in range(2):
        batches = list(dataset)
        assert [len(inputs) for inputs, _ in batches] == [4, 4, 2]
        inputs, outputs = (np.concatenate(parts) for parts in zip(*batches))
        np.testing.assert_array_equal(outputs, inputs * 2)
        assert sorted(inputs) == list(range(10))
        passes.append(inputs.tolist())
    assert passes[0] != passes[1]


def test_dataset_without_batch_yields_single_items():
    dataset = Dataset([[1.5, 2.5], [3.5, 4.5]], [0, 1]).to_tensor()
    assert len(dataset) == 2
    (x, y), _ = list(dataset)
    assert (x.shape, y.shape) == ((2,), ())
    assert (x.dtype, y.dtype.kind) == (np.float32, "i")
    assert not x.is_batched


def test_infinite_batches_repeat_epochs():
    dataset = InfiniteBatchDataset(np.arange(5), -np.arange(5), batch_size=3)
    batches = [next(dataset) for _ in range(5)]
    assert np.concatenate([inputs for inputs, _ in batches]).tolist() == list(range(5)) * 3
    assert np.concatenate([outputs for _, outputs in batches]).tolist() == [-i for i in range(5)] * 3
    shuffled = InfiniteBatchDataset(np.arange(50), np.arange(50), batch_size=10, seed=1).shuffle().to_tensor()
    passes = [np.concatenate([next(shuffled)[0].array for _ in range(5)]) for _ in range(2)]
    assert passes[0].tolist() != passes[1].tolist()
    assert all(sorted(one) == list(range(50)) for one in passes)


BAD_PAIRS = {
    "lengths": (lambda: Dataset([1, 2], [1]), "2 inputs and 1 outputs"),
    "nothing": (lambda: Dataset([], []), "at least one.*0 inputs"),
    "no batch size": (lambda: Dataset([1], [1]).batch(), "batch size.*none"),
    "batch size 0": (lambda: Dataset([1], [1]).batch(0), "batch_size.*got 0"),
    "infinite, lengths": (lambda: InfiniteBatchDataset([1, 2], [1], 1), "InfiniteBatchDataset: .*outputs.*inputs"),
    "infinite, batch size 0": (lambda: InfiniteBatchDataset([1], [1], 0), "batch_size.*got 0"),
    "a long item": (lambda: Buckets([3, 41], 40), "max_tokens=40.*got 41"),
    "no items": (lambda: Buckets([], 40), "max_tokens=40.*got 0"),
    "empty items": (lambda: Buckets([0, 0], 40), "max_tokens=40.*got 0"),
}
test_bad_pairs_are_rejected = bad_input(BAD_PAIRS)


# -------------------------------------------------------------------- sequences of any length
def test_pad_values_and_lengths():
    padded, lengths = pad([[5, 6, 7], [], [8]], value=-1)
    assert padded.tolist() == [[5, 6, 7], [-1, -1, -1], [8, -1, -1]]
    assert lengths.tolist() == [3, 0, 1]
    assert padded.dtype.kind == lengths.dtype.kind == "i"
    assert [a.shape for a in pad([])] == [(0, 0), (0,)]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=60), st.integers(18, 200))
def test_buckets_hold_every_item_once_within_max_tokens(lengths, max_tokens):
    array, buckets = np.array(lengths), Buckets(lengths, max_tokens)
    for epoch in range(2):
        batches = buckets.batches(epoch)
        assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
        assert all(array[rows].max(axis=0).sum() * len(rows) <= max_tokens for rows in batches)


def test_buckets_pad_little_and_are_shuffled():
    lengths = np.random.default_rng(0).integers(5, 60, (2000, 2))
    lengths[:, 1] = lengths[:, 0] + np.random.default_rng(1).integers(0, 3, 2000)
    buckets, given = Buckets(lengths, 1500, seed=1), []
    n_batches = len(buckets.batches(0))
    padded = sum(lengths[rows].max(axis=0).sum() * len(rows) for rows in buckets.batches(0))
    assert padded < 1.06 * lengths.sum()
    for epoch in range(2):
        rows = [next(buckets) for _ in range(len(buckets.batches(epoch)))]
        assert sorted(np.concatenate(rows).tolist()) == list(range(2000))
        given.append([sorted(r.tolist()) for r in rows])
    assert given[0] != given[1]
    means = [lengths[rows].mean() for rows in buckets.batches(0)]
    assert abs(np.corrcoef(means, np.arange(n_batches))[0, 1]) < 0.5  # short ones do not come first


def test_buckets_resume_from_saved_state():
    lengths = np.random.default_rng(0).integers(1, 9, 50)
    buckets, other = Buckets(lengths, 40, seed=3), Buckets(lengths, 40, seed=3)
    for _ in range(2 * len(buckets.batches(0)) - 3):
        next(buckets)
    other.load_state(buckets.state())
    for _ in range(10):
        assert next(buckets).tolist() == next(other).tolist()
