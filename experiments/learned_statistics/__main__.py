"""Learned statistics: the softmax of a frozen GPT in blocks that know nothing of each other, put together by scales.

    python -m experiments.learned_statistics              trains a GPT, takes it apart, measures
    python -m experiments.learned_statistics --quick      a smaller form of the same
    python -m experiments.learned_statistics --model RUN  takes apart the model of a run folder or checkpoint
    python -m experiments.learned_statistics --model smollm2      one that others trained, as `real.py` says; so with
                                                          a folder in Hugging Face's form or a GGUF file

What is finished lies in the output folder and is not done again when the command is given again.
"""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

from experiments.learned_statistics import real, report
from experiments.learned_statistics.bench import Bench, Job, Record, all_jobs
from experiments.learned_statistics.study import SEEN_WINDOWS, Settings, about_maps, held_out_rows, look, new_subject
from experiments.settings import at_least
from tricycle_cli.flags import parse, run_main

QUICK: dict[str, Any] = {
    "blocks": (2, 4),
    "seeds": 1,
    "width": 64,
    "layers": 3,
    "context_window": 128,
    "steps": 2000,
    "scale_steps": 300,
    "windows": 128,
}


def main() -> int:
    if real.is_asked_for(sys.argv[1:]):
        return real.main()
    default = Settings(**QUICK) if "--quick" in sys.argv[1:] else Settings()  # other flags start from its values
    settings = parse(Settings, default, description=__doc__ or "")
    check(settings)
    record = Record(settings)
    files: list[str] = []
    for number in range(settings.models):
        bench = Bench(new_subject(settings, number), number, settings)
        with tqdm(all_jobs(settings), desc=f"model {number}", unit="row", dynamic_ncols=True) as bar:
            for job in bar:
                if not record.has(number, job):
                    record.add(number, job, bench.measure(job))
        files = files or show(bench, record)
    rows, attention = record.rows(settings), record.results["attention"]
    print(f"\nPerplexity on held-out text\n\n{report.perplexity_table(rows)}")
    print(f"\nShare of the lost perplexity that is won back, %\n\n{report.won_back_table(rows)}")
    print(f"\nBeside seed document 002 (on Wikitext-2)\n\n{report.seed_table(rows)}")
    print(f"\nSpikiness of the attention maps\n\n{report.maps_table(attention, 'spikiness')}")
    print(f"\nTheir distance from those of the whole softmax\n\n{report.maps_table(attention, 'distance')}")
    print(f"\n{settings.output}: results.json, {', '.join(files)}")
    return 0


def check(settings: Settings) -> None:
    """
    Raises:
        ValueError: settings with which nothing could be measured.
    """
    at_least(settings, seeds=1, models=1, steps=1, scale_steps=1, batch_size=1, layers=1, windows=0)
    if not settings.scale_rate > 0:
        raise ValueError(f"expected --scale-rate to be above 0, got {settings.scale_rate}")
    if min(settings.blocks, default=0) < 2:
        raise ValueError(f"expected --blocks of 2 or more, got {' '.join(map(str, settings.blocks)) or 'none'}")
    if settings.model and settings.models > 1:
        raise ValueError(f"expected one model with --model, got --models {settings.models}")


def show(bench: Bench, record: Record) -> list[str]:
    """Look at the attention of a few texts, whole and in blocks, and draw it; returns the files' names."""
    subject, settings = bench.subject, bench.settings
    texts = held_out_rows(subject, SEEN_WINDOWS)
    folder, few = settings.output, min(settings.blocks)
    bench.prepare(Job("whole"))
    whole = look(subject.model, texts)
    attention, drawn = {"whole": about_maps(whole, whole)}, {"whole": whole}
    for n in settings.blocks:
        for kind, name in report.SHOWN.items():
            bench.prepare(Job(kind, n))
            maps = look(subject.model, texts)
            label = f"{n} blocks, {name}"
            attention[label] = about_maps(maps, whole)
            if n == few and kind in report.DRAWN:
                drawn[label] = maps
    record.results["attention"] = attention
    record.save()
    one = {label: {layer: weights[0] for layer, weights in maps.items()} for label, maps in drawn.items()}
    tokens = [subject.tokeniser.decode([token]) for token in texts[0].tolist()]
    files = report.draw_maps(one, attention[f"{few} blocks, learned"]["distance"], tokens, folder)
    report.plot_spikiness(attention, settings.blocks, folder / "spikiness.png")
    learned = [bench.scales(Job("learned", few, seed)) for seed in range(settings.seeds)]
    report.plot_scales(learned, bench.scales(Job("measured", few)), folder / "scales.png")
    return [*files, "spikiness.png", "scales.png"]


if __name__ == "__main__":
    run_main(main)
