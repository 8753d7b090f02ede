"""The requests the engine works on: their live samples, by request and by id.

Responsible for making sequences out of requests and for knowing which of them have not ended. What they hold and when
they run is others' business.
"""

from __future__ import annotations

from collections import abc

from windlass.engine.api.context import ContextRule
from windlass.engine.api.request import EngineRequest
from windlass.engine.cache.handle import SequenceCache
from windlass.engine.rotary.policy import RotaryPlan, RotaryStage
from windlass.engine.scheduling.deadlines import Deadlines
from windlass.engine.scheduling.sequence import Sequence, SequenceStatus
from windlass.engine.scheduling.shifting import SequenceContextLimits
from windlass.engine.scheduling.turns import FairQueue

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
