"""Attention calls of a decode step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from windlass.kernels import AttentionCall


def decode_call(
    block_tables: Tensor, seq_lens: Tensor, score_scale: Tensor, scale: float, **options: Any
) -> AttentionCall:
    """A call in which every sequence has one new token. options: fields of `AttentionCall` with a default."""
    start = torch.arange(seq_lens.shape[0] + 1, device=seq_lens.device)
    return AttentionCall(block_tables, start, seq_lens, score_scale, scale, **options)
