"""Blocks that are computed again from a recorded run give the results of the whole run."""

from __future__ import annotations

import numpy as np
import pytest
from test_models import FAMILIES, TINY, lively

from tricycle_lab.recorded_run import record_run, run_block, run_blocks

TOKENS = [3, 1, 4, 1, 5, 9, 2]


@pytest.mark.parametrize("name", FAMILIES)
def test_later_blocks_and_tokens_equal_the_recorded_ones(name: str) -> None:
    model = lively(FAMILIES[name]).eval()
    recording = record_run(model, TOKENS)
    assert [len(arrays) for arrays in recording] == [
        len(model.blocks) + (arrays is recording.stream) for arrays in recording
    ]
    with model.evaluating():
        for n_tokens in (1, 3, len(TOKENS)):
            x = recording.stream[0][:, -n_tokens:].repeat(2, axis=0)
            for out in run_blocks(model, 0, x, recording):
                np.testing.assert_allclose(out, recording.stream[-1][0, -n_tokens:], rtol=1e-4, atol=1e-4)


def test_changes_replace_results_of_layers() -> None:
    model = lively(TINY).eval()
    recording = record_run(model, TOKENS)
    with model.evaluating():
        x = recording.stream[1][:, 2:]
        out = run_block(model, 1, x, recording, [(model.blocks[1].mlp, lambda out: out * 0)])
    expected = recording.stream[1] + recording.attention[1]
    np.testing.assert_allclose(out, expected[:, 2:], rtol=1e-4, atol=1e-5)
    assert abs(out - recording.stream[2][:, 2:]).max() > 0.1
