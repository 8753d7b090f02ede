"""Chats: from their messages to a generation job and its prompt."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any, TypeVar

from starlette.requests import Request

from windlass.server.app.request_body import report_ignored
from windlass.server.app.state import ServerState, report_template_changes, state_of
from windlass.server.errors import ApiError, after_dropping_turns, bad_request
from windlass.server.schemas.chat import ChatMessage, ChatRequest
from windlass.server.serving.context_rules import retain_system_prompt
from windlass.server.serving.generation import check_generation
from windlass.server.serving.job import GenerationJob, admit_request, scaling_hint
from windlass.server.serving.prompts import check_tokenized_characters
from windlass.server.serving.structured_output import parse_structured_output
from windlass.server.serving.tool_calls import plan_tools, tools_for_template
from windlass.server.text.chat_messages import check_history
from windlass.server.text.service import ChatOptions, Prompt

T = TypeVar("T")
_SYSTEM_ROLES = frozenset({"system", "developer"})


def droppable_turns(messages: Sequence[ChatMessage]) -> list[list[int]]:
    """The turns that may be dropped, oldest first, each as indices of its messages.

    A turn is a user message and the messages after it up to the next one, so calls and their results stay together. Messages
    before the first user message form a turn, too. System messages and the last turn are never dropped.
    """
    turns: list[list[int]] = []
    current: list[int] = []
    user_seen = False
    for index, message in enumerate(messages):
        if message.role in _SYSTEM_ROLES:
            continue
        if message.role == "user":
            if current:
                turns.append(current)
            current, user_seen = [], True
        current.append(index)
    return turns if user_seen else []


def without_turns(messages: Sequence[ChatMessage], turns: Sequence[Sequence[int]]) -> list[ChatMessage]:
    """The messages that are in none of `turns`, in their order."""
    excluded = {index for turn in turns for index in turn}
    return [message for index, message in enumerate(messages) if index not in excluded]


async def fit_turns(
    messages: Sequence[ChatMessage],
    encode: Callable[[list[ChatMessage]], Awaitable[tuple[T, int]]],
    *,
    context: int,
    reserved_tokens: int,
) -> tuple[T, int]:
    """(the encoded chat, number of turns dropped): as few as leave `reserved_tokens` tokens of `context` to the response.

    encode: returns the encoded messages and their number of tokens, or raises ApiError context_length_exceeded. It is called
    once if nothing must be dropped, else at most 2 + log2(turns) times. If even the shortest chat leaves less than
    `reserved_tokens`, the response gets the rest. Raises what `encode` raises for the shortest chat.
    """
    turns = droppable_turns(messages)

    async def attempt(dropped: int) -> tuple[T, int] | None:
        try:
            return await encode(without_turns(messages, turns[:dropped]))
        except ApiError as error:
            if error.code != "context_length_exceeded":
                raise
            if dropped == len(turns):
                raise (after_dropping_turns(error) if turns else error) from None
            return None

    found = await attempt(0)
    if found is not None and (not turns or found[1] + reserved_tokens <= context):
        return found[0], 0
    fewest, most = 0, len(turns)  # too few dropped, enough dropped
    best = await attempt(most)
    assert best is not None
    reserved_tokens = min(reserved_tokens, context - best[1])
    while most - fewest > 1:
        middle = (fewest + most) // 2
        found = await attempt(middle)
        if found is not None and found[1] + reserved_tokens <= context:
            best, most = found, middle
        else:
            fewest = middle
    return best[0], most


async def check_chat(
    request: Request, body: ChatRequest, *, arrival: float, effort_field: str = "reasoning_effort"
) -> GenerationJob:
    """Check everything that does not need tokenizing; raises ApiError or RequestError naming the field.

    effort_field: name of `reasoning_effort` in the API of the request.
    """
    info, state = admit_request(request, body), state_of(request)
    if body.reasoning_effort is not None and state.thinking.ignores_effort(body.reasoning_effort):
        report_ignored(request, effort_field)
    has_tools = body.tools or body.functions  # which may be large
    capabilities = await state.text.template_capabilities(tools=True) if has_tools else None
    plan = partial(
        plan_tools,
        body,
        state.tokenizer,
        state.settings.tool_call_parser,
        single_call=capabilities is not None and capabilities.single_call,
        has_output_format=parse_structured_output(body) is not None,
    )
    return check_generation(
        request,
        body,
        info,
        arrival=arrival,
        default_max_tokens=state.settings.default_max_tokens,
        logprobs=_logprobs(body),
        tools=await state.text.run_in_thread(plan) if has_tools else plan(),
    )


def _logprobs(body: ChatRequest) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise bad_request("top_logprobs requires logprobs: true", "top_logprobs")
    return None


async def prepare_chat(job: GenerationJob) -> tuple[list[Prompt], GenerationJob]:
    """The only prompt of a chat, and the job changed for it: the prompt may end inside the model's thinking."""
    body, thinking = _chat_body(job), job.state.thinking
    if job.overflow == "drop_turns":
        capabilities = await job.state.text.template_capabilities(tools=bool(job.tools))
        await job.state.text.run_in_thread(check_history, body.messages, capabilities)  # with the turns to be dropped

        async def encode(messages: list[ChatMessage]) -> tuple[Prompt, int]:
            prompt = await _encode_chat(job, messages)
            return prompt, len(prompt.token_ids)

        reserved = _response_tokens(job)
        prompt, dropped = await fit_turns(
            body.messages, encode, context=job.size.longest_prompt, reserved_tokens=reserved
        )
        job = replace(job, dropped_turns=dropped)
    else:
        prompt = await _encode_chat(job, body.messages)
    if job.overflow == "shift" and body.keep_tokens is None and job.state.settings.keep_tokens is None:
        job = await _retain_system_prompt(job, prompt.token_ids)
    final = (body.messages[-1].content or "") if body.continue_final_message else None
    phase = thinking.phase(prompt.text or "", final)
    sampling = replace(job.sampling, thinking=thinking.budget(body.thinking_budget, phase, job.parsing))
    return [prompt], replace(job, sampling=sampling, phase=phase, parsing=thinking.parsing(job.parsing, phase))


async def count_chat(state: ServerState, body: ChatRequest, caller: str) -> int:
    """Tokens of a chat's prompt, of any context length; raises ApiError if it cannot be made."""
    check_tokenized_characters(state, sum(len(message.content or "") for message in body.messages), "messages")
    options = _chat_options(state, body, tools_for_template(body.tools))
    special = bool(body.add_special_tokens)
    prompt = await state.text.encode_chat(
        body.messages, add_special_tokens=special, max_model_len=None, caller=caller, **options
    )
    return len(prompt.token_ids)


def _chat_options(state: ServerState, body: ChatRequest, tools: list[dict[str, Any]] | None) -> ChatOptions:
    effort = body.reasoning_effort
    if effort is not None and state.thinking.nearest_effort(effort) != effort:
        report_template_changes(["effort-changed"])
    return {
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
        "variables": state.thinking.variables(effort, body.chat_template_kwargs),
        "tools": tools,
    }


def _chat_body(job: GenerationJob) -> ChatRequest:
    assert isinstance(job.body, ChatRequest)
    return job.body


async def _encode_chat(job: GenerationJob, messages: Sequence[ChatMessage]) -> Prompt:
    """The prompt; raises ApiError if it cannot be made or is longer than the context."""
    body = _chat_body(job)
    with scaling_hint(job):
        return await job.state.text.encode_chat(
            messages,
            add_special_tokens=bool(body.add_special_tokens),  # templates contain the special tokens
            max_model_len=job.size.longest_prompt,
            truncate=body.truncate_prompt_tokens,
            keep_first=body.truncation_side == "right",
            caller=job.caller,
            **_chat_options(job.state, body, job.tools),
        )


async def _retain_system_prompt(job: GenerationJob, prompt: Sequence[int]) -> GenerationJob:
    """The job with a rule under which a leading system prompt is never dropped."""
    messages = _chat_body(job).messages
    system = list(takewhile(lambda message: message.role in _SYSTEM_ROLES, messages))
    if not system or len(system) == len(messages):
        return job
    head = await _encode_chat(job, system)
    rule = retain_system_prompt(job.rule, head.token_ids, prompt, job.info)
    return replace(job, rule=rule, size=job.rotation.limit_context(job.info.size(rule)))


def _response_tokens(job: GenerationJob) -> int:
    """Tokens that dropped turns leave to the response: the requested ones, else up to a quarter of the context."""
    body, most = job.body, job.sampling.max_tokens
    if body.max_tokens is None and body.max_completion_tokens is None:
        return min(most, max(1, job.size.longest_prompt // 4))
    return most
