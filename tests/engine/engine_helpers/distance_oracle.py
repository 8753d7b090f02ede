"""A transformers model whose attention uses a table of distances: scores of unrotated queries and keys, in float64.

It has no periodic positions, key ranges or rotated query copies: the score of query i and key j follows from the
distance that a table gives for the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from helpers.loaded import loaded
from transformers import AttentionInterface

Distance = Callable[[int, int], float]

_CURRENT: list[DistanceOracle] = []


def dual_chunk(size: int, reach: int) -> Distance:
    """Dual chunk attention (arXiv 2402.17463) for chunks of s = size and a model trained on distances below c = reach."""

    def distance(i: int, j: int) -> int:
        back = i // size - j // size
        if back == 0:
            return i - j
        if back == 1:
            return min(i % size + size, reach - 1) - j % size
        return reach - 1 - j % size

    return distance


def self_extend(group: int, near: int) -> Distance:
    """Self-Extend (arXiv 2401.01325) with G = group and the neighbour window w = near."""
    return lambda i, j: i - j if i - j < near else i // group + near - near // group - j // group


def rerope(near: int, factor: float = math.inf) -> Distance:
    """ReRoPE, or its leaky form with a factor."""
    return lambda i, j: i - j if i - j < near else near + (i - j - near) / factor


def log_n(length: int) -> Callable[[int], float]:
    return lambda i: max(1.0, math.log(i + 1) / math.log(length))


class DistanceOracle:
    """inv_freq: radians per step of distance, one per pair. rotary_scale: the attention factor. interleaved: how the
    checkpoint numbers pairs. rotated_last: the rotated dims of a head are its last ones."""

    def __init__(
        self,
        directory: Path,
        inv_freq: Sequence[float],
        *,
        distance: Distance = lambda i, j: i - j,
        growth: Callable[[int], float] = lambda i: 1.0,
        rotary_scale: float = 1.0,
        interleaved: bool = False,
        rotated_last: bool = False,
    ) -> None:
        AttentionInterface.register("distances", _attend)
        self.model = loaded(directory, "distances", torch.float64)
        self.model.model.rotary_emb.forward = self._no_rotation
        self.inv_freq = torch.tensor(inv_freq, dtype=torch.float64)
        self.distance, self.growth = distance, growth
        self.rotary_scale, self.interleaved, self.rotated_last = rotary_scale, interleaved, rotated_last
        self.table = torch.zeros(0, 0, dtype=torch.float64)
        self.grown = torch.zeros(0, dtype=torch.float64)

    def _no_rotation(self, x: torch.Tensor, position_ids: torch.Tensor, *rest: Any, **named: Any) -> Any:
        shape = 1, position_ids.shape[1], 2 * len(self.inv_freq)
        return torch.ones(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the logits of a text, [T, V]."""
        _CURRENT[:] = [self]
        count = len(tokens)
        self.table = torch.tensor(
            [[self.distance(i, j) if j <= i else 0 for j in range(count)] for i in range(count)], dtype=torch.float64
        )
        self.grown = torch.tensor([self.growth(i) for i in range(count)], dtype=torch.float64)
        out: torch.Tensor = self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return out

    def scores(self, q: torch.Tensor, k: torch.Tensor, *, rotates: bool) -> torch.Tensor:
        """q, k [H, T, D] unrotated -> [H, T, T]."""
        if not rotates:
            return q @ k.transpose(-1, -2)
        dims = 2 * len(self.inv_freq)
        if self.rotated_last:
            q, k = q.roll(dims, -1), k.roll(dims, -1)
        a, b = self._pairs(q[..., :dims]), self._pairs(k[..., :dims])  # [H, T, P] complex
        total = q[..., dims:] @ k[..., dims:].transpose(-1, -2)
        for p, w in enumerate(self.inv_freq):
            product = a[:, :, None, p] * b[:, None, :, p].conj()  # [H, T, T]
            total = total + self.rotary_scale**2 * (product * torch.exp(1j * w * self.table)).real
        return total

    def _pairs(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        if self.interleaved:
            return torch.complex(x[..., 0::2], x[..., 1::2])
        return torch.complex(x[..., :half], x[..., half:])


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float, **rest: Any
) -> tuple[torch.Tensor, None]:
    """query [1, Hq, T, D]; key, value [1, Hkv, T, D], neither rotated."""
    (oracle,) = _CURRENT
    group = query.shape[1] // key.shape[1]
    q, k, v = query[0].double(), key[0].double(), value[0].double()
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = oracle.scores(q, k, rotates=bool(getattr(module, "use_rope", True)))
    scores = scores * scaling * oracle.grown[:, None]
    later = torch.ones(q.shape[1], q.shape[1]).triu(1).bool()
    weights = scores.masked_fill(later, float("-inf")).softmax(-1)
    return (weights @ v).transpose(0, 1)[None].to(query.dtype), None
