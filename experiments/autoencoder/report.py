"""Tables in Markdown and plots of the autoencoder study."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.autoencoder.data import Data
from experiments.autoencoder.study import DRAWING, NOISE, Study, add_noise, encode
from experiments.shared.figures import drawing
from experiments.shared.results import Runs, of
from experiments.shared.tables import cell, grid, markdown
from experiments.shared.training import stream
from tricycle_lab.plot import plot_curves

N_COLUMNS = 14  # digits in a row of a picture
N_DRAWN = 20
N_BETWEEN = 11  # images from one digit to another, both ends included


# -------------------------------------------------------------------- tables
def tables(runs: Runs, settings: dict[str, Any]) -> dict[str, str]:
    """Return the Markdown tables of reconstruction, denoising, classification and generation, by title."""
    sizes, noises, few = settings["code_sizes"], settings["noises"], settings["few_labels"]
    by_place = lambda what: lambda name, i: of(runs, what, name, i)

    def accuracies(name: str, i: int) -> str:
        if i >= len(runs[0]["classification"][name]):  # pixels have no code
            return ""
        return " / ".join(cell(of(runs, "classification", name, i, labels), 1, 100) for labels in ("few", "all"))

    lost, accurate = "Variance missed, %, by the size of the code", f"Accuracy of a layer on {few} labels / on all, %"
    cleaned = f"Variance missed behind a code of {settings['denoising_size']}, %, by the noise"
    of_sizes, of_noises = ({f"{n:g}": i for i, n in enumerate(each)} for each in (sizes, noises))
    return {
        lost: grid(list(runs[0]["reconstruction"]), of_sizes, by_place("reconstruction"), 1, 100),
        cleaned: grid(list(runs[0]["denoising"]), of_noises, by_place("denoising"), 1, 100),
        f"{accurate}, by the size of the code": grid(list(runs[0]["classification"]), of_sizes, accuracies),
        f"New digits from codes of {settings['variational_size']}; surprise and divergence in nats an image": (
            generation_table(runs)
        ),
    }


def generation_table(runs: Runs) -> str:
    """Return the Markdown table of generated images and log-likelihood bounds; PCA's likelihood is exact."""
    rows = []
    for name in runs[0]["drawing"]:
        row = [name, *(cell(of(runs, "drawing", name, i), 1, 100) for i in range(2))]
        known = runs[0]["variational"].get(name, {})
        for key, scale in (("bound", 1), ("divergence", 1), ("missed", 100)):
            row.append(cell(of(runs, "variational", name, key), 1, scale) if key in known else "")
        rows.append(row)
    titles = "precision, %;recall, %;negative log-likelihood, upper bound;divergence;unexplained variance, %".split(";")
    return markdown(["", *titles], rows)


# -------------------------------------------------------------------- pictures
def plot_errors(runs: Runs, settings: dict[str, Any], path: Path) -> None:
    """Write an image of the reconstruction error and the classification accuracy against the code size."""
    sizes = settings["code_sizes"]
    lines = {name: (sizes, 100 * np.array(of(runs, "reconstruction", name))) for name in runs[0]["reconstruction"]}
    curves: dict[str, Any] = {"unexplained variance, %": lines}
    for labels, title in (("few", f"accuracy, %, {settings['few_labels']} labels"), ("all", "accuracy, %, all labels")):
        panel = curves[title] = {}
        for name, accuracies in runs[0]["classification"].items():
            # pixels have no code
            places = range(len(accuracies)) if len(accuracies) == len(sizes) else [0] * len(sizes)
            panel[name] = sizes, 100 * np.array([of(runs, "classification", name, i, labels) for i in places]).T
    title = f"Codes of {settings['data']}"
    plot_curves(curves, path, "code size", "", title, log="x", share_y=False)


def plot_pictures(study: Study, folder: Path) -> list[str]:
    """Write six PNG files of reconstructions, denoising, new digits and codes to a folder; return their names."""
    data, settings = study.data, study.settings
    images = first_image_of_each_digit(data)
    rows = {"image": images}
    for size in sorted({min(settings.code_sizes), settings.variational_size}):
        rows |= {f"{name}, {size}": make(images) for name, make in study.reconstructors(size).items()}
    draw_rows(rows, folder / "reconstruction.png", "Test images and their reconstructions, by model and code size")
    noise = max(settings.noises)
    noisy = add_noise(images, noise, stream(NOISE, 2))
    rows = {"image": images, f"noise {noise:g}": noisy}
    rows |= {name: make(noisy) for name, make in study.denoisers(noise).items() if name != "noisy image"}
    draw_rows(rows, folder / "denoising.png", "Noise removed from test images")
    rows = {"training images": data.train.images[:N_DRAWN]}
    rows |= {name: draw(N_DRAWN, stream(DRAWING, study.seed, 1)) for name, draw in study.generators().items()}
    draw_rows(rows, folder / "drawn.png", f"Generated digits, code size {settings.variational_size}")
    draw_rows(interpolations(study), folder / "between.png", "Interpolations between test images")
    plot_latent(study, folder / "codes.png")
    plot_plane(study, folder / "plane.png")
    return [f"{name}.png" for name in ("reconstruction", "denoising", "drawn", "between", "codes", "plane")]


def interpolations(study: Study) -> dict[str, np.ndarray]:
    """Return {row title: images (N_BETWEEN, height, width, 1)} between two digits, in pixels and in codes."""
    images = first_image_of_each_digit(study.data)
    shares = np.linspace(0, 1, N_BETWEEN, dtype=np.float32)[:, None, None, None]
    size, rows = study.settings.variational_size, {}
    plain = study.get_trained("dense", size)
    variational = study.get_trained("dense", size, 0.0, study.best_output_std("dense"))
    for a, b in ((0, 1), (3, 8), (4, 9)):
        rows[f"{a} to {b}, pixels"] = (1 - shares) * images[a] + shares * images[b]
        for name, model in (("plain", plain), ("variational", variational)):
            codes = encode(model, images[[a, b]])
            codes_between = (1 - shares[:, 0, 0]) * codes[0] + shares[:, 0, 0] * codes[1]
            rows[f"{a} to {b}, {name}"] = model.decode(codes_between).numpy()
    return rows


def first_image_of_each_digit(data: Data) -> np.ndarray:
    """Return N_COLUMNS test images: the first of each digit from 0 to 9, then the first others."""
    labels = data.test.labels
    first = [int(np.flatnonzero(labels == digit)[0]) for digit in range(10)]
    more = [i for i in range(len(labels)) if i not in first][: N_COLUMNS - 10]
    return data.test.images[first + more]


def draw_rows(rows: dict[str, np.ndarray], path: Path, title: str) -> None:
    """Write an image file with one labeled row of images (n, height, width, 1) for each name."""
    together, places = image_grid(list(rows.values()))
    inches = 0.54 / (places[1] - places[0]) if len(rows) > 1 else 0.06  # a pixel
    height, width = (inches * n for n in together.shape)
    margin, title_height = 0.085 * max(map(len, rows)) + 0.1, 0.35
    size = margin + width, height + title_height
    with drawing(path, size, dpi=100, layout="none") as figure:
        axes = figure.add_axes((margin / size[0], 0, width / size[0], height / size[1]))
        axes.imshow(together, cmap="gray_r", vmin=0, vmax=1, interpolation="nearest")
        axes.set_xticks([])
        axes.set_yticks(places, rows)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title(title, fontsize=11)


def image_grid(rows: list[np.ndarray]) -> tuple[np.ndarray, list[float]]:
    """Return (rows of images (n, height, width, 1) as one 2-D image with gaps, vertical centers of the rows)."""
    _, height, width, _ = rows[0].shape
    gap = max(1, height // 8)
    together = np.zeros((len(rows) * (height + gap) - gap, max(map(len, rows)) * (width + gap) - gap))
    for i, images in enumerate(rows):
        for j, image in enumerate(images):
            top, left = i * (height + gap), j * (width + gap)
            together[top : top + height, left : left + width] = image[..., 0]
    return together, [i * (height + gap) + (height - 1) / 2 for i in range(len(rows))]


def plot_latent(study: Study, path: Path) -> None:
    """Write an image of test codes of two numbers, colored by digit, with one panel for each model."""
    deviation = study.settings.deviations[-1]
    codes = {name: make(study.data.test.images) for name, make in study.encoders(2).items() if name != "untrained"}
    codes["variational, dense"] = encode(study.get_trained("dense", 2, 0.0, deviation), study.data.test.images)
    title = "Codes of size 2 of test images, trained without labels"
    with drawing(path, (4 * len(codes), 4.3), title, dpi=100) as figure:
        panels = figure.subplots(1, len(codes))
        for axes, (name, points) in zip(panels, codes.items()):
            axes.set_title(name)
            shown = points[:3000]
            low, high = np.quantile(shown, (0.002, 0.998), axis=0)
            margin = 0.08 * (high - low)
            axes.set(xlim=(low[0] - margin[0], high[0] + margin[0]), ylim=(low[1] - margin[1], high[1] + margin[1]))
            dots = axes.scatter(*shown.T, c=study.data.test.labels[:3000], cmap="tab10", s=14, vmin=-0.5, vmax=9.5)
        figure.colorbar(dots, ax=panels, ticks=range(10), label="digit")


def plot_plane(study: Study, path: Path, n: int = 16) -> None:
    """Write an image of the digits that a variational autoencoder decodes from an n x n grid of codes."""
    from statistics import NormalDist

    model = study.get_trained("dense", 2, 0.0, study.settings.deviations[-1])
    places = np.array([NormalDist().inv_cdf((i + 0.5) / n) for i in range(n)], np.float32)
    codes = np.stack(np.meshgrid(places, places[::-1]), axis=-1).reshape(-1, 2)
    model.eval()
    images = model.decode(codes).numpy().reshape(n, n, *study.data.shape)
    with drawing(path, (6, 6.3), dpi=100) as figure:
        axes = figure.subplots()
        axes.imshow(image_grid(list(images))[0], cmap="gray_r", vmin=0, vmax=1, interpolation="nearest")
        axes.set_axis_off()
        axes.set_title("Decoded codes of size 2", fontsize=11)
