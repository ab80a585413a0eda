"""Generate text with a trained model: `tricycle generate` as a script, for use without an installation."""

from __future__ import annotations

from tricycle_cli.flags import run_main
from tricycle_cli.generate import main

if __name__ == "__main__":
    run_main(main)
