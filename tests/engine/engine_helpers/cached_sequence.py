"""Tokens of a sequence and its sequence cache, computed by a block manager alone."""

from __future__ import annotations

from collections.abc import Iterable

from engine_helpers.fake_executor import FakeRotation

from windlass.engine.cache.block_manager import BlockManager
from windlass.engine.cache.cache_operations import BlockCopy
from windlass.engine.cache.prefix_cache import HashChain, root_digest
from windlass.engine.cache.sequence_cache import SequenceCache
from windlass.engine.rotary.rotary_policy import RotaryStage


class CachedSequence:
    def __init__(
        self, blocks: BlockManager, tokens: Iterable[int], salt: str | None = None, stage: RotaryStage | None = None
    ) -> None:
        self.blocks, self.tokens = blocks, list(tokens)
        chain = HashChain(root_digest(b"test", ["plain"], 0, salt), blocks.block_size)
        self.cache = SequenceCache(chain, (stage or FakeRotation().stage(1)).specs)

    @property
    def block_tables(self) -> list[list[int]]:
        return self.cache.block_tables

    def match(self) -> tuple[int, bool]:
        return self.blocks.match(self.cache, self.tokens, len(self.tokens))

    def hit(self) -> int:
        """Number of cached tokens with which it could start."""
        return self.match()[0] * self.blocks.block_size

    def start(self) -> int:
        """Attach the cached prefix, and return its number of tokens."""
        hit = self.hit()
        self.blocks.attach(self.cache, hit // self.blocks.block_size)
        return hit

    def compute(self, count: int | None = None, num_inflight_tokens: int = 0) -> list[BlockCopy]:
        """Allocate slots for the next tokens, and mark them as computed."""
        computed = self.cache.num_computed_tokens
        count = len(self.tokens) - computed if count is None else count
        assert self.blocks.capacity(self.cache, count) == count
        copies = self.blocks.allocate(self.cache, count)
        self.blocks.mark_computed(self.cache, self.tokens, computed + count, num_inflight_tokens)
        return copies

    def free(self) -> None:
        self.blocks.free(self.cache)
