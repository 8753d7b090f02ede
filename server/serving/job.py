"""Checked requests, for generation and for pooling, and the texts of their errors."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from windlass.engine.interface.context import ContextRule, ContextSize, NonPrefixReuseParams
from windlass.engine.interface.model_info import ModelInfo
from windlass.engine.interface.request import EngineRequest, PoolingRule, SamplingParams
from windlass.server.app.adapter_registry import ServedAdapter
from windlass.server.app.state import ServerState
from windlass.server.config.settings import ContextOverflow, ServerSettings
from windlass.server.errors import ApiError, bad_request
from windlass.server.schemas.generation import GenerationRequest
from windlass.server.schemas.pooling import PromptRequest
from windlass.server.serving.context_rules import resolve_context_size, resolve_window_rule
from windlass.server.serving.request_rotation import Rotation, resolve_rotation
from windlass.server.serving.response_writer import ResponseOptions
from windlass.server.serving.structured_output import StructuredOutput
from windlass.server.text.detokenizer import LineLimits
from windlass.server.text.reasoning import ThinkingPhase
from windlass.server.text.stream_parser import ParsingPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestJob:
    """A checked request that waits for its prompts, whether it generates or not. rule: what a token sees and what goes."""

    state: ServerState
    body: GenerationRequest | PromptRequest
    info: ModelInfo
    request_id: str
    caller: str  # whose request it is, for taking turns
    arrival: float  # time.monotonic() seconds
    deadline: float | None
    rotation: Rotation
    rule: ContextRule
    priority: int = 0
    adapter: ServedAdapter | None = None

    @property
    def model_name(self) -> str:
        """What the answer says that it comes from."""
        return self.state.settings.served_model_name if self.adapter is None else self.adapter.source.name


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationJob(RequestJob):
    """A request that generates. Made by `pipeline.check`, run by `pipeline.run`.

    sampling: what all prompts share; max_tokens is clamped per prompt.
    overflow: what is done where prompt and answer are longer than the context; size, reuse: what the rule comes to, and what is
    taken of other prompts.
    parsing: how answers are taken apart; None where all text is content.
    structured: the form that answers have to have, None for any. place: where they begin, seen from the thinking.
    """

    body: GenerationRequest
    sampling: SamplingParams
    options: ResponseOptions
    chat: bool
    echo: bool
    overflow: ContextOverflow
    reuse: NonPrefixReuseParams
    size: ContextSize
    parsing: ParsingPlan | None
    structured: StructuredOutput | None
    phase: ThinkingPhase = "after"
    line_limits: LineLimits | None = None


@contextmanager
def scaling_hint(job: RequestJob) -> Iterator[None]:
    """Errors about a prompt's length say what makes room, where the request has a scaling and may think that it does."""
    try:
        yield
    except ApiError as error:
        rotation = job.rotation
        scaled = rotation.scaling is not None and rotation.scaling.rope_type != "default"
        if error.code != "context_length_exceeded" or not scaled or rotation.longest is not None:
            raise
        why = "a scaling alone makes no room: the server's --max-model-len does"
        raise bad_request(f"{error.message} ({why})", error.param, error.code) from None


def resolve_deadline(body: GenerationRequest | PromptRequest, settings: ServerSettings, arrival: float) -> float | None:
    """When a request that came at `arrival` has to be done, as it says or else the operator; both `time.monotonic()` seconds."""
    seconds = settings.default_timeout if body.timeout is None else body.timeout
    return None if seconds is None else arrival + seconds


def build_engine_request(
    job: RequestJob,
    token_ids: list[int],
    sampling: SamplingParams,
    *,
    reuse: NonPrefixReuseParams | None = None,
    pooling: PoolingRule | None = None,
) -> EngineRequest:
    """One prompt of a job, as the engine takes it."""
    return EngineRequest(
        request_id=job.state.unique_id(job.request_id),
        prompt_token_ids=token_ids,
        sampling=sampling,
        rope_scaling=job.rotation.scaling,
        rope_update=job.rotation.update,
        rope_exact=job.rotation.exact,
        cache_salt=job.body.cache_salt,
        context=job.rule,
        reuse=reuse,
        priority=job.priority,
        caller=job.caller,
        share=job.state.callers.key_of(job.caller).share,
        deadline=job.deadline,
        adapter=None if job.adapter is None else job.adapter.source.adapter_id,
        pooling=pooling,
    )


def envelope(prefix: str, kind: str, job: RequestJob) -> dict[str, Any]:
    """The fields an answer begins with. prefix: of its id, such as "cmpl"."""
    return {
        "id": f"{prefix}-{job.request_id}",
        "object": kind,
        "created": int(time.time()),
        "model": job.model_name,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingJob(RequestJob):
    """A request whose prompts are pooled. longest: tokens that one may have. truncate: to which they are cut."""

    body: PromptRequest
    longest: int
    truncate: int | None


def check_pooling_request(
    state: ServerState, body: PromptRequest, info: ModelInfo, *, request_id: str, caller: str, arrival: float
) -> PoolingJob:
    """What can be refused without tokenizing; raises ApiError or RequestError naming the field."""
    settings = state.settings
    rule = resolve_window_rule(body, settings)
    rotation = resolve_rotation(body.rope_scaling, body.rope_update, settings, info)
    longest, truncate = (
        rotation.limit_context(resolve_context_size(rule, info)).longest_prompt,
        body.truncate_prompt_tokens,
    )
    if truncate == 0 or (truncate is not None and truncate > longest):
        raise bad_request(
            f"truncate_prompt_tokens must lie between 1 and the context of {longest} tokens, or be -1 for that; got {truncate}",
            "truncate_prompt_tokens",
        )
    return PoolingJob(
        state=state,
        body=body,
        info=info,
        request_id=request_id,
        caller=caller,
        arrival=arrival,
        deadline=resolve_deadline(body, settings, arrival),
        rotation=rotation,
        rule=rule,
        longest=longest,
        truncate=longest if truncate == -1 else truncate,
        priority=state.callers.priority(caller, body.priority),
        adapter=state.adapters.find(body.model),
    )
