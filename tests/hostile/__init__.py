"""Files from strangers: damaged and hostile ones by seeded mutation, tried in processes that are watched.

From the root of the repository, `PYTHONPATH=tests python -m hostile --seed 0` tries some thousands and prints a table.
"""
