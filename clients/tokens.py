"""The methods of the synchronous client for tokens and templates. No rule lives here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, Unpack

from windlass.clients import _calls as calls
from windlass.clients._calls import Call
from windlass.clients.options import DetokenizeOptions, Messages, TemplateOptions, TokenizeOptions
from windlass.clients.types import Detokenization, Tokenization

T = TypeVar("T")


class TokenMethods:
    """What `Client` has around the tokenizer."""

    def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        model: str | None = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[TokenizeOptions],
    ) -> Tokenization:
        """Token ids of a text, or of a conversation as the chat template renders it. options: by their API names."""
        fixed = {"prompt": prompt, "messages": messages, "model": model}
        return self._run(calls.tokenize(calls.build_body(fixed, options, extra_body)))

    def detokenize(
        self,
        tokens: Sequence[int],
        *,
        model: str | None = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[DetokenizeOptions],
    ) -> Detokenization:
        """Text of token ids."""
        return self._run(calls.detokenize(calls.build_body({"tokens": tokens, "model": model}, options, extra_body)))

    def apply_template(
        self,
        messages: Messages,
        *,
        model: str | None = None,
        extra_body: Mapping[str, Any] | None = None,
        **options: Unpack[TemplateOptions],
    ) -> str:
        """A conversation as the chat template writes it: the text that a chat of these messages continues."""
        fixed = {"messages": messages, "model": model}
        return self._run(calls.apply_template(calls.build_body(fixed, options, extra_body)))

    def _run(self, call: Call[T]) -> T:
        raise NotImplementedError
