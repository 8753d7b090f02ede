"""The rows of decode steps in a device's memory, where captured steps find them, whatever their number.

A row is the next token of a sequence. The host says what rows are, in one copy of a few kilobytes and one of their block tables;
what else a step needs is derived on the device, and once a step has drawn, its rows go on to what they drew. So steps follow each
other without the host, and what they drew is fetched at the end. Responsible for that memory alone: it knows no model.
"""

from __future__ import annotations

from collections import abc
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.engine.execution.device_ranges import DeviceRanges
from windlass.engine.execution.device_states import DeviceStates, put
from windlass.engine.execution.state_rows import StateNumbers
from windlass.engine.model.batch import ForwardBatch
from windlass.engine.rotary.tables import RotaryTables
from windlass.engine.scheduling.bursts import MOST_PASSES
from windlass.kernels import Graphs, Mark, RowDraws

_NO_ROW = -1  # the slot's number of a row that is none: it reads and writes nothing
_NO_ADAPTER = -1
TOKEN, _INDEX, ADAPTER, FACTS = 0, 1, 4, 5  # of what is said of a row, and how many there are


class RowDrawing(NamedTuple):
    """How a row draws: `filter_numbers` of its filters, and a uniform number for each pass."""

    numbers: tuple[float, int, int, float]
    uniforms: abc.Sequence[float]


LARGEST = RowDrawing((0.0, 0, 0, 1.0), ())


class Fetched:
    """What passes have drawn, on its way to the host."""

    def __init__(self, drawn: Tensor, passes: int, rows: int, mark: Mark) -> None:
        self._drawn, self._passes, self._rows, self._mark = drawn, passes, rows, mark

    def wait(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Token ids and statuses, [passes, rows] each. Raises what the device met meanwhile."""
        self._mark.wait()
        ids, statuses = self._drawn[:, : self._passes, : self._rows].numpy().copy()
        return ids, statuses


class _Staging:
    """Host memory for one plan's copies; free again once the device has passed its mark."""

    def __init__(self, graphs: Graphs, rows: int, groups: int, width: int, ranges: int, *, has_states: bool) -> None:
        self.said = graphs.host_memory((FACTS, rows + 1), torch.int64)
        self.order = graphs.host_memory((rows + 1,), torch.int64)
        self.numbers = graphs.host_memory((4 + MOST_PASSES, rows), torch.float64)
        self.tables = graphs.host_memory((groups * rows * width,), torch.int32)
        self.ranges = graphs.host_memory((ranges,), torch.int64)
        self.states = graphs.host_memory(DeviceStates.shape(rows), torch.int64) if has_states else None
        self.drawn = graphs.host_memory((2, MOST_PASSES, rows), torch.int64)
        self.mark: Mark | None = None

    def say(self, said: NDArray[np.int64]) -> None:
        """said: [FACTS, B], of the first rows; the others are none."""
        self.said[_INDEX], self.said[ADAPTER] = _NO_ROW, _NO_ADAPTER
        self.said[:, : said.shape[1]] = torch.from_numpy(said)


class DeviceRows:
    """most: rows at once. width: columns of their tables. groups: KV groups. rotary: whose rows they rotate under.

    ranges: where those of rows that have some are kept. ranged_width: columns of the tables of steps with such rows, whose slots
    may be more than their tokens. has_states: whether layers carry states.
    """

    def __init__(
        self,
        graphs: Graphs,
        rotary: RotaryTables,
        ranges: DeviceRanges,
        *,
        most: int,
        groups: int,
        width: int,
        ranged_width: int,
        block_size: int,
        has_states: bool = False,
    ) -> None:
        self.most, self._width, self._ranged_width = most, width, ranged_width
        self._graphs, self._rotary, self._groups, self._block_size = graphs, rotary, groups, block_size
        self._ranges = ranges
        self._device = device = rotary.inv_freq.device
        # Token, slot's number in its sequence, its position less that number, rotary row, its adapter's slot. The last column is
        # always none.
        self._said = torch.zeros(FACTS, most + 1, dtype=torch.int64, device=device)
        self._said[_INDEX], self._said[ADAPTER] = _NO_ROW, _NO_ADAPTER
        self._order = torch.zeros(most + 1, dtype=torch.int64, device=device)
        self._numbers = torch.zeros(4 + MOST_PASSES, most, dtype=torch.float64, device=device)
        self._tables = torch.zeros(groups, most, ranged_width, dtype=torch.int32, device=device)
        self._sent = torch.zeros(groups * most * ranged_width, dtype=torch.int32, device=device)  # tables side by side
        self._drawn = torch.zeros(2, MOST_PASSES, most, dtype=torch.int64, device=device)
        self._pass = torch.zeros(1, dtype=torch.int64, device=device)
        self._states = DeviceStates(most, device) if has_states else None
        # A plan's copies may still be read while the next one's are written, never longer.
        numbers = ranges.fields * ranges.cells
        self._staging = [_Staging(graphs, most, groups, ranged_width, numbers, has_states=has_states) for _ in range(2)]
        self._turn = 0
        self._known: NDArray[np.int32] | None = None  # the tables as they were sent last
        self._known_ranges: NDArray[np.int64] | None = None  # and the ranges

    # -- on the device: what is captured ---------------------------------------------------------------------------

    def width(self, ranges: int) -> int:
        """Columns of the tables of a step whose rows have so many ranges, 0 for none."""
        return self._ranged_width if ranges else self._width

    def batch(self, rows: int, ranges: int = 0) -> ForwardBatch:
        """The first `rows` rows as a step takes them, each in so many ranges."""
        ids, index, first, rotary, _ = self._said[:, :rows].unbind(0)
        is_row, size = index >= 0, self._block_size
        positions = torch.where(is_row, index + first, 0)
        tables = self._tables[:, :rows, : self.width(ranges)]
        column = (index.clamp(min=0) // size).expand(self._groups, rows).unsqueeze(-1)
        blocks = tables.gather(2, column).squeeze(-1).long()  # [K, B]
        versions, context_positions = None, positions
        if ranges:
            versions, context_positions = self._ranges.versions(rows, ranges, positions, rotary)
        return ForwardBatch(
            input_ids=ids,
            positions=positions,
            rotary_ids=rotary,
            slots=torch.where(is_row, blocks * size + index % size, -1),
            block_tables=tables,
            query_start=torch.arange(rows + 1, device=self._device),
            seq_lens=index + 1,
            context_positions=context_positions,
            **self._rotary.cos_sin(rotary, positions)._asdict(),
            versions=versions,
            **({} if self._states is None else self._states.of_rows(rows)),
        )

    def adapter_slots(self, rows: int) -> Tensor:
        """Of the first `rows` rows, [rows] int64, -1 for none."""
        return self._said[ADAPTER, :rows]

    def draws(self, rows: int) -> RowDraws:
        """How they draw in this pass."""
        temperature, magnitude, top_k, top_p = self._numbers[:4, :rows].unbind(0)
        uniform = self._numbers[4:, :rows].index_select(0, self._pass).squeeze(0)
        return RowDraws(temperature.float(), magnitude.int(), top_k.int(), top_p, uniform)

    def go_on(self, rows: int, ids: Tensor, statuses: Tensor) -> None:
        """Note what this pass drew, and let it be what the next one computes. ids, statuses: [rows] int64."""
        for kept, found in zip(self._drawn, (ids, statuses), strict=True):
            kept[:, :rows].index_copy_(0, self._pass, found.unsqueeze(0))
        said = self._said[:, :rows]
        said[TOKEN].copy_(ids.clamp(min=0))  # nothing was drawn where logits are not finite: the host will see it
        said[_INDEX].add_((said[_INDEX] >= 0).long())
        self._pass.add_(1)

    # -- on the host: what is asked for ----------------------------------------------------------------------------

    def reset(self) -> None:
        """Let no row be one."""
        self._graphs.ask(self._forget)
        self._known = None

    def fill(
        self,
        said: NDArray[np.int64],
        tables: NDArray[np.int32],
        drawing: abc.Sequence[RowDrawing],
        ranges: NDArray[np.int64] | None = None,
        states: StateNumbers | None = None,
    ) -> None:
        """Say what the rows are. said: [FACTS, B], see above. tables: [K, B, columns]; past a row's blocks they mean nothing.

        ranges: see `RowRanges.padded`, as many as the steps asked for next have room for; None where those have none. states:
        whose states they change, where layers carry some.
        """
        staging = self._next_staging()
        staging.say(said)
        self._graphs.ask(lambda: self._take_said(staging))
        self._send(staging, tables, drawing, ranges, states)

    def continue_from(
        self,
        order: abc.Sequence[int],
        said: NDArray[np.int64],
        tables: NDArray[np.int32],
        drawing: abc.Sequence[RowDrawing],
        ranges: NDArray[np.int64] | None = None,
        states: StateNumbers | None = None,
    ) -> None:
        """Let the rows be these of those that steps were asked for last, which go on from what those will draw.

        order: of each row its place among them. The rest as in `fill`, but for tokens, which the device alone knows.
        """
        staging, rows = self._next_staging(), len(order)
        staging.order[:rows] = torch.tensor(order, dtype=torch.int64)
        staging.order[rows:] = self.most
        staging.say(said)
        self._graphs.ask(lambda: self._take_order(staging))
        self._send(staging, tables, drawing, ranges, states)

    def fetch(self, passes: int, rows: int) -> Fetched:
        """What the passes asked for since `fill` or `continue_from` draw."""
        staging = self._staging[self._turn]
        self._graphs.ask(lambda: self._give(staging))
        return Fetched(staging.drawn, passes, rows, self.end())

    def end(self) -> Mark:
        """Nothing more is asked for before the next `fill` or `continue_from`."""
        mark = self._staging[self._turn].mark = self._graphs.mark()
        return mark

    def _next_staging(self) -> _Staging:
        self._turn = (self._turn + 1) % len(self._staging)
        staging = self._staging[self._turn]
        if staging.mark is not None:
            staging.mark.wait()
            staging.mark = None
        return staging

    def _send(
        self,
        staging: _Staging,
        tables: NDArray[np.int32],
        drawing: abc.Sequence[RowDrawing],
        ranges: NDArray[np.int64] | None,
        states: StateNumbers | None,
    ) -> None:
        """The tables and ranges, unless the device has them, whose states the rows change, and how they draw."""
        numbers = staging.numbers.numpy()
        for row, one in enumerate(drawing):
            numbers[:4, row] = one.numbers
            numbers[4 : 4 + len(one.uniforms), row] = one.uniforms
        self._graphs.ask(lambda: self._take_numbers(staging))
        if states is not None:
            assert staging.states is not None
            put(states, staging.states)
            self._graphs.ask(lambda: self._take_states(staging))
        known = self._known_ranges
        if ranges is not None and (known is None or not np.array_equal(ranges, known)):
            self._known_ranges, count = None, ranges.size  # should the device have no memory for what it is asked
            staging.ranges.numpy()[:count] = ranges.ravel()
            self._graphs.ask(lambda: self._ranges.take(staging.ranges[:count]))
            self._known_ranges = ranges
        if self._known is not None and np.array_equal(self._known, tables):
            return
        self._known, shape = None, tables.shape
        staging.tables.numpy()[: tables.size].reshape(shape)[...] = tables
        self._graphs.ask(lambda: self._take_tables(staging, shape))
        self._known = tables.copy()

    def _forget(self) -> None:
        self._said[_INDEX].fill_(_NO_ROW)
        self._said[ADAPTER].fill_(_NO_ADAPTER)
        self._pass.zero_()
        if self._states is not None:
            self._states.forget()

    def _take_said(self, staging: _Staging) -> None:
        self._said.copy_(staging.said, non_blocking=True)
        self._pass.zero_()

    def _take_order(self, staging: _Staging) -> None:
        self._order.copy_(staging.order, non_blocking=True)
        tokens = self._said[TOKEN].index_select(0, self._order)
        self._take_said(staging)
        self._said[TOKEN].copy_(tokens)

    def _take_numbers(self, staging: _Staging) -> None:
        self._numbers.copy_(staging.numbers, non_blocking=True)

    def _take_states(self, staging: _Staging) -> None:
        assert self._states is not None and staging.states is not None
        self._states.take(staging.states)

    def _take_tables(self, staging: _Staging, shape: tuple[int, ...]) -> None:
        groups, rows, columns = shape
        count = groups * rows * columns
        self._sent[:count].copy_(staging.tables[:count], non_blocking=True)
        self._tables[:, :rows, :columns].copy_(self._sent[:count].view(shape))

    def _give(self, staging: _Staging) -> None:
        staging.drawn.copy_(self._drawn, non_blocking=True)
