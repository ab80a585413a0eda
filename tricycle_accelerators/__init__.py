"""Optional accelerators: other libraries, called where they are installed and the machine can use them.

`tricycle.kernels` asks for them when they are needed and does without where they are not. Importing loads nothing.
"""
