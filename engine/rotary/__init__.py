"""Rotary scaling: request fields, frequencies, policies and the tables of a step."""

from __future__ import annotations
