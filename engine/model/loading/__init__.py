"""Loading a model: checkpoint files, preflight checks, weights."""
