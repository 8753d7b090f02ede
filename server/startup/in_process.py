"""`LLM`: a model inside this process, without a server: batches, the event loop thread, and the SDK's transport to the app."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, Unpack, overload

import httpx
from starlette.types import ASGIApp, Message

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
from windlass.clients.options import Messages, TemplateOptions, TokenIds
from windlass.clients.terminal import LoadingDisplay, stderr_is_terminal
from windlass.engine.errors import EngineDeadError, EngineError, LoadError
from windlass.engine.interface.model_info import ModelInfo
from windlass.server.config.engine_options import EngineOptions
from windlass.server.config.option_names import with_keyword_names
from windlass.server.config.server_options import ServerOptions, check_log_level
from windlass.server.config.settings import ServerSettings
from windlass.server.startup.engines import Engines, SupervisedEngine
from windlass.server.startup.launch import make_app, prepare, read_template
from windlass.server.startup.llm_arguments import (
    AnyParams,
    merged_fields,
    read_conversations,
    read_options,
    read_prompts,
)
from windlass.server.startup.model_defaults import check_loaded

T = TypeVar("T")

Run = Callable[[Coroutine[Any, Any, T]], T]

_URL = "http://in-process"
_LEAVE_SECONDS = 5.0
_CLOSED = "this model was closed: create another LLM"

_FORKED = (
    "this LLM belongs to the process that created it, and a fork has none of its threads: create another in the process "
    "that uses it"
)

_logger = logging.getLogger("windlass.server")


class LLM:
    """A loaded model and its engine process. Use it in a `with` block, or `close` it; the end of the program closes it too.

    model: a known name, a directory, a GGUF file or a hub id, as for `windlass serve`; None: the default model. options: those of
    `windlass serve` with underscores, such as `max_model_len` or `quantization`. `rope_scaling` may be a mapping,
    `rope_profile` a mapping of names to scalings. Raises LoadError, one line with the option to change.

    Its methods may be called from any thread of the process that created it. They raise BadRequestError, which names the field
    at fault, APIConnectionError if the model was closed or this is another process, and the other errors of
    `windlass.clients`; TypeError or ValueError for arguments of another form. `client` reaches every other endpoint.
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

    def get_tokenizer(self) -> ModelTokenizer:
        """The tokenizer and chat template of the model."""
        return ModelTokenizer(self.client, self.info.vocab_size)

    def generate(
        self,
        prompts: str | TokenIds | Sequence[str | TokenIds],
        sampling_params: AnyParams | Sequence[AnyParams] | None = None,
        *,
        progress: bool = True,
        **options: Unpack[CompletionOptions],
    ) -> list[Completion]:
        """Continue prompts, texts or token ids, in one batch. Results are in the order of the prompts and have `token_ids`.

        sampling_params: SamplingParams, or fields of /v1/completions as a mapping, for all prompts or a list with one for each.
        options: the same fields as keywords, for all prompts; sampling_params override them. max_tokens is 16 by default.
        progress: whether a bar counts the answers to several prompts, if standard error is a terminal. If a request fails, the
        others are aborted and its error is raised, with a note that contains its index.
        """
        items = read_prompts(prompts)
        fields = merged_fields(sampling_params, options, len(items))
        return self._run_batch(self._async.completions, items, fields, progress)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: AnyParams | Sequence[AnyParams] | None = None,
        *,
        progress: bool = True,
        **options: Unpack[ChatOptions],
    ) -> list[ChatCompletion]:
        """Answer one conversation or several, rendered by the model's chat template. See `generate`.

        Fields of /v1/chat/completions, such as tools or chat_template_kwargs. By default an answer may fill the context.
        """
        items = read_conversations(messages)
        fields = merged_fields(sampling_params, options, len(items), chat=True)
        return self._run_batch(self._async.chat, items, fields, progress)

    def stream(
        self, prompt: str | TokenIds, sampling_params: AnyParams | None = None, **options: Unpack[CompletionOptions]
    ) -> Stream[CompletionChunk, Completion]:
        """Continue one prompt in chunks: `with llm.stream("…") as stream: for chunk in stream: …`."""
        (fields,) = merged_fields(sampling_params, options, 1)
        return self.client.completions(prompt, stream=True, **_settings(fields, ids=True))

    def stream_chat(
        self, messages: Messages, sampling_params: AnyParams | None = None, **options: Unpack[ChatOptions]
    ) -> Stream[ChatCompletionChunk, ChatCompletion]:
        """Answer one conversation in chunks."""
        (fields,) = merged_fields(sampling_params, options, 1, chat=True)
        return self.client.chat(messages, stream=True, **_settings(fields, ids=True))

    def embed(
        self,
        texts: str | TokenIds | Sequence[str | TokenIds],
        *,
        progress: bool = True,
        **options: Unpack[EmbeddingOptions],
    ) -> list[tuple[float, ...]]:
        """A vector for each text. Fields of /v1/embeddings."""
        items = read_prompts(texts)
        fields = merged_fields(None, options, len(items))
        answers = self._run_batch(self._async.embeddings, items, fields, progress, ids=False)
        return [answer.data[0].embedding for answer in answers]

    def score(
        self, text_1: str | Sequence[str], text_2: str | Sequence[str], **options: Unpack[ScoreOptions]
    ) -> list[float]:
        """Scores of pairs of texts: one with one, lists of equal length, or one with each. Fields of /v1/score."""
        (fields,) = merged_fields(None, options, 1)
        return [pair.score for pair in self.client.score(text_1, text_2, **_settings(fields, ids=False)).data]

    def close(self) -> None:
        """End the engine; running requests fail. Safe to call twice."""
        self._host.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run_batch(
        self,
        call: Callable[..., Awaitable[T]],
        items: Sequence[Any],
        fields: Sequence[Mapping[str, Any]],
        progress: bool,
        *,
        ids: bool = True,
    ) -> list[T]:
        """One request for each item, with enough at once to keep the engine busy."""
        calls = [partial(call, item, **_settings(each, ids=ids)) for item, each in zip(items, fields, strict=True)]
        shown = progress and len(calls) > 1 and stderr_is_terminal()
        try:
            with answer_progress(len(calls)) if shown else contextlib.nullcontext() as answered:
                return self._host.run(_gather(calls, answered, at_once=2 * self.info.max_num_seqs))
        except EngineDeadError as error:
            raise APIConnectionError(str(error)) from error


class ModelTokenizer:
    """The tokenizer and chat template of a loaded model. The methods have the names that transformers uses."""

    def __init__(self, client: Client, vocab_size: int) -> None:
        self._client = client
        self.vocab_size = vocab_size

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text. add_special_tokens: such as the beginning-of-sequence token."""
        return list(self._client.tokenize(text, add_special_tokens=add_special_tokens, return_offsets=False).tokens)

    def decode(self, token_ids: TokenIds, *, skip_special_tokens: bool = False) -> str:
        """The text of token ids."""
        return self._client.detokenize(token_ids, skip_special_tokens=skip_special_tokens, return_offsets=False).text

    @overload
    def apply_chat_template(
        self,
        messages: Messages,
        *,
        tokenize: Literal[True] = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]: ...

    @overload
    def apply_chat_template(
        self,
        messages: Messages,
        *,
        tokenize: Literal[False],
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str: ...

    def apply_chat_template(
        self,
        messages: Messages,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int] | str:
        """The token ids of a conversation rendered by the chat template, or its text without `tokenize`.

        add_generation_prompt: whether the assistant's turn is opened, as for `LLM.chat`. variables: of the template.
        """
        options: TemplateOptions = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "chat_template_kwargs": variables or None,
        }
        if not tokenize:
            return self._client.apply_template(messages, **options)
        return list(self._client.tokenize(messages=messages, return_offsets=False, **options).tokens)


# ---- batches ---------------------------------------------------------------------------------------------------------
async def _gather(
    calls: Sequence[Callable[[], Awaitable[T]]], answered: Callable[[T], None] | None = None, *, at_once: int
) -> list[T]:
    """All results in order. The first error cancels the other calls and is raised unchanged. answered: gets each result."""
    slots = asyncio.Semaphore(at_once)

    async def one(index: int, call: Callable[[], Awaitable[T]]) -> T:
        async with slots:
            try:
                answer = await call()
            except Exception as error:
                error.add_note(f"This was request {index} of {len(calls)}, counted from 0.")
                raise
        if answered is not None:
            answered(answer)
        return answer

    tasks = [asyncio.ensure_future(one(index, call)) for index, call in enumerate(calls)]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def answer_progress(total: int) -> Iterator[Callable[[Any], None]]:
    """A bar on standard error that counts answers and their tokens. Yields the function to call with each answer."""
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("answers"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[speed]}"),
    )
    began, tokens = time.monotonic(), 0
    with progress.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total, speed="")

        def answered(answer: Any) -> None:
            nonlocal tokens
            tokens += getattr(answer.usage, "completion_tokens", None) or 0
            seconds = max(time.monotonic() - began, 1e-3)
            bar.update(task, advance=1, speed=f"{tokens / seconds:,.0f} tokens/s" if tokens else "")

        yield answered


def _settings(options: Mapping[str, Any], *, ids: bool) -> Any:
    """Fields of the HTTP API as options of the client, to which `timeout` is a limit of connections, which do not exist here."""
    shown = {"return_token_ids": True, **options} if ids else dict(options)
    if "timeout" in shown:
        shown.setdefault("deadline", shown.pop("timeout"))
    return shown


# ---- the event loop thread -------------------------------------------------------------------------------------------
class LoopThread:
    """An event loop in its own thread. Call `start`, then `end` and `close`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="windlass", daemon=True)
        self._process = os.getpid()
        self._lock = threading.Lock()  # of the next two: accepted work begins before the loop stops
        self._ended = False
        self._pending: set[concurrent.futures.Future[Any]] = set()

    @property
    def forked(self) -> bool:
        """Whether this is a fork, which has the object but not the thread."""
        return os.getpid() != self._process

    @property
    def is_current(self) -> bool:
        """Whether the caller is on this thread."""
        return threading.current_thread() is self._thread

    def start(self) -> None:
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of the work. An interrupt of the caller's thread cancels it. Raises EngineDeadError after the end."""
        if self.forked:  # before the lock, which may have been held when the process was forked
            work.close()
            raise EngineDeadError(_FORKED)
        with self._lock:
            if self._ended:
                work.close()
                raise EngineDeadError(_CLOSED)
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._pending.add(future)
        try:
            return future.result()
        except concurrent.futures.CancelledError:  # by the end
            raise EngineDeadError(_CLOSED) from None
        except BaseException:
            future.cancel()
            raise
        finally:
            with self._lock:
                self._pending.discard(future)

    def end(self, last: Coroutine[Any, Any, None]) -> None:
        """Run `last`, then accept no more work, cancel running work and wait for the thread."""
        try:
            self.run(last)
        finally:
            with self._lock:
                self._ended = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            with self._lock:
                left = list(self._pending)
            for future in left:  # of work that did not react to its cancellation
                with contextlib.suppress(concurrent.futures.InvalidStateError):
                    future.set_exception(EngineDeadError(_CLOSED))

    def close(self) -> None:
        self._loop.close()

    def _serve(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(_cancel_others())


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=_LEAVE_SECONDS)
    for task in others:
        if task.done() and not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it


# ---- transport of the SDK --------------------------------------------------------------------------------------------
class _AppExchange(httpx.AsyncByteStream):
    """One request to the app. Iterate over it for the response body; closing it early aborts the request."""

    def __init__(self, app: ASGIApp, request: httpx.Request, body: bytes) -> None:
        self.response_start: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._body: bytes | None = body
        self._disconnected = asyncio.Event()
        self._parts: asyncio.Queue[bytes | None] = asyncio.Queue()  # None after the last one
        self._complete = False
        self._error: Exception | None = None
        self._task = asyncio.create_task(self._run(app, _scope(request)))

    async def _run(self, app: ASGIApp, scope: dict[str, Any]) -> None:
        try:
            await app(scope, self._receive, self._send)
        except Exception as error:
            if not self.response_start.done():
                self.response_start.set_exception(error)
            else:
                _logger.error("a response ended with an internal error", exc_info=error)
                self._error = error
        finally:
            self._parts.put_nowait(None)

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._disconnected.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.response_start.set_result(message)
            return
        if body := message.get("body"):
            self._parts.put_nowait(body)
        self._complete = not message.get("more_body", False)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Raises ReadError if the app ended before the response was complete, like a broken connection of a socket."""
        while (part := await self._parts.get()) is not None:
            yield part
        if not self._complete:
            why = "" if self._error is None else f": {self._error}"
            raise httpx.ReadError(f"the server ended its answer early{why}") from self._error

    async def aclose(self) -> None:
        """Disconnect like a client: the app aborts the request."""
        self._disconnected.set()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


class AppTransport(httpx.AsyncBaseTransport):
    """Transport for code on the event loop of the app."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        exchange = _AppExchange(self._app, request, await request.aread())
        try:
            response_start = await exchange.response_start
        except BaseException:
            await exchange.aclose()
            raise
        return httpx.Response(response_start["status"], headers=response_start["headers"], stream=exchange)


class ThreadTransport(httpx.BaseTransport):
    """Transport for code on other threads. run: runs a coroutine on the app's event loop and waits for it.

    Its EngineDeadError, after the end of the loop, is reported as a broken connection.
    """

    def __init__(self, transport: AppTransport, run: Run[Any]) -> None:
        self._transport = transport

        def run_or_fail(work: Coroutine[Any, Any, Any]) -> Any:
            try:
                return run(work)
            except EngineDeadError as error:
                raise httpx.ReadError(str(error)) from error

        self._run = run_or_fail

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.read()
        response: httpx.Response = self._run(self._transport.handle_async_request(request))
        assert isinstance(response.stream, _AppExchange)
        stream = _ThreadStream(response.stream, self._run)
        return httpx.Response(response.status_code, headers=response.headers, stream=stream)


class _ThreadStream(httpx.SyncByteStream):
    def __init__(self, exchange: _AppExchange, run: Run[Any]) -> None:
        self._exchange = exchange
        self._run = run

    def __iter__(self) -> Iterator[bytes]:
        parts = aiter(self._exchange)
        while (part := self._run(_next(parts))) is not None:
            yield part

    def close(self) -> None:
        with contextlib.suppress(httpx.ReadError):  # the end of the loop has ended the exchange
            self._run(self._exchange.aclose())


async def _next(parts: AsyncIterator[bytes]) -> bytes | None:
    return await anext(parts, None)


def _scope(request: httpx.Request) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "scheme": request.url.scheme,
        "path": request.url.path,
        "raw_path": request.url.raw_path.partition(b"?")[0],
        "query_string": request.url.query,
        "server": (request.url.host, request.url.port),
        "client": None,
        "root_path": "",
    }


# ---- the app and its engine ------------------------------------------------------------------------------------------
class ModelHost:
    """A model, its engine and its app, loaded on creation; call `close`. Raises LoadError or RequestError, one line.

    info: the loaded model. transport: for clients on its event loop; other threads use `run`.
    """

    info: ModelInfo

    def __init__(self, model: str | None, engine: EngineOptions, server: ServerOptions, log_level: str) -> None:
        level = check_log_level(log_level)
        template = read_template(server)
        self._loop = LoopThread()
        with contextlib.ExitStack() as undo:
            undo.callback(self._loop.close)
            engines = undo.enter_context(contextlib.closing(Engines(engine, level)))
            path, engine, settings = prepare(model, engine, server)
            client = engines.client(engine, path)
            undo.callback(client.kill)
            client.spawn()  # it loads while the tokenizer is imported and read
            app = make_app(client, path, settings, template)
            state = undo.enter_context(contextlib.closing(app.state.windlass))
            self.transport = AppTransport(app)
            self._loop.start()
            undo.callback(_end, self._loop, client)
            state.text.spawn()
            self.info = self.run(_load(client, settings))
            state.text.wait_loaded()
            # The callbacks hold no reference to this object, so the engine also ends if the program drops it.
            self._close = weakref.finalize(self, _close, undo.pop_all(), self._loop)

    @property
    def closed(self) -> bool:
        return not self._close.alive

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop; see `LoopThread.run`."""
        return self._loop.run(work)

    def close(self) -> None:
        """End the engine and all requests. Safe to call twice. No effect in a fork, which does not own the engine."""
        self._close()


async def _load(client: SupervisedEngine, settings: ServerSettings) -> ModelInfo:
    display = LoadingDisplay()
    client.progress = display if stderr_is_terminal() else None
    client.start_nowait()
    try:
        info = await client.wait_ready()
    finally:
        display.stop()
    check_loaded(settings, info)
    return info


def _close(undo: contextlib.ExitStack, loop: LoopThread) -> None:
    if loop.forked:  # also at the exit of a fork: the process that created the model ends it
        return
    if loop.is_current:  # the garbage collector runs on any thread, and this one cannot wait for itself
        threading.Thread(target=undo.close, name="windlass-end").start()
    else:
        undo.close()


def _end(loop: LoopThread, client: SupervisedEngine) -> None:
    """End the engine, then the tasks on the loop, then the loop."""
    loop.end(_shut_down(client))


async def _shut_down(client: SupervisedEngine) -> None:
    await client.close()  # requests in flight get their error
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.wait(others, timeout=1.0) if others else None
