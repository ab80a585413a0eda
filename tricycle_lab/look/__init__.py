"""Pages to look inside with: what a model makes of a text, and how gradients go back through a graph."""
