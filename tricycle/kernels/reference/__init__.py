"""The plain versions: short, right, the same on NumPy and CuPy. Every faster kernel is tested against these.

Shapes: B batch, T queries, S keys, H heads, D head size, C channels, N rows (all leading axes), V vocabulary.
"""
