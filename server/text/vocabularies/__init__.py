"""Vocabularies in files other than tokenizer.json."""

from __future__ import annotations
