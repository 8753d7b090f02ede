"""Inference engine: scheduling, paged KV cache, rotary embedding and model execution.

The engine does not handle HTTP, text or tokenizers: requests and outputs are token ids. Importing this package, `interface`,
`errors`, `rotary.rope_scaling` or `client` does not import torch, so the API process stays light.
"""
