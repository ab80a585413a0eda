"""The best ten minutes on two cores: what each part of the recipe is worth, and what PyTorch does with it."""
