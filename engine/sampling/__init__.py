"""From logits to tokens: penalties, draws, log-probabilities, acceptance of proposed tokens."""
