"""Which features does a sparse autoencoder find in a model of Python's standard library?"""
