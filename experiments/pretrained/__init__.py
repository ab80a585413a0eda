"""Models that other people trained, from files of the Python package index, run by Tricycle's own layers."""
