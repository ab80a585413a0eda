"""Sequence models besides GPT: recurrent and convolutional layers, encoder-decoders, text encoders, autoencoders."""
