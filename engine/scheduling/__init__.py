"""Which tokens of which sequences each step computes."""
