"""What a KV group is: to the tensors, and to the books. Knows neither models nor requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVGroupSpec:
    """Layers that share a block table: same head count, head dims and window.

    value_dim: of a cached value, None: as wide as a key; 0: the keys are the values too (latent attention).
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window: int | None
    value_dim: int | None = None

    @property
    def cached_value_dim(self) -> int:
        return self.head_dim if self.value_dim is None else self.value_dim


@dataclass(frozen=True, slots=True)
class KVGroupLayout:
    """The block pool of one KV group, as the books see it.

    window: tokens a query sees back, itself included (None: all). num_blocks: physical blocks, ids 0..num_blocks-1.
    rotary_groups: the rotary groups of its layers.
    """

    num_blocks: int
    window: int | None = None
    rotary_groups: tuple[int, ...] = (0,)
