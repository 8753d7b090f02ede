"""Metrics, tracing and recording."""
