"""Parsers of tool calls, and grammars that force them."""
