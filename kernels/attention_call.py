"""Attention call: the parameters of one attention over cached keys, shared by all backends.

States which keys a query sees and splits a call into parts. Knows neither pages nor arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

KEY_SPLIT = 512


def blocks_per_split(block_size: int) -> int:
    """Blocks that hold a multiple of KEY_SPLIT slots.

    Under `deterministic` kernels cut a sequence's keys at places that divide those: where keys between two cuts move by so many
    blocks, what is met in them keeps its bits. Plain torch cuts nothing and sums over all at once, which tests have found to keep
    them too.
    """
    return math.lcm(block_size, KEY_SPLIT) // block_size


class KeyRange(NamedTuple):
    """Keys [begin, end) of a sequence, the row of q in which its first query meets them, how far a query sees back (below 0:
    from how far on), and what its distance from a key is more than the places between them."""

    begin: int
    end: int
    row: int
    reach: int
    gap: int = 0


class LatentExpansion(NamedTuple):
    """How keys and values may be made of cached latent vectors, and what products take in terms of those of attention over them.

    row_cost: of a product that makes them. query_cost: of one that a query takes by itself where nothing is made, before and
    after attention. dtype: of what is made.
    """

    row_cost: float
    query_cost: float
    dtype: torch.dtype = torch.float32


class PrefillTotals(NamedTuple):
    """What the host knows of the sequences that have more than one new token: how many there are at most, and how many new
    tokens and keys they have together."""

    sequences: int
    tokens: int
    keys: int


@dataclass(frozen=True, slots=True, eq=False)
class KeyRanges:
    """How the slots of B sequences are cut into R ranges each, and how queries meet the keys of each range.

    [B, R] int64 each. ends: rising, padding repeats ends; the last is the sequence's length at least. rows: of q, where the first
    query meets them; -1: a hole, whose keys and table entries are never read. reaches: index i sees key j where
    0 <= i - j < reach, or below 0 where i - j >= -reach. gaps: the distance of index i from key j is i - j + gap.
    """

    ends: Tensor
    rows: Tensor
    reaches: Tensor
    gaps: Tensor | None = None

    def take(self, sequences: Tensor | slice) -> KeyRanges:
        """Those of some of the sequences."""
        gaps = None if self.gaps is None else self.gaps[sequences]
        return KeyRanges(self.ends[sequences], self.rows[sequences], self.reaches[sequences], gaps)

    def repeat(self, count: int) -> KeyRanges:
        """Those of each of `count` queries of one sequence, as if it were the only one of a sequence of its own."""
        following = self.rows + torch.arange(count, device=self.rows.device)[:, None]
        rows = torch.where(self.rows < 0, self.rows, following)
        gaps = None if self.gaps is None else self.gaps.repeat(count, 1)
        return KeyRanges(self.ends.repeat(count, 1), rows, self.reaches.repeat(count, 1), gaps)

    def from_query(self, begin: int) -> KeyRanges:
        """Those of the queries from this one on."""
        return replace(self, rows=torch.where(self.rows < 0, self.rows, self.rows + begin))


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """Attention of the last tokens of B sequences, T in all, over everything cached of their own sequence.

    A query's *index* is its place in its sequence: the last row of sequence b has index seq_lens[b] - 1. Scores are
    q.k * scale * score_scale, then soft_cap * tanh(score / soft_cap) (Gemma 2), then what a query does not see is hidden.

    Queries are [T, Hq, D]. With *ranges* they are [N, Hq, D], N >= T: a row for every version of a query. A key that was
    rotated at position s and shall stand at e meets the query turned by s - e, so moving keys costs a version of the query
    and no byte of any page. The slots of a sequence are cut into ranges; the first query of sequence b meets the keys of
    range r in row `ranges.rows[b, r]` of q, its next queries row by row behind that. All ranges of a query share one softmax.
    Ranges need `causal`, no window (that is what reaches are for) and no chunk: ValueError otherwise.
    """

    block_tables: Tensor  # [B, max_blocks] int32; -1 is allowed where no query sees any key of the block
    query_start: Tensor  # [B + 1] int64, rows of q per sequence
    seq_lens: Tensor  # [B] int64, cached tokens, the new ones included
    score_scale: Tensor  # [T] float32
    scale: float  # normally D ** -0.5
    window: int | None = None  # keys a query sees up to itself; without `causal` as many from itself on
    soft_cap: float | None = None
    sink_logits: Tensor | None = None  # [Hq] float32, learned logits that stand in the softmax's denominator only
    causal: bool = True  # whether keys behind a query are hidden from it
    chunk: int | None = None  # a query at index i sees keys of its own chunk i // chunk only
    ranges: KeyRanges | None = None
    alibi_slopes: Tensor | None = (
        None  # [Hq] float32; capped scores lose slope * distance (2108.12409); with gaps of ranges only
    )
    prompts: PrefillTotals | None = (
        None  # None: nothing is known; of a call for some of its sequences or tokens, what it was of all
    )

    def __post_init__(self) -> None:
        if (self.alibi_slopes is None) != (self.ranges is None or self.ranges.gaps is None):
            raise ValueError("alibi_slopes and gaps of ranges come together")
        if self.ranges is not None and (self.window is not None or self.chunk is not None or not self.causal):
            raise ValueError("attention over ranges is causal, without a window or chunk of its own")

    @classmethod
    def for_decode(
        cls, block_tables: Tensor, seq_lens: Tensor, score_scale: Tensor, scale: float, **options: Any
    ) -> AttentionCall:
        """A call in which every sequence has one new token. options: the fields that have a default."""
        start = torch.arange(seq_lens.shape[0] + 1, device=seq_lens.device)
        return cls(block_tables, start, seq_lens, score_scale, scale, **options)

    @property
    def batch_size(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.score_scale.shape[0]

    @property
    def has_ranges(self) -> bool:
        """Whether keys are met in ranges, and q has a row for every version of a query."""
        return self.ranges is not None

    @property
    def skips_early_keys(self) -> bool:
        """Whether a query may not see the first keys of its sequence."""
        return self.window is not None or self.chunk is not None

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one new token: row b of q is then that of sequence b."""
        return self.score_scale.shape[0] == self.seq_lens.shape[0]

    def queries(self, q: Tensor, tokens: Tensor | slice) -> Tensor:
        """What of q a call for some tokens only takes: their rows, or all where ranges name rows."""
        return q if self.has_ranges else q[tokens]

    def scaled(self, q: Tensor) -> Tensor:
        """q [T, Hq, D] in float32, times the scales of its rows."""
        return q.float() * (self.scale * self.score_scale)[:, None, None]

    def visible(self, index: Tensor, length: Tensor | int) -> tuple[Tensor, Tensor]:
        """The keys [first, end) that queries at these indices see in sequences of these lengths. index: int64 [N]."""
        first = torch.zeros_like(index)
        end = index + 1 if self.causal else torch.zeros_like(index) + length
        if self.window is not None:
            first = (index - (self.window - 1)).clamp(min=0)
            end = torch.minimum(end, index + self.window)
        if self.chunk is not None:
            begin = index // self.chunk * self.chunk
            first, end = torch.maximum(first, begin), torch.minimum(end, begin + self.chunk)
        return first, end

    def decode_part(self) -> tuple[Tensor, AttentionCall] | None:
        """The tokens [N] that are the only new one of their sequence, and the call for them alone; None without any.

        That call takes these rows of q (see `queries`), or the whole q where there are ranges.
        """
        # Asked for in every layer, and mostly in vain: tensor operations would take longer than this.
        sequences = [b for b, (start, end) in enumerate(pairwise(self.query_start.tolist())) if end - start == 1]
        return self.select_sequences(self.query_start.new_tensor(sequences)) if sequences else None

    def select_sequences(self, sequences: Tensor) -> tuple[Tensor, AttentionCall]:
        """The tokens [N] of some of the sequences, and the call for them alone. sequences: int64 [M], rising.

        That call takes these rows of q (see `queries`), or the whole q where there are ranges.
        """
        counts = self.query_start.diff()[sequences]
        start = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
        rows = torch.repeat_interleave(self.query_start[sequences] - start[:-1], counts)
        rows = rows + torch.arange(rows.shape[0], device=rows.device)
        call = replace(
            self,
            block_tables=self.block_tables[sequences],
            query_start=start,
            seq_lens=self.seq_lens[sequences],
            score_scale=self.score_scale[rows],
            ranges=None if self.ranges is None else self.ranges.take(sequences),
        )
        return rows, call

    def sequences(self, fewest: int = 1) -> Iterator[tuple[slice, int, AttentionCall]]:
        """Tokens, length, and call of every sequence that has at least so many new tokens, one by one; see `decode_part`."""
        starts, lengths = self.query_start.tolist(), self.seq_lens.tolist()
        for b, length in enumerate(lengths):
            rows, one = slice(starts[b], starts[b + 1]), slice(b, b + 1)
            if rows.stop - rows.start < fewest:
                continue
            call = replace(
                self,
                block_tables=self.block_tables[one],
                query_start=self.query_start[b : b + 2] - starts[b],
                seq_lens=self.seq_lens[one],
                score_scale=self.score_scale[rows],
                ranges=None if self.ranges is None else self.ranges.take(one),
            )
            yield rows, length, call

    def as_single_tokens(self) -> AttentionCall:
        """The same attention with every token the last one of a sequence of its own, all over one table.

        For causal calls of one sequence (see `sequences`). Raises ValueError for others.
        """
        if self.batch_size != 1 or not self.causal:
            raise ValueError("only causal attention of one sequence goes token by token")
        count = self.num_tokens
        return replace(
            self,
            block_tables=self.block_tables.expand(count, -1),
            query_start=torch.arange(count + 1, device=self.seq_lens.device),
            seq_lens=self.seq_lens - torch.arange(count - 1, -1, -1, device=self.seq_lens.device),
            ranges=None if self.ranges is None else self.ranges.repeat(count),
        )

    def slice_tokens(self, begin: int, end: int) -> AttentionCall:
        """The call for some of the new tokens of one sequence, which see no key behind the last of them.

        For causal calls of one sequence (see `sequences`).
        """
        return replace(
            self,
            query_start=torch.tensor([0, end - begin], device=self.seq_lens.device),
            seq_lens=self.seq_lens - (self.num_tokens - end),
            score_scale=self.score_scale[begin:end],
            ranges=None if self.ranges is None else self.ranges.from_query(begin),
        )

    def key_ranges(self) -> list[KeyRange]:
        """What the queries of a call of one sequence with ranges see, in order; holes and what no query sees are left out.

        Raises ValueError where the ranges end before the last key, IndexError for a row below -1.
        """
        if (ranges := self.ranges) is None:
            raise ValueError("the call has no ranges")
        length, found, begin = int(self.seq_lens[0]), list[KeyRange](), 0
        ends, rows, reaches = (part[0].tolist() for part in (ranges.ends, ranges.rows, ranges.reaches))
        if length and not (ends and ends[-1] >= length):
            raise ValueError(f"the last range ends before key {length - 1}")
        gaps = [0] * len(ends) if ranges.gaps is None else ranges.gaps[0].tolist()
        for end, row, reach, gap in zip(ends, rows, reaches, gaps, strict=True):
            end = min(end, length)
            first = max(begin, length - self.num_tokens - reach + 1) if reach > 0 else begin  # of the first query
            begin = max(begin, end)
            end = min(end, length + min(reach, 0))  # of the last one
            if row == -1 or reach == 0 or first >= end:
                continue
            if row < -1:
                raise IndexError(f"ranges name row {row}, which is none of q")
            found.append(KeyRange(first, end, row, reach, gap))
        return found
