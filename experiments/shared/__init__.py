"""Code that several studies share: command lines, results, tables, figures, pages, training, models."""
