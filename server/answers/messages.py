"""Answers of `/v1/messages`: content blocks, and in a stream the events that build them up."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json, to_json

from windlass.server.answers.blocks import AnswerBlock, BlockWriter
from windlass.server.answers.pieces import JsonList
from windlass.server.protocol.tools import whole_escapes

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessageWriter(BlockWriter):
    """A content block for each block: `thinking`, `text` or `tool_use`. message: the answer's `id` and `model`."""

    keeps = False  # its last events repeat nothing

    def __init__(self, *args: Any, message: dict[str, Any]) -> None:
        super().__init__(*args)
        self._message = {"type": "message", "role": "assistant", **message}

    # ---- streams -----------------------------------------------------------------------------------------------------
    def head(self) -> bytes:
        begun: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        return _event("message_start", message={**self._message, **begun})

    def opened(self, block: AnswerBlock) -> bytes:
        events = _event("content_block_start", index=block.index, content_block=_empty(block))
        return events if block.index else events + PING

    def grown(self, block: AnswerBlock, text: str, logprobs: JsonList | None) -> bytes:
        if block.kind == "text":
            delta = {"type": "text_delta", "text": text}
        elif block.kind == "thinking":
            delta = {"type": "thinking_delta", "thinking": text}
        else:
            delta = {"type": "input_json_delta", "partial_json": text}
        return _event("content_block_delta", index=block.index, delta=delta)

    def closed(self, block: AnswerBlock) -> bytes:
        return _event("content_block_stop", index=block.index)

    def last_event(self) -> bytes:
        rotary = {} if self.rotary is None else {"rotary": self.rotary}
        return _event("message_delta", delta=self._ending(), usage=self._usage(), **rotary) + _event("message_stop")

    # ---- whole answers -----------------------------------------------------------------------------------------------
    def pieces(self) -> list[bytes]:
        content = [_whole(block) for block in self.blocks]
        answer = {**self._message, "content": content, **self._ending(), "usage": self._usage()}
        return [to_json(answer if self.rotary is None else {**answer, "rotary": self.rotary})]

    def _ending(self) -> dict[str, Any]:
        # What is no text is the id of a token that ends answers.
        stopped = self.finish_reason == "stop" and isinstance(self.stop_reason, str)
        reason = "stop_sequence" if stopped else _STOP_REASONS.get(self.finish_reason or "", "end_turn")
        return {"stop_reason": reason, "stop_sequence": self.stop_reason if stopped else None}

    def _usage(self) -> dict[str, Any]:
        """`input_tokens` are those that were not found in the cache; thinking is counted where it is told apart."""
        tally = self.tally
        thought = tally.reasoning_tokens
        details = {} if thought is None else {"output_tokens_details": {"thinking_tokens": thought}}
        return {
            "input_tokens": tally.prompt_tokens - tally.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": tally.cached_tokens,
            "output_tokens": tally.completion_tokens,
            **details,
        }


def _event(name: str, **fields: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + to_json({"type": name, **fields}) + b"\n\n"


def _empty(block: AnswerBlock) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": ""}
    if block.kind == "thinking":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _whole(block: AnswerBlock) -> dict[str, Any]:
    if block.kind == "text":
        return {**_empty(block), "text": block.text}
    if block.kind == "thinking":
        return {**_empty(block), "thinking": block.text}
    return {**_empty(block), "input": _arguments(block.text)}


def _arguments(text: str) -> dict[str, Any]:
    """A call's arguments as an object: as much of one as there is, where the answer was cut short or is no JSON."""
    try:
        found = from_json(whole_escapes(text), allow_partial="trailing-strings", allow_inf_nan=False)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
