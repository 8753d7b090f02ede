"""Request queue: live requests, the waiting and running queues, preemption, and deadlines.

Creates sequences from requests, changes their status, and allocates and releases their rotary rows and blocks as they move
between the queues. The scheduler makes the decisions.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import abc
from dataclasses import dataclass, field
from itertools import count

from windlass.engine.cache.block_manager import BlockManager
from windlass.engine.cache.sequence_cache import SequenceCache
from windlass.engine.interface.context import ContextRule, ContextSize
from windlass.engine.interface.request import EngineRequest
from windlass.engine.rotary.rotary_policy import RotaryPlan, RotaryRows, RotaryStage
from windlass.engine.scheduling.fairness import FairQueue
from windlass.engine.scheduling.frequency_changes import FrequencyChanges
from windlass.engine.scheduling.scheduler_counters import SchedulerCounters
from windlass.engine.scheduling.scheduler_output import SchedulerOutputBuilder
from windlass.engine.scheduling.sequence import Sequence, SequenceStatus, rank_key


@dataclass(slots=True)
class SchedulerQueues:
    """Waiting and running sequences, each in order of rank, best first. max_num_seqs: sequences that may run at once."""

    _max_num_seqs: int
    _blocks: BlockManager
    _rotary: RotaryRows
    _frequency_changes: FrequencyChanges
    _output_builder: SchedulerOutputBuilder
    _counters: SchedulerCounters
    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)

    @property
    def has_capacity(self) -> bool:
        """Whether one more sequence may run."""
        return len(self.running) < self._max_num_seqs

    def queue(self, seq: Sequence) -> None:
        """Add a sequence that holds nothing to the waiting queue."""
        seq.status = SequenceStatus.WAITING
        insort(self.waiting, seq, key=rank_key)

    def start(self, seq: Sequence) -> None:
        """Move a waiting or forked sequence to the running queue."""
        if seq.status is SequenceStatus.WAITING:
            self.waiting.remove(seq)
        seq.status = SequenceStatus.RUNNING
        seq.rotary_id = self._rotary.acquire(seq.stage.specs)
        insort(self.running, seq, key=rank_key)

    def preempt(self, seq: Sequence, *, may_swap: bool = True) -> None:
        """Release all that a sequence holds and return it to the waiting queue.

        The blocks of one that has dropped tokens are swapped out, because it would otherwise recompute all of these.
        may_swap: whether this is allowed. The blocks of all swapped-out sequences never exceed the pools.
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
        """Allocate blocks for a swapped-out sequence that was started; enough must be free."""
        self._output_builder.swap_in(seq.seq_id, self._blocks.swap_in(seq.cache))

    def _may_swap_out(self, seq: Sequence) -> bool:
        """Whether the blocks of all swapped-out sequences and of `seq` together fit in the pools."""
        caches = [seq.cache, *(other.cache for other in self.waiting if other.cache.is_swapped_out)]
        totals = [sum(counts) for counts in zip(*(cache.held_or_swapped_out() for cache in caches), strict=True)]
        return all(count <= pool.num_blocks for count, pool in zip(totals, self._blocks.pools, strict=True))

    def finish(self, seq: Sequence) -> None:
        """End a sequence and release all that it holds."""
        self._unlink(seq)
        seq.status = SequenceStatus.FINISHED

    def _unlink(self, seq: Sequence) -> None:
        """Remove a sequence from its queue and release its blocks and rotary row."""
        if seq.status is SequenceStatus.RUNNING:
            self.running.remove(seq)
            self._rotary.release(seq.rotary_id)
            seq.rotary_id = -1
        elif seq.status is SequenceStatus.WAITING:
            self.waiting.remove(seq)
        seq.rerotations = []
        self._output_builder.remove(seq.seq_id)
        if seq.status is SequenceStatus.WAITING and seq.cache.is_swapped_out:
            self._output_builder.discard_swapped(seq.seq_id)
        self._blocks.free(seq.cache)


MAX_RETAINED = 256  # requests that retain an object; it may be large, and is created again if it was not retained


@dataclass(slots=True)
class LiveRequests:
    """Sequences by request and id.

    fresh_seed: returns a seed for requests without one. new_cache: see `FrequencyChanges.new_cache`.
    context_limits: the limits of a request's context rule.
    """

    _eos_token_ids: frozenset[int]
    _fresh_seed: abc.Callable[[], int]
    _new_cache: abc.Callable[[EngineRequest, RotaryStage], SequenceCache]
    _context_limits: abc.Callable[[ContextRule], ContextSize]
    _fair_queue: FairQueue
    _samples: dict[str, list[Sequence]] = field(default_factory=dict)  # live ones of each request, sample 0 first
    by_id: dict[int, Sequence] = field(default_factory=dict)
    _retained: dict[str, object] = field(default_factory=dict)  # by request
    _deadlines: Deadlines = field(default_factory=lambda: Deadlines())
    _seq_ids: abc.Iterator[int] = field(default_factory=count)
    _arrival_numbers: abc.Iterator[int] = field(default_factory=count)

    def __len__(self) -> int:
        """Live samples."""
        return len(self.by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._samples

    def samples(self, request_id: str) -> list[Sequence]:
        """The live samples of a request, sample 0 first; empty for an unknown id."""
        return list(self._samples.get(request_id, ()))

    def add(self, request: EngineRequest, rotation: RotaryPlan, now: float, retained: object = None) -> Sequence:
        """Create sample 0 of a request. retained: an object that is not released before its last sample ends."""
        sampling, stage = request.sampling, rotation.stage(len(request.prompt_token_ids))
        stop_ids = frozenset(sampling.stop_token_ids)
        seq = Sequence(
            seq_id=next(self._seq_ids),
            request=request,
            index=0,
            token_ids=list(request.prompt_token_ids),
            num_prompt_tokens=len(request.prompt_token_ids),
            rotation=rotation,
            stage=stage,
            seed=self._fresh_seed() if sampling.seed is None else sampling.seed,
            cache=self._new_cache(request, stage),
            context_limits=self._context_limits(request.context),
            # A grammar allows eos only where the output may end, and nothing else where it is complete.
            stop_ids=stop_ids if sampling.ignore_eos and sampling.grammar is None else stop_ids | self._eos_token_ids,
            queue_entry=self._fair_queue.enqueue(request.caller, _max_request_tokens(request), request.share),
            arrival_number=next(self._arrival_numbers),
            arrival_time=now,
        )
        self.by_id[seq.seq_id] = seq
        self._samples[request.request_id] = [seq]
        if retained is not None and len(self._retained) < MAX_RETAINED:
            self._retained[request.request_id] = retained
        if request.deadline is not None:
            self._deadlines.add(request.deadline, request.request_id, self._samples)
        return seq

    def add_children(self, parent: Sequence) -> list[Sequence]:
        """Create the other samples of a request, except for those that were ended already."""
        wanted = [i for i in range(1, parent.request.sampling.n) if i not in parent.ended_samples]
        children = [self._new_child(parent, index) for index in wanted]
        self.by_id.update((child.seq_id, child) for child in children)
        self._samples[parent.request.request_id] += children
        return children

    def forget(self, seq: Sequence) -> None:
        """Remove a sample that has ended, and its request with the last one."""
        del self.by_id[seq.seq_id]
        self._fair_queue.refund(seq.request.caller, seq.queue_entry, _unused_tokens(seq), seq.request.share)
        live = self._samples[seq.request.request_id]
        live.remove(seq)
        if not live:
            del self._samples[seq.request.request_id]
            self._retained.pop(seq.request.request_id, None)
            self._fair_queue.request_ended(seq.request.caller)

    def overdue(self, now: float) -> abc.Iterator[Sequence]:
        """The first live sample of each request whose deadline is at or before `now`."""
        for request_id in self._deadlines.passed(now):
            for first in self.samples(request_id)[:1]:
                # The id may have been used again, with a later deadline or none.
                if first.request.deadline is not None and first.request.deadline <= now:
                    yield first

    def _new_child(self, parent: Sequence, index: int) -> Sequence:
        return Sequence(
            seq_id=next(self._seq_ids),
            request=parent.request,
            index=index,
            token_ids=list(parent.token_ids),
            num_prompt_tokens=parent.num_prompt_tokens,
            rotation=parent.rotation,
            stage=parent.stage,
            seed=parent.seed,
            cache=self._new_cache(parent.request, parent.stage),
            context_limits=parent.context_limits,
            stop_ids=parent.stop_ids,
            queue_entry=parent.queue_entry,
            arrival_number=parent.arrival_number,
            arrival_time=parent.arrival_time,
            status=SequenceStatus.FORKING,
            cached_tokens=parent.cached_tokens,
            first_scheduled_time=parent.first_scheduled_time,
        )


def _max_request_tokens(request: EngineRequest) -> int:
    """Tokens that a request may compute: its prompt once, and the longest output of every sample."""
    return len(request.prompt_token_ids) + request.sampling.n * request.sampling.max_tokens


def _unused_tokens(seq: Sequence) -> int:
    """Tokens of `_max_request_tokens` that an ended sample did not use. Sample 0 includes the prompt and uncreated samples."""
    num_samples = seq.request.sampling.n if seq.index == 0 and seq.children is None else 1
    unused = num_samples * seq.request.sampling.max_tokens - seq.num_output_tokens
    return unused + (max(0, seq.num_prompt_tokens - seq.max_computed_tokens) if seq.index == 0 else 0)


class Deadlines:
    """A heap of (seconds, request id). Entries of ended requests remain until they are due or outnumber the live ones."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, deadline: float, request_id: str, live: abc.Collection[str]) -> None:
        heapq.heappush(self._heap, (deadline, request_id))
        if len(self._heap) > 2 * len(live) + 64:
            # Most entries belong to ended requests with late deadlines; removing them bounds the heap by the live ones.
            self._heap = [entry for entry in self._heap if entry[1] in live]
            heapq.heapify(self._heap)

    def passed(self, now: float) -> abc.Iterator[str]:
        """Remove the entries at or before `now` and yield their ids. An id may have ended or been used again."""
        while self._heap and self._heap[0][0] <= now:
            yield heapq.heappop(self._heap)[1]
