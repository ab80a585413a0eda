"""Measure the effect of each part of the ten-minute recipe: trainings with equal CPU time, one change each.

    python -m experiments.ten_minutes                          everything that the table of variants has
    python -m experiments.ten_minutes --variants adamw gelu    these alone, beside the recipe
    python -m experiments.ten_minutes --quick                  within three minutes
    python -m experiments.ten_minutes --report                 the table and the chart of what is finished

--minutes is the processor time of each training, with one thread. The other flags of the recipe change it for all. What
is finished lies in the output folder and is not done again when the command is given again.
"""

from dataclasses import replace

from experiments.shared.program import Outcome, run_study
from experiments.ten_minutes import report
from experiments.ten_minutes.study import Settings, check, measure, preset
from tricycle_cli.flags import run_main


def study(settings: Settings) -> Outcome:
    """Run missing trials (none if `settings.report`), plot; return (tables, file names); ValueError if none."""
    if not settings.report:
        measure(settings)
    folder = settings.output
    tables = report.tables(folder)
    if not tables:
        raise ValueError(f"{folder}: expected results to report on, found none")
    if report.losses(trials := report.trials_in(folder)):
        report.plot(trials, folder / "ablations.png")
    return tables, sorted(path.name for path in folder.iterdir() if path.is_file())


def main() -> int:
    """Run the study with the flags of `sys.argv`, whose defaults are the preset's, and return 0."""
    quick = {"variants": ("plain", "adamw", "gelu", "cosine"), "batches": 20, "config": replace(preset(), minutes=0.25)}
    return run_study(Settings, study, __doc__, quick, check, Settings(config=preset()))


if __name__ == "__main__":
    run_main(main)
