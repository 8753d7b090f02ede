"""Block manager: order of ids, sharing, copy on write, windows, eviction, private blocks."""

from __future__ import annotations

import pytest
from engine_helpers.fake_executor import FakeRotation
from helpers.cache_invariants import assert_balanced, assert_consistent

from windlass.engine.cache.block_manager import BlockManager
from windlass.engine.cache.cache_operations import BlockCopy, KeyRerotation
from windlass.engine.cache.kv_cache_spec import KVGroupLayout
from windlass.engine.cache.prefix_cache import HashChain, root_digest
from windlass.engine.cache.rerotation import blocks_to_rerotate, rerotate
from windlass.engine.cache.sequence_cache import SequenceCache
from windlass.engine.rotary.rotary_policy import RotaryStage


class Sequence:
    """Tokens and their sequence cache."""

    def __init__(self, tokens: list[int], cache: SequenceCache) -> None:
        self.token_ids = list(tokens)
        self.cache = cache

    @property
    def block_tables(self) -> list[list[int]]:
        return self.cache.block_tables


def manager(*groups: tuple[int, int | None], block_size: int = 4, prefix_caching: bool = True) -> BlockManager:
    return BlockManager([KVGroupLayout(n, w) for n, w in groups], block_size, prefix_caching)


def sequence(
    blocks: BlockManager, tokens: list[int], salt: str | None = None, stage: RotaryStage | None = None
) -> Sequence:
    chain = HashChain(root_digest(b"test", ["plain"], 0, salt), blocks.block_size)
    return Sequence(tokens, SequenceCache(chain, (stage or FakeRotation().stage(1)).specs))


def match(blocks: BlockManager, seq: Sequence) -> tuple[int, bool]:
    return blocks.match(seq.cache, seq.token_ids, len(seq.token_ids))


def start(
    blocks: BlockManager, tokens: list[int], salt: str | None = None, stage: RotaryStage | None = None
) -> Sequence:
    """A sequence with its cached prefix attached."""
    seq = sequence(blocks, tokens, salt, stage)
    blocks.attach(seq.cache, match(blocks, seq)[0])
    return seq


def compute(blocks: BlockManager, seq: Sequence, num_tokens: int | None = None) -> list[BlockCopy]:
    """Allocate for, and pretend to have computed, the next tokens."""
    computed = seq.cache.num_computed_tokens
    count = len(seq.token_ids) - computed if num_tokens is None else num_tokens
    copies = blocks.allocate(seq.cache, count)
    blocks.mark_computed(seq.cache, seq.token_ids, computed + count)
    return copies


def test_a_fresh_pool_hands_out_ascending_ids_and_takes_them_back_in_table_order() -> None:
    blocks = manager((10, None), prefix_caching=False)
    a, b = start(blocks, [0] * 9), start(blocks, [0] * 12)
    compute(blocks, a)
    compute(blocks, b)
    assert (a.block_tables, b.block_tables) == ([[0, 1, 2]], [[3, 4, 5]])
    blocks.free(a.cache)
    c = start(blocks, [0] * 20)
    compute(blocks, c)
    assert c.block_tables == [[0, 1, 2, 6, 7]]


def test_a_block_is_matched_once_full_and_computed_and_by_the_same_root_only() -> None:
    blocks = manager((20, None))
    a = start(blocks, list(range(11)))
    compute(blocks, a, 7)
    assert match(blocks, sequence(blocks, list(range(11)))) == (1, False)
    compute(blocks, a)
    assert match(blocks, sequence(blocks, list(range(11)))) == (2, False)
    assert match(blocks, sequence(blocks, [0, 1, 2, 3, 4, 5, 6, 9, 8])) == (1, False)
    assert match(blocks, sequence(blocks, list(range(11)), salt="mine")) == (0, False)
    b = start(blocks, list(range(11)))
    assert b.block_tables == [a.block_tables[0][:2]]
    assert b.cache.num_computed_tokens == 8
    assert_consistent(blocks, [a.cache, b.cache])


def test_a_full_hit_leaves_the_last_block_to_compute_into_a_block_of_its_own() -> None:
    blocks = manager((20, None))
    a = start(blocks, list(range(8)))
    compute(blocks, a)
    b = sequence(blocks, list(range(8)))
    assert match(blocks, b) == (1, True)
    blocks.attach(b.cache, 1)
    assert compute(blocks, b) == []
    assert b.block_tables[0][0] == a.block_tables[0][0]
    assert b.block_tables[0][1] != a.block_tables[0][1]
    blocks.free(a.cache)
    blocks.free(b.cache)
    assert_balanced(blocks)


def test_without_prefix_caching_nothing_is_hashed_or_matched() -> None:
    blocks = manager((20, None), prefix_caching=False)
    compute(blocks, start(blocks, list(range(9))))
    assert match(blocks, sequence(blocks, list(range(9)))) == (0, False)
    assert not blocks.pools[0].cached


def test_free_blocks_go_first_then_the_longest_idle_and_tails_before_heads() -> None:
    blocks = manager((7, None))
    a = start(blocks, [1] * 12)  # blocks 0 1 2
    compute(blocks, a)
    b = start(blocks, [2] * 12)  # blocks 3 4 5, and 6 stays free
    compute(blocks, b)
    blocks.free(a.cache)
    blocks.free(b.cache)
    assert blocks.available() == [7]
    c = start(blocks, [3] * 16)
    compute(blocks, c)
    assert c.block_tables == [[6, 2, 1, 0]]
    blocks.free(c.cache)
    assert match(blocks, sequence(blocks, [2] * 13)) == (3, False)
    d = start(blocks, [4] * 4)  # the tail of b has been idle longest
    compute(blocks, d)
    assert match(blocks, sequence(blocks, [2] * 13)) == (2, False)
    blocks.free(d.cache)
    assert_balanced(blocks)


def test_a_hit_revives_an_idle_block_and_makes_it_the_last_to_go() -> None:
    blocks = manager((2, None))
    for token in (1, 2):
        seq = start(blocks, [token] * 4)
        compute(blocks, seq)
        blocks.free(seq.cache)
    seq = start(blocks, [1] * 5)
    assert blocks.available() == [1]
    blocks.free(seq.cache)
    compute(blocks, start(blocks, [3] * 4))
    assert match(blocks, sequence(blocks, [1] * 5)) == (1, False)
    assert match(blocks, sequence(blocks, [2] * 5)) == (0, False)


def test_forks_share_blocks_and_whoever_writes_first_copies() -> None:
    blocks = manager((10, None), (10, 4))
    parent = start(blocks, list(range(6)))
    compute(blocks, parent)
    children = [sequence(blocks, list(range(6))) for _ in range(2)]
    for child in children:
        blocks.fork(parent.cache, child.cache)
    assert blocks.available() == [8, 8]
    for seq in (parent, *children):
        seq.token_ids.append(50)
    partial = [table[1] for table in parent.block_tables]
    assert compute(blocks, parent) == [
        BlockCopy(group, partial[group], parent.block_tables[group][1]) for group in range(2)
    ]
    assert len(compute(blocks, children[0])) == 2
    assert compute(blocks, children[1]) == []  # the last holder writes in place
    assert [table[1] for table in children[1].block_tables] == partial
    assert len({seq.block_tables[0][1] for seq in (parent, *children)}) == 3
    assert len({seq.block_tables[0][0] for seq in (parent, *children)}) == 1
    assert_consistent(blocks, [seq.cache for seq in (parent, *children)])
    for seq in (parent, *children):
        blocks.free(seq.cache)
    assert_balanced(blocks)


def test_a_write_into_a_hashed_block_copies_even_for_a_single_holder() -> None:
    blocks = manager((4, None))
    seq = start(blocks, list(range(4)))
    compute(blocks, seq)
    seq.cache.num_computed_tokens = 3  # as if the last token were to be computed again in place
    held = seq.block_tables[0][0]
    assert blocks.allocate(seq.cache, 1) == [BlockCopy(0, held, seq.block_tables[0][0])]
    assert seq.block_tables[0][0] != held
    assert match(blocks, sequence(blocks, list(range(5)))) == (1, False)
    assert_consistent(blocks, [seq.cache])


def test_a_window_group_drops_what_no_query_to_come_can_see() -> None:
    blocks = manager((20, None), (20, 5))
    seq = start(blocks, list(range(40)))
    for computed in range(1, 30):
        compute(blocks, seq, 1)
        # The next query, at token `computed`, sees keys computed - 4 .. computed.
        first = max(0, computed - 4) // 4
        table = seq.block_tables[1]
        assert [block < 0 for block in table] == [i < first for i in range(len(table))]
        assert min(seq.block_tables[0]) >= 0
        assert_consistent(blocks, [seq.cache])
    blocks.free(seq.cache)
    assert_balanced(blocks)


def test_a_hit_needs_only_the_visible_blocks_of_a_window_group() -> None:
    blocks = manager((20, None), (4, 5))
    seq = start(blocks, list(range(24)))
    for _ in range(6):
        compute(blocks, seq, 4)
    # The window pool has four blocks, so the first two of six have been taken again.
    again = sequence(blocks, [*range(24), 99])
    assert match(blocks, again) == (6, False)
    blocks.free(seq.cache)
    blocks.attach(again.cache, 6)
    assert [block < 0 for block in again.block_tables[1]] == [True] * 5 + [False]
    assert match(blocks, sequence(blocks, list(range(7)))) == (0, False)  # held in group 0, gone from group 1
    blocks.free(again.cache)
    assert_balanced(blocks)


@pytest.mark.parametrize("window", [1, 2, 5, 8, 13])
@pytest.mark.parametrize("block_size", [1, 4])
def test_min_blocks_is_what_one_token_at_a_time_really_takes(window: int, block_size: int) -> None:
    blocks = manager((100, None), (100, window), block_size=block_size, prefix_caching=False)
    seq = start(blocks, [0] * 50)
    most = 0
    for _ in range(50):
        blocks.allocate(seq.cache, 1)
        most = max(most, 100 - blocks.available()[1])
        blocks.mark_computed(seq.cache, seq.token_ids, seq.cache.num_computed_tokens + 1)
    assert blocks.min_blocks(50) == [-(-50 // block_size), most]


def test_capacity_is_exactly_what_can_be_allocated() -> None:
    blocks = manager((3, None), (2, None))
    seq = start(blocks, [0] * 30)
    assert blocks.capacity(seq.cache, 30) == 8
    assert blocks.capacity(seq.cache, 5) == 5
    with pytest.raises(RuntimeError, match="no room"):
        blocks.allocate(seq.cache, 9)
    assert blocks.available() == [3, 2]  # nothing was taken
    compute(blocks, seq, 6)
    child = sequence(blocks, [0] * 30)
    blocks.fork(seq.cache, child.cache)
    assert blocks.capacity(child.cache, 1) == 0  # the shared last block needs a copy, and group 1 has none left
    blocks.free(seq.cache)
    assert blocks.capacity(child.cache, 30) == 2


def test_rerotated_keys_are_private_and_their_originals_stay_as_they_were() -> None:
    """Block size 4: re-rotation at 6 tokens leaves a full block in place and copies the partial one; then again at 10."""
    rotation = FakeRotation("dynamic", "rotate")
    blocks = manager((20, None))
    seq = start(blocks, list(range(16)), stage=rotation.stage(6))
    compute(blocks, seq, 6)
    before = list(seq.block_tables[0])
    specs = [rotation.stage(n).specs for n in (6, 8, 11)]
    assert blocks_to_rerotate(blocks, seq.cache, rotation.stage(8).specs) == [2]
    set_aside, rerotations = rerotate(blocks, seq.cache, rotation.stage(8).specs)
    table, kept = seq.block_tables[0], seq.cache.originals[0].blocks
    assert kept[0] == before[0] and table[1] == before[1] and len({*table, *kept}) == 4
    assert set_aside == [KeyRerotation(0, 4, 6, (table[1],), (kept[1],), 4, specs[0], specs[0])]
    assert rerotations == [KeyRerotation(0, 0, 6, tuple(kept), tuple(table), 0, specs[0], specs[1])]
    compute(blocks, seq, 2)
    compute(blocks, seq, 2)
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
    compute(blocks, seq)
    # Another prompt can still use the original of the first block, but nothing computed since.
    assert match(blocks, sequence(blocks, list(range(17)))) == (1, False)
    assert all(blocks.pools[0].private[block] for block in table)
    assert_consistent(blocks, [seq.cache])
    blocks.free(seq.cache)
    assert not any(blocks.pools[0].private)
    assert_balanced(blocks)


def test_a_rerotation_copies_a_shared_last_block_and_leaves_groups_alone_whose_frequencies_stay() -> None:
    rotation = FakeRotation("dynamic", "rotate")
    blocks = BlockManager([KVGroupLayout(20, None), KVGroupLayout(20, None, rotary_groups=())], 4)
    seq = start(blocks, list(range(6)), stage=rotation.stage(6))
    compute(blocks, seq)
    child = sequence(blocks, list(range(6)))
    blocks.fork(seq.cache, child.cache)
    shared = list(seq.block_tables[0])
    assert blocks_to_rerotate(blocks, child.cache, rotation.stage(8).specs) == [3, 0]
    set_aside, rerotations = rerotate(blocks, child.cache, rotation.stage(8).specs)
    assert set_aside[0].sources == (shared[1],) and not {*child.block_tables[0]} & {*shared}
    assert child.block_tables[1] == seq.block_tables[1] and {m.group for m in set_aside + rerotations} == {0}
    with pytest.raises(RuntimeError, match="re-rotated keys"):
        blocks.fork(child.cache, sequence(blocks, [0]).cache)
    assert_consistent(blocks, [seq.cache, child.cache])
    blocks.free(child.cache)
    blocks.free(seq.cache)
    assert_balanced(blocks)


def test_misuse_is_an_error_and_the_checks_see_damage() -> None:
    blocks = manager((4, None))
    seq = start(blocks, [1, 2, 3])
    compute(blocks, seq)
    with pytest.raises(RuntimeError, match="already holds"):
        blocks.attach(seq.cache, 0)
    with pytest.raises(RuntimeError, match="already holds"):
        blocks.fork(seq.cache, seq.cache)
    with pytest.raises(AssertionError, match="reference counts"):
        assert_balanced(blocks)
    blocks.free(seq.cache)
    blocks.free(seq.cache)
    assert_balanced(blocks)
    with pytest.raises(RuntimeError, match="more often"):
        blocks.pools[0].release(0)
    with pytest.raises(ValueError, match="at least one group"):
        BlockManager([], 16)
    assert (blocks.num_blocks, blocks.num_used_blocks, blocks.usage) == (4, 0, 0.0)
