"""Parsers of tool calls, and grammars that force them."""

from __future__ import annotations
