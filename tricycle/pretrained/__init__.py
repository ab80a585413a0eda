"""Other people's models: their files, tokenisers and settings."""
