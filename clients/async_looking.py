"""The methods of the asynchronous client for people who look on: curves, cache, attention. No rule lives here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from windlass.clients import _calls as calls
from windlass.clients._calls import Call
from windlass.clients.looking_types import AttentionMap, CachePages
from windlass.clients.rotary_types import RotaryCurves

T = TypeVar("T")


class AsyncLookingMethods:
    """What `AsyncClient` has to look on with."""

    async def curves(
        self,
        rope_scaling: Mapping[str, Any] | str | None = None,
        *,
        positions: Sequence[int] = (),
        distances: Sequence[int] = (),
        length: int | None = None,
        group: str | None = None,
    ) -> RotaryCurves:
        """See `Client.curves`."""
        fixed = {"rope_scaling": rope_scaling, "positions": list(positions), "distances": list(distances)}
        return await self._run(calls.curves({**fixed, "length": length, "group": group}))

    async def cache(self) -> CachePages:
        """See `Client.cache`."""
        return await self._run(calls.cache())

    async def attention(
        self, prompt: str, layer: int = 0, head: int = 0, *, rope_scaling: Mapping[str, Any] | str | None = None
    ) -> AttentionMap:
        """See `Client.attention`."""
        fixed = {"prompt": prompt, "layer": layer, "head": head, "rope_scaling": rope_scaling}
        return await self._run(calls.attention(fixed))

    async def _run(self, call: Call[T]) -> T:
        raise NotImplementedError
