"""Runs of a model outside the scheduler, one text at a time: scores by any policy, and what a layer attends to."""
