"""Second derivatives of small networks: the heat equation, and the sharpness of the loss."""
