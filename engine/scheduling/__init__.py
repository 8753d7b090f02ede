"""Scheduling: which tokens of which sequences each step computes."""

from __future__ import annotations
