"""The same question, asked of a model that others trained.

    python -m experiments.learned_statistics --model smollm2           all of it
    python -m experiments.learned_statistics --model smollm2 --quick   a smaller form of the same
    python -m experiments.learned_statistics --model FOLDER            any decoder in Hugging Face's form, such as OPT

What is finished lies in the output folder and is not done again when the command is given again.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from experiments.learned_statistics import real_page, real_report
from experiments.learned_statistics.real_bench import (
    Bench,
    Record,
    all_jobs,
    compare,
    job_of,
    learned,
    mean,
    written_jobs,
)
from experiments.learned_statistics.real_report import Results
from experiments.learned_statistics.real_study import STARTS, RealSettings, digest
from experiments.real_model import TEXTS
from experiments.settings import at_least
from tricycle.pretrained.folder import INDEX, WEIGHTS
from tricycle_cli.flags import parse

QUICK: dict[str, Any] = {
    "blocks": (2, 4),
    "steps": 6,
    "seeds": 1,
    "test_windows": 2,
    "measured_windows": 4,
    "prompts": 1,
    "n_written": 24,
    "output": Path("runs/learned_statistics_real_quick"),
}


def is_asked_for(words: Sequence[str]) -> bool:
    """Whether a command line names a model that is no run folder or checkpoint of ours."""
    names = [after for word, after in itertools.pairwise(words) if word == "--model"]
    names += [word.partition("=")[2] for word in words if word.startswith("--model=")]
    if not names:
        return False
    path = Path(names[-1])
    is_folder = any((path / name).is_file() for name in (WEIGHTS, INDEX))
    return is_folder or path.suffix == ".gguf" or path.name in (WEIGHTS, INDEX) or names[-1] == "smollm2"


def main() -> int:
    default = RealSettings(**QUICK) if "--quick" in sys.argv[1:] else RealSettings()
    settings = parse(RealSettings, default, description=__doc__ or "")
    check(settings)
    record = Record(settings)
    bench = Bench(settings)
    jobs = all_jobs(settings)
    with tqdm(jobs, desc=settings.model, unit="row", dynamic_ncols=True) as bar:
        for job in bar:
            if not record.has(job):
                record.add(job, bench.measure(job))
    finish(bench, record)
    show(bench, record)
    return 0


def check(settings: RealSettings) -> None:
    """
    Raises:
        ValueError: settings with which nothing could be measured.
    """
    least = {"seeds": 1, "steps": 1, "batch_size": 1, "test_windows": 1, "measured_windows": 1, "prompts": 1}
    at_least(settings, **least, n_written=1, window=4)
    if settings.text not in TEXTS:
        raise ValueError(f"expected --text to be one of {', '.join(TEXTS)}, got {settings.text}")
    if not min(settings.rate, *settings.other_rates, settings.rate) > 0:
        raise ValueError(f"expected rates above 0, got {settings.rate} and {settings.other_rates}")
    if min(settings.blocks, default=0) < 2 or settings.middle not in settings.blocks:
        got = f"{' '.join(map(str, settings.blocks)) or 'none'} and {settings.middle}"
        raise ValueError(f"expected --blocks of 2 or more with --middle among them, got {got}")
    if max(settings.blocks) > settings.window:
        raise ValueError(f"expected no more blocks than tokens in a window, got {settings.blocks}")
    if settings.n_written > settings.window // 4:
        raise ValueError(f"expected --n-written of at most a quarter of --window, got {settings.n_written}")


def finish(bench: Bench, record: Record) -> None:
    """What is no row: what means can know, what the model writes, and whether it is still the same."""
    results = record.results
    if "explained" not in results:
        results["explained"] = bench.explained()
        record.save()
    written = results.setdefault("written", [])
    done = {job_of(way) for way in written}
    jobs = written_jobs(bench.settings)
    for job in tqdm([job for job in jobs if job not in done], desc="writing", unit="way", dynamic_ncols=True):
        written.append(bench.write(job))
        record.save()
    results["written"] = [
        {**way, **compared} for way, compared in zip(written, compare(written, bench.subject.tokeniser))
    ]
    results["prompts"] = [bench.subject.tokeniser.decode(prompt) for prompt in bench.subject.prompts]
    results["unchanged"] = digest(bench.subject.model) == bench.digest
    record.save()


def show(bench: Bench, record: Record) -> None:
    """Tables to the terminal, pictures and the page into the folder."""
    settings = bench.settings
    results, folder = Results(record, settings), settings.output
    for text in TEXTS:
        print(f"\nPerplexity, {text}\n\n{real_report.perplexity_table(results, text)}")
    tables = {
        "Share of the lost nats a token that is won back, %": real_report.won_back_table(results),
        f"All kinds of scales, {settings.middle} blocks": real_report.grain_table(results),
        "From one text to another": real_report.transfer_table(results),
        "Learning rates": real_report.rate_table(results),
        "What means know of the exact shares, %": real_report.explained_table(results),
        "What is left in generation": real_report.written_table(results),
        "Beside seed document 002 (on Wikitext-2)": real_report.seed_table(results),
    }
    for title, table in tables.items():
        print(f"\n{title}\n\n{table}")
    scales = {"mean shares": bench.scales(mean(settings))[0]}
    scales |= {real_report.learned_from(start): bench.scales(learned(settings, start=start))[0] for start in STARTS}
    real_report.plot_blocks(results, folder / "blocks.png")
    real_report.plot_positions(results, folder / "positions.png")
    real_report.plot_grains(results, folder / "grains.png")
    real_report.plot_learning(results, folder / "learning.png")
    title = f"Scales of {settings.middle} blocks: the mean of the exact shares, and what was learned"
    real_report.plot_scales(scales, folder / "scales.png", title)
    real_page.write(record.results, scales, folder / "page.html")
    names = "results.json, blocks.png, positions.png, grains.png, learning.png, scales.png, page.html"
    unchanged = "its own weights are what they were" if record.results["unchanged"] else "ITS WEIGHTS CHANGED"
    print(f"\n{settings.output}: {names}; {unchanged}")
