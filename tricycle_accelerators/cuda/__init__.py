"""CUDA kernels for CuPy arrays, under the names of `tricycle.kernels.reference`. Importing loads nothing."""
