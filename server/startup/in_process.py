"""`LLM`: a model inside this process, without a server: options, the event loop thread, and the SDK's transport to the app."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

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
from windlass.clients.options import Messages, TokenIds
from windlass.clients.terminal import LoadingDisplay, stderr_is_terminal
from windlass.engine.errors import EngineDeadError, EngineError, LoadError, did_you_mean
from windlass.engine.interface.model_info import ModelInfo
from windlass.server.config.engine_options import EngineOptions
from windlass.server.config.migration_hints import moved_option_hint
from windlass.server.config.option import options_of
from windlass.server.config.option_names import with_keyword_names
from windlass.server.config.server_options import ServerOptions, check_log_level
from windlass.server.config.settings import ServerSettings
from windlass.server.startup.engines import Engines, SupervisedEngine
from windlass.server.startup.launch import make_app, prepare, read_template
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

    model: a known name, a directory, a GGUF file or a hub id, as for `windlass serve`; None: smollm2. options: those of
    `windlass serve` with underscores, such as `max_model_len` or `quantization`. `rope_scaling` may be a mapping,
    `rope_profile` a mapping of names to scalings. Raises LoadError, one line with the option to change.

    Its methods may be called from any thread of the process that created it. They raise the errors of `windlass.clients`:
    BadRequestError names the field at fault; APIConnectionError reports that the model was closed, or that this is another
    process. `client` reaches every other endpoint.
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
        """Continue prompts, texts or token ids, in one batch. Results are in the order of the prompts and have `token_ids`.

        options: fields of /v1/completions, such as max_tokens, temperature, n, logprobs or rope_scaling, for all prompts.
        params: the same as a mapping, or one mapping for each prompt; it overrides `options`. If a request fails, the others
        are aborted and its error is raised, with a note that contains its index.
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
        """Continue one prompt in chunks: `with llm.stream("…") as stream: for chunk in stream: …`."""
        return self.client.completions(prompt, stream=True, **_settings(options, ids=True))

    def stream_chat(
        self, messages: Messages, **options: Unpack[ChatOptions]
    ) -> Stream[ChatCompletionChunk, ChatCompletion]:
        """Answer one conversation in chunks."""
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
        """Scores of pairs of texts: one with one, lists of equal length, or one with each. Fields of /v1/score."""
        return [pair.score for pair in self.client.score(text_1, text_2, **_settings(options, ids=False)).data]

    def close(self) -> None:
        """End the engine; running requests fail. Safe to call twice."""
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
        """One request for each item, with enough at once to keep the engine busy."""
        shared: Sequence[Mapping[str, Any]]
        shared = [params or {}] * len(items) if params is None or isinstance(params, Mapping) else params
        if len(shared) != len(items):
            raise ValueError(
                f"params has {len(shared)} entries for {len(items)} prompts: give one for each prompt, or a single mapping"
            )
        settings = [{**options, **each} for each in shared]
        if any("stream" in each for each in settings):
            raise ValueError("`stream` is not supported here: use stream or stream_chat")
        calls = [partial(call, item, **_settings(each, ids=ids)) for item, each in zip(items, settings, strict=True)]
        try:
            return self._host.run(_gather(calls, at_once=2 * self.info.max_num_seqs))
        except EngineDeadError as error:
            raise APIConnectionError(str(error)) from error


# ---- options ---------------------------------------------------------------------------------------------------------
def read_options(given: Mapping[str, Any]) -> tuple[EngineOptions, ServerOptions]:
    """Options of the engine and of the server from keywords, and from the engine's variables for experts.

    Raises LoadError, one line, for a wrong name or value.
    """
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


# ---- batches ---------------------------------------------------------------------------------------------------------
async def _gather(calls: Sequence[Callable[[], Awaitable[T]]], *, at_once: int) -> list[T]:
    """All results in order. The first error cancels the other calls and is raised unchanged."""
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
    """Fields of the HTTP API as options of the client, to which `timeout` is a limit of connections, which do not exist here."""
    shown = {"return_token_ids": True, **options} if ids else dict(options)
    if "timeout" in shown:
        shown.setdefault("deadline", shown.pop("timeout"))
    return shown


def _prompts(given: Any) -> list[Any]:
    """A list of prompts, from one prompt or several."""
    if isinstance(given, str):
        return [given]
    items = list(given)
    return [items] if items and all(isinstance(item, int) for item in items) else items


def _conversations(given: Any) -> list[Any]:
    items = list(given)
    several = bool(items) and not any(isinstance(item, Mapping) or hasattr(item, "to_dict") for item in items)
    return items if several else [items]


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
