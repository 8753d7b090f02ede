"""Checked requests for generation and for pooling, and their engine requests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from windlass.engine.interface.context import ContextRule, ContextSize, NonPrefixReuseParams
from windlass.engine.interface.model_info import ModelInfo
from windlass.engine.interface.request import EngineRequest, PoolingRule, SamplingParams
from windlass.server.app.adapter_registry import ServedAdapter
from windlass.server.app.state import ServerState, state_of
from windlass.server.config.settings import ContextOverflow
from windlass.server.errors import ApiError
from windlass.server.observability.logging import set_request_id
from windlass.server.schemas.base import EngineRequestFields
from windlass.server.schemas.generation import GenerationRequest
from windlass.server.schemas.pooling import PromptRequest
from windlass.server.serving.context_rules import resolve_cache_salt
from windlass.server.serving.request_rotation import Rotation
from windlass.server.serving.structured_output import StructuredOutput
from windlass.server.text.detokenizer import LineLimits
from windlass.server.text.reasoning import ThinkingPhase
from windlass.server.text.stream_parser import ParsingPlan


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
