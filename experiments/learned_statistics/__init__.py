"""Study: learn the softmax statistics that FlashAttention computes (seed document 002)."""
