"""Models that several ranks hold together: which part each of them has."""
