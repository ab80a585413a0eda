"""Decoding beyond one text at a time: batches, prompt-lookup decoding, beam search, penalties on repetition.

All of it extends `tricycle.generate` and `tricycle.sampling`, which define how one token is generated.
"""
