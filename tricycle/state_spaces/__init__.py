"""State-space models: Mamba-2, whose layers have a state of constant size in place of keys and values."""
