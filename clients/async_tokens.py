"""The methods of the asynchronous client for tokens and templates. No rule lives here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, Unpack

from windlass.clients import _calls as calls
from windlass.clients._calls import Call
from windlass.clients.options import DetokenizeOptions, Messages, TemplateOptions, TokenizeOptions
from windlass.clients.types import Detokenization, Tokenization

T = TypeVar("T")


class AsyncTokenMethods:
    """What `AsyncClient` has around the tokenizer."""

    async def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        model: str | None = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[TokenizeOptions],
    ) -> Tokenization:
        """See `Client.tokenize`."""
        fixed = {"prompt": prompt, "messages": messages, "model": model}
        return await self._run(calls.tokenize(calls.build_body(fixed, options, extra_body)))

    async def detokenize(
        self,
        tokens: Sequence[int],
        *,
        model: str | None = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[DetokenizeOptions],
    ) -> Detokenization:
        """See `Client.detokenize`."""
        return await self._run(
            calls.detokenize(calls.build_body({"tokens": tokens, "model": model}, options, extra_body))
        )

    async def apply_template(
        self,
        messages: Messages,
        *,
        model: str | None = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[TemplateOptions],
    ) -> str:
        """See `Client.apply_template`."""
        fixed = {"messages": messages, "model": model}
        return await self._run(calls.apply_template(calls.build_body(fixed, options, extra_body)))

    async def _run(self, call: Call[T]) -> T:
        raise NotImplementedError
