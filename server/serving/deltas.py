"""Engine outputs as text deltas: one stream for all choices of a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from windlass.engine.client.engine_client import EngineClient
from windlass.engine.errors import DeadlineError, EngineDeadError
from windlass.engine.interface.context import ContextReport, ContextRule, ContextSize
from windlass.engine.interface.outputs import RequestOutput, TokenLogprobs
from windlass.engine.interface.request import EngineRequest
from windlass.engine.rotary.rotary_policy import RotaryReport
from windlass.server.observability.metrics import ServerMetrics
from windlass.server.serving.request_rotation import Rotation, report_at
from windlass.server.text.detokenizer import Detokenizer, LineLimiter, LineLimits
from windlass.server.text.service import Prompt

if TYPE_CHECKING:
    from windlass.server.text.tokenizer import Tokenizer


MAX_QUEUED_DELTAS = 256  # of many prompts, for a slow client; further outputs wait unmerged: the engine never does


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizerOptions:
    """How tokens become text. See `Detokenizer`; lines: how it ends by its lines."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    visible_special_tokens: frozenset[int] = frozenset()
    lines: LineLimits | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPlan:
    """A request ready to run: one engine request per prompt, `samples` outputs each.

    size: what their contexts may hold. rotation: what the requests asked for, for samples that end before the engine tells
    what they ran under.
    response_bytes: how large the answer may become, as estimated.
    window: prompts that are on the engine at once; the others wait here and do not fill the engine's queue.
    """

    prompts: list[Prompt]
    requests: list[EngineRequest]
    rotation: Rotation
    size: ContextSize
    response_bytes: int
    samples: int
    text: DetokenizerOptions
    max_concurrent_prompts: int = 64


@dataclass(frozen=True, slots=True)
class SampleReport:
    """What one sample ran under. context: what became of it under its rule, None where nothing is known of it."""

    rotary: RotaryReport
    rule: ContextRule
    context: ContextReport | None


@dataclass(slots=True)
class Delta:
    """What one engine output adds to one choice (choice = prompt index * samples + sample).

    prompt_logprobs comes once per prompt, on its first delta. finish_reason marks the choice's last delta, which also has
    the report. pieces: the text by token, where there are several. scheduled_at: see `RequestOutput`.
    """

    choice: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    report: SampleReport | None = None
    pieces: tuple[str, ...] = ()
    scheduled_at: float | None = None


@dataclass(slots=True)
class TokenUsage:
    """Token counts of a request while it runs."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int | None = None  # None: thinking is not told apart


@dataclass(slots=True)
class _Sample:
    prompt_index: int
    detokenizer: Detokenizer
    watch: LineLimiter | None = None
    first_output: float | None = None
    last_output: float | None = None
    num_tokens: int = 0
    finished: bool = False


@dataclass(slots=True)
class Generation:
    """One API request on the engine. `token_usage` is up to date with the deltas yielded so far."""

    engine: EngineClient
    tokenizer: Tokenizer
    metrics: ServerMetrics
    plan: GenerationPlan
    arrival: float  # time.monotonic() seconds
    token_usage: TokenUsage = field(default_factory=TokenUsage)
    _detokenizers: dict[int, Detokenizer] = field(default_factory=dict, init=False)  # the first one of each prompt

    def __post_init__(self) -> None:
        self.token_usage.prompt_tokens = sum(len(prompt.token_ids) for prompt in self.plan.prompts)

    def deltas(self) -> AsyncGenerator[Delta]:
        """Deltas of all choices as they come; raises what the engine raises. Close it to abort the request."""
        return self._run_one(0) if len(self.plan.requests) == 1 else self._run_many()

    async def _run_one(self, prompt_index: int) -> AsyncGenerator[Delta]:
        plan = self.plan
        request = plan.requests[prompt_index]
        samples: list[_Sample | None] = [None] * plan.samples
        remaining = plan.samples
        cached = 0
        waiting = True
        longest_output = 0
        outputs = self.engine.generate(request)
        if request.sampling.prompt_logprobs is not None:
            outputs = _prompt_logprobs_first(outputs)
        async with aclosing(outputs):  # type: ignore[type-var]
            async for output in outputs:
                now = time.monotonic()
                if output.error is not None:
                    raise output.error
                if waiting:
                    waiting = False
                    self.metrics.time_to_first_token.observe(now - self.arrival)
                if output.cached_tokens > cached:
                    self.token_usage.cached_tokens += output.cached_tokens - cached
                    cached = output.cached_tokens
                sample = samples[output.index]
                if sample is None:
                    sample = samples[output.index] = self._new_sample(prompt_index)
                if sample.finished:
                    continue  # computed before the engine heard that this sample was ended
                delta = self._process_output(sample, output, now)
                if delta.finish_reason is not None:
                    remaining -= 1
                    self._observe_finished(request, sample, delta.finish_reason, now)
                    longest_output = max(longest_output, sample.num_tokens)
                    if remaining and output.finish_reason is None:  # of such an end the engine does not know
                        self.engine.end_sample(request.request_id, output.index)
                if not remaining:
                    self.metrics.observe_prompt_finished(plan.samples, longest_output)
                yield delta
                if not remaining:
                    return
        raise EngineDeadError("the engine ended this request early: send it again")

    def _observe_finished(self, request: EngineRequest, sample: _Sample, reason: str, now: float) -> None:
        decoding = 0.0
        if sample.first_output is not None and sample.last_output is not None:
            decoding = sample.last_output - sample.first_output
        self.metrics.finished(
            reason,
            now - self.arrival,
            prompt_tokens=len(request.prompt_token_ids),
            generation_tokens=sample.num_tokens,
            max_tokens=request.sampling.max_tokens,
            decode_seconds=decoding,
        )

    def _new_sample(self, prompt_index: int) -> _Sample:
        options = self.plan.text
        detokenizer = Detokenizer(
            self.tokenizer,
            self.plan.prompts[prompt_index].token_ids,
            skip_special_tokens=options.skip_special_tokens,
            stop=options.stop,
            include_stop=options.include_stop,
            min_tokens=options.min_tokens,
            visible_special_tokens=options.visible_special_tokens,
            sibling=self._detokenizers.get(prompt_index),
        )
        self._detokenizers.setdefault(prompt_index, detokenizer)
        return _Sample(
            prompt_index,
            detokenizer,
            None if options.lines is None else LineLimiter(options.lines),
        )

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
                self.metrics.inter_token_latency.observe((now - sample.last_output) / count, count)
            else:
                sample.first_output = now
            sample.last_output = now
        detokenizer = sample.detokenizer
        before = detokenizer.num_tokens
        text = detokenizer.push(
            token_ids,
            hide_last=output.stop_token_id is not None and not self.plan.text.include_stop,
            final=reason is not None,
        )
        logprobs = output.logprobs or ()
        stop_reason: str | int | None = None
        lines_end = False
        if sample.watch is not None:
            text = sample.watch.feed(text, now - (now if sample.first_output is None else sample.first_output))
            lines_end = sample.watch.ended
            if reason is not None or detokenizer.stopped is not None:
                text += sample.watch.flush()
        if detokenizer.stopped is not None or lines_end:
            taken = detokenizer.num_tokens - before  # tokens past the stop string are not part of the answer
            token_ids, logprobs = token_ids[:taken], logprobs[:taken]
            reason, stop_reason = ("length", None) if lines_end else ("stop", detokenizer.stopped)
            if rotary is None or taken < len(output.token_ids):  # the engine does not know of such ends and goes on
                request = self.plan.requests[sample.prompt_index]
                prompt, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
                longest, tokens = min(prompt + max_tokens, self.plan.size.rotary_length), detokenizer.num_tokens
                rotary = report_at(self.plan.rotation.plan(longest), prompt, tokens)
                context = self.plan.size.report(prompt + max(tokens - 1, 0))
        elif output.stop_token_id is not None:
            stop_reason = output.stop_token_id
        self.token_usage.completion_tokens += len(token_ids)
        sample.num_tokens += len(token_ids)
        sample.finished = reason is not None
        rule = self.plan.requests[sample.prompt_index].context
        return Delta(
            self.plan.samples * sample.prompt_index + output.index,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=reason,
            stop_reason=stop_reason,
            prompt_logprobs=output.prompt_logprobs,
            report=None if rotary is None else SampleReport(rotary, rule, context),
            pieces=tuple(detokenizer.token_texts) if len(token_ids) > 1 else (),
            scheduled_at=output.scheduled_at,
        )

    async def _run_many(self) -> AsyncGenerator[Delta]:
        """Merge the streams of several prompts; the first failure, or being closed, ends all of them."""
        plan = self.plan
        queue: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue(MAX_QUEUED_DELTAS)
        todo: Iterator[int] = iter(range(len(plan.requests)))

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
        running = count = min(plan.max_concurrent_prompts, len(plan.requests))

        async def start() -> None:
            for _ in range(count):
                workers.append(asyncio.create_task(work()))
                await asyncio.sleep(0)  # handing over requests with long lists takes a while

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
