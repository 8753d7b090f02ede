"""Memory layouts of the KV cache and of weights."""
