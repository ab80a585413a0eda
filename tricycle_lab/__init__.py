"""Model inspection, plots and gradient exercises. The library `tricycle` never imports this package."""
