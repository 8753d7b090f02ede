"""Introspection requests and results: KV cache occupancy and attention maps as plain data. They generate no tokens."""

from __future__ import annotations

import array
from dataclasses import dataclass
from typing import Generic, TypeVar

from windlass.engine.rotary.rope_scaling import RopeScaling

A = TypeVar("A")

MAX_ATTENTION_TOKENS = 256  # the matrix grows with the square, and the steps of others wait for its one pass

MAX_CACHE_CELLS = 1024

MAX_CACHE_SEQUENCES = 64


@dataclass(frozen=True)
class IntrospectionQuery(Generic[A]):
    """What is asked; A is the type of its answer."""


@dataclass(frozen=True)
class CacheQuery(IntrospectionQuery["CacheSnapshot"]):
    """Which pages of the cache are held, kept or free. Answered from the books, between two steps."""


@dataclass(frozen=True)
class AttentionQuery(IntrospectionQuery["AttentionSnapshot"]):
    """What one head of one layer attends to in a text of at most MAX_ATTENTION_TOKENS, under a scaling (None: the server's).

    One pass over the text outside the scheduler and its cache; the steps of others wait for it.
    """

    token_ids: tuple[int, ...]
    layer: int
    head: int
    rope_scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class CacheGroupSnapshot:
    """The pages of one KV group.

    Cell i stands for blocks i * blocks_per_cell and those after it. held, shared and idle count its blocks that one sequence
    holds, that several do, and that nobody holds but a later prompt may take up again; the rest is free. owners: the index
    into `CacheSnapshot.sequences` of one that holds a block of the cell, -1 where none of those listed does.
    num_shown: blocks that the cells stand for; those behind them are free. window: as in the model's attention, None for all.
    engine: the number of its engine, where there are several. states: a block is what layers carry of a sequence, and no pages.
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
    """A running sequence: its tokens, those of its prompt, those that came from the cache, and what moved in it."""

    num_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_blocks: int
    num_shifts: int
    num_reused_tokens: int


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """sequences: at most MAX_CACHE_SEQUENCES of those that run, the best rank first. seconds: that the engine took for it."""

    block_size: int
    groups: tuple[CacheGroupSnapshot, ...]
    sequences: tuple[CacheSequenceSnapshot, ...]
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class AttentionSnapshot:
    """float32, [T * T] by rows, as bytes of this machine: row i is token i. weights: after the softmax. scores: before it, scaled
    and capped, minus infinity where a token is hidden. num_heads: of the layer.
    """

    num_tokens: int
    num_layers: int
    num_heads: int
    weights: bytes
    scores: bytes
    fingerprint: str  # of the rotation that it ran under

    def rows(self, values: bytes) -> list[list[float]]:
        """`weights` or `scores` as rows, each up to its own token."""
        numbers = array.array("f", values)
        return [numbers[i * self.num_tokens : i * self.num_tokens + i + 1].tolist() for i in range(self.num_tokens)]
