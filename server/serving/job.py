"""Checked requests for generation and for pooling: sampling parameters, context rules and engine requests."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request

from windlass.engine.interface.context import (
    DEFAULT_KEEP_TOKENS,
    MIN_PASSAGE_TOKENS,
    ContextRule,
    ContextSize,
    NonPrefixReuseParams,
)
from windlass.engine.interface.model_info import ModelInfo
from windlass.engine.interface.outputs import TokenLogprobs
from windlass.engine.interface.request import MAX_REPEAT_WINDOW, DryParams, EngineRequest, PoolingRule, SamplingParams
from windlass.server.app.adapter_registry import ServedAdapter
from windlass.server.app.state import ServerState, state_of
from windlass.server.config.settings import ContextOverflow, SamplingDefaults, ServerSettings
from windlass.server.errors import ApiError, bad_request, context_length_exceeded
from windlass.server.observability.logging import set_request_id
from windlass.server.schemas.base import EngineRequestFields
from windlass.server.schemas.generation import GenerationRequest
from windlass.server.schemas.pooling import PromptRequest
from windlass.server.serving.request_rotation import Rotation
from windlass.server.serving.structured_output import StructuredOutput
from windlass.server.text.detokenizer import LineLimits
from windlass.server.text.reasoning import ThinkingPhase
from windlass.server.text.stream_parser import ParsingPlan

DEFAULT_RECOMPUTE = 0.15  # fraction of a passage, at its head; from the table in docs/guides/endless-generation.md


def resolve_context_rule(body: GenerationRequest, overflow: ContextOverflow, settings: ServerSettings) -> ContextRule:
    """The rule of a request under `overflow`; raises ApiError for fields that exclude each other."""
    if body.keep_tokens is not None and overflow != "shift":
        raise bad_request("keep_tokens requires context_overflow shift", "keep_tokens")
    keep = settings.keep_tokens if body.keep_tokens is None else body.keep_tokens
    return replace(
        resolve_window_rule(body, settings),
        overflow="shift" if overflow == "shift" else "stop",
        keep_tokens=DEFAULT_KEEP_TOKENS if keep is None else keep,
    )


def resolve_window_rule(body: GenerationRequest | PromptRequest, settings: ServerSettings) -> ContextRule:
    """The attention window; raises ApiError for fields that exclude each other."""
    window, sinks = body.attention_window, body.attention_sinks
    if window is None:
        window = settings.attention_window
        sinks = settings.attention_sinks if sinks is None else sinks
    if sinks and window is None:
        raise bad_request("attention_sinks requires attention_window", "attention_sinks")
    return ContextRule(attention_window=window, attention_sinks=sinks or 0)


def resolve_cache_salt(
    body: GenerationRequest | PromptRequest, caller: str, state: ServerState, *, passages: bool = False
) -> str | None:
    """The salt of a request's cached blocks, or the one of its passages: the caller's key, if keys are required, and the
    `cache_salt` of the body.

    The owner is always part of it, however many keys there are: a key that is added later finds no block of earlier ones.
    `shared_prefix_cache` removes the owner, but not from passages without a `cache_salt`, which reveal what preceded them.
    """
    salt = None if body.cache_salt is None else f"salt {body.cache_salt}"
    settings = state.settings
    if not settings.requires_key or (settings.shared_prefix_cache and not (passages and salt is None)):
        return salt
    return " ".join(filter(None, (state.callers.cache_owner(caller), salt)))


def resolve_reuse(body: GenerationRequest, scope: str, settings: ServerSettings, *, chat: bool) -> NonPrefixReuseParams:
    """Non-prefix reuse of other prompts' KV; raises ApiError for invalid fields. scope: see `NonPrefixReuseParams`.

    Without reuse the request's own passages can still be reused by others.
    """
    at_least = settings.cache_reuse if body.cache_reuse is None else body.cache_reuse
    if 0 < at_least < MIN_PASSAGE_TOKENS:
        raise bad_request(
            f"cache_reuse must be 0 or at least {MIN_PASSAGE_TOKENS}: shorter passages are not reused, got {at_least}",
            "cache_reuse",
        )
    if body.cache_reuse_recompute is not None and not at_least and body.passages is None:
        raise bad_request("cache_reuse_recompute requires cache_reuse or passages", "cache_reuse_recompute")
    if body.passages is not None and body.cache_reuse == 0:
        raise bad_request(
            "cache_reuse 0 reuses nothing, passages name what to reuse: leave one of them out", "cache_reuse"
        )
    if body.passages is not None and chat:
        raise bad_request("passages requires a prompt: chats have cache_reuse", "passages")
    spans = tuple((span.start, span.end) for span in body.passages or ())
    recompute = DEFAULT_RECOMPUTE if body.cache_reuse_recompute is None else body.cache_reuse_recompute
    return NonPrefixReuseParams(at_least, spans, recompute, scope)


def retain_system_prompt(rule: ContextRule, head: Sequence[int], prompt: Sequence[int], info: ModelInfo) -> ContextRule:
    """The rule that retains a chat's system prompt, as far as a shift can: the tokens that `prompt` shares with `head`, the
    system prompt alone. Without shared tokens, the rule unchanged.
    """
    shared = next(
        (i for i, (a, b) in enumerate(zip(head, prompt, strict=False)) if a != b), min(len(head), len(prompt))
    )
    size = info.block_size
    most = info.shift_context // size * size - 2 * size
    return replace(rule, keep_tokens=max(0, min(shared, most))) if shared else rule


DEFAULT_BREAKERS = ("\n", ":", '"', "*")  # llama.cpp's
NEUTRAL = SamplingDefaults()
MIN_TEMPERATURE = 1e-6  # lower ones select the argmax anyway, and 1/temperature must stay finite


def resolve_max_tokens(body: GenerationRequest, default: int) -> int:
    """`max_tokens`, `max_completion_tokens` or the default; raises ApiError if the two differ."""
    first, second = body.max_tokens, body.max_completion_tokens
    if first is not None and second is not None and first != second:
        raise bad_request(
            f"max_tokens is {first} and max_completion_tokens is {second}: give one of them", "max_completion_tokens"
        )
    given = first if first is not None else second
    return default if given is None else given


def samples_per_prompt(body: GenerationRequest) -> tuple[int, int]:
    """(n, best_of); raises ApiError if best_of is below n or cannot be streamed."""
    n = 1 if body.n is None else body.n
    best_of = n if body.best_of is None else body.best_of
    if best_of < n:
        raise bad_request(f"best_of ({best_of}) must not be below n ({n})", "best_of")
    if best_of > n and body.stream:
        raise bad_request("best_of above n cannot be streamed: the best answer is known only at the end", "best_of")
    return n, best_of


def build_sampling(
    body: GenerationRequest,
    info: ModelInfo,
    *,
    max_tokens: int,
    samples: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    defaults: SamplingDefaults = NEUTRAL,
) -> SamplingParams:
    """Parameters of all prompts of a request, without those that need tokenizing; raises ApiError naming the field.

    samples: outputs per prompt. max_tokens: as requested, see `fit_to_context`. defaults: for fields that are not set.
    """
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise bad_request(f"min_tokens ({min_tokens}) must not be above max_tokens ({max_tokens})", "min_tokens")
    logit_bias = body.logit_bias or None
    check_ids(logit_bias or (), info.vocab_size, "logit_bias")
    check_ids(body.stop_token_ids or (), info.vocab_size, "stop_token_ids")
    check_ids(body.allowed_token_ids or (), info.vocab_size, "allowed_token_ids")
    temperature = defaults.temperature if body.temperature is None else body.temperature
    top_k = defaults.top_k if body.top_k is None else body.top_k
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if temperature < MIN_TEMPERATURE else temperature,
        top_k=0 if top_k <= 0 or top_k >= info.vocab_size else top_k,
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        min_p=defaults.min_p if body.min_p is None else body.min_p,
        typical_p=defaults.typical_p if body.typical_p is None else body.typical_p,
        xtc_probability=body.xtc_probability or 0.0,
        xtc_threshold=0.1 if body.xtc_threshold is None else body.xtc_threshold,
        repetition_penalty=defaults.repetition_penalty if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repeats=_repeats(body),
        logit_bias=logit_bias,
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(sorted(set(body.allowed_token_ids))),
        seed=body.seed,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        min_tokens=min_tokens,
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        n=samples,
    )


def _repeats(body: GenerationRequest) -> DryParams | None:
    """The penalty on repeats without the tokens of its breakers; None if it is off."""
    given = body.dry_penalty_last_n
    last_n = MAX_REPEAT_WINDOW if given is None or given < 0 else given
    if not body.dry_multiplier or not last_n:
        return None
    return DryParams(
        multiplier=body.dry_multiplier,
        base=1.75 if body.dry_base is None else body.dry_base,
        allowed_length=2 if body.dry_allowed_length is None else body.dry_allowed_length,
        last_n=last_n,
    )


def sequence_breakers(body: GenerationRequest) -> list[str]:
    """Texts that end a repeated sequence."""
    return list(DEFAULT_BREAKERS if body.dry_sequence_breakers is None else body.dry_sequence_breakers)


def fit_to_context(max_tokens: int, prompt_tokens: int, size: ContextSize, *, param: str) -> int:
    """`max_tokens` clamped to the rest of the context; raises ApiError if the prompt leaves nothing.

    With max_tokens 0 (scoring) the prompt may fill the whole context.
    """
    left = size.longest_prompt - prompt_tokens
    if left < 0 or (left == 0 and max_tokens > 0):
        raise context_length_exceeded(size.longest_prompt, prompt_tokens, param=param)
    return min(max_tokens, size.longest - prompt_tokens)


def check_ids(ids: Collection[int], vocab_size: int, param: str) -> None:
    """Raise ApiError for an id outside the vocabulary."""
    for token_id in (min(ids), max(ids)) if ids else ():
        if not 0 <= token_id < vocab_size:
            raise bad_request(
                f"{param}: token id {token_id} is outside the vocabulary, ids run from 0 to {vocab_size - 1}", param
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestJob:
    """A checked request that waits for its prompts. caller: for turns and limits. arrival: monotonic seconds."""

    state: ServerState
    body: GenerationRequest | PromptRequest
    info: ModelInfo
    request_id: str
    caller: str
    arrival: float
    rotation: Rotation
    rule: ContextRule
    priority: int = 0
    adapter: ServedAdapter | None = None

    @property
    def deadline(self) -> float | None:
        """Arrival plus the timeout of the request or the server's default, in monotonic seconds."""
        seconds = self.state.settings.default_timeout if self.body.timeout is None else self.body.timeout
        return None if seconds is None else self.arrival + seconds

    @property
    def model_name(self) -> str:
        """The model named in the response."""
        return self.state.settings.served_model_name if self.adapter is None else self.adapter.source.name


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationJob(RequestJob):
    """A checked request that generates.

    sampling: for all prompts; max_tokens is clamped per prompt. has_limit: whether it comes from the request or the operator.
    logprobs: alternatives per generated token that the response
    shows, None for no log-probabilities. size: what the context holds under `rule`.
    parsing: parser of the output, None if all text is content. structured: required form of the output. phase: where the output
    begins in the model's thinking. tools: for the chat template. dropped_turns: turns left out of the chat, None if none may be.
    """

    body: GenerationRequest
    sampling: SamplingParams
    has_limit: bool
    logprobs: int | None
    overflow: ContextOverflow
    reuse: NonPrefixReuseParams
    size: ContextSize
    parsing: ParsingPlan | None
    structured: StructuredOutput | None
    phase: ThinkingPhase = "after"
    line_limits: LineLimits | None = None
    tools: list[dict[str, Any]] | None = None
    dropped_turns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingJob(RequestJob):
    """A request whose prompts are pooled. longest: tokens allowed in a prompt. truncate: tokens to which prompts are cut."""

    body: PromptRequest
    longest: int
    truncate: int | None


@contextmanager
def scaling_hint(job: RequestJob) -> Iterator[None]:
    """Scope in which errors about the prompt's length explain that a scaling does not enlarge the context."""
    try:
        yield
    except ApiError as error:
        rotation = job.rotation
        scaled = rotation.scaling is not None and rotation.scaling.rope_type != "default"
        if error.code != "context_length_exceeded" or not scaled or rotation.longest is not None:
            raise
        error.message += " (a scaling does not enlarge the context: the server's --max-model-len does)"
        raise


def admit_request(request: Request, body: EngineRequestFields) -> ModelInfo:
    """Check the model of a request and admit it, under the id that its body may set; raises ApiError."""
    if body.request_id is not None:
        set_request_id(request.scope, body.request_id)
    state = state_of(request)
    state.check_model(body.model)
    return state.admit()


def build_engine_request(
    job: RequestJob,
    token_ids: list[int],
    sampling: SamplingParams,
    *,
    reuse: NonPrefixReuseParams | None = None,
    pooling: PoolingRule | None = None,
    reports_progress: bool = False,
) -> EngineRequest:
    """The engine request of one prompt."""
    return EngineRequest(
        request_id=job.state.unique_id(job.request_id),
        prompt_token_ids=token_ids,
        sampling=sampling,
        rope_scaling=job.rotation.scaling,
        rope_update=job.rotation.update,
        rope_exact=job.rotation.exact,
        cache_salt=resolve_cache_salt(job.body, job.caller, job.state),
        context=job.rule,
        reuse=reuse,
        priority=job.priority,
        caller=job.caller,
        share=job.state.callers.key_of(job.caller).share,
        deadline=job.deadline,
        adapter=None if job.adapter is None else job.adapter.source.adapter_id,
        pooling=pooling,
        reports_progress=reports_progress,
    )


def envelope(prefix: str, kind: str, job: RequestJob) -> dict[str, Any]:
    """First fields of a response. prefix: of its id, such as "cmpl"."""
    return {
        "id": f"{prefix}-{job.request_id}",
        "object": kind,
        "created": int(time.time()),
        "model": job.model_name,
    }


@dataclass(slots=True)
class Delta:
    """What one engine output adds to one choice (choice = prompt index * samples + sample).

    prompt_logprobs: once per prompt, on its first delta. finish_reason: on the last delta of a choice, which also has
    `rotary`, the response's object of this name. pieces: the text by token, if there are several. scheduled_at: see
    `RequestOutput`. prompt_progress: how much of the prompt is computed; such a delta has nothing else.
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
    prompt_progress: dict[str, int] | None = None


@dataclass(slots=True)
class TokenUsage:
    """Token counts of a request while it runs. reasoning_tokens: None if thinking is not separated."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int | None = None
