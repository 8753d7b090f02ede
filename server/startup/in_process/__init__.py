"""A model that a Python program holds itself: the app of a server without its sockets, and `LLM` in front of it."""
