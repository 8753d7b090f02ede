"""Slot layouts against lists of tokens: after any removal every token has the slot and position given by a plain list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.engine.cache.sequence_cache import OPEN_END, PLAIN_LAYOUT, SlotLayout, SlotRun


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
def test_cutting_out_is_what_it_is_for_a_list(
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
            standing = [slot for slot, entry in enumerate(model) if entry is not None and entry[1] >= lowest]
            if [entry[1] for entry in model if entry] == sorted(entry[1] for entry in model if entry):
                assert seen <= min(standing, default=len(model))
                assert all(entry is None or entry[1] < lowest for entry in model[:seen])


def test_a_layout_is_plain_until_something_is_cut_out() -> None:
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
def test_the_number_of_runs_does_not_grow(count: int) -> None:
    layout = PLAIN_LAYOUT
    for _ in range(count):
        layout = layout.with_range_removed(16, 32, close_gap=True)
    assert len(layout.runs) == 2 and layout.num_dropped == 16 * count
