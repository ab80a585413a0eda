"""Fine-tune SmolLM2-135M-Instruct on three tasks, with LoRA and with all weights, on a laptop.

    python -m experiments.finetuning                         all tasks with both methods, sums with three seeds
    python -m experiments.finetuning --quick                 within three minutes: sums by LoRA, twenty updates
    python -m experiments.finetuning --tasks sums --seeds 1  one of them

Each training is a run of `tricycle finetune`, whose command is printed. What is finished lies in the output folder and
is not done again when the command is given again; a training that was stopped goes on.
"""

from experiments.finetuning import report
from experiments.finetuning.study import QUICK, Settings, check, measure
from experiments.shared.program import Outcome, run_study
from tricycle_cli.flags import run_main


def study(settings: Settings) -> Outcome:
    """Fine-tune and measure, write JSON, finetuning.png and samples.html; return (Markdown tables, file names)."""
    results = measure(settings)
    report.plot(results, settings.output / "finetuning.png")
    report.write_page(results, settings.output / "samples.html")
    return report.tables(results), ["results.json", "finetuning.png", "samples.html"]


def main() -> int:
    """Parse sys.argv, run or resume the study, print its tables, and return 0; ValueError for invalid settings."""
    return run_study(Settings, study, __doc__, QUICK, check)


if __name__ == "__main__":
    run_main(main)
