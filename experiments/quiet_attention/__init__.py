"""Study: does softmax1 prevent outliers in GPT weights and activations? (Miller 2023, "Attention is off by one")."""
