"""Compare softmax variants on max retrieval: trained on 5 to 16 items, tested on up to 4,096.

    python -m experiments.max_retrieval             three trainings as in seed 001's notebook, all measured
    python -m experiments.max_retrieval --quick     half a minute
    python -m experiments.max_retrieval --paper     the longer training of Velickovic et al. 2024
    python -m experiments.max_retrieval --model smollm2    the same question to a language model (see pretrained.py)

Where the values come from. Batches of 128, 5 to 16 items, width 128, GeLU, Adam at 1e-3 and an L2 term of 1e-3: the
notebook, which took them from appendix A.4 of the paper. 5,000 steps: the notebook. --paper: 100,000 steps, which is
what our notes say of that appendix, not at hand itself; and since the notebook names "no adaptive lr" among its
deviations, a learning rate that falls: half a cosine down to 0 is our reading.
"""

import sys
import time
from typing import Any

from experiments.max_retrieval import report
from experiments.max_retrieval.study import Settings, check, measure, top_weights, train_and_fit
from experiments.shared.program import Outcome, run_study
from experiments.shared.results import Runs, save
from tricycle.softmaxes import AdaptiveSoftmax
from tricycle_cli.flags import run_main

QUICK: dict[str, Any] = {"steps": 2000, "seeds": 1, "samples": 32, "fit_rows": 96}
PAPER = Settings(steps=100_000, decay=True)
PAINTED = ("plain", "adaptive", "fit to errors")


def main() -> int:
    """Run the study that `sys.argv` asks for (--model: the pretrained one); return 0, or raise ValueError."""
    words = sys.argv[1:]
    if any(word.partition("=")[0] == "--model" for word in words):
        from experiments.max_retrieval import pretrained  # here, for it needs more than this experiment does

        return pretrained.main()
    if {"--quick", "--paper"} <= set(words):
        raise ValueError("expected --quick or --paper, got both")
    return run_study(Settings, study, __doc__, QUICK, check, PAPER if "--paper" in words else None)


def study(settings: Settings) -> Outcome:
    """Train, fit and measure per seed, write results and plots; return (Markdown tables by title, file names)."""
    runs: Runs = []
    painted = None
    for seed in range(settings.seeds):
        started = time.perf_counter()
        model, softmaxes, loss, seconds = train_and_fit(settings, seed)
        painted = painted or top_weights(model, {name: softmaxes[name] for name in PAINTED}, settings)
        fits = {name: one.coefficients for name, one in softmaxes.items() if isinstance(one, AdaptiveSoftmax)}
        measured = measure(model, softmaxes, settings, seed)
        took = {"seconds_of_training": round(seconds, 1), "seconds": round(time.perf_counter() - started, 1)}
        runs.append({"seed": seed, **took, "loss_at_the_end": loss, "coefficients": fits, **measured})
        print(f"\nseed {seed}: {seconds:.0f} s of training, {took['seconds']:.0f} s in all")
        for name, coefficients in fits.items():
            print(f"  {name}: {', '.join(f'{c:.3f}' for c in coefficients)}")
    folder = settings.output
    save(folder / "results.json", settings, sizes=settings.sizes, runs=runs)
    report.plot_accuracy(settings.sizes, runs, folder / "accuracy.png")
    report.plot_weights(settings.sizes, painted or {}, folder / "weights.png")
    examples = f"{settings.data_seeds} x {settings.samples} examples"
    title = f"Accuracy in %, {settings.seeds} training seed(s), {examples} for each number of items"
    tables = {
        title: report.accuracy_table(settings.sizes, runs),
        "Cross entropy in nats": report.loss_table(settings.sizes, runs),
    }
    return tables, ["results.json", "accuracy.png", "weights.png"]


if __name__ == "__main__":
    run_main(main)
