"""Fine-tuning on a laptop: SmolLM2-135M-Instruct is taught three things, by LoRA and with all its weights.

    python -m experiments.finetuning                         every task in both ways, sums three times each
    python -m experiments.finetuning --quick                 within three minutes: sums by LoRA, twenty updates
    python -m experiments.finetuning --tasks sums --seeds 1  one of them

Each training is a run of `tricycle finetune`, whose command is printed. What is finished lies in the output folder and
is not done again when the command is given again; a training that was stopped goes on.
"""

from __future__ import annotations

import sys
from typing import Any

from experiments.finetuning import page, report
from experiments.finetuning.study import METHODS, Settings, measure
from experiments.finetuning.tasks import TASKS
from experiments.settings import at_least
from tricycle_cli.flags import parse, run_main

QUICK: dict[str, Any] = {"tasks": ("sums",), "methods": ("lora",), "seeds": 1, "updates": 20, "tested": 30}


def main() -> int:
    default = Settings(**(QUICK if "--quick" in sys.argv[1:] else {}))  # other flags start from its values
    settings = parse(Settings, default, description=__doc__ or "")
    check(settings)
    results = measure(settings)
    folder = settings.output
    report.plot(results, folder / "finetuning.png")
    page.write(results, folder / "samples.html")
    for title, table in report.tables(results).items():
        print(f"\n{title}\n\n{table}")
    print(f"\n{folder}: results.json, finetuning.png, samples.html")
    return 0


def check(settings: Settings) -> None:
    """
    Raises:
        ValueError: settings with which nothing could be measured.
    """
    at_least(settings, seeds=1, updates=0, batch_size=1, context_window=128, tested=1)
    for name, known in (("tasks", tuple(TASKS)), ("methods", METHODS), ("precision", ("bfloat16", "float32"))):
        value = getattr(settings, name)
        values = (value,) if isinstance(value, str) else value
        if not values or set(values) - set(known):
            raise ValueError(f"expected --{name} among {', '.join(known)}, got {', '.join(values) or 'none'}")


if __name__ == "__main__":
    run_main(main)
