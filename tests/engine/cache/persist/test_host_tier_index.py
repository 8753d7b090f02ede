"""Index of the blocks in host memory."""

from windlass.engine.cache.disk_tier import PersistCounters
from windlass.engine.cache.host_tier import HostTier
from windlass.engine.cache.non_prefix_reuse import PassageRecord
from windlass.engine.cache.prefix_cache import BlockKey

DIGEST = b"d" * 32
PASSAGE = PassageRecord(b"p" * 32, 0, (1, 2, 3, 4), (b"me",))


def test_what_is_known_of_a_passage_waits_for_its_first_block_and_no_longer() -> None:
    """Repeatedly, and whether or not the first block brings the same record."""
    tier = HostTier(4, [10, 10], 4, PersistCounters())
    for passage in (None, PASSAGE):
        tier.admit(BlockKey(1, DIGEST), 0, PASSAGE)
        assert tier._passages == {DIGEST: PASSAGE}
        tier.admit(BlockKey(0, DIGEST), 0, passage)
        assert not tier._passages and tier.index.passage_of(BlockKey(0, DIGEST)) == PASSAGE
