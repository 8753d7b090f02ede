"""GGUF files: header, metadata as config.json, tensor names of a Hugging Face checkpoint."""
