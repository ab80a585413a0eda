"""Questions, each with the program that answers it and a table of what came out."""
