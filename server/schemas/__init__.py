"""Pydantic models of requests and responses."""

from __future__ import annotations
