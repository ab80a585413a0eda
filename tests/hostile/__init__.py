"""Damaged and hostile files by seeded mutation, loaded in monitored processes.

In the repository, `PYTHONPATH=tests python -m hostile --seed 0` runs thousands of cases and prints a table.
"""
