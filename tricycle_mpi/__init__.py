"""Training in several processes, on one machine or many: `mpiexec` or Slurm starts them, and MPI connects them."""
