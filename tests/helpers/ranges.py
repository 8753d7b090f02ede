"""Reference of attention over key ranges in float64: unrotated keys, each rotated to its shifted position, plain softmax.

Independent of rotated query copies and pages; `RangeCase` creates the operands of kernels from the same values.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from helpers.code_pages import pages_of_codes
from torch import Tensor

from windlass.kernels import AttentionCall, KeyRanges, KVPages
from windlass.kernels.torch import reference

FAR = 2**62


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate half-split pairs of the first dims of x [..., H, D] by angles [..., d/2], float64."""
    half = angles.shape[-1]
    cos, sin = angles.cos()[..., None, :], angles.sin()[..., None, :]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


@dataclass
class Part:
    """A range that ends before slot `end`, with keys `shift` positions after the stored ones.

    reach: largest visible distance; if negative, the smallest one."""

    end: int
    shift: int = 0
    reach: int = FAR
    hole: bool = False


@dataclass
class RangeCase:
    """Sequences of (cached, new) tokens with their ranges. base: stored position of slot 0."""

    shapes: list[tuple[int, int]]
    parts: list[list[Part]]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    value_dim: int = 32
    pairs: int = 16
    still: int = 0  # the last ones, with frequency 0
    block_size: int = 16
    page_type: torch.dtype = torch.float32
    base: int = 0
    soft_cap: float | None = None
    sinks: Tensor | None = None
    slopes: Tensor | None = None
    inv_freq: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.inv_freq = 1e4 ** -(torch.arange(self.pairs, dtype=torch.float64) / max(self.pairs, 1))
        self.inv_freq[self.pairs - self.still :] = 0.0
        tokens = sum(new for _, new in self.shapes)
        self.raw_q = torch.randn(tokens, self.heads, self.dim, dtype=torch.float64)
        self.score_scale = torch.rand(tokens) + 0.5
        self.keys, self.values = [], []  # as in the pages, in float64
        self.scales: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self.exact: list[Tensor] = []  # unrotated
        for old, new in self.shapes:
            raw = torch.randn(old + new, self.kv_heads, self.dim, dtype=torch.float64)
            stored = rotated(raw, self.angles(self.base + torch.arange(old + new))).float()
            value = torch.randn(old + new, self.kv_heads, self.value_dim)
            if self.page_type == torch.int8:
                codes = *reference.quantize(stored), *reference.quantize(value)
                self.scales.append(codes)
                stored, value = codes[0].float() * codes[1][..., None], codes[2].float() * codes[3][..., None]
            stored, value = stored.to(self.wide_type), value.to(self.wide_type)
            # Rounded pages have other keys, which the reference must use.
            rounded = rotated(stored.double(), -self.angles(self.base + torch.arange(old + new)))
            self.exact.append(raw if self.page_type == torch.float32 else rounded)
            self.keys.append(stored)
            self.values.append(value)

    @property
    def wide_type(self) -> torch.dtype:
        return torch.float32 if self.page_type == torch.int8 else self.page_type

    def angles(self, positions: Tensor) -> Tensor:
        return positions.double()[..., None] * self.inv_freq

    def placed(self, b: int) -> tuple[Tensor, Tensor]:
        """Return the visible keys of each new token of sequence b [T, S], and the shift of each key [S]."""
        old, new = self.shapes[b]
        slots, begin = torch.arange(old + new), 0
        back = slots[old:, None] - slots
        seen, shifts = torch.zeros(new, old + new, dtype=torch.bool), torch.zeros(old + new, dtype=torch.int64)
        for part in self.parts[b]:
            own = slice(begin, max(begin, part.end))
            shifts[own] = part.shift
            if not part.hole:
                seen[:, own] = back[:, own] < part.reach if part.reach >= 0 else back[:, own] >= -part.reach
            begin = own.stop
        return seen & (back >= 0), shifts

    def expected(self) -> Tensor:
        found, row = [], 0
        group = self.heads // self.kv_heads
        for b, (old, new) in enumerate(self.shapes):
            seen, shifts = self.placed(b)
            rows, row = slice(row, row + new), row + new
            at, stands = self.base + torch.arange(old, old + new), self.base + torch.arange(old + new) + shifts
            q = rotated(self.raw_q[rows], self.angles(at))  # [T, Hq, D]
            keys = rotated(self.exact[b], self.angles(stands)).repeat_interleave(group, 1)  # [S, Hq, D]
            scores = torch.einsum("thd,shd->ths", q, keys)
            scores = scores * (self.dim**-0.5 * self.score_scale[rows].double()[:, None, None])
            if self.soft_cap is not None:
                scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
            if self.slopes is not None:
                scores = scores - self.slopes.double()[:, None] * (at[:, None] - stands)[:, None]
            scores = scores.masked_fill(~seen[:, None], -torch.inf)
            if self.sinks is not None:
                scores = torch.cat((scores, self.sinks.double()[:, None].expand(new, -1, 1)), dim=2)
            weights = scores.softmax(dim=2)[..., : old + new]
            values = self.values[b].double().repeat_interleave(group, 1)
            found.append(torch.einsum("ths,shd->thd", weights, values))
        return torch.cat(found)

    def pages(self) -> tuple[KVPages, Tensor]:
        """Return shuffled pages and their table. Invisible blocks are -1, invisible keys NaN."""
        size = self.block_size
        counts = [-(-(old + new) // size) for old, new in self.shapes]
        free = torch.randperm(sum(counts)).tolist()
        shape = sum(counts), size, self.kv_heads
        key = torch.full((*shape, self.dim), torch.nan, dtype=self.wide_type)
        value = torch.full((*shape, self.value_dim), torch.nan, dtype=self.wide_type)
        scales = torch.full((2, *shape), torch.nan)
        table = torch.full((len(counts), max(counts) + 1), -1, dtype=torch.int32)
        if self.page_type == torch.int8:
            key, value = torch.randint(-127, 128, key.shape).char(), torch.randint(-127, 128, value.shape).char()
        for b in range(len(self.shapes)):
            keys = self.placed(b)[0].any(dim=0).nonzero().squeeze(1)
            for block in (keys // size).unique().tolist():
                table[b, block] = free.pop()
            place = table[b].long()[keys // size], keys % size
            if self.page_type == torch.int8:
                codes = self.scales[b]
                key[place], value[place] = codes[0][keys], codes[2][keys]
                scales[0][place], scales[1][place] = codes[1][keys], codes[3][keys]
            else:
                key[place], value[place] = self.keys[b][keys], self.values[b][keys]
        if self.page_type == torch.int8:
            return pages_of_codes(key, scales[0], value, scales[1]), table
        return KVPages(key, value), table

    def versions(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return rotated queries [T, Hq, D], rows, cos and sin for `rotate_queries`, and rows of ranges [B, R]."""
        positions, first = [], []
        for old, new in self.shapes:
            first.append(len(positions))
            positions += range(self.base + old, self.base + old + new)
        q = rotated(self.raw_q, self.angles(torch.tensor(positions))).float()
        rows, turns, ranges = [], [], torch.full((len(self.shapes), max(map(len, self.parts))), -1)
        for b, (_, new) in enumerate(self.shapes):
            for r, part in enumerate(self.parts[b]):
                if part.hole:
                    continue
                ranges[b, r] = first[b] if part.shift == 0 else len(q) + len(rows)
                if part.shift:
                    rows += range(first[b], first[b] + new)
                    turns += [-part.shift] * new
        angles = self.angles(torch.tensor(turns, dtype=torch.float64))
        return q, torch.tensor(rows, dtype=torch.int64), angles.cos().float(), angles.sin().float(), ranges

    def operands(self) -> tuple[Tensor, KVPages, AttentionCall]:
        q, rows, cos, sin, range_rows = self.versions()
        pages, table = self.pages()
        ends, gaps, reaches = (
            torch.zeros_like(range_rows),
            torch.zeros_like(range_rows),
            torch.full_like(range_rows, FAR),
        )
        for b, parts in enumerate(self.parts):
            ends[b] = parts[-1].end
            ends[b, : len(parts)] = torch.tensor([part.end for part in parts])
            gaps[b, : len(parts)] = torch.tensor([-part.shift for part in parts])
            reaches[b, : len(parts)] = torch.tensor([part.reach for part in parts])
        start = torch.tensor([0, *(new for _, new in self.shapes)]).cumsum(0)
        call = AttentionCall(
            table,
            start,
            torch.tensor([old + new for old, new in self.shapes]),
            self.score_scale,
            self.dim**-0.5,
            soft_cap=self.soft_cap,
            sink_logits=self.sinks,
            ranges=KeyRanges(ends, range_rows, reaches, None if self.slopes is None else gaps),
            alibi_slopes=self.slopes,
        )
        return reference.rotate_queries(q, rows, cos, sin), pages, call


def random_parts(old: int, new: int, count: int, rng: random.Random, far: int = 3000) -> list[Part]:
    """Return ranges that end anywhere, independent of blocks. Every new token sees its own key."""
    ends = sorted(rng.randint(0, old + new) for _ in range(count - 1))
    parts, begin = [], 0
    for end in [*ends, old + new + rng.choice([0, 0, 5])]:
        part = Part(
            end, rng.choice([0, 0, 7, -3, rng.randint(-far, far)]), rng.choice([FAR, FAR, 0, -1, 3, 40, 300, -3, -50])
        )
        part.hole = rng.random() < 0.25
        if end > old and end > begin:
            part.hole, part.reach = False, max(part.reach, 1)
        parts.append(part)
        begin = max(begin, end)
    return parts
