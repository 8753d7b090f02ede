"""Request queue: live requests, the waiting and running queues, preemption, and deadlines.

Creates sequences from requests and changes their status; allocates and releases rotary rows and blocks as sequences move between
the queues. The decisions are the scheduler's.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import abc

from windlass.engine.cache.block_manager import BlockManager
from windlass.engine.cache.sequence_cache import SequenceCache
from windlass.engine.interface.context import ContextRule
from windlass.engine.interface.request import EngineRequest
from windlass.engine.rotary.rotary_policy import RotaryPlan, RotaryRows, RotaryStage
from windlass.engine.scheduling.context_shift import SequenceContextLimits
from windlass.engine.scheduling.fairness import FairQueue
from windlass.engine.scheduling.frequency_changes import FrequencyChanges
from windlass.engine.scheduling.scheduler_counters import SchedulerCounters
from windlass.engine.scheduling.scheduler_output import SchedulerOutputBuilder
from windlass.engine.scheduling.sequence import Sequence, SequenceStatus, rank_key


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


MAX_RETAINED = (
    256  # requests that keep something at once: what is large stays bounded, and what is missing is made again
)


class LiveRequests:
    """fresh_seed: a seed for requests that bring none. new_handle: of keys computed under a stage from the first token on.
    held: what a request's rule lets its samples hold. turns: callers' places in the queue.
    """

    def __init__(
        self,
        eos_token_ids: abc.Iterable[int],
        fresh_seed: abc.Callable[[], int],
        new_handle: abc.Callable[[EngineRequest, RotaryStage], SequenceCache],
        context_limits: abc.Callable[[ContextRule], SequenceContextLimits],
        fair_queue: FairQueue,
    ) -> None:
        self._eos_token_ids = frozenset(eos_token_ids)
        self._fresh_seed = fresh_seed
        self._new_handle = new_handle
        self._context_limits = context_limits
        self._fair_queue = fair_queue
        self._samples: dict[str, list[Sequence]] = {}  # live ones of each request, sample 0 first
        self._sequences: dict[int, Sequence] = {}
        self._retained: dict[str, object] = {}  # what requests need again at each place they get
        self._deadlines = Deadlines()
        self._num_sequences = 0  # ever made
        self._num_requests = 0

    def __len__(self) -> int:
        """Live samples."""
        return len(self._sequences)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._samples

    @property
    def by_id(self) -> abc.Mapping[int, Sequence]:
        """Every live sample by its id."""
        return self._sequences

    def samples(self, request_id: str) -> list[Sequence]:
        """The live samples of a request, sample 0 first; none of an unknown one."""
        return list(self._samples.get(request_id, ()))

    def add(self, request: EngineRequest, rotation: RotaryPlan, now: float, retained: object = None) -> Sequence:
        """Sample 0 of a request that has arrived. kept: let go when its last sample ends; of so many requests at once."""
        sampling, stage = request.sampling, rotation.stage(len(request.prompt_token_ids))
        stop_ids = frozenset(sampling.stop_token_ids)
        seq = Sequence(
            seq_id=self._new_id(),
            request=request,
            index=0,
            token_ids=list(request.prompt_token_ids),
            num_prompt_tokens=len(request.prompt_token_ids),
            rotation=rotation,
            stage=stage,
            seed=self._fresh_seed() if sampling.seed is None else sampling.seed,
            cache=self._new_handle(request, stage),
            context_limits=self._context_limits(request.context),
            # A grammar lets eos come only where the output may end, and where it is complete nothing else.
            stop_ids=stop_ids if sampling.ignore_eos and sampling.grammar is None else stop_ids | self._eos_token_ids,
            queue_entry=self._fair_queue.enqueue(request.caller, _max_request_tokens(request), request.share),
            arrival_number=self._num_requests,
            arrival_time=now,
        )
        self._num_requests += 1
        self._sequences[seq.seq_id] = seq
        self._samples[request.request_id] = [seq]
        if retained is not None and len(self._retained) < MAX_RETAINED:
            self._retained[request.request_id] = retained
        if request.deadline is not None:
            self._deadlines.add(request.deadline, request.request_id, self._samples, len(self._samples))
        return seq

    def add_children(self, parent: Sequence) -> list[Sequence]:
        """The other samples of a request, but for those that have been ended before they began."""
        wanted = [i for i in range(1, parent.request.sampling.n) if i not in parent.ended_samples]
        children = [self._new_child(parent, index) for index in wanted]
        self._sequences.update((child.seq_id, child) for child in children)
        self._samples[parent.request.request_id] += children
        return children

    def forget(self, seq: Sequence) -> None:
        """A sample has ended; the last one takes its request along."""
        del self._sequences[seq.seq_id]
        self._fair_queue.refund(seq.request.caller, seq.queue_entry, _unused_tokens(seq), seq.request.share)
        live = self._samples[seq.request.request_id]
        live.remove(seq)
        if not live:
            del self._samples[seq.request.request_id]
            self._retained.pop(seq.request.request_id, None)
            self._fair_queue.request_ended(seq.request.caller)

    def overdue(self, now: float) -> abc.Iterator[Sequence]:
        """The first live sample of each request whose deadline lies before `now`."""
        for request_id in self._deadlines.passed(now):
            for first in self.samples(request_id)[:1]:
                # The id may have been used again since, with a later deadline or none.
                if first.request.deadline is not None and first.request.deadline <= now:
                    yield first

    def _new_child(self, parent: Sequence, index: int) -> Sequence:
        return Sequence(
            seq_id=self._new_id(),
            request=parent.request,
            index=index,
            token_ids=list(parent.token_ids),
            num_prompt_tokens=parent.num_prompt_tokens,
            rotation=parent.rotation,
            stage=parent.stage,
            seed=parent.seed,
            cache=self._new_handle(parent.request, parent.stage),
            context_limits=parent.context_limits,
            stop_ids=parent.stop_ids,
            queue_entry=parent.queue_entry,
            arrival_number=parent.arrival_number,
            arrival_time=parent.arrival_time,
            status=SequenceStatus.FORKING,
            cached_tokens=parent.cached_tokens,
            first_scheduled_time=parent.first_scheduled_time,
        )

    def _new_id(self) -> int:
        self._num_sequences += 1
        return self._num_sequences - 1


def _max_request_tokens(request: EngineRequest) -> int:
    """What a request may take: its prompt once, and the longest output of every sample."""
    return len(request.prompt_token_ids) + request.sampling.n * request.sampling.max_tokens


def _unused_tokens(seq: Sequence) -> int:
    """What a sample that ends was counted for and did not take; sample 0 speaks for the prompt, and for those never made."""
    num_samples = seq.request.sampling.n if seq.index == 0 and seq.children is None else 1
    spared = num_samples * seq.request.sampling.max_tokens - seq.num_output_tokens
    return spared + (max(0, seq.num_prompt_tokens - seq.max_computed_tokens) if seq.index == 0 else 0)


class Deadlines:
    """A heap of (seconds, request id). Entries of ended requests stay until they surface or outnumber the live ones."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, deadline: float, request_id: str, live: abc.Container[str], num_live: int) -> None:
        heapq.heappush(self._heap, (deadline, request_id))
        if len(self._heap) > 2 * num_live + 64:
            # Mostly ended requests with deadlines far away: forget them, so that the heap grows with the live ones only.
            self._heap = [entry for entry in self._heap if entry[1] in live]
            heapq.heapify(self._heap)

    def passed(self, now: float) -> abc.Iterator[str]:
        """Ids with an entry at or before `now`, each entry once. An id may have ended, or been used again, since."""
        while self._heap and self._heap[0][0] <= now:
            yield heapq.heappop(self._heap)[1]
