"""The command `tricycle`: a file for each of its parts, and what they share."""
