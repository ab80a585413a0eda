"""Moments that several processes share out: the same training, in less memory."""

from dataclasses import replace

import numpy as np
import pytest
from test_processes import CONFIG, TOKENS, play

from tricycle.training import new_state, train_step


def act(processes, config, shard_optimiser):
    state = new_state(config, TOKENS, processes=processes, shard_optimiser=shard_optimiser)
    results = [train_step(state) for _ in range(3)]
    weights = np.concatenate([parameter.array.ravel() for parameter in state.model.parameters()])
    memory = state.optimiser.whole_memory(state.model)
    return results, weights.tobytes(), state.optimiser.n_bytes, memory and list(memory.values())


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
@pytest.mark.parametrize("size", [2, 3])
def test_shared_out_or_not_the_same_bits(size, optimiser):
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
