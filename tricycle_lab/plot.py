"""Plots of training runs, attention weights and experiments, and an interactive HTML page of attention weights.

The commands and the experiments use these functions. Files are written atomically. matplotlib is needed except for
`plot_losses` and `write_attention_page`.
"""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tricycle.devices import Array, to_cpu
from tricycle.system.files import atomic_write
from tricycle_lab.line_chart import Curve, line_chart
from tricycle_lab.probe import excess_kurtosis

# A palette for color-blind readers (Okabe and Ito 2008). Further lines have other line styles.
COLOURS = "#0072b2 #d55e00 #009e73 #cc79a7 #e69f00 #56b4e9 #000000".split()
LINESTYLES = ("-", "--", ":", "-.")
MAX_GRID_LABELS = 64  # of the columns of a grid; more would overlap
ATTENTION_PAGE = Path(__file__).with_name("attention_page.html")


def require_matplotlib(feature: str) -> None:
    """Raise ModuleNotFoundError if matplotlib is not installed; the message names the feature and the extra."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError(f'{feature} needs matplotlib: pip install "tricycle-gpt[plot]"')


def new_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure, sizes in inches, without a display; ModuleNotFoundError without matplotlib."""
    require_matplotlib("a plot")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def new_panels(n: int, n_columns: int, size: tuple[float, float], margin: tuple[float, float], **options: Any) -> Any:
    """Return a matplotlib figure and a list of `n` axes in rows of at most `n_columns`; unused axes are hidden.

    Args:
        size, margin: width and height of a panel, and of the figure without its panels, in inches.
        options: of `Figure.subplots`.
    """
    n_columns = min(n_columns, n)
    n_rows = math.ceil(n / n_columns)
    figure = new_figure(size[0] * n_columns + margin[0], size[1] * n_rows + margin[1])
    panels = list(figure.subplots(n_rows, n_columns, squeeze=False, **options).flat)
    for axes in panels[n:]:
        axes.set_visible(False)
    return figure, panels[:n]


def plot_losses(
    metrics: Sequence[Mapping[str, Any]],
    path: Path,
    bits_per_nat: float,
    references: Mapping[str, float],
    title: str,
    unit: str = "bits per byte",
) -> Path:
    """Plot training and held-out loss against the step as a PNG, without matplotlib as an SVG; return its path.

    Args:
        metrics: the lines of metrics.jsonl.
        path: of the PNG; an SVG has the same name with the suffix .svg.
        bits_per_nat: bits per byte for one nat per token, or the factor to another unit.
        references: bits per byte of other compressors, drawn as horizontal lines.
        title: of the plot.
        unit: the label of the y axis.
    """
    curves, limits = _loss_curves(metrics, bits_per_nat, references)
    if importlib.util.find_spec("matplotlib") is None:
        path = path.with_suffix(".svg")
        with atomic_write(path, text=True) as file:
            file.write(line_chart(curves, limits, title, "step", unit))
        return path
    figure = new_figure(8, 4.8)
    axes = figure.subplots()
    for curve in curves:
        style = {"color": curve.colour, "linewidth": curve.width, "label": curve.label or None}
        if curve.x is None:
            axes.axhline(curve.y[0], linestyle=curve.linestyle, **style)
        else:
            size = 11 if curve.marker == "*" else 4
            linestyle = "none" if curve.marker == "*" else curve.linestyle
            axes.plot(curve.x, curve.y, linestyle=linestyle, marker=curve.marker, markersize=size, **style)
    if limits:
        axes.set_ylim(*limits)
    axes.set(xlabel="step", ylabel=unit, title=title)
    axes.grid(alpha=0.25)
    axes.legend(edgecolor="none", framealpha=0.9)  # opaque, as the lines of references cross it
    save_figure(figure, path)
    return path


def _loss_curves(
    metrics: Sequence[Mapping[str, Any]], bits_per_nat: float, references: Mapping[str, float]
) -> tuple[list[Curve], tuple[float, float] | None]:
    """Return the curves of `plot_losses` and the limits of the y axis, None without values."""
    steps, bits = _series(metrics, "step", "loss", bits_per_nat)
    held_out_steps, held_out = _series(metrics, "step", "held_out_loss", bits_per_nat)
    # At the end of training the best checkpoint is evaluated on all held-out text; earlier values are estimates.
    best_steps, final = (values[-1:] for values in _series(metrics, "best_step", "final_loss", bits_per_nat))
    curves = []
    if bits.size:
        width = max(1, len(bits) // 50)
        smooth = np.convolve(bits, np.ones(width) / width, mode="valid")
        curves.append(Curve(steps, bits, "#9ecae1", width=0.6))
        marker = "o" if smooth.size == 1 else ""  # a line through one point is invisible
        label = f"training loss (mean of {width} steps)"
        curves.append(Curve(steps[width - 1 :], smooth, "#3182bd", label, marker=marker))
    if held_out.size:
        name = "held-out loss (estimate)" if final.size else "held-out loss"
        label = f"{name}, last: {held_out[-1]:.2f}"
        curves.append(Curve(held_out_steps, held_out, "#e6550d", label, marker="o"))
    if final.size:
        curves.append(Curve(best_steps, final, "#a63603", f"final held-out loss: {final[0]:.2f}", marker="*"))
    for (name, value), linestyle in zip(references.items(), (":", "--", "-.")):
        curves.append(Curve(None, np.array([value]), "#636363", f"{name}: {value:.2f}", 1, linestyle))
    # The losses of the first steps, far above all others, may be outside the limits.
    typical = np.quantile(bits[len(bits) // 20 :], (0, 0.995)) if bits.size else ()
    visible = list(filter(math.isfinite, [*references.values(), *held_out, *final, *typical]))
    return curves, (min(visible) * 0.92, max(visible) * 1.05) if visible else None


def _series(metrics: Sequence[Mapping[str, Any]], x: str, y: str, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Return arrays of two fields, x and y times `scale`, of the lines that contain both."""
    pairs = [(line[x], line[y] * scale) for line in metrics if x in line and y in line]
    steps, values = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
    return steps, values


def save_figure(figure: Any, path: Path, dpi: int = 130) -> None:
    """Write a matplotlib figure as a PNG file atomically; "$" in its texts no longer starts math text."""
    _disable_math_text(figure)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=dpi)
    with atomic_write(path) as file:
        file.write(png.getvalue())


def _disable_math_text(figure: Any) -> None:
    """Disable math text in all texts except tick labels, so that names may contain $."""
    from matplotlib.text import Text

    axes = [axis for panel in figure.axes for axis in (panel.xaxis, panel.yaxis)]
    numbers = {id(text) for axis in axes for text in (*axis.get_ticklabels(which="both"), axis.get_offset_text())}
    for text in figure.findobj(Text):
        if id(text) not in numbers:
            text.set_parse_math(False)


def plot_attention(
    weights: Mapping[str, Array], path: Path, title: str = "", tokens: Sequence[str] | None = None
) -> None:
    """Plot attention weights, (H, T, S) by layer, as a PNG with a heat map per head; ValueError for another shape.

    The color scale is the same for all maps, and follows the square root of the weights to make small ones visible.

    Args:
        weights: by the layer's name, (H, T, S) of one text.
        tokens: the S token texts, as labels of the axes; for short texts.

    Raises:
        ValueError: no layer, or a wrong number of axes or tokens.
    """
    arrays = _check_weights("plot_attention", weights)
    n_heads = max(map(len, arrays.values()))
    max_weight = max(float(array.max()) for array in arrays.values())
    figure = new_figure(1.8 * n_heads + 1.6, 1.8 * len(arrays) + 1.1)
    from matplotlib.colors import PowerNorm

    grid = figure.subplots(len(arrays), n_heads, squeeze=False)
    for i, (row, (name, array)) in enumerate(zip(grid, arrays.items())):
        if tokens is not None and len(tokens) != array.shape[2]:
            raise ValueError(f"plot_attention: expected {array.shape[2]} tokens for {name}, got {len(tokens)}")
        for head, axes in enumerate(row):
            axes.set_visible(head < len(array))
            if head < len(array):
                image = axes.imshow(
                    array[head], norm=PowerNorm(0.5, 0, max_weight or 1), cmap="gist_heat_r", aspect="auto"
                )
            axes.tick_params(labelsize=7, labelbottom=i == len(arrays) - 1, labelleft=head == 0)
            if tokens is not None:
                axes.set_xticks(range(len(tokens)), map(_token_label, tokens), rotation=90, family="monospace")
                queries = tokens[len(tokens) - array.shape[1] :]  # with a KV cache the queries are the last tokens
                axes.set_yticks(range(len(queries)), map(_token_label, queries), family="monospace")
            if i == 0:
                axes.set_title(f"head {head}", fontsize=9)
        row[0].set_ylabel(name, fontsize=8)
    figure.supxlabel("key", fontsize=9)
    figure.supylabel("query", fontsize=9)
    figure.suptitle(title, fontsize=11)
    figure.colorbar(image, ax=grid, label="attention weight", shrink=0.8 if len(arrays) > 1 else 1, aspect=30)
    save_figure(figure, path)


def plot_grids(
    grids: Mapping[str, np.ndarray], path: Path, labels: Mapping[str, Sequence[str]] | None = None, title: str = ""
) -> None:
    """Plot values of layers as a PNG with a heat map per grid, (L, N) or (L, H, N); ValueError for another shape.

    Positive values are red, negative ones blue. Each map has its own scale, symmetric around 0.

    Args:
        grids: by title, (layers, columns), or (layers, heads, columns) with a row for each head.
        labels: by the title of a grid, the texts of its columns, such as tokens; by default their indices.
    """
    if not grids:
        raise ValueError("plot_grids: expected at least one grid")
    figure, panels = new_panels(len(grids), 2, (5.2, 4.2), (0.4, 0.5))
    for axes, (name, grid) in zip(panels, grids.items()):
        texts = (labels or {}).get(name)
        if grid.ndim not in (2, 3) or not grid.size or (texts is not None and len(texts) != grid.shape[-1]):
            expected = "(layers, columns)" if texts is None else f"(layers, {len(texts)})"
            raise ValueError(f"plot_grids: expected {name} to be of shape {expected}, got {grid.shape}")
        limit = float(np.nanmax(np.abs(grid), initial=0)) or 1
        rows = grid.reshape(-1, grid.shape[-1])
        image = axes.imshow(
            rows, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto", origin="lower", interpolation="nearest"
        )
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_major_locator().set_params(integer=True, min_n_ticks=1)  # of layers and columns
        if texts is not None and len(texts) <= MAX_GRID_LABELS:
            axes.set_xticks(range(len(texts)), map(_token_label, texts), rotation=90, family="monospace", fontsize=7)
        if grid.ndim == 3:
            step = math.ceil(len(grid) / 16)
            axes.set_yticks(np.arange(0, len(grid), step) * grid.shape[1] - 0.5, range(0, len(grid), step))
        axes.set_title(name, fontsize=10)
        axes.set_ylabel("layer" if grid.ndim == 2 else "layer, with a row for each head")
        figure.colorbar(image, ax=axes)
    figure.suptitle(title, fontsize=11)
    save_figure(figure, path)


def plot_distributions(
    arrays: Mapping[str, Array], path: Path, title: str = "", xlabel: str = "value", n_columns: int = 4
) -> None:
    """Plot each array's histogram (log counts) and excess kurtosis, of finite values, as a PNG; ValueError if none.

    Args:
        arrays: by name, of any shape; values that are not finite (scores of masked keys) are ignored.
    """
    if not arrays:
        raise ValueError("plot_distributions: expected at least one array")
    figure, panels = new_panels(len(arrays), n_columns, (2.6, 2.1), (0.6, 0.9))
    for axes, (name, array) in zip(panels, arrays.items()):
        values = to_cpu(array).astype(np.float64).ravel()
        values = values[np.isfinite(values)]
        if not values.size:
            raise ValueError(f"plot_distributions: expected a finite element in {name}, got shape {array.shape}")
        axes.hist(values, bins=60, log=True, color=COLOURS[0])
        axes.set_title(f"{name}\nexcess kurtosis {excess_kurtosis(values):.3g}", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.25)
    figure.supxlabel(xlabel, fontsize=9)
    figure.supylabel("count", fontsize=9)
    figure.suptitle(title, fontsize=11)
    save_figure(figure, path)


def plot_curves(
    curves: Mapping[str, Mapping[str, tuple[Any, Any]]],
    path: Path,
    xlabel: str,
    ylabel: str,
    title: str = "",
    log: str = "",
    share_y: bool = True,
    n_columns: int = 3,
) -> None:
    """Plot curves[panel][label], (x, y), or mean and range of y (runs, points), as a PNG; ValueError if invalid.

    A label has the same color in all panels.

    Args:
        curves: by the panel's title and the line's label, (x, ys): x is (n_points,); ys is (n_points,), or
            (n_runs, n_points), of which the mean is drawn with a band from the minimum to the maximum.
        log: the axes with logarithmic scales: "x", "y" or "xy".
        share_y: use the same y axis in all panels.
        n_columns: the maximum number of panels in a row.

    Raises:
        ValueError: no panel or line, or x and ys of different lengths.
    """
    labels = list(dict.fromkeys(label for lines in curves.values() for label in lines))
    if not labels:
        raise ValueError("plot_curves: expected at least one line")
    n_columns = min(n_columns, len(curves))
    margin = (0.6 if n_columns > 1 else 2.3, 0.6 + 0.25 * math.ceil(len(labels) / 4))
    figure, panels = new_panels(len(curves), n_columns, (3.7, 3), margin, sharey=share_y)
    drawn: dict[str, Any] = {}
    for axes, (panel, lines) in zip(panels, curves.items()):
        for label, (x, ys) in lines.items():
            drawn[label] = _draw_line(axes, label, x, ys, labels.index(label))
        if "x" in log:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:.7g}")
        elif all(np.asarray(x).dtype.kind in "iu" for x, _ in lines.values()):
            axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)  # of layers and steps
        if "y" in log:
            axes.set_yscale("log")
        axes.set_title(panel, fontsize=10)
        axes.set_xlabel(xlabel)
        axes.grid(alpha=0.25)
    for axes in panels[::n_columns]:
        axes.set_ylabel(ylabel)
    figure.suptitle(title, fontsize=11)
    repeated = any(np.ndim(ys) > 1 and len(ys) > 1 for lines in curves.values() for _, ys in lines.values())
    figure.legend(
        [drawn[label] for label in labels],
        labels,
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=9,
        title="mean and range over runs" if repeated else None,
        title_fontsize=8,
    )
    save_figure(figure, path)


def _draw_line(axes: Any, label: str, x: Any, ys: Any, index: int) -> Any:
    """Draw a line in its index's color and style, several runs with a band; return it; ValueError if malformed."""
    x = np.asarray(x)
    ys = np.atleast_2d(ys)
    if x.ndim != 1 or ys.shape[1:] != x.shape:
        expected = f"x (n_points,) and ys (n_seeds, n_points) of {label}"
        raise ValueError(f"plot_curves: expected {expected}, got {x.shape} and {ys.shape}")
    colour = COLOURS[index % len(COLOURS)]
    linestyle = LINESTYLES[index // len(COLOURS) % len(LINESTYLES)]
    marker = "o" if len(x) <= 20 else None
    (line,) = axes.plot(x, ys.mean(axis=0), linestyle, color=colour, marker=marker, markersize=4)
    if len(ys) > 1:
        axes.fill_between(x, ys.min(axis=0), ys.max(axis=0), color=colour, alpha=0.2, linewidth=0)
    return line


# -------------------------------------------------------------------- the attention page
def write_attention_page(
    path: Path, weights: Mapping[str, Mapping[str, Array]], tokens: Sequence[str], title: str = "Attention"
) -> None:
    """Write an interactive HTML page of weights[variant][layer], (H, T, T), clipped to 0..1; ValueError if malformed.

    Weights are stored as bytes, round(255 sqrt(weight)), with an error of at most 1/255, and less for small weights.
    Weights above 1 or below 0, which learned scales can produce, are clipped.

    Args:
        weights: by softmax variant ("softmax", ...) and the layer's name, (H, T, T).
        tokens: T token texts, which may contain any characters.

    Raises:
        ValueError: no variant or layer, or shapes that do not match the tokens.
    """
    if not weights:
        raise ValueError("write_attention_page: expected at least one variant")
    variants = []
    for variant, layers in weights.items():
        packed = []
        for name, array in _check_weights("write_attention_page", layers).items():
            if array.shape[1:] != (len(tokens), len(tokens)):
                expected = f"(heads, {len(tokens)}, {len(tokens)})"
                raise ValueError(f"write_attention_page: expected {name} to be of shape {expected}, got {array.shape}")
            codes = np.rint(255 * np.sqrt(array.clip(0, 1))).astype(np.uint8)
            packed.append({"name": name, "heads": len(array), "weights": base64.b64encode(codes.tobytes()).decode()})
        variants.append({"name": variant, "layers": packed})
    data = json.dumps({"title": title, "tokens": list(tokens), "variants": variants})
    template = ATTENTION_PAGE.read_text(encoding="utf-8")
    with atomic_write(path, text=True) as file:
        file.write(template.replace("__DATA__", data.replace("<", "\\u003c")))  # a token cannot end the script element


def _check_weights(caller: str, weights: Mapping[str, Array]) -> dict[str, np.ndarray]:
    """Return attention weights in host memory; ValueError if none, not finite or not (heads, queries, keys).

    Raises:
        ValueError: no layer, or an array that is not finite or not (heads, queries, keys).
    """
    if not weights:
        raise ValueError(f"{caller}: expected at least one layer")
    arrays = {name: to_cpu(array) for name, array in weights.items()}
    for name, array in arrays.items():
        if array.ndim != 3 or array.size == 0 or not np.isfinite(array).all():
            expected = "finite, of shape (heads, queries, keys)"
            raise ValueError(f"{caller}: expected {name} to be {expected}, got shape {array.shape}")
    return arrays


def _token_label(token: str) -> str:
    """Return a token as a short label, with visible characters for spaces and line breaks."""
    text = token.replace(" ", "·").replace("\n", "↵").replace("\t", "→").replace("$", r"\$")
    return text if len(text) <= 10 else f"{text[:9]}…"
