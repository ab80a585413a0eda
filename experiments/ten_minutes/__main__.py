"""The ten-minute recipe, and what each of its parts is worth: trainings of the same processor time, one change each.

    python -m experiments.ten_minutes                          everything that the table of variants has
    python -m experiments.ten_minutes --variants adamw gelu    these alone, beside the recipe
    python -m experiments.ten_minutes --quick                  within three minutes
    python -m experiments.ten_minutes --report                 the table and the chart of what is finished

--minutes is the processor time of each training, with one thread. The other flags of the recipe change it for all. What
is finished lies in the output folder and is not done again when the command is given again.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.settings import at_least
from experiments.ten_minutes import report
from experiments.ten_minutes.ablations import configs
from experiments.ten_minutes.study import Settings, measure
from tricycle.configs import PRESETS, GPTConfig
from tricycle_cli.flags import parse, run_main

QUICK: dict[str, Any] = {"variants": ("plain", "adamw", "gelu", "cosine"), "batches": 20}
QUICK_MINUTES = 0.25
PRESET = "laptop"


def main() -> int:
    settings = parse_settings()
    check(settings)
    if not settings.report:
        measure(settings)
    folder = settings.output
    tables = report.tables(folder)
    if not tables:
        raise ValueError(f"{folder}: expected results to report on, found none")
    for title, table in tables.items():
        print(f"\n{title}\n\n{table}")
    if report.losses(trials := report.trials_in(folder)):
        report.plot(trials, folder / "ablations.png")
    print(f"\n{folder}: {', '.join(sorted(path.name for path in folder.iterdir() if path.is_file()))}")
    return 0


def parse_settings() -> Settings:
    """The flags; those of the recipe start from the preset's values, which carry their help."""
    recipe = GPTConfig.from_dict(PRESETS[PRESET]().to_dict())
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--quick", action="store_true")
    quick = first.parse_known_args()[0].quick
    default = Settings(**QUICK, config=replace(recipe, minutes=QUICK_MINUTES)) if quick else Settings(config=recipe)
    settings = parse(Settings, default, description=__doc__ or "")
    files = tuple(str(Path(name).resolve()) for name in settings.files)
    return replace(settings, files=files)


def check(settings: Settings) -> None:
    """
    Raises:
        ValueError: settings with which nothing could be measured.
    """
    at_least(settings, seeds=1, jobs=1, batches=0)
    if settings.config.minutes <= 0:
        raise ValueError(f"expected --minutes above 0, got {settings.config.minutes}")
    if (settings.data == "text") != bool(settings.files):
        raise ValueError(f"expected --files with --data text and only with it, got --data {settings.data}")
    configs(settings.config, settings.variants, settings.also)


if __name__ == "__main__":
    run_main(main)
