"""Answers of `/v1/chat/completions`. Its stream opens each choice with a chunk that holds the role."""

from __future__ import annotations

from typing import Any

from windlass.server.answers.base import AnswerWriter, Result
from windlass.server.answers.logprob_layouts import chat_logprobs
from windlass.server.answers.pieces import JsonList
from windlass.server.generation.deltas import Delta


class ChatWriter(AnswerWriter):
    """A chat has one prompt, so what concerns the prompt stands at the top level of the answer."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._contents: dict[int, JsonList] = {}  # log-probabilities by choice

    def begin(self, choice: int) -> bytes:
        delta = {"role": "assistant", "content": ""}
        first = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}
        return self.opening([first], **self.extras())

    def plain(self, choice: int, text: bytes) -> bytes:
        return b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}' % (choice, text)

    def detailed(self, delta: Delta) -> dict[str, Any]:
        content = {"content": delta.text} if delta.text or delta.finish_reason is None else {}
        fields: dict[str, Any] = {
            "index": delta.choice,
            "delta": content,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
        }
        if self.options.logprobs is not None:
            fields["logprobs"] = chat_logprobs(self.tokenizer, delta.logprobs, self.options.logprobs)
        if delta.finish_reason is not None:
            fields["stop_reason"] = delta.stop_reason
        if self.options.return_token_ids:
            fields["token_ids"] = delta.token_ids
        return fields

    def whole(self, index: int, choice: int, result: Result) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": result.text, "refusal": None},
            "logprobs": None,
            "finish_reason": result.finish_reason,
            "stop_reason": result.stop_reason,
        }
        if self.options.logprobs is not None:
            fields["logprobs"] = {"content": self._contents.get(choice) or JsonList(), "refusal": None}
        if self.options.return_token_ids:
            fields["token_ids"] = result.token_ids
        return fields

    def keep_logprobs(self, delta: Delta) -> int:
        assert self.options.logprobs is not None
        content = self._contents.setdefault(delta.choice, JsonList())
        before = content.size
        content.extend(chat_logprobs(self.tokenizer, delta.logprobs, self.options.logprobs)["content"])
        return content.size - before

    def extras(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self.options.return_token_ids:
            fields["prompt_token_ids"] = self.prompts[0].token_ids
        if 0 in self.prompt_objects:
            fields["prompt_logprobs"] = self.prompt_objects[0]
        return fields
