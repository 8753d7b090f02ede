"""Deployment on a Ray cluster."""

from __future__ import annotations
