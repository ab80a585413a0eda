"""Faster versions of the functions in `tricycle.kernels`, under the same names.

`cpu.py` is for NumPy arrays and needs nothing else; `onednn*.py` and `cuda/` call other libraries, where they are
installed and the machine can use them. `tricycle.kernels` asks for them when the first array comes that they are for,
and does without where they are not. Importing this loads nothing.
"""
