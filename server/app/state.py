"""Application state: engine client, text workers, callers, adapters, stored responses, metrics."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from starlette.requests import Request

from windlass.engine.client.engine_client import EngineClient
from windlass.engine.interface.model_info import ModelInfo
from windlass.server.app.adapter_registry import AdapterRegistry, ServedAdapter
from windlass.server.app.auth import CALLER, CallerCollector, Callers
from windlass.server.app.response_store import ResponseStore
from windlass.server.config.api_keys import ApiKey
from windlass.server.config.settings import ServerSettings
from windlass.server.errors import ApiError, unavailable
from windlass.server.observability.logging import STALL_SECONDS, current_request, response_headers
from windlass.server.observability.metrics import ServerMetrics
from windlass.server.observability.recording import RecordingCollector, WorkloadRecorder
from windlass.server.text.reasoning import ThinkingControl
from windlass.server.text.service import TextService
from windlass.server.text.tokenizer import rerank_answer_ids

if TYPE_CHECKING:
    from windlass.server.observability.tracing import Tracing
    from windlass.server.text.tokenizer import Tokenizer


ConditionCode = Literal["engine_restarted", "event_loop_stalled", "text_process_lost"]

CONDITION_SECONDS = 60.0  # for which a condition is reported


class HealthConditions:
    """Recent problems that `/health` reports. clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._recorded_at: dict[ConditionCode, float] = {}
        self._counts: dict[ConditionCode, int] = {}

    def mark(self, code: ConditionCode) -> None:
        """Record that the condition occurs now."""
        self._recorded_at[code] = self._clock()

    def update_count(self, code: ConditionCode, count: int) -> None:
        """Record an increase of the number of occurrences since the start."""
        if count > self._counts.get(code, 0):
            self.mark(code)
        self._counts[code] = count

    def current(self) -> list[ConditionCode]:
        """Conditions of the last minute, sorted by name."""
        since = self._clock() - CONDITION_SECONDS
        return sorted(code for code, at in self._recorded_at.items() if at > since)


T = TypeVar("T")

MIN_CACHE_SECONDS = 0.2
_CACHE_COST_FACTOR = 20.0  # cached for this many times its cost, so it takes at most a twentieth of the time
MAX_WAITING = 8


class TimedCache(Generic[T]):
    """The last value of an expensive query, valid for a time in proportion to its cost. For one event loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._answer: T | None = None
        self._valid_until = 0.0

    async def get(self, make: Callable[[], Awaitable[tuple[T, float]]]) -> T:
        """The last value while it is valid, else a new one. make: returns the value and its cost to the engine in seconds."""
        async with self._lock:
            if self._answer is None or time.monotonic() >= self._valid_until:
                self._answer, cost = await make()
                self._valid_until = time.monotonic() + max(MIN_CACHE_SECONDS, _CACHE_COST_FACTOR * cost)
            return self._answer


class SerialExecutor:
    """Runs jobs one after another. A job whose caller was cancelled still ends before the next one begins."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._waiting: set[asyncio.Task[Any]] = set()

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of a job. Raises ApiError 429 if too many wait already. Cancelling the call does not cancel the job."""
        if len(self._waiting) >= MAX_WAITING:
            raise ApiError(
                429,
                f"{MAX_WAITING} such requests are already waiting: try again later",
                code="too_many_requests",
                retry_after=1,
            )
        task = asyncio.create_task(self._run_locked(work))
        self._waiting.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    async def _run_locked(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async with self._lock:
            return await work()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._waiting.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it; the caller, if any, has it


MAX_STORED_RESPONSES = 16384  # however small


class StoppableExchange(Protocol):
    """An exchange in progress that can be ended with an error."""

    def stop(self, error: ApiError) -> None: ...


TEMPLATE_CHANGES_HEADER = "x-windlass-template-changes"


def report_template_changes(changes: Sequence[str]) -> None:
    """Add changes to the header that lists them: a request may render several prompts, as when turns are dropped."""
    if changes and (scope := current_request.get()) is not None:
        headers = response_headers(scope)
        known = headers.get(TEMPLATE_CHANGES_HEADER)
        headers[TEMPLATE_CHANGES_HEADER] = ",".join(sorted({*changes, *(known.split(",") if known else ())}))


class ServerState:
    """State that the routes share; one per app.

    draining: set it to refuse new generation requests with 503 while running ones continue.
    """

    def __init__(self, engine: EngineClient, tokenizer: Tokenizer, settings: ServerSettings) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.settings = settings
        self.callers = Callers((*map(ApiKey.plain, settings.api_keys), *settings.callers))
        self.adapters = AdapterRegistry(engine, settings)
        self.metrics = ServerMetrics(
            engine,
            names=settings.metrics_names,
            model_name=settings.served_model_name,
            max_adapters=settings.max_loras if settings.adapters or settings.lora_folder else 0,
            adapters=self.adapters.active_names,
        )
        if settings.callers:
            self.metrics.registry.register(CallerCollector(self.callers))
        self.conditions = HealthConditions()
        self.recorder = None if settings.record is None else WorkloadRecorder(settings.record)
        self.metrics.registry.register(RecordingCollector(self.recorder))
        self.tracing = _tracing(settings.otel_endpoint)
        self.draining = False
        self.created = int(time.time())
        self.text = TextService(tokenizer, settings, report_template_changes)
        # The token with which the model accepts a pair of texts, and possibly the refusing one; empty: it does not rank.
        self.rerank_answer_ids = (
            () if settings.ranking is None else rerank_answer_ids(tokenizer, settings.ranking.tokens)
        )
        self.thinking = ThinkingControl(settings.reasoning_parser, tokenizer)
        self.responses = ResponseStore(most=MAX_STORED_RESPONSES, max_bytes=settings.response_store_bytes)
        self.cache_view: TimedCache[bytes] = TimedCache()
        self.attention_executor = SerialExecutor()
        self._fingerprint: tuple[ModelInfo, str] | None = None
        self._exchanges: set[StoppableExchange] = set()
        self._serial = itertools.count()

    @property
    def in_flight(self) -> int:
        """Generation requests running or waiting, streams included."""
        return len(self._exchanges)

    def observe_event_loop_lag(self, lag: float) -> None:
        """Called about ten times a second with the delay of the event loop in seconds."""
        self.metrics.event_loop_lag.observe(lag)
        if lag >= STALL_SECONDS:
            self.conditions.mark("event_loop_stalled")
        self.conditions.update_count("engine_restarted", self.engine.restarts)
        self.conditions.update_count("text_process_lost", self.text.processes_lost)

    def admit(self) -> ModelInfo:
        """The loaded model, if a new generation request may start now. Raises ApiError 503 or 429 otherwise."""
        retry_after = self.settings.retry_after_seconds
        if self.draining:
            raise unavailable("the server is shutting down", code="draining", retry_after=retry_after)
        info = self.engine.info
        if info is None or self.engine.state != "ready":
            raise unavailable(f"the engine is {self.engine.state}", code="engine_unavailable", retry_after=retry_after)
        if self.in_flight >= self.settings.max_in_flight:
            raise ApiError(
                429,
                f"{self.in_flight} requests are in progress, the maximum of this server",
                code="too_many_requests",
                retry_after=retry_after,
            )
        return info

    def check_model(self, name: str | None) -> None:
        """Raise a 404 unless `name` is the served model (absent means the served model) or an adapter of it.

        With `--served-model-name '*'` any name is accepted.
        """
        if self.settings.any_model_name:
            return
        names = (*self.settings.model_names, *(adapter.source.name for adapter in self.adapters.listed()))
        if name is not None and name not in names:
            raise ApiError(
                404,
                f"the model {name[:256]!r} does not exist here: this server serves {' and '.join(map(repr, names[:8]))}",
                param="model",
                code="model_not_found",
            )

    def fingerprint(self, info: ModelInfo) -> str:
        """`system_fingerprint`: equal if equal requests with equal seeds get equal responses."""
        if self._fingerprint is None or self._fingerprint[0] is not info:
            settings = self.settings
            parts: tuple[object, ...] = (info.fingerprint, self.tokenizer.chat_template, settings.sampling)
            parts += (self.tokenizer.tool_template, settings.reasoning_parser, settings.tool_call_parser)
            parts += (sorted(settings.template_kwargs.items()),) if settings.template_kwargs else ()
            parts += (
                settings.context_overflow,
                settings.default_max_tokens,
                settings.completion_max_tokens,
                info.max_model_len,
            )
            self._fingerprint = info, "fp_" + hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
        return self._fingerprint[1]

    def fingerprint_with_adapter(self, info: ModelInfo, adapter: ServedAdapter | None) -> str:
        """`system_fingerprint` of requests with this adapter."""
        plain = self.fingerprint(info)
        known = None if adapter is None else self.adapters.info_of(adapter)
        return plain if known is None else "fp_" + hashlib.sha256((plain + known.digest).encode()).hexdigest()[:16]

    def register(self, exchange: StoppableExchange) -> None:
        """Count an exchange as in flight until `unregister`."""
        self._exchanges.add(exchange)

    def unregister(self, exchange: StoppableExchange) -> None:
        """Forget an exchange; unknown ones are ignored."""
        self._exchanges.discard(exchange)

    def abort_all(self) -> None:
        """End everything in flight: streams with an error event and [DONE], others with 503."""
        for exchange in tuple(self._exchanges):
            exchange.stop(
                unavailable(
                    "the server is shutting down before this request finished",
                    code="draining",
                    retry_after=self.settings.retry_after_seconds,
                )
            )

    def unique_id(self, request_id: str) -> str:
        """An engine request id: the client's id made unique, as clients may send an id twice."""
        return f"{request_id}-{next(self._serial)}"

    def close(self) -> None:
        """End the text processes, recording and tracing. The creator of the engine closes it."""
        self.text.close()
        if self.recorder is not None:
            self.recorder.close()
        if self.tracing is not None:
            self.tracing.close()


def _tracing(endpoint: str | None) -> Tracing | None:
    if endpoint is None:
        return None
    from windlass.server.observability.tracing import create_tracing

    return create_tracing(endpoint)


def state_of(request: Request) -> ServerState:
    """The state of the app that serves this request."""
    state: ServerState = request.app.state.windlass
    return state


def caller_of(request: Request) -> str:
    """The caller of a request for fairness: the API key if keys are required, else the address."""
    if state_of(request).settings.requires_key:
        return owner_of(request)
    return request.client.host if request.client is not None else ""


def owner_of(request: Request) -> str:
    """The owner of stored objects: a digest of the API key; empty if no keys are required."""
    return request.scope.get(CALLER) or ""


def loaded_model(state: ServerState) -> ModelInfo:
    """The loaded model. Raises ApiError 503 before the engine has loaded it."""
    info = state.engine.info
    if info is None:
        raise unavailable(
            f"the engine is {state.engine.state}",
            code="engine_unavailable",
            retry_after=state.settings.retry_after_seconds,
        )
    return info


def require_admin(request: Request) -> None:
    """Raise ApiError 403 unless the request's key is an administrator's."""
    if not state_of(request).callers.is_admin(owner_of(request)):
        raise ApiError(
            403, "this needs the key of an administrator: use one with admin = true", code="not_an_administrator"
        )
