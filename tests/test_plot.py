"""Plots contain the values that they were given, and the attention page the attention weights."""

import base64
import json
import math
import re
import shutil
import subprocess
import sys
from functools import partial
from html.parser import HTMLParser
from xml.etree import ElementTree

import fake_device
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from tables import bad_input

from tricycle import devices
from tricycle_lab.plot import (
    ATTENTION_PAGE,
    plot_attention,
    plot_curves,
    plot_distributions,
    plot_grids,
    plot_losses,
    write_attention_page,
)
from tricycle_lab.probe import excess_kurtosis

BOTH = [{"step": step, "loss": 5 / step, "learning_rate": 1e-3} for step in range(1, 201)] + [
    {"step": 100, "held_out_loss": 1.5, "bits_per_byte": 1.0},
    {"step": 200, "held_out_loss": 1.0, "bits_per_byte": 0.7},
    {"step": 200, "final_loss": 1.0},
]


@pytest.fixture
def drawn(monkeypatch) -> list:
    """The axes of every figure that is drawn."""
    found, subplots = [], Figure.subplots

    def draw(self, *args, **kwargs):
        axes = subplots(self, *args, **kwargs)
        found.extend(np.ravel(axes))
        return axes

    monkeypatch.setattr(Figure, "subplots", draw)
    return found


def check_png(path) -> None:
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    height, width, _ = imread(path).shape
    assert height > 300 < width
    assert [found.name for found in path.parent.iterdir()] == [path.name]


LOSSES = {
    "both": BOTH,
    "one step": BOTH[:1],
    "training only": BOTH[:200],
    "held out only": BOTH[200:],
    "nothing": [],
    "constant": [{"step": 3, "loss": 2.0}] * 2,
}
REFERENCES = {"gzip -9": 2.0, "bz2 -9": 1.5, "xz -9": 1.4}


@pytest.mark.nightly_except(3)
@pytest.mark.parametrize("metrics", LOSSES.values(), ids=LOSSES)
def test_png_is_a_valid_image(tmp_path, metrics):
    """Names with characters of math text are no exception."""
    path = tmp_path / "loss.png"
    assert plot_losses(metrics, path, 0.5, REFERENCES | {"a $x_{$ b": 2.0}, "a $x_{$ b") == path
    check_png(path)


# -------------------------------------------------------------------- without matplotlib
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def no_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def losses_as_svg(folder, metrics, *rest, **more) -> ElementTree.Element:
    path = plot_losses(metrics, folder / "loss.png", 0.5, *rest, **more)
    assert [found.name for found in folder.iterdir()] == [path.name] == ["loss.svg"]
    assert not re.search('="[^"]*nan', path.read_text(encoding="utf-8"))
    return ElementTree.parse(path).getroot()


def points_of(svg: ElementTree.Element) -> list[np.ndarray]:
    lines = [line.get("points") for line in svg.iter(f"{SVG}polyline")]
    return [np.array([point.split(",") for point in line.split()], dtype=float).reshape(-1, 2) for line in lines]


@pytest.mark.parametrize("references", [{}, REFERENCES], ids=["alone", "with references"])
@pytest.mark.parametrize("metrics", LOSSES.values(), ids=LOSSES)
def test_without_matplotlib_the_losses_are_an_svg(tmp_path, no_matplotlib, metrics, references):
    svg = losses_as_svg(tmp_path, metrics, references, "a < title & $x_{", unit="nats")
    texts = [text.text for text in svg.iter(f"{SVG}text")]
    named = {f"{name}: {bits:.2f}" for name, bits in references.items()}
    assert {"a < title & $x_{", "step", "nats"} | named <= {*texts}
    assert sum(bool(re.fullmatch(r"-?[\d,.]+", text)) for text in texts) >= 6  # numbers of both axes
    assert len(points_of(svg)) >= len(references)


def test_an_svg_contains_the_values(tmp_path, no_matplotlib):
    metrics = [*BOTH, {"step": 200, "final_loss": 0.8, "best_step": 100}, {"step": 150, "held_out_loss": math.nan}]
    svg = losses_as_svg(tmp_path, metrics, {"gzip -9": 2.0}, "a title")
    texts = {text.text: float(text.get("y")) for text in svg.iter(f"{SVG}text")}
    assert "final held-out loss: 0.40" in texts
    assert any(text.startswith("held-out loss (estimate)") for text in texts)
    y_of = np.poly1d(np.polyfit([0.5, 2.0], [texts["0.5"] - 4, texts["2.0"] - 4], 1))
    raw, _, held_out, gzip, *legend = points_of(svg)
    np.testing.assert_allclose(raw[:, 1], y_of(2.5 / np.arange(1, 201)), atol=0.2)
    np.testing.assert_allclose(held_out[:, 1], y_of([0.75, 0.5]), atol=0.2)
    np.testing.assert_allclose(held_out[:, 0], raw[[99, 199], 0], atol=0.2)
    np.testing.assert_allclose(gzip[:, 1], y_of(2.0), atol=0.2)
    assert len(legend) == 3 and len([*svg.iter(f"{SVG}polygon")]) == 2  # the star, and the one in the legend


def test_one_training_loss_is_a_point(tmp_path, no_matplotlib):
    svg = losses_as_svg(tmp_path, [{"step": 1, "loss": 3.0}], {}, "a title")
    assert len([*svg.iter(f"{SVG}circle")]) == 2  # the point, and the one in the legend


def test_an_svg_of_a_long_run_is_small(tmp_path, no_matplotlib):
    losses = np.random.default_rng(0).random(100_000) + 1
    losses[54_321] = 3
    svg = losses_as_svg(tmp_path, [{"step": i, "loss": x} for i, x in enumerate(losses)], {}, "a title")
    assert (tmp_path / "loss.svg").stat().st_size < 60_000
    x, y = points_of(svg)[0].T
    assert (x[y.argmin()] - x[0]) / (x[-1] - x[0]) == pytest.approx(0.54321, abs=2e-3)  # outliers are kept


def test_other_plots_name_the_extra(tmp_path, no_matplotlib):
    with pytest.raises(ModuleNotFoundError, match=r'matplotlib.*"tricycle-gpt\[plot\]"'):
        plot_curves({"a": {"b": ([1], [1])}}, tmp_path / "curves.png", "x", "y")


def test_the_curves_are_in_bits_per_byte(tmp_path, drawn):
    plot_losses(BOTH, tmp_path / "loss.png", 0.5, {"gzip -9": 2.0, "xz -9": 1.4}, "a title")
    (axes,) = drawn
    labels = " ".join(text.get_text() for text in axes.get_legend().get_texts())
    assert all(name in labels for name in ("training loss", "held-out loss", "gzip -9: 2.00", "xz -9: 1.40"))
    lines = [np.array(line.get_xydata()) for line in axes.lines]
    training = np.array([(step, 2.5 / step) for step in range(1, 201)])
    assert any(line.shape == training.shape and np.allclose(line, training) for line in lines)
    assert any(line.shape == (2, 2) and np.allclose(line, [(100, 0.75), (200, 0.5)]) for line in lines)
    assert any(np.allclose(line[:, 1], 2.0) for line in lines)
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == ("a title", "step", "bits per byte")
    shown = axes.get_ylim()
    assert shown[0] <= 0.5
    assert shown[1] >= 2.0
    smooth = next(line for line in axes.lines if line.get_label().startswith("training"))
    steps, values = smooth.get_data()
    assert steps[-1] == 200
    assert values[-1] == pytest.approx(training[-4:, 1].mean())


def test_a_finished_run_shows_the_final_held_out_loss(tmp_path, drawn):
    final = {"step": 200, "final_loss": 0.8, "final_bits_per_byte": 0.4, "best_step": 100}
    plot_losses([*BOTH, final], tmp_path / "loss.png", 0.5, {}, "a title")
    lines = {line.get_label(): line for line in drawn[0].lines}
    assert np.allclose(lines["final held-out loss: 0.40"].get_xydata(), [(100, 0.4)])
    assert any(label.startswith("held-out loss (estimate)") for label in lines)


# -------------------------------------------------------------------- attention
def causal(n_heads: int, n_tokens: int, seed: int = 0) -> np.ndarray:
    weights = np.random.default_rng(seed).exponential(size=(n_heads, n_tokens, n_tokens)) ** 3 * np.tri(n_tokens)
    return (weights / weights.sum(axis=-1, keepdims=True)).astype(np.float32)


def test_attention_is_a_grid_of_layers_and_heads(tmp_path, drawn):
    weights = {"blocks.0.attention": causal(2, 9), "blocks.1.attention": causal(3, 9, 1)}
    plot_attention(weights, tmp_path / "attention.png", "a title")
    check_png(tmp_path / "attention.png")
    assert len(drawn) == 6
    assert [axes.get_visible() for axes in drawn] == [True, True, False, True, True, True]
    assert [axes.get_title() for axes in drawn] == ["head 0", "head 1", "head 2", "", "", ""]
    assert [axes.get_ylabel() for axes in drawn if axes.get_ylabel()] == list(weights)
    shown = [axes.images[0].get_array() for axes in drawn if axes.images]
    np.testing.assert_array_equal(shown, [*weights["blocks.0.attention"], *weights["blocks.1.attention"]])
    assert len({axes.images[0].norm.vmax for axes in drawn if axes.images}) == 1
    assert len(drawn[0].figure.axes) == 7  # and one color bar


def test_attention_with_tokens_of_any_kind(tmp_path, drawn):
    tokens = ["a b", "\n", "$x$", "0123456789abc", "</script>"]
    weights = {"a $x_{$ b": causal(1, 5)[:, 3:], "zero": np.zeros((1, 2, 5))}
    plot_attention(weights, tmp_path / "attention.png", "$_$", tokens)
    check_png(tmp_path / "attention.png")
    labels = [label.get_text() for label in drawn[1].get_xticklabels()]
    assert labels == ["a·b", "↵", r"\$x\$", "012345678…", "</script>"]
    assert [label.get_text() for label in drawn[0].get_yticklabels()] == labels[3:]  # queries: the last two tokens


def test_grids_are_drawn_with_symmetric_colors(tmp_path, drawn):
    values = np.random.default_rng(0).standard_normal((4, 3))
    grids = {"heads": values, "MLPs": np.zeros((4, 1)), "$x_1$": values}
    plot_grids(grids, tmp_path / "grids.png", {"heads": ["a", " b", "\n$"]}, "a title")
    check_png(tmp_path / "grids.png")
    assert [axes.get_title() for axes in drawn[:3]] == list(grids)
    (image,) = drawn[0].images
    np.testing.assert_array_equal(image.get_array(), values)
    assert image.get_clim() == (-abs(values).max(), abs(values).max())
    assert drawn[1].images[0].get_clim() == (-1, 1)
    assert [text.get_text() for text in drawn[0].get_xticklabels()] == ["a", "·b", "↵\\$"]
    assert all(tick == int(tick) for axes in drawn[:3] for tick in (*axes.get_xticks(), *axes.get_yticks()))


def test_distributions_count_every_finite_element(tmp_path, drawn, rng):
    arrays = {f"layer {i}": rng.standard_normal((3, 50)).astype(np.float32) for i in range(5)}
    arrays["layer 1"][0, :7] = -np.inf
    arrays["layer 2"][...] = 1
    plot_distributions(arrays, tmp_path / "distributions.png", "a title", "activation")
    check_png(tmp_path / "distributions.png")
    assert len(drawn) == 8
    assert [axes.get_visible() for axes in drawn] == [True] * 5 + [False] * 3
    for axes, (name, array) in zip(drawn, arrays.items()):
        assert sum(patch.get_height() for patch in axes.patches) == 150 - 7 * (name == "layer 1")
        finite = array[np.isfinite(array)]
        assert axes.get_title() == f"{name}\nexcess kurtosis {excess_kurtosis(finite):.3g}"
        assert axes.get_yscale() == "log"


def test_curves_are_means_in_a_band(tmp_path, drawn, rng):
    x = np.array([256, 512, 1024])
    ys = rng.random((3, 3))
    curves = {"left": {"softmax": (x, ys), "softmax1": (x, ys[0] + 1)}, "right": {"softmax1": (x[:2], ys[:1, :2])}}
    plot_curves(curves, tmp_path / "curves.png", "tokens", "loss", "a title", log="x")
    check_png(tmp_path / "curves.png")
    left, right = drawn
    assert (left.get_title(), right.get_title()) == ("left", "right")
    assert (left.get_xlabel(), right.get_xlabel(), left.get_ylabel()) == ("tokens", "tokens", "loss")
    assert (left.get_xscale(), left.get_yscale()) == ("log", "linear")
    np.testing.assert_allclose(left.lines[0].get_xydata(), np.stack([x, ys.mean(axis=0)], axis=1))
    np.testing.assert_allclose(left.lines[1].get_ydata(), ys[0] + 1)
    (band,) = left.collections
    edge = band.get_paths()[0].vertices
    for i, place in enumerate(x):
        heights = edge[edge[:, 0] == place, 1]
        assert (heights.min(), heights.max()) == pytest.approx((ys[:, i].min(), ys[:, i].max()))
    assert not right.collections
    assert left.lines[1].get_color() == right.lines[0].get_color() != left.lines[0].get_color()
    (legend,) = left.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["softmax", "softmax1"]
    assert "range over runs" in legend.get_title().get_text()


def test_layers_and_steps_are_numbered_by_integers(tmp_path, drawn):
    plot_curves({"a": {"b": ([0, 1], [0.5, 0.7])}, "c": {"b": ([0.0, 1.0], [0.5, 0.7])}}, tmp_path / "a.png", "x", "y")
    assert [all(tick == int(tick) for tick in axes.get_xticks()) for axes in drawn] == [True, False]


def test_many_curves_stay_apart(tmp_path, drawn):
    lines = {f"line {i} $x_{{$": (np.arange(30), np.full(30, i + 1.0)) for i in range(20)}
    plot_curves({"$x_{$": lines}, tmp_path / "curves.png", "$x_{$", "$x_{$", "$x_{$", log="xy", share_y=False)
    assert len({(line.get_color(), line.get_linestyle()) for line in drawn[0].lines}) == 20
    assert drawn[0].get_yscale() == "log"
    assert drawn[0].figure.legends[0].get_title().get_text() == ""


def test_arrays_on_the_device_are_drawn(tmp_path, monkeypatch):
    monkeypatch.setitem(devices.ARRAY_MODULES, fake_device.FakeArray, fake_device.fake_module)
    there = fake_device.FakeArray(causal(2, 4))
    plot_attention({"one": there}, tmp_path / "attention.png")
    plot_distributions({"one": there}, tmp_path / "distributions.png")
    write_attention_page(tmp_path / "page.html", {"softmax": {"one": there}}, list("abcd"))
    assert len(list(tmp_path.iterdir())) == 3


# -------------------------------------------------------------------- the attention page
class Page(HTMLParser):
    """The tags of a page and the text of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.cdata_elem == "script":
            self.scripts[-1] += data


def stored_weights(layer: dict) -> np.ndarray:
    return (np.frombuffer(base64.b64decode(layer["weights"]), np.uint8) / 255) ** 2


NASTY = ["</script><script>alert(1)</script>", "<!--", "<b>", '"', "\\", "\n", "é", "\u2028", "\ud800", "", "&lt;"]


@pytest.fixture
def page(tmp_path):
    n = len(NASTY)
    weights = {
        "softmax": {"blocks.0.attention": causal(2, n), "blocks.1.attention": causal(3, n, 1)},
        "<i>softmax1": {"blocks.0.attention": causal(2, n, 2) * 0.3, "</script>": causal(1, n, 3)},
    }
    write_attention_page(tmp_path / "page.html", weights, NASTY, "</title><script>x</script> __DATA__")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    return weights, Page((tmp_path / "page.html").read_text(encoding="utf-8"))


def test_the_page_contains_its_data_as_json(page):
    weights, actual = page
    data = json.loads(actual.scripts[0])
    assert data["tokens"] == NASTY
    assert data["title"] == "</title><script>x</script> __DATA__"
    assert [variant["name"] for variant in data["variants"]] == list(weights)
    for variant in data["variants"]:
        given = weights[variant["name"]]
        assert [layer["name"] for layer in variant["layers"]] == list(given)
        for layer in variant["layers"]:
            expected = given[layer["name"]]
            assert layer["heads"] == len(expected)
            np.testing.assert_allclose(stored_weights(layer).reshape(expected.shape), expected, rtol=0, atol=1 / 255)


def test_small_weights_are_stored_more_precisely(tmp_path):
    weights = np.geomspace(1e-4, 1, 36).reshape(1, 6, 6)
    write_attention_page(tmp_path / "page.html", {"a": {"b": weights}}, list("abcdef"))
    data = json.loads(Page((tmp_path / "page.html").read_text(encoding="utf-8")).scripts[0])
    found = stored_weights(data["variants"][0]["layers"][0])
    assert (abs(found - weights.ravel()) <= np.sqrt(weights.ravel()) / 255 + 1 / 510**2).all()


def test_tokens_cannot_inject_html(page):
    _, parsed = page
    template = Page(ATTENTION_PAGE.read_text(encoding="utf-8"))
    assert parsed.tags == template.tags
    assert parsed.scripts[1:] == template.scripts[1:]
    assert len(parsed.scripts) == 2
    assert "<" not in parsed.scripts[0]


def test_the_page_loads_no_resources_and_declares_its_encoding():
    text = ATTENTION_PAGE.read_text(encoding="utf-8")
    tags = Page(text).tags
    metas = [attributes for tag, attributes in tags if tag == "meta"]
    assert {"charset": "utf-8"} in metas
    policy = next(attributes["content"] for attributes in metas if "http-equiv" in attributes)
    assert policy.startswith("default-src 'none'")
    assert not any({"src", "href", "onclick"} & attributes.keys() for _, attributes in tags)
    assert not re.search(r"https?:|//[a-z]+\.|url\(|@import|innerHTML|fetch\(", text)
    assert text.count("__DATA__") == 1


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_the_script_is_javascript(tmp_path):
    script = tmp_path / "page.js"
    script.write_text(Page(ATTENTION_PAGE.read_text(encoding="utf-8")).scripts[1], encoding="utf-8")
    subprocess.run(["node", "--check", str(script)], check=True)


# -------------------------------------------------------------------- invalid arguments
X = np.arange(3)
PATH = "nowhere/picture"  # nothing is written
BAD = {
    "no layer": (plot_attention, [{}, PATH], "at least one layer"),
    "a batch of texts": (plot_attention, [{"one": np.ones((2, 2, 3, 3))}, PATH], "expected one"),
    "not finite": (plot_attention, [{"one": np.full((2, 3, 3), np.nan)}, PATH], "expected one to"),
    "too few tokens": (plot_attention, [{"one": causal(1, 3)}, PATH, "", "ab"], "expected 3"),
    "no grid": (plot_grids, [{}, PATH], "at least one grid"),
    "grid without layers": (plot_grids, [{"one": np.zeros(3)}, PATH], r"\(layers, columns\), got \(3,\)"),
    "wrong labels": (plot_grids, [{"one": np.zeros((2, 3))}, PATH, {"one": ["a"]}], r"\(layers, 1\), got \(2, 3\)"),
    "no array": (plot_distributions, [{}, PATH], "at least one array"),
    "nothing finite": (plot_distributions, [{"one": np.full((2, 3), -np.inf)}, PATH], r"finite.*\(2, 3\)"),
    "no line": (plot_curves, [{"left": {}}, PATH, "x", "y"], "at least one line"),
    "a point too many": (
        plot_curves,
        [{"left": {"one": (X, np.ones((2, 4)))}}, PATH, "x", "y"],
        r"\(n_points,\).*\(n_seeds, n_points\)",
    ),
    "no variant": (write_attention_page, [PATH, {}, []], "at least one"),
    "a variant without layers": (write_attention_page, [PATH, {"softmax": {}}, []], "at least one layer"),
    "another number of tokens": (
        write_attention_page,
        [PATH, {"softmax": {"one": causal(2, 3)}}, list("abcd")],
        r"\(heads, 4, 4\).*\(2, 3, 3\)",
    ),
}
test_bad_input = bad_input(
    {name: (partial(draw, *words), f"{draw.__name__}: .*{message}") for name, (draw, words, message) in BAD.items()}
)
