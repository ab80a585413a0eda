"""Faster kernel implementations with the names of the reference functions in `tricycle.kernels`.

`cpu/` is for NumPy arrays and needs nothing else; `onednn/` and `cuda/` call other libraries, where they are installed
and the machine can use them. A file of one name in each has the same functions, so that the versions of
one function stand side by side. `cpu` and `cuda` each have a function `register`, which `tricycle.kernels` finds by the
entry points in pyproject.toml and calls when the first array comes that it is for. Importing this loads nothing.
"""
