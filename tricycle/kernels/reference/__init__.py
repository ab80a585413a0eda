"""The plain kernels of attention and of quantized matrices, and the widening of 16-bit floats to 32."""
