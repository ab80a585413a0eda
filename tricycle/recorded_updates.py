"""Training updates on a GPU that are recorded once and then replayed, so that Python does not limit the speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tricycle.autograd import current_modes, increment_versions
from tricycle.devices import Array
from tricycle.kernels.dispatch import reference_only
from tricycle.kernels.recording import Recorder, RecordingError, new_recorder
from tricycle.layers import Layer, generators_in
from tricycle.optimisers import Optimiser
from tricycle.tensor import Tensor

N_WARM_UP = 1  # equal updates before one is recorded: they fill caches
MAX_RECORDINGS = 8  # of one training run; then its settings change too often

Update = Callable[[Sequence[Any]], tuple[Any, Any]]  # from batches to loss and norm


class RecordedUpdates:
    """Records the second of a model's updates with equal `settings`, and replays it from then on.

    After a change of settings (arrays that were replaced, an attribute of a layer, other shapes) an update is recorded
    anew. Learning rate, step number, tokens and random masks may change from replay to replay. The optimizer's state,
    which the first update makes, is a setting too, so that the third update of a run is recorded.

    Attributes:
        problem: why updates run without a recording; "" if there is no reason against one.
        recorder: replays updates; None before the first recording.
    """

    def __init__(self, model: Layer, optimiser: Optimiser) -> None:
        self.model, self.optimiser, self.problem = model, optimiser, ""
        self._settings: list[Any] = []
        self._updated: list[Tensor] = []  # the parameters that a replay changes
        self._n_equal, self._n_recordings, self._n_replayed = 0, 0, 0
        self.recorder: Recorder | None = None

    def replay(self, update: Update, batches: Sequence[Any], *settings: Any) -> tuple[Any, Any] | None:
        """Make an update by a replay, recorded first if necessary, and return (loss, norm); None if it is to be called.

        Args:
            update: makes an update of batches like these, and returns loss and norm.
            batches: pairs of Tensors.
            settings: further objects that require a new recording when others take their places.
        """
        if self.problem or current_modes.get() or reference_only.get():
            return None
        found = [*settings, *self.settings(batches)]
        if len(found) != len(self._settings) or not all(map(_is_same, found, self._settings)):
            self._settings, self._n_equal, self.recorder = found, 0, None
        self._n_equal += 1
        if self._n_equal <= N_WARM_UP:
            return None
        if self.recorder is None:
            self._record(update, batches)
        else:
            self._count_update()
        if self.recorder is None:
            return None
        loss, norm = self.recorder.replay(self._inputs(batches))
        self._n_replayed += 1
        return loss, norm

    def settings(self, batches: Sequence[Any]) -> Iterator[Any]:
        """Yield all objects that a recording depends on: of batches, layers, parameters and optimizer."""
        for tensor in (tensor for batch in batches for tensor in batch):
            yield from (*tensor.shape, tensor.dtype)
        for layer in self.model.layers():
            yield layer
            yield from vars(layer).values()
        rules = self.optimiser.rules if isinstance(self.optimiser.rules, tuple) else ((None, self.optimiser.rules),)
        yield from (self.optimiser.weight_decay, self.optimiser.decays)
        for accepts, rule in rules:
            yield from (accepts, rule, *vars(rule).values())
        for parameter in self.model.parameters():
            yield from (parameter.array, parameter.requires_grad)
            yield from self.optimiser.states.get(parameter, (0, {}))[1].values()

    def _record(self, update: Update, batches: Sequence[Any]) -> None:
        """Record an update; on failure set `problem` and undo what the host has counted."""
        model, optimiser = self.model, self.optimiser
        before = {**vars(optimiser), "states": dict(optimiser.states)}
        random_states = [generator.bit_generator.state for generator in generators_in(model)]
        self._n_replayed, self._n_recordings = 0, self._n_recordings + 1
        recorder = new_recorder(next(model.parameters()).array)

        def on_device(*inputs: Array) -> Array:
            tokens = iter([Tensor(array, requires_grad=False) for array in inputs[:-2]])
            optimiser.learning_rate, optimiser.n_replayed = inputs[-2:]
            loss, norm = update([tuple(next(tokens) for _ in batch) for batch in batches])
            if [generator.bit_generator.state for generator in generators_in(model)] != random_states:
                raise RecordingError("a layer draws random numbers on the host")
            result = next(model.parameters()).xp.empty(2, np.float32)  # CuPy's `stack` copies addresses from the host
            result[0], result[1] = loss, norm
            return result

        try:
            if recorder is None or self._n_recordings > MAX_RECORDINGS:
                raise RecordingError("nothing records here" if recorder is None else "settings change too often")
            recorder.record(on_device, self._inputs(batches))
            self.recorder = recorder
            self._updated = [p for p, (n_updates, _) in optimiser.states.items() if n_updates > before["states"][p][0]]
        except BaseException as error:
            model.zero_grad()
            vars(optimiser).update(before)
            if not isinstance(error, RecordingError):
                raise
            self.problem = str(error)
        finally:
            optimiser.learning_rate, optimiser.n_replayed = before["learning_rate"], 0

    def _inputs(self, batches: Sequence[Any]) -> list[Any]:
        """Return the inputs of a replay: the arrays of all batches, the learning rate and the number of replays."""
        numbers = np.float32(self.optimiser.learning_rate), np.float32(self._n_replayed)
        return [*(tensor.array for batch in batches for tensor in batch), *map(np.asarray, numbers)]

    def _count_update(self) -> None:
        """Count an update that a replay makes, as the optimizer does for one that it makes itself."""
        self.optimiser.n_steps += 1
        for parameter in self._updated:
            n_updates, state = self.optimiser.states[parameter]
            self.optimiser.states[parameter] = n_updates + 1, state
        increment_versions(self._updated)


def _is_same(a: Any, b: Any) -> bool:
    """Return whether a and b are one object, or equal numbers or texts."""
    return a is b or (type(a) is type(b) and isinstance(a, (int, float, str)) and a == b)
