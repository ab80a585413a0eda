"""Reference implementations of the attention kernels, in NumPy and CuPy."""
