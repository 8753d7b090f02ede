"""Block manager: order of ids, sharing, copy on write, windows, eviction, private blocks."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from engine_helpers.cached_sequence import CachedSequence
from engine_helpers.fake_executor import FakeRotation
from helpers.cache_invariants import assert_balanced, assert_consistent

from windlass.engine.cache.block_manager import BlockManager
from windlass.engine.cache.cache_operations import BlockCopy, KeyRerotation
from windlass.engine.cache.kv_cache_spec import KVGroupLayout
from windlass.engine.cache.rerotation import blocks_to_rerotate, rerotate
from windlass.engine.rotary.rotary_policy import RotaryStage


def manager(*groups: tuple[int, int | None], block_size: int = 4, prefix_caching: bool = True) -> BlockManager:
    return BlockManager([KVGroupLayout(n, w) for n, w in groups], block_size, prefix_caching)


def start(blocks: BlockManager, tokens: Iterable[int], stage: RotaryStage | None = None) -> CachedSequence:
    """A sequence with its cached prefix attached."""
    seq = CachedSequence(blocks, tokens, stage=stage)
    seq.start()
    return seq


def match(blocks: BlockManager, tokens: Iterable[int], salt: str | None = None) -> tuple[int, bool]:
    return CachedSequence(blocks, tokens, salt).match()


def test_a_new_pool_allocates_ascending_ids() -> None:
    blocks = manager((10, None), prefix_caching=False)
    a, b = start(blocks, [0] * 9), start(blocks, [0] * 12)
    a.compute()
    b.compute()
    assert (a.block_tables, b.block_tables) == ([[0, 1, 2]], [[3, 4, 5]])
    a.free()
    c = start(blocks, [0] * 20)
    c.compute()
    assert c.block_tables == [[0, 1, 2, 6, 7]]


def test_only_full_computed_blocks_of_the_same_root_match() -> None:
    blocks = manager((20, None))
    a = start(blocks, range(11))
    a.compute(7)
    assert match(blocks, range(11)) == (1, False)
    a.compute()
    assert match(blocks, range(11)) == (2, False)
    assert match(blocks, [0, 1, 2, 3, 4, 5, 6, 9, 8]) == (1, False)
    assert match(blocks, range(11), salt="mine") == (0, False)
    b = start(blocks, range(11))
    assert b.block_tables == [a.block_tables[0][:2]]
    assert b.cache.num_computed_tokens == 8
    assert_consistent(blocks, [a.cache, b.cache])


def test_a_full_hit_computes_its_last_block_again() -> None:
    blocks = manager((20, None))
    a = start(blocks, range(8))
    a.compute()
    b = CachedSequence(blocks, range(8))
    assert b.match() == (1, True)
    b.start()
    assert b.compute() == []
    assert b.block_tables[0][0] == a.block_tables[0][0]
    assert b.block_tables[0][1] != a.block_tables[0][1]
    a.free()
    b.free()
    assert_balanced(blocks)


def test_nothing_is_hashed_without_prefix_caching() -> None:
    blocks = manager((20, None), prefix_caching=False)
    start(blocks, range(9)).compute()
    assert match(blocks, range(9)) == (0, False)
    assert not blocks.pools[0].cached


def test_eviction_order_is_free_then_least_recent_then_tails() -> None:
    blocks = manager((7, None))
    a = start(blocks, [1] * 12)  # blocks 0 1 2
    a.compute()
    b = start(blocks, [2] * 12)  # blocks 3 4 5, and 6 stays free
    b.compute()
    a.free()
    b.free()
    assert blocks.available() == [7]
    c = start(blocks, [3] * 16)
    c.compute()
    assert c.block_tables == [[6, 2, 1, 0]]
    c.free()
    assert match(blocks, [2] * 13) == (3, False)
    d = start(blocks, [4] * 4)  # the tail of b has been idle longest
    d.compute()
    assert match(blocks, [2] * 13) == (2, False)
    d.free()
    assert_balanced(blocks)


def test_a_hit_makes_a_block_the_most_recent() -> None:
    blocks = manager((2, None))
    for token in (1, 2):
        seq = start(blocks, [token] * 4)
        seq.compute()
        seq.free()
    seq = start(blocks, [1] * 5)
    assert blocks.available() == [1]
    seq.free()
    start(blocks, [3] * 4).compute()
    assert match(blocks, [1] * 5) == (1, False)
    assert match(blocks, [2] * 5) == (0, False)


def test_forks_share_blocks_until_one_is_written() -> None:
    blocks = manager((10, None), (10, 4))
    parent = start(blocks, range(6))
    parent.compute()
    children = [CachedSequence(blocks, range(6)) for _ in range(2)]
    for child in children:
        blocks.fork(parent.cache, child.cache)
    assert blocks.available() == [8, 8]
    for seq in (parent, *children):
        seq.tokens.append(50)
    partial = [table[1] for table in parent.block_tables]
    assert parent.compute() == [BlockCopy(group, partial[group], parent.block_tables[group][1]) for group in range(2)]
    assert len(children[0].compute()) == 2
    assert children[1].compute() == []  # the last holder writes in place
    assert [table[1] for table in children[1].block_tables] == partial
    assert len({seq.block_tables[0][1] for seq in (parent, *children)}) == 3
    assert len({seq.block_tables[0][0] for seq in (parent, *children)}) == 1
    assert_consistent(blocks, [seq.cache for seq in (parent, *children)])
    for seq in (parent, *children):
        seq.free()
    assert_balanced(blocks)


def test_a_write_into_a_hashed_block_copies_it() -> None:
    blocks = manager((4, None))
    seq = start(blocks, range(4))
    seq.compute()
    seq.cache.num_computed_tokens = 3  # as if the last token were to be computed again in place
    held = seq.block_tables[0][0]
    assert blocks.allocate(seq.cache, 1) == [BlockCopy(0, held, seq.block_tables[0][0])]
    assert seq.block_tables[0][0] != held
    assert match(blocks, range(5)) == (1, False)
    assert_consistent(blocks, [seq.cache])


def test_a_window_group_drops_blocks_that_no_later_query_sees() -> None:
    blocks = manager((20, None), (20, 5))
    seq = start(blocks, range(40))
    for computed in range(1, 30):
        seq.compute(1)
        # The next query, at token `computed`, sees keys computed - 4 .. computed.
        first = max(0, computed - 4) // 4
        table = seq.block_tables[1]
        assert [block < 0 for block in table] == [i < first for i in range(len(table))]
        assert min(seq.block_tables[0]) >= 0
        assert_consistent(blocks, [seq.cache])
    seq.free()
    assert_balanced(blocks)


def test_a_hit_needs_only_the_visible_blocks_of_a_window_group() -> None:
    blocks = manager((20, None), (4, 5))
    seq = start(blocks, range(24))
    for _ in range(6):
        seq.compute(4)
    # The window pool has four blocks, so the first two of six have been reused.
    again = CachedSequence(blocks, [*range(24), 99])
    assert again.match() == (6, False)
    seq.free()
    blocks.attach(again.cache, 6)
    assert [block < 0 for block in again.block_tables[1]] == [True] * 5 + [False]
    assert match(blocks, range(7)) == (0, False)  # in group 0, evicted from group 1
    again.free()
    assert_balanced(blocks)


@pytest.mark.parametrize("window", [1, 2, 5, 8, 13])
@pytest.mark.parametrize("block_size", [1, 4])
def test_min_blocks_equals_the_blocks_of_single_token_steps(window: int, block_size: int) -> None:
    blocks = manager((100, None), (100, window), block_size=block_size, prefix_caching=False)
    seq = start(blocks, [0] * 50)
    most = 0
    for _ in range(50):
        blocks.allocate(seq.cache, 1)
        most = max(most, 100 - blocks.available()[1])
        blocks.mark_computed(seq.cache, seq.tokens, seq.cache.num_computed_tokens + 1)
    assert blocks.min_blocks(50) == [-(-50 // block_size), most]


def test_capacity_equals_what_can_be_allocated() -> None:
    blocks = manager((3, None), (2, None))
    seq = start(blocks, [0] * 30)
    assert blocks.capacity(seq.cache, 30) == 8
    assert blocks.capacity(seq.cache, 5) == 5
    with pytest.raises(RuntimeError, match="no free blocks"):
        blocks.allocate(seq.cache, 9)
    assert blocks.available() == [3, 2]  # nothing was allocated
    seq.compute(6)
    child = CachedSequence(blocks, [0] * 30)
    blocks.fork(seq.cache, child.cache)
    assert blocks.capacity(child.cache, 1) == 0  # the shared last block needs a copy, and group 1 has none left
    seq.free()
    assert blocks.capacity(child.cache, 30) == 2


def test_rerotated_keys_are_private_and_originals_stay() -> None:
    """Block size 4: re-rotation at 6 tokens leaves a full block in place and copies the partial one; then again at 10."""
    rotation = FakeRotation("dynamic", "rotate")
    blocks = manager((20, None))
    seq = start(blocks, range(16), stage=rotation.stage(6))
    seq.compute(6)
    before = list(seq.block_tables[0])
    specs = [rotation.stage(n).specs for n in (6, 8, 11)]
    assert blocks_to_rerotate(blocks, seq.cache, rotation.stage(8).specs) == [2]
    set_aside, rerotations = rerotate(blocks, seq.cache, rotation.stage(8).specs)
    table, kept = seq.block_tables[0], seq.cache.originals[0].blocks
    assert kept[0] == before[0] and table[1] == before[1] and len({*table, *kept}) == 4
    assert set_aside == [KeyRerotation(0, 4, 6, (table[1],), (kept[1],), 4, specs[0], specs[0])]
    assert rerotations == [KeyRerotation(0, 0, 6, tuple(kept), tuple(table), 0, specs[0], specs[1])]
    seq.compute(2)
    seq.compute(2)
    assert blocks_to_rerotate(blocks, seq.cache, rotation.stage(11).specs) == [1]
    set_aside, rerotations = rerotate(blocks, seq.cache, rotation.stage(11).specs)
    # Tokens 6 and 7 were added to a re-rotated block: their originals join those of 4 and 5. The third block is partial.
    assert [(m.start, m.end, m.sources, m.targets) for m in set_aside] == [
        (6, 8, (table[1],), (kept[1],)),
        (8, 10, (table[2],), (kept[2],)),
    ]
    assert [(m.start, m.end, m.from_specs, m.to_specs) for m in rerotations] == [
        (0, 6, specs[0], specs[2]),
        (6, 10, specs[1], specs[2]),
    ]
    assert rerotations[1].sources == tuple(kept[1:]) and rerotations[1].targets == tuple(table[1:])
    seq.compute()
    # Another prompt can still use the original of the first block, but nothing computed since.
    assert match(blocks, range(17)) == (1, False)
    assert all(blocks.pools[0].private[block] for block in table)
    assert_consistent(blocks, [seq.cache])
    seq.free()
    assert not any(blocks.pools[0].private)
    assert_balanced(blocks)


def test_a_rerotation_copies_shared_blocks_and_skips_other_groups() -> None:
    rotation = FakeRotation("dynamic", "rotate")
    blocks = BlockManager([KVGroupLayout(20, None), KVGroupLayout(20, None, rotary_groups=())], 4)
    seq = start(blocks, range(6), stage=rotation.stage(6))
    seq.compute()
    child = CachedSequence(blocks, range(6))
    blocks.fork(seq.cache, child.cache)
    shared = list(seq.block_tables[0])
    assert blocks_to_rerotate(blocks, child.cache, rotation.stage(8).specs) == [3, 0]
    set_aside, rerotations = rerotate(blocks, child.cache, rotation.stage(8).specs)
    assert set_aside[0].sources == (shared[1],) and not {*child.block_tables[0]} & {*shared}
    assert child.block_tables[1] == seq.block_tables[1] and {m.group for m in set_aside + rerotations} == {0}
    with pytest.raises(RuntimeError, match="re-rotated keys"):
        blocks.fork(child.cache, CachedSequence(blocks, [0]).cache)
    assert_consistent(blocks, [seq.cache, child.cache])
    child.free()
    seq.free()
    assert_balanced(blocks)


def test_misuse_is_an_error_and_checks_detect_leaks() -> None:
    blocks = manager((4, None))
    seq = start(blocks, [1, 2, 3])
    seq.compute()
    with pytest.raises(RuntimeError, match="already holds"):
        blocks.attach(seq.cache, 0)
    with pytest.raises(RuntimeError, match="already holds"):
        blocks.fork(seq.cache, seq.cache)
    with pytest.raises(AssertionError, match="reference counts"):
        assert_balanced(blocks)
    seq.free()
    seq.free()
    assert_balanced(blocks)
    with pytest.raises(RuntimeError, match="more often"):
        blocks.pools[0].release(0)
    with pytest.raises(ValueError, match="at least one group"):
        BlockManager([], 16)
    assert (blocks.num_blocks, blocks.num_used_blocks, blocks.usage) == (4, 0, 0.0)
