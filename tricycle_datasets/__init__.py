"""Corpora to train on: one module a corpus, each a `tricycle_datasets.corpus.Corpus`."""
