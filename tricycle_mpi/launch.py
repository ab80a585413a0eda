"""Whether this process was started alone, as its environment says. Nothing of MPI is imported for that."""

from __future__ import annotations

import os
from typing import NamedTuple

# How launchers tell a process its number and how many there are: Open MPI, MPICH and Intel MPI (Hydra), Slurm's srun.
VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)


class Launched(NamedTuple):
    """What a launcher says: the number of this process, and how many it started."""

    rank: int
    size: int


def launched() -> Launched:
    """Who this process is among those that a launcher started together; (0, 1) where none did."""
    for rank, size in VARIABLES:
        numbers = os.environ.get(rank, ""), os.environ.get(size, "")
        if all(number.isdecimal() for number in numbers) and int(numbers[1]) > 1:
            return Launched(*map(int, numbers))
    return Launched(0, 1)
