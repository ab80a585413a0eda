"""Does a recurrent autoencoder that saw only normal windows of a series find what is not normal?"""
