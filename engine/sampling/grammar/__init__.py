"""Holds samples to a grammar: which tokens may come next. llguidance parses; this says for whom, when, and after which tokens."""
