"""What language is a surname from? A convolution, a recurrent network and a Transformer, and letters they look at."""
