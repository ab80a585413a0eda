"""Moments that several processes share out: the same training, in less memory."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from test_processes import CONFIG, TOKENS, play

from tricycle.distributed.processes import ProcessGroup
from tricycle.distributed.shards import Shards, UpdateCost, gather_state, n_state_bytes, update_cost
from tricycle.models import GPT
from tricycle.optimiser_rules import OPTIMISERS
from tricycle.optimisers import role_of
from tricycle.tensor import Tensor
from tricycle.training_state import new_optimiser, new_state, train_step


def act(processes, config, shard_optimiser):
    state = new_state(config, TOKENS, processes=processes, shard_optimiser=shard_optimiser)
    results = [train_step(state) for _ in range(3)]
    weights = np.concatenate([parameter.array.ravel() for parameter in state.model.parameters()])
    states = gather_state(state.optimiser, state.model)
    return results, weights.tobytes(), n_state_bytes(state.optimiser), states and list(states.values())


@pytest.mark.nightly_except(3)
@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("size", [2, 3])
def test_sharded_optimizer_state_gives_the_same_bits(size, optimiser):
    config = replace(CONFIG, batch_size=2, accumulation_steps=size, optimiser=optimiser)
    whole = play(size, lambda processes: act(processes, config, False))
    parts = play(size, lambda processes: act(processes, config, True))
    for (results, weights, n_bytes, memory), (others, other_weights, other_bytes, _) in zip(whole, parts):
        assert results == others and weights == other_weights and memory is None
        assert other_bytes < n_bytes * (1 / size + 0.35)
    assert sum(n_bytes for _, _, n_bytes, _ in parts) == whole[0][2]
    gathered = parts[0][3]
    assert [n for n, _ in gathered] == [3] * len(gathered)
    assert sum(array.nbytes for _, state in gathered for array in state.values()) == whole[0][2]
    assert parts[1][3] == {} or parts[1][3] == []


# -------------------------------------------------------------------- who owns what
class Several(ProcessGroup):
    def __init__(self, size):
        super().__init__()
        self.size = size


def sums(shards, loads):
    """By rank: work and numbers."""
    return [
        tuple(sum(load[i] for p, load in loads.items() if shards.owner_of[p] == rank) for i in (0, 1))
        for rank in range(shards.processes.size)
    ]


def balanced(size, **fields):
    """Of a model with six layers: the parameters' costs, and work and numbers by rank."""
    config = replace(CONFIG, n_layers=6, **fields)
    model, optimiser = GPT(config), new_optimiser(config)
    loads = {parameter: update_cost(optimiser, parameter) for parameter in model.parameters()}
    return loads, zip(*sums(Shards(Several(size), model, partial(update_cost, optimiser)), loads))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_muon_operations_are_balanced(size):
    """The embedding, which is large and soon updated, does not count as work."""
    loads, (work, _) = balanced(size, optimiser="muon", vocab_size=4000)
    assert sum(work) == 6 * 12 * CONFIG.embedding_dim**3 and max(work) <= 1.1 * sum(work) / size
    assert all(bool(load.n_operations) == (role_of(parameter) == "matrix") for parameter, load in loads.items())


def test_state_sizes_are_balanced():
    loads, (_, n_numbers) = balanced(3)
    assert sum(n_numbers) == 2 * sum(p.size for p in loads) and max(n_numbers) < 1.05 * sum(n_numbers) / 3


def test_ranks_with_many_operations_hold_less_other_state():
    layer = type("Model", (), {"parameters": lambda self: iter(loads)})()
    costs = UpdateCost(9, 1), UpdateCost(5, 3), UpdateCost(4, 1), UpdateCost(0, 2), UpdateCost(0, 1)
    loads = {Tensor(np.zeros(1)): cost for cost in costs}
    assert sums(Shards(Several(2), layer, loads.get), loads) == [(9, 4), (9, 4)]
