"""Picks a backend for each operation."""

from __future__ import annotations

from windlass.kernels.batched import paged_attention
from windlass.kernels.reference import gated_activation, linear, rms_norm, rotate_and_append

__all__ = ["gated_activation", "linear", "paged_attention", "rms_norm", "rotate_and_append"]
