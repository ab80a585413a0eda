"""Datasets: corpora for language models (subclasses of `tricycle_datasets.corpus.Corpus`), MNIST and smaller sets."""
