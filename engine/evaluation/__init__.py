"""Runs of a model outside the server: scoring of texts, timing of steps."""
