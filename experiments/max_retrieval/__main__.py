"""Max retrieval: attention that learned on 5 to 16 items, measured on up to 4,096, with one softmax after another.

    python -m experiments.max_retrieval             three trainings as in seed 001's notebook, all measured
    python -m experiments.max_retrieval --quick     half a minute
    python -m experiments.max_retrieval --paper     the longer training of Velickovic et al. 2024
    python -m experiments.max_retrieval --model smollm2    the same question to a language model (see real.py)

Where the values come from. Batches of 128, 5 to 16 items, width 128, GeLU, Adam at 1e-3 and an L2 term of 1e-3: the
notebook, which took them from appendix A.4 of the paper. 5,000 steps: the notebook. --paper: 100,000 steps, which is
what our notes say of that appendix, not at hand itself; and since the notebook names "no adaptive lr" among its
deviations, a learning rate that falls: half a cosine down to 0 is our reading.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from experiments.max_retrieval import report
from experiments.max_retrieval.study import Settings, measure, study, top_weights
from experiments.settings import at_least, save
from tricycle.softmaxes import AdaptiveSoftmax
from tricycle_cli.flags import parse, run_main

PRESETS: dict[str, dict[str, Any]] = {
    "--quick": {"steps": 2000, "seeds": 1, "samples": 32, "fit_rows": 96},
    "--paper": {"steps": 100_000, "decay": True},
}
PAINTED = ("plain", "adaptive", "fit to errors")


def main() -> int:
    if any(word.partition("=")[0] == "--model" for word in sys.argv[1:]):
        from experiments.max_retrieval import real  # here, for it needs more than this experiment does

        return real.main(sys.argv[1:])
    named = [flag for flag in PRESETS if flag in sys.argv[1:]]
    if len(named) > 1:
        raise ValueError("expected --quick or --paper, got both")
    default = Settings(**(PRESETS[named[0]] if named else {}))  # other flags start from its values
    settings = parse(Settings, default, description=__doc__ or "")
    check(settings)
    runs, painted = [], None
    for seed in range(settings.seeds):
        started = time.perf_counter()
        model, softmaxes, loss, seconds = study(settings, seed)
        painted = painted or top_weights(model, {name: softmaxes[name] for name in PAINTED}, settings)
        fits = {
            name: softmax.coefficients for name, softmax in softmaxes.items() if isinstance(softmax, AdaptiveSoftmax)
        }
        measured = measure(model, softmaxes, settings, seed)
        took = {"seconds_of_training": round(seconds, 1), "seconds": round(time.perf_counter() - started, 1)}
        runs.append({"seed": seed, **took, "loss_at_the_end": loss, "coefficients": fits, **measured})
    save(settings.output / "results.json", settings, sizes=settings.sizes, runs=runs)
    report.plot_accuracy(settings.sizes, runs, settings.output / "accuracy.png")
    report.plot_weights(settings.sizes, painted or {}, settings.output / "weights.png")
    examples = f"{settings.data_seeds} x {settings.samples} examples"
    print(f"\nAccuracy in %, {settings.seeds} training seed(s), {examples} for each number of items\n")
    print(report.accuracy_table(settings.sizes, runs))
    print("\nCross entropy in nats\n")
    print(report.loss_table(settings.sizes, runs))
    for run in runs:
        print(f"\nseed {run['seed']}: {run['seconds_of_training']:.0f} s of training, {run['seconds']:.0f} s in all")
        for name, coefficients in run["coefficients"].items():
            print(f"  {name}: {', '.join(f'{c:.3f}' for c in coefficients)}")
    print(f"\n{settings.output / 'results.json'}, accuracy.png, weights.png")
    return 0


def check(settings: Settings) -> None:
    """
    Raises:
        ValueError: settings with which nothing could be measured.
    """
    at_least(settings, steps=1, batch_size=1, width=1, seeds=1, data_seeds=1, samples=1, fit_rows=1, largest=16)


if __name__ == "__main__":
    run_main(main)
