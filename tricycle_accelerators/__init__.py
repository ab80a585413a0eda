"""Faster kernel implementations with the names of the reference functions in `tricycle.kernels`.

`cpu/` is for NumPy arrays and needs nothing else; `compiled/` (Numba), `onednn/` and `cuda/` need other packages, and
are used where these are installed and the machine can use them. Files of one name in these folders implement the same
functions. `registry.py` registers all of them: the entry points in pyproject.toml name its two functions, which
`tricycle.kernels` calls when the first array of a library comes. Importing this loads nothing.
"""
