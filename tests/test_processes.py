"""Several processes, played by threads: buckets, weights of labels, and dropout masks of other ranks."""

import threading
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest

from tricycle.configs import DebugConfig, GPTConfig
from tricycle.distributed.processes import SINGLE_PROCESS, GeneratorAdvance, ProcessGroup
from tricycle.evaluation import evaluate
from tricycle.layers import Dense
from tricycle.tensor import Tensor
from tricycle.training import NonFiniteError, compute_gradients
from tricycle.training_state import new_state, train_step

CONFIG = GPTConfig.from_dict(DebugConfig().to_dict())
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 3000)


class Table:
    """Where threads that play processes meet."""

    def __init__(self, size: int) -> None:
        self.values = [None] * size
        self.barrier = threading.Barrier(size, timeout=60)


class Player(ProcessGroup):
    """One of them."""

    def __init__(self, table: Table, rank: int) -> None:
        super().__init__()
        self.table, self.rank, self.size = table, rank, len(table.values)

    def all_gather(self, value):
        self.table.values[self.rank] = value
        self.table.barrier.wait()
        values = list(self.table.values)
        self.table.barrier.wait()
        return values

    def broadcast(self, value):
        return self.all_gather(value)[0]

    def all_reduce(self, numbers):
        return np.sum(self.all_gather(numbers), axis=0).tolist()

    def start_all_reduce(self, array):
        array[...] = np.sum(self.all_gather(array.copy()), axis=0)
        return self

    def start_broadcast(self, array, rank):
        array[...] = self.all_gather(array.copy())[rank]
        return self

    def wait(self):
        pass

    make_progress = wait


def play(size, act):
    """What a function of a process returns in each of n processes, in threads; the first error is raised."""
    table, results, errors = Table(size), [None] * size, []

    def run(rank):
        try:
            results[rank] = act(Player(table, rank))
        except Exception as error:
            errors.append(error)
            table.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return results


def trained(processes, config, n_steps=3, bucket_bytes=10_000):
    """Losses and norms of some updates, in float64, and what stands at the end."""
    processes.bucket_bytes = bucket_bytes
    state = new_state(config, TOKENS, processes=processes)
    for parameter in state.model.parameters():
        parameter.array = parameter.array.astype(np.float64)
    results = [train_step(state) for _ in range(n_steps)]
    weights = np.concatenate([parameter.array.ravel() for parameter in state.model.parameters()])
    return np.array(results), weights, state


@pytest.mark.nightly_except(2)
@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_several_processes_train_as_one_process(size, optimiser):
    config = replace(CONFIG, batch_size=2, accumulation_steps=4, dropout=0.1, optimiser=optimiser)
    results, weights, state = trained(ProcessGroup(), config)
    for others, other_weights, other in play(size, lambda processes: trained(processes, config)):
        np.testing.assert_allclose(others, results, rtol=0, atol=1e-10)
        np.testing.assert_allclose(other_weights, weights, rtol=0, atol=1e-8 if optimiser == "adamw" else 1e-4)
        assert other.dataset.state() == state.dataset.state()
        np.testing.assert_array_equal(*(each.model.generator.random(3) for each in (other, deepcopy(state))))


def test_runs_are_bit_reproducible():
    config = replace(CONFIG, batch_size=2, accumulation_steps=3)
    first, second = (play(3, lambda processes: trained(processes, config)) for _ in range(2))
    for (results, weights, _), (others, other_weights, _) in zip(first, [second[1], second[2], second[0]]):
        assert results.tobytes() == others.tobytes()
        assert weights.tobytes() == other_weights.tobytes()


def test_all_reduce_overlaps_with_the_backward_pass():
    config = replace(CONFIG, batch_size=2, accumulation_steps=2)

    def act(processes):
        processes.bucket_bytes = 1
        state = new_state(config, TOKENS, processes=processes)
        queue_lengths = []
        usual = processes.start_all_reduce
        blocks = {id(p) for p in state.model.blocks[0].parameters()}
        waiting = lambda: sum(p.grad is None for p in state.model.parameters() if id(p) in blocks)
        processes.start_all_reduce = lambda array: (queue_lengths.append(waiting()), usual(array))[1]
        train_step(state)
        return queue_lengths, len(list(state.model.parameters()))

    for queue_lengths, n_parameters in play(2, act):
        assert len(queue_lengths) == n_parameters  # a bucket each
        assert queue_lengths[0] > 0  # none of the first block's gradients was there yet
        assert queue_lengths[-1] == 0


def squares(layer):
    """Sums of squares: the factor is as of the mean over rows."""
    return lambda x, factor: (layer(x) * layer(x)).sum() * (factor / len(x))


def test_labels_have_equal_weight_in_all_processes():
    rng = np.random.default_rng(1)
    batches = [rng.standard_normal((n, 3)) for n in (1, 5, 2)]

    def act(processes):
        layer = Dense(3, 2, generator=0)
        own_batches = batches if processes.size == 1 else [batches[i] for i in ([0, 2], [1], [])[processes.rank]]
        grads = compute_gradients(layer, squares(layer), own_batches, [*map(len, own_batches)], processes.reducer)
        return float(grads.loss), grads.n_labels, layer.weights.grad.array.copy()

    loss, n_labels, grad = act(SINGLE_PROCESS)
    for other in play(3, act):
        assert other[1] == n_labels == 8
        np.testing.assert_allclose(other[0], loss, rtol=1e-6)
        np.testing.assert_allclose(other[2], grad, rtol=1e-5)


def test_parameters_without_gradients_get_none():
    def act(processes):
        layer = Dense(2, 2, generator=0)
        layer.unused = Tensor(np.ones(3, np.float32))
        layer.frozen = Tensor(np.ones(3, np.float32), requires_grad=False)
        layer.weights.grad = Tensor(np.ones((2, 2), np.float32))  # of before: counts once
        compute_gradients(layer, squares(layer), [np.zeros((1, 2))], [1], processes.reducer)
        assert layer.unused.grad is None and layer.frozen.grad is None
        return layer.weights.grad.array.copy()

    for grad in play(2, act):
        np.testing.assert_array_equal(grad, np.ones((2, 2)))


def test_gradients_of_an_earlier_batch_alone_are_summed():
    def act(processes):
        layer = Dense(2, 2, generator=0)
        layer.other = Dense(2, 2, generator=1)
        used = lambda x, factor: squares(layer.other if x.any() else layer)(x, factor)
        compute_gradients(layer, used, [np.ones((1, 2)), np.zeros((1, 2))], [1, 1], processes.reducer)
        return layer.other.weights.grad.array.copy()

    for grad in play(2, act):
        np.testing.assert_allclose(grad, act(SINGLE_PROCESS), rtol=1e-6)


def test_nonfinite_gradients_are_reported_on_all_ranks():
    def act(processes):
        layer = Dense(2, 2, generator=0)
        x = np.full((1, 2), np.nan if processes.rank == 1 else 1.0)
        with pytest.raises(NonFiniteError, match=r"^rank 1: .*nan"):
            compute_gradients(layer, squares(layer), [x], [1], processes.reducer)
        return layer.weights.grad

    assert play(2, act) == [None, None]


def test_batch_without_labels_raises():
    def act(processes):
        with pytest.raises(ValueError, match="label"):
            compute_gradients(Dense(2, 2), lambda x, factor: None, [1], [0], processes.reducer)

    play(2, act)


def test_long_evaluations_answer_pings():
    def act(processes):
        state = new_state(replace(CONFIG, accumulation_steps=6), TOKENS, processes=processes)
        answers, places = [], []
        processes.answer_pings, processes.set_status = lambda: answers.append(len(places)), places.append
        train_step(state)
        evaluate(state.model, TOKENS[:1000], 2, 9, processes=processes)
        return len(answers), places

    assert play(3, act) == [(2 + 3, ["update 1"])] * 3


def test_held_out_estimates_are_sharded():
    def act(processes):
        state = new_state(CONFIG, TOKENS, processes=processes)
        n_calls = []
        usual = state.model.forward
        state.model.forward = lambda *args: (n_calls.append(1), usual(*args))[1]
        return evaluate(state.model, TOKENS[:1000], 2, 9, processes=processes), len(n_calls)

    whole, n_batches = act(SINGLE_PROCESS)
    results = play(4, act)
    assert all(result == whole for result, _ in results)  # bit for bit
    assert [n for _, n in results] == [3, 2, 2, 2] and n_batches == 9


# -------------------------------------------------------------------- shares and draws
@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("n_items", [0, 1, 4, 12])
def test_shards_cover_all_items_once(n_items, size):
    players = [Player(Table(size), rank) for rank in range(size)]
    shares = [player.shard(n_items) for player in players]
    assert [item for share in shares for item in share] == list(range(n_items))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("already", [0, 1])
@pytest.mark.parametrize("n", [0, 1, 2, 7, 1000])
def test_dropout_draws_of_other_ranks_are_skipped(n, already):
    generator = np.random.default_rng(5)
    generator.random(already, np.float32)
    before = generator.bit_generator.state
    generator.random(n, np.float32)
    draws = GeneratorAdvance.from_states(before, generator.bit_generator.state)
    for _ in range(2):
        generator.random(n, np.float32)
    expected = generator.random(9, np.float32)
    draws.skip(generator, before, 3)
    np.testing.assert_array_equal(generator.random(9, np.float32), expected)


def test_generator_advance_with_64_bits_and_other_generators():
    generator = np.random.default_rng(5)
    before = generator.bit_generator.state
    generator.integers(2**63, size=3)
    assert GeneratorAdvance.from_states(before, generator.bit_generator.state) == (3, False)
    other = np.random.Generator(np.random.MT19937(0)).bit_generator.state
    with pytest.raises(ValueError, match=r"PCG64.*MT19937"):
        GeneratorAdvance.from_states(other, other)


def test_single_process():
    assert SINGLE_PROCESS.size == 1 and SINGLE_PROCESS.is_rank_zero and list(SINGLE_PROCESS.shard(3)) == [0, 1, 2]
    assert SINGLE_PROCESS.broadcast("x") == "x" and SINGLE_PROCESS.all_gather(1) == [1]
    assert SINGLE_PROCESS.all_reduce([1.0, 2.0]) == [1.0, 2.0]
    assert SINGLE_PROCESS.any(True) is True and SINGLE_PROCESS.any(False) is False
    with pytest.raises(NotImplementedError, match=r"ProcessGroup.*start_all_reduce"):
        SINGLE_PROCESS.start_all_reduce(np.zeros(1))
