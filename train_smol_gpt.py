"""Train a GPT on real text: `tricycle train`, for those who have not installed Tricycle.

Without arguments it trains for about ten minutes on the source code of Python's standard library, needs no
network, and ends with the command that generates from the result. --help-all lists every setting.
"""

from __future__ import annotations

import sys

from tricycle_cli.flags import one_line_errors
from tricycle_cli.train import main

if __name__ == "__main__":
    with one_line_errors():
        sys.exit(main())
