"""Evaluate block softmax with learned scales in a frozen GPT.

    python -m experiments.learned_statistics                  train a GPT, and measure it with block softmax
    python -m experiments.learned_statistics --quick          a smaller model, within three minutes
    python -m experiments.learned_statistics --model RUN      measure the model of a run folder or checkpoint
    python -m experiments.learned_statistics --model smollm2  measure a pretrained model (see `pretrained.py`): SmolLM2,
                                                              a folder in Hugging Face's format or a GGUF file

Finished results are stored in the output folder, and are not computed again.
"""

import sys

from tqdm import tqdm

from experiments.learned_statistics import pretrained, report
from experiments.learned_statistics.blocks import Job, ResultRows, VariantEvaluator, attention_of
from experiments.learned_statistics.study import (
    FREE,
    QUICK,
    SEEN_WINDOWS,
    Settings,
    all_rows,
    check,
    job_of,
    load_frozen_model,
    map_statistics,
    measure,
    new_evaluator,
)
from experiments.shared.program import Outcome, run_study
from tricycle_cli.flags import run_main


def main() -> int:
    """Parse sys.argv, run the study (with a pretrained --model that of `pretrained.py`), and return 0."""
    if pretrained.names_pretrained_model(sys.argv[1:]):
        return pretrained.main()
    return run_study(Settings, study, __doc__, QUICK, check)


def study(settings: Settings) -> Outcome:
    """Run or resume the study, write files to `settings.output`, and return (tables by title, file names)."""
    record = ResultRows(settings, FREE, rows=[], attention={})
    files: list[str] = []
    rows = []
    for number in range(settings.models):
        frozen, held_out = load_frozen_model(settings, number)
        evaluator = new_evaluator(frozen, number, settings)
        for row in tqdm(all_rows(settings), desc=f"model {number}", unit="row", dynamic_ncols=True):
            arguments = {"model": number, **row}
            found = record.row(arguments)
            rows.append(found or record.add(arguments, measure(evaluator, job_of(settings, **row), held_out, settings)))
        files = files or show(evaluator, record, settings)
    return report.tables(rows, record["attention"]), ["results.json", *files]


def show(evaluator: VariantEvaluator, record: ResultRows, settings: Settings) -> list[str]:
    """Measure and draw attention with full and block softmax on a few texts; update `record`, return file names."""
    frozen, folder, few = evaluator.frozen, settings.output, min(settings.blocks)
    texts = frozen.rows("", "test", SEEN_WINDOWS)[:, :-1]
    evaluator.prepare(Job("whole"))
    full = attention_of(frozen.model, texts)
    attention, drawn = {"whole": map_statistics(full, full)}, {report.LABELS["whole"]: full}
    for n in settings.blocks:
        for kind, name in report.SHOWN.items():
            evaluator.prepare(job_of(settings, kind, n))
            maps = attention_of(frozen.model, texts)
            label = f"{n} blocks, {name}"
            attention[label] = map_statistics(maps, full)
            if n == few and kind in report.DRAWN:
                drawn[label] = maps
    record["attention"] = attention
    record.save()
    first_text = {label: {layer: weights[0] for layer, weights in maps.items()} for label, maps in drawn.items()}
    tokens = [frozen.tokeniser.decode([token]) for token in texts[0].tolist()]
    files = report.draw_maps(first_text, attention[f"{few} blocks, learned"]["distance"], tokens, folder)
    report.plot_spikiness(attention, settings.blocks, folder / "spikiness.png")
    learned = [evaluator.scales(job_of(settings, "learned", few, seed))[0] for seed in range(settings.seeds)]
    report.plot_scales(learned, evaluator.scales(job_of(settings, "measured", few))[0], folder / "scales.png")
    return [*files, "spikiness.png", "scales.png"]


if __name__ == "__main__":
    run_main(main)
