"""From dates as people write them to ISO: what attention gives an encoder-decoder, and where it looks."""
