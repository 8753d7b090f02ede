"""The adapters that an engine was asked to load: who waits for which, and which it has. Shared by the clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from windlass.engine.api.adapters import AdapterInfo, AdapterSource
from windlass.engine.api.config import EngineConfig
from windlass.engine.core.wire import AdapterLoaded, DropAdapter, LoadAdapter, Message
from windlass.engine.errors import EngineError


class AdapterCalls:
    """send, require_engine: see `RequestRouter`. config: names those that are loaded at the start."""

    def __init__(
        self, send: Callable[[Message], None], require_engine: Callable[[], None], config: EngineConfig
    ) -> None:
        self._send, self._require_engine = send, require_engine
        self._loaded = {source.adapter_id: source for source in config.adapters.sources}
        self._waiting: dict[int, tuple[AdapterSource, asyncio.Future[AdapterInfo]]] = {}

    @property
    def loaded(self) -> frozenset[int]:
        """The ids of those that there are."""
        return frozenset(self._loaded)

    async def load(self, source: AdapterSource) -> AdapterInfo:
        """See `EngineClient.load_adapter`."""
        self._require_engine()
        waiter: asyncio.Future[AdapterInfo] = asyncio.get_running_loop().create_future()
        self._waiting[source.adapter_id] = source, waiter
        self._send(LoadAdapter(source))
        try:
            return await waiter
        except asyncio.CancelledError:  # nobody would know of it
            self.drop(source.adapter_id)
            raise

    def drop(self, adapter_id: int) -> None:
        """See `EngineClient.drop_adapter`."""
        self._waiting.pop(adapter_id, None)
        self._loaded.pop(adapter_id, None)
        self._send(DropAdapter(adapter_id))

    def deliver(self, message: Message) -> bool:
        """Take a message about adapters; False if it is about something else."""
        if not isinstance(message, AdapterLoaded):
            return False
        source, waiter = self._waiting.pop(message.adapter_id, (None, None))
        if source is None or waiter is None:  # whoever asked for it went away
            self._send(DropAdapter(message.adapter_id))
        elif waiter.done():
            pass  # whoever asked for it is about to wake and to drop it
        elif isinstance(message.result, AdapterInfo):
            self._loaded[source.adapter_id] = source
            waiter.set_result(message.result)
        else:
            waiter.set_exception(message.result)
        return True

    def fail_all(self, make_error: Callable[[], EngineError]) -> None:
        """The engine is gone, and with it what it was loading."""
        waiting, self._waiting = self._waiting, {}
        for _, waiter in waiting.values():
            if not waiter.done():
                waiter.set_exception(make_error())

    def again(self, config: EngineConfig) -> EngineConfig:
        """The configuration of the next engine: with the adapters of the last one, as far as their files are still there."""
        sources = tuple(replace(source, required=False) for source in self._loaded.values())
        return replace(config, adapters=replace(config.adapters, sources=sources))
