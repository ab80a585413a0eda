"""Train a GPT on text: `tricycle train` as a script, for use without an installation.

Without arguments, train for about ten minutes on the source code of Python's standard library, without network access,
and print the command that generates text with the result. --help-all lists every setting.
"""

from __future__ import annotations

import sys

from tricycle_cli.flags import one_line_errors
from tricycle_cli.train import main

if __name__ == "__main__":
    with one_line_errors():
        sys.exit(main())
