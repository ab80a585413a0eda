"""Files written whole or not at all, file locks, the safetensors format, and how much memory is free."""
