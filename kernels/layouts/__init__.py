"""Memory layouts of the KV cache and of weights."""

from __future__ import annotations
