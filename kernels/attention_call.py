"""Attention call: the parameters of one attention over cached keys, shared by all backends.

States which keys a query sees and splits a call into parts. Knows neither pages nor arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

KEY_SPLIT = 512


def blocks_per_split(block_size: int) -> int:
    """Blocks that hold a multiple of KEY_SPLIT slots.

    Under `deterministic`, kernels split a sequence's keys at multiples of a divisor of these. So results over keys between
    two splits keep their bits when the keys move by this number of blocks. Plain torch sums over all keys at once, which
    keeps the bits too in tests.
    """
    return math.lcm(block_size, KEY_SPLIT) // block_size


class KeyRange(NamedTuple):
    """Keys [begin, end) of a sequence, the row of q of its first query for them, the reach (see `KeyRanges`), and the gap:
    what is added to the distance in slots."""

    begin: int
    end: int
    row: int
    reach: int
    gap: int = 0


class LatentExpansion(NamedTuple):
    """Costs of expanding cached latent vectors to keys and values, relative to products of attention over them.

    row_cost: of a product of the expansion. query_cost: of a product per query before and after attention without expansion.
    dtype: of expanded keys and values.
    """

    row_cost: float
    query_cost: float
    dtype: torch.dtype = torch.float32


class PrefillTotals(NamedTuple):
    """Upper limits, known to the host, for sequences with more than one new token: their number, and their total new tokens and
    keys."""

    sequences: int
    tokens: int
    keys: int


@dataclass(frozen=True, slots=True, eq=False)
class KeyRanges:
    """The slots of B sequences cut into R ranges each, with the query copies that attend them; [B, R] int64 each.

    ends: rising, padding repeats ends; the last is at least the sequence's length. rows: row of q of the first query; -1: a
    hole, whose keys and table entries are never read. reaches: index i sees key j if 0 <= i - j < reach, or, for a negative
    reach, if i - j >= -reach. gaps: the distance of index i from key j is i - j + gap.
    """

    ends: Tensor
    rows: Tensor
    reaches: Tensor
    gaps: Tensor | None = None

    def take(self, sequences: Tensor | slice) -> KeyRanges:
        """The ranges of some of the sequences."""
        gaps = None if self.gaps is None else self.gaps[sequences]
        return KeyRanges(self.ends[sequences], self.rows[sequences], self.reaches[sequences], gaps)

    def repeat(self, count: int) -> KeyRanges:
        """The ranges of `count` queries of one sequence, each as the only query of its own sequence."""
        following = self.rows + torch.arange(count, device=self.rows.device)[:, None]
        rows = torch.where(self.rows < 0, self.rows, following)
        gaps = None if self.gaps is None else self.gaps.repeat(count, 1)
        return KeyRanges(self.ends.repeat(count, 1), rows, self.reaches.repeat(count, 1), gaps)

    def from_query(self, begin: int) -> KeyRanges:
        """The ranges of the queries from this one on."""
        return replace(self, rows=torch.where(self.rows < 0, self.rows, self.rows + begin))


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """Attention of the last tokens of B sequences, T in all, over everything cached of their own sequence.

    A query's *index* is its position in its sequence: the last row of sequence b has index seq_lens[b] - 1. Scores are
    q.k * scale * score_scale, then soft_cap * tanh(score / soft_cap) (Gemma 2), then hidden keys are masked.

    Queries are [T, Hq, D]. With *ranges* they are [N, Hq, D], N >= T: one row for every rotated copy of a query. A key that
    was rotated at position s and now belongs at e is attended by the query rotated by s - e. So moving keys costs a copy of
    the query, and no page is rewritten. The slots of a sequence are cut into ranges: row `ranges.rows[b, r]` of q is the
    first query of sequence b for range r, and its next queries follow row by row. All ranges of a query share one softmax.
    Ranges require `causal`, no window (reaches replace it) and no chunk; ValueError otherwise.
    """

    block_tables: Tensor  # [B, max_blocks] int32; -1 is allowed where no query sees any key of the block
    query_start: Tensor  # [B + 1] int64, rows of q per sequence
    seq_lens: Tensor  # [B] int64, cached tokens including the new ones
    score_scale: Tensor  # [T] float32
    scale: float  # normally D ** -0.5
    window: int | None = None  # visible keys up to the query itself; without `causal`, as many from it on
    soft_cap: float | None = None
    sink_logits: Tensor | None = None  # [Hq] float32, learned logits in the softmax's denominator only
    causal: bool = True  # whether later keys are hidden
    chunk: int | None = None  # a query at index i sees only keys of its chunk i // chunk
    ranges: KeyRanges | None = None
    # [Hq] float32; slope * distance is subtracted from capped scores (2108.12409); only with gaps of ranges
    alibi_slopes: Tensor | None = None
    prompts: PrefillTotals | None = None  # None: unknown; a call for some sequences or tokens keeps the limits of all

    def __post_init__(self) -> None:
        if (self.alibi_slopes is None) != (self.ranges is None or self.ranges.gaps is None):
            raise ValueError("alibi_slopes and gaps of ranges come together")
        if self.ranges is not None and (self.window is not None or self.chunk is not None or not self.causal):
            raise ValueError("attention over ranges is causal, without a window or chunk of its own")

    @property
    def batch_size(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.score_scale.shape[0]

    @property
    def has_ranges(self) -> bool:
        """Whether there are key ranges, so that q has a row for every rotated copy of a query."""
        return self.ranges is not None

    @property
    def skips_early_keys(self) -> bool:
        """Whether the first keys of a sequence may be hidden from a query."""
        return self.window is not None or self.chunk is not None

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one new token, so that row b of q belongs to sequence b."""
        return self.score_scale.shape[0] == self.seq_lens.shape[0]

    def queries(self, q: Tensor, tokens: Tensor | slice) -> Tensor:
        """The rows of q for a call for some tokens: their rows, or all if there are ranges, which name rows."""
        return q if self.has_ranges else q[tokens]

    def scaled(self, q: Tensor) -> Tensor:
        """q [T, Hq, D] in float32 times the scales of its rows."""
        return q.float() * (self.scale * self.score_scale)[:, None, None]

    def visible(self, index: Tensor, length: Tensor | int) -> tuple[Tensor, Tensor]:
        """The visible keys [first, end) of queries at these indices in sequences of these lengths. index: int64 [N]."""
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
        """The tokens [N] that are the only new one of their sequence, and the call for them alone; None if there are none.

        That call takes the rows of q given by `queries`.
        """
        # Called in every layer, usually without a result: tensor operations would take longer.
        sequences = [b for b, (start, end) in enumerate(pairwise(self.query_start.tolist())) if end - start == 1]
        return self.select_sequences(self.query_start.new_tensor(sequences)) if sequences else None

    def select_sequences(self, sequences: Tensor) -> tuple[Tensor, AttentionCall]:
        """The tokens [N] of some of the sequences, and the call for them alone. sequences: int64 [M], rising.

        That call takes the rows of q given by `queries`.
        """
        counts = self.query_start.diff()[sequences]
        start = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
        rows = torch.repeat_interleave(self.query_start[sequences] - start[:-1], counts)
        rows = rows + torch.arange(rows.shape[0], device=rows.device)
        return rows, self._part(sequences, rows, start)

    def _part(self, sequences: Tensor | slice, rows: Tensor | slice, query_start: Tensor) -> AttentionCall:
        return replace(
            self,
            block_tables=self.block_tables[sequences],
            query_start=query_start,
            seq_lens=self.seq_lens[sequences],
            score_scale=self.score_scale[rows],
            ranges=None if self.ranges is None else self.ranges.take(sequences),
        )

    def sequences(self, fewest: int = 1) -> Iterator[tuple[slice, int, AttentionCall]]:
        """Tokens, length and call of every sequence with at least `fewest` new tokens; see `decode_part`."""
        starts, lengths = self.query_start.tolist(), self.seq_lens.tolist()
        for b, length in enumerate(lengths):
            rows = slice(starts[b], starts[b + 1])
            if rows.stop - rows.start >= fewest:
                yield rows, length, self._part(slice(b, b + 1), rows, self.query_start[b : b + 2] - starts[b])

    def as_single_tokens(self) -> AttentionCall:
        """The same attention with every token as the last one of its own sequence, all with one table.

        For causal calls of one sequence (see `sequences`). Raises ValueError for others.
        """
        if self.batch_size != 1 or not self.causal:
            raise ValueError("only causal attention of one sequence can be computed token by token")
        count = self.num_tokens
        return replace(
            self,
            block_tables=self.block_tables.expand(count, -1),
            query_start=torch.arange(count + 1, device=self.seq_lens.device),
            seq_lens=self.seq_lens - torch.arange(count - 1, -1, -1, device=self.seq_lens.device),
            ranges=None if self.ranges is None else self.ranges.repeat(count),
        )

    def slice_tokens(self, begin: int, end: int) -> AttentionCall:
        """The call for some of the new tokens of one sequence, which see no key after the last of them.

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
        """The visible ranges of a call of one sequence, in order, without holes and ranges that no query sees.

        Raises ValueError if the ranges end before the last key, IndexError for a row below -1.
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
                raise IndexError(f"ranges name row {row}, which is not one of q")
            found.append(KeyRange(first, end, row, reach, gap))
        return found
