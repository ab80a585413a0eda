"""Synthetic pulse-wave time series: normal, or with anomalies of several kinds.

A beat is a wave with a smaller one behind it. Beats differ in length (with the breath, and at random), in height and in
shape; the whole drifts slowly, and there is noise. About 32 samples are a beat: a second, if one likes.
"""

from typing import NamedTuple

import numpy as np

BEAT = 32  # samples, in the mean
SLOT = 10 * BEAT  # one event lies in each, so that windows between them are normal
NOISE = 0.04  # standard deviation; a beat is about 1 high
KINDS = ("spike", "level shift", "noise burst", "missing beat", "fast beats", "odd beat")
FASTER = 0.6  # how long a beat of "fast beats" is


class Series(NamedTuple):
    """A time series, with the kind, start and end of each anomaly."""

    values: np.ndarray  # (n_samples,)
    events: list[tuple[str, int, int]]  # the kind, first sample and end of each event


def normal_series(n_samples: int, generator: np.random.Generator) -> Series:
    """Return a random pulse-wave Series of `n_samples` values, without anomalies."""
    return _series(n_samples, [], generator)


def series_with_events(n_each: int, generator: np.random.Generator) -> Series:
    """Return a Series with `n_each` anomalies of each of KINDS in mixed order, one every SLOT samples."""
    kinds = [KINDS[i] for _ in range(n_each) for i in generator.permutation(len(KINDS))]
    starts = [SLOT * i + SLOT // 3 + int(generator.integers(0, 2 * BEAT)) for i in range(len(kinds))]
    return _series(SLOT * len(kinds), list(zip(kinds, starts)), generator)


def _series(n_samples: int, planned: list[tuple[str, int]], generator: np.random.Generator) -> Series:
    """Return a random Series of beats, drift and noise with `planned` anomalies: (kind, approximate start), in order.

    Args:
        planned: kinds of events and about where they begin, in order.
    """
    values, events = _beats(n_samples, [plan for plan in planned if "beat" in plan[0]], generator)
    time = np.arange(n_samples)
    for period, height in ((25 * BEAT, 0.12), (7.3 * BEAT, 0.06)):  # drift
        values += height * np.sin(2 * np.pi * (time / period + generator.random()))
    values += NOISE * generator.standard_normal(n_samples)
    for kind, start in planned:
        if kind == "spike":
            values[start] += generator.choice([-1, 1]) * generator.uniform(0.4, 0.8)
            events.append((kind, start, start + 1))
        elif kind == "level shift":
            end = start + int(generator.integers(2 * BEAT, 3 * BEAT))
            values[start:end] += generator.choice([-1, 1]) * generator.uniform(0.3, 0.5)
            events.append((kind, start, end))
        elif kind == "noise burst":
            end = start + int(generator.integers(BEAT, 2 * BEAT))
            values[start:end] += generator.uniform(2, 4) * NOISE * generator.standard_normal(end - start)
            events.append((kind, start, end))
    return Series(values, sorted(events, key=lambda event: event[1]))


def _beats(n_samples: int, planned: list[tuple[str, int]], generator: np.random.Generator) -> tuple[np.ndarray, list]:
    """Return the waves (n_samples,) of all beats, and (kind, first, last) of the planned anomalous beats."""
    values, events, waiting = np.zeros(n_samples), [], list(planned)
    breath, place, fast_until = generator.random(), -float(BEAT), 0.0
    while place < n_samples + BEAT:
        phase = 2 * np.pi * (place / (4.3 * BEAT) + breath)
        length = BEAT * (1 + 0.06 * np.sin(phase) + 0.04 * generator.standard_normal())
        height = 1 + 0.08 * np.sin(phase + 1) + 0.06 * generator.standard_normal()
        second = 0.4 + 0.06 * generator.standard_normal()
        kind = ""
        if waiting and place >= waiting[0][1]:
            kind = waiting.pop(0)[0]
        if kind == "fast beats":
            fast_until = place + 3 * BEAT
            events.append((kind, round(place), round(fast_until)))
        if place < fast_until:
            length *= FASTER
        if kind == "odd beat":  # low and broad, its second wave high
            height, second = 0.7 * height, 1.2
        if kind != "missing beat":
            _add_wave(values, place, 0.1 * length, height)
            _add_wave(values, place + 0.33 * length, 0.13 * length, height * second)
        if kind in ("missing beat", "odd beat"):
            events.append((kind, round(place - 0.25 * length), round(place + 0.75 * length)))
        place += length
    return values, events


def _add_wave(values: np.ndarray, centre: float, width: float, height: float) -> None:
    """Add a Gaussian wave around `centre` to the values, in place."""
    first, last = (min(max(0, int(centre + side)), len(values)) for side in (-5 * width, 5 * width + 1))
    time = np.arange(first, last)
    values[first:last] += height * np.exp(-0.5 * ((time - centre) / width) ** 2)


# -------------------------------------------------------------------- windows
def windows_of(values: np.ndarray, size: int, stride: int) -> np.ndarray:
    """Return a read-only view (N, size) of a series (n_samples,): windows from 0, stride, 2 stride and so on."""
    return np.lib.stride_tricks.sliding_window_view(values, size)[::stride]


def labels_of(series: Series, size: int, stride: int) -> np.ndarray:
    """Return (N,) the index of the event in each window, -1 for none, -2 for too small a part of one.

    A window shows an event that lies in it whole or with a quarter of a beat; with less of one it is left out.
    """
    owner = np.full(len(series.values), -1)
    for i, (_, first, last) in enumerate(series.events):
        owner[first:last] = i
    labels = []
    for window in windows_of(owner, size, stride):
        touched, counts = np.unique(window[window >= 0], return_counts=True)
        label = -1
        for event, count in zip(touched, counts):
            _, first, last = series.events[event]
            label = event if count >= min(BEAT // 4, last - first) else -2
        labels.append(label)
    return np.array(labels)
