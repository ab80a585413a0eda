"""Draw line charts as SVG without other libraries; `plot.py` uses it when matplotlib is not installed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

import numpy as np

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 800, 64, 784, 40, 400  # the width of the image and the edges of the axes, in pixels
LEGEND_COLUMN, LEGEND_ROW = 360, 20
GREY = "#636363"
DASH_ARRAYS = {"-": "none", "--": "7 4", ":": "2 3", "-.": "7 3 2 3"}
MAX_POINTS = 1440  # of a line: two for each column of pixels
STAR = [(r * math.sin(k * math.pi / 5), -r * math.cos(k * math.pi / 5)) for k in range(10) for r in ((7, 3)[k % 2],)]


@dataclass(frozen=True)
class Curve:
    """A line of a chart.

    Attributes:
        x: (n,), or None for a horizontal line across the chart.
        y: (n,), or (1,) for a horizontal line.
        colour: as in CSS.
        label: the entry in the legend; none if empty.
        width: of the line, in pixels.
        linestyle: "-", "--", ":" or "-.", as in matplotlib.
        marker: "o" or "*" at each point, or "" for none; points with "*" are not connected.
    """

    x: np.ndarray | None
    y: np.ndarray
    colour: str
    label: str = ""
    width: float = 1.5
    linestyle: str = "-"
    marker: str = ""


class Scale(NamedTuple):
    """A linear scale that maps values from `low` to `high` to pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def pixels(self, values: np.ndarray) -> np.ndarray:
        """Map values linearly to pixels, in the same shape: `low` to `start`, `high` to `end`."""
        return self.start + (values - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, max_ticks: int) -> list[tuple[float, str]]:
        """Return (pixel, label) of about `max_ticks` ticks, at multiples of 1, 2 or 5 times a power of ten."""
        min_step = (self.high - self.low) / max_ticks
        power = math.floor(math.log10(min_step))
        step = next(factor * 10.0**power for factor in (1, 2, 5, 10) if factor * 10.0**power >= min_step)
        values = np.arange(math.ceil(self.low / step), math.floor(self.high / step) + 1) * step
        digits = max(0, -math.floor(math.log10(step)))
        return [(float(pixel), f"{value + 0.0:,.{digits}f}") for pixel, value in zip(self.pixels(values), values)]


def line_chart(
    curves: Sequence[Curve], y_limits: tuple[float, float] | None, title: str, xlabel: str, ylabel: str
) -> str:
    """Return SVG text of a line chart with a grid and a legend below; y_limits None or empty: the range of the data.

    Args:
        y_limits: the range of the y axis; default, and if both limits are equal: the range of the data.
    """
    xs = [x for curve in curves if curve.x is not None for x in curve.x]
    x_axis = Scale(*_padded_limits(xs, 0.03), LEFT, RIGHT)
    if y_limits is None or not y_limits[0] < y_limits[1]:
        y_limits = _padded_limits([y for curve in curves for y in curve.y], 0.05)
    y_axis = Scale(*y_limits, BOTTOM, TOP)
    labeled = [curve for curve in curves if curve.label]
    height = BOTTOM + 60 + LEGEND_ROW * math.ceil(len(labeled) / 2)
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
        *(part for curve in curves for part in _curve_shapes(curve, x_axis, y_axis)),
        "</g>",
    ]
    for i, curve in enumerate(labeled):
        x, y = LEFT + LEGEND_COLUMN * (i % 2), BOTTOM + 62 + LEGEND_ROW * (i // 2)
        ends = (np.array([x, x + 28]), np.array([y - 4, y - 4]))
        parts += _shape(*ends, curve, (np.array([x + 14]), np.array([y - 4])))
        parts.append(_text(x + 36, y, curve.label, "start"))
    return "\n".join([*parts, "</svg>\n"])


def _padded_limits(values: Sequence[float], margin: float) -> tuple[float, float]:
    """Return limits around the finite values with a margin on both sides, a fraction of their range."""
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = float(min(finite)), float(max(finite))
    padding = margin * (high - low) or 0.5
    return low - padding, high + padding


def _axes(x_axis: Scale, y_axis: Scale) -> Iterator[str]:
    """Yield the frame, and a grid line with its label for each tick."""
    for x, text in x_axis.ticks(10):
        yield f'<path d="M{x:.1f} {TOP}V{BOTTOM}" stroke="#e0e0e0"/>'
        yield _text(x, BOTTOM + 18, text, "middle")
    for y, text in y_axis.ticks(8):
        yield f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="#e0e0e0"/>'
        yield _text(LEFT - 8, y + 4, text, "end")
    yield f'<path d="M{LEFT} {TOP}H{RIGHT}V{BOTTOM}H{LEFT}z" fill="none" stroke="{GREY}"/>'


def _curve_shapes(curve: Curve, x_axis: Scale, y_axis: Scale) -> list[str]:
    """Return the SVG elements of a curve's finite points; without x, of a horizontal line."""
    if curve.x is None:
        y = y_axis.pixels(np.repeat(curve.y, 2))
        return _shape(np.array([LEFT, RIGHT]), y, curve, None)
    finite = np.isfinite(curve.y)
    x, y = x_axis.pixels(curve.x[finite]), y_axis.pixels(curve.y[finite])
    return _shape(*_decimated(x, y), curve, (x, y))


def _decimated(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return x, y; of more than MAX_POINTS only the highest and lowest points of MAX_POINTS / 2 sections."""
    if len(y) <= MAX_POINTS:
        return x, y
    sections = np.array_split(np.arange(len(y)), MAX_POINTS // 2)
    kept = np.unique([section[extreme(y[section])] for section in sections for extreme in (np.argmin, np.argmax)])
    return x[kept], y[kept]


def _shape(
    x: np.ndarray, y: np.ndarray, curve: Curve, marker_points: tuple[np.ndarray, np.ndarray] | None
) -> list[str]:
    """Return the SVG elements of a line through points, and of markers at other points."""
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y))
    style = f'stroke="{curve.colour}" stroke-width="{curve.width}" stroke-dasharray="{DASH_ARRAYS[curve.linestyle]}"'
    shapes = [f'<polyline points="{points}" fill="none" {style}/>'] if curve.marker != "*" else []
    for a, b in zip(*marker_points) if marker_points and curve.marker else ():
        if curve.marker == "o":
            shapes.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{curve.colour}"/>')
        else:
            star = " ".join(f"{a + dx:.1f},{b + dy:.1f}" for dx, dy in STAR)
            shapes.append(f'<polygon points="{star}" fill="{curve.colour}"/>')
    return shapes


def _text(x: float, y: float, text: str, anchor: str, attributes: str = "") -> str:
    """Return an SVG text element, escaped; `attributes` are inserted as they are."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {attributes}>{escape(text)}</text>'
