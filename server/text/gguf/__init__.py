"""Makes the tokenizer of a model from what its GGUF file says."""
