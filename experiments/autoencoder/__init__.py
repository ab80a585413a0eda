"""What does an autoencoder of handwritten digits do better than PCA, and what no better?"""
