"""Host tier: evicted device blocks in pinned host memory, and the transfer of blocks between KV tensors, host memory and files.

The device copies blocks between its KV tensors and staging rows in step order; staging rows and host memory are copied beside the steps. No step waits for host memory unless it evicts more blocks than there are staging rows. Where a draft model uses the same block tables, a block holds the data of both models. The least recently used block is evicted first, tails before heads.
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

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)  # the widest that fits is moved quickest


class GroupRows:
    """planes: [layers, blocks, …] of one KV group each, contiguous. dtype, num_words: of a block's row."""

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
        """Take blocks [N], int64 on the device, into rows [N, words] there."""
        for view, part in zip(self._views, self._parts(rows), strict=True):
            torch.index_select(view, 0, blocks, out=part)

    def scatter(self, blocks: Tensor, rows: Tensor) -> None:
        """Put rows [N, words] of the device into blocks [N], int64 there."""
        for view, part in zip(self._views, self._parts(rows), strict=True):
            view.index_copy_(0, blocks, part)

    def put(self, row: Tensor, block: int) -> None:
        """Put a row [words] of the device into a block, which takes no memory there."""
        for view, part in zip(self._views, self._parts(row[None]), strict=True):
            # A layer at a time: those of a block lie apart, and for what lies together no program has to be loaded.
            for layer, own in zip(view[block], part[0], strict=True):
                layer.copy_(own)

    def read_block(self, block: int, row: Tensor) -> None:
        """Take a block into a row [words] of the device."""
        for view, part in zip(self._views, self._parts(row[None]), strict=True):
            part[0].copy_(view[block])

    def _parts(self, rows: Tensor) -> Iterator[Tensor]:
        """Of each plane [N, layers, words]."""
        for view, first, end in zip(self._views, self._ends, self._ends[1:], strict=False):
            yield rows[:, first:end].view(len(rows), *view.shape[1:])


def consecutive_runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, end) of entries whose numbers follow one another, in order."""
    first = 0
    for index in range(1, len(numbers) + 1):
        if index == len(numbers) or numbers[index] != numbers[index - 1] + 1:
            yield first, index
            first = index


_PIECE = 1 << 30  # bytes


def pinned_rows_within(num_bytes: int, row_bytes: Sequence[int]) -> int:
    """As many rows of each of these sizes as can be pinned without more bytes than these."""
    count = num_bytes // sum(row_bytes)
    while (
        count and sum(pieces * size for each in row_bytes for pieces, _, size in _piece_sizes(count, each)) > num_bytes
    ):
        count -= 1
    return count


def _piece_sizes(num_rows: int, row_bytes: int) -> Iterator[tuple[int, int, int]]:
    """(pieces, rows in each, bytes that each takes), the largest first."""
    size = max(_PIECE, 1 << (row_bytes - 1).bit_length())
    while num_rows:
        each = size // row_bytes
        count, num_rows = divmod(num_rows, each)
        if count:
            yield count, each, size
        size //= 2


class PinnedRows:
    """num_rows of num_words each. Raises what torch raises where there is no memory."""

    def __init__(self, copies: Copies, num_rows: int, num_words: int, dtype: torch.dtype) -> None:
        counts = [each for pieces, each, _ in _piece_sizes(num_rows, num_words * dtype.itemsize) for _ in range(pieces)]
        self._pieces = [copies.host_memory((count, num_words), dtype) for count in counts]
        self._firsts = [0, *accumulate(counts)]  # of each piece its first row

    def row(self, number: int) -> Tensor:
        """[words]."""
        piece, first = self._locate(number)
        return piece[first]

    def _locate(self, number: int) -> tuple[Tensor, int]:
        """A piece, and the row in it."""
        piece = bisect_right(self._firsts, number) - 1
        return self._pieces[piece], number - self._firsts[piece]

    def receive(self, numbers: Sequence[int], rows: Tensor) -> None:
        """Copy rows [N, words] of a device here. Nobody waits."""
        for piece, first, index, end in self._spans(numbers):
            piece[first : first + end - index].copy_(rows[index:end], non_blocking=True)

    def send(self, numbers: Sequence[int], rows: Tensor) -> None:
        """Copy these to rows [N, words] of a device. Nobody waits."""
        if not rows.is_contiguous():  # torch would wait
            for number, row in zip(numbers, rows, strict=True):
                row.copy_(self.row(number), non_blocking=True)
            return
        for piece, first, index, end in self._spans(numbers):
            rows[index:end].copy_(piece[first : first + end - index], non_blocking=True)

    def _spans(self, numbers: Sequence[int]) -> list[tuple[Tensor, int, int, int]]:
        """What lies side by side: piece, its first row, first entry and end of `numbers`."""
        found = []
        for index, end in consecutive_runs(numbers):
            while index < end:
                piece, first = self._locate(numbers[index])
                count = min(end - index, len(piece) - first)
                found.append((piece, first, index, index + count))
                index += count
        return found


_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int8: "I8"}

_NAMES[torch.float8_e4m3fn] = "F8_E4M3"


class BlockTransfer(ABC):
    """Pages that blocks are taken from and put back into.

    forms: of a block's planes, per KV group; block_bytes: of all of them. max_staged_bytes: bytes that are held before their turn has
    come. load_budget_streaming, alone: bytes that come into the cache before one step, where streams run and where none do.
    """

    max_staged_bytes = 64 << 20
    load_budget_streaming, load_budget_idle = 8 << 20, 64 << 20

    def __init__(self, planes: Sequence[Sequence[torch.Tensor]]) -> None:
        self.forms = [[_form(plane) for plane in of_group] for of_group in planes]
        self.block_bytes = bytes_of_blocks(planes)
        self._tickets = itertools.count()

    @abstractmethod
    def read_block(self, group: int, block: int, full_since: float) -> list[Bytes]:
        """The bytes of a block as they are: [layers, bytes] for each plane, until the next copy is made.

        full_since: when its last token was computed or about to be, by the monotonic clock.
        """

    @abstractmethod
    def stage(self, group: int, planes: tuple[Bytes, ...], stop: Callable[[], bool]) -> int | None:
        """Hold what was read; returns the ticket that `put` or `drop` are given, None where `stop` came before there was room."""

    @abstractmethod
    def put(self, loaded: Sequence[LoadedBlock]) -> None:
        """Put what was held into blocks."""

    @abstractmethod
    def drop(self, ticket: int) -> None:
        """Give up what was held."""

    def save(self, saved: Sequence[SavedBlock]) -> None:
        """Copy blocks of a device into the host's memory before they are overwritten."""
        raise RuntimeError("these blocks lie in the host's memory already")


class CPUBlockTransfer(BlockTransfer):
    """Those of main memory. planes: see `planes_of`."""

    def __init__(self, planes: Sequence[Sequence[torch.Tensor]]) -> None:
        super().__init__(planes)
        self._views = [[_bytes_of(plane) for plane in of_group] for of_group in planes]  # [layers, blocks, bytes] each
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
    """Of a block, per KV group. planes: see `planes_of`."""
    return [sum(_form(plane).num_bytes for plane in of_group) for of_group in planes]


def planes_of(storages: Sequence[KVCache]) -> list[list[torch.Tensor]]:
    """Of each group all that a block has. storages: of the model and, if there is one, of its draft model, which has one KV
    group, and states only where the model has them too."""
    first, *others = [storage.planes for storage in storages]
    groups = [list(planes) for planes in first]
    for other in others:
        for group, planes in zip(groups, other, strict=False):
            group += planes
    return [[plane for plane in planes if plane.numel()] for planes in groups]


def _form(plane: torch.Tensor) -> PlaneForm:
    layers, _, *shape = plane.shape
    return PlaneForm((layers, *shape), _NAMES[plane.dtype], layers * prod(shape) * plane.dtype.itemsize)


def _bytes_of(plane: torch.Tensor) -> Bytes:
    """[layers, blocks, …] as bytes [layers, blocks, bytes], the same memory."""
    view: Bytes = plane.flatten(2).view(torch.uint8).numpy()
    return view


_CANNOT_COPY = "blocks that the cache evicts cannot be copied to the host's memory"

_COPY_SECONDS = 1.0  # that a plan with a copy in it may take to begin


@dataclass(slots=True)
class _HostSlot:
    """mark: behind the copy that fills it; None before that is asked for. num_readers: who copies from it now."""

    slot: int
    mark: DeviceEvent | None = None
    num_readers: int = 0


@dataclass(frozen=True, slots=True)
class HostBlock:
    """A block that stays where it is until it is given back. mark: from then on it is there."""

    key: BlockKey
    slot: int
    mark: DeviceEvent
    passage: PassageRecord | None


class HostTier:
    """num_slots: blocks of each KV group that there is room for. The engine's thread tells; any thread may ask.

    block_size: tokens of a block. block_bytes: of each KV group's.
    """

    def __init__(self, num_slots: int, block_bytes: Sequence[int], block_size: int, counts: PersistCounters) -> None:
        self.num_slots, self._block_bytes, self._counts = num_slots, block_bytes, counts
        self.known = TierIndex(block_size)  # for what is found as a passage
        # Called with a lock held: it must not ask back.
        self.on_evicted: Callable[[BlockKey], None] = lambda _: None
        self._entries: list[OrderedDict[bytes, _HostSlot]] = [
            OrderedDict() for _ in block_bytes
        ]  # longest unused first
        self._free = [list(range(num_slots - 1, -1, -1)) for _ in block_bytes]
        self._passages: dict[bytes, PassageRecord] = {}  # of blocks whose first group's is still in the device's cache
        self._pending_saves: list[SavedBlock] = []
        self._loaded: set[tuple[int, int]] = set()
        self._changed = threading.Condition()

    def __contains__(self, key: BlockKey) -> bool:
        return key.digest in self._entries[key.group]

    @property
    def num_blocks(self) -> int:
        return sum(len(entries) for entries in self._entries)

    @property
    def num_bytes(self) -> int:
        """Of the blocks."""
        return sum(len(entries) * size for entries, size in zip(self._entries, self._block_bytes, strict=True))

    def admit(self, key: BlockKey, block: int, passage: PassageRecord | None) -> bool:
        """A block is evicted, and overwritten by the plan that is being made or a later one. Whether it is kept here.

        passage: what is known of it as a passage.
        """
        with self._changed:
            if key.group and passage is not None:
                self._passages[key.digest] = passage
            elif not key.group:
                kept = self._passages.pop(key.digest, None)
                passage = passage or kept
            entries = self._entries[key.group]
            if key.digest in entries:
                entries.move_to_end(key.digest)
            elif (key.group, block) in self._loaded or (not self._free[key.group] and not self._evict(key.group)):
                self._counts.host_lost += (key.group, block) not in self._loaded
                return False
            else:
                slot = self._free[key.group].pop()
                entries[key.digest] = _HostSlot(slot)
                self._pending_saves.append(SavedBlock(*key, block, slot))
        if not key.group:
            self.known.add(key, 0, passage)
        return True

    def note_loaded(self, group: int, block: int) -> None:
        """A block is brought in by the plan that is being made: should that evict it, what lies there is not it yet."""
        self._loaded.add((group, block))

    def take_pending_saves(self) -> list[SavedBlock]:
        """What a plan has to have copied before anything else, as it has evicted these."""
        pending, self._pending_saves = self._pending_saves, []
        self._loaded.clear()
        return pending

    def copy_started(self, saved: Sequence[SavedBlock], mark: DeviceEvent) -> None:
        """The copies of these are asked for. mark: behind them."""
        with self._changed:
            for one in saved:
                self._entries[one.group][one.digest].mark = mark
                self._counts.host_saved += 1
                self._counts.host_saved_bytes += self._block_bytes[one.group]
            self._counts.succeed(_CANNOT_COPY)
            self._changed.notify_all()

    def copy_failed(self, saved: Sequence[SavedBlock], error: Exception) -> None:
        """These could not be copied, and are gone."""
        self._counts.fail(_CANNOT_COPY, error)
        with self._changed:
            for one in saved:
                self._counts.host_lost += 1
                self._forget(BlockKey(one.group, one.digest))
            self._changed.notify_all()

    def acquire(self, key: BlockKey) -> HostBlock | None:
        """A block, to be given back by `release`; None where it is not here."""
        entries = self._entries[key.group]

        def is_ready() -> bool:
            entry = entries.get(key.digest)
            return entry is None or entry.mark is not None

        with self._changed:
            if not self._changed.wait_for(is_ready, _COPY_SECONDS):
                return None
            entry = entries.get(key.digest)
            if entry is None or entry.mark is None:
                return None
            entry.num_readers += 1
            entries.move_to_end(key.digest)
            return HostBlock(key, entry.slot, entry.mark, self.known.passage_of(key))

    def release(self, block: HostBlock) -> None:
        with self._changed:
            self._entries[block.key.group][block.key.digest].num_readers -= 1

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """The blocks of a text, in order, are of use once more: its end goes first."""
        with self._changed:
            for key in reversed(keys):
                if key in self:
                    self._entries[key.group].move_to_end(key.digest)

    def _evict(self, group: int) -> bool:
        """Whether there was one that nobody needs at the moment."""
        for digest, entry in self._entries[group].items():
            if entry.mark is not None and not entry.num_readers:
                self._forget(BlockKey(group, digest))
                self._counts.host_evicted += 1
                return True
        return False

    def _forget(self, key: BlockKey) -> None:
        self._free[key.group].append(self._entries[key.group].pop(key.digest).slot)
        self.known.remove(key)
        self.on_evicted(key)


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
