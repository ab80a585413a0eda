"""What the programs share: command lines, streamed text, pickled models, what a machine offers."""
