"""Atomic file writes, folder locks, safetensors headers, and the amount of free memory."""
