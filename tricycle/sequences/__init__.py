"""The sequence models of the lecture: recurrent, convolutional and with attention, and what is built of them."""
