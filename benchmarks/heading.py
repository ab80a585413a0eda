"""The first words of a benchmark's output: date and processor."""

from __future__ import annotations

from datetime import date


def date_and_processor() -> str:
    """Return today's date and the processor's name, logical cores and instruction sets, as text for a heading."""
    # Imported here, because worker processes of other libraries import the benchmark without Tricycle.
    from tricycle_cli.machine import describe_processor, read_cpuinfo

    return f"{date.today()}, {describe_processor(read_cpuinfo())}"
