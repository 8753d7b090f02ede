"""Pydantic models of requests and responses."""
