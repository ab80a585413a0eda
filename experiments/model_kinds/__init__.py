"""Bits per byte of a dense decoder, a mixture, a Mamba-2 hybrid and an encoder-decoder after equal time."""
