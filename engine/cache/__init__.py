"""Paged KV cache: block manager, prefix cache, tensors, memory budget, and the disk and host tiers."""
