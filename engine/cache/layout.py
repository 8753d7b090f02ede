"""What a KV group is: to the tensors, and to the books. Knows neither models nor requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVGroupSpec:
    """Layers that share a block table: same head count, head dim and window."""

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window: int | None


@dataclass(frozen=True, slots=True)
class KVGroupLayout:
    """The block pool of one KV group, as the books see it.

    window: tokens a query sees back, itself included (None: all). num_blocks: physical blocks, ids 0..num_blocks-1.
    rotary_groups: the rotary groups of its layers.
    """

    num_blocks: int
    window: int | None = None
    rotary_groups: tuple[int, ...] = (0,)
