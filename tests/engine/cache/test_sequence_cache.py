"""Sequence cache and slot layout: changes reproduce the tables, positions follow from the layout."""

from __future__ import annotations

from dataclasses import fields
from typing import ClassVar

import pytest
from engine_helpers.fake_executor import FakeRotation
from helpers.cache_invariants import assert_balanced, assert_consistent
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from windlass.engine.cache.block_manager import BlockManager
from windlass.engine.cache.cache_operations import TableChange, TableChanges
from windlass.engine.cache.kv_cache_spec import KVGroupLayout
from windlass.engine.cache.prefix_cache import HashChain
from windlass.engine.cache.rerotation import blocks_to_rerotate, rerotate
from windlass.engine.cache.sequence_cache import OPEN_END, PLAIN_LAYOUT, SequenceCache, SlotLayout, SlotRun

_TOKENS = list(range(400))
_STAGES = [FakeRotation("dynamic", "rotate").stage(length).specs for length in (6, 8, 11, 16)]
_LAYOUTS = [[(None, 60)], [(None, 60), (5, 40)], [(3, 30)], [(7, 50), (None, 50), (2, 20)]]


def apply_changes(changes: TableChanges, tables: list[list[int]]) -> None:
    """Apply the changes to copies of the tables, one per KV group."""
    if changes.restart:
        tables[:] = [[] for _ in changes.groups]
    for table, change in zip(tables, changes.groups, strict=bool(changes.groups)):
        for first, count in change.removed:
            del table[first : first + count]
        del table[change.length :]
        for index, block in change.replaced:
            table[index] = block
        table += change.appended
        table[: change.num_dropped] = [-1] * change.num_dropped


class SequenceCacheMachine(RuleBasedStateMachine):
    """Random traffic over a few sequence caches; each has a copy of its tables that only its changes update."""

    kinds: ClassVar[set[str]] = set()  # fields of the changes that were not empty

    @initialize(layout=st.sampled_from(_LAYOUTS), block_size=st.integers(1, 4), prefix_caching=st.booleans())
    def begin(self, layout: list[tuple[int | None, int]], block_size: int, prefix_caching: bool) -> None:
        self.blocks = BlockManager([KVGroupLayout(n, window) for window, n in layout], block_size, prefix_caching)
        self.handles = [SequenceCache(HashChain(b"root", block_size), _STAGES[0]) for _ in range(4)]
        self.planned = [0] * len(self.handles)  # tokens with allocated slots that are not computed yet
        self.copies: list[list[list[int]]] = [[] for _ in self.handles]

    def pick(self, data: st.DataObject, *, holds: bool) -> int | None:
        found = [i for i, handle in enumerate(self.handles) if bool(handle.tables) == holds]
        return data.draw(st.sampled_from(found)) if found else None

    @rule(data=st.data(), wanted=st.integers(1, 20), computed=st.booleans())
    def extend(self, data: st.DataObject, wanted: int, computed: bool) -> None:
        """Allocate slots, in a new cache after a prefix lookup, and often compute them at once."""
        i = data.draw(st.integers(0, len(self.handles) - 1))
        if not self.handles[i].tables:
            length = data.draw(st.integers(1, 60))
            hit, _ = self.blocks.match(self.handles[i], _TOKENS[:length], length)
            self.blocks.attach(self.handles[i], hit)
        capacity = self.blocks.capacity(self.handles[i], max(wanted, self.planned[i]))
        if capacity > self.planned[i]:
            self.blocks.allocate(self.handles[i], capacity)
            self.planned[i] = capacity
        if computed:
            self.mark_computed(i, self.planned[i])

    @rule(data=st.data())
    def accept(self, data: st.DataObject) -> None:
        """Accept some of the planned tokens: blocks of the others are released, windows drop, blocks are offered."""
        if (i := self.pick(data, holds=True)) is not None and self.planned[i]:
            self.mark_computed(i, data.draw(st.integers(1, self.planned[i])))

    def mark_computed(self, i: int, accepted: int) -> None:
        if accepted:
            self.blocks.mark_computed(self.handles[i], _TOKENS, self.handles[i].num_computed_tokens + accepted)
            self.planned[i] = 0

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent, child = self.pick(data, holds=True), self.pick(data, holds=False)
        if parent is None or child is None or self.planned[parent] or self.handles[parent].originals:
            return
        self.blocks.fork(self.handles[parent], self.handles[child])
        if data.draw(st.booleans()):
            self.follow_one(parent)
            if self.blocks.capacity(self.handles[parent], 1) > 0:
                self.blocks.allocate(self.handles[parent], 1)  # a shared block that is not full is copied
                self.planned[parent] = 1

    @rule(data=st.data(), close_gap=st.booleans())
    def remove(self, data: st.DataObject, close_gap: bool) -> None:
        if (i := self.pick(data, holds=True)) is None or self.planned[i]:
            return
        full = self.handles[i].num_slots // self.blocks.block_size
        if full and self.handles[i].num_rerotations == 0:
            if data.draw(st.booleans()):
                self.follow_one(i)  # otherwise the removal is often part of a restart
            first = data.draw(st.integers(0, full - 1))
            self.blocks.remove_range(
                self.handles[i], first, data.draw(st.integers(first + 1, full)), close_gap=close_gap
            )

    @rule(data=st.data(), stage=st.sampled_from(_STAGES))
    def rerotate(self, data: st.DataObject, stage: tuple[object, ...]) -> None:
        i = self.pick(data, holds=True)
        if i is None or self.planned[i] or self.handles[i].num_computed_tokens == 0 or stage == self.handles[i].specs:
            return
        needs = blocks_to_rerotate(self.blocks, self.handles[i], stage)
        if all(need <= free for need, free in zip(needs, self.blocks.available(), strict=True)):
            rerotate(self.blocks, self.handles[i], stage)

    @rule(data=st.data(), again=st.booleans())
    def free(self, data: st.DataObject, again: bool) -> None:
        if (i := self.pick(data, holds=True)) is None:
            return
        handle, self.planned[i] = self.handles[i], 0
        if handle.num_rerotations or handle.num_shifts:
            self.blocks.reset(handle, HashChain(b"root", self.blocks.block_size), _STAGES[0], private=False)
        else:
            self.blocks.free(handle)
        if again:
            self.blocks.attach(handle, 0)

    @rule(data=st.data(), whole=st.sampled_from([False, False, False, True]))
    def follow(self, data: st.DataObject, whole: bool) -> None:
        self.follow_one(data.draw(st.integers(0, len(self.handles) - 1)), whole=whole)

    def follow_one(self, i: int, *, whole: bool = False) -> None:
        handle, copy = self.handles[i], self.copies[i]
        changes = handle.take_changes(whole=whole)
        self.kinds.update(
            field.name for change in changes.groups for field in fields(change) if getattr(change, field.name)
        )
        apply_changes(changes, copy)
        assert copy == handle.block_tables
        assert not whole or changes.restart
        assert handle.take_changes() == TableChanges()

    @invariant()
    def cache_is_consistent(self) -> None:
        if hasattr(self, "handles"):
            assert_consistent(self.blocks, self.handles)

    def teardown(self) -> None:
        for i in range(len(getattr(self, "handles", []))):
            self.follow_one(i)
            self.blocks.free(self.handles[i])
        if hasattr(self, "handles"):
            assert_balanced(self.blocks)


def test_changes_reproduce_the_tables() -> None:
    run_state_machine_as_test(
        SequenceCacheMachine,
        settings=settings(
            max_examples=150, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
    assert SequenceCacheMachine.kinds == {field.name for field in fields(TableChange)}, (
        "kinds of changes that did not occur"
    )


def started(*layouts: tuple[int, int | None], block_size: int = 4) -> tuple[BlockManager, SequenceCache]:
    blocks = BlockManager([KVGroupLayout(n, w) for n, w in layouts], block_size)
    handle = SequenceCache(HashChain(b"root", block_size), _STAGES[0])
    blocks.attach(handle, 0)
    return blocks, handle


def test_changes_contain_only_changed_entries() -> None:
    blocks, handle = started((1000, None), (40, 9))
    assert handle.take_changes() == TableChanges(True, (TableChange(), TableChange()))
    tokens, sizes = list(range(3000)), []
    for computed in range(1, 3000):
        blocks.allocate(handle, 1)
        changes = handle.take_changes()
        assert not changes.restart
        sizes.append(sum(len(change.replaced) + len(change.appended) for change in changes.groups))
        blocks.mark_computed(handle, tokens, computed)
    assert max(sizes) == 2 and sum(sizes) == 2 * 750


def test_table_changes_of_appends_copies_and_drops() -> None:
    blocks, handle = started((100, None), (100, 5))
    tokens = list(range(100))
    blocks.allocate(handle, 10)
    blocks.mark_computed(handle, tokens, 10)
    assert handle.take_changes() == TableChanges(
        True, (TableChange(0, (), (0, 1, 2)), TableChange(0, (), (-1, 1, 2), num_dropped=1))
    )
    child = SequenceCache(HashChain(b"root", 4), _STAGES[0])
    blocks.fork(handle, child)
    blocks.allocate(handle, 8)  # the shared last block is copied, two are appended
    assert handle.take_changes().groups == (
        TableChange(3, ((2, 3),), (4, 5)),
        TableChange(3, ((2, 3),), (4, 5), num_dropped=1),
    )
    blocks.mark_computed(handle, tokens, 13)  # one of them has only rejected tokens
    assert handle.take_changes().groups == (TableChange(4), TableChange(4, num_dropped=2))
    assert handle.take_changes() == TableChanges()
    blocks.free(handle)
    assert handle.take_changes() == TableChanges(True, ())


def test_digests_depend_on_the_retained_tokens_before_a_shift() -> None:
    """Equal tokens up to there and equally many dropped tokens, but different visible keys."""

    def digests(kept: int, shifts: int) -> list[bytes]:
        blocks = BlockManager([KVGroupLayout(20, None)], 4)
        handle = SequenceCache(HashChain(b"root", 4, b"scope"), _STAGES[0])
        blocks.attach(handle, 0)
        for turn in range(shifts + 1):
            count = 4 if turn else 24
            blocks.allocate(handle, count)
            blocks.mark_computed(handle, _TOKENS, handle.num_computed_tokens + count)
            blocks.remove_range(handle, kept, kept + 1, close_gap=True)
        return [digest for digest in blocks.pools[0].digests if digest is not None]

    once, again, other = digests(1, 3), digests(1, 3), digests(2, 3)
    assert once == again and len(set(once)) == len(set(other)) == 9
    assert len(set(once) & set(other)) == 6  # those of the plain text


def test_rerotations_are_split_where_positions_jump() -> None:
    blocks, handle = started((20, None))
    handle.layout = SlotLayout((SlotRun(0, 6, 0), SlotRun(6, OPEN_END, 100)))
    blocks.allocate(handle, 10)
    blocks.mark_computed(handle, list(range(10)), 10)
    _, rerotations = rerotate(blocks, handle, _STAGES[1])
    assert [(r.start, r.end, r.first_position, len(r.sources)) for r in rerotations] == [(0, 6, 0, 2), (6, 10, 100, 2)]
    assert rerotations[0].targets[1] == rerotations[1].targets[0] == handle.block_tables[0][1]


def test_misuse_of_a_sequence_cache_is_an_error() -> None:
    blocks, handle = started((20, None))
    with pytest.raises(RuntimeError, match="already holds"):
        handle.hold([], 0, 0)
    with pytest.raises(RuntimeError, match="still holds"):
        handle.reset(HashChain(b"root", 4), _STAGES[0], private=False)
    blocks.free(handle)


def listed(layout: SlotLayout, num_slots: int) -> list[tuple[int, int] | None]:
    """(position of rotation, current position) of every slot; None for empty slots."""
    found: list[tuple[int, int] | None] = [None] * num_slots
    for run in layout.runs:
        for slot in range(run.first_slot, min(run.end_slot, num_slots)):
            stored = run.position + slot - run.first_slot
            assert found[slot] is None
            found[slot] = stored, stored + run.shift
    return found


CUTS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4), st.booleans(), st.integers(0, 12)), max_size=8)


@given(start=st.integers(0, 50), holes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5)), max_size=3), cuts=CUTS)
def test_removed_ranges_equal_those_of_a_list(
    start: int, holes: list[tuple[int, int]], cuts: list[tuple[int, int, bool, int]]
) -> None:
    runs, slot, position = [], 0, start
    for length, hole in holes:
        runs.append(SlotRun(slot, slot + length, position, 7))  # keys that were rotated at other positions
        slot, position = slot + length + hole, position + length
    layout = SlotLayout((*runs, SlotRun(slot, OPEN_END, position + 7)), slot_offset=slot - (position - start))
    num_slots = slot + 3
    model = listed(layout, num_slots)
    dropped = closed = 0
    num_tokens = position - start + 3  # ever
    for first, count, close_gap, grown in cuts:
        model += [(p, p) for p in range(model[-1][1] + 1, model[-1][1] + 1 + grown)] if model and model[-1] else []
        num_tokens += len(model) - num_slots
        num_slots = len(model)
        first = min(first, num_slots)
        end = min(first + count, num_slots - 1)
        if first >= end:
            continue
        layout = layout.with_range_removed(first, end, close_gap=close_gap)
        gone = sum(entry is not None for entry in model[first:end])
        dropped, closed = dropped + gone, closed + gone * close_gap
        before = [entry and (entry[0], entry[1] + gone * close_gap) for entry in model[:first]]
        model = [*before, *model[end:]]
        num_slots = len(model)
        assert listed(layout, num_slots) == model and layout.slot_offset == num_slots - num_tokens
        assert (layout.num_dropped, layout.num_gap_closed) == (dropped, closed)
        assert list(layout.spans(0, len(model)))[-1][1] == len(model)
        for window in (1, 3, 8, 100):
            seen = layout.first_visible_slot(len(model), window)
            lowest = layout.runs[-1].offset + len(model) - window + 1
            visible = [slot for slot, entry in enumerate(model) if entry is not None and entry[1] >= lowest]
            if [entry[1] for entry in model if entry] == sorted(entry[1] for entry in model if entry):
                assert seen <= min(visible, default=len(model))
                assert all(entry is None or entry[1] < lowest for entry in model[:seen])


def test_a_layout_is_plain_until_a_range_is_removed() -> None:
    assert PLAIN_LAYOUT.is_plain and PLAIN_LAYOUT.first_position == 0 and SlotLayout.starting_at(9).first_position == 9
    shifted = PLAIN_LAYOUT.with_range_removed(16, 32, close_gap=True)
    assert not shifted.is_plain and shifted.runs == (SlotRun(0, 16, 0, 16), SlotRun(16, OPEN_END, 32))
    assert (shifted.first_position, shifted.slot_offset) == (0, -16)
    again = shifted.with_range_removed(16, 48, close_gap=True)
    assert again.runs == (SlotRun(0, 16, 0, 48), SlotRun(16, OPEN_END, 64))
    still = PLAIN_LAYOUT.with_range_removed(16, 32, close_gap=False)
    assert still.runs == (SlotRun(0, 16, 0), SlotRun(16, OPEN_END, 32)) and still.num_gap_closed == 0
    assert PLAIN_LAYOUT.with_range_removed(0, 16, close_gap=True).runs == (SlotRun(0, OPEN_END, 16),)


@pytest.mark.parametrize("count", [1, 1000])
def test_repeated_shifts_do_not_add_runs(count: int) -> None:
    layout = PLAIN_LAYOUT
    for _ in range(count):
        layout = layout.with_range_removed(16, 32, close_gap=True)
    assert len(layout.runs) == 2 and layout.num_dropped == 16 * count
