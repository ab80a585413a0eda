"""Find features of a small GPT of source code with sparse autoencoders, and compare them with simple rules.

python -m experiments.code_features            a model of 1,500 steps, 512 features
python -m experiments.code_features --quick    a smaller model, 128 features
"""

from experiments.code_features import report
from experiments.code_features.study import QUICK, Settings, check, run
from experiments.shared.program import Outcome, run_study
from experiments.shared.results import save
from tricycle_cli.flags import run_main


def study(settings: Settings) -> Outcome:
    """Find features, write results.json and features.png; return (Markdown tables by title, file names)."""
    results = run(settings)
    save(settings.output / "results.json", settings, results=results)
    report.plot(results, settings.output / "features.png")
    return report.tables(results), ["results.json", "features.png"]


def main() -> int:
    """Parse sys.argv, run the study, print its tables, and return 0; ValueError for invalid settings."""
    return run_study(Settings, study, __doc__, QUICK, check)


if __name__ == "__main__":
    run_main(main)
