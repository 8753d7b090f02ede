"""The model: a declarative spec read from a Hugging Face config, one decoder for every family, and weight loading."""
