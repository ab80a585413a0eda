"""Does softmax1 keep a GPT's weights and activations free of outliers? (Miller 2023, "Attention is off by one")"""
