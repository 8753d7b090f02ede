"""`LLM`: a model for programs that need no server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from windlass.clients import (
    APIConnectionError,
    AsyncClient,
    ChatCompletion,
    ChatCompletionChunk,
    ChatOptions,
    Client,
    Completion,
    CompletionChunk,
    CompletionOptions,
    EmbeddingOptions,
    RetryPolicy,
    ScoreOptions,
    Stream,
)
from windlass.clients.options import Messages, TokenIds
from windlass.engine.errors import EngineDeadError, EngineError, LoadError, did_you_mean
from windlass.engine.interface.model_info import ModelInfo
from windlass.server.config.engine_options import EngineOptions
from windlass.server.config.migration_hints import moved_option_hint
from windlass.server.config.option import options_of
from windlass.server.config.option_names import with_keyword_names
from windlass.server.config.server_options import ServerOptions
from windlass.server.startup.in_process import ModelHost, ThreadTransport


def read_options(given: Mapping[str, Any]) -> tuple[EngineOptions, ServerOptions]:
    """The options of keywords, and of the variables for experts. Raises LoadError for an unknown option or a bad value."""
    engine, server = options_of(EngineOptions), options_of(ServerOptions)
    known = {name: each for name, each in {**server, **engine}.items() if each.in_llm and each.scope != "variable"}
    for name in given:
        if name not in known:
            moved = moved_option_hint(None, name)
            hint = did_you_mean(name, known) if moved is None else f": {moved}"
            raise LoadError(with_keyword_names(f"there is no option {name!r}{hint}"))
    variables = {each.name: os.environ.get(each.variable) for each in engine.values() if each.scope == "variable"}
    values = {**{name: value for name, value in variables.items() if value}, **given}
    try:
        return (
            EngineOptions(**{name: value for name, value in values.items() if name in engine}),
            ServerOptions(**{name: value for name, value in values.items() if name in server}),
        )
    except LoadError as error:
        raise LoadError(with_keyword_names(str(error))) from None


T = TypeVar("T")

_URL = "http://in-process"


class LLM:
    """A loaded model and its engine process. Use it in a `with` block, or `close` it; a program's end closes it too.

    model: a known name, a directory, a GGUF file or a hub id, as `windlass serve` takes it; None: smollm2. options: those of
    `windlass serve` by their names with underscores, such as `max_model_len` or `quantization`. `rope_scaling` may be a
    mapping, `rope_profile` a mapping of them by name. Raises LoadError, one line that says what to change.

    Its methods may be called from any thread of the process that made it. They raise the errors of `windlass.clients`:
    BadRequestError names the field at fault, APIConnectionError says that it was closed, or that this is another process.
    `client` reaches every other endpoint; `info` is what the engine says of the model.
    """

    client: Client

    def __init__(self, model: str | Path | None = None, *, log_level: str = "warning", **options: Any) -> None:
        engine, server = read_options(options)
        try:
            self._host = ModelHost(None if model is None else str(model), engine, server, log_level)
        except EngineError as error:
            raise LoadError(with_keyword_names(str(error))) from error
        retry = RetryPolicy(max_retries=0)
        transport = self._host.transport
        self.client = Client(_URL, api_key="", retry=retry, transport=ThreadTransport(transport, self._host.run))
        self._async = AsyncClient(_URL, api_key="", retry=retry, transport=transport)

    @property
    def info(self) -> ModelInfo:
        """Architecture, context length, cache and rotary groups of the loaded model."""
        return self._host.info

    def generate(
        self,
        prompts: str | TokenIds | Sequence[str | TokenIds],
        params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        **options: Unpack[CompletionOptions],
    ) -> list[Completion]:
        """Continue prompts, texts or token ids, in one batch; the answers come in the order of the prompts.

        options: fields of /v1/completions, such as max_tokens, temperature, n, logprobs or rope_scaling, for all prompts.
        params: the same as a mapping, or one for each prompt; what it says goes before `options`. Answers have `token_ids`.
        If one request fails, the others are aborted and its error is raised, with a note that says which it was.
        """
        return self._run_batch(self._async.completions, _prompts(prompts), params, options)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[ChatCompletion]:
        """Answer one conversation or several, rendered by the model's chat template. Fields of /v1/chat/completions."""
        return self._run_batch(self._async.chat, _conversations(messages), params, options)

    def stream(
        self, prompt: str | TokenIds, **options: Unpack[CompletionOptions]
    ) -> Stream[CompletionChunk, Completion]:
        """Continue one prompt, chunk by chunk: `with llm.stream("…") as stream: for chunk in stream: …`."""
        return self.client.completions(prompt, stream=True, **_settings(options, ids=True))

    def stream_chat(
        self, messages: Messages, **options: Unpack[ChatOptions]
    ) -> Stream[ChatCompletionChunk, ChatCompletion]:
        """Answer one conversation, chunk by chunk."""
        return self.client.chat(messages, stream=True, **_settings(options, ids=True))

    def embed(
        self, texts: str | TokenIds | Sequence[str | TokenIds], **options: Unpack[EmbeddingOptions]
    ) -> list[tuple[float, ...]]:
        """A vector for each text. Fields of /v1/embeddings."""
        answers = self._run_batch(self._async.embeddings, _prompts(texts), None, options, ids=False)
        return [answer.data[0].embedding for answer in answers]

    def score(
        self, text_1: str | Sequence[str], text_2: str | Sequence[str], **options: Unpack[ScoreOptions]
    ) -> list[float]:
        """How well texts go together: one with one, as many with as many, or one with each. Fields of /v1/score."""
        return [pair.score for pair in self.client.score(text_1, text_2, **_settings(options, ids=False)).data]

    def close(self) -> None:
        """End the engine; what runs fails. Safe to call twice."""
        self._host.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run_batch(
        self,
        call: Callable[..., Awaitable[T]],
        items: Sequence[Any],
        params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
        *,
        ids: bool = True,
    ) -> list[T]:
        """One request for each item, as many at once as keep the engine busy."""
        shared: Sequence[Mapping[str, Any]]
        shared = [params or {}] * len(items) if params is None or isinstance(params, Mapping) else params
        if len(shared) != len(items):
            raise ValueError(
                f"params has {len(shared)} entries for {len(items)} prompts: give one for each, or one for all"
            )
        settings = [{**options, **each} for each in shared]
        if any("stream" in each for each in settings):
            raise ValueError("this gives whole answers: use stream or stream_chat")
        calls = [partial(call, item, **_settings(each, ids=ids)) for item, each in zip(items, settings, strict=True)]
        try:
            return self._host.run(_gather(calls, at_once=2 * self.info.max_num_seqs))
        except EngineDeadError as error:
            raise APIConnectionError(str(error)) from error


async def _gather(calls: Sequence[Callable[[], Awaitable[T]]], *, at_once: int) -> list[T]:
    """All results in order. The first error ends the rest and is raised as it is."""
    slots = asyncio.Semaphore(at_once)

    async def one(index: int, call: Callable[[], Awaitable[T]]) -> T:
        async with slots:
            try:
                return await call()
            except Exception as error:
                error.add_note(f"This was request {index} of {len(calls)}, counted from 0.")
                raise

    tasks = [asyncio.ensure_future(one(index, call)) for index, call in enumerate(calls)]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _settings(options: Mapping[str, Any], *, ids: bool) -> Any:
    """Fields of the HTTP API as the client spells them. To it `timeout` is a matter of connections, of which there are none."""
    shown = {"return_token_ids": True, **options} if ids else dict(options)
    if "timeout" in shown:
        shown.setdefault("deadline", shown.pop("timeout"))
    return shown


def _prompts(given: Any) -> list[Any]:
    """One prompt, a text or token ids, or several."""
    if isinstance(given, str):
        return [given]
    items = list(given)
    return [items] if items and all(isinstance(item, int) for item in items) else items


def _conversations(given: Any) -> list[Any]:
    items = list(given)
    several = bool(items) and not any(isinstance(item, Mapping) or hasattr(item, "to_dict") for item in items)
    return items if several else [items]
