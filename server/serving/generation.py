"""Generation: checks of a request, its engine requests, their outputs as text deltas, and its response."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace

from starlette.requests import Request

from windlass.engine.errors import DeadlineError, EngineDeadError, RequestError
from windlass.engine.interface.model_info import ModelInfo
from windlass.engine.interface.outputs import RequestOutput
from windlass.engine.interface.request import EngineRequest
from windlass.server.app.state import ServerState, caller_of, state_of
from windlass.server.config.settings import ContextOverflow, ServerSettings
from windlass.server.errors import answer_exceeds_context, bad_request
from windlass.server.observability.logging import request_id
from windlass.server.schemas.chat import ChatRequest
from windlass.server.schemas.generation import GenerationRequest
from windlass.server.serving.job import (
    Delta,
    GenerationJob,
    TokenUsage,
    build_engine_request,
    build_sampling,
    fit_to_context,
    resolve_cache_salt,
    resolve_context_rule,
    resolve_max_tokens,
    resolve_reuse,
    samples_per_prompt,
    scaling_hint,
    sequence_breakers,
)
from windlass.server.serving.observers import generation_observers, observe_request, with_explicit_seed
from windlass.server.serving.request_rotation import report_at, resolve_rotation, rotary_object
from windlass.server.serving.response_writer import LARGE_RESPONSE_BYTES, Writer
from windlass.server.serving.streaming import Exchange
from windlass.server.serving.structured_output import (
    NO_TOOLS,
    StructuredOutput,
    ToolPlan,
    parse_structured_output,
    with_thinking_prefix,
)
from windlass.server.text.detokenizer import Detokenizer, LineLimiter, LineLimits
from windlass.server.text.reasoning import HARMONY
from windlass.server.text.service import Prompt

MAX_QUEUED_DELTAS = (
    256  # of several prompts, for a slow client; later outputs wait in the engine client, never in the engine
)


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
                if output.prompt_computed is not None:
                    yield self._progress(prompt_index, output, now)
                    continue
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

    def _progress(self, prompt_index: int, output: RequestOutput, now: float) -> Delta:
        """How much of a prompt is computed, as llama.cpp's object of this name."""
        assert output.prompt_computed is not None
        progress = {
            "total": len(self._requests[prompt_index].prompt_token_ids),
            "cache": output.cached_tokens,
            "processed": output.prompt_computed,
            "time_ms": round(1000 * (now - self._job.arrival)),
        }
        if len(self._requests) > 1:
            progress["index"] = prompt_index
        return Delta(self._samples * prompt_index, prompt_progress=progress)

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
            token_ids, hide_last=output.stop_token_id is not None and not self._include_stop, final=reason is not None
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


# Longest answer of a chat that sets no limit where prompt and limit choose the scaling: with all of the context, it would always
# be the largest scaling, which reads short texts worse.
AUTO_SCALING_TOKENS = 4096
TOOL_CHOICE_FIELDS = ("tool_choice", "function_call")


def check_generation(
    request: Request,
    body: GenerationRequest,
    info: ModelInfo,
    *,
    arrival: float,
    default_max_tokens: int | None,
    logprobs: int | None,
    echo: bool = False,
    tools: ToolPlan = NO_TOOLS,
    line_limits: LineLimits | None = None,
) -> GenerationJob:
    """Check everything that does not need tokenizing; raises ApiError or RequestError naming the field.

    default_max_tokens: of requests that set no limit; None: what the context leaves, or `AUTO_SCALING_TOKENS` if the length
    chooses the scaling. logprobs: alternatives per generated token, None for no log-probabilities.
    echo: the prompt is repeated, with log-probabilities if those are requested.
    line_limits: limits on the lines of the output.
    """
    state, caller = state_of(request), caller_of(request)
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options requires stream: true", "stream_options")
    structured, forced = parse_structured_output(body), tools.forced
    # `response_format` is about the text, which an output of calls does not have.
    if forced is not None and structured is not None and structured.field != "response_format":
        raise bad_request(
            f"{forced.field} and {structured.field} both set the format of the answer: give one of them",
            structured.field,
            "invalid_grammar",
        )
    calls = "" if state.thinking.name == HARMONY else tools.calls  # Harmony has calls in separate channels
    chat = isinstance(body, ChatRequest)
    overflow = _resolve_overflow(body, state.settings, chat=chat)
    rule = resolve_context_rule(body, overflow, state.settings)
    n, samples = samples_per_prompt(body)
    rotation = resolve_rotation(body.rope_scaling, body.rope_update, state.settings, info)
    size = rotation.limit_context(info.size(rule))
    has_limit = default_max_tokens is not None or body.max_tokens is not None or body.max_completion_tokens is not None
    if default_max_tokens is None:
        default_max_tokens = AUTO_SCALING_TOKENS if rotation.chooses_scaling else size.longest_prompt
    wanted = [top for top in (body.prompt_logprobs, logprobs if echo else None) if top is not None]
    sampling = build_sampling(
        body,
        info,
        max_tokens=resolve_max_tokens(body, default_max_tokens),
        samples=samples,
        logprobs=0 if logprobs is None and samples > n else logprobs,  # best_of ranks by them
        prompt_logprobs=max(wanted) if wanted else None,
        defaults=state.settings.sampling,
    )
    return GenerationJob(
        state=state,
        body=body,
        info=info,
        request_id=request_id(request.scope),
        caller=caller,
        arrival=arrival,
        sampling=sampling,
        has_limit=has_limit,
        rotation=rotation,
        logprobs=logprobs,
        overflow=overflow,
        rule=rule,
        reuse=resolve_reuse(
            body, resolve_cache_salt(body, caller, state, passages=True) or "", state.settings, chat=chat
        ),
        size=size,
        parsing=tools.parsing,
        structured=forced or (structured and replace(structured, alternative=calls)),
        priority=state.callers.priority(caller, body.priority),
        adapter=state.adapters.find(body.model),
        line_limits=line_limits,
        tools=tools.tools,
    )


def _resolve_overflow(body: GenerationRequest, settings: ServerSettings, *, chat: bool) -> ContextOverflow:
    """The overflow rule of the body, or else the server's default if the request supports it."""
    asked = body.context_overflow
    if asked == "drop_turns":
        if not chat:
            raise bad_request(
                "context_overflow drop_turns requires messages: a prompt has no turns", "context_overflow"
            )
        if body.truncate_prompt_tokens is not None:
            raise bad_request(
                "truncate_prompt_tokens and context_overflow drop_turns both shorten the prompt: give one of them",
                "truncate_prompt_tokens",
            )
    if asked is None and settings.context_overflow == "drop_turns":
        return "drop_turns" if chat and body.truncate_prompt_tokens is None else "stop"
    return asked or settings.context_overflow


async def run_generation(
    exchange: Exchange,
    job: GenerationJob,
    prompts: Sequence[Prompt],
    *,
    param: str,
    make_writer: Callable[[TokenUsage], Writer],
) -> None:
    """Generate for `prompts` and respond. param: the field of the prompts, for errors."""
    state = job.state
    if state.recorder is not None and len(prompts) == 1:
        job = with_explicit_seed(job)
    with state.adapters.using(job.adapter):
        if job.adapter is not None:
            state.metrics.count_adapter_request(job.adapter.source.name)
        generation = Generation(job, prompts, await _build_requests(job, prompts, param))
        token_usage = generation.token_usage
        writer = make_writer(token_usage)
        streaming = bool(job.body.stream)
        state.callers.charge_prompt_tokens(job.caller, token_usage.prompt_tokens)
        observers = generation_observers(exchange, job, prompts, token_usage)
        with observe_request(exchange, observers) as observe_output:
            async with (
                _name_grammar_field(job.structured),
                _count_usage(job, token_usage),
                aclosing(generation.deltas()) as deltas,
            ):
                async for delta in deltas:
                    if delta.prompt_progress is not None:
                        if events := writer.progress_event(delta):
                            await exchange.send_events(events)
                        continue
                    if observe_output is not None:
                        observe_output(delta)
                    if delta.prompt_logprobs is not None:
                        prompt_index = delta.choice // job.sampling.n
                        await state.text.run_in_thread(writer.take_prompt_logprobs, prompt_index, delta.prompt_logprobs)
                        delta.prompt_logprobs = None  # the writer stores its text instead
                    if not streaming:
                        writer.add(delta)
                    elif events := await _render_event(state, writer, delta):
                        await exchange.send_events(events)
        large = writer.budget.size > LARGE_RESPONSE_BYTES
        if streaming:
            await exchange.finish(await state.text.run_in_thread(writer.last_event) if large else writer.last_event())
        else:
            await exchange.send_json(await state.text.run_in_thread(writer.pieces) if large else writer.pieces())


@asynccontextmanager
async def _count_usage(job: GenerationJob, token_usage: TokenUsage) -> AsyncIterator[None]:
    """Charge the generated tokens to the caller, however the request ends."""
    try:
        with job.state.metrics.scalings.running(job.rotation.metric_label, token_usage):
            yield
    finally:
        job.state.callers.charge_generated_tokens(job.caller, token_usage.completion_tokens)


async def _render_event(state: ServerState, writer: Writer, delta: Delta) -> bytes:
    """The events of a delta; on a thread if the last ones repeat a long response."""
    if delta.finish_reason is not None and writer.budget.size > LARGE_RESPONSE_BYTES:
        return await state.text.run_in_thread(writer.event, delta)
    return writer.event(delta)


@asynccontextmanager
async def _name_grammar_field(structured: StructuredOutput | None) -> AsyncIterator[None]:
    """Scope in which the engine's errors about a grammar name the field of the request."""
    try:
        yield
    except RequestError as error:
        if structured is None or error.param != "grammar":
            raise
        raise bad_request(f"{structured.field}: {error.message}", structured.field, error.code) from None


async def _build_requests(job: GenerationJob, prompts: Sequence[Prompt], param: str) -> list[EngineRequest]:
    """One engine request per prompt, with bad words, sequence breakers and the grammar in its sampling parameters."""
    state, body, info = job.state, job.body, job.info
    sampling = job.sampling
    if body.bad_words:
        words = await state.text.encode_word_variants(body.bad_words, param="bad_words", caller=job.caller)
        sampling = replace(sampling, bad_words=words)
    if sampling.repeats is not None and (breakers := sequence_breakers(body)):
        ids, sequences = await state.text.dry_breaker_tokens(breakers, param="dry_sequence_breakers", caller=job.caller)
        repeats = replace(sampling.repeats, breaker_ids=ids, breaker_sequences=sequences)
        sampling = replace(sampling, repeats=repeats)
    if job.structured is not None:
        form = job.structured
        grammar = await state.text.compile_grammar(
            form.kind, form.value, form.alternative, param=form.field, caller=job.caller
        )
        calls = form.field in TOOL_CHOICE_FIELDS
        grammar = with_thinking_prefix(grammar, state.thinking, job.phase, info.eos_token_ids, calls=calls)
        sampling = replace(sampling, grammar=grammar)
    requests = []
    for number, prompt in enumerate(prompts):
        if not prompt.token_ids:
            where = f"{param}[{number}]" if len(prompts) > 1 else param
            raise bad_request(f"{where} is empty: give at least one token", param, "empty_prompt")
        if body.max_tokens is not None or body.max_completion_tokens is not None:
            job.rotation.check_length(len(prompt.token_ids), sampling.max_tokens, info.size(job.rule))
        with scaling_hint(job):
            max_tokens = fit_to_context(sampling.max_tokens, len(prompt.token_ids), job.size, param=param)
        if job.overflow == "error" and job.has_limit and max_tokens < sampling.max_tokens:
            raise answer_exceeds_context(job.size.longest, len(prompt.token_ids), sampling.max_tokens)
        fitted = replace(sampling, max_tokens=max_tokens, min_tokens=min(sampling.min_tokens, max_tokens))
        progress = bool(body.stream and body.return_progress)
        requests.append(build_engine_request(job, prompt.token_ids, fitted, reuse=job.reuse, reports_progress=progress))
    return requests
