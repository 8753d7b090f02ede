"""Prompts of requests: of completions (texts, token ids, and prompts with a gap to fill) and of chats."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any, TypeVar

from starlette.requests import Request

from windlass.server.app.request_body import report_ignored
from windlass.server.app.state import ServerState, report_template_changes, state_of
from windlass.server.errors import ApiError, after_dropping_turns, bad_request, context_length_exceeded
from windlass.server.schemas.chat import ChatMessage, ChatRequest
from windlass.server.schemas.completions import CompletionRequest, FilePassage, InfillRequest
from windlass.server.serving.generation import check_generation
from windlass.server.serving.job import GenerationJob, admit_request, retain_system_prompt, scaling_hint
from windlass.server.serving.structured_output import parse_structured_output, plan_tools, tools_for_template
from windlass.server.text.chat_messages import check_history
from windlass.server.text.service import ChatOptions, Prompt
from windlass.server.text.tokenizer import FimTokens

MAX_SUFFIX_TOKENS = 1 << 20  # tokens in all copies of a suffix
_IDS_PER_BATCH = 100_000  # checked while the interpreter lock is held


def split_prompts(value: Any, *, max_prompts: int) -> list[str] | list[list[int]]:
    """A list of texts or a list of token-id lists; raises ApiError for mixed shapes, empty and too long lists."""
    if isinstance(value, str):
        return [value]
    kind = type(value[0])
    if kind is int:
        return [value]
    if len(value) > max_prompts:
        raise bad_request(
            f"prompt holds {len(value)} prompts, at most {max_prompts} are allowed in a request", "prompt"
        )
    for index, item in enumerate(value):
        if type(item) is not kind:
            raise bad_request(
                f"prompt mixes kinds: item {index} is not a {'string' if kind is str else 'list of token ids'}",
                "prompt",
            )
        if kind is list and not item:
            raise bad_request(f"prompt[{index}] is empty: give at least one token", "prompt", "empty_prompt")
    return value  # type: ignore[no-any-return]


def check_token_prompts(
    prompts: list[list[int]],
    vocab_size: int,
    longest: int,
    *,
    truncate: int | None,
    keep_first: bool = False,
    param: str = "prompt",
    numbered: bool = False,
) -> list[list[int]]:
    """The prompts, cut to their last `truncate` ids, or with `keep_first` to the first. longest: ids allowed in a prompt.

    param: the field of the prompts. numbered: errors name the index of a prompt after it.
    Raises ApiError for prompts that are too long or have invalid ids. Lengths are checked first, because that costs nothing.
    """
    if truncate is None:
        for index, ids in enumerate(prompts):
            if len(ids) > longest:
                raise context_length_exceeded(longest, len(ids), param=f"{param}[{index}]" if numbered else param)
    checked = []
    for index, ids in enumerate(prompts):
        check_token_ids(ids, vocab_size, f"{param}[{index}]" if numbered else param)
        checked.append(ids if truncate is None else ids[:truncate] if keep_first else ids[-truncate:])
    return checked


def check_token_ids(ids: list[Any], vocab_size: int, param: str) -> None:
    """Raise ApiError unless all are integers inside the vocabulary. Call it on a thread for millions of ids."""
    for start in range(0, len(ids), _IDS_PER_BATCH):
        some = ids[start : start + _IDS_PER_BATCH]
        if set(map(type, some)) != {int}:
            raise bad_request(f"{param}: token ids must be integers", param)
        if min(some) < 0 or max(some) >= vocab_size:
            wrong = min(some) if min(some) < 0 else max(some)
            shown = str(wrong) if abs(wrong) < 2**63 else "of more than 64 bits"
            raise bad_request(
                f"{param}: token id {shown} is outside the vocabulary, ids run from 0 to {vocab_size - 1}", param
            )


def check_tokenized_characters(state: ServerState, characters: int, param: str) -> None:
    """Raise ApiError for more text than a request may have tokenized regardless of the context."""
    most = state.settings.max_tokenize_chars
    if characters > most:
        raise bad_request(
            f"{param}: {characters} characters, at most {most} are allowed: send a shorter text",
            param,
            "string_too_long",
        )


def require_fill_in(job: GenerationJob, param: str) -> FimTokens:
    """The model's fill-in-the-middle tokens; raises ApiError naming `param` if it has none."""
    if job.state.text.fill_in is None:
        raise bad_request(
            "this model's tokenizer has no known tokens for fill-in-the-middle: request a completion of the text before the gap, "
            "or serve a model that was trained to fill gaps, such as Qwen2.5-Coder",
            param,
            "no_fill_in_the_middle",
        )
    return job.state.text.fill_in


def check_suffix(job: GenerationJob, body: CompletionRequest) -> None:
    """Raise ApiError if this model cannot fill gaps, or a field of the body excludes it."""
    require_fill_in(job, "suffix")
    if body.truncate_prompt_tokens is not None:
        raise bad_request(
            "truncate_prompt_tokens does not define which side of a gap to cut: cut prompt and suffix before sending them",
            "truncate_prompt_tokens",
        )


async def fill_in_prompts(job: GenerationJob, body: CompletionRequest) -> list[Prompt]:
    """Prompts for the text between each given prompt and `suffix`."""
    text, most = job.state.text, job.size.longest_prompt
    fill_in = require_fill_in(job, "suffix")
    assert body.suffix
    given = split_prompts(body.prompt, max_prompts=job.state.settings.max_prompts)
    after = await _encode_part(job, body.suffix, "suffix")
    if len(given) * len(after) > MAX_SUFFIX_TOKENS:
        raise bad_request(
            f"suffix has {len(after)} tokens and follows each of {len(given)} prompts; at most {MAX_SUFFIX_TOKENS} tokens are "
            "allowed in all: send fewer prompts at once",
            "suffix",
        )
    if isinstance(given[0], str):
        before = [await _encode_part(job, part, "prompt") for part in given]
    else:
        before = await text.run_in_thread(lambda: check_token_prompts(given, job.info.vocab_size, most, truncate=None))
    for ids in before:
        if (count := len(ids) + len(after) + FimTokens.MAX_MARKER_TOKENS) > most:
            raise context_length_exceeded(most, count, param="prompt")
    return await text.run_in_thread(
        _build_fill_in_prompts, fill_in, given, before, after, body.add_special_tokens is not False
    )


async def _encode_part(job: GenerationJob, text: str, param: str) -> list[int]:
    """The ids of a text next to a gap; raises ApiError for one that cannot fit, before tokenizing it."""
    service, most = job.state.text, job.size.longest_prompt
    await service.check_text_length(len(text), most, truncated=False, param=param)
    pieces = await service.run_in_thread(require_fill_in(job, param).pieces, text)
    if len(pieces) > most:
        raise context_length_exceeded(most, len(pieces), param=param, at_least=True)
    encoded = await service.encode(
        pieces, add_special_tokens=False, max_model_len=most, truncate=None, param=param, caller=job.caller
    )
    return [token for piece in encoded for token in piece.token_ids]


def _build_fill_in_prompts(
    fill_in: FimTokens,
    given: Sequence[str] | Sequence[list[int]],
    before: Sequence[Sequence[int]],
    after: Sequence[int],
    add_special_tokens: bool,
) -> list[Prompt]:
    return [
        Prompt(
            fill_in.prompt(ids, after, add_special_tokens=add_special_tokens), part if isinstance(part, str) else None
        )
        for part, ids in zip(given, before, strict=True)
    ]


# ---- parts that are cut to fit ---------------------------------------------------------------------------------------
async def fit_infill_prompt(job: GenerationJob, body: InfillRequest) -> tuple[Prompt, bool]:
    """(prompt, whether anything was cut): as much of each part as fits into the context next to the response.

    The end of the text before the gap and the start of the text after it are kept, the latter at most a quarter of the tokens
    if both are long. The remaining tokens are used for entire passages, from the last one backwards.
    """
    fill_in = require_fill_in(job, "input_prefix")
    longest = job.size.longest_prompt
    free_tokens = longest - min(job.sampling.max_tokens, longest // 4) - FimTokens.MAX_MARKER_TOKENS
    if free_tokens < 1:
        raise context_length_exceeded(longest, FimTokens.MAX_MARKER_TOKENS + 1, param="input_prefix")
    before, cut_before = await _encode_truncated(job, body.input_prefix, free_tokens, "input_prefix", keep_first=False)
    typed, cut_typed = await _encode_truncated(job, body.prompt or "", free_tokens, "prompt", keep_first=False)
    after, cut_after = await _encode_truncated(job, body.input_suffix, free_tokens, "input_suffix", keep_first=True)
    before = before + typed
    following = min(len(after), max(free_tokens // 4, free_tokens - len(before)))
    preceding = min(len(before), free_tokens - following)
    cut = cut_before or cut_typed or cut_after or following < len(after) or preceding < len(before)
    around, left_out = await _passages(job, fill_in, body.input_extra or [], free_tokens - following - preceding)
    ids = fill_in.prompt(
        before[len(before) - preceding :],
        after[:following],
        add_special_tokens=body.add_special_tokens is not False,
        around=around,
    )
    return Prompt(ids), cut or left_out


async def _encode_truncated(
    job: GenerationJob, text: str, most: int, param: str, *, keep_first: bool
) -> tuple[list[int], bool]:
    """The first or last ids of a text, at most `most`, and whether any were cut."""
    service, tokenizer = job.state.text, job.state.tokenizer
    # These characters certainly have enough tokens, so the rest is not tokenized.
    enough = await service.run_in_thread(lambda: (most + 1) * tokenizer.max_token_chars)
    enough = min(enough, job.state.settings.max_tokenize_chars)
    short = text[:enough] if keep_first else text[-enough:]
    pieces = await service.run_in_thread(require_fill_in(job, param).pieces, short)
    kept = pieces[:most] if keep_first else pieces[-most:]  # each has at least one token
    encoded = await service.encode(
        kept,
        add_special_tokens=False,
        max_model_len=job.size.longest_prompt,
        truncate=most,
        keep_first=keep_first,
        param=param,
        caller=job.caller,
    )
    ids = [token for piece in encoded for token in piece.token_ids]
    cut = len(short) < len(text) or len(kept) < len(pieces) or any(piece.text is None for piece in encoded)
    if len(ids) > most:
        return (ids[:most] if keep_first else ids[-most:]), True
    return ids, cut


async def _passages(
    job: GenerationJob, fill_in: FimTokens, passages: Sequence[FilePassage], free_tokens: int
) -> tuple[list[int], bool]:
    """The ids of the last passages that fit into `free_tokens`, each with its head, and whether any were left out."""
    if not passages:
        return [], False
    opening, closing = [await _append_encoded(job, *part) for part in (fill_in.project(), fill_in.current())]
    free_tokens -= len(opening) + len(closing)
    taken: list[list[int]] = []
    for passage in reversed(passages):
        if free_tokens < 1:
            break
        ids, name = fill_in.head(passage.filename or "tmp")
        head = await _append_encoded(job, ids, name)
        text, cut = await _encode_truncated(job, passage.text, max(free_tokens, 1), "input_extra", keep_first=True)
        if cut or len(head) + len(text) > free_tokens:
            break
        taken.append(head + text)
        free_tokens -= len(head) + len(text)
    if not taken:
        return [], True
    around = [*opening, *(token for ids in reversed(taken) for token in ids), *closing]
    return around, len(taken) < len(passages)


async def _append_encoded(job: GenerationJob, ids: list[int], text: str) -> list[int]:
    """Ids followed by those of a text."""
    encoded, _ = (
        await _encode_truncated(job, text, job.size.longest_prompt, "input_extra", keep_first=True)
        if text
        else ([], False)
    )
    return [*ids, *encoded]


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
