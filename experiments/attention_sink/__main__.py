"""Find where a model makes its attention sink, and what happens without it, by patching and ablation.

python -m experiments.attention_sink            two texts, all layers
python -m experiments.attention_sink --quick    one text, every third layer
"""

from experiments.attention_sink import report
from experiments.attention_sink.study import QUICK, Settings, check, run
from experiments.shared.program import Outcome, run_study
from experiments.shared.results import save
from tricycle_cli.flags import run_main


def study(settings: Settings) -> Outcome:
    """Measure a model, write results.json and sink.png; return (Markdown tables by title, file names)."""
    results = run(settings)
    save(settings.output / "results.json", settings, results=results)
    report.plot(results, settings.output / "sink.png")
    return report.tables(results), ["results.json", "sink.png"]


def main() -> int:
    """Parse sys.argv, run the study, print its tables, and return 0; ValueError for invalid settings."""
    return run_study(Settings, study, __doc__, QUICK, check)


if __name__ == "__main__":
    run_main(main)
