"""Does attention that learned on few items stay sharp over many? Seed 001, after Velickovic et al. 2024."""
