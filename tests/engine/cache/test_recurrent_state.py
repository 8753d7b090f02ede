"""Recurrent state blocks: one per sequence, copies at the end of a block of tokens, and their eviction."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from engine_helpers.cached_sequence import CachedSequence
from engine_helpers.fake_executor import FakeRotation
from helpers.cache_invariants import assert_balanced, assert_consistent
from helpers.configs import engine_config

from windlass.engine.cache.block_manager import BlockManager
from windlass.engine.cache.cache_operations import BlockCopy
from windlass.engine.cache.kv_cache_budget import plan_cache
from windlass.engine.cache.kv_cache_spec import KVGroupLayout, KVGroupSpec, StateGroupSpec
from windlass.engine.cache.prefix_cache import BlockKey
from windlass.engine.core.introspection import snapshot_cache
from windlass.engine.errors import LoadError
from windlass.engine.interface.config import SpeculationConfig
from windlass.engine.scheduling.chunked_prefill import ChunkBoundaries

SIZE = 4


class Sequence(CachedSequence):
    @property
    def state(self) -> list[int]:
        return self.block_tables[1]

    def compute(self, count: int | None = None, num_inflight_tokens: int = 0) -> list[BlockCopy]:
        """Copies of states."""
        return [copy for copy in super().compute(count, num_inflight_tokens) if copy.group == 1]


def manager(states: int = 8, pages: int = 60, prefix_caching: bool = True) -> BlockManager:
    return BlockManager([KVGroupLayout(pages, None), KVGroupLayout.of_states(states)], SIZE, prefix_caching)


def test_a_state_is_copied_at_the_end_of_a_block() -> None:
    blocks = manager()
    a = Sequence(blocks, list(range(20)))
    a.start()
    assert a.compute(6) == [] and a.state == [0]
    assert a.compute(2) == [] and a.state == [0]  # the end of a block: cached from now on
    assert a.compute(1) == [BlockCopy(1, 0, 1)] and a.state == [1]
    assert a.compute(6) == [] and a.state == [
        1
    ]  # tokens 9 to 15 passed the end of another block, where no state was cached
    assert len(a.cache.block_tables[0]) == 4


def test_a_prompt_starts_only_at_a_cached_state() -> None:
    blocks = manager()
    a = Sequence(blocks, list(range(15)))
    a.start()
    a.compute(8)
    a.compute(7)
    assert Sequence(blocks, [*range(14), 99]).hit() == 8  # three blocks of keys are cached
    assert Sequence(blocks, [*range(7), 99, 100]).hit() == 0
    assert Sequence(blocks, list(range(8))).hit() == 0  # the last token is computed, and no state before it was cached
    assert Sequence(blocks, list(range(15)), salt="other").hit() == 0
    b = Sequence(blocks, list(range(12)))
    assert b.start() == 8 and b.compute() == [BlockCopy(1, 0, 2)]
    assert b.state == [2]  # block 1 belongs to a
    assert_consistent(blocks, [a.cache, b.cache])


def test_no_state_is_cached_with_tokens_in_flight() -> None:
    blocks = manager()
    a = Sequence(blocks, list(range(20)))
    a.start()
    a.compute(8, num_inflight_tokens=1)
    assert a.compute(1) == [] and a.state == [0]
    assert Sequence(blocks, list(range(20))).hit() == 0


def test_a_state_at_a_block_end_is_copied_before_planned_tokens() -> None:
    """If a block is available. A cancelled planned step leaves the copy, which is valid too."""
    for states, cancelled in ((4, False), (4, True), (1, False)):
        blocks = manager(states=states)
        a = Sequence(blocks, list(range(20)))
        a.start()
        a.compute(7)
        assert blocks.checkpoint_states(a.cache, 0) == []  # in the middle of a block
        blocks.allocate(a.cache, 1)
        copies = blocks.checkpoint_states(a.cache, 1)
        assert copies == ([BlockCopy(1, 0, 1)] if states > 1 else [])
        blocks.mark_computed(a.cache, a.tokens, 8, 0 if cancelled else 1)
        assert a.state == ([1] if cancelled else [0])
        assert Sequence(blocks, list(range(20))).hit() == (8 if states > 1 else 0)
        assert states == 1 or blocks.pools[1].cached[a.cache.chain.digests[1]] == 1
        assert_consistent(blocks, [a.cache])
        a.free()
        assert_balanced(blocks)


@pytest.mark.parametrize(("accepted", "hit"), [(0, 0), (1, 8), (2, 8), (5, 12), (6, 12)])
def test_the_state_after_accepted_tokens_is_retained(accepted: int, hit: int) -> None:
    blocks = manager(states=9)
    a = Sequence(blocks, list(range(13)))
    a.start()
    a.compute(6)
    assert blocks.allocate(a.cache, 1) == []
    assert blocks.capacity_for_proposals(a.cache, 100) == 8  # a block for each except the last
    assert blocks.allocate_for_proposals(a.cache, 6) == []
    assert a.state == [0, 1, 2, 3, 4, 5, 6]  # after tokens 12, 6, 7, 8, 9, 10 and 11
    blocks.mark_computed(a.cache, a.tokens, 7 + accepted)
    assert a.state == [[1, 2, 3, 4, 5, 6, 0][accepted]]
    assert Sequence(blocks, a.tokens).hit() == hit
    assert_consistent(blocks, [a.cache])
    assert hit == 0 or blocks.pools[1].cached[a.cache.chain.digests[hit // SIZE - 1]] == {8: 2, 12: 6}[hit]
    a.free()
    assert_balanced(blocks)


def test_no_state_is_copied_without_prefix_cache() -> None:
    blocks = manager(prefix_caching=False)
    a = Sequence(blocks, list(range(20)))
    a.start()
    assert a.compute(8) == a.compute(8) == a.compute(1) == []
    assert a.state == [0]


def test_samples_copy_a_shared_state() -> None:
    blocks = manager()
    a, b = Sequence(blocks, list(range(6))), Sequence(blocks, list(range(6)))
    a.start()
    a.compute()
    blocks.fork(a.cache, b.cache)
    assert b.state == a.state == [0]
    b.tokens = [*b.tokens, 7]
    assert b.compute() == [BlockCopy(1, 0, 1)] and a.state == [0]
    a.tokens = [*a.tokens, 8]
    assert a.compute() == []
    assert_consistent(blocks, [a.cache, b.cache])


def test_the_last_state_of_a_stream_is_evicted_last() -> None:
    blocks = manager(states=5)
    a = Sequence(blocks, list(range(30)))
    a.start()
    a.compute(8)  # a prompt's, block 0
    for _ in range(12):
        a.compute(1)  # 12, 16 and 20 tokens: blocks 1, 2 and 3
    a.free()
    assert [Sequence(blocks, list(range(n))).hit() for n in (9, 13, 17, 21)] == [8, 12, 16, 20]
    # Four states are reused: first the free one, then superseded ones, and retained ones last.
    others = [Sequence(blocks, [100 + n]) for n in range(4)]
    left = []
    for other in others:
        other.start()
        other.compute()
        left.append([n for n in (9, 13, 17, 21) if Sequence(blocks, list(range(n))).hit() == n - 1])
    assert left == [[9, 13, 17, 21], [9, 13, 21], [9, 21], [21]]


def test_sparse_states_of_a_long_prompt_are_evicted_last() -> None:
    blocks = manager(states=40, pages=1000)
    a = Sequence(blocks, list(range(3000)))
    a.start()
    for _ in range(29):
        a.compute(100)
    a.compute(96)
    a.compute(4)
    a.tokens += [1, 2, 3, 4, 5]
    for _ in range(5):
        a.compute(1)
    a.free()
    lengths = {digest: SIZE * (i + 1) for i, digest in enumerate(a.cache.chain.digests)}
    digests = [blocks.pools[1].digests[block] for block in blocks.pools[1]._idle]  # in order of eviction
    order = [lengths[digest] for digest in digests if digest is not None]
    assert len(order) == 32 and order[-4:] == [1100, 2100, 3000, 3004]


def test_a_single_sequence_needs_two_states() -> None:
    blocks = manager(states=2)
    a = Sequence(blocks, list(range(40)))
    a.start()
    for _ in range(40):
        a.compute(1)
    assert blocks.min_blocks(40) == [10, 2]
    a.free()
    assert_balanced(blocks)


def test_needed_blocks_and_capacity_with_few_states() -> None:
    blocks = manager(states=2)
    a, b = Sequence(blocks, list(range(9))), Sequence(blocks, list(range(50, 59)))
    a.start()
    b.start()
    assert blocks.blocks_still_needed(a.cache, 9, 9, rerotates=False) == [3, 1]
    a.compute(8)
    assert blocks.blocks_still_needed(a.cache, 9, 9, rerotates=False) == [1, 1]
    b.compute(7)
    assert blocks.blocks_still_needed(b.cache, 9, 9, rerotates=False) == [1, 0]
    assert (blocks.capacity(a.cache, 1), blocks.capacity(b.cache, 1)) == (0, 1)


def test_dropped_tokens_leave_the_state_unchanged() -> None:
    blocks = manager()
    a = Sequence(blocks, list(range(30)))
    a.start()
    a.compute(14)
    blocks.remove_range(a.cache, 1, 2, close_gap=True)
    assert a.state == [0] and a.cache.num_slots == 10
    a.compute(2)  # the end of a block, but not of a prompt prefix
    assert a.compute(1) == []
    swapped_out = blocks.swap_out(a.cache)
    assert swapped_out[1] == (0,)
    assert blocks.swap_in(a.cache)[1] == (0,) and len(a.state) == 1


class RecordingListener:
    """Block listener that records the indices of offered states."""

    def __init__(self) -> None:
        self.states: list[int] = []  # indices of blocks whose states were offered

    def offer(self, key: BlockKey, block: int, index: int, passage: object = None) -> None:
        if key.group == 1:
            self.states.append(index)

    def withdraw(self, key: BlockKey, block: int, passage: object) -> None: ...


def test_only_retained_states_are_offered_to_files() -> None:
    listener = RecordingListener()
    groups = [KVGroupLayout(1000, None), KVGroupLayout.of_states(40)]
    blocks = BlockManager(groups, SIZE, listener=listener)
    a = Sequence(blocks, list(range(1500)))
    a.start()
    for _ in range(3):
        a.compute(500)  # 1000 and 1500 are superseded; 1500 passes 1024
    a.tokens += list(range(30))
    for _ in range(20):
        a.compute(1)
    assert listener.states == [1500 // SIZE - 1]
    a.free()
    assert listener.states == [1500 // SIZE - 1, 1520 // SIZE - 1]
    b = Sequence(blocks, [7] * 22)
    b.start()
    b.compute(20)
    b.compute(2)
    b.tokens += [1, 2, 3]
    for _ in range(2):
        b.compute(1)  # the end of a sampled block: the state of the prompt is retained
    assert listener.states[2:] == [20 // SIZE - 1]


def test_second_keys_have_no_state() -> None:
    blocks = manager(states=3)
    a = Sequence(blocks, list(range(21)), stage=FakeRotation(near=4).stage(1))
    a.start()
    a.compute(8)
    a.compute(8)
    a.compute(5)
    assert [len(table) for table in a.cache.second_keys.block_tables] == [6, 0] and len(a.state) == 1
    # Second keys are cached up to 20 tokens, states at 16 and 8: the match must satisfy both.
    b = Sequence(blocks, [*range(14), 99], stage=FakeRotation(near=4).stage(1))
    assert b.start() == 8
    c = Sequence(blocks, list(range(8)), stage=FakeRotation(near=4).stage(1))
    assert c.hit() == 0
    assert blocks.blocks_still_needed(b.cache, 15, 15, rerotates=False)[1] == 1
    assert_consistent(blocks, [a.cache, b.cache])


def test_cache_snapshot_shows_states() -> None:
    blocks = manager()
    a = Sequence(blocks, list(range(9)))
    a.start()
    a.compute(8)
    a.compute()
    pages, states = snapshot_cache(blocks, [a.cache])
    assert (pages.states, sum(pages.held)) == (False, 3)
    assert (states.states, states.window, sum(states.held), sum(states.idle)) == (True, None, 1, 1)
    assert states.owners[1] == 0


def test_random_traffic_reads_states_of_its_own_tokens() -> None:
    """Simulated states: each block contains the tokens from which it was computed."""
    hits = passed = 0
    for seed in range(30):
        rng = random.Random(seed)
        blocks = manager(states=rng.randint(4, 16))
        memory: dict[int, tuple[int, ...]] = {}
        live: list[Sequence] = []
        for _ in range(120):
            act = rng.random()
            if act < 0.2 and len(live) < 3:
                one = Sequence(blocks, [rng.randint(0, 1) for _ in range(rng.randint(1, 24))])
                hits += one.start() > 0
                live.append(one)
            elif live and act < 0.3:
                blocks.free(live.pop(rng.randrange(len(live))).cache)
            elif live:
                one = rng.choice(live)
                one.tokens += [rng.randint(0, 1)] * (one.cache.num_computed_tokens == len(one.tokens))
                count = rng.randint(1, len(one.tokens) - one.cache.num_computed_tokens)
                if not blocks.capacity(one.cache, count):
                    continue
                computed = one.cache.num_computed_tokens
                copies, proposed = blocks.allocate(one.cache, count), 0
                if count == 1 and computed + count == len(one.tokens):
                    proposed = blocks.capacity_for_proposals(one.cache, rng.randint(0, 6))
                    copies += blocks.allocate_for_proposals(one.cache, proposed)
                for copy in copies:
                    if copy.group == 1:
                        memory[copy.target] = memory[copy.source]
                block, *others = one.state
                assert len(others) == proposed
                before = memory[block] if computed else ()
                assert before == tuple(one.tokens[:computed])
                accepted = rng.randint(0, proposed)
                draft = [rng.randint(0, 1) if i < accepted else 2 for i in range(proposed)]
                for i, behind in enumerate((*others, block)):
                    memory[behind] = (*one.tokens[: computed + count], *draft[:i])
                one.tokens += draft[:accepted]
                blocks.mark_computed(one.cache, one.tokens, computed + count + accepted)
                passed += accepted
                assert len(one.state) == 1 and memory[one.state[0]] == tuple(one.tokens[: computed + count + accepted])
            assert_consistent(blocks, [one.cache for one in live])
    assert hits > 10 and passed > 100


@pytest.mark.parametrize(
    ("start", "due", "tokens", "taken"),
    [
        (0, 100, 512, 96),  # all of it, except its end
        (96, 4, 512, 4),  # which is a separate chunk
        (0, 100, 50, 48),
        (32, 68, 50, 48),
        (40, 60, 50, 40),  # from within a block
        (0, 100, 10, 0),  # not even one block
        (0, 16, 512, 16),  # the last token is computed in any case, so nothing before it ends a block
        (0, 17, 512, 16),
        (0, 7, 512, 7),
        (16, 1, 512, 1),
    ],
)
def test_chunks_end_at_block_boundaries(start: int, due: int, tokens: int, taken: int) -> None:
    assert ChunkBoundaries(0, 16, align_to_blocks=True).max_chunk(start, due, tokens) == taken


def test_aligned_chunks_have_a_minimum_length() -> None:
    cuts = ChunkBoundaries(32, 16, align_to_blocks=True)
    assert cuts.max_chunk(0, 100, 90) == 64  # so that 32 are left before the end
    assert cuts.max_chunk(0, 100, 20) == 0
    assert cuts.max_chunk(0, 100, 200) == 96


STATES = StateGroupSpec((0, 1), channels=48, width=4, heads=4, key_dim=8, value_dim=8)
GROUP = KVGroupSpec((2,), 2, 16, None)


def test_state_bytes() -> None:
    assert STATES.shapes == ((3, 48), (4, 8, 8)) and STATES.block_bytes == 4 * 2 * (144 + 256)


def test_states_get_their_share_of_the_budget(tmp_path: Path) -> None:
    config = engine_config(tmp_path, max_num_seqs=8)
    ample = plan_cache(config, [GROUP], 256, "float32", 1 << 20, states=STATES)
    assert ample.num_states == 17  # 8 running, one to copy to, and as many cached
    assert ample.num_bytes <= 1 << 20 and ample.num_blocks[0] == 8 * 16
    without = plan_cache(config, [GROUP], 256, "float32", 1 << 20)
    assert ample.num_bytes - without.num_bytes == 17 * STATES.block_bytes and without.num_states == 0
    speculating = replace(config, scheduling=replace(config.scheduling, speculation=SpeculationConfig(num_tokens=3)))
    assert plan_cache(speculating, [GROUP], 256, "float32", 1 << 20, states=STATES).num_states == 17 + 8 * 3
    drafted = plan_cache(config, [GROUP], 256, "float32", 1 << 20, states=STATES, draft_state_bytes=100)
    assert drafted.num_states == 17 and drafted.num_bytes == ample.num_bytes + 17 * 100
    scarce = plan_cache(config, [GROUP], 256, "float32", 64 << 10, states=STATES)
    assert scarce.num_states == (32 << 10) // STATES.block_bytes == 10 and scarce.num_bytes <= 64 << 10
    alone = replace(config, cache=replace(config.cache, prefix_caching=False))
    assert plan_cache(alone, [GROUP], 256, "float32", 1 << 20, states=STATES).num_states == 9
    assert plan_cache(config, [GROUP], 16, "float32", 4 * STATES.block_bytes, states=STATES).num_states == 2
    with pytest.raises(LoadError, match=r"the recurrent state of this model needs .* raise `cache.memory`"):
        plan_cache(config, [GROUP], 16, "float32", 4 * STATES.block_bytes - 1, states=STATES)
    # A configured length has priority over states for later prompts.
    asked = replace(config, max_model_len=192)
    long = plan_cache(asked, [GROUP], 256, "float32", 64 << 10, states=STATES)
    assert long.max_model_len == 192 and 2 <= long.num_states < scarce.num_states and long.num_bytes <= 64 << 10
    with pytest.raises(LoadError, match=r"a context of 1024 tokens does not fit"):
        plan_cache(replace(config, max_model_len=1024), [GROUP], 256, "float32", 64 << 10, states=STATES)
