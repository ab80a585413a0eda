"""Compare a dense decoder, a mixture, a Mamba-2 hybrid and an encoder-decoder after equal training time.

python -m experiments.model_kinds             two minutes for each of four presets, three seeds; resumes if interrupted
python -m experiments.model_kinds --quick     seconds for each preset, on three modules
python -m experiments.model_kinds --render    write the table of README.md and bits.png from results.json of --output
"""

from experiments.model_kinds import report
from experiments.model_kinds.study import QUICK, Settings, check, run
from experiments.shared.program import Outcome, run_study
from experiments.shared.results import read
from tricycle_cli.flags import run_main


def study(settings: Settings) -> Outcome:
    """Run the study (--render: read its results, write the README), plot it; return (Markdown tables, file names)."""
    results = read(settings.output / "results.json") if settings.render else run(settings)
    tables = report.tables(results)
    report.plot(results, settings.output / "bits.png")
    if settings.render:
        report.write_readme(report.README, results)
    return tables, ["results.json", "bits.png"]


def main() -> int:
    """Parse sys.argv, run the study, print its tables, and return 0; ValueError for invalid settings."""
    return run_study(Settings, study, __doc__, QUICK, check)


if __name__ == "__main__":
    run_main(main)
