"""The adapters that an engine was asked to load: who waits for which, and which it has. Shared by the clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from windlass.engine.api.adapters import AdapterInfo, AdapterSource
from windlass.engine.api.config import EngineConfig
from windlass.engine.core.wire import AdapterLoaded, DropAdapter, LoadAdapter, Message, Ready
from windlass.engine.errors import EngineError, RequestError


@dataclass(slots=True)
class _Loading:
    """An adapter that the engine is to load. callers: those who know of it."""

    source: AdapterSource
    result: asyncio.Future[AdapterInfo]
    callers: int = 0

    def end(self, error: EngineError | None = None) -> None:
        """It comes to nothing; nobody may be there to be told."""
        if not self.result.done():
            self.result.set_exception(error or EngineError("nobody waits for this adapter"))
        self.result.exception()


class AdapterCalls:
    """send, require_engine: see `RequestRouter`. config: names those that are loaded at the start."""

    def __init__(
        self, send: Callable[[Message], None], require_engine: Callable[[], None], config: EngineConfig
    ) -> None:
        self._send, self._require_engine = send, require_engine
        self._loaded = {source.adapter_id: source for source in config.adapters.sources}
        self._loading: dict[int, _Loading] = {}

    @property
    def loaded(self) -> frozenset[int]:
        """The ids of those that there are."""
        return frozenset(self._loaded)

    async def load(self, source: AdapterSource) -> AdapterInfo:
        """See `EngineClient.load_adapter`. Whoever asks for one that is being loaded waits for the same."""
        self._require_engine()
        loading = self._loading.get(source.adapter_id)
        if loading is None:
            loading = self._loading[source.adapter_id] = _Loading(source, asyncio.get_running_loop().create_future())
            self._send(LoadAdapter(source))
        loading.callers += 1
        try:
            return await asyncio.shield(loading.result)
        except asyncio.CancelledError:
            loading.callers -= 1
            if not loading.callers:  # nobody knows of it any more
                loading.end()
                self.drop(source.adapter_id)
            raise

    def drop(self, adapter_id: int) -> None:
        """See `EngineClient.drop_adapter`."""
        if (loading := self._loading.pop(adapter_id, None)) is not None:
            loading.end(RequestError("the adapter was unloaded while it was loaded", "lora_name", "model_not_found"))
        self._loaded.pop(adapter_id, None)
        self._send(DropAdapter(adapter_id))

    def deliver(self, message: Message) -> bool:
        """Take a message about adapters; False if it is about something else, too."""
        if isinstance(message, Ready):  # of one that was started again, perhaps, and could not read all of them
            there = {info.adapter_id for info in message.info.adapters}
            self._loaded = {adapter_id: source for adapter_id, source in self._loaded.items() if adapter_id in there}
        if not isinstance(message, AdapterLoaded):
            return False
        loading = self._loading.pop(message.adapter_id, None)
        if loading is None:  # whoever asked for it went away
            self._send(DropAdapter(message.adapter_id))
        elif isinstance(message.result, AdapterInfo):
            self._loaded[message.adapter_id] = loading.source
            loading.result.set_result(message.result)
        else:
            loading.end(message.result)
        return True

    def fail_all(self, make_error: Callable[[], EngineError]) -> None:
        """The engine is gone, and with it what it was loading."""
        gone, self._loading = self._loading, {}
        for loading in gone.values():
            loading.end(make_error())

    def restart_config(self, config: EngineConfig) -> EngineConfig:
        """The configuration of the next engine: with the adapters of the last one, as far as their files are still there."""
        sources = tuple(replace(source, required=False) for source in self._loaded.values())
        return replace(config, adapters=replace(config.adapters, sources=sources))
