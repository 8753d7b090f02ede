"""Sampling: from logits to tokens, with penalties, grammars, log-probabilities and acceptance of proposed tokens."""
