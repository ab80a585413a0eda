"""Updates that are recorded and replayed, with a recorder of NumPy arrays; test_gpu.py has those of a GPU."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tricycle import recorded_updates
from tricycle.autograd import Mode, graph_mode
from tricycle.configs import GPTConfig
from tricycle.debug import use_reference
from tricycle.kernels.recording import RecordingError, new_recorder
from tricycle.recorded_updates import MAX_RECORDINGS, RecordedUpdates
from tricycle.training import apply_gradients, compute_gradients, train
from tricycle.training_state import StateSession, TrainingState, new_state

CONFIG = GPTConfig(vocab_size=64, context_window=16, embedding_dim=16, n_heads=2, n_layers=2, batch_size=4, steps=40)
TOKENS = np.random.default_rng(0).integers(0, 64, 2000)


class HostRecorder:
    """Records without an effect on arrays, and replays without an effect on what Python counts, as a GPU would."""

    n_bytes = 0

    def __init__(self, state: TrainingState) -> None:
        self.state = state
        self.n_replays = 0

    def arrays(self) -> list[np.ndarray]:
        return [
            array
            for p in self.state.model.parameters()
            for array in (p.array, *self.state.optimiser.states[p][1].values())
        ]

    def record(self, function: Callable[..., Any], inputs: Sequence[Any]) -> None:
        optimiser = self.state.optimiser
        self.function, self.before = function, {**vars(optimiser), "states": dict(optimiser.states)}
        arrays = [array.copy() for array in self.arrays()]
        function(*inputs)
        for array, old in zip(self.arrays(), arrays):
            array[...] = old

    def replay(self, inputs: Sequence[Any]) -> np.ndarray:
        optimiser = self.state.optimiser
        counted = {**vars(optimiser), "states": optimiser.states}
        vars(optimiser).update({**self.before, "states": dict(self.before["states"])})
        try:
            self.n_replays += 1
            return self.function(*inputs)
        finally:
            vars(optimiser).update(counted)


class RecordedSession(StateSession):
    """A session that records on the CPU, and stops after some updates."""

    def __init__(self, state: TrainingState, n_steps: int, recorded: RecordedUpdates | None) -> None:
        super().__init__(state)
        self.last, self.recorded, self.results = state.step + n_steps, recorded, []

    @property
    def n_steps(self) -> float:
        return self.last

    def replay(self, batch_loss, batches, n_labels, max_norm):
        if self.recorded is None:
            return None
        model, optimiser = self.state.model, self.state.optimiser

        def update(batches):
            grads = compute_gradients(model, batch_loss, batches, n_labels)
            return grads.loss, apply_gradients(model, optimiser, grads, max_norm)

        return self.recorded.replay(update, batches, *n_labels)

    def log(self, loss: Any, norm: Any) -> None:
        self.results.append((float(loss), float(norm)))


@pytest.fixture
def recorders(monkeypatch) -> list[HostRecorder]:
    """The recorders that were made, for the state that `start` makes."""
    made: list[HostRecorder] = []

    def make(like: np.ndarray) -> HostRecorder:
        made.append(HostRecorder(states[-1]))
        return made[-1]

    states.clear()
    monkeypatch.setattr(recorded_updates, "new_recorder", make)
    return made


states: list[TrainingState] = []


def start(config: GPTConfig = CONFIG) -> tuple[TrainingState, RecordedUpdates]:
    states.append(new_state(config, TOKENS))
    return states[-1], RecordedUpdates(states[-1].model, states[-1].optimiser)


def run(state: TrainingState, n_steps: int, recorded: RecordedUpdates | None = None) -> list[tuple[float, float]]:
    session = RecordedSession(state, n_steps, recorded)
    train(**state.train_arguments(), session=session)
    return session.results


def assert_same_training(state: TrainingState, config: GPTConfig, results: list, exactly: bool = False) -> None:
    """Compare a state and its (loss, norm)s with as many plain updates."""
    plain = new_state(config, TOKENS)
    np.testing.assert_allclose(results, run(plain, len(results)), rtol=0 if exactly else 1e-5)
    assert state.optimiser.n_steps == plain.optimiser.n_steps == len(results)
    assert state.optimiser.learning_rate == plain.optimiser.learning_rate
    for own, other in zip(state.model.parameters(), plain.model.parameters()):
        np.testing.assert_allclose(own.array, other.array, rtol=0 if exactly else 1e-4, atol=0 if exactly else 1e-6)
        assert state.optimiser.states[own][0] == plain.optimiser.states[other][0] == len(results)


@pytest.mark.parametrize("changes", [{}, {"accumulation_steps": 2}, {"positions": "rotary", "norm": "rms_norm"}])
def test_replays_match_plain_updates(recorders, changes):
    config = replace(CONFIG, **changes)
    state, recorded = start(config)
    results = run(state, 9, recorded)
    assert [each.n_replays for each in recorders] == [7] and not recorded.problem
    assert_same_training(state, config, results)


def test_parameters_change_their_versions_in_replays(recorders):
    state, recorded = start()
    run(state, 3, recorded)
    before = [parameter._version for parameter in state.model.parameters()]
    run(state, 1, recorded)
    assert all(own._version > old for own, old in zip(state.model.parameters(), before))


def test_replaced_arrays_and_changed_layers_are_recorded_anew(recorders):
    state, recorded = start()
    results = run(state, 4, recorded)
    parameter = next(state.model.parameters())
    parameter.array = parameter.array.copy()
    results += run(state, 4, recorded)
    state.model.blocks[0].attention.training = True  # as before, but an attribute of the layer itself now
    results += run(state, 4, recorded)
    assert [each.n_replays for each in recorders] == [2, 3, 3]
    assert_same_training(state, CONFIG, results)


def test_recording_ends_if_settings_change_too_often(recorders):
    state, recorded = start()
    results = []
    for _ in range(MAX_RECORDINGS + 1):
        parameter = next(state.model.parameters())
        parameter.array = parameter.array.copy()
        results += run(state, 3, recorded)
    assert len(recorders) == MAX_RECORDINGS + 1
    assert recorded.problem == "settings change too often" and recorders[-2].n_replays and not recorders[-1].n_replays
    assert_same_training(state, CONFIG, results)


def test_host_randomness_is_not_recorded(recorders):
    config = replace(CONFIG, dropout=0.1)
    state, recorded = start(config)
    results = run(state, 3, recorded)
    assert recorded.problem == "a layer draws random numbers on the host"
    assert len(results) == 3 and state.optimiser.n_steps == 3 and not any(each.n_replays for each in recorders)


def test_failed_recordings_change_nothing(recorders, monkeypatch):
    def fail(self, function, inputs, record=HostRecorder.record):
        record(self, function, inputs)
        raise RecordingError("a copy from the host")

    monkeypatch.setattr(HostRecorder, "record", fail)
    state, recorded = start()
    results = run(state, 5, recorded)
    assert recorded.problem == "a copy from the host"
    assert_same_training(state, CONFIG, results, exactly=True)


def test_interrupted_recordings_are_undone(recorders, monkeypatch):
    def interrupt(self, function, inputs):
        state.optimiser.step()
        raise KeyboardInterrupt

    state, recorded = start()
    run(state, 2, recorded)
    monkeypatch.setattr(HostRecorder, "record", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(state, 1, recorded)
    assert state.optimiser.n_steps == 2 and not state.optimiser._step_is_open


@pytest.mark.parametrize("block", [lambda: graph_mode(Mode()), use_reference])
def test_blocks_with_other_modes_run_plain_updates(recorders, block):
    state, recorded = start()
    run(state, 3, recorded)
    with block():
        run(state, 2, recorded)
    assert [each.n_replays for each in recorders] == [1]


def test_nothing_records_on_a_cpu():
    assert new_recorder(np.zeros(3)) is None
    state, recorded = start()
    results = run(state, 4, recorded)
    assert recorded.problem == "nothing records here"
    assert_same_training(state, CONFIG, results, exactly=True)
