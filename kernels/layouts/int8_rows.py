"""How int8 codes of latent rows lie in a page: token by token, with a scale for every 32 numbers.

Codes [num_blocks, P, Hkv, D], scales [num_blocks, P, Hkv, ceil(D / 32)] float32. A row is key and value at once and meets every
head, so it is turned into floats once for all of them: an order that products of bytes could read would gain nothing. What is
rotated and what is latent differ in size. Groups of 32 keep them apart wherever the rotated dims fill groups, as in every known
model.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32


def num_groups(dim: int) -> int:
    """The scales of a row of `dim` numbers."""
    return -(-dim // GROUP)


def widened(codes: Tensor, scales: Tensor) -> Tensor:
    """What codes [..., D] and their scales [..., ceil(D / 32)] mean, float32 [..., D]."""
    return codes.to(torch.float32) * scales.repeat_interleave(GROUP, dim=-1)[..., : codes.shape[-1]]
