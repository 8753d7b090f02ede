"""`POST /v1/completions`: route and rendering."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from windlass.engine.interface.outputs import TokenLogprobs
from windlass.server.api.router import GENERATION_ERRORS, ApiRouter, example_chunk
from windlass.server.app.request_body import read_body
from windlass.server.app.state import state_of
from windlass.server.schemas.completions import Completion, CompletionEvent, CompletionRequest
from windlass.server.serving.generation import check_generation, run_generation
from windlass.server.serving.job import Delta, GenerationJob, TokenUsage, admit_request, scaling_hint
from windlass.server.serving.prompts import check_suffix, check_token_prompts, fill_in_prompts, split_prompts
from windlass.server.serving.response_writer import (
    ChoiceWriter,
    CollectedChoice,
    CompletionLogprobLists,
    JsonList,
    encode,
    in_batches,
)
from windlass.server.serving.streaming import Exchange
from windlass.server.text.service import Prompt

_LOGPROB_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")

router = ApiRouter("Completions", "Continuations of prompts.")


@dataclass(slots=True)
class _Echo:
    """The prompt that its choices repeat. end: offset in characters at which the generated text begins."""

    text: str
    logprobs: dict[str, JsonList] | None = None
    end: int = 0


class CompletionWriter(ChoiceWriter):
    """Writes the answers to prompts. echoes: text of each prompt that its choices repeat, None without `echo`."""

    def __init__(
        self,
        job: GenerationJob,
        prompts: Sequence[Prompt],
        token_usage: TokenUsage,
        *,
        echoes: Sequence[str] | None = None,
    ) -> None:
        super().__init__(job, prompts, token_usage, "cmpl", "text_completion")
        self._echo_texts = None if echoes is None else [_Echo(text) for text in echoes]
        self._layouts: dict[int, CompletionLogprobLists] = {}
        self._lists: dict[int, dict[str, JsonList]] = {}  # log-probabilities by choice

    def take_prompt_logprobs(self, prompt_index: int, entries: Sequence[TokenLogprobs | None]) -> None:
        super().take_prompt_logprobs(prompt_index, entries)
        if self._echo_texts is not None and self.job.logprobs is not None:
            echo = self._echo_texts[prompt_index]
            layout = self._new_layout(0)
            echo.logprobs = _empty_lists()
            pairs = list(zip(self.prompts[prompt_index].token_ids, entries, strict=True))
            for piece in in_batches(pairs):
                self.budget.add(_extend(echo.logprobs, layout.layout(*zip(*piece, strict=True))))
            echo.end = layout.position

    def begin(self, choice: int) -> bytes:
        prompt_index = choice // self.samples
        first: dict[str, Any] = {}
        if self.token_ids:
            first["prompt_token_ids"] = self.prompts[prompt_index].token_ids
            first["token_ids"] = []
        if prompt_index in self.prompt_objects:
            first["prompt_logprobs"] = self.prompt_objects[prompt_index]
        text, logprobs = "", None
        if self._echo_texts is not None:
            echo = self._echo_texts[prompt_index]
            text, logprobs = echo.text, echo.logprobs
        if not (first or text or logprobs):
            return b""
        return self.chunk(
            [{"index": choice, "text": text, "logprobs": logprobs, "finish_reason": None, **first}], encode
        )

    def plain(self, choice: int, text: bytes) -> bytes:
        return b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}' % (choice, text)

    def detailed_choice(self, delta: Delta) -> dict[str, Any]:
        fields = self._choice(delta.choice, delta.text, delta.finish_reason, delta.stop_reason)
        if self.job.logprobs is not None:
            fields["logprobs"] = self._layout(delta.choice).layout(delta.token_ids, delta.logprobs)
        if self.token_ids:
            fields["token_ids"] = delta.token_ids
        return fields

    def whole(self, index: int, choice: int, result: CollectedChoice) -> dict[str, Any]:
        prompt_index = choice // self.samples
        echo = None if self._echo_texts is None else self._echo_texts[prompt_index]
        text = result.text if echo is None else echo.text + result.text
        fields = self._choice(index, text, result.finish_reason, result.stop_reason)
        if self.job.logprobs is not None:
            generated = self._lists.get(choice) or _empty_lists()
            if echo is not None and echo.logprobs is not None:
                generated = {name: echo.logprobs[name] + generated[name] for name in _LOGPROB_LISTS}
            fields["logprobs"] = generated
        if self.token_ids:
            fields["prompt_token_ids"] = self.prompts[prompt_index].token_ids
            fields["token_ids"] = result.token_ids
        if prompt_index in self.prompt_objects:
            fields["prompt_logprobs"] = self.prompt_objects[prompt_index]
        return fields

    def store_logprobs(self, delta: Delta) -> int:
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
            end = 0 if self._echo_texts is None else self._echo_texts[choice // self.samples].end
            layout = self._layouts[choice] = self._new_layout(end)
        return layout

    def _new_layout(self, start: int) -> CompletionLogprobLists:
        skip = self.job.body.skip_special_tokens is not False
        return CompletionLogprobLists(
            self.tokenizer, self.job.logprobs or 0, skip_special_tokens=skip, start=start, names=self.names
        )


def _empty_lists() -> dict[str, JsonList]:
    return {name: JsonList() for name in _LOGPROB_LISTS}


def _extend(lists: dict[str, JsonList], layout: dict[str, Any]) -> int:
    """Append the lists; returns the number of added bytes."""
    before = sum(found.size for found in lists.values())
    for name, found in lists.items():
        found.extend(layout[name])
    return sum(found.size for found in lists.values()) - before


_example_chunk = partial(example_chunk, "cmpl", "text_completion")


@router.endpoint(
    "POST",
    "/v1/completions",
    body=CompletionRequest,
    response=Completion,
    events=CompletionEvent,
    done_event=True,
    errors=GENERATION_ERRORS,
    examples={
        "plain": ("Continuation of a prompt", {"prompt": "The king said", "max_tokens": 100}),
        "several": (
            "Two prompts with two answers each",
            {"prompt": ["The king", "The sea"], "max_tokens": 50, "n": 2, "seed": 7},
        ),
        "scored": (
            "Log-probabilities of a text",
            {"prompt": "The sea is wide", "max_tokens": 0, "echo": True, "logprobs": 1},
        ),
        "streamed": (
            "Streamed",
            {
                "prompt": "The king said",
                "max_tokens": 100,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        ),
        "scaled": (
            "Another rotary scaling",
            {"prompt": "The king said", "max_tokens": 50, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        ),
    },
    stream_examples=[
        _example_chunk({"index": 0, "text": " no", "logprobs": None, "finish_reason": None}),
        _example_chunk({"index": 0, "text": ".", "logprobs": None, "finish_reason": "length", "stop_reason": None}),
        _example_chunk(),
    ],
)
async def create_completion(request: Request) -> Response:
    """Continue one or several prompts, given as text or token ids."""
    arrival = time.monotonic()
    state = state_of(request)
    body = await read_body(request, CompletionRequest)
    info = admit_request(request, body)
    job = check_generation(
        request,
        body,
        info,
        arrival=arrival,
        default_max_tokens=state.settings.completion_max_tokens,
        logprobs=body.logprobs,
        echo=bool(body.echo),
    )

    if body.suffix:
        check_suffix(job, body)

    async def work(exchange: Exchange) -> None:
        if body.stream:
            exchange.begin_stream()
        with scaling_hint(job):
            prompts = await (fill_in_prompts if body.suffix else _encode_prompts)(job, body)
        echoes = await _echo_texts(job, prompts) if body.echo else None
        make_writer = partial(CompletionWriter, job, prompts, echoes=echoes)
        await run_generation(exchange, job, prompts, param="prompt", make_writer=make_writer)

    return Exchange(state, work, deadline=job.deadline)


async def _encode_prompts(job: GenerationJob, body: CompletionRequest) -> list[Prompt]:
    state = job.state
    prompts_given = split_prompts(body.prompt, max_prompts=state.settings.max_prompts)
    truncate, keep_first = body.truncate_prompt_tokens, body.truncation_side == "right"
    if isinstance(prompts_given[0], str):
        return await state.text.encode(
            prompts_given,
            add_special_tokens=body.add_special_tokens is not False,
            max_model_len=job.size.longest_prompt,
            truncate=truncate,
            keep_first=keep_first,
            param="prompt",
            caller=job.caller,
        )
    checked = await state.text.run_in_thread(
        lambda: check_token_prompts(
            prompts_given, job.info.vocab_size, job.size.longest_prompt, truncate=truncate, keep_first=keep_first
        )
    )
    return [Prompt(ids) for ids in checked]


async def _echo_texts(job: GenerationJob, prompts: list[Prompt]) -> list[str]:
    """The texts that `echo` repeats: those of the request, or decoded token ids."""
    without_text = [prompt.token_ids for prompt in prompts if prompt.text is None]
    decoded: Iterator[str] = iter(())
    if without_text:
        skip = job.body.skip_special_tokens is not False
        decoded = iter(await job.state.text.decode(without_text, skip_special_tokens=skip, caller=job.caller))
    return [next(decoded) if prompt.text is None else prompt.text for prompt in prompts]
