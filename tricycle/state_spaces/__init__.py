"""Layers with a state of constant size in place of keys and values: Mamba-2 and Gated DeltaNet."""
