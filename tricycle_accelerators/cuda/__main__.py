"""`python -m tricycle_accelerators.cuda`: compile every kernel, without a GPU, and print what each takes."""

import sys

from tricycle_accelerators.cuda.compile import compile_all, problem, table


def main() -> int:
    reason = problem()
    print(reason if reason else table(compile_all()))
    return 1 if reason else 0


if __name__ == "__main__":
    sys.exit(main())
