"""The pictures by which rotary embeddings are explained, of any model or parameters. `kinds.py` lists them."""
