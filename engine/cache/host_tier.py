"""Host tier: evicted device blocks in pinned host memory, and block transfers between KV tensors, host memory and files.

The device copies blocks between its KV tensors and staging rows in step order; staging rows and host memory are copied
concurrently with the steps. No step waits for host memory unless it evicts more blocks than there are staging rows. If a
draft model uses the same block tables, a block holds the data of both models. The least recently used block is evicted
first, tails before heads.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import numpy as np
import torch
from torch import Tensor

from windlass.engine.cache.cache_operations import LoadedBlock, SavedBlock
from windlass.engine.cache.disk_tier import Bytes, PersistCounters, PlaneForm, TierIndex
from windlass.engine.cache.kv_cache import KVCache
from windlass.engine.cache.non_prefix_reuse import PassageRecord
from windlass.engine.cache.prefix_cache import BlockKey
from windlass.kernels import Copies, DeviceEvent, is_out_of_memory, to_device

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)  # the widest that fits is copied fastest


class GroupRows:
    """The blocks of one KV group as rows of words.

    planes: [layers, blocks, …] each, contiguous. dtype, num_words: of the row of a block.
    """

    def __init__(self, planes: Sequence[Tensor]) -> None:
        flat = [plane.flatten(2) for plane in planes]
        sizes = [plane.shape[2] * plane.dtype.itemsize for plane in flat]
        self.dtype = next(word for word in _WORDS if all(size % word.itemsize == 0 for size in sizes))
        self._views = [plane.view(self.dtype).transpose(0, 1) for plane in flat]  # [blocks, layers, words] each
        self._ends = [0]
        for view in self._views:
            self._ends.append(self._ends[-1] + view.shape[1] * view.shape[2])
        self.num_words = self._ends[-1]

    def gather(self, blocks: Tensor, rows: Tensor) -> None:
        """Copy blocks [N], int64 on the device, to rows [N, words] on the device."""
        for view, part in zip(self._views, self._parts(rows), strict=True):
            torch.index_select(view, 0, blocks, out=part)

    def scatter(self, blocks: Tensor, rows: Tensor) -> None:
        """Copy rows [N, words] on the device to blocks [N], int64 on the device."""
        for view, part in zip(self._views, self._parts(rows), strict=True):
            view.index_copy_(0, blocks, part)

    def put(self, row: Tensor, block: int) -> None:
        """Copy a row [words] on the device to a block, without allocating device memory."""
        for view, part in zip(self._views, self._parts(row[None]), strict=True):
            # Layer by layer: the layers of a block are not contiguous, and a contiguous copy needs no kernel to be loaded.
            for layer, own in zip(view[block], part[0], strict=True):
                layer.copy_(own)

    def read_block(self, block: int, row: Tensor) -> None:
        """Copy a block to a row [words] on the device."""
        for view, part in zip(self._views, self._parts(row[None]), strict=True):
            part[0].copy_(view[block])

    def _parts(self, rows: Tensor) -> Iterator[Tensor]:
        """The part of each plane, [N, layers, words]."""
        for view, first, end in zip(self._views, self._ends, self._ends[1:], strict=False):
            yield rows[:, first:end].view(len(rows), *view.shape[1:])


def consecutive_runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, end) of the runs of entries whose numbers are consecutive, in order."""
    first = 0
    for index in range(1, len(numbers) + 1):
        if index == len(numbers) or numbers[index] != numbers[index - 1] + 1:
            yield first, index
            first = index


# -- pinned host memory --------------------------------------------------------------------------------------------

_PIECE = 1 << 30  # bytes of one pinned allocation


def pinned_rows_within(num_bytes: int, row_bytes: Sequence[int]) -> int:
    """The largest number of rows, of each of these sizes, that can be pinned within `num_bytes`."""

    def pinned(count: int) -> int:
        return sum(pieces * size for each in row_bytes for pieces, _, size in _piece_sizes(count, each))

    count = num_bytes // sum(row_bytes)
    while count and pinned(count) > num_bytes:
        count -= 1
    return count


def _piece_sizes(num_rows: int, row_bytes: int) -> Iterator[tuple[int, int, int]]:
    """(number of pieces, rows in each, bytes of each), the largest first."""
    size = max(_PIECE, 1 << (row_bytes - 1).bit_length())
    while num_rows:
        each = size // row_bytes
        count, num_rows = divmod(num_rows, each)
        if count:
            yield count, each, size
        size //= 2


class PinnedRows:
    """`num_rows` rows of `num_words` each in pinned host memory. Raises torch's error if there is no memory."""

    def __init__(self, copies: Copies, num_rows: int, num_words: int, dtype: torch.dtype) -> None:
        counts = [each for pieces, each, _ in _piece_sizes(num_rows, num_words * dtype.itemsize) for _ in range(pieces)]
        self._pieces = [copies.host_memory((count, num_words), dtype) for count in counts]
        self._firsts = [0, *accumulate(counts)]  # first row of each piece

    def row(self, number: int) -> Tensor:
        """One row, [words]."""
        piece, first = self._locate(number)
        return piece[first]

    def _locate(self, number: int) -> tuple[Tensor, int]:
        """The piece of a row, and its index in the piece."""
        piece = bisect_right(self._firsts, number) - 1
        return self._pieces[piece], number - self._firsts[piece]

    def receive(self, numbers: Sequence[int], rows: Tensor) -> None:
        """Copy rows [N, words] on a device to these rows, asynchronously."""
        for piece, first, index, end in self._spans(numbers):
            piece[first : first + end - index].copy_(rows[index:end], non_blocking=True)

    def send(self, numbers: Sequence[int], rows: Tensor) -> None:
        """Copy these rows to rows [N, words] on a device, asynchronously."""
        if not rows.is_contiguous():  # torch would synchronize
            for number, row in zip(numbers, rows, strict=True):
                row.copy_(self.row(number), non_blocking=True)
            return
        for piece, first, index, end in self._spans(numbers):
            rows[index:end].copy_(piece[first : first + end - index], non_blocking=True)

    def _spans(self, numbers: Sequence[int]) -> list[tuple[Tensor, int, int, int]]:
        """Contiguous rows: (piece, first row in it, first and end index into `numbers`)."""
        found = []
        for index, end in consecutive_runs(numbers):
            while index < end:
                piece, first = self._locate(numbers[index])
                count = min(end - index, len(piece) - first)
                found.append((piece, first, index, index + count))
                index += count
        return found


# -- transfers -----------------------------------------------------------------------------------------------------

_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
}


class BlockTransfer(ABC):
    """Copies blocks out of and into the KV tensors.

    forms: of a block's planes, per KV group; block_bytes: of all planes of a block. max_staged_bytes: limit of data that
    is staged and not yet copied to a block. load_budget_streaming, load_budget_idle: bytes loaded into the cache before
    one step, while streams run and while none do. tier: the index of host memory, without which `save`, `load` and
    `read_host_block` are not called.
    """

    tier: HostTier | None = None
    max_blocks_per_load = 1
    max_staged_bytes = 64 << 20
    load_budget_streaming, load_budget_idle = 8 << 20, 64 << 20

    def __init__(self, planes: Sequence[Sequence[torch.Tensor]]) -> None:
        self.forms = [[_form(plane) for plane in of_group] for of_group in planes]
        self.block_bytes = bytes_of_blocks(planes)
        self._tickets = itertools.count()

    @abstractmethod
    def read_block(self, group: int, block: int, full_since: float) -> list[Bytes]:
        """The bytes of a block, [layers, bytes] for each plane, valid until the next call.

        full_since: time, by the monotonic clock, at which its last token was computed or its computation was submitted.
        """

    @abstractmethod
    def stage(self, group: int, planes: tuple[Bytes, ...], stop: Callable[[], bool]) -> int | None:
        """Stage the planes of a block; returns the ticket for `put` or `drop`, None if `stop` became true before that."""

    @abstractmethod
    def put(self, loaded: Sequence[LoadedBlock]) -> None:
        """Copy staged data to blocks."""

    @abstractmethod
    def drop(self, ticket: int) -> None:
        """Discard staged data."""

    def save(self, saved: Sequence[SavedBlock]) -> None:
        """Copy device blocks to host memory before they are overwritten."""
        raise NotImplementedError

    def load(self, held: Sequence[HostBlock], stop: Callable[[], bool]) -> list[int] | None:
        """Stage at most `max_blocks_per_load` blocks of host memory; returns their tickets, None if `stop` became true."""
        raise NotImplementedError

    def read_host_block(self, block: HostBlock) -> list[Bytes]:
        """The bytes of a block in host memory, as in `read_block`, valid until the block is released."""
        raise NotImplementedError


class CPUBlockTransfer(BlockTransfer):
    """Transfer for KV tensors in main memory. planes: see `planes_of`."""

    def __init__(self, planes: Sequence[Sequence[torch.Tensor]]) -> None:
        super().__init__(planes)
        self._views: list[list[Bytes]] = [  # of each plane as bytes [layers, blocks, bytes], the same memory
            [plane.flatten(2).view(torch.uint8).numpy() for plane in of_group] for of_group in planes
        ]
        self._staged: dict[int, tuple[Bytes, ...]] = {}

    def read_block(self, group: int, block: int, full_since: float) -> list[Bytes]:
        return [view[:, block].copy() for view in self._views[group]]

    def stage(self, group: int, planes: tuple[Bytes, ...], stop: Callable[[], bool]) -> int | None:
        ticket = next(self._tickets)
        self._staged[ticket] = planes
        return ticket

    def put(self, loaded: Sequence[LoadedBlock]) -> None:
        for one in loaded:
            for view, plane in zip(self._views[one.group], self._staged.pop(one.ticket), strict=True):
                view[:, one.block] = plane

    def drop(self, ticket: int) -> None:
        self._staged.pop(ticket, None)


def bytes_of_blocks(planes: Sequence[Sequence[torch.Tensor]]) -> list[int]:
    """Size of a block, per KV group. planes: see `planes_of`."""
    return [sum(_form(plane).num_bytes for plane in of_group) for of_group in planes]


def planes_of(storages: Sequence[KVCache]) -> list[list[torch.Tensor]]:
    """All planes of a block, per group. storages: of the model and of its draft model, if there is one.

    A draft model has one KV group, and states only if the model has them too.
    """
    first, *others = [storage.planes for storage in storages]
    groups = [list(planes) for planes in first]
    for other in others:
        for group, planes in zip(groups, other, strict=False):
            group += planes
    return [[plane for plane in planes if plane.numel()] for planes in groups]


def _form(plane: torch.Tensor) -> PlaneForm:
    layers, _, *shape = plane.shape
    return PlaneForm((layers, *shape), _NAMES[plane.dtype], layers * prod(shape) * plane.dtype.itemsize)


# -- host tier -----------------------------------------------------------------------------------------------------

_CANNOT_COPY = "blocks that the cache evicts cannot be copied to the host's memory"
_COPY_SECONDS = 1.0  # time limit until the copy of an admitted block is submitted


@dataclass(slots=True, eq=False)
class HostBlock:
    """A block in host memory.

    event: after the copy that fills it; None before that copy is submitted. num_readers: copies from it in progress; it
    is not evicted before they end. passage: its record when it was last acquired.
    """

    key: BlockKey
    slot: int
    event: DeviceEvent | None = None
    num_readers: int = 0
    passage: PassageRecord | None = None


class HostTier:
    """Index of the blocks in host memory. The engine thread admits blocks; any thread may acquire them.

    num_slots: blocks of each KV group that fit. block_bytes: of a block, per KV group. block_size: tokens of a block.
    """

    def __init__(self, num_slots: int, block_bytes: Sequence[int], block_size: int, counts: PersistCounters) -> None:
        self.num_slots, self._block_bytes, self.counts = num_slots, block_bytes, counts
        self.index = TierIndex(block_size)  # of blocks that are found as passages
        # Called with the lock held: it must not call methods of this object.
        self.on_evicted: Callable[[BlockKey], None] = lambda _: None
        # Per group by digest, least recently used first.
        self._entries: list[OrderedDict[bytes, HostBlock]] = [OrderedDict() for _ in block_bytes]
        self._free = [list(range(num_slots - 1, -1, -1)) for _ in block_bytes]
        self._passages: dict[bytes, PassageRecord] = {}  # of blocks whose first group is still in the device's cache
        self._pending_saves: list[SavedBlock] = []
        self._changed = threading.Condition()

    def __contains__(self, key: BlockKey) -> bool:
        return key.digest in self._entries[key.group]

    @property
    def num_blocks(self) -> int:
        return sum(len(entries) for entries in self._entries)

    @property
    def num_bytes(self) -> int:
        """Total size of the blocks."""
        return sum(len(entries) * size for entries, size in zip(self._entries, self._block_bytes, strict=True))

    def admit(
        self, key: BlockKey, block: int, passage: PassageRecord | None = None, *, is_loading: bool = False
    ) -> bool:
        """Admit a block that is evicted from the device and overwritten by the current step or a later one.

        passage: its record as a passage. is_loading: the block has no valid data to save yet. Returns whether it is
        stored here.
        """
        with self._changed:
            if key.group and passage is not None:
                self._passages[key.digest] = passage
            elif not key.group:
                pending = self._passages.pop(key.digest, None)
                passage = passage or pending
            entries = self._entries[key.group]
            if key.digest in entries:
                entries.move_to_end(key.digest)
            elif is_loading or (not self._free[key.group] and not self._evict(key.group)):
                self.counts.host_lost_blocks += not is_loading
                return False
            else:
                slot = self._free[key.group].pop()
                entries[key.digest] = HostBlock(key, slot)
                self._pending_saves.append(SavedBlock(*key, block, slot))
        if not key.group:
            self.index.add(key, 0, passage)
        return True

    def take_pending_saves(self) -> list[SavedBlock]:
        """The copies that the planned step must make before anything else, because it has evicted these blocks."""
        pending, self._pending_saves = self._pending_saves, []
        return pending

    def copy_started(self, saved: Sequence[SavedBlock], event: DeviceEvent) -> None:
        """The copies of these blocks are submitted. event: after them."""
        with self._changed:
            for one in saved:
                self._entries[one.group][one.digest].event = event
                self.counts.host_saved_blocks += 1
                self.counts.host_saved_bytes += self._block_bytes[one.group]
            self.counts.succeed(_CANNOT_COPY)
            self._changed.notify_all()

    def copy_failed(self, saved: Sequence[SavedBlock], error: Exception) -> None:
        """These blocks could not be copied and are lost."""
        self.counts.fail(_CANNOT_COPY, error)
        with self._changed:
            for one in saved:
                self.counts.host_lost_blocks += 1
                self._forget(BlockKey(one.group, one.digest))
            self._changed.notify_all()

    def acquire(self, key: BlockKey) -> HostBlock | None:
        """A block, until `release` is called; None if it is not here or not copied in time."""
        entries = self._entries[key.group]

        def is_ready() -> bool:
            block = entries.get(key.digest)
            return block is None or block.event is not None

        with self._changed:
            block = entries.get(key.digest) if self._changed.wait_for(is_ready, _COPY_SECONDS) else None
            if block is not None:
                block.num_readers += 1
                block.passage = self.index.passage_of(key)
                entries.move_to_end(key.digest)
            return block

    def release(self, block: HostBlock) -> None:
        with self._changed:
            block.num_readers -= 1

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Record a use of the blocks of a sequence, in order. Its last blocks will be evicted first."""
        with self._changed:
            for key in reversed(keys):
                if key in self:
                    self._entries[key.group].move_to_end(key.digest)

    def _evict(self, group: int) -> bool:
        """Evict the least recently used block that is copied and has no reader; returns whether there was one."""
        for block in self._entries[group].values():
            if block.event is not None and not block.num_readers:
                self._forget(block.key)
                self.counts.host_evicted_blocks += 1
                return True
        return False

    def _forget(self, key: BlockKey) -> None:
        self._free[key.group].append(self._entries[key.group].pop(key.digest).slot)
        self.index.remove(key)
        self.on_evicted(key)


# -- transfers of a device -----------------------------------------------------------------------------------------

_OUTGOING_BYTES, _INCOMING_BYTES = 64 << 20, 128 << 20  # staging rows on the device: two buffers outgoing, one incoming
_MIN_ROWS = 4  # incoming rows, however large blocks are
_POLL_SECONDS = 0.05


def staging_bytes(block_bytes: int, *, saves: bool) -> int:
    """Upper bound of the device memory for staging rows. block_bytes: of the largest block. saves: with a host tier."""
    incoming, outgoing = max(_INCOMING_BYTES, _MIN_ROWS * block_bytes), 2 * max(_OUTGOING_BYTES, block_bytes)
    return incoming + block_bytes + (outgoing if saves else 0)


class DeviceBlockTransfer(BlockTransfer):
    """Transfer for KV tensors in device memory. planes: see `planes_of`. Raises torch's error if there is no memory."""

    def __init__(self, planes: Sequence[Sequence[Tensor]], copies: Copies, tier: HostTier | None) -> None:
        super().__init__(planes)
        self._copies, self.tier = copies, tier
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
        self._outgoing_events: list[DeviceEvent | None] = [None, None]  # after the copies from these rows
        self._next_outgoing = 0
        self._incoming = rows(_INCOMING_BYTES, _MIN_ROWS)
        self.max_staged_bytes = self._incoming.nbytes
        self.load_budget_streaming = self.load_budget_idle = self._incoming.nbytes
        # In blocks. Fewer would make thread switches longer than the copies; a quarter leaves rows for others.
        self.max_blocks_per_load = max(1, min(len(self._incoming), blocks if tier is None else 2 * tier.num_slots) // 4)
        self._free = list(range(len(self._incoming)))
        self._row_events: list[DeviceEvent | None] = [None] * len(self._incoming)  # after the copies from these rows
        self._staged: dict[int, int] = {}  # row by ticket
        self._changed = threading.Condition()
        self._read = copies.host_memory((self._incoming.shape[1],), torch.int64)
        self._writing, self._written = rows(0, 1)[0], copies.host_memory((self._incoming.shape[1],), torch.int64)
        self._save_copies, self._load_copies, self._write_copies = copies.queue(), copies.queue(), copies.queue()
        self._computed, self._computed_at = copies.record_event(), time.monotonic()

    # -- engine thread ---------------------------------------------------------------------------------------------

    def save(self, saved: Sequence[SavedBlock]) -> None:
        assert self.tier is not None
        by_group: dict[int, list[SavedBlock]] = defaultdict(list)
        for one in saved:
            by_group[one.group].append(one)
        most = len(self._outgoing[0])
        for group, of_group in by_group.items():
            of_group.sort(key=lambda one: one.slot)
            for first in range(0, len(of_group), most):
                part = of_group[first : first + most]
                try:
                    self.tier.copy_started(part, self._save(group, part))
                except RuntimeError as error:
                    if not is_out_of_memory(error):
                        raise
                    self.tier.copy_failed(part, error)  # the step continues without

    def _save(self, group: int, saved: Sequence[SavedBlock]) -> DeviceEvent:
        buffer, self._next_outgoing = self._next_outgoing, 1 - self._next_outgoing
        before = self._outgoing_events[buffer]
        if before is not None:
            before.make_stream_wait()
        rows = self._packed(group, self._outgoing[buffer], len(saved))
        self._rows[group].gather(self._block_ids([one.block for one in saved]), rows)
        host, slots = self._host[group], [one.slot for one in saved]
        event = self._save_copies.submit(lambda: host.receive(slots, rows), [self._copies.record_event()])
        self._outgoing_events[buffer] = event
        return event

    def put(self, loaded: Sequence[LoadedBlock]) -> None:
        by_group: dict[int, dict[int, int]] = defaultdict(dict)  # row by block: the last one for a block counts
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
        self._free_rows(taken, self._copies.record_event())

    def _scatter(self, group: int, row_of: Mapping[int, int]) -> None:
        pairs = sorted((row, block) for block, row in row_of.items())
        rows, blocks = [row for row, _ in pairs], self._block_ids([block for _, block in pairs])
        arrived = self._group_rows(group, self._incoming)
        for first, end in consecutive_runs(rows):
            self._rows[group].scatter(blocks[first:end], arrived[rows[first] : rows[first] + end - first])

    def drop(self, ticket: int) -> None:
        row = self._staged.pop(ticket, None)
        if row is not None:
            self._free_rows([row], self._row_events[row])

    # -- reader thread ---------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def load(self, held: Sequence[HostBlock], stop: Callable[[], bool]) -> list[int] | None:
        # In the order of slots: adjacent slots are copied at once.
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

        found = self._load_rows(len(held), copy, [block.event for block in held], stop)
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
        self,
        count: int,
        copy: Callable[[Sequence[int]], None],
        after: Sequence[DeviceEvent | None],
        stop: Callable[[], bool],
    ) -> list[int] | None:
        rows = self._take_rows(count, stop)
        if rows is None:
            return None
        try:
            events = dict.fromkeys([*after, *(self._row_events[row] for row in rows)])
            self._load_copies.submit(lambda: copy(rows), [event for event in events if event is not None]).wait()
        except BaseException:
            self._free_rows(rows, None)
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

    def _free_rows(self, rows: Sequence[int], event: DeviceEvent | None) -> None:
        """Return rows to the free ones. event: after the last copy that reads them."""
        with self._changed:
            for row in rows:
                self._row_events[row] = event
                heapq.heappush(self._free, row)
            self._changed.notify_all()

    # -- writer thread ---------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def read_block(self, group: int, block: int, full_since: float) -> list[Bytes]:
        if full_since >= self._computed_at:  # the step that fills it may still be running
            self._computed_at = time.monotonic()
            self._computed = self._copies.record_event()
        row = self._group_rows(group, self._writing)

        def copy() -> None:
            self._rows[group].read_block(block, row)
            self._written.copy_(self._writing, non_blocking=True)

        self._write_copies.submit(copy, [self._computed]).wait()
        return self._planes_in(group, self._written)

    def read_host_block(self, block: HostBlock) -> list[Bytes]:
        assert block.event is not None
        block.event.wait()
        return self._planes_in(block.key.group, self._host[block.key.group].row(block.slot))

    def _planes_in(self, group: int, row: Tensor) -> list[Bytes]:
        flat: Bytes = row.view(torch.uint8).numpy()
        planes, first = [], 0
        for form in self.forms[group]:
            planes.append(flat[first : first + form.num_bytes].reshape(form.shape[0], -1))
            first += form.num_bytes
        return planes

    # -- views of rows ---------------------------------------------------------------------------------------------

    def _group_rows(self, group: int, rows: Tensor) -> Tensor:
        """The part of rows [..., words] that a block of this group fills, in the group's dtype."""
        own = self._rows[group]
        return rows.view(own.dtype)[..., : own.num_words]

    def _packed(self, group: int, rows: Tensor, count: int) -> Tensor:
        """`count` contiguous rows of blocks of this group, [count, words], which are copied to the host at once."""
        own = self._rows[group]
        return rows.view(-1).view(own.dtype)[: count * own.num_words].view(count, own.num_words)

    def _block_ids(self, numbers: Sequence[int]) -> Tensor:
        return to_device(torch.tensor(numbers), self._device)
