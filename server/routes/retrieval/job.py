"""What a request that generates nothing has become once it is checked."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.engine.interface.model_info import ModelInfo
from windlass.server.errors import bad_request
from windlass.server.exchange.state import ServerState
from windlass.server.generation.context_rules import size_of, window_rule
from windlass.server.generation.request_rotation import rotation_of
from windlass.server.protocol.retrieval import PromptRequest
from windlass.server.routes.job import RequestJob, deadline_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingJob(RequestJob):
    """A request whose prompts are pooled. longest: tokens that one may have. truncate: to which they are cut."""

    body: PromptRequest
    longest: int
    truncate: int | None


def check_prompt_request(
    state: ServerState, body: PromptRequest, info: ModelInfo, *, request_id: str, caller: str, arrival: float
) -> PoolingJob:
    """What can be refused without tokenizing; raises ApiError or RequestError naming the field."""
    settings = state.settings
    rule = window_rule(body, settings)
    rotation = rotation_of(body.rope_scaling, body.rope_update, settings, info)
    longest, truncate = rotation.within(size_of(rule, info)).longest_prompt, body.truncate_prompt_tokens
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
        deadline=deadline_of(body, settings, arrival),
        rotation=rotation,
        rule=rule,
        longest=longest,
        truncate=longest if truncate == -1 else truncate,
        priority=state.callers.priority(caller, body.priority),
        adapter=state.adapters.find(body.model),
    )
