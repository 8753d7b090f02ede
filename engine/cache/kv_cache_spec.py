"""KV cache groups: the shapes of keys, values and recurrent states that share a block table. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

MAX_STATE_BLOCKS = 2  # per sequence at once: its own block, and the one it is copied from


@dataclass(frozen=True, slots=True)
class KVGroupSpec:
    """Layers that share a block table: same head count, head dims and window.

    value_dim: of a cached value. None: equal to `head_dim`; 0: the keys are also the values (latent attention).
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
class StateGroupSpec:
    """Layers with a recurrent state of one shape, see `kernels.StatePages`. A sequence of any length has one block of it.

    channels, width: of the convolution. heads, key_dim, value_dim: of the memory.
    """

    layers: tuple[int, ...]
    channels: int
    width: int
    heads: int
    key_dim: int
    value_dim: int

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of one layer's part of a block, float32: the window of its convolution, and its memory."""
        return (self.width - 1, self.channels), (self.heads, self.key_dim, self.value_dim)

    @property
    def block_bytes(self) -> int:
        """Size of a block, all layers together."""
        return 4 * len(self.layers) * sum(prod(shape) for shape in self.shapes)


@dataclass(frozen=True, slots=True)
class KVGroupLayout:
    """Size and rules of the block pool of one KV group.

    num_blocks: physical blocks, ids 0..num_blocks-1. window: tokens that a query sees, itself included (None: all).
    rotary_groups: of its layers. holds_states: a block is the state of a sequence, see `StateGroupSpec`; a token needs
    the state after the previous token, so the window is 2.
    """

    num_blocks: int
    window: int | None = None
    rotary_groups: tuple[int, ...] = (0,)
    holds_states: bool = False

    @classmethod
    def of_states(cls, num_blocks: int) -> KVGroupLayout:
        """The layout of a group whose blocks are states."""
        return cls(num_blocks, window=2, rotary_groups=(), holds_states=True)
