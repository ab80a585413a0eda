"""CNN, RNN and self-attention: the lecture's table measured, and how far back each of them learns to remember."""
