"""Does a sentence praise a film? A convolution, a recurrent network and a Transformer, and the words they look at."""
