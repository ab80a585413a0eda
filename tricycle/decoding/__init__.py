"""Decoding methods: batched generation, prompt-lookup decoding, beam search and logits processors.

They extend `tricycle.generate` and `tricycle.sampling`, which generate one token at a time.
"""
