"""The `windlass` command."""

from __future__ import annotations
