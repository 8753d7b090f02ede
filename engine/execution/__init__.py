"""Carries out a planned step: the batch, the decoder's run and its repetition, re-rotation of cached keys."""
