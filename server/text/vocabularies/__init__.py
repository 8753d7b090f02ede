"""Vocabularies in other files than tokenizer.json, made into one: SentencePiece's, tiktoken's, Mistral's tekken.json."""
