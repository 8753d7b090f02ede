"""Low-rank updates of adapters by Triton, interpreted, against float64: mixed slots and ranks, and changing tables."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.cpu_kernels import at_the_end_of_memory
from helpers.device import DEVICE, ON_A_CPU
from kernels_helpers.interpreted import ON_THE_DEVICE
from kernels_helpers.low_rank import change, expected
from torch import Tensor

from windlass.kernels import AdapterSlots, LowRankPart, LowRankTarget, LowRankUpdate
from windlass.kernels.backend import BackendOptions
from windlass.kernels.triton.launch import Device
from windlass.kernels.triton.low_rank import DeviceLowRankTable, add_low_rank
from windlass.kernels.triton.triton_backend import TritonBackend

pytestmark = ON_THE_DEVICE
MANY = Device(processors=24)  # enough for parts of K
# The interpreter does not multiply tiles of bfloat16.
FULL, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16


def table_of(changes: list[LowRankUpdate | None], matrix: LowRankTarget) -> DeviceLowRankTable:
    table = DeviceLowRankTable(len(changes), matrix, torch.device(DEVICE))
    for slot, own in enumerate(changes):
        table.put(slot, own)
    return table


def added(x: Tensor, out: Tensor, table: DeviceLowRankTable, slots: Tensor, *, fixed: bool = False) -> Tensor:
    found = out.clone()
    add_low_rank(found, x, table, slots, fixed=fixed, device=MANY)
    return found


def some_slots(rows: int, count: int) -> Tensor:
    """Return runs of rows with one slot, as in prompts, and single rows, as in streams."""
    generator = torch.Generator("cpu").manual_seed(rows)
    runs = torch.randint(-1, count, (rows,), generator=generator, device="cpu").repeat_interleave(7)[: rows // 2]
    single = torch.randint(-1, count, (rows - len(runs),), generator=generator, device="cpu")
    return torch.cat((runs, single)).to(DEVICE)


@pytest.mark.parametrize(
    ("dtype", "kept", "rows", "fixed"),
    [
        *itertools.product((FULL, HALF), (HALF,), (5, 150), (False,)),
        (BRAIN, BRAIN, 5, False),
        (FULL, FULL, 21, True),
        (HALF, BRAIN, 150, False),
    ],
)
def test_mixed_slots_of_parts_with_different_ranks(
    dtype: torch.dtype, kept: torch.dtype, rows: int, fixed: bool
) -> None:
    """Sizes are not multiples of the tiles, two slots are empty, and rows may have no slot."""
    columns, inner = [300, 33, 20], 777
    ranks = [[4, 0, 9], [0, 3, 0], [1, 1, 1], [70, 8, 5]]
    changes: list[LowRankUpdate | None] = [change(columns, inner, own, down=kept, up=kept) for own in ranks]
    changes[1:1] = [None, None]
    table = table_of(changes, LowRankTarget(tuple(columns), inner, 90, kept))
    slots = some_slots(rows, len(changes))
    x = (torch.randn(rows, inner + 3)[:, :inner] / 16).to(dtype)
    out = torch.randn(rows, sum(columns)).to(dtype)
    wanted, size = expected(out, x, changes, slots.tolist())
    found = torch.empty(rows, sum(columns) + 9).to(dtype)[:, 4:-5].copy_(out)
    add_low_rank(found, x, table, slots, fixed=fixed, device=MANY)
    # 16-bit tiles are multiplied after rounding, including x A^T.
    rounding = 4e-7 if dtype == FULL or rows <= 128 or kept != dtype else torch.finfo(dtype).eps / 4
    assert bool(((found.double() - wanted).abs() <= rounding * size + torch.finfo(dtype).eps * wanted.abs()).all())
    plain = torch.tensor([slot < 0 or changes[slot] is None for slot in slots.tolist()])
    assert plain.any() and torch.equal(found[plain], out[plain]), "rows without a slot are not written"


@pytest.mark.parametrize("fixed", [False, True])
def test_rows_do_not_depend_on_each_other(fixed: bool) -> None:
    """With tiles of one size, they do not depend on the number of rows either."""
    changes: list[LowRankUpdate | None] = [change([40], 130, [rank], down=FULL, up=FULL) for rank in (3, 17)]
    rows = 40
    slots, x, out = some_slots(rows, 2), torch.randn(rows, 130), torch.zeros(rows, 40)
    if DEVICE == "cpu" or not fixed:
        # numpy multiplies here. On some processors its order of sums depends on the row; sums of integers are exact.
        x.mul_(8).round_()
        for own in changes:
            assert own is not None
            own.down.mul_(4).round_()
            own.parts[0].up.mul_(4).round_()
    table = table_of(changes, LowRankTarget((40,), 130, 20))
    whole = added(x, out, table, slots, fixed=fixed)
    assert whole.any()
    for first, last in ((0, 1), (39, 40), (3, 20)):
        own_rows = slice(first, last)
        alone = added(x[own_rows], out[own_rows], table, slots[own_rows], fixed=fixed)
        assert torch.equal(alone, whole[own_rows])


@pytest.mark.parametrize("rows", [2, 130])
def test_an_invalid_slot_makes_only_its_row_nan(rows: int) -> None:
    table = table_of([change([40], 24, [3], down=FULL, up=FULL)], LowRankTarget((40,), 24, 4))
    x, out = torch.randn(rows, 24), torch.randn(rows, 40)
    for wrong in (1, -2):
        slots = torch.full((rows,), -1)
        slots[1] = wrong
        found = added(x, out, table, slots)
        assert found[1].isnan().all() and torch.equal(found[0], out[0]) and torch.equal(found[2:], out[2:])


def test_a_table_changes_between_steps_at_the_same_address() -> None:
    """Captured calls use new entries from then on, and do not read removed ones."""
    backend = TritonBackend(BackendOptions(torch.device(DEVICE)))
    table = backend.low_rank_table(2, LowRankTarget((40,), 24, 8))
    assert isinstance(table, DeviceLowRankTable)
    x, zeros, slots, address = torch.randn(2, 24), torch.zeros(2, 40), torch.tensor([1, 0]), table.entries.data_ptr()

    def now() -> Tensor:
        out = zeros.clone()
        backend.add_low_rank(out, x, table, AdapterSlots(slots))
        return out

    assert not now().any()
    for rank in (3, 8):
        own = change([40], 24, [rank], down=FULL, up=FULL)
        table.put(1, own)
        wanted, size = expected(zeros, x, [None, own], [1, 0])
        assert bool(((now().double() - wanted).abs() <= 1e-6 * size).all())
    own.down.fill_(float("nan"))  # as if the memory had been reused
    table.put(1, None)
    assert not now().any() and table.entries.data_ptr() == address


@ON_A_CPU
@pytest.mark.parametrize("rows", [2, 130])
def test_nothing_past_the_operands_is_read(rows: int) -> None:
    for columns, inner, rank in ((33, 17, 3), (130, 31, 5), (7, 5, 1)):
        own = change([columns], inner, [rank], down=HALF, up=HALF)
        part = LowRankPart(0, columns, 0, at_the_end_of_memory(own.parts[0].up), 2.0)
        own = LowRankUpdate(rank, inner, at_the_end_of_memory(own.down), (part,))
        table = table_of([own], LowRankTarget((columns,), inner, rank, HALF))
        x, out = at_the_end_of_memory(torch.randn(rows, inner)), at_the_end_of_memory(torch.randn(rows, columns))
        slots = at_the_end_of_memory(torch.zeros(rows, dtype=torch.int64))
        wanted, size = expected(out, x, [own], [0] * rows)
        add_low_rank(out, x, table, slots, fixed=False, device=MANY)
        assert bool(((out.double() - wanted).abs() <= 1e-6 * size).all())


def test_unsuitable_operands_are_refused() -> None:
    table = table_of([None], LowRankTarget((40,), 24, 4))
    for columns, inner, ranks in (([41], 24, [3]), ([40], 25, [3]), ([40], 24, [5]), ([20, 20], 24, [1, 1])):
        with pytest.raises(ValueError, match="low rank"):
            table.put(0, change(columns, inner, ranks, down=FULL, up=FULL))
    for x, out in ((torch.ones(2, 23), torch.ones(2, 40)), (torch.ones(2, 24), torch.ones(2, 41))):
        with pytest.raises(ValueError, match="add_low_rank"):
            added(x, out, table, torch.zeros(2).long())
    with pytest.raises(ValueError, match="add_low_rank"):
        added(torch.ones(2, 24), torch.ones(2, 40), table, torch.zeros(1).long())
