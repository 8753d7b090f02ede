"""Model families, as data: what distinguishes one from the next."""

from __future__ import annotations
