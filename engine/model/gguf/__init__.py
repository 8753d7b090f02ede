"""Reads GGUF files, the format of llama.cpp: what they say of a model, in the names of Hugging Face. Imports no torch."""
