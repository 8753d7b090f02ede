"""Families of experts for `tiny_models`, in the form of `tiny_families`."""

from __future__ import annotations

from typing import Any

# Ends of names of parameters and buffers that have more or fewer dimensions than other biases.
BIASES = ("e_score_correction_bias", "expert_bias", "proj_bias")

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 8}),
}
