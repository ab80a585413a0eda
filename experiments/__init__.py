"""Studies, each with a program that runs it and a README with its results."""
