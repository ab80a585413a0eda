"""Decoders with several residual streams: AltUp, LAuReL, per-layer inputs and shared keys, as in Gemma 3n."""
