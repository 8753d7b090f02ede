"""Who runs and who waits: two lists by rank, and what a sequence takes and gives back as it goes between them.

Responsible for statuses, rotary rows, the freeing of blocks, and for saying so in the next plan. It decides nothing.
"""

from __future__ import annotations

from bisect import insort
from collections import abc

from windlass.engine.cache.blocks import BlockManager
from windlass.engine.rotary.slots import RotaryRows
from windlass.engine.scheduling.counters import SchedulerCounters
from windlass.engine.scheduling.plan_writer import SchedulerOutputBuilder
from windlass.engine.scheduling.sequence import Sequence, SequenceStatus, rank_key
from windlass.engine.scheduling.stages import FrequencyChanges


class SchedulerQueues:
    """max_num_seqs: sequences that run at once."""

    def __init__(
        self,
        max_num_seqs: int,
        blocks: BlockManager,
        rotary: RotaryRows,
        frequency_changes: FrequencyChanges,
        output_builder: SchedulerOutputBuilder,
        counters: SchedulerCounters,
    ) -> None:
        self._max_num_seqs = max_num_seqs
        self._blocks = blocks
        self._rotary = rotary
        self._frequency_changes = frequency_changes
        self._output_builder = output_builder
        self._counters = counters
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []

    @property
    def waiting(self) -> abc.Sequence[Sequence]:
        """By rank, the best first."""
        return self._waiting

    @property
    def running(self) -> abc.Sequence[Sequence]:
        """By rank, the best first."""
        return self._running

    @property
    def has_capacity(self) -> bool:
        """Whether one more sequence may run."""
        return len(self._running) < self._max_num_seqs

    def queue(self, seq: Sequence) -> None:
        """Let a sequence that holds nothing wait; its rank says where in the queue."""
        seq.status = SequenceStatus.WAITING
        insort(self._waiting, seq, key=rank_key)

    def sort_waiting(self) -> None:
        """Bring those that wait in order, where ranks have become better meanwhile."""
        self._waiting.sort(key=rank_key)

    def start(self, seq: Sequence) -> None:
        """Let a sequence run, from the queue or as a new sample."""
        if seq.status is SequenceStatus.WAITING:
            self._waiting.remove(seq)
        seq.status = SequenceStatus.RUNNING
        seq.rotary_id = self._rotary.acquire(seq.stage.specs)
        insort(self._running, seq, key=rank_key)

    def preempt(self, seq: Sequence, *, may_swap: bool = True) -> None:
        """Take everything but its tokens from a sequence, and let it wait.

        One that has dropped tokens would have to compute them all again: its pages are kept aside, as long as no more is
        than the pools hold. parks: they may be.
        """
        swap_out = (
            may_swap
            and seq.cache.num_shifts > 0
            and not seq.cache.originals
            and bool(seq.cache.tables)
            and self._may_swap_out(seq)
        )
        if swap_out:
            self._output_builder.swap_out(seq.seq_id, self._blocks.swap_out(seq.cache))
        self._unlink(seq)
        seq.awaited_prefix = None
        if not swap_out:
            self._frequency_changes.reset_after_preemption(seq)
        self.queue(seq)
        self._counters.num_preemptions += 1

    def swap_in(self, seq: Sequence) -> None:
        """Let a parked sequence that has been started hold what it held; there is room for that."""
        self._output_builder.swap_in(seq.seq_id, self._blocks.swap_in(seq.cache))

    def _may_swap_out(self, seq: Sequence) -> bool:
        """Whether the pages of all parked sequences, with those of `seq`, are no more than the pools hold."""
        handles = [seq.cache, *(other.cache for other in self._waiting if other.cache.is_swapped_out)]
        kept = [sum(counts) for counts in zip(*(handle.held_or_swapped_out() for handle in handles), strict=True)]
        return all(count <= pool.num_blocks for count, pool in zip(kept, self._blocks.pools, strict=True))

    def leave(self, seq: Sequence) -> None:
        """End a sequence and free what it holds."""
        self._unlink(seq)
        seq.status = SequenceStatus.FINISHED

    def _unlink(self, seq: Sequence) -> None:
        """Free what `seq` holds and take it off the list it is on."""
        if seq.status is SequenceStatus.RUNNING:
            self._running.remove(seq)
            self._rotary.release(seq.rotary_id)
            seq.rotary_id = -1
        elif seq.status is SequenceStatus.WAITING:
            self._waiting.remove(seq)
        seq.rerotations = []
        self._output_builder.remove(seq.seq_id)
        if seq.status is SequenceStatus.WAITING and seq.cache.is_swapped_out:
            self._output_builder.discard_swapped(seq.seq_id)
        self._blocks.free(seq.cache)
