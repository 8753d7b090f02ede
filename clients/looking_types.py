"""What a server shows to people who look on: its cache as a picture of pages, and what a layer attends to."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """The pages of one KV group, by cells of `blocks_per_cell` blocks; see `CachePages` in the server's description. states: its
    blocks are no pages, but what layers carry of a sequence from token to token."""

    num_blocks: int
    num_shown: int
    blocks_per_cell: int
    window: int | None = None
    held: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()
    idle: tuple[int, ...] = ()
    owners: tuple[int, ...] = ()
    states: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSequence:
    """A running sequence: its tokens, those of its prompt, those found in the cache, and what moved in it."""

    num_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_blocks: int = 0
    num_shifts: int = 0
    num_reused_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePages:
    """The cache as it is now. time: seconds on a clock that only goes forward. counters: by their names in the metrics."""

    time: float
    block_size: int
    bytes_per_token: int = 0
    groups: tuple[CacheGroup, ...] = ()
    sequences: tuple[CacheSequence, ...] = ()
    counters: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMap:
    """What one head attends to: row i of weights (after the softmax) and scores (before it) has the tokens 0 to i.

    None: a token that it cannot see. *_by_distance: means by how many places back a token stands.
    """

    layer: int
    head: int
    num_layers: int
    num_heads: int
    tokens: tuple[int, ...]
    weights: tuple[tuple[float, ...], ...]
    scores: tuple[tuple[float | None, ...], ...]
    weight_by_distance: tuple[float, ...] = ()
    score_by_distance: tuple[float | None, ...] = ()
    fingerprint: str | None = None
    model: str | None = None
