"""Second derivatives of small networks: six uses, from the heat equation to Newton's method."""
