"""Places for the nodes of a graph without circles: in layers, every edge downwards, few crossings.

After Sugiyama, Tagawa and Toda 1981: layers by the longest way; edges over several layers get a node of their own in
each; neighbours are ordered by the means of those they hang on; and each node is moved towards these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

SWEEPS = 12
BETWEEN, BELOW = 26.0, 44.0  # pixels between nodes side by side, and between layers
THREAD = 12.0  # width of an edge that passes a layer


@dataclass
class Placed:
    """The centres (x, y) of nodes, the points of each edge from border to border, and the sizes of the whole."""

    centres: list[tuple[float, float]]
    edges: list[list[tuple[float, float]]]
    width: float
    height: float


def place(sizes: Sequence[tuple[float, float]], edges: Sequence[tuple[int, int]]) -> Placed:
    """Give every node a place.

    Args:
        sizes: width and height of each node. edges: pairs of nodes, from the one above to the one below.

    Raises:
        ValueError: the edges go in a circle.
    """
    layer_of = _layers(len(sizes), edges)
    widths = [width for width, _ in sizes]
    chains: list[list[int]] = []  # the nodes that each edge goes through, its own among them
    for start, stop in edges:
        passed = range(layer_of[start] + 1, layer_of[stop])
        new = list(range(len(widths), len(widths) + len(passed)))
        layer_of += passed
        widths += [THREAD] * len(new)
        chains.append([start, *new, stop])
    rows = [[node for node in range(len(widths)) if layer_of[node] == i] for i in range(max(layer_of, default=0) + 1)]
    above: list[list[int]] = [[] for _ in widths]
    below: list[list[int]] = [[] for _ in widths]
    for chain in chains:
        for one, other in pairwise(chain):
            below[one].append(other)
            above[other].append(one)
    _order(rows, above, below)
    xs = _across(rows, widths, above, below)
    heights = [max((sizes[node][1] for node in row if node < len(sizes)), default=0.0) for row in rows]
    ys = [BELOW / 2 + sum(heights[:i]) + i * BELOW + heights[i] / 2 for i in range(len(rows))]
    centres = [(xs[node], ys[layer_of[node]]) for node in range(len(sizes))]
    lines = []
    for chain in chains:
        first, last = chain[0], chain[-1]
        points = [(xs[first], centres[first][1] + sizes[first][1] / 2)]
        points += [(xs[node], ys[layer_of[node]]) for node in chain[1:-1]]
        lines.append([*points, (xs[last], centres[last][1] - sizes[last][1] / 2)])
    width = max((x + w / 2 for x, w in zip(xs, widths)), default=0.0) + BETWEEN
    return Placed(centres, lines, width, sum(heights) + len(rows) * BELOW)


def _layers(n_nodes: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """How far down each node stands: below all that lead to it, and nodes that nothing leads to just above the first
    that they lead to."""
    into: list[list[int]] = [[] for _ in range(n_nodes)]
    out: list[list[int]] = [[] for _ in range(n_nodes)]
    for start, stop in edges:
        into[stop].append(start)
        out[start].append(stop)
    waiting = [len(sources) for sources in into]
    ready = [node for node in range(n_nodes) if not waiting[node]]
    layer = [0] * n_nodes
    for node in ready:  # grows while it is walked over
        for other in out[node]:
            layer[other] = max(layer[other], layer[node] + 1)
            waiting[other] -= 1
            if not waiting[other]:
                ready.append(other)
    if len(ready) < n_nodes:
        raise ValueError("place: expected edges without a circle")
    for node in range(n_nodes):
        if not into[node] and out[node]:
            layer[node] = min(layer[other] for other in out[node]) - 1
    return layer


def _order(rows: list[list[int]], above: list[list[int]], below: list[list[int]]) -> None:
    """Sort each layer by the mean places of the neighbours above, then below, and again; keep what crosses least."""
    best = [list(row) for row in rows]
    fewest = _crossings(rows, below)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        neighbours = above if down else below
        for i in range(1, len(rows)) if down else range(len(rows) - 2, -1, -1):
            beside = {node: place for place, node in enumerate(rows[i - 1 if down else i + 1])}
            now = {node: place for place, node in enumerate(rows[i])}

            def mean(node: int, beside: dict[int, int] = beside, now: dict[int, int] = now) -> float:
                places = [beside[other] for other in neighbours[node] if other in beside]  # noqa: B023 (used at once)
                return sum(places) / len(places) if places else now[node]

            rows[i].sort(key=mean)
        crossings = _crossings(rows, below)
        if crossings < fewest:
            fewest, best = crossings, [list(row) for row in rows]
    rows[:] = best


def _crossings(rows: list[list[int]], below: list[list[int]]) -> int:
    """How many pairs of edges between neighbouring layers cross."""
    total = 0
    for row, following in pairwise(rows):
        places = {node: place for place, node in enumerate(following)}
        ends = [place for node in row for place in sorted(places[other] for other in below[node])]
        total += sum(later < end for i, end in enumerate(ends) for later in ends[i + 1 :])
    return total


def _across(
    rows: list[list[int]], widths: Sequence[float], above: list[list[int]], below: list[list[int]]
) -> list[float]:
    """The middle of each node: as near to its neighbours' as those beside it let it be."""
    xs = [0.0] * len(widths)
    for row in rows:
        _pack(row, [0.0] * len(row), widths, xs)
    for sweep in range(SWEEPS):
        for row in rows if sweep % 2 == 0 else rows[::-1]:
            near = [[xs[other] for other in (above[node] + below[node])] for node in row]
            wanted = [sum(places) / len(places) if places else xs[node] for node, places in zip(row, near)]
            _pack(row, wanted, widths, xs)
    left = min((x - width / 2 for x, width in zip(xs, widths)), default=0.0) - BETWEEN
    return [x - left for x in xs]


def _pack(row: Sequence[int], wanted: Sequence[float], widths: Sequence[float], xs: list[float]) -> None:
    """Put a layer's nodes where they want to be, in order and apart.

    Nodes that would overlap become one group, which stands at the mean of what its members want (as in the isotonic
    regression that this is: Dwyer, Marriott and Stuckey 2006).
    """
    offsets = [0.0]
    for one, other in pairwise(row):
        offsets.append(offsets[-1] + (widths[one] + widths[other]) / 2 + BETWEEN)
    groups: list[tuple[float, int]] = []  # the sum of what members want, less their offsets, and their number
    for x, offset in zip(wanted, offsets):
        total, count = x - offset, 1
        while groups and groups[-1][0] / groups[-1][1] > total / count:
            earlier, members = groups.pop()
            total, count = total + earlier, count + members
        groups.append((total, count))
    starts = [total / count for total, count in groups for _ in range(count)]
    for node, start, offset in zip(row, starts, offsets):
        xs[node] = start + offset
