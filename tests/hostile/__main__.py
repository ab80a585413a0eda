"""Load some thousands of damaged and hostile files, and print a table of the outcomes."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from pathlib import Path

from hostile.corpus import run_cases, table, write_valid_files
from hostile.kinds import KINDS


def main() -> int:
    parser = argparse.ArgumentParser(prog="hostile", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=150, help="cases of each kind")
    parser.add_argument("--kind", default="", choices=["", *(kind.name for kind in KINDS)], help="only this kind")
    parser.add_argument("--one", type=int, help="only the case of this number, with its messages")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        write_valid_files(root / "good")
        results = run_cases(root, arguments.seed, arguments.cases, arguments.kind, arguments.one)
        rows = []
        with contextlib.suppress(KeyboardInterrupt):  # print the table of the finished cases
            for case, outcome in results:
                rows.append((case, outcome))
                if arguments.one is not None or not outcome.is_acceptable:
                    print(f"{case}: {outcome.kind}: {outcome.message} ({outcome.seconds:.1f} s)", file=sys.stderr)
    print(table(rows))
    return 0 if all(outcome.is_acceptable for _, outcome in rows) else 1


if __name__ == "__main__":
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TRICYCLE_NUM_THREADS"), "1"))
    raise SystemExit(main())
