"""Plain kernels of attention and of quantized matrices, and what all plain kernels make of floats of 16 bits."""
