"""Answers of `/v1/responses`: items, and in a stream the typed events that build them up."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

from pydantic_core import to_json

from windlass.engine.interface.request import SamplingParams
from windlass.server.answers.base import usage_object
from windlass.server.answers.blocks import AnswerBlock, BlockWriter
from windlass.server.answers.pieces import JsonList, encode, encode_pieces
from windlass.server.errors import ApiError
from windlass.server.protocol.responses.request import ResponseRequest

_PREFIXES = {"thinking": "rs", "text": "msg", "call": "fc"}
_MORE = {
    "thinking": "response.reasoning_text.delta",
    "text": "response.output_text.delta",
    "call": "response.function_call_arguments.delta",
}
# What OpenAI calls the failures of a response.
_FAILURES = {429: "rate_limit_exceeded"}


class ResponseWriter(BlockWriter):
    """An item for each block: `reasoning`, `message` or `function_call`.

    response: see `begun_response`.
    keep: takes the whole response as JSON and its items once it has finished, before the last event or the answer is sent.
    """

    def __init__(
        self,
        *args: Any,
        response: dict[str, Any],
        keep: Callable[[bytes, list[dict[str, Any]]], None] | None = None,
    ) -> None:
        super().__init__(*args)
        self._response = response
        self._serial = str(response["id"]).removeprefix("resp_")
        self._keep_response = keep
        self._sent = 0

    # ---- streams -----------------------------------------------------------------------------------------------------
    def head(self) -> bytes:
        response = {**self._response, "status": "in_progress"}
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def opened(self, block: AnswerBlock) -> bytes:
        item = self._item(block, "in_progress", empty=True)
        event = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == "call":
            return event
        return event + self._of_part(block, "response.content_part.added", part=_part(block, "", JsonList()))

    def grown(self, block: AnswerBlock, text: str, logprobs: JsonList | None) -> bytes:
        if block.kind == "text":
            return self._of_part(block, _MORE["text"], delta=text, logprobs=logprobs or [])
        if block.kind == "thinking":
            return self._of_part(block, _MORE["thinking"], delta=text)
        return self._of_item(block, _MORE["call"], delta=text)

    def closed(self, block: AnswerBlock) -> bytes:
        text = block.text
        if block.kind == "call":
            events = self._of_item(
                block, "response.function_call_arguments.done", name=block.name, arguments=text or "{}"
            )
        else:
            logprobs = block.logprobs or JsonList()
            if block.kind == "text":
                events = self._of_part(block, "response.output_text.done", text=text, logprobs=logprobs)
            else:
                events = self._of_part(block, "response.reasoning_text.done", text=text)
            events += self._of_part(block, "response.content_part.done", part=_part(block, text, logprobs))
        item = self._item(block, _status(block))
        return events + self._event("response.output_item.done", output_index=block.index, item=item)

    def last_event(self) -> bytes:
        answer = self._answer()
        return self._event(f"response.{answer['status']}", response=self._kept(answer))

    def failure(self, error: ApiError) -> bytes:
        """The event of an answer that fails on its way."""
        detail = {"code": _FAILURES.get(error.status, "server_error"), "message": error.message, "param": error.param}
        output = [self._item(block, "incomplete" if block is self._open else "completed") for block in self.blocks]
        failed = {**self._response, "status": "failed", "error": {**detail, "type": error.type}, "output": output}
        return self._event("response.failed", response=failed)

    def _of_item(self, block: AnswerBlock, event: str, /, **fields: Any) -> bytes:
        return self._event(event, item_id=self._id(block), output_index=block.index, **fields)

    def _of_part(self, block: AnswerBlock, event: str, /, **fields: Any) -> bytes:
        return self._of_item(block, event, content_index=0, **fields)

    def _event(self, event: str, /, **fields: Any) -> bytes:
        data = {"type": event, "sequence_number": self._sent, **fields}
        self._sent += 1
        return b"event: " + event.encode() + b"\ndata: " + encode(data) + b"\n\n"

    # ---- whole answers -----------------------------------------------------------------------------------------------
    def pieces(self) -> list[bytes]:
        return list(encode_pieces(self._kept(self._answer())))

    def _answer(self) -> dict[str, Any]:
        usage, cut = usage_object(self.tally), self.finish_reason == "length"
        answer = {
            **self._response,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "completed_at": None if cut else int(time.time()),
            "output": [self._item(block, _status(block)) for block in self.blocks],
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                # The prefix cache costs nobody anything, so nothing is counted as written to it.
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self.tally.reasoning_tokens or 0},
                "total_tokens": usage["total_tokens"],
            },
        }
        return answer if self.rotary is None else {**answer, "rotary": self.rotary}

    def _kept(self, answer: dict[str, Any]) -> dict[str, Any]:
        if self._keep_response is not None:
            items = [self._item(block, _status(block), bare=True) for block in self.blocks]
            self._keep_response(encode(answer), items)
        return answer

    # ---- items -------------------------------------------------------------------------------------------------------
    def _id(self, block: AnswerBlock) -> str:
        return f"{_PREFIXES[block.kind]}_{self._serial}{block.index:04x}"

    def _item(self, block: AnswerBlock, status: str, *, empty: bool = False, bare: bool = False) -> dict[str, Any]:
        """empty: as an item begins. bare: without log-probabilities, as it may be sent back."""
        item: dict[str, Any] = {"id": self._id(block)}
        text = "" if empty else block.text
        if block.kind == "call":
            # A call without arguments has the empty object for them, as the JSON text of an object is asked for.
            arguments = text if empty or status == "incomplete" else text or "{}"
            call = {"call_id": block.call_id, "name": block.name, "arguments": arguments}
            return {**item, "type": "function_call", "status": status, **call}
        logprobs = JsonList() if bare or block.logprobs is None else block.logprobs
        parts = [] if empty else [_part(block, text, logprobs)]
        if block.kind == "thinking":
            return {
                **item,
                "type": "reasoning",
                "summary": [],
                "content": parts,
                "encrypted_content": None,
                "status": status,
            }
        return {**item, "type": "message", "status": status, "role": "assistant", "content": parts}


def _part(block: AnswerBlock, text: str, logprobs: JsonList) -> dict[str, Any]:
    if block.kind == "thinking":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _status(block: AnswerBlock) -> str:
    return "incomplete" if block.cut else "completed"


def begun_response(body: ResponseRequest, *, model: str, sampling: SamplingParams, drops_turns: bool) -> dict[str, Any]:
    """A response that has no output yet: what it was asked for, and what holds where that was left out."""
    text, reasoning = body.text, body.reasoning
    tools = [tool.model_dump(exclude_none=True, exclude={"defer_loading"}) for tool in body.tools or ()]
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": sampling.temperature,
        "text": {"format": (None if text is None else text.format) or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": [{"parameters": None, "strict": None, **tool} for tool in tools],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "auto" if drops_turns else "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }


def unbegun_failure(error: ApiError) -> bytes:
    """The event of a stream that fails before its response was created."""
    data = {
        "type": "error",
        "sequence_number": 0,
        "code": error.code,
        "message": error.message,
        "param": error.param,
    }
    return b"event: error\ndata: " + to_json(data) + b"\n\n"
