"""Sequence cache: its changes reproduce its tables, positions follow from its layout, only engine.cache modifies it."""

from __future__ import annotations

import ast
from collections import abc
from dataclasses import fields
from pathlib import Path
from typing import ClassVar

import pytest
from engine_helpers.fake_executor import FakeRotation
from helpers.cache_invariants import assert_balanced, assert_consistent
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

import windlass.engine
from windlass.engine.cache.block_manager import BlockManager
from windlass.engine.cache.cache_operations import TableChange, TableChanges
from windlass.engine.cache.kv_cache_spec import KVGroupLayout
from windlass.engine.cache.prefix_cache import HashChain
from windlass.engine.cache.rerotation import blocks_to_rerotate, rerotate
from windlass.engine.cache.sequence_cache import OPEN_END, SequenceCache, SlotLayout, SlotRun

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
    """Random traffic over a few sequence caches; each has a copy of its tables that is updated by its changes only."""

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
        """Slots are allocated, in a new cache after a lookup of the prefix, and often computed at once."""
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
        """Some of the planned tokens are accepted; blocks of the others are released, windows drop, blocks are offered."""
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
            first = data.draw(st.integers(0, full - 1))
            self.blocks.remove_range(
                self.handles[i], first, data.draw(st.integers(first + 1, full)), close_gap=close_gap
            )

    @rule(data=st.data(), stage=st.sampled_from(_STAGES))
    def rerotate(self, data: st.DataObject, stage: tuple[object, ...]) -> None:
        i = self.pick(data, holds=True)
        if i is None or self.planned[i] or self.handles[i].num_computed_tokens == 0 or stage == self.handles[i].specs:
            return
        needs = blocks_to_rerotate(self.blocks, self.handles[i], stage)  # type: ignore[arg-type]
        if all(need <= free for need, free in zip(needs, self.blocks.available(), strict=True)):
            rerotate(self.blocks, self.handles[i], stage)  # type: ignore[arg-type]

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
    def books_agree(self) -> None:
        if hasattr(self, "handles"):
            assert_consistent(self.blocks, self.handles)

    def teardown(self) -> None:
        for i in range(len(getattr(self, "handles", []))):
            apply_changes(self.handles[i].take_changes(), self.copies[i])
            assert self.copies[i] == self.handles[i].block_tables
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
    assert SequenceCacheMachine.kinds == {field.name for field in fields(TableChange)}, "kinds of changes that occurred"


def started(*layouts: tuple[int, int | None], block_size: int = 4) -> tuple[BlockManager, SequenceCache]:
    blocks = BlockManager([KVGroupLayout(n, w) for n, w in layouts], block_size)
    handle = SequenceCache(HashChain(b"root", block_size), _STAGES[0])
    blocks.attach(handle, 0)
    return blocks, handle


def test_a_change_is_as_small_as_what_has_changed() -> None:
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


def test_what_a_change_says() -> None:
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
    blocks.mark_computed(handle, tokens, 13)  # one of them held rejected tokens only
    assert handle.take_changes().groups == (TableChange(4), TableChange(4, num_dropped=2))
    assert handle.take_changes() == TableChanges()
    blocks.free(handle)
    assert handle.take_changes() == TableChanges(True, ())


def test_digests_say_how_many_tokens_stayed_in_front_of_what_was_dropped() -> None:
    """Equal tokens up to there and as many dropped tokens, but different visible keys."""

    def digests(kept: int, shifts: int) -> list[bytes]:
        blocks = BlockManager([KVGroupLayout(20, None)], 4)
        handle = SequenceCache(HashChain(b"root", 4, b"scope"), _STAGES[0])
        blocks.attach(handle, 0)
        for turn in range(shifts + 1):
            room = 4 if turn else 24
            blocks.allocate(handle, room)
            blocks.mark_computed(handle, _TOKENS, handle.num_computed_tokens + room)
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


def test_a_handle_refuses_misuse() -> None:
    blocks, handle = started((20, None))
    with pytest.raises(RuntimeError, match="already holds"):
        handle.hold([], 0, 0)
    with pytest.raises(RuntimeError, match="still holds"):
        handle.reset(HashChain(b"root", 4), _STAGES[0], private=False)
    blocks.free(handle)


# -- only engine.cache writes ------------------------------------------------------------------------------------------

_WRITERS = {
    "hold",
    "take_full_blocks",
    "attach_passage",
    "remove_range",
    "set_rerotated_specs",
    "release",
    "copy",
    "reset",
}
_MUTABLE = {"tables", "originals", "chain"}  # attributes that could be modified in place


def writes(tree: ast.AST) -> abc.Iterator[int]:
    """Lines that modify a handle, recognized by its name: a call of a writing method, or a change of an attribute."""

    def is_handle(node: ast.expr) -> bool:
        named = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        return named in ("cache", "handle")

    def is_part(node: ast.expr) -> bool:
        while isinstance(node, ast.Subscript | ast.Attribute):
            if isinstance(node, ast.Attribute) and node.attr in _MUTABLE and is_handle(node.value):
                return True
            node = node.value
        return False

    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if is_handle(owner) and node.func.attr in _WRITERS:
                yield node.lineno
            if is_part(owner) and node.func.attr not in ("common_blocks", "index", "count"):
                yield node.lineno
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            if (isinstance(target, ast.Attribute) and is_handle(target.value)) or is_part(target):
                yield node.lineno


def test_only_modules_of_the_cache_write_handles() -> None:
    root = Path(windlass.engine.__file__).parent
    found = [
        f"{path.relative_to(root)}:{line}"
        for path in sorted(root.rglob("*.py"))
        if path.relative_to(root).parts[0] != "cache"
        for line in writes(ast.parse(path.read_text()))
    ]
    assert found == []
    assert (
        len(
            list(
                writes(
                    ast.parse("seq.cache.set_rerotated_specs(specs)\nseq.cache.x = 1\nhandle.tables[0].blocks[1] = 3\n")
                )
            )
        )
        == 3
    )
    assert len(list(writes(ast.parse("handle.chain.extend([1], 1)\ndel seq.cache.originals[0].blocks[:]\n")))) == 2
