"""Vocabularies in files other than tokenizer.json."""
