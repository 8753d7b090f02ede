"""Generation: checks of a request, its engine requests, and its response."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

from starlette.requests import Request

from windlass.engine.errors import RequestError
from windlass.engine.interface.model_info import ModelInfo
from windlass.engine.interface.request import EngineRequest
from windlass.server.app.state import ServerState, caller_of, state_of
from windlass.server.config.settings import ContextOverflow, ServerSettings
from windlass.server.errors import answer_exceeds_context, bad_request
from windlass.server.observability.logging import request_id
from windlass.server.schemas.chat import ChatRequest
from windlass.server.schemas.generation import GenerationRequest
from windlass.server.serving.deltas import Delta, Generation, TokenUsage
from windlass.server.serving.job import (
    GenerationJob,
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
from windlass.server.serving.request_rotation import resolve_rotation
from windlass.server.serving.response_writer import LARGE_RESPONSE_BYTES, Writer
from windlass.server.serving.streaming import Exchange
from windlass.server.serving.structured_output import (
    NO_TOOLS,
    StructuredOutput,
    ToolPlan,
    parse_structured_output,
    with_thinking_prefix,
)
from windlass.server.text.detokenizer import LineLimits
from windlass.server.text.reasoning import HARMONY
from windlass.server.text.service import Prompt

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
        requests.append(build_engine_request(job, prompt.token_ids, fitted, reuse=job.reuse))
    return requests
