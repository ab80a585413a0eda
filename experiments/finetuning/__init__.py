"""What fine-tuning a small model does on a laptop: three tasks, LoRA and all weights, and what is forgotten."""
