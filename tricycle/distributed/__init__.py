"""Training with several processes: messages between them, and optimizer state sharded over them."""
