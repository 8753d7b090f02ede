"""From files to weights in memory, and what is refused before that."""
