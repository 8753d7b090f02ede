"""Reads config.json: its values, its names old and new, the pattern of layers, the rotary groups. Knows no single family."""
