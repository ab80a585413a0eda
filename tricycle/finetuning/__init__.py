"""Fine-tuning of pretrained models: LoRA, packed sequences and preference losses."""
