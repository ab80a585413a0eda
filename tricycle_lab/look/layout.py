"""Layered layout of a directed acyclic graph: all edges go down, with few crossings.

After Sugiyama, Tagawa and Toda 1981: the layer of a node is the length of the longest path to it; an edge over several
layers gets a dummy node in each; the nodes of a layer are sorted by the mean position of their neighbors; then the x
coordinates are moved towards those of the neighbors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

N_SWEEPS = 12
HORIZONTAL_GAP, VERTICAL_GAP = 26.0, 44.0  # between the nodes of a layer, and between layers, in pixels
DUMMY_WIDTH = 12.0  # of an edge that crosses a layer, in pixels


@dataclass
class Layout:
    """The positions of the nodes and edges of a graph, in pixels.

    Attributes:
        centers: (x, y) of each node.
        edges: the points of each edge, from the border of its first node to that of the second.
        width, height: the size of the drawing.
    """

    centers: list[tuple[float, float]]
    edges: list[list[tuple[float, float]]]
    width: float
    height: float


def layout_graph(sizes: Sequence[tuple[float, float]], edges: Sequence[tuple[int, int]]) -> Layout:
    """Compute node centers, edge paths and size of a layered drawing (Sugiyama) of an acyclic graph, else ValueError.

    Args:
        sizes: width and height of each node.
        edges: pairs of nodes; the first is drawn above the second.

    Raises:
        ValueError: a graph with a cycle.
    """
    layer_of = _assign_layers(len(sizes), edges)
    widths = [width for width, _ in sizes]
    paths: list[list[int]] = []  # the nodes of each edge, dummy nodes included
    for start, stop in edges:
        crossed_layers = range(layer_of[start] + 1, layer_of[stop])
        dummies = list(range(len(widths), len(widths) + len(crossed_layers)))
        layer_of += crossed_layers
        widths += [DUMMY_WIDTH] * len(dummies)
        paths.append([start, *dummies, stop])
    n_layers = max(layer_of, default=0) + 1
    layers = [[node for node in range(len(widths)) if layer_of[node] == i] for i in range(n_layers)]
    above: list[list[int]] = [[] for _ in widths]
    below: list[list[int]] = [[] for _ in widths]
    for path in paths:
        for upper, lower in pairwise(path):
            below[upper].append(lower)
            above[lower].append(upper)
    _order_layers(layers, above, below)
    xs = _assign_x(layers, widths, above, below)
    heights = [max((sizes[node][1] for node in layer if node < len(sizes)), default=0.0) for layer in layers]
    ys = [VERTICAL_GAP / 2 + sum(heights[:i]) + i * VERTICAL_GAP + heights[i] / 2 for i in range(n_layers)]
    centers = [(xs[node], ys[layer_of[node]]) for node in range(len(sizes))]
    lines = []
    for path in paths:
        first, last = path[0], path[-1]
        points = [(xs[first], centers[first][1] + sizes[first][1] / 2)]
        points += [(xs[node], ys[layer_of[node]]) for node in path[1:-1]]
        lines.append([*points, (xs[last], centers[last][1] - sizes[last][1] / 2)])
    width = max((x + w / 2 for x, w in zip(xs, widths)), default=0.0) + HORIZONTAL_GAP
    return Layout(centers, lines, width, sum(heights) + n_layers * VERTICAL_GAP)


def _assign_layers(n_nodes: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Return each node's layer, after those of all predecessors, inputs as late as can be; ValueError for cycles.

    A node without predecessors is in the layer above its first successor.
    """
    predecessors: list[list[int]] = [[] for _ in range(n_nodes)]
    successors: list[list[int]] = [[] for _ in range(n_nodes)]
    for start, stop in edges:
        predecessors[stop].append(start)
        successors[start].append(stop)
    layer = [0] * n_nodes
    try:
        for node in TopologicalSorter(dict(enumerate(predecessors))).static_order():
            layer[node] = max((layer[other] + 1 for other in predecessors[node]), default=0)
    except CycleError:
        raise ValueError("layout_graph: expected a graph without a cycle") from None
    for node in range(n_nodes):
        if not predecessors[node] and successors[node]:
            layer[node] = min(layer[successor] for successor in successors[node]) - 1
    return layer


def _order_layers(layers: list[list[int]], above: list[list[int]], below: list[list[int]]) -> None:
    """Sort each layer's nodes in place by the mean position of their neighbors; keep the order with fewest crossings.

    The sweeps alternate between the neighbors above and below.
    """
    best = [list(layer) for layer in layers]
    fewest = _count_crossings(layers, below)
    for sweep in range(N_SWEEPS):
        is_downward = sweep % 2 == 0
        neighbors = above if is_downward else below
        for i in range(1, len(layers)) if is_downward else range(len(layers) - 2, -1, -1):
            adjacent = {node: index for index, node in enumerate(layers[i - 1 if is_downward else i + 1])}
            means: dict[int, float] = {}
            for index, node in enumerate(layers[i]):
                indices = [adjacent[other] for other in neighbors[node] if other in adjacent]
                means[node] = sum(indices) / len(indices) if indices else index
            layers[i].sort(key=means.__getitem__)
        n_crossings = _count_crossings(layers, below)
        if n_crossings < fewest:
            fewest, best = n_crossings, [list(layer) for layer in layers]
    layers[:] = best


def _count_crossings(layers: list[list[int]], below: list[list[int]]) -> int:
    """Return the number of pairs of edges between adjacent layers that cross."""
    total = 0
    for layer, next_layer in pairwise(layers):
        index_of = {node: index for index, node in enumerate(next_layer)}
        ends = [index for node in layer for index in sorted(index_of[other] for other in below[node])]
        total += sum(later < end for i, end in enumerate(ends) for later in ends[i + 1 :])
    return total


def _assign_x(
    layers: list[list[int]], widths: Sequence[float], above: list[list[int]], below: list[list[int]]
) -> list[float]:
    """Return the x coordinate of the center of each node, close to the mean of its neighbors and without overlaps."""
    xs = [0.0] * len(widths)
    for layer in layers:
        _place_layer(layer, [0.0] * len(layer), widths, xs)
    for sweep in range(N_SWEEPS):
        for layer in layers if sweep % 2 == 0 else layers[::-1]:
            neighbor_xs = [[xs[other] for other in (above[node] + below[node])] for node in layer]
            targets = [sum(near) / len(near) if near else xs[node] for node, near in zip(layer, neighbor_xs)]
            _place_layer(layer, targets, widths, xs)
    left = min((x - width / 2 for x, width in zip(xs, widths)), default=0.0) - HORIZONTAL_GAP
    return [x - left for x in xs]


def _place_layer(layer: Sequence[int], targets: Sequence[float], widths: Sequence[float], xs: list[float]) -> None:
    """Set the x coordinates of the nodes of a layer as close as possible to targets, in order and without overlaps.

    Nodes that would overlap become one group at the mean of their targets. This is isotonic regression (Dwyer, Marriott
    and Stuckey 2006).
    """
    offsets = [0.0]
    for left, right in pairwise(layer):
        offsets.append(offsets[-1] + (widths[left] + widths[right]) / 2 + HORIZONTAL_GAP)
    groups: list[tuple[float, int]] = []  # the sum of targets minus offsets, and the number of nodes
    for target, offset in zip(targets, offsets):
        total, count = target - offset, 1
        while groups and groups[-1][0] / groups[-1][1] > total / count:
            group_total, group_count = groups.pop()
            total, count = total + group_total, count + group_count
        groups.append((total, count))
    starts = [total / count for total, count in groups for _ in range(count)]
    for node, start, offset in zip(layer, starts, offsets):
        xs[node] = start + offset
