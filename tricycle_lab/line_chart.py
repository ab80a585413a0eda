"""Line charts as SVG, written without any library."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

import numpy as np

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 800, 64, 784, 40, 400  # pixels: of the picture, and the edges of the axes
LEGEND_COLUMN, LEGEND_ROW = 360, 20
GREY = "#636363"
DASHES = {"-": "none", "--": "7 4", ":": "2 3", "-.": "7 3 2 3"}
MOST_POINTS = 1440  # of a line: two for each column of pixels
STAR = [(r * math.sin(k * math.pi / 5), -r * math.cos(k * math.pi / 5)) for k in range(10) for r in ((7, 3)[k % 2],)]


@dataclass(frozen=True)
class Curve:
    """A line of a chart.

    Attributes:
        x: (n,), or None for a horizontal line across the chart.
        y: (n,), or (1,) of a horizontal line.
        label: of the legend, which leaves out lines without one.
        stroke: "-", "--", ":" or "-.", as matplotlib calls them.
        marker: "o" or "*" at each point, or "" for none; points with "*" are not connected.
    """

    x: np.ndarray | None
    y: np.ndarray
    colour: str
    label: str = ""
    width: float = 1.5
    stroke: str = "-"
    marker: str = ""


class Scale(NamedTuple):
    """Values from `low` to `high`, drawn from pixel `start` to pixel `end`."""

    low: float
    high: float
    start: float
    end: float

    def pixels(self, values: np.ndarray) -> np.ndarray:
        return self.start + (values - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, at_most: int) -> list[tuple[float, str]]:
        """Return pixels and texts of round values: multiples of 1, 2 or 5 times a power of ten."""
        least = (self.high - self.low) / at_most
        power = math.floor(math.log10(least))
        step = next(factor * 10.0**power for factor in (1, 2, 5, 10) if factor * 10.0**power >= least)
        values = np.arange(math.ceil(self.low / step), math.floor(self.high / step) + 1) * step
        digits = max(0, -math.floor(math.log10(step)))
        return [(float(pixel), f"{value + 0.0:,.{digits}f}") for pixel, value in zip(self.pixels(values), values)]


def line_chart(
    curves: Sequence[Curve], y_limits: tuple[float, float] | None, title: str, xlabel: str, ylabel: str
) -> str:
    """Return an SVG of lines over a grid, with a legend below.

    Args:
        y_limits: what of y is shown; everything unless given, or where the two are equal.
    """
    xs = [x for curve in curves if curve.x is not None for x in curve.x]
    x_axis = Scale(*_widened(xs, 0.03), LEFT, RIGHT)
    if y_limits is None or not y_limits[0] < y_limits[1]:
        y_limits = _widened([y for curve in curves for y in curve.y], 0.05)
    y_axis = Scale(*y_limits, BOTTOM, TOP)
    labelled = [curve for curve in curves if curve.label]
    height = BOTTOM + 60 + LEGEND_ROW * math.ceil(len(labelled) / 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="system-ui, Helvetica, Arial, DejaVu Sans, sans-serif" font-size="12" fill="#262626">',
        f'<clipPath id="axes"><path d="M{LEFT} {TOP}H{RIGHT}V{BOTTOM}H{LEFT}z"/></clipPath>',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        *_axes(x_axis, y_axis),
        _text((LEFT + RIGHT) / 2, TOP - 16, title, "middle", 'font-size="15"'),
        _text((LEFT + RIGHT) / 2, BOTTOM + 36, xlabel, "middle"),
        _text(-(TOP + BOTTOM) / 2, 16, ylabel, "middle", 'transform="rotate(-90)"'),
        '<g clip-path="url(#axes)">',
        *(part for curve in curves for part in _drawn(curve, x_axis, y_axis)),
        "</g>",
    ]
    for i, curve in enumerate(labelled):
        x, y = LEFT + LEGEND_COLUMN * (i % 2), BOTTOM + 62 + LEGEND_ROW * (i // 2)
        ends = (np.array([x, x + 28]), np.array([y - 4, y - 4]))
        parts += _shape(*ends, curve, (np.array([x + 14]), np.array([y - 4])))
        parts.append(_text(x + 36, y, curve.label, "start"))
    return "\n".join([*parts, "</svg>\n"])


def _widened(values: Sequence[float], margin: float) -> tuple[float, float]:
    """Return limits around the finite values, with a fraction of their range left free on both sides."""
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = float(min(finite)), float(max(finite))
    free = margin * (high - low) or 0.5
    return low - free, high + free


def _axes(x_axis: Scale, y_axis: Scale) -> Iterator[str]:
    """Yield the frame, and a grid line with its number for each tick."""
    for x, text in x_axis.ticks(10):
        yield f'<path d="M{x:.1f} {TOP}V{BOTTOM}" stroke="#e0e0e0"/>'
        yield _text(x, BOTTOM + 18, text, "middle")
    for y, text in y_axis.ticks(8):
        yield f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="#e0e0e0"/>'
        yield _text(LEFT - 8, y + 4, text, "end")
    yield f'<path d="M{LEFT} {TOP}H{RIGHT}V{BOTTOM}H{LEFT}z" fill="none" stroke="{GREY}"/>'


def _drawn(curve: Curve, x_axis: Scale, y_axis: Scale) -> list[str]:
    if curve.x is None:
        y = y_axis.pixels(np.repeat(curve.y, 2))
        return _shape(np.array([LEFT, RIGHT]), y, curve, None)
    finite = np.isfinite(curve.y)
    x, y = x_axis.pixels(curve.x[finite]), y_axis.pixels(curve.y[finite])
    return _shape(*_thinned(x, y), curve, (x, y))


def _thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the highest and the lowest point of each of many parts: what can be seen of a long line."""
    if len(y) <= MOST_POINTS:
        return x, y
    parts = np.array_split(np.arange(len(y)), MOST_POINTS // 2)
    kept = np.unique([part[end(y[part])] for part in parts for end in (np.argmin, np.argmax)])
    return x[kept], y[kept]


def _shape(x: np.ndarray, y: np.ndarray, curve: Curve, marked: tuple[np.ndarray, np.ndarray] | None) -> list[str]:
    """Return a line through points, and markers at others."""
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y))
    style = f'stroke="{curve.colour}" stroke-width="{curve.width}" stroke-dasharray="{DASHES[curve.stroke]}"'
    shapes = [f'<polyline points="{points}" fill="none" {style}/>'] if curve.marker != "*" else []
    for a, b in zip(*marked) if marked and curve.marker else ():
        if curve.marker == "o":
            shapes.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{curve.colour}"/>')
        else:
            star = " ".join(f"{a + dx:.1f},{b + dy:.1f}" for dx, dy in STAR)
            shapes.append(f'<polygon points="{star}" fill="{curve.colour}"/>')
    return shapes


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'
