"""Takes blocks out of a device's pages and puts them back, beside what the device computes.

Each way has rows of its own on the device, in which blocks lie one behind another: between them and the pages the device copies
by itself, in the order of its steps and at the speed of its memory; between them and the host's memory it copies beside steps.
So no step waits for the host's memory, unless it evicts more blocks than there are rows for.

* What is evicted is gathered into rows before the step that overwrites it (`save`), and goes to the host's memory then.
* What is wanted comes into rows first (`load`, `stage`), and into the pages before the step that reads it (`put`).
* What is written to files is copied by the writer's thread whenever it likes (`read_block`); see `unwritten`.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from windlass.engine.cache.changes import LoadedBlock, SavedBlock
from windlass.engine.cache.persist.block_file import Bytes
from windlass.engine.cache.persist.host_rows import PinnedRows
from windlass.engine.cache.persist.pages import BlockTransfer
from windlass.engine.cache.persist.rows import GroupRows, consecutive_runs
from windlass.engine.cache.persist.tier import HostBlock, HostTier
from windlass.kernels import Copies, DeviceEvent, is_out_of_memory, to_device

_OUTGOING_BYTES, _INCOMING_BYTES = (
    64 << 20,
    128 << 20,
)  # bytes of rows on the device: twice for what leaves, once for what comes
_MIN_ROWS = 4  # rows, however large blocks are
_POLL_SECONDS = 0.05


def staging_bytes(block_bytes: int, *, saves: bool) -> int:
    """That all rows take on the device, at most. block_bytes: of the largest block. saves: whether what is evicted is kept."""
    incoming, leaving = max(_INCOMING_BYTES, _MIN_ROWS * block_bytes), 2 * max(_OUTGOING_BYTES, block_bytes)
    return incoming + block_bytes + (leaving if saves else 0)


class DeviceBlockTransfer(BlockTransfer):
    """planes: see `planes_of`. tier: the books of what is kept in the host's memory; None where nothing is.

    Raises what torch raises where there is no memory.
    """

    def __init__(self, planes: Sequence[Sequence[Tensor]], copies: Copies, tier: HostTier | None) -> None:
        super().__init__(planes)
        self._copies, self._tier = copies, tier
        self._rows = [GroupRows(of_group) for of_group in planes]
        self._device = device = planes[0][0].device
        largest, blocks = max(self.block_bytes), sum(of_group[0].shape[1] for of_group in planes)

        def rows(num_bytes: int, fewest: int) -> Tensor:
            """[rows, words] of the largest block, on the device."""
            count = max(fewest, min(num_bytes // largest, blocks))
            return torch.empty((count, -(-largest // 8)), dtype=torch.int64, device=device)

        self._host = []
        self._outgoing: list[Tensor] = []
        if tier is not None:
            for group in self._rows:
                self._host.append(PinnedRows(copies, tier.num_slots, group.num_words, group.dtype))
            self._outgoing = [rows(_OUTGOING_BYTES, 1) for _ in range(2)]
        self._outgoing_events: list[DeviceEvent | None] = [None, None]  # behind the copies from these rows
        self._next_outgoing = 0
        self._incoming = rows(_INCOMING_BYTES, _MIN_ROWS)
        self.max_staged_bytes = self._incoming.nbytes
        self.load_budget_streaming = self.load_budget_idle = self._incoming.nbytes
        # Blocks: of fewer, threads take turns for longer than copies take. Others shall find places there meanwhile.
        self.max_blocks_per_load = max(1, min(len(self._incoming), blocks if tier is None else 2 * tier.num_slots) // 4)
        self._free = list(range(len(self._incoming)))
        self._row_events: list[DeviceEvent | None] = [None] * len(self._incoming)  # behind the copies from these rows
        self._staged: dict[int, int] = {}  # row by ticket
        self._changed = threading.Condition()
        self._read = copies.host_memory((self._incoming.shape[1],), torch.int64)
        self._writing, self._written = rows(0, 1)[0], copies.host_memory((self._incoming.shape[1],), torch.int64)
        self._save_copies, self._load_copies, self._write_copies = copies.queue(), copies.queue(), copies.queue()
        self._computed, self._computed_at = copies.record_event(), time.monotonic()

    # -- by the engine's thread ------------------------------------------------------------------------------------

    def save(self, saved: Sequence[SavedBlock]) -> None:
        """Where the device has no memory for that the blocks are lost, and nothing else."""
        assert self._tier is not None
        by_group: dict[int, list[SavedBlock]] = defaultdict(list)
        for one in saved:
            by_group[one.group].append(one)
        most = len(self._outgoing[0])
        for group, of_group in by_group.items():
            of_group.sort(key=lambda one: one.slot)
            for first in range(0, len(of_group), most):
                part = of_group[first : first + most]
                try:
                    self._tier.copy_started(part, self._save(group, part))
                except RuntimeError as error:
                    if not is_out_of_memory(error):
                        raise
                    self._tier.copy_failed(part, error)

    def _save(self, group: int, saved: Sequence[SavedBlock]) -> DeviceEvent:
        buffer, self._next_outgoing = self._next_outgoing, 1 - self._next_outgoing
        before = self._outgoing_events[buffer]
        if before is not None:
            before.make_stream_wait()
        rows = self._packed(group, self._outgoing[buffer], len(saved))
        self._rows[group].gather(self._block_ids([one.block for one in saved]), rows)
        host, slots = self._host[group], [one.slot for one in saved]
        mark = self._outgoing_events[buffer] = self._save_copies.submit(
            lambda: host.receive(slots, rows), [self._copies.record_event()]
        )
        return mark

    def put(self, loaded: Sequence[LoadedBlock]) -> None:
        by_group: dict[int, dict[int, int]] = defaultdict(dict)  # rows by block: the last that is put into one counts
        taken = []
        for one in loaded:
            row = self._staged.pop(one.ticket)
            taken.append(row)
            by_group[one.group][one.block] = row
        for group, row_of in by_group.items():
            try:
                self._scatter(group, row_of)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                for block, row in row_of.items():
                    self._rows[group].put(self._group_rows(group, self._incoming[row]), block)
        self._give_back(taken, self._copies.record_event())

    def _scatter(self, group: int, row_of: Mapping[int, int]) -> None:
        pairs = sorted((row, block) for block, row in row_of.items())
        rows, blocks = [row for row, _ in pairs], self._block_ids([block for _, block in pairs])
        arrived = self._group_rows(group, self._incoming)
        for first, end in consecutive_runs(rows):
            self._rows[group].scatter(blocks[first:end], arrived[rows[first] : rows[first] + end - first])

    def drop(self, ticket: int) -> None:
        row = self._staged.pop(ticket, None)
        if row is not None:
            self._give_back([row], self._row_events[row])

    # -- by the reader's thread ------------------------------------------------------------------------------------

    @torch.inference_mode()
    def load(self, held: Sequence[HostBlock], stop: Callable[[], bool]) -> list[int] | None:
        """Tickets of blocks that the host's memory holds, at most `max_blocks_per_load`; None where `stop` came before."""
        # As they lie there: what lies side by side comes in one copy.
        order = sorted(range(len(held)), key=lambda index: (held[index].key.group, held[index].slot))

        def copy(rows: Sequence[int]) -> None:
            slots: dict[int, list[int]] = defaultdict(list)
            for index in order:
                slots[held[index].key.group].append(held[index].slot)
            first = 0
            for group, of_group in slots.items():
                own = rows[first : first + len(of_group)]
                first += len(of_group)
                incoming = self._group_rows(group, self._incoming)
                for begin, end in consecutive_runs(own):
                    self._host[group].send(of_group[begin:end], incoming[own[begin] : own[begin] + end - begin])

        found = self._load_rows(len(held), copy, [block.mark for block in held], stop)
        if found is None:
            return None
        tickets = dict(zip(order, found, strict=True))
        return [tickets[index] for index in range(len(held))]

    @torch.inference_mode()
    def stage(self, group: int, planes: tuple[Bytes, ...], stop: Callable[[], bool]) -> int | None:
        flat = self._read.view(torch.uint8).numpy()
        np.concatenate([plane.reshape(-1) for plane in planes], out=flat[: self.block_bytes[group]])

        def copy(rows: Sequence[int]) -> None:
            self._incoming[rows[0]].copy_(self._read, non_blocking=True)

        tickets = self._load_rows(1, copy, [], stop)
        return None if tickets is None else tickets[0]

    def _load_rows(
        self, count: int, copy: Callable[[Sequence[int]], None], after: Sequence[DeviceEvent], stop: Callable[[], bool]
    ) -> list[int] | None:
        rows = self._take_rows(count, stop)
        if rows is None:
            return None
        try:
            marks = dict.fromkeys([*after, *(mark for row in rows if (mark := self._row_events[row]) is not None)])
            self._load_copies.submit(lambda: copy(rows), list(marks)).wait()
        except BaseException:
            self._give_back(rows, None)
            raise
        tickets = [next(self._tickets) for _ in rows]
        self._staged.update(zip(tickets, rows, strict=True))
        return tickets

    def _take_rows(self, count: int, stop: Callable[[], bool]) -> list[int] | None:
        with self._changed:
            while len(self._free) < count:
                if stop():
                    return None
                self._changed.wait(_POLL_SECONDS)
            return [heapq.heappop(self._free) for _ in range(count)]

    def _give_back(self, rows: Sequence[int], mark: DeviceEvent | None) -> None:
        """mark: behind what still reads them."""
        with self._changed:
            for row in rows:
                self._row_events[row] = mark
                heapq.heappush(self._free, row)
            self._changed.notify_all()

    # -- by the writer's thread ------------------------------------------------------------------------------------

    @torch.inference_mode()
    def read_block(self, group: int, block: int, full_since: float) -> list[Bytes]:
        if full_since >= self._computed_at:  # the step that has filled it may be under way
            self._computed_at = time.monotonic()
            self._computed = self._copies.record_event()
        row = self._group_rows(group, self._writing)

        def copy() -> None:
            self._rows[group].read_block(block, row)
            self._written.copy_(self._writing, non_blocking=True)

        self._write_copies.submit(copy, [self._computed]).wait()
        return self._planes_in(group, self._written)

    def read_host_block(self, block: HostBlock) -> list[Bytes]:
        """The bytes of a block that the host's memory holds, as `read_block` has them, until it is given back."""
        block.mark.wait()
        return self._planes_in(block.key.group, self._host[block.key.group].row(block.slot))

    def _planes_in(self, group: int, row: Tensor) -> list[Bytes]:
        flat: Bytes = row.view(torch.uint8).numpy()
        planes, first = [], 0
        for form in self.forms[group]:
            planes.append(flat[first : first + form.num_bytes].reshape(form.shape[0], -1))
            first += form.num_bytes
        return planes

    # --------------------------------------------------------------------------------------------------------------

    def _group_rows(self, group: int, rows: Tensor) -> Tensor:
        """The part of rows [..., words] that a block of this group fills, in its words."""
        own = self._rows[group]
        return rows.view(own.dtype)[..., : own.num_words]

    def _packed(self, group: int, rows: Tensor, count: int) -> Tensor:
        """So many rows of a block of this group, [count, words], side by side: they go to the host in one copy."""
        own = self._rows[group]
        return rows.view(-1).view(own.dtype)[: count * own.num_words].view(count, own.num_words)

    def _block_ids(self, numbers: Sequence[int]) -> Tensor:
        return to_device(torch.tensor(numbers), self._device)
