"""Data-parallel training over MPI, on one machine or several, in processes that `mpiexec` or Slurm has started."""
