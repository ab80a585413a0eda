"""Tables in Markdown and plots of block softmax in a pretrained model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.learned_statistics.blocks import GRAINS, STARTS, Job, ResultRows, block_starts, job_of
from experiments.learned_statistics.pretrained_study import PretrainedSettings, learned_job, mean_job
from experiments.learned_statistics.report import LABELS, rows_with_seed_figures
from experiments.shared.figures import drawing
from experiments.shared.language_models import TEXTS
from experiments.shared.tables import cell, grid, markdown
from tricycle_lab.plot import COLOURS, plot_curves

FULL = Job("whole")
# Scales in each layer, in words.
GRAIN_WORDS = {
    "layer": "a pair of blocks",
    "head": "a head and pair of blocks",
    "position": "a block and position (the seed's)",
    "head and position": "a head, block and position",
}


class Results:
    """The result rows of the study, looked up by job."""

    def __init__(self, record: ResultRows, settings: PretrainedSettings) -> None:
        self.settings, self.other = settings, record
        self.rows = {job_of(row): row for row in record["rows"]}

    def perplexities(self, job: Job, text: str) -> np.ndarray:
        """Return the perplexities (seeds,) of a job on a text; empty if it has no results."""
        seeds = range(self.settings.seeds if job.kind == "learned" else 1)
        rows = [self.rows[one] for one in (job._replace(seed=seed) for seed in seeds) if one in self.rows]
        return np.array([row["texts"][text]["perplexity"] for row in rows])

    def same(self, job: Job, text: str) -> float:
        """Return the top-1 agreement with the full softmax, 0 to 1; KeyError if the job has no results."""
        return float(self.rows[job]["texts"][text]["same"])

    def positions(self, job: Job, text: str) -> np.ndarray:
        """Return the mean loss (bins,) in nats in each bin of positions; KeyError if the job has no results."""
        return np.array(self.rows[job]["texts"][text]["positions"])

    def recovered_loss(self, job: Job, text: str) -> np.ndarray:
        """Return (seeds,): the recovered percentage of the loss that blocks without correction add."""
        full = np.log(self.perplexities(FULL, text)[0])
        uncorrected = np.log(self.perplexities(Job("none", job.blocks), text)[0])
        return 100 * (uncorrected - np.log(self.perplexities(job, text))) / (uncorrected - full)


def variants(settings: PretrainedSettings, blocks: int) -> dict[str, Job]:
    """Return {label: job} for a number of blocks: uncorrected, 1 / k, mean and learned, but not full softmax."""
    return {
        LABELS["none"]: Job("none", blocks),
        "1 / k": Job("1 / k", blocks),
        "mean shares": mean_job(settings, blocks=blocks),
        "learned from 1": learned_job(settings, blocks=blocks, start="1"),
        "learned from 1 / k": learned_job(settings, blocks=blocks),
    }


# -------------------------------------------------------------------- tables
def tables(results: Results) -> dict[str, str]:
    """Return the study's Markdown tables by title."""
    return {f"Perplexity, {text}": perplexity_table(results, text) for text in TEXTS} | {
        "Recovered loss, % of the loss that blocks add": recovered_loss_table(results),
        f"All kinds of scales, {results.settings.middle} blocks": grain_table(results),
        "Transfer between texts": transfer_table(results),
        "Learning rates": rate_table(results),
        "Variance of exact shares that their means explain, %": explained_table(results),
        "Generated text": generation_table(results),
        "Comparison with seed document 002 (on Wikitext-2)": seed_table(results),
    }


def perplexity_table(results: Results, text: str) -> str:
    """Return the Markdown table of perplexities of one text by number of blocks and variant."""
    jobs = {n: {LABELS["whole"]: FULL, **variants(results.settings, n)} for n in results.settings.blocks}
    names = list(next(iter(jobs.values())))
    return grid(list(jobs), names, lambda n, name: results.perplexities(jobs[n][name], text), corner="blocks")


def recovered_loss_table(results: Results) -> str:
    """Return the Markdown table of recovered loss: 0% as without correction, 100% as with full softmax."""
    names = list(variants(results.settings, 2))[1:]
    lines = []
    for text in TEXTS:
        for n in results.settings.blocks:
            jobs = variants(results.settings, n)
            lines.append([text, str(n), *(cell(results.recovered_loss(jobs[name], text), 1) for name in names)])
    return markdown(["text", "blocks", *names], lines)


def grain_table(results: Results) -> str:
    """Return the Markdown table of all kinds of scales at `middle` blocks: perplexity and top-1 agreement."""
    settings = results.settings
    jobs = {LABELS["whole"]: FULL, "exact shares": Job("exact", settings.middle)}
    jobs |= {LABELS["none"]: Job("none", settings.middle), "1 / k": Job("1 / k", settings.middle)}
    for grain, words in GRAIN_WORDS.items():
        jobs[f"mean shares, one for {words}"] = mean_job(settings, grain=grain)
        for start in reversed(STARTS):
            jobs[f"{start_label(start)}, one for {words}"] = learned_job(settings, grain=grain, start=start)
    return _texts_table(results, jobs)


def _texts_table(results: Results, jobs: dict[str, Job]) -> str:
    """Return a Markdown table of perplexity and top-1 agreement on each text, a row for each job with results."""
    titles = ["scales", *TEXTS, *(f"top-1 agreement, {text}, %" for text in TEXTS)]
    lines = []
    for name, job in jobs.items():
        if job in results.rows:
            same = [f"{100 * results.same(job, text):.1f}" for text in TEXTS]
            lines.append([name, *(cell(results.perplexities(job, text)) for text in TEXTS), *same])
    return markdown(titles, lines)


def transfer_table(results: Results) -> str:
    """Return the Markdown table of scales trained on each text and evaluated on each text."""
    settings = results.settings
    middle = settings.middle
    jobs = {LABELS["whole"]: FULL, "1 / k": Job("1 / k", middle)}
    jobs |= {f"mean shares of {text}": mean_job(settings, text=text) for text in TEXTS}
    jobs |= {f"learned on {text}": learned_job(settings, text=text) for text in TEXTS}
    jobs[f"one block, one scale per position learned on {settings.text}"] = learned_job(settings, blocks=1)
    return _texts_table(results, jobs)


def rate_table(results: Results) -> str:
    """Return the Markdown table of perplexity and top-1 agreement by initial value and learning rate."""
    settings = results.settings
    jobs = {
        f"{start_label(start)} at {rate}": learned_job(settings, start=start, rate=rate)
        for start in STARTS
        for rate in sorted({settings.rate, *settings.other_rates})
    }
    return _texts_table(results, jobs)


def explained_table(results: Results) -> str:
    """Return the Markdown table of the exact shares' variance around 1 / k that their means explain, in %."""
    found = results.other["explained"]
    columns = {f"one for {GRAIN_WORDS[grain]}": grain for grain in GRAINS}
    return grid(list(found), columns, lambda n, grain: found[n][grain], 1, 100, "blocks")


def generation_table(results: Results) -> str:
    """Return the Markdown table of generated tokens that equal those with the full softmax, in %."""
    lines = []
    for variant in results.other["written"]:
        job = job_of(variant)
        same = np.mean([results.same(job, text) for text in TEXTS]) if job in results.rows else np.nan
        numbers = [f"{100 * same:.1f}", f"{100 * variant['same']:.1f}", f"{variant['until']:.1f}"]
        lines.append([job_label(job), *numbers, f"{100 * variant['repeated']:.1f}"])
    titles = ["softmax", "top-1 agreement on the same text, %", "equal tokens at the same position, %"]
    return markdown([*titles, "tokens before the first difference", "repeated 4-grams, %"], lines)


def seed_table(results: Results) -> str:
    """Return a Markdown table of perplexities before and after learning, beside the seed document's figures."""
    jobs = {start: learned_job(results.settings, blocks=2, start=start) for start in STARTS}
    measured = {
        f"{results.settings.model}, {text}, from {start}": (
            results.perplexities(FULL, text)[0],
            results.perplexities(job, text),
        )
        for text in TEXTS
        for start, job in jobs.items()
        if job in results.rows
    }
    return rows_with_seed_figures(measured, 2)


def job_label(job: Job) -> str:
    """Return the label of a job in tables, such as "4 blocks, mean shares"."""
    if job.kind in ("whole", "none", "1 / k", "exact"):
        label = LABELS.get(job.kind, job.kind)
        return label if job.kind == "whole" else f"{job.blocks} blocks, {label}"
    kind = "mean shares" if job.kind == "mean" else start_label(job.start)
    grain = "" if job.grain == "position" else f", one for {GRAIN_WORDS[job.grain]}"
    return f"{job.blocks} blocks, {kind}{grain}"


def start_label(start: str) -> str:
    """Return the label of an initial value of learned scales, such as "learned from 1"."""
    return f"learned from {'mean shares' if start == 'mean' else start}"


# -------------------------------------------------------------------- pictures
PICTURES = ("blocks", "positions", "grains", "learning", "scales")
Panels = dict[str, dict[str, tuple[Any, Any]]]


def plot(results: Results, scales: Mapping[str, Sequence[np.ndarray]], folder: Path) -> None:
    """Write the five plots in PICTURES as PNG files."""
    settings, paths = results.settings, {name: folder / f"{name}.png" for name in PICTURES}
    title = f"Perplexity of {settings.model} with its softmax in blocks; scales from {settings.text}"
    plot_curves(by_blocks(results), paths["blocks"], "blocks", "perplexity", title, log="xy")
    title = f"{settings.middle} blocks: loss compared with the full softmax"
    plot_curves(by_position(results), paths["positions"], "position of the token", "added loss, nats per token", title)
    plot_grains(results, paths["grains"])
    title = f"Training loss of the scales, {settings.middle} blocks unless stated"
    plot_curves(losses(results), paths["learning"], "update", "nats per token", title)
    title = f"Scales of {settings.middle} blocks: mean of the exact shares, and learned scales"
    plot_scales(scales, paths["scales"], title)


def by_blocks(results: Results) -> Panels:
    """Return {text: {variant: (numbers of blocks, mean perplexities)}} for `plot_curves`."""
    settings, panels = results.settings, Panels()
    for text in TEXTS:
        full = results.perplexities(FULL, text)[0]
        lines = panels[text] = {LABELS["whole"]: (list(settings.blocks), [full] * len(settings.blocks))}
        for name in variants(settings, 2):
            jobs = {n: variants(settings, n)[name] for n in settings.blocks}
            means = {n: results.perplexities(job, text).mean() for n, job in jobs.items() if job in results.rows}
            if means:
                lines[name] = list(means), list(means.values())
    return panels


def by_position(results: Results) -> Panels:
    """Return {text: {variant: (positions, added loss in nats)}} for `plot_curves`."""
    panels = Panels()
    for text in TEXTS:
        full = results.positions(FULL, text)
        middles = (np.arange(len(full)) + 0.5) * results.settings.window / len(full)
        jobs = {
            name: job
            for name, job in variants(results.settings, results.settings.middle).items()
            if job in results.rows
        }
        panels[text] = {name: (middles, results.positions(job, text) - full) for name, job in jobs.items()}
    return panels


def plot_grains(results: Results, path: Path) -> None:
    """Write an image of the perplexity of each kind of scale at `middle` blocks, one panel for each text."""
    settings = results.settings
    kinds = {
        "mean shares": {grain: mean_job(settings, grain=grain) for grain in GRAINS},
        "learned from 1 / k": {grain: learned_job(settings, grain=grain) for grain in GRAINS},
    }
    with drawing(path, (11, 4.2), f"{settings.middle} blocks: granularity of the scales") as figure:
        for axes, text in zip(figure.subplots(1, len(TEXTS)), TEXTS):
            for i, (kind, jobs) in enumerate(kinds.items()):
                values = [results.perplexities(job, text) for job in jobs.values()]
                heights = [value.mean() if value.size else np.nan for value in values]
                axes.bar(np.arange(len(GRAINS)) + 0.4 * (i - 0.5), heights, 0.37, color=COLOURS[i], label=kind)
            axes.axhline(results.perplexities(FULL, text)[0], color="black", linewidth=1, label=LABELS["whole"])
            equal = results.perplexities(Job("1 / k", settings.middle), text)[0]
            axes.axhline(equal, color="grey", linewidth=1, linestyle="--", label="1 / k")
            axes.set_xticks(range(len(GRAINS)), [grain.replace(" and ", "\nand ") for grain in GRAINS], fontsize=8)
            axes.set_title(text)
            axes.grid(alpha=0.25, axis="y")
        figure.axes[0].set_ylabel("perplexity")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=9)


def losses(results: Results) -> Panels:
    """Return {initial value: {scales or blocks: (updates, training losses in nats)}} of jobs, for `plot_curves`."""
    settings, panels = results.settings, Panels()
    for start in STARTS:
        jobs = {grain: learned_job(settings, grain=grain, start=start) for grain in GRAINS}
        others = [n for n in settings.blocks if n != settings.middle]
        jobs |= {f"position, {n} blocks": learned_job(settings, blocks=n, start=start) for n in others}
        found = {name: results.rows[job]["losses"] for name, job in jobs.items() if job in results.rows}
        panels[start_label(start)] = {name: (np.arange(1, len(ys) + 1), ys) for name, ys in found.items()}
    return panels


def plot_scales(scales: Mapping[str, Sequence[np.ndarray]], path: Path, title: str) -> None:
    """Write heat maps of the scales (n, W) by layer: one row for each variant, one column for each block."""
    n, window = next(iter(scales.values()))[0].shape
    with drawing(path, (2.9 * n + 1, 2.3 * len(scales) + 0.8), title, 100) as figure:
        grid = figure.subplots(len(scales), n, squeeze=False, sharex=True, sharey=True)
        for row, (name, arrays) in enumerate(scales.items()):
            for i, axes in enumerate(grid[row]):
                values = np.stack([array[i] for array in arrays]).astype(float)
                values[:, : block_starts(n, window)[i]] = np.nan  # these positions cannot attend to the block
                image = axes.imshow(values, aspect="auto", cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
                if i == 0:
                    axes.set_ylabel(f"{name}\nlayer", fontsize=8)
                if row == 0:
                    axes.set_title(f"block {i} of the keys", fontsize=9)
        figure.supxlabel("position of the query", fontsize=9)
        figure.colorbar(image, ax=grid, label="scale", shrink=0.7, extend="both")
