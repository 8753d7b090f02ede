"""Tokenizing and template rendering beside the event loop, with early refusal by length.

Knows the tokenizer, the template and two thread pools; knows nothing of endpoints or the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from windlass.server.chat_template import ChatTemplateError
from windlass.server.errors import bad_request, context_length_exceeded
from windlass.server.protocol.chat import ChatMessage
from windlass.server.settings import ServerSettings

if TYPE_CHECKING:
    from windlass.server.chat_template import ChatTemplate
    from windlass.server.tokenizer import Tokenizer

T = TypeVar("T")

BATCH = 32  # prompts tokenized in one go on a thread: between batches a cancelled request stops costing anything


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt ready for the engine. `text`: as the caller wrote it, None for token ids or a truncated prompt."""

    token_ids: list[int]
    text: str | None = None


class TextWorker:
    """Runs text work on threads. `tokenizers` releases the interpreter lock while it encodes."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, settings: ServerSettings) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._seconds = settings.template_seconds
        self._pool = ThreadPoolExecutor(settings.tokenizer_threads, thread_name_prefix="windlass-text")
        # Apart from tokenizing, so that a template that uses up its seconds holds back other chats only.
        self._template_pool = ThreadPoolExecutor(
            settings.max_concurrent_templates, thread_name_prefix="windlass-template"
        )

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call `function` on a tokenizing thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    async def encode(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool,
        max_model_len: int,
        truncate: int | None,
        param: str,
    ) -> list[Prompt]:
        """Tokenize `texts`; raises ApiError context_length_exceeded for one that cannot fit, before tokenizing it.

        truncate: keep the last so many tokens (and refuse nothing by length).
        """

        def encode_some(some: Sequence[str]) -> list[Prompt]:
            if truncate is None:
                per_token = self._tokenizer.max_token_chars
                for text in some:
                    if len(text) > max_model_len * per_token:
                        raise context_length_exceeded(
                            max_model_len, -(-len(text) // per_token), param=param, at_least=True
                        )
            prompts = []
            for text in some:
                ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
                cut = truncate is not None and len(ids) > truncate
                prompts.append(Prompt(ids[-truncate:] if cut and truncate else ids, None if cut else text))
            return prompts

        prompts: list[Prompt] = []
        for start in range(0, len(texts), BATCH):
            prompts += await self.run(encode_some, texts[start : start + BATCH])
        return prompts

    async def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool | None,
        continue_final_message: bool | None,
        variables: dict[str, Any] | None,
        max_model_len: int | None = None,
    ) -> str:
        """The chat as one text; raises ApiError 400 where there is no template or it refuses the messages.

        max_model_len: refuse messages before rendering them if their text alone cannot fit into so many tokens.
        """
        template = self._template
        if template is None:
            raise bad_request(
                "this model has no chat template: use /v1/completions, or start the server with a chat template",
                "messages",
                "no_chat_template",
            )
        if max_model_len is not None:
            await self._refuse_long(messages, max_model_len)
        continuing = bool(continue_final_message)
        if continuing and add_generation_prompt:
            raise bad_request(
                "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
            )
        if continuing and messages[-1].role != "assistant":
            raise bad_request("continue_final_message needs a last message of role assistant", "continue_final_message")
        plain = [self._plain(message, template.source) for message in messages]
        generation_prompt = (not continuing) if add_generation_prompt is None else add_generation_prompt

        def render() -> str:
            return template.render(
                plain,
                add_generation_prompt=generation_prompt,
                continue_final_message=continuing,
                variables=variables,
            )

        future = asyncio.get_running_loop().run_in_executor(self._template_pool, render)
        try:
            async with asyncio.timeout(self._seconds):
                return await future
        except ChatTemplateError as error:
            raise bad_request(error.message, "messages", "chat_template_error") from None
        except TimeoutError:
            raise bad_request(
                f"the chat template took more than {self._seconds:g} s on these messages",
                "messages",
                "template_timeout",
            ) from None

    def warm_up(self) -> None:
        """Begin to compute what early refusals need: it visits the whole vocabulary once."""
        self._pool.submit(lambda: self._tokenizer.max_token_chars)

    def close(self) -> None:
        """Let go of the threads without waiting for them."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._template_pool.shutdown(wait=False, cancel_futures=True)

    async def _refuse_long(self, messages: Sequence[ChatMessage], max_model_len: int) -> None:
        total = sum(len(message.content or "") for message in messages)
        if total <= max_model_len:
            return  # a token has at least one character
        per_token = await self.run(lambda: self._tokenizer.max_token_chars)
        if total > max_model_len * per_token:
            raise context_length_exceeded(max_model_len, -(-total // per_token), param="messages", at_least=True)

    @staticmethod
    def _plain(message: ChatMessage, source: str) -> dict[str, Any]:
        """The message as templates expect it: `developer` is OpenAI's newer name of `system`."""
        plain = message.model_dump(
            exclude_none=True, exclude={"type", "refusal", "annotations", "audio", "function_call"}
        )
        if plain["role"] == "developer" and "developer" not in source:
            plain["role"] = "system"
        if "tool_calls" not in plain:
            plain.setdefault("content", "")
        return plain
