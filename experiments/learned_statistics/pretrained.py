"""Evaluate block softmax with learned scales in a pretrained model.

    python -m experiments.learned_statistics --model smollm2           the complete study
    python -m experiments.learned_statistics --model smollm2 --quick   within three minutes
    python -m experiments.learned_statistics --model FOLDER            a decoder in Hugging Face's format, such as OPT

Finished results are stored in the output folder, and are not computed again.
"""

import base64
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from experiments.learned_statistics import pretrained_report
from experiments.learned_statistics.blocks import STARTS, ResultRows, digest, job_of
from experiments.learned_statistics.pretrained_report import Results
from experiments.learned_statistics.pretrained_study import (
    FREE,
    PretrainedEvaluator,
    PretrainedSettings,
    all_jobs,
    compare,
    generation_jobs,
    learned_job,
    mean_job,
)
from experiments.shared.language_models import TEXTS
from experiments.shared.pages import write_page
from experiments.shared.program import Outcome, check_choices, check_minimum, run_study, words
from tricycle.pretrained.hf_folder import INDEX, WEIGHTS

PAGE = Path(__file__).with_name("pretrained_page.html")
LEAST, MOST = -0.25, 1.25  # scales that are shown; others count as these
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


def names_pretrained_model(line: Sequence[str]) -> bool:
    """Return whether --model of a command line is "smollm2", a GGUF file, or a folder or file of safetensors."""
    names = [after for word, after in itertools.pairwise(line) if word == "--model"]
    names += [word.partition("=")[2] for word in line if word.startswith("--model=")]
    if not names:
        return False
    path = Path(names[-1])
    is_folder = any((path / name).is_file() for name in (WEIGHTS, INDEX))
    return is_folder or path.suffix == ".gguf" or path.name in (WEIGHTS, INDEX) or names[-1] == "smollm2"


def main() -> int:
    """Parse sys.argv, run the study, print its tables, and return 0; ValueError for invalid settings."""
    return run_study(PretrainedSettings, study, __doc__, QUICK, check)


def study(settings: PretrainedSettings) -> Outcome:
    """Run or resume the study, write files to `settings.output`, and return (tables by title, file names)."""
    record = ResultRows(settings, FREE, rows=[])
    evaluator = PretrainedEvaluator(settings)
    for job in tqdm(all_jobs(settings), desc=settings.model, unit="row", dynamic_ncols=True):
        if record.row(job._asdict()) is None:
            record.add(job._asdict(), evaluator.measure(job))
    complete_record(evaluator, record)
    return show(evaluator, record)


def check(settings: PretrainedSettings) -> None:
    """Raise ValueError for a count below its minimum, an unknown text, rates <= 0, or blocks that do not fit."""
    least = {"seeds": 1, "steps": 1, "batch_size": 1, "test_windows": 1, "measured_windows": 1, "prompts": 1}
    check_minimum(settings, **least, n_written=1, window=4)
    check_choices(settings, text=TEXTS)
    if not min(settings.rate, *settings.other_rates, settings.rate) > 0:
        raise ValueError(f"expected rates above 0, got {settings.rate} and {settings.other_rates}")
    if min(settings.blocks, default=0) < 2 or settings.middle not in settings.blocks:
        got = f"{words(settings.blocks)} and {settings.middle}"
        raise ValueError(f"expected --blocks of 2 or more with --middle among them, got {got}")
    if max(settings.blocks) > settings.window:
        raise ValueError(f"expected no more blocks than tokens in a window, got {settings.blocks}")
    if settings.n_written > settings.window // 4:
        raise ValueError(f"expected --n-written of at most a quarter of --window, got {settings.n_written}")


def complete_record(evaluator: PretrainedEvaluator, record: ResultRows) -> None:
    """Add "explained", "written", "prompts" and "unchanged" to the record, if missing, and save it."""
    tokeniser = evaluator.frozen.tokeniser
    if "explained" not in record:
        record["explained"] = evaluator.explained()
        record.save()
    written = record.setdefault("written", [])
    done = {job_of(variant) for variant in written}
    jobs = [job for job in generation_jobs(evaluator.settings) if job not in done]
    for job in tqdm(jobs, desc="writing", unit="variant", dynamic_ncols=True):
        written.append(evaluator.write(job))
        record.save()
    record["written"] = [{**variant, **compared} for variant, compared in zip(written, compare(written, tokeniser))]
    record["prompts"] = [tokeniser.decode(prompt) for prompt in evaluator.prompts]
    record["unchanged"] = digest(evaluator.frozen.model) == evaluator.digest
    record.save()


def show(evaluator: PretrainedEvaluator, record: ResultRows) -> Outcome:
    """Draw figures, write the page, print whether weights changed; return Markdown tables by title, all file names."""
    settings = evaluator.settings
    results, folder = Results(record, settings), settings.output
    scales = {"mean shares": evaluator.scales(mean_job(settings))[0]}
    scales |= {
        pretrained_report.start_label(start): evaluator.scales(learned_job(settings, start=start))[0]
        for start in STARTS
    }
    pretrained_report.plot(results, scales, folder)
    write_page(PAGE, folder / "page.html", page_data(record, scales))
    print("the model's own weights are unchanged" if record["unchanged"] else "THE MODEL'S OWN WEIGHTS CHANGED")
    pictures = [f"{name}.png" for name in pretrained_report.PICTURES]
    return pretrained_report.tables(results), ["results.json", *pictures, "page.html"]


def page_data(results: Mapping[str, Any], scales: Mapping[str, Sequence[np.ndarray]]) -> dict[str, Any]:
    """Return the page's JSON data: the model, prompts and generated texts with block softmax, and the scales.

    Args:
        results: of which "prompts" and "written" are shown.
        scales: of each layer, by the variant's name, (n, W).
    """
    written = [
        {
            "name": pretrained_report.job_label(job_of(variant)),
            **{key: variant[key] for key in ("texts", "same", "repeated")},
        }
        for variant in results["written"]
    ]
    n, window = next(iter(scales.values()))[0].shape
    return {
        "model": results["settings"]["model"],
        "prompts": results["prompts"],
        "written": written,
        "blocks": n,
        "window": window,
        "least": LEAST,
        "most": MOST,
        "scales": [{"name": name, "values": _packed(np.stack(list(arrays)))} for name, arrays in scales.items()],
    }


def _packed(values: np.ndarray) -> str:
    """Return values (L, n, W), clipped to LEAST to MOST, as base64 text of a byte each, 0 to 255."""
    codes = np.rint(255 * (values.clip(LEAST, MOST) - LEAST) / (MOST - LEAST)).astype(np.uint8)
    return base64.b64encode(codes.tobytes()).decode()
