"""Plain torch operations: oracle, fallback, and row-independent forms."""

from __future__ import annotations
