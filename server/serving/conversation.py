"""From the messages of a chat to its prompt and its generation job."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any, Generic, TypeVar

from starlette.requests import Request

from windlass.server.app.state import ServerState, caller_of
from windlass.server.errors import ApiError, after_dropping_turns, bad_request
from windlass.server.http.request_id import request_id
from windlass.server.schemas.chat import ChatMessage, ChatRequest
from windlass.server.serving.context_rules import resolve_context_size, retain_system_prompt
from windlass.server.serving.generation import check_generation
from windlass.server.serving.job import GenerationJob, admit_request, scaling_hint
from windlass.server.serving.structured_output import StructuredOutput, parse_structured_output
from windlass.server.serving.tool_calls import plan_tools, tools_for_template
from windlass.server.text.chat_messages import check_history
from windlass.server.text.reasoning import HARMONY
from windlass.server.text.service import Prompt

T = TypeVar("T")

_SYSTEM_ROLES = frozenset({"system", "developer"})

_CONTEXT_EXCEEDED = "context_length_exceeded"


@dataclass(frozen=True, slots=True)
class FittedChat(Generic[T]):
    """A chat that fits. made: what came of its messages; dropped: how many turns it lacks."""

    made: T
    dropped: int


def droppable_turns(messages: Sequence[ChatMessage]) -> list[list[int]]:
    """The turns that may be dropped, oldest first, each as the indices of its messages.

    A turn is a message of the user and all behind it up to the next: calls and their results go together. What stands before
    the first of them is a turn, too. System messages belong to none, and the last turn of the user is never among them.
    """
    turns: list[list[int]] = []
    current: list[int] = []
    user_seen = False  # by the user
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
    make: Callable[[list[ChatMessage]], Awaitable[tuple[T, int]]],
    *,
    context: int,
    reserved_tokens: int,
) -> FittedChat[T]:
    """The chat with as few turns dropped as leave `reserved_tokens` tokens of `context` to the answer.

    make: what comes of messages, and its tokens; it may raise ApiError context_length_exceeded. It is called once where nothing
    has to go, else at most 2 + log2(turns) times. Where even the shortest chat leaves less than `reserved_tokens`, the response
    gets what is left. Raises what `make` raises for the shortest chat.
    """
    turns = droppable_turns(messages)

    async def attempt(dropped: int) -> tuple[T, int] | None:
        try:
            return await make(without_turns(messages, turns[:dropped]))
        except ApiError as error:
            if error.code != _CONTEXT_EXCEEDED:
                raise
            if dropped == len(turns):
                raise (after_dropping_turns(error) if turns else error) from None
            return None

    found = await attempt(0)
    if found is not None and (not turns or found[1] + reserved_tokens <= context):
        return FittedChat(found[0], 0)
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
    return FittedChat(best[0], most)


@dataclass(frozen=True, slots=True)
class CheckedChat:
    """A checked chat that waits for its prompt. tools: for the template."""

    job: GenerationJob
    body: ChatRequest
    tools: list[dict[str, Any]] | None


async def check_chat(state: ServerState, request: Request, body: ChatRequest, *, arrival: float) -> CheckedChat:
    """Everything that can be refused without tokenizing; raises ApiError or RequestError naming the field."""
    info = admit_request(request, body)
    planned = body, state.tokenizer, state.settings.tool_call_parser
    offered = body.tools or body.functions  # which may be large
    plan = partial(plan_tools, has_output_format=parse_structured_output(body) is not None)
    use = await state.text.run_in_thread(plan, *planned) if offered else plan(*planned)
    job = check_generation(
        state,
        body,
        info,
        request_id=request_id(request.scope),
        caller=caller_of(request),
        arrival=arrival,
        default_max_tokens=state.settings.default_max_tokens,
        logprobs=_logprobs(body),
        chat=True,
        parsing=use.parsing,
        forced=None if use.grammar is None else StructuredOutput("lark", use.grammar, use.field),
        calls="" if state.thinking.name == HARMONY else use.calls,  # whose calls stand in channels of their own
    )
    return CheckedChat(job, body, use.tools)


def _logprobs(body: ChatRequest) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise bad_request("top_logprobs goes with logprobs: true", "top_logprobs")
    return None


async def prepare_chat(chat: CheckedChat) -> tuple[list[Prompt], GenerationJob]:
    """The prompt, and the job as the rendered prompt has it: it may end inside the thinking."""
    job, body, tools = chat.job, chat.body, chat.tools
    thinking = job.state.thinking
    if job.overflow == "drop_turns":
        capabilities = job.state.text.template_capabilities_for(tools)
        await job.state.text.run_in_thread(check_history, body.messages, capabilities)  # also those of turns that go
        fitted = await fit_turns(
            body.messages,
            lambda messages: _render_counted(job, body, tools, messages),
            context=job.size.longest_prompt,
            reserved_tokens=_answer_tokens(job, body),
        )
        text, prompts = fitted.made
        job = replace(job, options=replace(job.options, dropped_turns=fitted.dropped))
    else:
        text, prompts = await _render(job, body, tools, body.messages)
    if job.overflow == "shift" and body.keep_tokens is None and job.state.settings.keep_tokens is None:
        job = await _retain_system_prompt(job, body, tools, prompts[0].token_ids)
    phase = thinking.phase(text, (body.messages[-1].content or "") if body.continue_final_message else None)
    sampling = replace(job.sampling, thinking=thinking.budget(body.thinking_budget, phase))
    return prompts, replace(job, sampling=sampling, phase=phase, parsing=thinking.parsing(job.parsing, phase))


async def _retain_system_prompt(
    job: GenerationJob, body: ChatRequest, tools: list[dict[str, Any]] | None, prompt: Sequence[int]
) -> GenerationJob:
    """The job under whose rule the system prompt is never dropped, where the chat begins with one."""
    system = list(takewhile(lambda message: message.role in ("system", "developer"), body.messages))
    if not system or len(system) == len(body.messages):
        return job
    _, heads = await _render(job, body, tools, system)
    rule = retain_system_prompt(job.rule, heads[0].token_ids, prompt, job.info)
    return replace(job, rule=rule, size=job.rotation.limit_context(resolve_context_size(rule, job.info)))


def _answer_tokens(job: GenerationJob, body: ChatRequest) -> int:
    """Tokens that dropped turns shall leave to the answer: those it asks for, else up to a quarter of the context."""
    if body.max_tokens is None and body.max_completion_tokens is None:
        return min(job.sampling.max_tokens, max(1, job.size.longest_prompt // 4))
    return job.sampling.max_tokens


async def _render_counted(
    job: GenerationJob, body: ChatRequest, tools: list[dict[str, Any]] | None, messages: Sequence[ChatMessage]
) -> tuple[tuple[str, list[Prompt]], int]:
    made = await _render(job, body, tools, messages)
    return made, len(made[1][0].token_ids)


async def _render(
    job: GenerationJob, body: ChatRequest, tools: list[dict[str, Any]] | None, messages: Sequence[ChatMessage]
) -> tuple[str, list[Prompt]]:
    """The chat as text and as a prompt; raises ApiError where it cannot be made or is longer than the context."""
    service, thinking = job.state.text, job.state.thinking
    truncate = body.truncate_prompt_tokens
    with scaling_hint(job):
        text = await service.render(
            messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            variables=thinking.variables(body.reasoning_effort, body.chat_template_kwargs),
            tools=tools,
            max_model_len=job.size.longest_prompt,
            truncated=truncate is not None,
            caller=job.caller,
        )
        prompts = await service.encode(
            [text],
            add_special_tokens=bool(body.add_special_tokens),  # templates write the special tokens themselves
            max_model_len=job.size.longest_prompt,
            truncate=truncate,
            keep_first=body.truncation_side == "right",
            param="messages",
            caller=job.caller,
        )
    return text, prompts


async def count_chat(state: ServerState, body: ChatRequest, caller: str) -> int:
    """Tokens of a chat's prompt, whatever the context holds; raises ApiError where it cannot be made."""
    characters = sum(len(message.content or "") for message in body.messages)
    if characters > state.settings.max_tokenize_chars:
        raise bad_request(
            f"messages hold {characters} characters, at most {state.settings.max_tokenize_chars} are tokenized at once",
            "messages",
            "string_too_long",
        )
    text = await state.text.render(
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        variables=state.thinking.variables(body.reasoning_effort, body.chat_template_kwargs),
        tools=tools_for_template(body.tools),
        caller=caller,
    )
    (prompt,) = await state.text.encode(
        [text],
        add_special_tokens=bool(body.add_special_tokens),
        max_model_len=2**31,
        truncate=None,
        param="messages",
        caller=caller,
    )
    return len(prompt.token_ids)
