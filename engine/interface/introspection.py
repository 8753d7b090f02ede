"""Introspection requests and results: KV cache occupancy and attention maps as plain data. They generate no tokens."""

from __future__ import annotations

import array
from dataclasses import dataclass
from typing import Generic, TypeVar

from windlass.engine.rotary.rope_scaling import RopeScaling

A = TypeVar("A")

MAX_ATTENTION_TOKENS = 256  # the matrix grows quadratically, and the steps of other requests wait for its one pass
MAX_CACHE_CELLS = 1024
MAX_CACHE_SEQUENCES = 64


@dataclass(frozen=True)
class IntrospectionQuery(Generic[A]):
    """Base of all queries; A is the type of the answer."""


@dataclass(frozen=True)
class CacheQuery(IntrospectionQuery["CacheSnapshot"]):
    """Which cache blocks are used, cached or free; answered from the block tables between two steps."""


@dataclass(frozen=True)
class AttentionQuery(IntrospectionQuery["AttentionSnapshot"]):
    """Attention map of one head of one layer, for at most MAX_ATTENTION_TOKENS tokens. rope_scaling None: the server's.

    Computed in one pass outside the scheduler and its cache; the steps of other requests wait for it.
    """

    token_ids: tuple[int, ...]
    layer: int
    head: int
    rope_scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class CacheGroupSnapshot:
    """Occupancy of one KV group's block pool.

    Cell i covers `blocks_per_cell` blocks from block i * blocks_per_cell on. held, shared, idle: blocks of each cell that one
    sequence holds, that several hold, and that are only cached for later prompts; the rest are free. owners: index into
    `CacheSnapshot.sequences` of a sequence that holds a block of the cell, -1 if none of the listed ones does.
    num_shown: blocks covered by the cells; those after them are free. window: the attention window, None for all.
    engine: number of the engine among several. states: a block holds a recurrent state instead of keys and values.
    """

    num_blocks: int
    num_shown: int
    blocks_per_cell: int
    window: int | None
    held: tuple[int, ...]
    shared: tuple[int, ...]
    idle: tuple[int, ...]
    owners: tuple[int, ...]
    engine: int = 0
    states: bool = False


@dataclass(frozen=True, slots=True)
class CacheSequenceSnapshot:
    """A running sequence: tokens (all, prompt, from the cache), blocks, context shifts and reused tokens."""

    num_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_blocks: int
    num_shifts: int
    num_reused_tokens: int


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """sequences: at most MAX_CACHE_SEQUENCES running ones, highest priority first. seconds: time that the snapshot took."""

    block_size: int
    groups: tuple[CacheGroupSnapshot, ...]
    sequences: tuple[CacheSequenceSnapshot, ...]
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class AttentionSnapshot:
    """weights, scores: float32 [T, T] in native byte order; row i is query token i.

    weights: after the softmax. scores: before it, scaled and capped, minus infinity where a key is masked. num_heads: of the
    layer. fingerprint: of the rotation used.
    """

    num_tokens: int
    num_layers: int
    num_heads: int
    weights: bytes
    scores: bytes
    fingerprint: str

    def rows(self, values: bytes) -> list[list[float]]:
        """`weights` or `scores` as rows; row i ends with token i."""
        numbers = array.array("f", values)
        return [numbers[i * self.num_tokens : i * self.num_tokens + i + 1].tolist() for i in range(self.num_tokens)]
