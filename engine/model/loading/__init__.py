"""Loading a model: checkpoint files, preflight checks, weights."""

from __future__ import annotations
