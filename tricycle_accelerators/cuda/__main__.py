"""`python -m tricycle_accelerators.cuda`: compile every kernel, without a GPU, and print what each takes."""

import sys

from tricycle_accelerators.cuda.compile import compile_all, format_table, unavailable_reason


def main() -> int:
    """Compile all CUDA kernels, print their registers, return 0; print why not, return 1, without headers or NVRTC."""
    reason = unavailable_reason()
    print(reason if reason else format_table(compile_all()))
    return 1 if reason else 0


if __name__ == "__main__":
    sys.exit(main())
