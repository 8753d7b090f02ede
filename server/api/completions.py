"""`POST /v1/completions`: route and rendering."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from windlass.engine.interface.outputs import TokenLogprobs
from windlass.server.app.request_body import read_body
from windlass.server.app.state import caller_of, state_of
from windlass.server.http.request_id import request_id, set_request_id
from windlass.server.schemas.completions import Completion, CompletionEvent, CompletionRequest
from windlass.server.schemas.openapi import GENERATION_ERRORS, answers, body_of
from windlass.server.serving.deltas import Delta, Tally
from windlass.server.serving.generation import check, fingerprinted_envelope, run
from windlass.server.serving.job import GenerationJob, telling_of_scalings
from windlass.server.serving.prompts import check_suffix, check_token_prompts, prompts_around_gaps, split_prompts
from windlass.server.serving.response_format import CompletionLogprobLists, JsonList
from windlass.server.serving.response_writer import AnswerOptions, AnswerWriter, Result, in_pieces
from windlass.server.serving.streaming import Exchange
from windlass.server.text.service import Prompt

if TYPE_CHECKING:
    from windlass.server.text.tokenizer import Tokenizer


_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@dataclass(slots=True)
class _Echo:
    """The prompt as its choices repeat it. `end`: where the text goes on, in characters."""

    text: str
    logprobs: dict[str, JsonList] | None = None
    end: int = 0


class CompletionWriter(AnswerWriter):
    """`echoes`: per prompt the text to repeat before each of its choices, or None."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompts: Sequence[Prompt],
        tally: Tally,
        options: AnswerOptions,
        envelope: dict[str, Any],
        echoes: Sequence[str] | None = None,
    ) -> None:
        super().__init__(tokenizer, prompts, tally, options, envelope)
        self._echoes = None if echoes is None else [_Echo(text) for text in echoes]
        self._layouts: dict[int, CompletionLogprobLists] = {}
        self._lists: dict[int, dict[str, JsonList]] = {}  # log-probabilities by choice

    def take_prompt_logprobs(self, prompt_index: int, entries: Sequence[TokenLogprobs | None]) -> None:
        super().take_prompt_logprobs(prompt_index, entries)
        if self._echoes is not None and self.options.logprobs is not None:
            echo = self._echoes[prompt_index]
            layout = self._new_layout(0)
            echo.logprobs = _empty_lists()
            pairs = list(zip(self.prompts[prompt_index].token_ids, entries, strict=True))
            for piece in in_pieces(pairs):
                self.grow(_extend(echo.logprobs, layout.layout(*zip(*piece, strict=True))))
            echo.end = layout.position

    def begin(self, choice: int) -> bytes:
        prompt_index = choice // self.options.samples
        first: dict[str, Any] = {}
        if self.options.return_token_ids:
            first["prompt_token_ids"] = self.prompts[prompt_index].token_ids
            first["token_ids"] = []
        if prompt_index in self.prompt_objects:
            first["prompt_logprobs"] = self.prompt_objects[prompt_index]
        text, logprobs = "", None
        if self._echoes is not None:
            echo = self._echoes[prompt_index]
            text, logprobs = echo.text, echo.logprobs
        if not (first or text or logprobs):
            return b""
        return self.opening([{"index": choice, "text": text, "logprobs": logprobs, "finish_reason": None, **first}])

    def plain(self, choice: int, text: bytes) -> bytes:
        return b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}' % (choice, text)

    def detailed(self, delta: Delta) -> dict[str, Any]:
        fields = self._choice(delta.choice, delta.text, delta.finish_reason, delta.stop_reason)
        if self.options.logprobs is not None:
            fields["logprobs"] = self._layout(delta.choice).layout(delta.token_ids, delta.logprobs)
        if self.options.return_token_ids:
            fields["token_ids"] = delta.token_ids
        return fields

    def whole(self, index: int, choice: int, result: Result) -> dict[str, Any]:
        prompt_index = choice // self.options.samples
        echo = None if self._echoes is None else self._echoes[prompt_index]
        text = result.text if echo is None else echo.text + result.text
        fields = self._choice(index, text, result.finish_reason, result.stop_reason)
        if self.options.logprobs is not None:
            generated = self._lists.get(choice) or _empty_lists()
            if echo is not None and echo.logprobs is not None:
                generated = {name: echo.logprobs[name] + generated[name] for name in _LISTS}
            fields["logprobs"] = generated
        if self.options.return_token_ids:
            fields["prompt_token_ids"] = self.prompts[prompt_index].token_ids
            fields["token_ids"] = result.token_ids
        if prompt_index in self.prompt_objects:
            fields["prompt_logprobs"] = self.prompt_objects[prompt_index]
        return fields

    def keep_logprobs(self, delta: Delta) -> int:
        lists = self._lists.setdefault(delta.choice, _empty_lists())
        return _extend(lists, self._layout(delta.choice).layout(delta.token_ids, delta.logprobs))

    @staticmethod
    def _choice(index: int, text: str, finish_reason: str | None, stop_reason: str | int | None) -> dict[str, Any]:
        fields: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
        if finish_reason is not None:
            fields["stop_reason"] = stop_reason
        return fields

    def _layout(self, choice: int) -> CompletionLogprobLists:
        layout = self._layouts.get(choice)
        if layout is None:
            end = 0 if self._echoes is None else self._echoes[choice // self.options.samples].end
            layout = self._layouts[choice] = self._new_layout(end)
        return layout

    def _new_layout(self, start: int) -> CompletionLogprobLists:
        top = self.options.logprobs or 0
        return CompletionLogprobLists(
            self.tokenizer,
            top,
            skip_special_tokens=self.options.skip_special_tokens,
            start=start,
            names=self.options.token_names,
        )


def _empty_lists() -> dict[str, JsonList]:
    return {name: JsonList() for name in _LISTS}


def _extend(lists: dict[str, JsonList], layout: dict[str, Any]) -> int:
    """Append what was laid out; returns the bytes that took."""
    before = sum(found.size for found in lists.values())
    for name, found in lists.items():
        found.extend(layout[name])
    return sum(found.size for found in lists.values()) - before


router = APIRouter(tags=["Completions"])


@router.post(
    "/v1/completions",
    openapi_extra=body_of(CompletionRequest),
    responses=answers(Completion, events=CompletionEvent, errors=GENERATION_ERRORS),
)
async def create_completion(request: Request) -> Response:
    """Continue one or several prompts, given as text or token ids."""
    arrival = time.monotonic()
    state = state_of(request)
    body = await read_body(request, CompletionRequest, stall_seconds=state.settings.body_stall_seconds)
    if body.request_id is not None:
        set_request_id(request.scope, body.request_id)
    state.check_model(body.model)
    info = state.admit(caller_of(request))
    job = check(
        state,
        body,
        info,
        request_id=request_id(request.scope),
        caller=caller_of(request),
        arrival=arrival,
        default_max_tokens=state.settings.completion_max_tokens,
        logprobs=body.logprobs,
        chat=False,
        echo=bool(body.echo),
    )

    if body.suffix:
        check_suffix(job, body)

    async def work(exchange: Exchange) -> None:
        if body.stream:
            exchange.begin_stream()
        with telling_of_scalings(job):
            prompts = await (prompts_around_gaps if body.suffix else _prompts)(job, body)
        echoes = await _echoes(job, prompts) if body.echo else None

        def make_writer(prompts: Sequence[Prompt], tally: Tally) -> AnswerWriter:
            head = fingerprinted_envelope("cmpl", "text_completion", job)
            return CompletionWriter(state.tokenizer, prompts, tally, job.options, head, echoes)

        await run(exchange, job, prompts, param="prompt", make_writer=make_writer)

    return Exchange(state, work, deadline=job.deadline)


async def _prompts(job: GenerationJob, body: CompletionRequest) -> list[Prompt]:
    state = job.state
    given = split_prompts(body.prompt, max_prompts=state.settings.max_prompts)
    truncate, keep_first = body.truncate_prompt_tokens, body.truncation_side == "right"
    if isinstance(given[0], str):
        return await state.text.encode(
            given,
            add_special_tokens=body.add_special_tokens is not False,
            max_model_len=job.size.longest_prompt,
            truncate=truncate,
            keep_first=keep_first,
            param="prompt",
            caller=job.caller,
        )
    checked = await state.text.on_thread(
        lambda: check_token_prompts(
            given, job.info.vocab_size, job.size.longest_prompt, truncate=truncate, keep_first=keep_first
        )
    )
    return [Prompt(ids) for ids in checked]


async def _echoes(job: GenerationJob, prompts: list[Prompt]) -> list[str]:
    """What `echo` repeats: the caller's own text where there is one, else what the token ids say."""
    unwritten = [prompt.token_ids for prompt in prompts if prompt.text is None]
    decoded: Iterator[str] = iter(())
    if unwritten:
        skip = job.options.skip_special_tokens
        decoded = iter(await job.state.text.decode(unwritten, skip_special_tokens=skip, caller=job.caller))
    return [next(decoded) if prompt.text is None else prompt.text for prompt in prompts]
