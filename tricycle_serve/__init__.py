"""A model behind the addresses that OpenAI's clients know, for `tricycle serve`."""
