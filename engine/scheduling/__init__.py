"""Scheduling: which tokens of which sequences each step computes."""
