"""Train a GPT on real text: `tricycle train`, for those who have not installed Tricycle.

Without arguments it trains for about ten minutes on the source code of Python's standard library, needs no
network, and ends with the command that generates from the result. --help lists every setting.
"""

from __future__ import annotations

from tricycle_cli.flags import run_main
from tricycle_cli.train import main

if __name__ == "__main__":
    run_main(main)
