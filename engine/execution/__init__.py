"""Carries out a planned step: the batch, the decoder's run and its repetition, moves of cached keys."""
