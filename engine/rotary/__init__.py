"""Rotary scaling: request fields, frequencies, policies and the tables of a step."""
