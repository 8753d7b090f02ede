"""Metrics, tracing and recording."""

from __future__ import annotations
