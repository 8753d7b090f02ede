"""Takes in what steps have produced: books what is computed, appends tokens, lets samples fork, ends what is complete.

Responsible for the outputs that follow from results. It plans nothing, and knows nothing of how tokens were drawn.
"""

from __future__ import annotations

from dataclasses import replace

from windlass.engine.api.request import RequestOutput
from windlass.engine.cache.blocks import BlockManager
from windlass.engine.scheduling.counters import SchedulerCounters
from windlass.engine.scheduling.places import SchedulerQueues
from windlass.engine.scheduling.plan import SchedulerOutput, StepResult
from windlass.engine.scheduling.requests import LiveRequests
from windlass.engine.scheduling.reuse import NonPrefixReuse
from windlass.engine.scheduling.sequence import Sequence, SequenceStatus
from windlass.engine.scheduling.speculation import Speculation
from windlass.engine.scheduling.stages import FrequencyChanges


class ResultProcessor:
    def __init__(
        self,
        requests: LiveRequests,
        queues: SchedulerQueues,
        blocks: BlockManager,
        frequency_changes: FrequencyChanges,
        speculation: Speculation,
        reuse: NonPrefixReuse,
        counters: SchedulerCounters,
    ) -> None:
        self._requests = requests
        self._queues = queues
        self._blocks = blocks
        self._frequency_changes = frequency_changes
        self._speculation = speculation
        self._reuse = reuse
        self._counters = counters

    def process(self, output: SchedulerOutput, results: list[StepResult], now: float) -> list[RequestOutput]:
        """The outputs of a step. now: seconds on the scheduler's clock.

        Results of sequences that have ended since (an abort, a deadline) are ignored. Raises RuntimeError if a result
        that was asked for is missing.
        """
        by_id, live = {result.seq_id: result for result in results}, self._requests.by_id
        outputs: list[RequestOutput] = []
        for item in output.sequences:
            seq = live.get(item.seq_id)
            if seq is None:
                continue
            if item.num_proposed:
                result = _result(by_id, seq)
                self._speculation.observe(seq, item, len(result.token_ids) - 1)
                outputs.append(self._take_tokens(seq, result, now, start=item.start))
                continue
            if output.num_passes > 1 or output.ahead:
                outputs.append(self._take_tokens(seq, _result(by_id, seq), now, start=item.start))
                continue
            self._settle(seq, item.start + item.num_tokens)
            if item.prompt_logprobs is not None:
                seq.add_prompt_logprobs(item.start, _result(by_id, seq).prompt_logprobs or ())
            if seq.request.sampling.max_tokens == 0 and seq.num_uncomputed_tokens == 0:
                outputs += self._finish_scoring(seq, by_id, now)
            elif seq.children and item.samples:  # a prompt that begins again has them before its end
                outputs += self._fork(seq, seq.children, by_id, now)
            elif item.samples:
                outputs.append(self._take_tokens(seq, _result(by_id, seq), now))
        return outputs

    def end(self, seq: Sequence) -> None:
        """Forget a sample and free what it holds; the last one ends its request."""
        if seq.fetch is not None:
            seq.fetch.leave()
        self._queues.leave(seq)
        self._requests.forget(seq)

    def _settle(self, seq: Sequence, num_computed_tokens: int) -> None:
        """Book that the keys of so many tokens are final."""
        seq.max_computed_tokens = max(seq.max_computed_tokens, num_computed_tokens)
        self._blocks.mark_computed(seq.cache, seq.token_ids, num_computed_tokens, seq.num_inflight_tokens)
        self._reuse.attach_passage(seq)

    def _take_tokens(self, seq: Sequence, result: StepResult, now: float, start: int | None = None) -> RequestOutput:
        """`_append`, and what follows for the keys of a sequence that goes on."""
        output = self._append(seq, result, now, start)
        if output.finish_reason is None:
            self._frequency_changes.recompute_if_stage_changed(seq)
        return output

    def _fork(
        self, seq: Sequence, planned: list[Sequence], results: dict[int, StepResult], now: float
    ) -> list[RequestOutput]:
        """Append the first tokens of `seq` and of the samples that fork from it here, as they were planned."""
        seq.children = []
        children = [child for child in planned if child.status is SequenceStatus.FORKING]
        for child in children:  # all of them before `seq` may finish and free its blocks
            self._blocks.fork(seq.cache, child.cache)
            child.max_computed_tokens = seq.max_computed_tokens
        samples = [seq, *children]
        if seq.index in seq.ended_samples:  # it has computed the prompt for the others
            self._note_first_token(seq, now)
            self.end(seq)
            samples = children
        outputs = [self._append(sample, _result(results, sample), now) for sample in samples]
        for child in children:
            if child.status is not SequenceStatus.FORKING:
                continue
            if self._queues.has_capacity and self._blocks.capacity(child.cache, 1):
                self._queues.start(child)
            else:
                self._queues.preempt(child)
        for sample in samples:
            if sample.status is not SequenceStatus.FINISHED:
                self._frequency_changes.recompute_if_stage_changed(sample)
        return outputs

    def _append(self, seq: Sequence, result: StepResult, now: float, start: int | None = None) -> RequestOutput:
        """start: of a chunk with more than known tokens, whose keys become final with the tokens drawn, but for the last one's.

        Keys past the accepted tokens are void: the next step overwrites them.
        """
        if not result.token_ids:
            raise RuntimeError(f"the step drew no token for sequence {seq.seq_id}")
        num_accepted, reason, stop_id = seq.append_tokens(result.token_ids)
        if start is not None:
            self._settle(seq, start + num_accepted)
        self._counters.generation_tokens += num_accepted
        scheduled_at = seq.first_scheduled_time if seq.first_token_time is None else None
        self._note_first_token(seq, now)
        prompt_logprobs, seq.prompt_logprobs = seq.prompt_logprobs, None
        dropped, seq.num_dropped_early = seq.num_dropped_early, 0
        report = seq.context_limits.context_report(seq.cache, dropped)
        if reason is not None:
            self._finish(seq, now)
        elif dropped:
            self._counters.count_shift(dropped)
        return RequestOutput(
            seq.request.request_id,
            index=seq.index,
            token_ids=tuple(result.token_ids[:num_accepted]),
            logprobs=None if result.logprobs is None else result.logprobs[:num_accepted],
            prompt_logprobs=None if prompt_logprobs is None else tuple(prompt_logprobs),
            finish_reason=reason,
            stop_token_id=stop_id,
            cached_tokens=seq.cached_tokens or 0,
            rotary=None if reason is None else seq.rotation.report(seq.stage, seq.cache.num_rerotations),
            context=None if reason is None else report,
            scheduled_at=scheduled_at,
        )

    def _finish_scoring(self, seq: Sequence, results: dict[int, StepResult], now: float) -> list[RequestOutput]:
        """End a request that asked for no tokens, its prompt being computed; every sample is equally empty."""
        pooled = None if seq.request.pooling is None else _result(results, seq).pooled
        self._note_first_token(seq, now)
        report = seq.context_limits.context_report(seq.cache)
        self._finish(seq, now)
        first = RequestOutput(
            seq.request.request_id,
            prompt_logprobs=None if seq.prompt_logprobs is None else tuple(seq.prompt_logprobs),
            finish_reason="length",
            cached_tokens=seq.cached_tokens or 0,
            rotary=seq.rotation.report(seq.stage, seq.cache.num_rerotations),
            context=report,
            pooled=pooled,
        )
        rest = (replace(first, index=index, prompt_logprobs=None) for index in range(1, seq.request.sampling.n))
        return [output for output in (first, *rest) if output.index not in seq.ended_samples]

    def _note_first_token(self, seq: Sequence, now: float) -> None:
        if seq.first_token_time is None:
            seq.first_token_time = now
            if seq.index == 0 and seq.first_scheduled_time is not None:
                self._counters.prefill_seconds.append(now - seq.first_scheduled_time)

    def _finish(self, seq: Sequence, now: float) -> None:
        self.end(seq)
        if seq.request.request_id not in self._requests and seq.first_token_time is not None:
            self._counters.decode_seconds.append(now - seq.first_token_time)
            if seq.first_scheduled_time is not None:
                self._counters.inference_seconds.append(now - seq.first_scheduled_time)


def _result(results: dict[int, StepResult], seq: Sequence) -> StepResult:
    result = results.get(seq.seq_id)
    if result is None:
        raise RuntimeError(f"the step reported no result for sequence {seq.seq_id}")
    return result
