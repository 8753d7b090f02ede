"""Separates what a model thinks from what it answers: one format a model family, found by the chat template or named."""
