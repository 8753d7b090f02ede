"""Low-rank updates of adapters against float64: ranks, dtypes, mixed slots, and shapes that do not fill vectors."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.cpu_kernels import at_the_end_of_memory
from kernels_helpers.checks import same_on_threads
from kernels_helpers.low_rank import Expected, change, expected

from windlass.kernels import AdapterSlots, LowRankPart, LowRankTarget, LowRankUpdate, select_backend
from windlass.kernels.cpu import load
from windlass.kernels.cpu.library import Library
from windlass.kernels.cpu.matmul_bindings import CompiledLowRankTable, add_low_rank

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def table_of(changes: list[LowRankUpdate | None], columns: int, inner: int) -> CompiledLowRankTable:
    table = CompiledLowRankTable(len(changes), columns, inner)
    for slot, own in enumerate(changes):
        table.put(slot, own)
    return table


def close(found: torch.Tensor, of: Expected, dtype: torch.dtype) -> bool:
    wanted, size = of
    return bool(((found.double() - wanted).abs() <= 4e-7 * size + torch.finfo(dtype).eps * wanted.abs()).all())


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5, 7, 8, 16, 31, 64])
def test_every_rank_and_odd_shapes(form: Library, rank: int) -> None:
    for columns, inner in ((1, 1), (31, 15), (32, 16), (45, 33), (300, 2051), (33, 4100)):
        changes = [change([columns], inner, [rank], down=torch.float32, up=torch.float32), None]
        table = table_of(changes, columns, inner)
        for slots in ([0], [-1, 0, 1, 0, 0], [0] * 19):
            x, out = torch.randn(len(slots), inner), torch.randn(len(slots), columns)
            wanted = expected(out, x, changes, slots)
            before = out.clone()
            add_low_rank(form, out, x, table, torch.tensor(slots))
            assert close(out, wanted, torch.float32), (columns, inner, slots)
            for row, slot in enumerate(slots):
                if slot != 0:
                    assert torch.equal(out[row], before[row])


@pytest.mark.quick_cases(10)
@pytest.mark.parametrize(("dtype", "down", "up"), itertools.product(FLOATS, FLOATS, FLOATS))
def test_every_dtype_and_parts_of_different_ranks(
    form: Library, dtype: torch.dtype, down: torch.dtype, up: torch.dtype
) -> None:
    columns, inner, rows = [70, 33, 20], 77, 23
    ranks = [[4, 0, 9], [0, 3, 0], [1, 1, 1], [16, 8, 5]]
    changes: list[LowRankUpdate | None] = [change(columns, inner, own, down=down, up=up) for own in ranks]
    changes.insert(2, None)
    table = table_of(changes, sum(columns), inner)
    generator = torch.Generator().manual_seed(3)
    slots = torch.randint(-1, len(changes), (rows,), generator=generator)
    x, out = torch.randn(rows, inner).to(dtype), torch.randn(rows, sum(columns)).to(dtype)
    wanted = expected(out, x, changes, slots.tolist())
    add_low_rank(form, out, x, table, slots)
    assert close(out, wanted, dtype)


def test_the_bits_of_a_row_depend_on_that_row_only(form: Library) -> None:
    columns, inner, rows = [100, 40], 3000, 40
    changes = [change(columns, inner, [1 + i, 16 - i], down=FLOATS[i % 3], up=FLOATS[i % 2]) for i in range(4)]
    table = table_of(list(changes), sum(columns), inner)
    slots = torch.randint(-1, 4, (rows,), generator=torch.Generator().manual_seed(1))
    x, out = torch.randn(rows, inner), torch.randn(rows, sum(columns))

    def added() -> torch.Tensor:
        together = out.clone()
        add_low_rank(form, together, x, table, slots)
        return together

    found = same_on_threads(added, 1, 2, 3, 4)
    for row in range(rows):
        alone = out[row : row + 1].clone()
        add_low_rank(form, alone, x[row : row + 1], table, slots[row : row + 1])
        assert torch.equal(alone[0], found[row])
    strided = torch.zeros(rows, 2 * inner)[:, :inner]
    strided.copy_(x)
    target = torch.zeros(rows, sum(columns) + 5)[:, 5:]
    target.copy_(out)
    add_low_rank(form, target, strided, table, slots)
    assert torch.equal(target, found)


def test_nothing_past_the_operands_is_read_or_written(form: Library) -> None:
    for columns, inner, rank in ((33, 17, 3), (65, 31, 5), (7, 5, 1)):
        own = change([columns], inner, [rank], down=torch.bfloat16, up=torch.float16)
        own = LowRankUpdate(
            rank,
            inner,
            at_the_end_of_memory(own.down),
            (LowRankPart(0, columns, 0, at_the_end_of_memory(own.parts[0].up), 2.0),),
        )
        x, out = at_the_end_of_memory(torch.randn(2, inner)), at_the_end_of_memory(torch.randn(2, columns))
        wanted = expected(out, x, [own], [0, 0])
        add_low_rank(form, out, x, table_of([own], columns, inner), torch.tensor([0, 0]))
        assert close(out, wanted, torch.float32)


def test_a_table_changes_between_steps() -> None:
    table = CompiledLowRankTable(2, 40, 24)
    x, zeros, slots = torch.randn(2, 24), torch.zeros(2, 40), torch.tensor([1, 0])
    address = table.address

    def added() -> torch.Tensor:
        out = zeros.clone()
        add_low_rank(load(), out, x, table, slots)
        return out

    assert torch.equal(added(), zeros)
    changes = [change([40], 24, [rank], down=torch.float32, up=torch.float32) for rank in (3, 8)]
    for own in changes:
        table.put(1, own)
        assert close(added(), expected(zeros, x, [None, own], [1, 0]), torch.float32)
        assert not added()[1].any()
    table.put(1, None)
    assert torch.equal(added(), zeros) and table.address == address


def test_unsuitable_operands_are_refused() -> None:
    table = table_of([change([40], 24, [3], down=torch.float32, up=torch.float32)], 40, 24)
    x, out = torch.randn(2, 24), torch.randn(2, 40)
    for slots in ([0, 1], [-2, 0]):
        with pytest.raises(IndexError, match="slot"):
            add_low_rank(load(), out, x, table, torch.tensor(slots))
    slots = torch.tensor([0, 0])
    for bad in (x.double(), x[:, :20], x.to(torch.bfloat16), x.t().contiguous().t()):
        with pytest.raises(ValueError, match="add_low_rank"):
            add_low_rank(load(), out, bad, table, slots)
    for bad in (slots.int(), slots[:1]):
        with pytest.raises(ValueError, match="add_low_rank"):
            add_low_rank(load(), out, x, table, bad)
    for other in ([41], 24), ([40], 25):
        with pytest.raises(ValueError, match="low rank"):
            table.put(0, change(other[0], other[1], [3], down=torch.float32, up=torch.float32))


@pytest.mark.parametrize("deterministic", [False, True])
def test_plain_torch_agrees(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.kernels.cpu.library.unavailable_reason", lambda: "off")
    plain = select_backend("cpu", deterministic=deterministic)
    assert "torch" in plain.explain()
    columns, inner = [40, 30], 50
    changes = [change(columns, inner, ranks, down=torch.bfloat16, up=torch.float32) for ranks in ([3, 0], [2, 5])]
    tables = [plain.low_rank_table(3, LowRankTarget((40, 30), inner, 7)), CompiledLowRankTable(3, 70, inner)]
    for table, (slot, own) in itertools.product(tables, ((0, changes[0]), (2, changes[1]))):
        table.put(slot, own)
    for slots in ([0, 2, -1, 1, 2], [2] * 5):
        x, out = torch.randn(5, inner), torch.randn(5, 70)
        other = out.clone()
        plain.add_low_rank(out, x, tables[0], AdapterSlots(torch.tensor(slots)))
        add_low_rank(load(), other, x, tables[1], torch.tensor(slots))
        assert torch.allclose(out, other, atol=2e-5 * float(other.abs().max()), rtol=0)
