"""`python -m tricycle_accelerators.compiled`: compile all loops for this processor, and print what each part takes.

Otherwise loops are compiled at their first use, and again by each process that uses them meanwhile.
"""

from tricycle_accelerators.compiled.compile import compile_all


def main() -> None:
    """Compile all loops, and print the seconds of each part."""
    for name, seconds in compile_all():
        print(f"{name:<28}{seconds:6.1f} s", flush=True)


if __name__ == "__main__":
    main()
