"""From logits to tokens: penalties, masks, draws, log-probabilities, acceptance of proposed tokens."""
