"""Detect from the environment whether a launcher (`mpiexec`, `srun`) started this process; MPI is not imported."""

from __future__ import annotations

import os
from typing import NamedTuple

# The environment variables with rank and size of Open MPI; of MPICH and Intel MPI (Hydra); of Slurm's srun.
VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)


class LaunchInfo(NamedTuple):
    """The rank of this process, and the number of processes that the launcher started."""

    rank: int
    size: int


def launch_info() -> LaunchInfo:
    """Return the rank and the number of processes according to the launcher; (0, 1) without a launcher."""
    for rank, size in VARIABLES:
        numbers = os.environ.get(rank, ""), os.environ.get(size, "")
        if all(number.isdecimal() for number in numbers) and int(numbers[1]) > 1:
            return LaunchInfo(*map(int, numbers))
    return LaunchInfo(0, 1)
