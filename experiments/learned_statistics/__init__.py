"""Can the statistics that FlashAttention computes be learned instead? (seed document 002)"""
