"""Attention calls over shuffled blocks, and their float64 reference."""

from __future__ import annotations

from typing import Any

import torch
from helpers.code_pages import pages_of_codes
from helpers.cpu_kernels import at_the_end_of_memory

from windlass.kernels import AttentionCall, KVPages, cpu
from windlass.kernels.cpu.library import Library


class AttentionCase:
    """Sequences of (cached, new) tokens over shuffled blocks. Slots of no visible block are NaN, table entries -1.

    (-1, 1) is a query without any keys.
    """

    def __init__(
        self,
        shapes: list[tuple[int, int]],
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 64,
        value_dim: int | None = None,
        block_size: int = 16,
        window: int | None = None,
        q_type: torch.dtype = torch.float32,
        page_type: torch.dtype = torch.float32,
        spread: float = 1.0,
        causal: bool = True,
        chunk: int | None = None,
        poisoned: bool = True,
    ) -> None:
        """poisoned: keys before the first visible one of their block are NaN as well."""
        self.causal, self.chunk = causal, chunk
        value_dim = value_dim or dim
        self.shapes, self.window = shapes, window
        lengths = [old + new for old, new in shapes]
        blocks = sum(-(-n // block_size) for n in lengths) + 3
        free = torch.randperm(blocks).tolist()
        self.wide = [torch.full((blocks, block_size, kv_heads, d), torch.nan) for d in (dim, value_dim)]
        self.table = torch.full((len(shapes), max(-(-n // block_size) for n in lengths) + 2), -1, dtype=torch.int32)
        for b in range(len(shapes)):
            at = self.visible(b).any(0).nonzero()[:, 0]
            for i in (at // block_size).unique().tolist():
                self.table[b, i] = free.pop()
            if len(at):
                first = at[0] if poisoned else at[0] // block_size * block_size
                at = torch.arange(int(first), min(lengths[b], -(-int(at[-1] + 1) // block_size) * block_size))
            for part in self.wide:
                part[self.slots(b, at)] = torch.randn(len(at), kv_heads, part.shape[-1])
        if page_type == torch.int8:
            # Random codes and scales; scales of invisible slots remain NaN.
            seen = self.wide[0].isfinite().all(-1)
            codes = [torch.randint(-127, 128, part.shape).to(torch.int8) for part in self.wide]
            scales = [torch.where(seen, torch.rand(seen.shape) / 60, torch.nan) for _ in range(2)]
            pages = pages_of_codes(codes[0], scales[0], codes[1], scales[1])
            self.pages = [pages.key, pages.value]
            self.scales = {"key_scale": pages.key_scale, "value_scale": pages.value_scale}
            self.wide = [p.float() * s[..., None] for p, s in zip(codes, scales, strict=True)]
        else:
            self.pages = [part.to(page_type) for part in self.wide]
            self.wide = [part.float() for part in self.pages]
            self.scales = {}
        self.q = (torch.randn(sum(new for _, new in shapes), heads, dim) * spread).to(q_type)
        self.start = torch.tensor([0, *(new for _, new in shapes)]).cumsum(0)
        self.lengths = torch.tensor(lengths)
        self.temperature = torch.rand(len(self.q)) + 0.5
        self.scale = dim**-0.5

    def visible(self, b: int) -> torch.Tensor:
        """Return which keys each new token of a sequence sees, [new, cached + new]."""
        old, new = self.shapes[b]
        queries, keys = torch.arange(old, old + new)[:, None], torch.arange(old + new)
        seen = torch.full((new, old + new), True)
        if self.causal:
            seen &= keys <= queries
        if self.window is not None:
            seen &= (keys - queries).abs() < self.window
        return seen if self.chunk is None else seen & (keys // self.chunk == queries // self.chunk)

    def expected(self, sinks: torch.Tensor | None = None, soft_cap: float | None = None) -> torch.Tensor:
        kv_heads, found = self.wide[0].shape[2], []
        for b, (_, new) in enumerate(self.shapes):
            rows = slice(int(self.start[b]), int(self.start[b]) + new)
            seen = self.visible(b)
            at = seen.any(0).nonzero()[:, 0]
            seen = seen[:, at]
            keys, values = (part[self.slots(b, at)].double() for part in self.wide)
            q = self.q[rows].double().unflatten(1, (kv_heads, -1))
            scores = torch.einsum("skd,tkgd->tkgs", keys, q).flatten(1, 2)
            scores *= self.scale * self.temperature[rows].double()[:, None, None]
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            scores = scores.masked_fill(~seen[:, None], -torch.inf)
            if sinks is not None:
                scores = torch.cat((scores, sinks[:, None].double().expand(new, -1, 1)), dim=2)
            weights = scores.softmax(2)[..., : len(at)].unflatten(1, (kv_heads, -1))
            found.append(torch.einsum("tkgs,skd->tkgd", weights, values).flatten(1, 2))
        return torch.cat(found)

    def call(self, **options: Any) -> AttentionCall:
        """options: fields of the call with a default."""
        operands = self.table, self.start, self.lengths, self.temperature, self.scale
        return AttentionCall(*operands, window=self.window, causal=self.causal, chunk=self.chunk, **options)

    def prefill(
        self, library: Library, sinks: torch.Tensor | None = None, soft_cap: float | None = None, **options: Any
    ) -> torch.Tensor:
        call = self.call(soft_cap=soft_cap, sink_logits=sinks)
        return cpu.paged_attention_prefill(library, self.q, self.all_pages, call, **options)

    def decode(
        self, library: Library, sinks: torch.Tensor | None = None, soft_cap: float | None = None
    ) -> torch.Tensor:
        """Compute sequences of one new token each."""
        call = self.call(soft_cap=soft_cap, sink_logits=sinks)
        return cpu.paged_attention_decode(library, self.q, self.all_pages, call)

    def slots(self, b: int, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the blocks of these keys of a sequence, and their places in the blocks."""
        block_size = self.wide[0].shape[1]
        return self.table[b].long()[at // block_size], at % block_size

    def move_to_the_end_of_memory(self) -> None:
        """Give every operand of a single sequence in whole blocks memory that an unreadable page follows."""
        used = self.table[0, : -(-int(self.lengths[0]) // self.wide[0].shape[1])].long()
        self.pages = [at_the_end_of_memory(part[used]) for part in self.pages]
        self.scales = {name: at_the_end_of_memory(scale[used]) for name, scale in self.scales.items()}
        self.wide = [part[used] for part in self.wide]
        self.table = at_the_end_of_memory(torch.arange(len(used), dtype=torch.int32)[None])
        self.q = at_the_end_of_memory(self.q)

    def operands(self, **options: Any) -> tuple[torch.Tensor, KVPages, AttentionCall]:
        return self.q, self.all_pages, self.call(**options)

    @property
    def all_pages(self) -> KVPages:
        """Return the pages with their scales."""
        return KVPages(*self.pages, **self.scales)


def decode_call(
    block_tables: torch.Tensor, seq_lens: torch.Tensor, score_scale: torch.Tensor, scale: float, **options: Any
) -> AttentionCall:
    """Return a call in which every sequence has one new token. options: fields of `AttentionCall` with a default."""
    start = torch.arange(seq_lens.shape[0] + 1, device=seq_lens.device)
    return AttentionCall(block_tables, start, seq_lens, score_scale, scale, **options)
