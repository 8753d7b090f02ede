"""What one running app holds, made and put together here: the engine client, text work, callers, adapters, kept responses,
metrics, and the exchanges in progress.

Lives on `app.state.windlass`. `startup` reads `in_flight`, sets `draining` and calls `abort_all`. Knows no route, and of bodies
only the model that they name.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from typing import TYPE_CHECKING, Protocol

from windlass.engine.client.engine_client import EngineClient
from windlass.engine.interface.model_info import ModelInfo
from windlass.server.errors import ApiError, unavailable
from windlass.server.exchange.adapters import ServedAdapter, ServedAdapters
from windlass.server.exchange.caller_metrics import CallerCollector
from windlass.server.exchange.callers import Callers
from windlass.server.exchange.conditions import Conditions
from windlass.server.exchange.metrics import ServerMetrics
from windlass.server.exchange.recent import OneAtATime, Recent
from windlass.server.exchange.recording import RecordingCollector, WorkloadRecorder
from windlass.server.exchange.response_store import ResponseStore
from windlass.server.http.loop_watch import STALL
from windlass.server.options.key_file import ApiKey
from windlass.server.options.settings import ServerSettings
from windlass.server.text.answer_tokens import answer_ids
from windlass.server.text.parsing.reasoning.model import ThinkingModel
from windlass.server.text.service import TextService

if TYPE_CHECKING:
    from windlass.server.exchange.tracing import Tracing
    from windlass.server.text.tokenizer import Tokenizer


MOST_RESPONSES = 16384  # kept for later requests, however small


class Stoppable(Protocol):
    """An exchange in progress that can be ended with an error."""

    def stop(self, error: ApiError) -> None: ...


class ServerState:
    """Everything the routes share. One per app; there is no module-level state.

    draining: set it to refuse new generation work with 503 while running work goes on.
    """

    def __init__(self, engine: EngineClient, tokenizer: Tokenizer, settings: ServerSettings) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.settings = settings
        self.callers = Callers((*map(ApiKey.plain, settings.api_keys), *settings.callers))
        self.adapters = ServedAdapters(engine, settings)
        self.metrics = ServerMetrics(
            engine,
            names=settings.metrics_names,
            model_name=settings.served_model_name,
            max_adapters=settings.max_loras if settings.adapters or settings.lora_folder else 0,
            adapters=self.adapters.running,
        )
        if settings.callers:
            self.metrics.registry.register(CallerCollector(self.callers))
        self.conditions = Conditions()
        self.recorder = None if settings.record is None else WorkloadRecorder(settings.record)
        self.metrics.registry.register(RecordingCollector(self.recorder))
        self.tracing = _tracing(settings.otel_endpoint)
        self.draining = False
        self.created = int(time.time())
        self.text = TextService(tokenizer, settings)
        # By which token the model judges a pair of texts, and perhaps by which other one; empty: it does not.
        self.answer_ids = () if settings.ranking is None else answer_ids(tokenizer, settings.ranking.tokens)
        self.thinking = ThinkingModel(settings.reasoning_parser, tokenizer)
        self.responses = ResponseStore(most=MOST_RESPONSES, max_bytes=settings.response_store_bytes)
        self.shown_cache: Recent[bytes] = Recent()
        self.attention_turn = OneAtATime()
        self._fingerprint: tuple[ModelInfo, str] | None = None
        self._exchanges: set[Stoppable] = set()
        self._serial = itertools.count()

    @property
    def in_flight(self) -> int:
        """Generation requests running or waiting, streams included."""
        return len(self._exchanges)

    def beat(self, late: float) -> None:
        """Called ten times a second or so, with the seconds by which the event loop was late."""
        self.metrics.event_loop_lag.observe(late)
        if late >= STALL:
            self.conditions.note("event_loop_stalled")
        self.conditions.follow("engine_restarted", self.engine.restarts)
        self.conditions.follow("text_process_lost", self.text.processes_lost)

    def admit(self, caller: str = "") -> ModelInfo:
        """The loaded model if new generation work of `caller` may start now; raises ApiError 503 or 429 otherwise."""
        retry_after = self.settings.retry_after_seconds
        if self.draining:
            raise unavailable("the server is shutting down", code="draining", retry_after=retry_after)
        info = self.engine.info
        if info is None or self.engine.state != "ready":
            raise unavailable(f"the engine is {self.engine.state}", code="engine_unavailable", retry_after=retry_after)
        if self.in_flight >= self.settings.max_in_flight:
            raise ApiError(
                429,
                f"{self.in_flight} requests are in progress, the most this server takes",
                type="rate_limit_error",
                code="too_many_requests",
                retry_after=retry_after,
            )
        self.callers.admit(caller)
        return info

    def check_model(self, name: str | None) -> None:
        """Raise a 404 unless `name` is the served model (absent means the served model) or an adapter of it."""
        names = (*self.settings.model_names, *(adapter.source.name for adapter in self.adapters.listed()))
        if name is not None and name not in names:
            raise ApiError(
                404,
                f"the model {name[:256]!r} does not exist here: this server serves {' and '.join(map(repr, names[:8]))}",
                param="model",
                code="model_not_found",
            )

    def fingerprint(self, info: ModelInfo) -> str:
        """`system_fingerprint`: alike where equal requests with equal seeds are answered in the same way."""
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

    def adapted_fingerprint(self, info: ModelInfo, adapter: ServedAdapter | None) -> str:
        """`system_fingerprint` of requests with this adapter."""
        plain = self.fingerprint(info)
        known = None if adapter is None else self.adapters.info_of(adapter)
        return plain if known is None else "fp_" + hashlib.sha256((plain + known.digest).encode()).hexdigest()[:16]

    def register(self, exchange: Stoppable) -> None:
        """Count an exchange as in flight until `unregister`."""
        self._exchanges.add(exchange)

    def unregister(self, exchange: Stoppable) -> None:
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
        """An engine request id: the caller's id made unique, as callers may send one id twice."""
        return f"{request_id}-{next(self._serial)}"

    def close(self) -> None:
        """End the text processes and the recording. The engine belongs to whoever made it."""
        self.text.close()
        if self.recorder is not None:
            self.recorder.close()
        if self.tracing is not None:
            self.tracing.close()


def _tracing(endpoint: str | None) -> Tracing | None:
    if endpoint is None:
        return None
    from windlass.server.exchange.tracing import tracing_to  # an extra, which starts refuse to do without

    return tracing_to(endpoint)
