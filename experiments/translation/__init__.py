"""Machine translation with and without attention: what a look back at the source is worth, in BLEU."""
