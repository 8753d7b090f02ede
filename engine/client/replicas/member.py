"""One of several engines, as those who share it out see it."""

from __future__ import annotations

from windlass.engine.api.adapters import AdapterSource
from windlass.engine.client.process import ProcessClient
from windlass.engine.errors import EngineError


class Replica:
    """in_flight: samples of requests that it has to finish."""

    def __init__(self, number: int, client: ProcessClient) -> None:
        self.number, self.client = number, client
        self.in_flight = 0
        self._prepared: int | None = None  # restarts of the engine that has all that the others have

    @property
    def usable(self) -> bool:
        """Whether it takes requests: it has loaded, and every adapter that requests may name, if it could."""
        return self.client.state == "ready" and self._prepared == self.client.restarts

    def has(self, adapter_id: int | None) -> bool:
        """Whether requests with this adapter can run here: its files may have gone before this engine was started again."""
        return adapter_id is None or adapter_id in self.client.adapter_ids

    async def prepare(self, adapters: dict[int, AdapterSource]) -> str | None:
        """Take requests, once it has these adapters, which may change meanwhile. Returns what is amiss with one of them."""
        restarts, problem = self.client.restarts, None
        refused: set[int] = set()
        while missing := adapters.keys() - self.client.adapter_ids - refused:
            source = adapters[missing.pop()]
            try:
                await self.client.load_adapter(source)
            except EngineError as error:
                refused.add(source.adapter_id)
                problem = f"adapter {source.name}: {error}"
            if self.client.restarts != restarts or self.client.state != "ready":
                return problem
        for adapter_id in self.client.adapter_ids - adapters.keys():
            self.client.drop_adapter(adapter_id)
        self._prepared = restarts
        return problem
