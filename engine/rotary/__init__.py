"""Rotary scaling: what users write, the frequencies that follow, and the tables of a step."""
