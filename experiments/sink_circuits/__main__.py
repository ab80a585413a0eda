"""Train small GPTs with softmax, softmax1 and learned attention sinks, and compare their sinks and circuits.

python -m experiments.sink_circuits            two seeds of each variant
python -m experiments.sink_circuits --quick    one seed, fewer steps
"""

from experiments.shared.program import Outcome, run_study
from experiments.sink_circuits import report
from experiments.sink_circuits.study import QUICK, Settings, check, run
from tricycle_cli.flags import run_main


def study(settings: Settings) -> Outcome:
    """Train and measure; write results.json and circuits.png; return (Markdown tables by title, file names)."""
    runs = run(settings)
    report.plot(runs, settings.output / "circuits.png")
    return report.tables(runs), ["results.json", "circuits.png"]


def main() -> int:
    """Parse sys.argv, run the study, print its tables, and return 0; ValueError for invalid settings."""
    return run_study(Settings, study, __doc__, QUICK, check)


if __name__ == "__main__":
    run_main(main)
