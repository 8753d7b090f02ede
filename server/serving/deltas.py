"""Engine outputs as text deltas: one stream for all choices of a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from windlass.engine.errors import DeadlineError, EngineDeadError
from windlass.engine.interface.outputs import RequestOutput, TokenLogprobs
from windlass.engine.interface.request import EngineRequest
from windlass.server.serving.job import GenerationJob
from windlass.server.serving.request_rotation import report_at, rotary_object
from windlass.server.text.detokenizer import Detokenizer, LineLimiter
from windlass.server.text.service import Prompt

MAX_QUEUED_DELTAS = (
    256  # of several prompts, for a slow client; later outputs wait in the engine client, never in the engine
)


@dataclass(slots=True)
class Delta:
    """What one engine output adds to one choice (choice = prompt index * samples + sample).

    prompt_logprobs: once per prompt, on its first delta. finish_reason: on the last delta of a choice, which also has
    `rotary`, the response's object of this name. pieces: the text by token, if there are several. scheduled_at: see
    `RequestOutput`.
    """

    choice: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    rotary: dict[str, Any] | None = None
    pieces: tuple[str, ...] = ()
    scheduled_at: float | None = None


@dataclass(slots=True)
class TokenUsage:
    """Token counts of a request while it runs. reasoning_tokens: None if thinking is not separated."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int | None = None


@dataclass(slots=True)
class _Sample:
    prompt_index: int
    detokenizer: Detokenizer
    line_limiter: LineLimiter | None
    first_output: float | None = None
    last_output: float | None = None
    num_tokens: int = 0
    finished: bool = False


class Generation:
    """One API request on the engine. `token_usage` includes the deltas yielded so far.

    requests: one per prompt, with `job.sampling.n` outputs each.
    """

    def __init__(self, job: GenerationJob, prompts: Sequence[Prompt], requests: Sequence[EngineRequest]) -> None:
        self.token_usage = TokenUsage(prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts))
        self._job = job
        self._prompts = prompts
        self._requests = requests
        self._metrics = job.state.metrics
        self._samples = job.sampling.n
        self._include_stop = bool(job.body.include_stop_str_in_output)
        self._detokenizers: dict[int, Detokenizer] = {}  # the first one of each prompt
        self._parser_token_ids = _parser_token_ids(job)

    def deltas(self) -> AsyncGenerator[Delta]:
        """Deltas of all choices as they come; raises the engine's errors. Close it to abort the request."""
        return self._run_one(0) if len(self._requests) == 1 else self._run_many()

    async def _run_one(self, prompt_index: int) -> AsyncGenerator[Delta]:
        request = self._requests[prompt_index]
        engine, arrival = self._job.state.engine, self._job.arrival
        samples: list[_Sample | None] = [None] * self._samples
        remaining = self._samples
        cached = 0
        waiting = True
        longest_output = 0
        outputs = engine.generate(request)
        if request.sampling.prompt_logprobs is not None:
            outputs = _prompt_logprobs_first(outputs)
        async with aclosing(outputs):  # type: ignore[type-var]
            async for output in outputs:
                now = time.monotonic()
                if output.error is not None:
                    raise output.error
                if waiting:
                    waiting = False
                    self._metrics.time_to_first_token.observe(now - arrival)
                if output.cached_tokens > cached:
                    self.token_usage.cached_tokens += output.cached_tokens - cached
                    cached = output.cached_tokens
                sample = samples[output.index]
                if sample is None:
                    sample = samples[output.index] = self._new_sample(prompt_index)
                if sample.finished:
                    continue  # computed before the engine received the end of this sample
                delta = self._process_output(sample, output, now)
                if delta.finish_reason is not None:
                    remaining -= 1
                    self._observe_finished(request, sample, delta.finish_reason, now)
                    longest_output = max(longest_output, sample.num_tokens)
                    if remaining and output.finish_reason is None:  # the server ended it, not the engine
                        engine.end_sample(request.request_id, output.index)
                if not remaining:
                    self._metrics.observe_prompt_finished(self._samples, longest_output)
                yield delta
                if not remaining:
                    return
        raise EngineDeadError("the engine ended this request early: send it again")

    def _observe_finished(self, request: EngineRequest, sample: _Sample, reason: str, now: float) -> None:
        decoding = 0.0
        if sample.first_output is not None and sample.last_output is not None:
            decoding = sample.last_output - sample.first_output
        self._metrics.finished(
            reason,
            now - self._job.arrival,
            prompt_tokens=len(request.prompt_token_ids),
            generation_tokens=sample.num_tokens,
            max_tokens=request.sampling.max_tokens,
            decode_seconds=decoding,
        )

    def _new_sample(self, prompt_index: int) -> _Sample:
        job = self._job
        detokenizer = Detokenizer(
            job.state.tokenizer,
            self._prompts[prompt_index].token_ids,
            skip_special_tokens=job.body.skip_special_tokens is not False,
            stop=tuple(job.body.stop or ()),
            include_stop=self._include_stop,
            min_tokens=job.sampling.min_tokens,
            visible_special_tokens=self._parser_token_ids,
            locator=None if job.parsing is None or not job.body.stop else job.state.thinking.answer_locator(job.phase),
            sibling=self._detokenizers.get(prompt_index),
        )
        self._detokenizers.setdefault(prompt_index, detokenizer)
        limiter = None if job.line_limits is None else LineLimiter(job.line_limits)
        return _Sample(prompt_index, detokenizer, limiter)

    def _process_output(self, sample: _Sample, output: RequestOutput, now: float) -> Delta:
        token_ids = output.token_ids
        reason, rotary, context = output.finish_reason, output.rotary, output.context
        if reason == "timeout":
            raise DeadlineError("the request's deadline passed before it finished")
        if reason == "abort":
            raise EngineDeadError("the engine aborted this request: send it again")
        if token_ids:
            if sample.last_output is not None:
                count = len(token_ids)
                self._metrics.inter_token_latency.observe((now - sample.last_output) / count, count)
            else:
                sample.first_output = now
            sample.last_output = now
        detokenizer = sample.detokenizer
        before = detokenizer.num_tokens
        text = detokenizer.push(
            token_ids,
            hide_last=output.stop_token_id is not None and not self._include_stop,
            final=reason is not None,
        )
        logprobs = output.logprobs or ()
        stop_reason: str | int | None = None
        ended_by_lines = False
        if sample.line_limiter is not None:
            limiter = sample.line_limiter
            text = limiter.feed(text, now - (now if sample.first_output is None else sample.first_output))
            ended_by_lines = limiter.ended
            if reason is not None or detokenizer.stopped is not None:
                text += limiter.flush()
        job = self._job
        if detokenizer.stopped is not None or ended_by_lines:
            taken = detokenizer.num_tokens - before  # tokens after the stop string are not part of the output
            token_ids, logprobs = token_ids[:taken], logprobs[:taken]
            reason, stop_reason = ("length", None) if ended_by_lines else ("stop", detokenizer.stopped)
            if rotary is None or taken < len(output.token_ids):  # the engine would have continued
                request = self._requests[sample.prompt_index]
                prompt, tokens = len(request.prompt_token_ids), detokenizer.num_tokens
                longest = min(prompt + request.sampling.max_tokens, job.size.rotary_length)
                rotary = report_at(job.rotation.plan(longest), prompt, tokens)
                context = job.size.report(prompt + max(tokens - 1, 0))
        elif output.stop_token_id is not None:
            stop_reason = output.stop_token_id
        self.token_usage.completion_tokens += len(token_ids)
        sample.num_tokens += len(token_ids)
        sample.finished = reason is not None
        return Delta(
            self._samples * sample.prompt_index + output.index,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=reason,
            stop_reason=stop_reason,
            prompt_logprobs=output.prompt_logprobs,
            rotary=None if rotary is None else rotary_object(rotary, context, job.rule, job.dropped_turns),
            pieces=tuple(detokenizer.token_texts) if len(token_ids) > 1 else (),
            scheduled_at=output.scheduled_at,
        )

    async def _run_many(self) -> AsyncGenerator[Delta]:
        """Merge the streams of several prompts; the first failure, or closing this one, ends all of them.

        Prompts above the engine's capacity wait here, so that they do not fill its queue.
        """
        queue: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue(MAX_QUEUED_DELTAS)
        todo: Iterator[int] = iter(range(len(self._requests)))

        async def work() -> None:
            try:
                for prompt_index in todo:
                    async with aclosing(self._run_one(prompt_index)) as deltas:
                        async for delta in deltas:
                            await queue.put(delta)
                await queue.put(None)
            except Exception as error:
                await queue.put(error)

        workers: list[asyncio.Task[None]] = []
        running = count = min(max(1, self._job.info.max_num_seqs // self._samples), len(self._requests))

        async def start() -> None:
            for _ in range(count):
                workers.append(asyncio.create_task(work()))
                await asyncio.sleep(0)  # submitting requests with long lists takes a while

        starting = asyncio.create_task(start())
        try:
            while running:
                item = await queue.get()
                if item is None:
                    running -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        finally:
            for task in (starting, *workers):
                task.cancel()
            await asyncio.gather(starting, *workers, return_exceptions=True)


def _parser_token_ids(job: GenerationJob) -> frozenset[int]:
    """Special tokens that the parser of the output needs in the text."""
    if job.parsing is None:
        return frozenset()
    ids = map(job.state.tokenizer.backend.token_to_id, job.parsing.markers)
    return frozenset(token_id for token_id in ids if token_id is not None)


async def _prompt_logprobs_first(outputs: AsyncIterator[RequestOutput]) -> AsyncGenerator[RequestOutput]:
    """The outputs, the one with the prompt's log-probabilities first."""
    held: list[RequestOutput] | None = []
    async with aclosing(outputs):  # type: ignore[type-var]
        async for output in outputs:
            if held is None or output.error is not None:
                yield output
            elif output.prompt_logprobs is None:
                held.append(output)
            else:
                yield output
                for earlier in held:
                    yield earlier
                held = None
